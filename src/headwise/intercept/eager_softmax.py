"""Interception of attention that a module computes itself: softmax returns its weights, a product its output.

Files of `trace/` follow the scores to the softmax (`scores`), the weights from there to their product with the values
(`weights`), and the product to the output projection (`outputs`).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.attention.masks.grid import Grid
from headwise.attention.masks.kinds import Dense
from headwise.intercept.attention_call import AttentionCall, KnownWeights
from headwise.intercept.attention_source import AttentionSource
from headwise.intercept.call_handlers import CallHandlers, handlers_of_call
from headwise.intercept.interceptor import Interceptor
from headwise.intercept.module_call import ModuleCall, innermost_calls, must_trace, report_empty
from headwise.intercept.received_mask import ReceivedMask
from headwise.intercept.sequences import FINGERPRINT_WIDTH
from headwise.intercept.session import current_session
from headwise.intercept.trace.axes import HeadLayout, OutputAxes, axes_of
from headwise.intercept.trace.functions import (
    PRODUCTS,
    Contraction,
    FunctionCall,
    Label,
    adds_to_product,
    contraction_of,
)
from headwise.intercept.trace.lineage import OTHER_AXIS, CallOrigins, Origin, queries_of_self_attention
from headwise.intercept.trace.outputs import hold, report_established
from headwise.intercept.trace.refusals import (
    ADDED_TENSOR,
    CHANGED_IN_PLACE,
    COMPLEX,
    KEYS_MOVED,
    NOT_AVERAGES,
    NOT_OVER_KEYS,
    NOT_SEEN,
    WEIGHTS_IN_PARTS,
    WEIGHTS_NOT_FOLLOWED,
)
from headwise.intercept.trace.scores import (
    Order,
    compared_axes,
    compares_activations,
    may_be_masked,
    order_along,
    places_of,
    unshifted,
    with_factors,
)
from headwise.intercept.trace.state import AttentionOutput, ComparedAxes, KeptScores, Places, Softmax, Weights
from headwise.intercept.trace.tokens import ComparedTokens, NumberedTokens
from headwise.intercept.trace.weights import (
    average_keys,
    follow_weights,
    hidden_by_scores,
    record_weights,
    uniform_weights,
    weights_among,
    weights_of,
)
from headwise.shapes import Float

SOFTMAX = F.softmax
"""Torch's own function, also while another one replaces it."""

SOFTMAXES = frozenset({SOFTMAX, torch.softmax, Tensor.softmax, torch.special.softmax, torch._softmax, F.softmin})
"""Softmax under all its names, and that of negative scores."""

WEIGHTS_USED_TWICE = "weights of these modules are multiplied with several tensors, so norms of outputs are left out"
"""Reason for statistics that are left out where one softmax has several products."""


def on_softmax(
    scores: Tensor,
    result: Tensor,
    dim: Any,
    kept: Tensor | None = None,
    *,
    is_attention: bool = False,
    numbers: Tensor | None = None,
    is_written: bool = False,
) -> None:
    """Record the `result` of a softmax as possible attention weights. The weights are then followed through later
    functions until the model multiplies them with values. A softmax is ignored if its scores are not known to be a
    product of two activations and its module is not called attention.

    Args:
        scores: argument of the softmax.
        result: its result.
        dim: axis of the softmax.
        kept: copy of the scores, if the softmax has overwritten them.
        is_attention: True if the scores are known to be products of queries and keys.
        numbers: the scores whose softmax is `result`, if these were computed from `scores`; by default `scores`.
        is_written: True if the model wrote the softmax as an exponential and a sum. It is then ignored if the model
            does not use it.
    """
    session = current_session()
    module_calls = session.module_calls[:]
    if isinstance(module_calls[-1].module, nn.Softmax):  # the module around it attends
        module_calls.pop()
    if not isinstance(dim, int) or not module_calls or result.ndim < 2:
        return
    if not result.numel():
        report_empty(module_calls)
        return
    dim %= result.ndim
    is_comparison = is_attention or compares_activations(scores, dim)
    if not is_comparison and not module_calls[-1].is_attention:
        return
    must_trace(module_calls)
    if session.reports_unreadable(scores):
        return
    report_established()
    compared = compared_axes(scores, dim)
    origin = _with_keys_last(with_factors(scores, session.origin_of_scores(scores)), compared, module_calls)
    is_masked = may_be_masked(scores)
    softmax = Softmax(
        dim, result.numel(), module_calls, origin, is_comparison, compared, is_masked, is_written=is_written
    )
    before = session.attention.weights.get(scores)
    if before is not None and before.softmax.is_written and before.softmax in session.attention.softmaxes:
        session.attention.softmaxes.remove(before.softmax)  # an exponential for a single key, of which the sum is 1
    session.attention.softmaxes.append(softmax)
    if result is scores:
        session.attention.scores.discard(scores)
    numbers = kept if numbers is None else numbers
    kept_scores = KeptScores(scores if numbers is None else numbers)
    session.attention.kept_scores.add(kept_scores)
    record_weights(result, Weights(softmax, axes_of(result.shape), kept_scores))


