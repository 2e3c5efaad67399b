"""`gate`: turn heads of any model off, down or up, or put something else in the place of what they give.

The gate multiplies a head's output before the output projection reads it (Michel, Levy and Neubig 2019, equation 2).
The model attends as it did, on its own kernels: nothing here needs the weights.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.problem import gate_factor
from headwise.checks import finite_number
from headwise.errors import InputError
from headwise.heads.outputs import require_module
from headwise.heads.replacements import Replacement
from headwise.models.intercept import intercepted
from headwise.models.layers import module_of, numbers
from headwise.models.running import Attended, Call, Change, Look
from headwise.shapes import Bool, Float

Value = float | Tensor | Replacement


@dataclass(frozen=True)
class Gated:
    """A value and the heads of one module that it is for; all of them where `head` is None."""

    head: int | None
    value: Value


class Gates:
    """A visitor that changes what heads give.

    Attributes:
        of: what is gated, by the path of the module that attends; it may be set between two runs.
    """

    def __init__(self, of: Mapping[str, list[Gated]], *, groups: bool = False, positions: Tensor | None = None) -> None:
        self.of, self._groups, self._positions = of, groups, positions
        self._calls = threading.local()
        self.seen: dict[tuple[str, bool], Call] = {}

    def starts(self) -> None:
        """See `Visitor`: the calls of a run are counted anew."""
        self._calls.number = {}

    def runs(self, path: str) -> None:
        """See `Visitor`."""

    def misses(self, path: str) -> None:
        """See `Visitor`."""

    def sees(self, call: Call) -> Look | None:
        """See `Visitor`."""
        return None

    def changes(self, call: Call) -> Change | None:
        """See `Visitor`."""
        self.seen.setdefault((call.path, call.cross), call)
        gated = self.of.get(call.path)
        if not gated:
            return None
        number = self._calls.number.get((call.path, call.cross), 0)
        self._calls.number[call.path, call.cross] = number + 1
        return lambda attended: self._change(gated, attended, call, number)

    def _change(self, gated: list[Gated], attended: Attended, call: Call, number: int) -> Tensor:
        """The output with every gate of this module, the numbers first."""
        out = attended.out
        for each in gated:
            if not isinstance(each.value, Replacement):
                out = out * self._factor(each, out, call)
        for each in gated:
            if isinstance(each.value, Replacement):
                heads = torch.tensor(self._heads(each, call), device=out.device)
                new = each.value.output(attended, call, number)[:, heads]
                out = out.index_copy(1, heads, new.to(out).expand_as(out[:, heads]))
        if self._positions is not None:
            out = torch.where(_where(self._positions, call)[:, None, :, None], out, attended.out)
        return out

    def _heads(self, gated: Gated, call: Call) -> list[int]:
        """Which heads a gate is for: those of a group share keys and values."""
        heads, groups = call.grid.heads, call.kv_heads
        number = groups if self._groups else heads
        if gated.head is None:
            return list(range(heads))
        if not 0 <= gated.head < number:
            kind = "key/value group" if self._groups else "head"
            raise InputError(kind, expected=f"one of 0 to {number - 1} in {call.path}", got=gated.head)
        size = heads // number
        return list(range(gated.head * size, (gated.head + 1) * size))

    def _factor(self, gated: Gated, out: Tensor, call: Call) -> Float[Tensor, "#batch heads #queries 1"]:
        """What multiplies the output, 1 at the heads that the gate is not for."""
        heads = self._heads(gated, call)
        if gated.head is None and isinstance(gated.value, Tensor) and gated.value.ndim:
            if self._groups and gated.value.shape[gated.value.ndim > 1] == call.kv_heads:
                size = call.grid.heads // call.kv_heads
                return gate_factor(gated.value.repeat_interleave(size, int(gated.value.ndim > 1)), out)
            return gate_factor(gated.value, out)
        value = gated.value if isinstance(gated.value, Tensor) else torch.tensor(gated.value)
        batch, queries = call.grid.batch, call.grid.queries
        value = value.to(out)[(None,) * (2 - value.ndim)]
        if value.shape[0] not in (1, batch) or value.shape[1] not in (1, queries):
            expected = f"a number, or a tensor that broadcasts to (batch, queries) = {(batch, queries)}"
            raise InputError("value", expected=expected, got=f"shape {tuple(value.shape)}")
        factor = value.new_ones(value.shape[0], call.grid.heads, value.shape[1])
        index = torch.tensor(heads, device=out.device)
        return factor.index_copy(1, index, value[:, None].expand(-1, len(heads), -1))[..., None]

    def require_seen(self, numbered: Mapping[int, str]) -> None:
        """Refuse gates of modules that ran no attention, and layers whose number the run has shown to be another's."""
        if not self.seen:
            return
        paths = {path for path, _ in self.seen}
        for path in self.of:
            if path not in paths:
                raise InputError("values", expected="modules in which attention is seen", got=f"none in {path}")
        sites = list(self.seen.values())
        for number, site in zip(numbers([site.layer for site in sites]), sites, strict=True):
            if numbered.get(number, site.path) != site.path:
                got = f"{numbered[number]}, where the model ran {site.path}"
                remedy = "name modules by their paths, as watch(model) tells"
                raise InputError("layer", expected=f"the module of layer {number}", got=got, remedy=remedy)


