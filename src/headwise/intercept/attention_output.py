"""Output of one attention call, held until the model shows which axis is the heads.

weights @ values, or SDPA --> AttentionOutput: its axes are followed through the functions that the model calls
reshape, permute, ...     --> the axis of the values is merged with the heads
linear map, or another use--> the layout is established: interceptors receive the call, gates change the output
end of the module         --> the weights are passed to the observers
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from headwise.errors import InputError
from headwise.families.head_module import HEAD_COUNTS
from headwise.intercept.attention_source import AttentionSource, OutputAxes
from headwise.intercept.axes import Factor
from headwise.intercept.call_handlers import CallHandlers
from headwise.intercept.call_site import number_layer
from headwise.intercept.head_layout import HeadLayout
from headwise.intercept.in_place_changes import TensorVersions, share_memory
from headwise.intercept.interceptor import Interceptor
from headwise.intercept.module_call import ModuleCall, innermost_calls, report_unreadable
from headwise.intercept.origin import CallOrigins
from headwise.intercept.refusals import CHANGED_IN_PLACE, HEADS_CONTRADICT, HEADS_UNKNOWN
from headwise.intercept.session import current_session


class AttentionOutput:
    """Output tensor of one attention call of a model, kept until later operations of the model show which of its axes
    are the heads.

    Args:
        source: the attention call; None if it was reported to the interceptors, which have changed the output.
        tensor: output, as the model computed it.
        axes: roles of its axes.
        module_calls: the running module calls, outermost first.
        origins: sources of the queries, keys and values.
        axis_of_heads: axis of the heads of an output that was reported; None for other outputs.
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
        weights_id: identity of the attention weights. Outputs with the same object were computed from the same weights.
    """

    def __init__(
        self,
        source: AttentionSource | None,
        tensor: Tensor,
        axes: OutputAxes,
        module_calls: list[ModuleCall],
        origins: CallOrigins,
        axis_of_heads: int | None = None,
        number: int | None = None,
    ) -> None:
        self.shape, self.axes, self.module_calls, self.axis_of_heads = tensor.shape, axes, module_calls, axis_of_heads
        self.merged: HeadLayout | None = None
        self.refusal: str | None = None
        interceptors = {id(call.interceptor): call.interceptor for call in module_calls}.values()
        self._interceptors = [each for each in interceptors if current_session().only_interceptor in (None, each)]
        changing = [each for each in self._interceptors if type(each).change is not Interceptor.change]
        self.may_change = bool(changing) and source is not None
        self.is_established = self.is_reported = source is None
        self.is_lost = self.is_projected = False
        self.origins, self._number = origins, number
        self.weights_id = object() if source is None else source.weights_id
        self._source = source
        self._tensor = None if source is None else tensor  # a reported output would be kept in memory by its own entry
        self._layout: HeadLayout | None = None
        self._stated = None if source is None else self._stated_layout(source)
        self._versions = None if source is None else TensorVersions([tensor, *source.tensors])
        self._is_overwritten = False
        self._handlers: CallHandlers | None = None
        self._changed: Tensor | None = None
        for innermost in innermost_calls(module_calls) if source is not None else ():
            number_layer(innermost, origins)
        for module_call in module_calls:
            module_call.projected.clear()
        self._change = object()  # stands for the change in records that must not keep this object in memory

    def establish(self, layout: HeadLayout, *, may_hide_heads: bool = False) -> None:
        """Set the layout of the heads in this attention output: which axes, or parts of axes, are the heads. The layout
        becomes known when the model uses the output, for example in a linear map. If the layout contradicts the number
        of heads that the module stores, exclude the call from the results.

        Args:
            layout: the layout.
            may_hide_heads: True if another axis may be heads, which the model merges with the values later, or one by
                one.

        Raises:
            InputError: heads of another layout were changed already, or the user stated another one.
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
        """Record that the model applies a linear map to the output, with the parameters `weights`. Report the map to
        the interceptors.
        """
        self.is_projected = True
        if self._number is not None and self.module_calls[0].recording is not None:
            self.module_calls[0].recording.on_projected(self._number, weights)
        for innermost in innermost_calls(self.module_calls):
            innermost.interceptor.on_projected(innermost.path, weights)

    def on_overwritten(self, tensor: Tensor) -> None:
        """Record that the model overwrites `tensor` in place. This matters only if the attention output, its weights or
        its values have the same memory.
        """
        read = [] if self._source is None or self._tensor is None else [self._tensor, *self._source.tensors]
        self._is_overwritten |= any(share_memory(tensor, each) for each in read)

    @property
    def may_be_one_head(self) -> bool:
        """True if the established layout has one head, but the module may have more heads, which it computes in
        separate calls.
        """
        is_one = self._layout is not None and self._layout.head_count == 1
        return is_one and 1 not in head_counts(self.module_calls[-1:])

    def is_other_head_of(self, other: "AttentionOutput", *, as_features: bool) -> bool:
        """Return True if this output and `other` may be different heads of one attention layer. The same call of a
        module must have computed both, from different values or different attention weights.

        Args:
            other: the other output.
            as_features: True if the model concatenates both along the features.
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
        attention layer, and the model has not yet applied a linear map to one of them. Outputs whose queries come from
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
            self.refuse(HEADS_UNKNOWN)
            return None
        handlers, source, tensor = self._handlers_with(layout), self._source, self._tensor
        if self._changed is None and source is not None and tensor is not None:
            self.may_change = bool(handlers.changes)
            if self.may_change:
                out = handlers.changed(
                    layout.by_head(tensor), lambda: source.uniform_output(layout), lambda: source.stated_problem(layout)
                )
                self._changed = layout.from_heads(out)
                current_session().attention.unchanged.pop(self._change, None)
        return self._changed

    def finish(self, *, is_last: bool = False) -> bool:
        """Report the attention call to the interceptors, and pass its attention weights to those that observe. If there
        is a reason not to report the call, report its module as unreadable for this reason instead. Return False if the
        heads are still unknown, so that nothing was reported. Do nothing if the call was reported before.

        Args:
            is_last: True at the end of the model, after which nothing more can be learnt about the call.
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
                self.refuse(HEADS_UNKNOWN)
            else:
                return False
        has_changed = self._versions is not None and self._versions.have_changed() and self._changed is None
        is_observed = any(type(each).observe is not Interceptor.observe for each in self._interceptors)
        if self.refusal is None and (has_changed or (self._is_overwritten and is_observed)):
            self.refuse(CHANGED_IN_PLACE)
        self.is_reported, self._versions = True, None
        if self.refusal is not None:
            report_unreadable(self.module_calls, self.refusal)
        elif self._layout is not None and self._source is not None and self._tensor is not None:
            handlers = self._handlers_with(self._layout)
            self._source.observe(handlers, self._layout, self._layout.by_head(self._tensor.detach()))
            self.may_change = bool(handlers.changes)
        if not self.may_change or self._changed is not None:
            self._source = self._tensor = None
        elif self.refusal is None and self.shape.numel():
            current_session().attention.unchanged[self._change] = self.module_calls
        return True

    def refuse(self, reason: str) -> None:
        """Record the reason why this attention call must not be reported to the interceptors. If it was reported
        already, tell the interceptors that it is invalid. If a reason is already recorded, keep that one.

        Raises:
            InputError: the output was changed already.
        """
        self.refusal = reason = self.refusal or reason
        if self._changed is not None:
            innermost = self.module_calls[-1]
            name = innermost.path or type(innermost.module).__name__
            raise InputError("model", expected="heads that can be gated", got=f"{reason}: {name}")
        if self.is_reported or self.may_change:
            report_unreadable(self.module_calls, reason)

    def _handlers_with(self, layout: HeadLayout) -> CallHandlers:
        """Return the functions by which the interceptors observe and change this attention call. When this method is
        first called, report the call to the interceptors, with `layout` as the layout of its heads.
        """
        if self._handlers is None:
            assert self._source is not None
            self._layout, self._handlers = layout, self._source.handlers(layout)
        return self._handlers

    def _contradicts_module(self, layout: HeadLayout) -> bool:
        """Return True if the module stores a number of heads as an attribute, and `layout` has another number.

        Raises:
            InputError: the user stated another number.
        """
        for module_call in innermost_calls(self.module_calls):
            if module_call.stated is not None:
                module_call.stated.require_heads(layout.head_count)
        counts = head_counts(self.module_calls[-1:])
        return bool(counts) and layout.head_count not in counts

    def _stated_layout(self, source: AttentionSource) -> HeadLayout | None:
        """Return the layout of the heads that the user has stated for the module of the attention call; None if there
        is no such statement.

        Raises:
            InputError: the output cannot have this layout.
        """
        for innermost in innermost_calls(self.module_calls):
            if innermost.stated is not None and innermost.stated.layout is not None:
                return innermost.stated.head_layout(self.shape, self.axes.value, source.weight_axes)
        return None

    def _predicted_layout(self, *, is_verified_later: bool) -> HeadLayout | None:
        """Return the layout of the heads that is expected from the shape of the output and the numbers of heads stored
        in the modules. Return None if shape and numbers do not determine a layout.

        Args:
            is_verified_later: accept the usual layout `(batch, heads, queries, value_dim)` without a stored number.
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


def head_counts(module_calls: Iterable[ModuleCall]) -> list[int]:
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
    """Return True if two tensors are the same view of the same memory."""

    def view(tensor: Tensor) -> tuple[Any, ...]:
        base = tensor if tensor._base is None else tensor._base
        return id(base), tensor.shape, tensor.stride(), tensor.storage_offset()

    return tensor is other or (type(tensor) is type(other) is Tensor and view(tensor) == view(other))