def _with_keys_last(origin: Origin, compared: ComparedAxes | None, module_calls: list[ModuleCall]) -> Origin:
    """Return the `origin` of the scores of a softmax, with the keys as the second factor of their product. If the
    module has computed a softmax over the other axis of the same product, the two softmaxes are different layers of the
    module, so the queries of the second one get other names of weights.
    """
    if compared is None:
        return origin
    if compared.is_key_first:
        origin = origin._replace(factors=tuple((right, left) for left, right in origin.factors))
    for other in current_session().attention.softmaxes:
        others = other.compared
        is_other_axis = others is not None and others.product == compared.product and others.key != compared.key
        if is_other_axis and other.module_calls[-1] is module_calls[-1]:
            maps = [frozenset(("other axis", name) for name in left.maps) for left, _ in origin.factors]
            factors = zip(maps, origin.factors, strict=True)
            return origin._replace(
                factors=tuple((q._replace(maps=names or OTHER_AXIS), k) for names, (q, k) in factors)
            )
    return origin


def on_function(call: FunctionCall, result: Any) -> Any:
    """Follow attention weights through one function call of the model, and return the call's `result`. If the function
    rearranges or modifies weights, its result is recorded as weights. If it multiplies them with the values, the
    product is recorded as an attention output, which interceptors may change.
    """
    for tensor in weights_among(call):
        if call.function in PRODUCTS:
            return _on_product(call, tensor, result)
        follow_weights(call, tensor, result)
    return result


def on_module_end(module_call: ModuleCall) -> None:
    """At the end of a module call, report attention that cannot be read to the interceptors. That is the case if the
    module computed a softmax that looks like attention, but did not multiply its result with values.
    """
    session = current_session()
    for softmax in [each for each in session.attention.softmaxes if each.module_calls[-1] is module_call]:
        session.attention.softmaxes.remove(softmax)
        softmax.has_ended = True
        _refuse_parts(softmax)
        softmax.outputs.clear()
        softmax.used_parts.clear()
        if not softmax.products and softmax.is_used:
            session.report_unreadable(softmax.module_calls, WEIGHTS_NOT_FOLLOWED)
        elif not softmax.products and module_call.is_attention and not softmax.is_written:
            session.report_unreadable(softmax.module_calls, NOT_SEEN)


