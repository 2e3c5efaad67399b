"""`gate`: turn heads of any model off, down or up, or put something else in the place of what they give.

The gate multiplies a head's output before the output projection reads it (Michel, Levy and Neubig 2019, equation 2).
The model attends as it did, on its own kernels: nothing here needs the weights. A norm of the heads that stands between
attention and that projection, as in differential attention, comes after the gate.
"""

import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.analysis.recording import require_module
from headwise.analysis.replacements import Replacement
from headwise.checks import finite_number, flag
from headwise.errors import InputError
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, Change, HeadOutput, Interceptor, Site
from headwise.intercept.layer_index import layer_numbers, module_path_of_layer
from headwise.shapes import Bool, Float

Value = float | Tensor | Replacement

POSITIONS = "whole numbers, or a boolean tensor (queries,) or (batch, queries)"


class Gated(NamedTuple):
    """A head or group of one module, or None for all of them, and a value for it."""

    head: int | None
    value: Value


class Gates(Interceptor):
    """A visitor that changes what heads give.

    Attributes:
        of: what is gated, by the path of the module that attends; it may be set between two runs.
    """

    def __init__(self, of: Mapping[str, list[Gated]], *, groups: bool = False, positions: Tensor | None = None) -> None:
        self.of, self._groups, self._positions = of, groups, positions
        self._ran = False
        self._seen: dict[Site, Call] = {}
        self._missed: set[str] = set()

    def on_module_call(self, path: str) -> None:
        """See `Interceptor`."""
        self._ran = True

    def on_unreadable(self, path: str) -> None:
        """See `Interceptor`."""
        self._missed.add(path)

    def change(self, call: Call) -> Change | None:
        """See `Interceptor`."""
        self._seen.setdefault(call.site, call)
        gated = self.of.get(call.site.path)
        return None if not gated else lambda attended: self._change(gated, attended, call)

    def _change(self, gated: list[Gated], attended: HeadOutput, call: Call) -> Tensor:
        """The output with every gate of this module: what takes its place first, which numbers then multiply."""
        out = attended.out
        for head, value in gated:
            if isinstance(value, Replacement):
                start, stop = self._range(head, call)
                new = value.output(attended, call)[:, start:stop].to(out)
                out = out.slice_scatter(new.expand_as(out[:, start:stop]), 1, start, stop)
        for head, value in gated:
            if not isinstance(value, Replacement):
                out = out * self._factor(head, value, out, call)
        if self._positions is not None:
            out = torch.where(_where(self._positions, call)[:, None, :, None], out, attended.out)
        return out

    def _number(self, call: Call) -> int:
        """How many heads there are, or groups of them."""
        return call.kv_heads if self._groups else call.grid.heads

    def _range(self, head: int | None, call: Call) -> tuple[int, int]:
        """The first head that a gate is for, and the one after the last."""
        number = self._number(call)
        if head is None:
            return 0, call.grid.heads
        if not 0 <= head < number:
            kind = "key/value group" if self._groups else "head"
            raise InputError(kind, expected=f"one of 0 to {number - 1} in {call.site.path}", got=head)
        size = call.grid.heads // number
        return head * size, (head + 1) * size

    def _factor(
        self, head: int | None, value: float | Tensor, out: Tensor, call: Call
    ) -> Float[Tensor, "#batch heads #queries 1"]:
        """What multiplies the output: 1 at the heads that the gate is not for."""
        start, stop = self._range(head, call)
        batch, number, queries = call.grid.batch, self._number(call), call.grid.queries
        given = value.to(out) if isinstance(value, Tensor) else out.new_full((), value)
        factor = _by_head(given, head)
        sizes = (1, batch), (1, number if head is None else 1), (1, queries)
        if any(size not in each for size, each in zip(factor.shape, sizes, strict=True)):
            forms = f"of shape {(number,)}, {(batch, number)} or {(batch, number, queries)}"
            forms = forms if head is None else f"that broadcasts to (batch, queries) = {(batch, queries)}"
            raise InputError("value", expected=f"a number, or a tensor {forms}", got=f"shape {tuple(given.shape)}")
        factor = factor.repeat_interleave((stop - start) // factor.shape[1], 1)
        ones = factor.new_ones(len(factor), call.grid.heads, factor.shape[2])
        return ones.slice_scatter(factor, 1, start, stop)[..., None]

    @property
    def missed(self) -> list[str]:
        """Modules that are gated, and in which something was computed that looks like attention and was not changed."""
        return sorted(self._missed.intersection(self.of))

    def require_seen(self, model: nn.Module, numbered: Mapping[int, str]) -> None:
        """Refuse gates of modules that ran no attention, and layers whose number the run has shown to be another's."""
        if not self._ran:
            return
        paths = {path for path, _ in self._seen}
        for path in self.of:
            if path not in paths:
                raise InputError("values", expected="modules in which attention is seen", got=f"none in {path}")
        order = {path: place for place, (path, _) in enumerate(model.named_modules())}
        calls = [self._seen[site] for site in sorted(self._seen, key=lambda site: (order[site.path], site.cross))]
        for number, call in zip(layer_numbers([call.layer for call in calls]), calls, strict=True):
            if numbered.get(number, call.site.path) != call.site.path:
                got = f"{numbered[number]}, where the model ran {call.site.path}"
                remedy = "name modules by their paths, as watch(model) tells"
                raise InputError("layer", expected=f"the module of layer {number}", got=got, remedy=remedy)


def _by_head(value: Tensor, head: int | None) -> Float[Tensor, "#batch #heads #queries"]:
    """A value of one head, which may have axes of batch and queries, or of a layer, with all three axes."""
    if head is not None:
        return value[(None,) * (2 - value.ndim)][:, None]
    value = value[None] if value.ndim < 2 else value
    return value[(..., *(None,) * (3 - value.ndim))]


def _where(positions: Tensor, call: Call) -> Bool[Tensor, "#batch queries"]:
    """At which queries of a call the gate acts."""
    batch, queries = call.grid.batch, call.grid.queries
    positions = positions.to(call.grid.device)
    if positions.dtype == torch.bool:
        there = positions[(None,) * (2 - positions.ndim)]
        if there.shape[0] not in (1, batch) or there.shape[1] != queries:
            raise InputError(
                "positions", expected=f"shape {(queries,)} or {(batch, queries)}", got=tuple(positions.shape)
            )
        return there
    if not ((-queries <= positions) & (positions < queries)).all():
        raise InputError("positions", expected=f"from {-queries} to {queries - 1}", got=positions.tolist())
    there = torch.zeros(1, queries, dtype=torch.bool, device=call.grid.device)
    there[:, positions] = True
    return there


@contextmanager
def gate(
    model: Any,
    values: Mapping[Any, Value],
    *,
    groups: bool = False,
    positions: Iterable[int] | Tensor | None = None,
) -> Iterator[None]:
    """Within the context, heads of the model give what the values say.

    Contexts may be nested: an inner one changes what an outer one made of a head. `watch` sees heads as they attend,
    before any gate.

    Args:
        model: any module that `watch` can see into.
        values: by `(layer, head)`, zero-based, or by `layer` for all its heads. A layer is its number, or the path of
            the module that attends. A value is a number, which multiplies the head's output; a tensor, which may learn:
            of one head, one that broadcasts to `(batch, queries)`, and of a layer a number or one of shape `(heads,)`,
            `(batch, heads)` or `(batch, heads, queries)`; or what takes the output's place: `zero()`, `uniform()`,
            `mean(dataset)`, `resample(batch)`, `patch(run)`. Where both are for a head, the number multiplies what
            stands there.
        groups: whether heads are counted by the keys and values that they share: `(layer, group)` is all of a group,
            and a layer's tensor has one number for each. Where a model repeats them itself, each head is a group.
        positions: only at these queries of a call, negative ones from its end, or where a boolean tensor `(queries,)`
            or `(batch, queries)` is True; everywhere by default.

    Raises:
        InputError: a layer, a head or a position that is not there; a value of another kind or shape; no module; a
            compiled one; when the context ends, if the model ran and no attention was seen in one of the modules, or
            if it has shown that a layer's number is another's.

    Warns:
        UserWarning: when the context ends, of modules in which something that looks like attention was not changed.
    """
    require_module(model)
    named, numbered = _by_module(model, values)
    at = _positions(positions)
    replacements = {id(value): value for _, value in chain(*named.values()) if isinstance(value, Replacement)}
    prepared: dict[int, Value] = {}
    for key, replacement in replacements.items():
        modules = [path for path, gated in named.items() if any(each.value is replacement for each in gated)]
        prepared[key] = replacement.prepare(model, modules)
    of = {path: [Gated(head, prepared.get(id(value), value)) for head, value in each] for path, each in named.items()}
    gates = Gates(of, groups=flag("groups", groups), positions=at)
    with intercepted(model, gates):
        yield
    gates.require_seen(model, numbered)
    if gates.missed:
        warnings.warn(f"not all attention of these modules was changed: {', '.join(gates.missed)}", stacklevel=3)


def _by_module(model: nn.Module, values: Mapping[Any, Value]) -> tuple[dict[str, list[Gated]], dict[int, str]]:
    """The gates of each module, and which module is meant by which number."""
    if not isinstance(values, Mapping):
        raise InputError("values", expected="a mapping {(layer, head): value}", got=type(values).__name__)
    named: dict[str, list[Gated]] = {}
    numbered: dict[int, str] = {}
    for key, value in values.items():
        layer, head = key if isinstance(key, tuple) and len(key) == 2 else (key, None)
        layer, index = layer if isinstance(layer, str) else _whole(layer), _whole(head)
        if layer is None or (head is not None and index is None):
            raise InputError("values", expected="keys (layer, head) or layer", got=repr(key))
        path = module_path_of_layer(model, layer)
        if isinstance(layer, int):
            numbered[layer] = path
        named.setdefault(path, []).append(Gated(index, _checked(value, index)))
    return named, numbered


def _whole(value: Any) -> int | None:
    """The number, if it is a whole one."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


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
    if isinstance(value, bool) or not isinstance(value, Real):
        expected = "a number, a tensor, or one of hw.replacements: zero(), uniform(), mean(), resample(), patch()"
        raise InputError("value", expected=expected, got=repr(value))
    return finite_number("value", value)


def _positions(positions: Any) -> Tensor | None:
    """Positions as a tensor of whole numbers, or a boolean one."""
    if positions is None:
        return None
    try:
        found = positions if isinstance(positions, Tensor) else torch.as_tensor(list(positions))
    except (TypeError, ValueError, RuntimeError):
        raise InputError("positions", expected=POSITIONS, got=repr(positions)) from None
    found = found if found.numel() or found.dtype == torch.bool else found.long()  # an empty list is one of floats
    most = 2 if found.dtype == torch.bool else 1
    if found.is_floating_point() or found.is_complex() or not 1 <= found.ndim <= most:
        raise InputError("positions", expected=POSITIONS, got=f"{found.dtype} of shape {tuple(found.shape)}")
    return found
