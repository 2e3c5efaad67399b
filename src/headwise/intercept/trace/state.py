"""State of tracing in one call of a model: attention scores, weights and outputs, from their computation to their use.

weights @ values, or SDPA --> AttentionOutput: its axes are followed through the functions that the model calls
reshape, permute, ...     --> the axis of the values is merged with the heads
linear map, or another use--> the layout is established: the call is reported, and its output may be changed
end of the module         --> the weights are passed on
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from headwise.errors import InputError
from headwise.families.head_module import HEAD_COUNTS
from headwise.intercept.attention_source import AttentionSource, Handlers
from headwise.intercept.site import Site
from headwise.intercept.trace.axes import Axes, Factor, HeadLayout, OutputAxes
from headwise.intercept.trace.functions import TensorMap, TensorVersions, share_memory, tensors_among, version_of
from headwise.intercept.trace.lineage import CallOrigins, Lineage, Origin, query_and_key
from headwise.intercept.trace.modules import RunningModule
from headwise.intercept.trace.refusals import CHANGED_IN_PLACE, HEADS_CONTRADICT, HEADS_NOT_FOLLOWED, HEADS_UNKNOWN
from headwise.intercept.trace.tokens import ComparedTokens, NumberedTokens

# -- scores -----------------------------------------------------------------------------------------------------------


class Scores(NamedTuple):
    """Record of a tensor that a model computed from a product of two activations. The product may be that of queries
    and keys; then the tensor is attention scores.

    Attributes:
        axes: its axes, as factors of the axes of the product.
        compared: axes of the product that only one of the activations has: its queries and its keys.
        tokens: tokens along each of these axes; None where they are unknown.
        may_be_masked: True if a function, such as a sum with a mask, may have hidden keys by large negative numbers.
        version: number of changes of the tensor in place, as torch counts them; None if unknown.
        of_first: those of the compared axes that are in the first factor of the product.
        product: identity of the product.
        factors: sources of a learned query and of the keys that it was multiplied with; None for two activations.
        exponents: scores of which the tensor is the exponential, perhaps with factors; None if there are none.
        before_map: sources of queries and keys of each product, before a linear map of the heads, whose result has
            other sources; empty without.
    """

    axes: Axes
    compared: frozenset[int]
    tokens: dict[int, NumberedTokens | None]
    may_be_masked: bool
    version: int | None
    of_first: frozenset[int]
    product: object
    factors: tuple[Origin, Origin] | None = None
    exponents: Tensor | None = None
    before_map: tuple[tuple[Origin, Origin], ...] = ()


class ComparedAxes(NamedTuple):
    """For the scores that a softmax received, the axes of the product of queries and keys from which these scores were
    computed.

    Attributes:
        of_scores: axes of the product that are in each axis of the scores.
        key: axis of the keys in the product.
        tokens: tokens of the queries and keys in the product; None if they are unknown.
        is_key_first: True if the keys are the first factor of the product.
        product: identity of the product.
    """

    of_scores: tuple[tuple[int, ...], ...]
    key: int
    tokens: ComparedTokens | None
    is_key_first: bool
    product: object


class Places(NamedTuple):
    """Where the elements of a tensor that was computed from attention scores come from: for each element, the row (or
    the column) that its score had in the product of queries and keys. After a transposition or a slice, for example,
    this differs from the place of the element.

    Attributes:
        numbers: `first` plus this index, for each element; a number below `first` stands for an unknown index.
        first: number for the index 0. The numbers of different products differ.
        size: size of the product along the axis.
        added: origins of the queries and keys of all products of which the tensor is the sum, except those whose
            elements were moved to other places before; none for a single product.
    """

    numbers: Tensor
    first: int
    size: int
    added: tuple[tuple[Origin, Origin], ...] = ()


class BroadcastProduct(NamedTuple):
    """Broadcast product of two tensors that the model may sum over an axis later, as a matrix product. Torch's counts
    of in-place changes are stored with it.
    """

    factors: tuple[Tensor, Tensor]
    version: int | None
    versions: TensorVersions


# -- weights ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Softmax:
    """Record of one softmax in a model, whose result may be attention weights.

    Attributes:
        dim: axis of the softmax.
        elements: number of elements of its result.
        module_calls: the running module calls, outermost first.
        origin: sources of the scores.
        compares_activations: True if the scores are known to come from a product of two activations.
        compared: axes of the product of queries and keys, and their tokens; None if the product is unknown.
        may_be_masked: True if large negative scores may be those of a mask.
        products: number of products of its weights with values.
        outputs: result of each of these products, until the innermost module has ended; and the record of its weights
            if these are not all elements of the softmax, otherwise None.
        is_used: True if a function used the weights in a way that is not followed.
        used_parts: for each such use, the record of the used weights; None if they are all weights of the softmax.
        has_ended: True when the innermost module that computed it has ended.
        is_written: True if the model wrote the softmax as an exponential and a sum.
    """

    dim: int
    elements: int
    module_calls: Sequence[RunningModule]
    origin: Origin
    compares_activations: bool
    compared: ComparedAxes | None = None
    may_be_masked: bool = True
    products: int = 0
    outputs: "list[tuple[Weights | None, AttentionOutput]]" = field(default_factory=list)
    is_used: bool = False
    used_parts: "list[Weights | None]" = field(default_factory=list)
    has_ended: bool = False
    is_written: bool = False


class KeptScores:
    """Scores from which a softmax computed attention weights, kept for later reading. They are copied when the model is
    about to overwrite their memory.

    Attributes:
        tensor: the scores, or their copy.
    """

    def __init__(self, scores: Tensor) -> None:
        self.tensor, self._version = scores.detach(), version_of(scores)

    @property
    def are_lost(self) -> bool:
        """True if the model has changed the scores in place before they could be copied."""
        return version_of(self.tensor) != self._version

    def before_overwriting(self, tensor: Tensor) -> None:
        """Copy the scores if the model is about to overwrite `tensor` and the scores are in its memory."""
        if share_memory(tensor, self.tensor) and not self.are_lost:
            self.tensor = self.tensor.clone()
            self._version = version_of(self.tensor)


@dataclass(frozen=True, eq=False)
class Weights:
    """Record of a tensor that contains attention weights of a model: the result of a softmax, or a tensor computed from
    it.

    Attributes:
        softmax: the softmax.
        axes: axes of the tensor, as factors of the axes of the softmax's result.
        kept: the scores.
        arranged: function that rearranges the scores to the axes of the tensor.
        undropped: the weights before dropout; None if the tensor has no dropout.
        zeroed: True where the model filled weights with zeros; None where it did not.
        is_scaled: True if the model changed weights to other numbers than 0.
        version: torch's count of the in-place changes of the tensor when this record was stored.
        is_overwritten: True if the model has overwritten memory of the tensor since then.
    """

    softmax: Softmax
    axes: Axes
    kept: KeptScores
    arranged: Callable[[Tensor], Tensor] = lambda scores: scores
    undropped: Tensor | None = None
    zeroed: Tensor | None = None
    is_scaled: bool = False
    version: int | None = None
    is_overwritten: bool = False

    def scores(self) -> Tensor:
        """Return the attention scores from which the weights were computed, with the axes of the tensor of weights."""
        return self.arranged(self.kept.tensor)

    def on_unfollowed_use(self, tensor: Tensor, result: Any) -> None:
        """Record that a function used these weights in a way that is not followed. `tensor` is the argument of the
        function that holds them. The function may have used a part of the weights for another purpose. That is not so
        if it used all weights, and its `result` has at most one number for each row, such as a mean.
        """
        softmax, keys = self.softmax, self.kept.tensor.shape[self.softmax.dim]
        softmax.is_used = True
        is_part = tensor.numel() < softmax.elements
        if is_part or any(each.numel() * keys > softmax.elements for each in tensors_among((result,))):
            softmax.used_parts += [] if softmax.has_ended else [self if is_part else None]

    def elements_of_softmax(self) -> Tensor:
        """Return the index of each of these weights among all elements of the softmax's result."""
        scores = self.kept.tensor
        return self.arranged(torch.arange(scores.numel(), device=scores.device).view(scores.shape))