def _on_product(call: FunctionCall, tensor: Tensor, result: Any) -> Any:
    """Return the `result` of a function that multiplies attention weights, its argument `tensor`, with another tensor.
    If the product is summed over the keys alone, it is recorded as an attention output, and interceptors may change it.
    """
    weights = weights_of(tensor)
    contraction = contraction_of(call.function, call.args, call.kwargs)
    if weights is None:
        return result
    softmax, product = weights.softmax, None
    if contraction is not None and len(contraction.operands) == 2 and contraction.multiplies(tensor):
        product = _Product.of(call, tensor, weights, contraction, result)
    if product is None:
        weights.on_unfollowed_use(tensor, result)
        return result
    softmax.products += not softmax.has_ended
    reason = _why_left_out(product, result)
    if reason is not None:
        current_session().report_unreadable(softmax.module_calls, reason)
        return result
    output = AttentionOutput(product, result, product.axes, product.module_calls, product.origins)
    if not softmax.has_ended:
        softmax.outputs.append((weights if tensor.numel() != softmax.elements else None, output))
        _refuse_parts(softmax)
    return hold(output, result)


def _why_left_out(product: "_Product", result: Tensor) -> str | None:
    """Return the reason why a product of weights with values cannot be reported; None if there is none. `result` is the
    tensor that the model's function returned.
    """
    weights = product.weights
    if weights.kept.are_lost:
        return CHANGED_IN_PLACE
    if not weights.softmax.compares_activations:
        return NOT_OVER_KEYS
    if adds_to_product(product.call):
        return ADDED_TENSOR
    if result.is_complex():
        return COMPLEX
    return None if average_keys(weights, product.tensor, product.key_axes[-1]) else NOT_AVERAGES


def _refuse_parts(softmax: Softmax) -> None:
    """If the weights of a softmax have several products with values, and one of them uses only some of the weights,
    exclude the outputs of all these products from the results. Each part may be another head, or other rows or keys.
    """
    parts = [weights for weights, _ in softmax.outputs if weights is not None]
    if parts and (len(softmax.outputs) > 1 or _uses_others(softmax, parts[0])):
        for _, output in softmax.outputs:
            output.refuse(WEIGHTS_IN_PARTS)


def _uses_others(softmax: Softmax, multiplied: Weights) -> bool:
    """Return True if a function used some weights of a softmax in a way that is not followed, and these are not all
    among `multiplied`, the weights of its only product. They may have been multiplied with other values.
    """
    if not softmax.used_parts or None in softmax.used_parts:
        return bool(softmax.used_parts)
    elements = multiplied.elements_of_softmax()
    is_multiplied = torch.zeros(softmax.elements, dtype=torch.bool, device=elements.device)
    is_multiplied[elements.flatten()] = True
    used = (part for part in softmax.used_parts if part is not None)
    return not all(bool(is_multiplied[part.elements_of_softmax()].all()) for part in used)


