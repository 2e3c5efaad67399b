"""One function call on the way of an attention output: what its results contain of the output, and what is lost."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from headwise.intercept.axes import VIEWS, Axes, moves_elements
from headwise.intercept.element_places import ASSIGNMENT, may_project
from headwise.intercept.function_call import FunctionCall
from headwise.intercept.head_layout import merged_axis
from headwise.intercept.output_use import FollowedOutput, axes_after_function, is_linear, layout_of
from headwise.intercept.score_products import CONCATENATIONS
from headwise.intercept.softmax_weights import COPIES

REARRANGEMENTS = VIEWS | COPIES
"""Functions after which a change of the output can still be made, by repeating them with the changed output."""

Arguments = list[tuple[Tensor, FollowedOutput]]
"""Arguments of a function call that were computed from attention outputs, each with how it was computed."""


@dataclass(frozen=True)
class OutputStep:
    """One function call through which an attention output is followed. It has one argument that was computed from the
    output, and results that may contain the output's elements.

    Attributes:
        call: the call.
        argument: the argument, which was computed from the output.
        followed: how it was computed.
        result: what the function returned.
        tensors: tensors in the result that contain elements of the output, with the axes of the output in them.
    """

    call: FunctionCall
    argument: Tensor
    followed: FollowedOutput
    result: Any
    tensors: list[tuple[Tensor, Axes]]

    @classmethod
    def of(cls, call: FunctionCall, argument: Tensor, followed: FollowedOutput, result: Any) -> "OutputStep":
        """Return a record of a function call through which an attention output is followed. `argument` was computed
        from this output, as `followed` states; `result` is what the function returned.
        """
        return cls(call, argument, followed, result, axes_after_function(call, followed, argument, result))

    @property
    def is_last(self) -> bool:
        """True if no result of the function call contains the attention output in a form that can be followed
        further.
        """
        return not self.tensors and self.argument.numel() > 0

    @property
    def loses_values(self) -> bool:
        """True if the function call removes the output's axis of values: it is in the argument and in none of the
        results.
        """
        return self._loses(self.followed.output.axes.value)

    @property
    def moves_heads(self) -> bool:
        """True if this function call may have moved elements of the attention output from one head to another."""
        output = self.followed.output
        if not self._moves_elements:
            return False
        may_lose_heads = output.axis_of_heads is not None and self._loses(output.axis_of_heads)
        return may_lose_heads or (self.loses_values and not output.is_reported)

    @property
    def _moves_elements(self) -> bool:
        """True if the function moves elements along an axis, or returns a tensor of the same shape with a possibly
        changed order.
        """
        is_same_shape = all(tensor.shape == self.argument.shape for tensor, _ in self.tensors)
        keeps_order = self.call.function in VIEWS or may_project(self.call)
        return moves_elements(self.call) or (is_same_shape and not keeps_order)

    def _loses(self, axis: int) -> bool:
        """Return True if the function call removes an axis of the attention output: it is in the argument and in none
        of the results. Return False if no result can be followed.
        """

        def is_in(axes: Axes) -> bool:
            return any(factor.axis == axis for factors in axes for factor in factors)

        return bool(self.tensors) and is_in(self.followed.axes) and not any(is_in(axes) for _, axes in self.tensors)

    def followed_results(self, arguments: Arguments) -> Iterator[tuple[Tensor, FollowedOutput]]:
        """Yield each result of the function call that contains elements of the attention output, with a record of how
        it was computed from the output.

        Args:
            arguments: all arguments of the call that were computed from attention outputs.
        """
        call, output = self.call, self.followed.output
        keeps_factors = bool(self.tensors) and self.followed.is_linear and self._keeps_factors(arguments)
        for index, (tensor, axes) in enumerate(self.tensors):
            rearranged = self._rearranged(index if isinstance(self.result, list | tuple) else None)
            yield tensor, FollowedOutput(output, axes, rearranged, keeps_factors, call.function in ASSIGNMENT)

    def _keeps_factors(self, arguments: Arguments) -> bool:
        """Return True if scaling the attention output by a factor scales the result of this function call by the same
        factor. Outputs of the same layer among the `arguments` are scaled together. Return True without a test if no
        interceptor may change the output.
        """
        call, output = self.call, self.followed.output
        if not output.may_change or call.function in REARRANGEMENTS | CONCATENATIONS:
            return True
        if call.function in ASSIGNMENT and all(argument is not call.args[0] for argument, _ in arguments):
            return True
        of_layer = [(argument, each.output) for argument, each in arguments if each.output.is_of_layer(output)]
        return is_linear(call, of_layer, self.result)

    def _rearranged(self, index: int | None) -> Callable[[Tensor], Tensor] | None:
        """Return the function that computes one result of the call from the original attention output. Return None if
        any function on the way did more than rearrange elements.

        Args:
            index: number of the tensor in the result; None if the function returned one tensor.
        """
        before = self.followed.rearranged
        if before is None or not self.followed.output.may_change or self.call.function not in REARRANGEMENTS:
            return None
        repeat = self.call.as_function_of(self.argument)

        def rearranged(tensor: Tensor) -> Tensor:
            result = repeat(before(tensor))
            after: Tensor = result if index is None else result[index]
            return after

        return rearranged


def take_note_of_merged_axis(followed: FollowedOutput) -> None:
    """Store the layout of the heads that a reshaped attention output suggests. If one axis of the tensor consists of
    the values and another axis of the output, this other axis is probably the heads.
    """
    output = followed.output
    axis = merged_axis(followed.axes, output.axes.value)
    if axis is not None:
        layout = layout_of(followed, [axis])
        output.is_lost |= layout is None
        output.merged = layout or output.merged
