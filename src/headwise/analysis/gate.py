"""Gates on the heads of any model: the `gate` context manager, and the interceptor that applies gates and replacements.

A gate multiplies a head's output before the output projection (Michel, Levy and Neubig 2019, equation 2). The model
keeps its own attention kernels; attention weights are not needed.
"""

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.analysis.replacements import Replacement
from headwise.checks import finite_number, flag, named_head, require_module
from headwise.errors import InputError
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, Change, HeadOutput, Interceptor, SiteKey
from headwise.intercept.layer_index import is_inside, layer_numbers, module_paths_of_layer
from headwise.intercept.sequences_of_calls import QueryParts
from headwise.shapes import Bool, Float

GateValue = float | Tensor | Replacement
"""Factor that multiplies a head's output, or a replacement of this output."""

POSITIONS = "whole numbers, or a boolean tensor (queries,) or (batch, queries)"


class HeadGate(NamedTuple):
    """Gate of one head, of one key/value group (heads with the same keys and values), or of all heads of an attention
    module. It is a factor by which the head outputs are multiplied, or a replacement of these outputs.

    Attributes:
        head: zero-based index of the head or group; None for all heads.
        value: factor of the output, or the replacement of the output.
        layer: layer number by which the user named the module; None if the user named it by its path. If several
            modules have this layer number, the gate is applied in the first of these modules that attends.
    """

    head: int | None
    value: GateValue
    layer: int | None = None


@contextmanager
def gate(
    model: Any,
    values: Mapping[Any, GateValue],
    *,
    groups: bool = False,
    positions: Iterable[int] | Tensor | None = None,
    sites: Iterable[Any] = (),
) -> Iterator[None]:
    """Multiply the outputs of heads by factors, or replace them, before the output projection, while the context is
    active. `values` maps `(layer, head)`, or a layer for all its heads, to a factor or a replacement. `positions`
    selects the query positions at which outputs are changed, by default all.

    With o_h the output of head h (attention weights times values) and W_h its columns of the output projection, the
    attention module computes

        sum_h W_h (g_h o_h) + b

    where g_h is the gate's factor, 1 without a gate (Michel, Levy and Neubig 2019, eq. 2). A replacement replaces o_h.

        with hw.gate(model, {(3, 5): 0.0, (4, 1): hw.replacements.mean(texts), 7: 0.5}):
            model(**inputs)     # head 3.5 is off, 4.1 is replaced by its mean, and layer 7 is halved

    The model runs on its own attention kernels, with gradients, caches and generation. Contexts can be nested: an inner
    gate changes the output of an outer one. `watch` reports attention before gates. A norm of the heads between
    attention and the output projection, as in differential attention, is applied after the gate.

    Args:
        model: any module that `watch` supports.
        values: gates by `(layer, head)`, zero-based, or by `layer` for all its heads. A layer is its number or the path
            of its attention module. A value is

            - a number, which multiplies the head's output;
            - a float tensor, which may require gradients. For one head it broadcasts to `(batch, queries)`. For a layer
              its shape is `()`, `(heads,)`, `(batch, heads)` or `(batch, heads, queries)`;
            - one of `hw.replacements`: `zero()`, `uniform()`, `mean(dataset)`, `resample(batch)`, `patch(run)`.

            Several values of one head are all applied: replacements first, in their order, and then factors.
        groups: count heads by key/value group: `(layer, group)` is all heads of a group, and a tensor of a layer has
            one number per group. In a model that repeats keys and values itself, each head is a group.
        positions: gate only these queries of each call: indices, negative ones from the end, or a boolean tensor
            `(queries,)` or `(batch, queries)`. All queries by default. A module must attend with all queries of a call
            at once, in the order of tokens.
        sites: `Site` objects, which state what cannot be derived about the attention of a module, as in `watch`.

    Raises:
        InputError: a layer, head or position does not exist; a value has another type or shape; `model` is not a
            module, or is compiled. While the model runs: a gated module computes something like attention that cannot
            be changed. At the end of the context, if the model ran: no attention was intercepted in a gated
            module or a module of `sites`, or the run showed that a layer's number is another module's.
    """
    require_module(model)
    gates = _gates_by_module(model, values)
    gated_positions = _positions_tensor(positions)
    gates = _prepared(gates, model)
    interceptor = GateInterceptor(gates, groups=flag("groups", groups), positions=gated_positions)
    sites = list(sites)
    with intercepted(model, interceptor, sites, "hw.gate"):
        yield
    interceptor.require_intercepted(model, [site.path for site in sites])