@dataclass(eq=False)
class _Product(AttentionSource):
    """One product of attention weights and values that a model computes itself, with a softmax, instead of calling an
    attention function. It is an attention call whose axis of heads may not be known yet.

    Attributes:
        call: the function call that computed it.
        tensor: the argument of the call that is the weights.
        weights: record of these weights.
        order: for each axis of the result but that of the values, the axis of `tensor` that it is; None if it is an
            axis of the values only.
        key_axes: axes of `tensor` that are the keys.
        axes: roles of the axes of the result.
        shape: shape of the result.
        module_calls: the running module calls, outermost first.
        origins: sources of the queries, keys and values.
        values: the values.
        value_labels: labels of the axes of the values in the product.
        labels: labels of the axes of its result, with that of the keys in place of the queries.
        is_observed: False if the same weights were observed in an earlier product.
        appended_keys: number of keys at the end that stand for no token.
        places: places of the weights along the axes of the product of queries and keys.
        tokens_of_values: tokens of the values; None if they are unknown.
    """

    call: FunctionCall
    tensor: Tensor
    weights: Weights
    order: list[int | None]
    key_axes: list[int]
    axes: OutputAxes
    shape: torch.Size
    module_calls: list[ModuleCall]
    origins: CallOrigins
    values: Tensor
    value_labels: tuple[Label | None, ...]
    labels: tuple[Label | None, ...]
    is_observed: bool
    appended_keys: int
    places: dict[int, Places]
    tokens_of_values: NumberedTokens | None

    @property
    def weight_axes(self) -> list[int | None]:
        """List with one element for each axis of the attention output except the axis of values, which the attention
        weights do not have. The element is the number of the corresponding axis of the weights, or None if there is
        none.
        """
        return self.order

    @property
    def tensors(self) -> list[Tensor]:
        """Attention weights and values of the product, and the weights before dropout if there is dropout."""
        undropped = self.weights.undropped
        return [self.tensor, self.values, *([] if undropped is None else [undropped])]

    @property
    def weights_id(self) -> object:
        """Identity of the attention weights: the record of the softmax that computed them. It is the same object for
        all products of the same weights.
        """
        return self.weights.softmax

    @staticmethod
    def of(
        call: FunctionCall, tensor: Tensor, weights: Weights, contraction: Contraction, result: Tensor
    ) -> "_Product | None":
        """Return an attention call for a product of attention weights with another tensor. Return None unless the
        product is summed over the softmax's axis, that of the keys, and over no other axis of the weights.
        """
        labels = contraction.labels_of(tensor)
        of_values: set[Label | None] = set().union(*contraction.labels) - set(labels)
        value_labels = [label for label in contraction.result if label in of_values]
        key_axes = [axis for axis, label in enumerate(labels) if label in contraction.summed]
        summed = {factor.axis for axis in key_axes for factor in weights.axes[axis]}
        kept = {factor.axis for axis in range(tensor.ndim) if axis not in key_axes for factor in weights.axes[axis]}
        dim = weights.softmax.dim
        if not value_labels or not key_axes or not summed <= {dim} or dim in kept:
            return None
        other = 0 if contraction.operands[1] is tensor else 1
        values, value_axes = contraction.operands[other], contraction.labels[other]
        if not {labels[axis] for axis in key_axes} <= set(value_axes):  # a sum of weights alone
            return None
        session = current_session()
        origins = session.origins_of_product(weights.softmax.origin, values)
        tokens_of_values = session.lineage.tokens.along(contraction, values, labels[key_axes[-1]])
        value_axis = contraction.result.index(value_labels[-1])
        queries = tuple(
            axis for axis, label in enumerate(contraction.result) if label in labels and label not in value_axes
        )
        order = [
            labels.index(label) if label in labels else None
            for axis, label in enumerate(contraction.result)
            if axis != value_axis
        ]
        softmax, running = weights.softmax, session.module_calls[:]
        if not softmax.has_ended:  # otherwise another module reuses the weights, in an attention call of its own
            running = [each for each in running if any(each is other for other in softmax.module_calls)]
        is_observed = softmax.has_ended or not softmax.products
        axes = OutputAxes(value_axis, queries)
        in_values = tuple(
            labels[key_axes[0]] if axis in queries else label for axis, label in enumerate(contraction.result)
        )
        sources = origins, values, value_axes, in_values, is_observed, session.appended_keys
        places = places_of(tensor), tokens_of_values
        return _Product(call, tensor, weights, order, key_axes, axes, result.shape, running, *sources, *places)

    def handlers(self, layout: HeadLayout) -> CallHandlers:
        """Report the attention call to the interceptors (objects that observe or change attention). `layout` states
        which axes of the output are the heads. Return the functions by which the interceptors observe or change the
        call.
        """
        return handlers_of_call(_ProductCall(self, layout))

    def origins_in_order(self, layout: HeadLayout) -> CallOrigins:
        """Return the sources of the call, with the tokens of its queries and keys in the order in which the weights
        have them, after functions that moved them to other places.
        """
        compared = self.weights.softmax.compared
        if compared is None or self.tensor.is_meta or not self.tensor.numel():
            return self.origins
        rows = [self.order[axis - (axis > self.axes.value)] for axis in layout.query_axes]
        query_axes = [axis for axis in rows if axis is not None]
        compared_queries = {axis for each in query_axes for axis in self._compared_in(each)} - {compared.key}
        others = [axis for axis in range(self.tensor.ndim) if self._compared_in(axis) - {compared.key}]
        keys = order_along(self.places.get(compared.key), self.key_axes, others)
        queries = [order_along(self.places.get(axis), query_axes, self.key_axes) for axis in compared_queries]
        if not keys.is_common:
            for innermost in innermost_calls(self.module_calls):
                if type(innermost.interceptor).observe is not Interceptor.observe:
                    innermost.interceptor.on_unreadable(innermost.path, KEYS_MOVED)
        are_moved = any(each.places is not None or not each.is_known for each in (keys, *queries))
        if not queries and prod(self.tensor.shape[axis] for axis in query_axes) > 1:  # computed one after the other
            are_moved = True
        places = None if are_moved else self.places.get(compared.key)
        added = () if places is None else queries_of_self_attention(places.added, current_session().lineage)
        origins = self.origins._replace(added=added)
        if compared.tokens is None or len(queries) > 1:
            return origins._replace(are_moved=are_moved)
        of_queries = (queries[0] if queries else Order()).of(compared.tokens.queries)
        of_keys = keys.of(compared.tokens.keys)
        if of_queries is None or of_keys is None:
            return origins._replace(are_moved=True)
        if of_keys.numbers.shape[-1] != prod(self.tensor.shape[axis] for axis in self.key_axes):
            return origins
        return origins._replace(tokens=ComparedTokens(of_queries, of_keys, self.tokens_of_values))

    def _compared_in(self, axis: int) -> set[int]:
        """Return the axes of the product of queries and keys that are in an axis of the weights."""
        compared = self.weights.softmax.compared
        of_scores = () if compared is None else compared.of_scores
        return {each for factor in self.weights.axes[axis] if factor.axis >= 0 for each in of_scores[factor.axis]}

    def values_of_keys(
        self, layout: HeadLayout, width: int | None = None
    ) -> Float[Tensor, "batch heads keys features"] | None:
        """Return the values of all keys, or the first `width` features of these values. They are used in place of the
        keys to recognise cached keys in later calls. Return None if the keys or the queries are spread over several
        axes.

        Args:
            layout: roles of the axes.
            width: largest number of features; None for all.
        """
        if len(self.key_axes) > 1 or len(layout.query_axes) > 1 or layout.query_axes[0] not in self.axes.queries:
            return None
        if any(head.axis in layout.query_axes for head in layout.heads):
            return None
        of_heads_only = set(self.axes.queries).difference(layout.query_axes)  # heads that share values
        labels = [object() if axis in of_heads_only else label for axis, label in enumerate(self.labels)]
        in_order = [label for label in labels if label in self.value_labels]
        others = [axis for axis, label in enumerate(self.value_labels) if label not in in_order]
        order = [*others, *(self.value_labels.index(label) for label in in_order)]
        values = self.values.detach().permute(order)[(0,) * len(others)]
        for axis, label in enumerate(labels):
            values = values if label in self.value_labels else values.unsqueeze(axis)
        features = values.shape[layout.value_axis]
        values = values.narrow(layout.value_axis, 0, features if width is None else min(features, width))
        shape = list(self.shape)
        for axis in (layout.value_axis, *layout.query_axes):
            shape[axis] = values.shape[axis]
        return replace(layout, shape=tuple(shape)).by_head(values.expand(shape))

    def arranged(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, which has the axes of the attention weights, with these axes in the order of the output's
        axes. The axis of the keys takes the place of the output's axis of values.
        """
        order = [axis for axis in self.order if axis is not None]
        squeezed = [axis for axis in range(tensor.ndim) if axis not in order and axis not in self.key_axes]
        arranged = tensor.permute(*squeezed, *order, *self.key_axes).flatten(-len(self.key_axes))
        arranged = arranged[(0,) * len(squeezed)]
        for position, axis in enumerate(self.order):
            arranged = arranged.unsqueeze(position) if axis is None else arranged
        arranged = arranged.movedim(-1, self.axes.value)
        shape = list(self.shape)
        shape[self.axes.value] = arranged.shape[self.axes.value]
        return arranged.expand(shape)


class _ProductCall(AttentionCall):
    """One attention call that a model computes itself, as a product of softmax weights and values, instead of calling
    an attention function. Its axis of heads is known.

    Args:
        product: the product.
        layout: roles of its axes.
    """

    has_weights = True

    def __init__(self, product: _Product, layout: HeadLayout) -> None:
        self._product, self._layout = product, layout
        self.module_calls, self.origins = product.module_calls, product.origins_in_order(layout)
        self.is_observed, self.appended_keys = product.is_observed, product.appended_keys

    @cached_property
    def grid(self) -> Grid:
        """Sizes of the score tensor, `(batch, heads, queries, keys)`, and the device of the weights."""
        keys = prod(self._product.tensor.shape[axis] for axis in self._product.key_axes)
        return Grid(*self._layout.sizes, keys, self._product.tensor.device)

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads: each head has its own weights and values."""
        return self.grid.heads

    @property
    def value_dim(self) -> int:
        """Number of features of a value vector."""
        return self._product.shape[self._product.axes.value]

    @property
    def keys(self) -> Tensor | None:
        """Features of the values of all keys, by which later calls recognise cached keys."""
        return self._product.values_of_keys(self._layout, FINGERPRINT_WIDTH)

    def stated_problem(self) -> None:
        """Return None: a `Problem` cannot state the call, since queries and keys are unknown."""

    def _by_head(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the axes of the weights, rearranged to `(batch, heads, queries, keys)`."""
        return self._layout.by_head(self._product.arranged(tensor)).detach()

    def received(self) -> ReceivedMask:
        """Return the mask of the attention call, read from its tensors. A key counts as hidden if its score is -inf or
        a mask's large negative number, or if the model set its weight to 0 after the softmax.
        """
        return self._received

    @cached_property
    def _received(self) -> ReceivedMask:
        weights = self._product.weights
        visible = ~hidden_by_scores(self._by_head(weights.scores()), may_be_masked=weights.softmax.may_be_masked)
        if weights.zeroed is not None:
            visible &= ~self._by_head(weights.zeroed.expand(self._product.tensor.shape))
        return ReceivedMask(Dense(visible), Grid(*self._layout.sizes, visible.shape[3], visible.device))

    def weights(self, out: Tensor) -> KnownWeights:
        """Return the attention weights before dropout, and their product with the values."""
        product, known = self._product, self._product.weights
        undropped = known.undropped
        if undropped is not None:
            repeated = product.call.replaced(product.tensor, undropped.to(product.tensor.dtype))
            out = self._layout.by_head(repeated.run())
        weights = self._by_head(product.tensor if undropped is None else undropped)
        hidden_rows = ~self._received.block(range(weights.shape[2])).any(-1, keepdim=True)
        if bool(hidden_rows.any()):
            weights = weights.masked_fill(hidden_rows, 0.0)  # softmax may be uniform there
        scores = unshifted(self._by_head(known.scores()))
        if known.softmax.products <= 1:
            values = product.values_of_keys(self._layout)
            return KnownWeights(weights, out, values, lambda: (scores, None), is_checked=True)
        for innermost in innermost_calls(product.module_calls):
            innermost.interceptor.on_left_out(innermost.path, WEIGHTS_USED_TWICE)
        return KnownWeights(weights, None, None, lambda: (scores, None))

    def uniform_output(self) -> Float[Tensor, "batch heads queries value_dim"]:
        """Return the output of each head if every query attended with equal weights to all keys that it may see."""
        product, weights = self._product, self._product.weights
        zeroed, scores, key = weights.zeroed, weights.scores(), product.key_axes[0]
        uniform = uniform_weights(
            scores.movedim(key, -1),
            None if zeroed is None else zeroed.expand(scores.shape).movedim(key, -1),
            may_be_masked=weights.softmax.may_be_masked,
        ).movedim(-1, key)
        return self._layout.by_head(product.call.replaced(product.tensor, uniform.to(product.tensor.dtype)).run())
