"""Mapping from tensor objects to records about them."""

import weakref
from functools import partial
from typing import Any, Generic, TypeVar

from torch import Tensor

Value = TypeVar("Value")


class TensorMap(Generic[Value]):
    """Mapping with tensors as keys, compared by identity. It keeps no key in memory: an entry disappears when its
    tensor no longer exists. A value must therefore not refer to its own key.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Tensor], Value]] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def get(self, tensor: Tensor) -> Value | None:
        """Return the value stored for a tensor; None if there is none."""
        entry = self._entries.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def items(self) -> list[tuple[Tensor, Value]]:
        """Return all tensors with their values."""
        pairs = [(reference(), value) for reference, value in self._entries.values()]
        return [(tensor, value) for tensor, value in pairs if tensor is not None]

    def set(self, tensor: Tensor, value: Value) -> None:
        """Store the value of a tensor, in place of an earlier one."""
        self._entries[id(tensor)] = weakref.ref(tensor, partial(_discard, self._entries, id(tensor))), value

    def discard(self, tensor: Tensor) -> None:
        """Remove the value stored for a tensor, if there is one."""
        self._entries.pop(id(tensor), None)

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()


def _discard(entries: dict[int, tuple[weakref.ref[Tensor], Any]], key: int, reference: weakref.ref[Tensor]) -> None:
    """Remove the entry of a tensor that no longer exists. Do nothing if a new tensor with the same id has an entry in
    its place.
    """
    entry = entries.get(key)
    if entry is not None and entry[0] is reference:
        del entries[key]