# -- outputs ----------------------------------------------------------------------------------------------------------


class AttentionOutput:
    """Output tensor of one attention call of a model, kept until later operations of the model show which of its axes
    are the heads.

    Args:
        source: the attention call; None if it was reported to the interceptors, which have changed the output.
        tensor: output, as the model computed it.
        number: number of the attention call in the call of the model, as recorded for a plan; None if not recorded.

    Attributes:
        shape: shape of the output.
        axes: roles of its axes.
        module_calls: the running module calls, outermost first.
        origins: sources of the queries, keys and values.
        axis_of_heads: axis of the heads of an output that was reported; None for other outputs.
        merged: layout according to the last function that merged the values with another axis; None before.
        refusal: reason why the call is not reported; None if there is none.
        may_change: True if an interceptor may change the output.
        is_established: True if the layout of the heads is established.
        is_reported: True if the call was reported to the interceptors, or its module was named to them.
        is_lost: True if a function used the output in a way that its axes could not be followed through.
        is_projected: True if a linear map of the output was seen.
        log_sums: source of the log-sum-exp of the scores, if the attention function has returned it; 0 if not.
        weights_id: identity of the attention weights. Outputs with the same object were computed from the same weights.
    """

    def __init__(
        self,
        source: AttentionSource | None,
        tensor: Tensor,
        axes: OutputAxes,
        module_calls: Sequence[RunningModule],
        origins: CallOrigins,
        axis_of_heads: int | None = None,
        number: int | None = None,
    ) -> None:
        self.shape, self.axes, self.module_calls, self.axis_of_heads = tensor.shape, axes, module_calls, axis_of_heads
        self.merged: HeadLayout | None = None
        self.refusal: str | None = None
        self._is_observed = self.may_change = False
        if source is not None:
            self._is_observed, self.may_change = current_trace().on_attention_found(module_calls, origins)
        self.is_established = self.is_reported = source is None
        self.is_lost = self.is_projected = False
        self.log_sums = 0
        self.origins, self._number = origins, number
        self.weights_id = object() if source is None else source.weights_id
        self._source = source
        self._tensor = None if source is None else tensor  # a reported output would be kept in memory by its own entry
        self._layout: HeadLayout | None = None
        self._stated = None if source is None else self._stated_layout(source)
        self._versions = None if source is None else TensorVersions([tensor, *source.tensors])
        self._is_overwritten = False
        self._handlers: Handlers | None = None
        self._changed: Tensor | None = None
        for module_call in module_calls:
            module_call.projected.clear()
        self._change = object()  # stands for the change in records that must not keep this object in memory

    def establish(self, layout: HeadLayout, *, may_hide_heads: bool = False) -> None:
        """Set the layout of the heads: which axes, or parts of axes, of the attention output are the heads. It becomes
        known when the model uses the output, for example in a linear map. If it contradicts the number of heads that
        the module stores, exclude the call from the results. `may_hide_heads` is True if another axis may be heads,
        which the model may merge with the values later, or use one by one.

        Raises: InputError if heads of another layout were changed already, or the user stated another one.
        """
        if self._stated is not None:
            is_open = layout.head_count == 1 and self._stated.query_axes == layout.query_axes
            if not is_open and layout != self._stated:
                expected = f"the layout that is stated for {self.module_calls[-1].path}"
                raise InputError("sites", expected=expected, got=f"{layout.head_count} heads in another layout")
            layout, may_hide_heads = self._stated, False
        if may_hide_heads and layout.head_count not in head_counts(self.module_calls[-1:]):
            self.refuse(HEADS_UNKNOWN)
        elif self._layout not in (None, layout) or self._contradicts_module(layout):
            self.refuse(HEADS_CONTRADICT)
        else:
            self._layout, self.is_established = layout, True

    def on_projected(self, weights: list[Tensor]) -> None:
        """Report that the model applies a linear map with the parameters `weights` to this attention output."""
        self.is_projected = True
        current_trace().report_projected(self.module_calls, self._number, weights)

    def on_overwritten(self, tensor: Tensor) -> None:
        """Record that the model overwrites `tensor`, perhaps in the memory of this attention output, its weights or its
        values.
        """
        read = [] if self._source is None or self._tensor is None else [self._tensor, *self._source.tensors]
        self._is_overwritten |= any(share_memory(tensor, each) for each in read)

    @property
    def _have_tensors_changed(self) -> bool:
        """True if torch has counted changes in place of the output, or of tensors from which it was computed."""
        return self._versions is not None and self._versions.have_changed()

    @property
    def established_axes(self) -> set[int]:
        """Axes of the output that are its heads, or contain them, in the established layout."""
        return set() if self._layout is None else {head.axis for head in self._layout.heads}

    @property
    def may_be_one_head(self) -> bool:
        """True if the established layout has one head, but the module may have more heads, which it computes in
        separate calls.
        """
        is_one = self._layout is not None and self._layout.head_count == 1
        return is_one and 1 not in head_counts(self.module_calls[-1:])

    def is_other_head_of(self, other: "AttentionOutput", *, as_features: bool) -> bool:
        """Return True if this output and `other` may be different heads of one attention layer. The same call of a
        module must have computed both, from different values or different attention weights. `as_features` is True if
        the model concatenates both along the features.
        """
        source, others = self._source, other._source
        if source is None or others is None or self.module_calls[-1] is not other.module_calls[-1]:
            return False
        if as_features:
            return self.weights_id is not other.weights_id
        is_one_head = self.may_be_one_head and other.may_be_one_head
        return is_one_head and self.is_of_layer(other) and not _is_same_memory(source.values, others.values)

    def is_other_softmax_of(self, other: "AttentionOutput") -> bool:
        """Return True if this output and `other` come from different attention weights (softmax results) of one
        attention layer, and the model has applied a linear map to neither of them yet. Outputs whose queries come from
        different projection weights belong to different layers.
        """
        is_module = self.module_calls[-1].path == other.module_calls[-1].path
        is_projected = self.is_projected or other.is_projected
        is_other = is_module and self.weights_id is not other.weights_id
        return is_other and not is_projected and self.is_of_layer(other)

    def is_other_call_of(self, other: "AttentionOutput") -> bool:
        """Return True if one call of a module computes this output and `other` in two attention calls of one layer."""
        is_module = self.module_calls[-1] is other.module_calls[-1]
        return is_module and self.weights_id is not other.weights_id and self.is_of_layer(other)

    def is_of_layer(self, other: "AttentionOutput") -> bool:
        """Return True if the same projection weights compute the queries of this attention output and of `other`."""
        q, others = self.origins.q.maps, other.origins.q.maps
        return q == others or bool(q & others)

    def changed(self) -> Tensor | None:
        """Return the attention output after the changes by the interceptors, with the same axes as the model's own
        output. Return None if no interceptor changes it, or if its heads are unknown.
        """
        layout = self._layout or self._stated or self.merged or self._predicted_layout(is_verified_later=True)
        if self.refusal is not None or not self.may_change:
            return None
        if layout is None:
            self.refuse(HEADS_NOT_FOLLOWED)
            return None
        if self._changed is None and self._tensor is not None:
            handlers, tensor = self._handlers_with(layout), self._tensor
            self.may_change = bool(handlers.changes)
            if self.may_change:
                has_inputs = not (self._is_overwritten or self._have_tensors_changed)
                changed = handlers.changed(layout.by_head(tensor), has_inputs=has_inputs)
                self._changed = layout.from_heads(changed)
                current_trace().attention.unchanged.pop(self._change, None)
        return self._changed

    def finish(self, *, is_last: bool = False) -> bool:
        """Report the attention call, and pass its attention weights to the interceptors that observe them. If there is
        a reason not to report the call, report its module as unreadable for this reason instead. Return False if the
        heads are still unknown, so that nothing was reported. Do nothing if the call was reported before. `is_last` is
        True at the end of the model, after which nothing more can be learnt about the call.
        """
        if self.is_reported:
            return True
        if self.refusal is None and not self.is_established:
            layout = self.merged or self._stated
            if layout is None and is_last and not self.is_lost:
                layout = self._predicted_layout(is_verified_later=False)
            if layout is not None:
                self.establish(layout)
            elif is_last:
                self.refuse(HEADS_NOT_FOLLOWED)
            else:
                return False
        has_changed = self._have_tensors_changed and self._changed is None
        if self.refusal is None and (has_changed or (self._is_overwritten and self._is_observed)):
            self.refuse(CHANGED_IN_PLACE)
        self.is_reported, self._versions = True, None
        if self.refusal is not None:
            current_trace().report_unreadable(self.module_calls, self.refusal)
        elif self._layout is not None and self._source is not None and self._tensor is not None:
            handlers = self._handlers_with(self._layout)
            handlers.observe(self._layout.by_head(self._tensor.detach()))
            self.may_change = bool(handlers.changes)
        if not self.may_change or self._changed is not None:
            self._source = self._tensor = self._handlers = None
        elif self.refusal is None and self.shape.numel():
            current_trace().attention.unchanged[self._change] = self.module_calls
        return True

    def refuse(self, reason: str) -> None:
        """Record the reason why this attention call must not be reported to the interceptors. If it was reported
        already, notify the interceptors that it is invalid. If a reason is already recorded, keep that one.

        Raises:
            InputError: the output was changed already.
        """
        self.refusal = reason = self.refusal or reason
        if self._changed is not None:
            innermost = self.module_calls[-1]
            name = innermost.path or type(innermost.module).__name__
            raise InputError("model", expected="heads that can be gated", got=f"{reason}: {name}")
        if self.is_reported or self.may_change:
            current_trace().report_unreadable(self.module_calls, reason)

    def _handlers_with(self, layout: HeadLayout) -> Handlers:
        """Report the attention call with this layout of its heads, unless it was reported before. Return the functions
        by which the call is observed or changed.
        """
        if self._handlers is None:
            assert self._source is not None
            self._layout, self._handlers = layout, self._source.handlers(layout)
        return self._handlers

    def _contradicts_module(self, layout: HeadLayout) -> bool:
        """Return True if the module stores a number of heads, but not the number of heads of this layout."""
        for site in current_trace().stated_sites(self.module_calls):
            site.require_heads(layout.head_count)
        counts = head_counts(self.module_calls[-1:])
        return bool(counts) and layout.head_count not in counts

    def _stated_layout(self, source: AttentionSource) -> HeadLayout | None:
        """Return the layout of the heads that the user has stated for the module; None if there is none."""
        for site in current_trace().stated_sites(self.module_calls):
            if site.layout is not None:
                return site.head_layout(self.shape, self.axes.value, source.weight_axes)
        return None

    def _predicted_layout(self, *, is_verified_later: bool) -> HeadLayout | None:
        """Return the layout of the heads that is expected from the shape of the output and the numbers of heads stored
        in the modules. Return None if these determine no layout. The usual layout `(batch, heads, queries, value_dim)`
        is accepted without a stored number if it is verified later.
        """
        counts = head_counts(self.module_calls)
        if counts == [1]:
            return HeadLayout(tuple(self.shape), self.axes.value, self.axes.queries, ())
        *others, queries, value = range(len(self.shape))
        if (value, (queries,)) != (self.axes.value, self.axes.queries) or len(others) not in (1, 2):
            return None
        axis = others[-1]
        size = self.shape[axis]
        is_expected = is_verified_later or (self._source is not None and self._source.has_usual_axes)
        is_usual = len(others) == 2 and (size == 1 or (is_expected and not counts))
        if not is_usual and size not in counts:
            return None
        heads = (Factor(axis, 1, size),) if size > 1 else ()
        return HeadLayout(tuple(self.shape), value, (queries,), heads)


