"""Interceptor that applies gates and replacements to the output of heads."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headwise.analysis.replacements import Replacement
from headwise.errors import InputError
from headwise.intercept.interceptor import Call, Change, HeadOutput, Interceptor, SiteKey
from headwise.intercept.layer_index import is_inside, layer_numbers
from headwise.intercept.query_parts import QueryParts
from headwise.shapes import Bool, Float

GateValue = float | Tensor | Replacement
"""Factor of a head's output, or what takes its place."""


class HeadGate(NamedTuple):
    """Gate of one head, of one key/value group, or of all heads of an attention module: a factor of their outputs, or a
    replacement of their outputs.

    Attributes:
        head: zero-based index of the head or group; None for all heads.
        value: factor of the output, or the replacement of the output.
        layer: layer number by which the user named the module; None if it was named by its path. If several modules
            have a gate with this number, it applies to the first one that attends.
    """

    head: int | None
    value: GateValue
    layer: int | None = None


class GateInterceptor(Interceptor):
    """Interceptor of attention calls that multiplies or replaces the outputs of gated heads, at all query positions or
    at selected ones.

    Attributes:
        gates: gates of each module, by the module's path. It may be replaced between two runs of the model.
    """

    def __init__(
        self, gates: Mapping[str, list[HeadGate]], *, groups: bool = False, positions: Tensor | None = None
    ) -> None:
        self.gates, self._groups, self._positions = gates, groups, positions
        self._ran = False
        self._unreadable: set[str] = set()
        self._layer_of_site: dict[SiteKey, int | None] = {}  # the model's own numbers
        self._label_of_layer: dict[int, str] = {}
        self._parts = QueryParts()

    def on_model_call(self) -> None:
        """Forget the queries of the attention calls in the previous call of the model in this thread."""
        self._parts.on_model_call()

    def on_module_call(self, path: str) -> None:
        """Record, when any module of the model is called, that the model ran. If the model did not run,
        `require_intercepted` raises no error.
        """
        self._ran = True

    def on_unreadable(self, path: str, reason: str) -> None:
        """Raise `InputError` for a gated module that computed something like attention that is not changed, for
        `reason`. So heads are never gated in part. The error is raised once for each module.
        """
        is_first = path not in self._unreadable
        self._unreadable.add(path)
        if is_first and any(self._gates_of(label) for label in self.gates if SiteKey.path_of(label) == path):
            raise InputError("values", expected="modules whose attention can be changed", got=f"{reason}: {path}")

    def change(self, call: Call) -> Change | None:
        """Record the first attention call of each site (a module's self- or cross-attention). Return the function that
        applies the gates of the call's module to the call's head outputs; None if the module has no gates.
        """
        if not call.is_recomputation:
            self._layer_of_site.setdefault(call.site, call.layer)
        gates = self._gates_of(call.site.label)
        if gates and self._positions is not None and not call.is_recomputation:
            self._require_all_queries(call)
        for gate in gates:
            if gate.layer is not None:
                self._label_of_layer[gate.layer] = call.site.label
        return None if not gates else lambda attended: self._apply(gates, attended, call)

    def _require_all_queries(self, call: Call) -> None:
        """Raise `InputError` if the queries of an attention call are known to be a part of those of the model, or to be
        in another order than the tokens, so that positions of queries would be others than those that the user means.
        """
        tokens = call.sources.tokens
        is_part = self._parts.sequences_of(call, continues=False)[1]
        if is_part or (tokens is not None and tokens.has_reordered_queries):
            got = f"parts or another order of them in {call.site.label}"
            raise InputError("positions", expected="attention calls with all queries in the order of tokens", got=got)

    def _gates_of(self, label: str) -> list[HeadGate]:
        """Return the gates of a module, without those by a layer number that another module has taken."""
        taken = self._label_of_layer
        return [
            gate for gate in self.gates.get(label, ()) if gate.layer is None or taken.get(gate.layer, label) == label
        ]

    def _apply(self, gates: list[HeadGate], attended: HeadOutput, call: Call) -> Tensor:
        """Return the head outputs of an attention call after its gates are applied: first all replacements of head
        outputs, then all factors. At query positions that are not gated, the outputs are unchanged.
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
        """Return the number of heads of an attention call, or the number of its key/value groups if gates are indexed
        by group.
        """
        return call.kv_heads if self._groups else call.grid.heads

    def _head_range(self, head: int | None, call: Call) -> tuple[int, int]:
        """Return the start and stop of the range of query heads that a gate applies to. `head` is the index of a head,
        or of a key/value group if gates are indexed by group; None selects all heads.

        Raises:
            InputError: the module has no such head or group.
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
        """Return a tensor of factors that broadcasts to the outputs of all heads: `value` for the heads that the gate
        applies to, and 1 for all other heads. `head` is the index of the gated head or key/value group; None selects
        all heads.
        """
        start, stop = self._head_range(head, call)
        batch, count, queries = call.grid.batch, self._count(call), call.grid.queries
        value = value.to(out) if isinstance(value, Tensor) else out.new_full((), value)
        factors = _with_batch_and_query_axes(value, head)
        allowed_sizes = (1, batch), (1, count if head is None else 1), (1, queries)
        if any(size not in allowed for size, allowed in zip(factors.shape, allowed_sizes, strict=True)):
            shapes = f"of shape {(count,)}, {(batch, count)} or {(batch, count, queries)}"
            shapes = shapes if head is None else f"that broadcasts to (batch, queries) = {(batch, queries)}"
            raise InputError("value", expected=f"a number, or a tensor {shapes}", got=f"shape {tuple(value.shape)}")
        factors = factors.repeat_interleave((stop - start) // factors.shape[1], 1)
        ones = factors.new_ones(len(factors), call.grid.heads, factors.shape[2])
        return ones.slice_scatter(factors, 1, start, stop)[..., None]

    def require_intercepted(self, model: nn.Module, stated: Collection[str] = ()) -> None:
        """Raise `InputError` if there is a gated module in which no attention was intercepted, or if the run showed
        that the number of a gated layer belongs to another module. Do nothing if the model did not run.

        Args:
            model: the gated model.
            stated: paths of modules about whose attention the user made statements.

        Raises:
            InputError: a gated module computed no attention that was intercepted; a layer number is another module's.
        """
        if not self._ran:
            return
        intercepted = {site.label for site in self._layer_of_site}
        for label, gates in self.gates.items():
            is_missing = any(gate.layer is None or gate.layer not in self._label_of_layer for gate in gates)
            if is_missing and label not in intercepted:
                raise InputError("values", expected="modules in which attention is seen", got=f"none in {label}")
        seen = [*(site.path for site in self._layer_of_site), *self._unreadable]
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


def _with_batch_and_query_axes(value: Tensor, head: int | None) -> Float[Tensor, "#batch #heads #queries"]:
    """Return `value`, the factor in a gate, as a tensor with axes of batch, heads and queries, where missing axes have
    size 1. For one head, `value` broadcasts to `(batch, queries)`. For all heads (`head` is None), `value` has the
    shape `()`, `(heads,)`, `(batch, heads)` or `(batch, heads, queries)`.
    """
    if head is not None:
        return value[(None,) * (2 - value.ndim)][:, None]
    value = value[None] if value.ndim < 2 else value
    return value[(..., *(None,) * (3 - value.ndim))]


def _gated_queries(positions: Tensor, call: Call) -> Bool[Tensor, "#batch queries"]:
    """Return a boolean mask that is True at the gated queries of an attention call. `positions` is such a mask,
    `(queries,)` or `(batch, queries)`, or a tensor of query indices.

    Raises:
        InputError: a boolean tensor of another shape; an index out of range.
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