def _where(positions: Tensor, call: Call) -> Bool[Tensor, "#batch queries"]:
    """At which queries of a call the gate acts."""
    queries = call.grid.queries
    if positions.dtype == torch.bool:
        there = positions.to(call.grid.device)[(None,) * (2 - positions.ndim)]
        if there.shape[0] not in (1, call.grid.batch) or there.shape[1] != queries:
            expected = f"shape {(queries,)} or {(call.grid.batch, queries)}"
            raise InputError("positions", expected=expected, got=tuple(positions.shape))
        return there
    if len(positions) and not -queries <= int(positions.min()) <= int(positions.max()) < queries:
        raise InputError("positions", expected=f"from {-queries} to {queries - 1}", got=positions.tolist())
    there = torch.zeros(1, queries, dtype=torch.bool, device=call.grid.device)
    there[:, positions.to(call.grid.device)] = True
    return there


@contextmanager
def gate(
    model: Any,
    values: Mapping[Any, Value],
    *,
    groups: bool = False,
    positions: Iterable[int] | Tensor | None = None,
) -> Iterator[None]:
    """Within the context, heads of the model give what the values say. Contexts may be nested, also with `watch`.

    Args:
        model: any module that `watch` can see into.
        values: by `(layer, head)`, zero-based, or by `layer` for all its heads. A layer is its number, or the path of
            the module that attends. A value is a number, which multiplies the head's output; a tensor, which may learn:
            of one head, one that broadcasts to `(batch, queries)`, and of a layer a number or one of shape `(heads,)`,
            `(batch, heads)` or `(batch, heads, queries)`; or what takes the output's place: `zero()`, `uniform()`,
            `mean(dataset)`, `resample(batch)`, `patch(run)`.
        groups: whether heads are counted by the keys and values that they share: `(layer, group)` is all of a group.
        positions: only at these queries of a call, negative ones from its end, or where a boolean tensor `(queries,)`
            or `(batch, queries)` is True; everywhere by default.

    Raises:
        InputError: a layer or a head that is not there; a value of another kind or shape; no module; a compiled one;
            when the context ends, if the model ran and no attention was seen in one of the modules.
    """
    require_module(model)
    named, numbered = _by_module(model, values)
    prepared = {id(value): value for value in _replacements(named)}
    for key, value in prepared.items():
        modules = [path for path, each in named.items() if any(gated.value is value for gated in each)]
        prepared[key] = value.prepare(model, modules)
    of = {
        path: [Gated(each.head, prepared.get(id(each.value), each.value)) for each in gated]
        for path, gated in named.items()
    }
    gates = Gates(of, groups=groups, positions=_positions(positions))
    with intercepted(model, gates):
        yield
    gates.require_seen(numbered)


def _by_module(model: nn.Module, values: Mapping[Any, Value]) -> tuple[dict[str, list[Gated]], dict[int, str]]:
    """The gates of each module, and which module is meant by which number."""
    if not isinstance(values, Mapping):
        raise InputError("values", expected="a mapping {(layer, head): value}", got=type(values).__name__)
    named: dict[str, list[Gated]] = {}
    numbered: dict[int, str] = {}
    for key, value in values.items():
        layer, head = key if isinstance(key, tuple) and len(key) == 2 else (key, None)
        if not (_is_number(layer) or isinstance(layer, str)) or not (head is None or _is_number(head)):
            raise InputError("values", expected="keys (layer, head) or layer", got=repr(key))
        path = module_of(model, layer)
        if isinstance(layer, int):
            numbered[layer] = path
        named.setdefault(path, []).append(Gated(head, _checked(value, head)))
    return named, numbered


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _checked(value: Any, head: int | None) -> Value:
    """The value, if it is one."""
    if isinstance(value, Replacement):
        return value
    if isinstance(value, Tensor):
        most = 2 if head is not None else 3
        if not value.is_floating_point() or value.ndim > most:
            got = f"{value.dtype} of shape {tuple(value.shape)}"
            raise InputError("value", expected=f"a float tensor of at most {most} dimensions", got=got)
        return value
    if not isinstance(value, int | float):
        expected = "a number, a tensor, or one of zero(), uniform(), mean(), resample(), patch()"
        raise InputError("value", expected=expected, got=type(value).__name__)
    return finite_number("value", value)


def _replacements(named: Mapping[str, list[Gated]]) -> Iterator[Replacement]:
    for gated in named.values():
        yield from (each.value for each in gated if isinstance(each.value, Replacement))


def _positions(positions: Any) -> Tensor | None:
    """Positions as a tensor of whole numbers, or a boolean one."""
    if positions is None:
        return None
    try:
        found = positions if isinstance(positions, Tensor) else torch.tensor(list(positions))
    except (TypeError, ValueError, RuntimeError):
        raise InputError("positions", expected="whole numbers, or a boolean tensor", got=repr(positions)) from None
    whole = not found.is_floating_point() and found.ndim == 1
    if not whole and not (found.dtype == torch.bool and found.ndim in (1, 2)):
        got = f"{found.dtype} of shape {tuple(found.shape)}"
        raise InputError("positions", expected="whole numbers, or a boolean tensor", got=got)
    return found
