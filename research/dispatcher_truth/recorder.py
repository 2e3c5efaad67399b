"""Record every softmax of a model at torch's dispatcher, and derive the heads of those that are attention.

    with dispatcher_truth(model) as record:
        model(**inputs)
    for call in record.calls:
        call.path, call.weights      # (sequences, heads, queries, keys), float64

SDPA runs on the math backend, so that it consists of a softmax and two products. The elements of every softmax result
are followed to the product with values, and the elements of that product to the output projection: heads are the blocks
of columns that they occupy in its input. Nothing is derived from names of modules, arguments or functions.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from research.dispatcher_truth.element_tags import ElementTags, name_of, tensors_in
from research.dispatcher_truth.module_stack import ModuleStack
from research.dispatcher_truth.operator_graph import EXCHANGE, OperatorGraph, Scores
from research.dispatcher_truth.softmax_call import Projection, SoftmaxCall, Unresolved

SOFTMAX = ("_softmax", "_safe_softmax")
PRODUCTS = ("bmm", "mm", "addmm", "baddbmm", "mv", "linear", "convolution")
SUMS = ("sum", "mean")
FUSED = ("scaled_dot_product", "flash_attention", "efficient_attention", "multi_head_attention", "encoder_layer_fwd")
HIDING = -5e3
"""Largest score of a row in which a mask hides every key, by -inf or by a large negative number."""


@dataclass(frozen=True)
class TruthCall:
    """One call of attention.

    Attributes:
        path: innermost module that was running at the softmax.
        weights: `(sequences, heads, queries, keys)`, float64, before dropout, without keys that have no values; 0 in
            rows in which a mask hides every key.
        outputs: weights times values before dropout, `(sequences, heads, queries, value_dim)`, float64.
        rows: row of the output projection's input for each query, `(sequences, heads, queries)`. For an input
            `(batch, length, width)` it is `batch * length + position`.
        columns: columns of that input for each head.
        projection: path of the module of the output projection, its weight and its operator.
        derived: how the layout was derived, in words; peculiarities of the call are in `notes`.
        form: "bmm" if all queries of a sequence share the values, otherwise "sum".
        softmax: the recorded softmax.
    """

    path: str
    weights: Tensor
    outputs: Tensor
    rows: Tensor
    columns: list[Tensor]
    projection: Projection
    derived: str
    notes: list[str]
    form: str
    softmax: SoftmaxCall

    @property
    def scores(self) -> Scores:
        """Origin of the scores: whether they are a product, and whether queries and keys have the same source."""
        return self.softmax.scores

    @property
    def is_direct(self) -> bool:
        """True if the output projection's input is the heads' outputs themselves, without a norm or factor between."""
        for head, columns in enumerate(self.columns):
            entered = self.projection.inputs[self.rows[:, head]][..., columns].double()
            outputs = self.outputs[:, head]
            if entered.shape != outputs.shape or not torch.allclose(entered, outputs, atol=1e-6):
                return False
        return True

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.weights.shape[1]


@dataclass
class Record:
    """Result of `dispatcher_truth`.

    Attributes:
        softmaxes: every softmax, in order.
        calls: the softmaxes that are attention with a derived layout; complete when the context ends.
        unresolved: (softmax, reason) for all others.
        fused: (module path, operator) of fused attention that torch did not decompose.
    """

    softmaxes: list[SoftmaxCall] = field(default_factory=list)
    calls: list[TruthCall] = field(default_factory=list)
    unresolved: list[tuple[SoftmaxCall, str]] = field(default_factory=list)
    fused: list[tuple[str, str]] = field(default_factory=list)


@contextlib.contextmanager
def dispatcher_truth(model: nn.Module) -> Iterator[Record]:
    """Record the attention of `model` while the context is active, without gradients.

    The model runs in the dtype that it has: use `double_copy(model)` for a truth in float64.
    """
    stack = ModuleStack(model)
    recorder = Recorder(stack, OperatorGraph(model))
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), stack, recorder:
            yield recorder.record
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
    recorder.finish()


def _are_weights(result: Tensor) -> bool:
    """Return whether exponentials are a softmax over the last axis, as those of scores minus their log-sum-exp."""
    if result.dim() < 3 or not result.numel() or not result.is_floating_point():
        return False
    return bool(((result.sum(-1) - 1).abs() <= torch.finfo(result.dtype).eps ** 0.5).all())


class Recorder(TorchDispatchMode):
    """Dispatch mode that fills a `Record`."""

    def __init__(self, stack: ModuleStack, graph: OperatorGraph) -> None:
        super().__init__()
        self._graph = graph
        self.record, self._stack, self._tags = Record(), stack, ElementTags()
        self._next_tag = 1

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = name_of(function)
        is_exchange = name == "flip" and all(dim % args[0].dim() < args[0].dim() - 2 for dim in args[1])
        self._graph.add(EXCHANGE if is_exchange else name, tensors_in((args, kwargs)), tensors_in(result))
        if name in SOFTMAX:
            self._on_softmax(args[0], result, args[1])
        elif name == "exp" and _are_weights(result):
            self._on_softmax(args[0], result, -1)
        elif any(part in name for part in FUSED):
            self.record.fused.append((self._path, name))
        elif self._tags.any((args, kwargs)):
            if name in PRODUCTS:
                self._on_product(name, args, kwargs, result)
            elif name in SUMS:
                self._on_sum(args, kwargs, result)
            else:
                self._tags.follow(function, args, kwargs, result)
        return result

    @property
    def _path(self) -> str:
        return self._stack.running[-1] if self._stack.running else ""

    # -- softmax ------------------------------------------------------------------------------------------------------

    def _on_softmax(self, scores: Tensor, result: Tensor, dim: int) -> None:
        """Give tags to the weights of a new softmax."""
        if not result.numel() or not result.dim():
            return
        paths = tuple(self._stack.running)
        is_hidden = scores.detach().movedim(dim, -1).amax(-1).flatten() <= HIDING
        weights = result.detach().movedim(dim, -1).double().clone()
        call = SoftmaxCall(self._path, weights, self._next_tag, is_hidden, paths)
        call.scores = self._graph.scores(scores)
        call.has_underflow = bool(((result == 0) & (scores > HIDING)).any())
        self._next_tag = call.end
        self.record.softmaxes.append(call)
        numbers = torch.arange(call.start, call.line_start, dtype=torch.float64)
        self._tags.set(result, numbers.view(call.result.shape).movedim(-1, dim))

    def _calls_in(self, tags: Tensor) -> tuple[list[SoftmaxCall], list[SoftmaxCall]]:
        """Return the softmaxes of which weights, and of which output lines, are among these tags."""
        present = tags[tags > 0].unique()
        if not len(present):
            return [], []
        starts = torch.tensor([[call.start, call.line_start] for call in self.record.softmaxes]).reshape(-1)
        places = (torch.searchsorted(starts, present.long(), right=True) - 1).unique().tolist()
        weights = [self.record.softmaxes[place // 2] for place in places if place % 2 == 0]
        lines = [self.record.softmaxes[place // 2] for place in places if place % 2]
        return weights, lines

    # -- products -----------------------------------------------------------------------------------------------------

    def _on_product(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor) -> None:
        """Handle a matrix product or convolution with a followed operand."""
        if name == "convolution":
            self._on_convolution(args, result)
            return
        left, right = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
        if name == "linear":
            left, right = left.reshape(-1, left.shape[-1]), right.transpose(0, 1)
        out = result.reshape(-1, result.shape[-1]) if name == "linear" else result
        if name == "mv":
            right, out = right[:, None], out[:, None]
        if left.dim() == 2:
            left, right, out = left[None], right[None], out[None]
        for weights, values, product in ((left, right, out), (right.mT, left.mT, out.mT)):
            tags = self._tags.of(weights)
            if tags is None:
                continue
            from_weights, from_lines = self._calls_in(tags)
            for call in from_weights:
                self._on_weights("bmm", call, tags, weights, values, product)
            if from_lines and not from_weights and not self._has_weights(values):
                self._on_lines(name, from_lines, tags, weights, values, product)

    def _has_weights(self, tensor: Tensor) -> bool:
        tags = self._tags.of(tensor)
        return tags is not None and bool(self._calls_in(tags)[0])

    def _on_weights(
        self, form: str, call: SoftmaxCall, tags: Tensor, weights: Tensor, values: Tensor | None, product: Tensor
    ) -> None:
        """Record the product of weights `(groups, queries, keys)` with values, if it is a weighted average."""
        lines = call.lines_of(tags)
        if lines is None:
            call.note("multiplied by something over another axis than that of softmax")
            return
        call.add_product(form, tags, weights, values, product)
        marks = torch.where(lines >= 0, lines + call.line_start, 0)[..., None].double()
        self._tags.set(product, marks.expand(product.shape))

    def _on_lines(
        self, name: str, calls: list[SoftmaxCall], tags: Tensor, inputs: Tensor, operand: Tensor, product: Tensor
    ) -> None:
        """Handle a product `(groups, rows, columns)` in which outputs of heads are contracted over their columns: the
        output projection if a row has several heads, otherwise a map of each head.
        """
        rows = tags.reshape(-1, tags.shape[-1])
        tagged = rows > 0
        low = torch.where(tagged, rows, torch.inf).amin(-1)
        high = torch.where(tagged, rows, -torch.inf).amax(-1)
        projection = Projection(self._path, rows.clone(), operand, name, inputs.detach().reshape(rows.shape).clone())
        if bool((low == high)[tagged.any(-1)].all()):
            running = set(self._stack.running)
            for call in calls:
                if call.single is None and name not in ("bmm", "baddbmm"):
                    call.single = projection
            if all(call.paths[-2:-1] == () or call.paths[-2] in running for call in calls):
                marks = torch.where(torch.isinf(low), 0.0, low).view(*tags.shape[:-1], 1)
                self._tags.set(product, marks.expand(product.shape))
            return
        seen_in = torch.stack([rows[tagged], tagged.nonzero()[:, 0].double()]).unique(dim=1)
        if seen_in.shape[1] != len(seen_in[0].unique()):
            return  # outputs of several queries are mixed: no projection of single tokens
        for call in calls:
            if call.projection is None:
                call.projection = projection
            elif call.has_other_lines(rows):
                call.is_divided = True

    def _on_convolution(self, args: Sequence[Any], result: Tensor) -> None:
        """Handle a convolution `(batch, channels, ...)`: channels are the columns; one channel per group is a map."""
        tags, groups = self._tags.of(args[0]), args[8]
        if tags is None:
            return
        weights, lines = self._calls_in(tags)
        if weights or not lines:
            return
        if groups == args[0].shape[1]:
            if result.shape == args[0].shape:
                self._tags.set(result, tags)
            return
        columns = tags.movedim(1, -1).reshape(1, -1, tags.shape[1])
        shape = (1, columns.shape[1], result.shape[1])
        inputs = args[0].movedim(1, -1).reshape(columns.shape)
        self._on_lines("convolution", lines, columns, inputs, args[1], torch.empty(shape))

    # -- sums ---------------------------------------------------------------------------------------------------------

    def _on_sum(self, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor) -> None:
        """Handle a sum of weights times values that were multiplied element by element."""
        tags = self._tags.of(args[0])
        dims = args[1] if len(args) > 1 else kwargs.get("dim")
        if tags is None or not dims:
            return
        calls, _ = self._calls_in(tags)
        dims = sorted({dim % tags.dim() for dim in ([dims] if isinstance(dims, int) else dims)})
        flat = tags.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims))
        for call in calls:
            lines = call.lines_of(flat)
            if lines is None or flat.shape[-1] == 1 or not bool((lines >= 0).any()):
                continue
            product = result.detach().reshape(flat.shape[:-1])
            marks = torch.where(lines >= 0, lines + call.line_start, 0).double()
            self._tags.set(result, marks.view(result.shape))
            self._add_summed(call, flat, product)

    def _add_summed(self, call: SoftmaxCall, tags: Tensor, product: Tensor) -> None:
        """Record a product that was computed as a sum: its lines are repeated over the value dimensions."""
        lines = call.lines_of(tags)
        assert lines is not None
        flat, values = lines.reshape(-1), product.reshape(-1)
        order = flat.argsort(stable=True)
        found = order[flat[order] >= 0]
        counts = flat[found].unique(return_counts=True)[1]
        if not bool((counts == counts[0]).all()):
            call.note("summed over an irregular set of values")
            return
        picked = tags.reshape(-1, tags.shape[-1])[found].view(-1, int(counts[0]), tags.shape[-1])[:, 0]
        weights = torch.zeros(picked.shape, dtype=torch.float64)
        is_weight = (picked >= call.start) & (picked < call.line_start)
        weights[is_weight] = call.result.reshape(-1)[(picked - call.start).long()[is_weight]]
        query_axis = call.result.shape[-2] if call.result.dim() > 1 else 1
        shape = (-1, query_axis) if len(picked) % query_axis == 0 else (-1, 1)
        call.add_product(
            "sum",
            picked.view(*shape, picked.shape[-1]),
            weights.view(*shape, picked.shape[-1]),
            None,
            values[found].view(*shape, int(counts[0])),
        )

    # -- results ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Derive the layout of every recorded softmax."""
        for call in self.record.softmaxes:
            try:
                self.record.calls.append(_truth_of(call))
            except Unresolved as reason:
                self.record.unresolved.append((call, str(reason)))


