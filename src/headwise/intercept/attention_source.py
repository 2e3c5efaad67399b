"""Objects from which the output of an attention call is computed, before it is known which axis is the heads."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from headwise.intercept.trace.axes import HeadLayout
from headwise.shapes import Float


@runtime_checkable
class Handlers(Protocol):
    """Interface of the functions by which interceptors observe and change one attention call. `CallHandlers` implements
    it.
    """

    @property
    def changes(self) -> Sequence[object]:
        """Functions that change the output of the call."""

    def changed(self, out: Float[Tensor, "batch heads queries value_dim"], *, has_inputs: bool = True) -> Tensor:
        """Return the output of the heads after all changes. `has_inputs` is False if the model has overwritten tensors
        of the call, such as its values; a change that reads them raises `InputError` then.
        """

    def observe(self, out: Float[Tensor, "batch heads queries value_dim"]) -> None:
        """Pass the attention weights, and the output that the model computed, to the functions that observe."""


class AttentionSource(ABC):
    """Base class for one attention call whose axis of heads is not known yet. It stores the tensors from which the
    model computed the attention output. It reports the call to the interceptors when later functions have shown the
    axis.

    Attributes:
        has_usual_axes: True if the function that computes the output defines its axes as `(batch, heads, queries,
            value_dim)`, if there are four.
        values: the values, as the model passed them.
    """

    has_usual_axes = False
    values: Tensor

    @property
    @abstractmethod
    def weight_axes(self) -> Sequence[int | None]:
        """List with one element for each axis of the attention output except the axis of values, which the attention
        weights do not have. The element is the number of the corresponding axis of the weights, or None if there is
        none.
        """

    @property
    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Tensors that must stay unchanged until the attention weights are observed: the weights themselves, or the
        tensors from which they are computed again.
        """

    @property
    @abstractmethod
    def weights_id(self) -> object:
        """Identity of the attention weights: the same object for all outputs that were computed from the same
        weights.
        """

    @abstractmethod
    def handlers(self, layout: HeadLayout) -> Handlers:
        """Report the attention call to the interceptors of the model. `layout` states which of its axes are the heads.
        Return the functions by which they observe or change the call.
        """