def head_counts(module_calls: Iterable[RunningModule]) -> list[int]:
    """Return the number of heads that the user states for a module, or else the numbers of heads that the module stores
    as attributes. Of the running modules, the innermost one with such a number is used.
    """
    for module_call in reversed(list(module_calls)):
        if module_call.stated is not None and module_call.stated.heads is not None:
            return [module_call.stated.heads]
        counts = [getattr(module_call.module, name, None) for name in HEAD_COUNTS]
        known = [count for count in counts if isinstance(count, int) and count > 0]
        if known:
            return known
    return []


def _is_same_memory(tensor: Tensor, other: Tensor) -> bool:
    def view(tensor: Tensor) -> tuple[Any, ...]:
        base = tensor if tensor._base is None else tensor._base
        return id(base), tensor.shape, tensor.stride(), tensor.storage_offset()

    return tensor is other or (type(tensor) is type(other) is Tensor and view(tensor) == view(other))


@dataclass(frozen=True, eq=False)
class FollowedOutput:
    """Record of a tensor that a model computed from an attention output, and of how it was computed.

    Attributes:
        output: the attention output.
        axes: axes of the tensor, as factors of the axes of the output.
        rearranged: function that computes the tensor from the output; None if the output was changed before, or if more
            was done to it than to rearrange its elements.
        is_linear: True if the tensor is the output times factors that do not depend on the output, so that a factor of
            the output is one of the tensor.
        is_written: True if the model wrote the output into the tensor by an assignment to an index.
    """

    output: AttentionOutput
    axes: Axes
    rearranged: Callable[[Tensor], Tensor] | None
    is_linear: bool = True
    is_written: bool = False

    def changed(self) -> Tensor | None:
        """Return this tensor, which was computed from an attention output, with the interceptors' changes of the
        output. Return None if there are no changes, or if the tensor already contains them.
        """
        if self.rearranged is None or not self.output.may_change:
            return None
        changed = self.output.changed()
        return None if changed is None else self.rearranged(changed)