def _truth_of(call: SoftmaxCall) -> TruthCall:
    """Return the attention call of a softmax.

    Raises:
        Unresolved: it is not attention, or its layout cannot be derived.
    """
    if not call.scores.is_product:
        raise Unresolved("its scores are not a product of queries and keys")
    layout = call.resolved()
    projection = call.projection or call.single
    assert projection is not None
    assert call.outputs is not None
    plain = torch.where(call.used, call.result.reshape(call.lines, call.keys), 0.0)
    if not torch.allclose(plain, call.applied, rtol=1e-6, atol=1e-9, equal_nan=True):
        call.note("weights were changed between softmax and the product")
    plain = plain.masked_fill(call.is_hidden[:, None], 0.0)
    columns = []
    for head in range(layout.lines.shape[1]):
        tags = (layout.lines[:, head].reshape(-1) + call.line_start).double()
        columns.append(torch.isin(projection.rows, tags).any(0).nonzero()[:, 0])
    form = "bmm" if "bmm" in call.forms else "sum"
    how = "blocks of columns" if call.projection is not None else "one head"
    derived = f"softmax, {' and '.join(call.forms)}, {how} of {projection.operator} in {projection.path!r}"
    weights, outputs = plain[layout.lines][..., layout.keys], call.outputs[layout.lines]
    return TruthCall(call.path, weights, outputs, layout.rows, columns, projection, derived, call.notes, form, call)


def double_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model in float64."""
    import copy

    return copy.deepcopy(model).double()
