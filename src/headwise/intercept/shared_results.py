"""Results that are computed once for the same inputs, such as facts about a mask that several layers receive."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from headwise.attention.masks.grid import Grid
from headwise.intercept.received_mask import ReceivedMask

Result = TypeVar("Result")

MOST_RESULTS = 32
"""Largest number of stored results, those of about eight layers. Inputs that differ in each layer fill memory."""


class SharedResults:
    """Cache of the most recently used results, by the inputs from which they were computed. A tensor counts as the same
    input if it has the same memory and has not changed. The cache keeps the inputs, so that no other object can get
    their identity.
    """

    def __init__(self) -> None:
        self._results: OrderedDict[Hashable, tuple[Any, tuple[Any, ...]]] = OrderedDict()
        self._latest_of_kind: dict[str, tuple[list[Any], list[int], Any]] = {}
        self._latest: ReceivedMask | None = None
        self._contents: dict[Hashable, tuple[int, Tensor]] = {}

    def of(self, compute: Callable[[], Result], kind: str, *inputs: Any) -> Result:
        """Return the result of `compute`, which takes no arguments but depends on `inputs`. If a result of this `kind`
        for the same inputs is cached, return that one and do not call `compute`. The cached result is found fastest if
        the inputs are the same objects as in the latest call for this kind, as in most layers of a model.
        """
        objects, versions = list(inputs), [self._version(each) for each in inputs if isinstance(each, Tensor)]
        latest = self._latest_of_kind.get(kind)
        is_known = latest is not None and latest[1] == versions and len(latest[0]) == len(objects)
        if latest is not None and is_known and all(map(_is_same, latest[0], objects)):
            known: Result = latest[2]
            return known
        result = self._of_equal(compute, kind, *inputs)
        self._latest_of_kind[kind] = objects, versions, result
        return result

    def _of_equal(self, compute: Callable[[], Result], *inputs: Any) -> Result:
        """Return the result of `compute`, or a cached one if `inputs` are the same as for an earlier result."""
        key = tuple(map(self._identity, inputs))
        if key not in self._results:
            self._results[key] = compute(), inputs
            if len(self._results) > MOST_RESULTS:
                self._results.popitem(last=False)
        self._results.move_to_end(key)
        result: Result = self._results[key][0]
        return result

    def _identity(self, value: Any) -> Hashable:
        """Return a dictionary key for one input of a computation. Two tensors have equal keys if they are views of the
        same memory with the same layout, and the memory was not changed in between. For a string, number, size or None
        the key is the value; for other objects it is the identity.
        """
        if isinstance(value, Tensor):
            return _memory(value), self._version(value)
        return value if isinstance(value, _BY_VALUE) or value is None else id(value)

    def _version(self, tensor: Tensor) -> int:
        """Return a number that differs after each change of a tensor in place. Torch counts these changes, except for
        tensors that are made in inference mode. Such a tensor is compared with a copy from the previous call of this
        method.
        """
        if not tensor.is_inference():
            return tensor._version
        memory = _memory(tensor)
        number, copy = self._contents.get(memory, (0, None))
        if copy is None or not torch.equal(copy, tensor):
            number += 1
            self._contents[memory] = number, tensor.clone()
        return number

    def latest_of(self, mask: ReceivedMask | None) -> ReceivedMask | None:
        """Return the mask object that the previous call of this method returned, if it equals `mask`; otherwise return
        `mask`. For the earlier object, cached results are found again.
        """
        if mask is None or self._latest is None or not mask.equals(self._latest):
            self._latest = mask
        return self._latest


_BY_VALUE = str, int, Grid
"""Types of inputs that are compared by their value."""


def _is_same(one: Any, other: Any) -> bool:
    """Return True if two inputs of a computation are the same object, or equal numbers, strings or sizes."""
    return one is other or (type(one) is type(other) and isinstance(one, _BY_VALUE) and one == other)


def _memory(tensor: Tensor) -> Hashable:
    """Return what identifies the memory of a tensor: its address, dtype, shape, strides and device."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device