# -- state ------------------------------------------------------------------------------------------------------------


class FollowedAttention:
    """Records of the attention scores, weights and outputs in a running model. Each is followed from its computation to
    its use by other functions.

    Attributes:
        scores: products of queries and keys, and what was computed from them.
        factors: broadcast products of two tensors.
        places: places of the elements of scores and weights, by axis of the product of queries and keys.
        next_place: number of the next place, unique among all products.
        weights: results of softmax, and what was computed from them.
        kept_scores: scores of these weights, which are copied before the model overwrites them.
        softmaxes: softmaxes whose innermost module still runs.
        outputs: attention outputs, and what was computed from them.
        may_change: True if an interceptor may change one of these outputs.
        pending: attention outputs whose calls were not reported yet.
        unchanged: module calls of reported attention whose output is changed at its first use, until then; the key
            stands for the change.
    """

    def __init__(self) -> None:
        self.scores: TensorMap[Scores] = TensorMap()
        self.factors: TensorMap[BroadcastProduct] = TensorMap()
        self.places: TensorMap[dict[int, Places]] = TensorMap()
        self.next_place = 1
        self.weights: TensorMap[Weights] = TensorMap()
        self.kept_scores: WeakSet[KeptScores] = WeakSet()
        self.softmaxes: list[Softmax] = []
        self.outputs: TensorMap[list[FollowedOutput]] = TensorMap()
        self.may_change = False
        self.pending: list[AttentionOutput] = []
        self.unchanged: dict[object, Sequence[RunningModule]] = {}

    def move(self, tensor: Tensor, other: Tensor) -> None:
        """Store all records of `tensor` (such as its scores or attention weights) for the tensor `other` instead."""
        for records in (self.scores, self.factors, self.places, self.weights, self.outputs):
            records.move(tensor, other)