def _gates_by_module(model: nn.Module, values: Mapping[Any, GateValue]) -> "dict[str, list[HeadGate]]":
    """Check the argument `values` of `gate`, and return the gates (factors or replacements of head outputs) of each
    attention module by the module's path. If a layer number fits several modules, the gate is listed for each of them.
    When the model runs, only the first of these modules that attends applies the gate.
    """
    if not isinstance(values, Mapping):
        raise InputError("values", expected="a mapping {(layer, head): value}", got=type(values).__name__)
    gates: dict[str, list[HeadGate]] = {}
    paths = {path for path, _ in model.named_modules()}
    for name, value in values.items():
        key = name if isinstance(name, str) and name in paths else named_head(name)
        layer, head = key if isinstance(key, tuple) and len(key) == 2 else (key, None)
        layer, head_index = layer if isinstance(layer, str) else _as_index(layer), _as_index(head)
        if layer is None or (head is not None and head_index is None):
            raise InputError("values", expected="keys (layer, head) or layer", got=repr(key))
        if isinstance(value, Tensor):
            most_axes = 2 if head_index is not None else 3
            if not value.is_floating_point() or value.ndim > most_axes:
                got = f"{value.dtype} of shape {tuple(value.shape)}"
                raise InputError("value", expected=f"a float tensor of at most {most_axes} dimensions", got=got)
        elif isinstance(value, bool) or not isinstance(value, Real | Replacement):
            expected = "a number, a tensor, or one of hw.replacements: zero(), uniform(), mean(), resample(), patch()"
            raise InputError("value", expected=expected, got=repr(value))
        checked = value if isinstance(value, Tensor | Replacement) else finite_number("value", value)
        gate = HeadGate(head_index, checked, layer if isinstance(layer, int) else None)
        for path in module_paths_of_layer(model, layer):
            gates.setdefault(path, []).append(gate)
    return gates


def _prepared(gates: "Mapping[str, list[HeadGate]]", model: nn.Module) -> "dict[str, list[HeadGate]]":
    """Return the gates (factors or replacements of head outputs) after preparing the replacements. Preparation may run
    the model, for example to compute means. A replacement that several gates use is prepared once, for all their
    modules.
    """
    modules: dict[int, tuple[Replacement, list[str]]] = {}
    for path, module_gates in gates.items():
        for _, value, _ in module_gates:
            if isinstance(value, Replacement):
                paths = modules.setdefault(id(value), (value, []))[1]
                paths.extend([] if path in paths else [path])
    prepared: dict[int, GateValue] = {
        key: replacement.prepare(model, paths) for key, (replacement, paths) in modules.items()
    }
    return {
        path: [gate._replace(value=prepared.get(id(gate.value), gate.value)) for gate in module_gates]
        for path, module_gates in gates.items()
    }


