"""Results that are computed once for the same inputs, such as facts about a mask that several layers receive."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor

from headwise.attention.masks.grid import Grid
from headwise.intercept.received_mask import ReceivedMask

Result = TypeVar("Result")

MOST_RESULTS = 32
"""Largest number of stored results, those of about eight layers. Inputs that differ in each layer fill memory."""


class SharedResults:
    """Results by their inputs, those that were used last. Tensors are the same input if they are the same memory and
    have not been changed since. The inputs are stored with the results, so that their identities stay theirs.
    """

    def __init__(self) -> None:
        self._results: OrderedDict[Hashable, tuple[Any, tuple[Any, ...]]] = OrderedDict()
        self._latest: ReceivedMask | None = None

    def of(self, compute: Callable[[], Result], *inputs: Any) -> Result:
        """Return the result of `compute`, which is called once for the same `inputs`, unless too many others follow."""
        key = tuple(map(_identity, inputs))
        if key not in self._results:
            self._results[key] = compute(), inputs
            if len(self._results) > MOST_RESULTS:
                self._results.popitem(last=False)
        self._results.move_to_end(key)
        result: Result = self._results[key][0]
        return result

    def latest_of(self, mask: ReceivedMask | None) -> ReceivedMask | None:
        """Return the mask that was passed to this method before, if it is equal to `mask`, so that results of one are
        those of the other. Otherwise return `mask`.
        """
        if mask is None or self._latest is None or not mask.equals(self._latest):
            self._latest = mask
        return self._latest


def _identity(value: Any) -> Hashable:
    """Return a dictionary key that is equal for the same tensor, also as another view of the same memory, as long as
    the tensor is not changed; for another object, its identity or, if it is a number, string or grid, its value.
    """
    if isinstance(value, Tensor):
        version = 0 if value.is_inference() else value._version
        return (value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), version)
    return value if isinstance(value, str | int | Grid) or value is None else id(value)