class Trace(ABC):
    """Base class of sessions: facts derived from the torch functions in one running call of a model, and the methods by
    which attention is reported when tracing finds it.

    Attributes:
        module_calls: the running calls of modules, outermost first.
        lineage: sources of the tensors that the running modules computed.
        attention: scores, weights and outputs of attention, from their computation to their use.
        torch_attention_heads: number of heads inside `F.multi_head_attention_forward`, where torch turns modes off;
            None elsewhere.
        torch_attention_origins: sources of the queries, keys and values there.
        appended_keys: number of keys without a token that it appends to its keys.
    """

    module_calls: Sequence[RunningModule]

    def __init__(self, before: "Trace | None" = None) -> None:
        self.lineage: Lineage = Lineage(None if before is None else before.lineage)
        self.attention = FollowedAttention()
        self.torch_attention_heads: int | None = None
        self.torch_attention_origins: CallOrigins | None = None
        self.appended_keys = 0
        self.thread = get_ident()

    @property
    @abstractmethod
    def is_recomputing(self) -> bool:
        """True in a backward pass. Activation checkpointing then calls modules again, to repeat calls of the forward
        pass.
        """

    @abstractmethod
    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which functions and attention calls are not intercepted."""

    @abstractmethod
    def on_attention_found(self, module_calls: Sequence[RunningModule], origins: CallOrigins) -> tuple[bool, bool]:
        """Take note of an attention call of the innermost running module, which is reported when its heads are known.
        Return two values: True if an interceptor observes attention weights there, and True if an interceptor may
        change its output.
        """

    @abstractmethod
    def report_unreadable(self, module_calls: Sequence[RunningModule], reason: str) -> None:
        """Report that the attention in the innermost running module is not read, and the reason."""

    @abstractmethod
    def report_projected(
        self, module_calls: Sequence[RunningModule], number: int | None, weights: Sequence[Tensor]
    ) -> None:
        """Report that the model applies a linear map with the parameters `weights` to the output of an attention call.
        `number` is the number of the attention call within the call of the model; None if it has none.
        """

    @abstractmethod
    def on_replaced(self, tensor: Tensor, other: Tensor) -> None:
        """Take note that `tensor`, an attention output with changes, takes the place of `other`, the output without
        them.
        """

    @abstractmethod
    def stated_sites(self, module_calls: Sequence[RunningModule]) -> list[Site]:
        """Return the `Site` objects by which the user describes the innermost running module, for example its number of
        heads.
        """

    def origin_of_scores(self, scores: Tensor) -> Origin:
        """Return the origin of attention scores: the tensors on which they depend. It also contains, as factors, the
        origins of the queries and the keys.
        """
        if self.torch_attention_origins is not None:
            return self.torch_attention_origins.q  # not used: `origins_of_product` returns all three
        return self.lineage.origin(scores, self.module_calls)

    def origins_of_product(self, scores: Origin, values: Tensor) -> CallOrigins:
        """Return the origins of the queries, keys and values of a call in which weights are multiplied with `values`.
        `scores` is the origin of the scores from which the weights were computed.
        """
        if self.torch_attention_origins is not None:
            return self.torch_attention_origins
        v = self.lineage.origin(values, self.module_calls)
        return CallOrigins(*query_and_key(scores, v, self.lineage), v)


CURRENT: ContextVar[Trace | None] = ContextVar("session of headwise", default=None)
"""State of the running code, a session. A new thread has none. A task of asyncio has that of the code which created the
task; it shares no model call that starts later, since each call of a model has a session of its own.
"""


def current_trace() -> Trace:
    """Return the state of tracing in the running call of a model."""
    trace = CURRENT.get()
    assert trace is not None
    return trace


def paused() -> AbstractContextManager[None]:
    """Return a context in which neither functions nor attention calls are intercepted, inside or outside of calls of a
    model.
    """
    trace = CURRENT.get()
    return nullcontext() if trace is None or trace.thread != get_ident() else trace.paused()