def _as_index(value: Any) -> int | None:
    """Return `value` as an int; None if it is a boolean, a float, or anything else that is not an integer."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _positions_tensor(positions: Any) -> Tensor | None:
    """Return the query positions to gate as a tensor, after checking them: integer indices with one axis, or booleans
    with one or two axes. Return None, for all queries, if `positions` is None.
    """
    if positions is None:
        return None
    try:
        tensor = positions if isinstance(positions, Tensor) else torch.as_tensor(list(positions))
    except (TypeError, ValueError, RuntimeError):
        raise InputError("positions", expected=POSITIONS, got=repr(positions)) from None
    if not tensor.numel() and tensor.dtype != torch.bool:
        tensor = tensor.long()  # torch makes a float tensor of an empty list
    most_axes = 2 if tensor.dtype == torch.bool else 1
    if tensor.is_floating_point() or tensor.is_complex() or not 1 <= tensor.ndim <= most_axes:
        raise InputError("positions", expected=POSITIONS, got=f"{tensor.dtype} of shape {tuple(tensor.shape)}")
    return tensor


class GateInterceptor(Interceptor):
    """Interceptor of attention calls that applies gates: it multiplies or replaces the outputs of gated heads, at all
    query positions or at selected ones.

    Attributes:
        gates: gates of each module, by the module's path. This mapping may be replaced between two runs of the model.
    """

    def __init__(
        self, gates: Mapping[str, list[HeadGate]], *, groups: bool = False, positions: Tensor | None = None
    ) -> None:
        self.gates, self._groups, self._positions = gates, groups, positions
        self._ran = False
        self._unreadable: set[str] = set()
        self._empty: set[str] = set()
        self._layer_of_site: dict[SiteKey, int | None] = {}  # the model's own numbers
        self._label_of_layer: dict[int, str] = {}
        self._parts = QueryParts()

    def on_model_call(self) -> None:
        """Start a new call of the model in this thread: discard the record of the attention calls in the previous model
        call. The record serves to recognise attention calls that compute only a part of the queries.
        """
        self._parts.on_model_call()

    def on_module_call(self, path: str) -> None:
        """Record that the model ran. If it never ran, `require_intercepted` (the check that the gates had an effect)
        raises no error.
        """
        self._ran = True

    def on_unreadable(self, path: str, reason: str) -> None:
        """Raise `InputError` if a gated module computed something like attention that cannot be read or changed. `path`
        is the path of the module, and `reason` states why. The error is raised only once per module.
        """
        is_first = path not in self._unreadable
        self._unreadable.add(path)
        if is_first and any(self._gates_of(label) for label in self.gates if SiteKey.path_of(label) == path):
            raise InputError("values", expected="modules whose attention can be changed", got=f"{reason}: {path}")

    def on_empty(self, path: str) -> None:
        """Record that the attention of the module at `path` has an empty output, which gates cannot change."""
        self._empty.add(path)

    def change(self, call: Call) -> Change | None:
        """Return the function that changes the head outputs of an attention call, by the gates of the module that made
        the call. Return None if the module has no gates.
        """
        if not call.is_recomputation:
            self._layer_of_site.setdefault(call.site, call.layer)
        gates = self._gates_of(call.site.label)
        if gates and self._positions is not None and not call.is_recomputation:
            tokens, is_part = call.sources.tokens, self._parts.sequences_of(call, continues=False)[1]
            real = call.real_queries
            follows_padding = real is not None and bool((real[:, 1:] & ~real[:, :-1]).any())
            # Positions of queries would be others than those that the user means.
            is_moved = call.sources.are_moved or (tokens is not None and tokens.has_reordered_queries)
            if is_part or follows_padding or is_moved:
                expected = "attention calls with all queries in the order of tokens"
                got = f"parts or another order of them in {call.site.label}"
                raise InputError("positions", expected=expected, got=got)
        for gate in gates:
            if gate.layer is not None:
                self._label_of_layer[gate.layer] = call.site.label
        return None if not gates else lambda attended: self._apply(gates, attended, call)

    def _gates_of(self, label: str) -> list[HeadGate]:
        """Return the gates (factors or replacements of head outputs) of the attention module that is named `label`.
        Gates that the user specified by layer number are left out if another module with this number has attended
        first.
        """
        taken = self._label_of_layer
        return [
            gate for gate in self.gates.get(label, ()) if gate.layer is None or taken.get(gate.layer, label) == label
        ]

    def _apply(self, gates: list[HeadGate], attended: HeadOutput, call: Call) -> Tensor:
        """Return the head outputs of one attention call after its gates are applied: first all replacements, then all
        factors. Queries that are not selected keep their outputs.
        """
        out = attended.out
        for head, value, _ in gates:
            if isinstance(value, Replacement):
                start, stop = self._head_range(head, call)
                new = value.output(attended, call)[:, start:stop].to(out)
                out = out.slice_scatter(new.expand_as(out[:, start:stop]), 1, start, stop)
        for head, value, _ in gates:
            if not isinstance(value, Replacement):
                out = out * self._factors(head, value, out, call)
        if self._positions is not None:
            out = torch.where(_gated_queries(self._positions, call)[:, None, :, None], out, attended.out)
        return out

    def _count(self, call: Call) -> int:
        """Return how many gates the heads of an attention call can have. This is the number of key/value heads if the
        argument `groups` was True, otherwise the number of query heads.
        """
        return call.kv_heads if self._groups else call.grid.heads

    def _head_range(self, head: int | None, call: Call) -> tuple[int, int]:
        """Return the range (start, stop) of the query heads whose outputs a gate with the index `head` changes. The
        range is a single head or, if gates are for key/value groups, all heads of one group. If `head` is None, it is
        all heads.
        """
        count = self._count(call)
        if head is None:
            return 0, call.grid.heads
        if not 0 <= head < count:
            kind = "key/value group" if self._groups else "head"
            raise InputError(kind, expected=f"one of 0 to {count - 1} in {call.site.label}", got=head)
        size = call.grid.heads // count
        return head * size, (head + 1) * size

    def _factors(
        self, head: int | None, value: float | Tensor, out: Tensor, call: Call
    ) -> Float[Tensor, "#batch heads #queries 1"]:
        """Return the factors by which one gate multiplies the outputs of all heads: `value` for the gated heads, and 1
        for the others. For one head or group, `value` broadcasts to `(batch, queries)`. For all heads (`head` is None)
        its shape is `()`, `(heads,)`, `(batch, heads)` or `(batch, heads, queries)`.
        """
        start, stop = self._head_range(head, call)
        batch, count, queries = call.grid.batch, self._count(call), call.grid.queries
        value = value.to(out) if isinstance(value, Tensor) else out.new_full((), value)
        # Missing axes of batch, heads and queries get the size 1. The factor of one head has no axis of heads.
        if head is None:
            factors = value[None] if value.ndim < 2 else value
            factors = factors[(..., *(None,) * (3 - factors.ndim))]
        else:
            factors = value[(None,) * (2 - value.ndim)][:, None]
        allowed_sizes = (1, batch), (1, count if head is None else 1), (1, queries)
        if any(size not in allowed for size, allowed in zip(factors.shape, allowed_sizes, strict=True)):
            shapes = f"of shape {(count,)}, {(batch, count)} or {(batch, count, queries)}"
            shapes = shapes if head is None else f"that broadcasts to (batch, queries) = {(batch, queries)}"
            raise InputError("value", expected=f"a number, or a tensor {shapes}", got=f"shape {tuple(value.shape)}")
        factors = factors.repeat_interleave((stop - start) // factors.shape[1], 1)
        ones = factors.new_ones(len(factors), call.grid.heads, factors.shape[2])
        return ones.slice_scatter(factors, 1, start, stop)[..., None]

    def require_intercepted(self, model: nn.Module, stated: Collection[str] = ()) -> None:
        """Check, after the model ran, that the gates had an effect. Raise `InputError` if no attention was intercepted
        in a gated module, or in one of the modules `stated`, which the user listed in the argument `sites` of `gate`.
        Raise it also if a gate for a layer number was applied in one module, but the run shows that the number belongs
        to another module.
        """
        if not self._ran:
            return
        intercepted = {site.label for site in self._layer_of_site}
        for label, gates in self.gates.items():
            is_missing = any(gate.layer is None or gate.layer not in self._label_of_layer for gate in gates)
            if is_missing and label not in intercepted and SiteKey.path_of(label) not in self._empty:
                raise InputError("values", expected="modules in which attention is seen", got=f"none in {label}")
        seen = [*(site.path for site in self._layer_of_site), *self._unreadable, *self._empty]
        for path in stated:
            if not any(path == other or is_inside(other, path) for other in seen):
                raise InputError("sites", expected="modules in which attention is seen", got=f"none in {path}")
        modules = dict(model.named_modules())
        order = {path: index for index, path in enumerate(modules)}
        sites = sorted(self._layer_of_site, key=lambda site: (order[site.path], *site[1:]))
        numbers = layer_numbers(modules, {site: self._layer_of_site[site] for site in sites})
        for number, site in zip(numbers, sites, strict=True):
            gated = self._label_of_layer.get(number, site.label)
            if gated != site.label:
                got = f"{gated}, where the model ran {site.label}"
                remedy = "name modules by their paths, as watch(model) lists them"
                raise InputError("layer", expected=f"the module of layer {number}", got=got, remedy=remedy)


def _gated_queries(positions: Tensor, call: Call) -> Bool[Tensor, "#batch queries"]:
    """Return a mask that is True at the gated queries of an attention call. `positions` has the indices of these
    queries, or is already a mask, whose shape is then checked.
    """
    batch, queries = call.grid.batch, call.grid.queries
    positions = positions.to(call.grid.device)
    if positions.dtype == torch.bool:
        is_gated = positions[(None,) * (2 - positions.ndim)]
        if is_gated.shape[0] not in (1, batch) or is_gated.shape[1] != queries:
            expected = f"shape {(queries,)} or {(batch, queries)}"
            raise InputError("positions", expected=expected, got=tuple(positions.shape))
        return is_gated
    if not ((-queries <= positions) & (positions < queries)).all():
        raise InputError("positions", expected=f"from {-queries} to {queries - 1}", got=positions.tolist())
    is_gated = torch.zeros(1, queries, dtype=torch.bool, device=call.grid.device)
    is_gated[:, positions] = True
    return is_gated
