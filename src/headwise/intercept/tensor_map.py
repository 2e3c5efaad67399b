"""Mapping from tensor objects to records about them."""

import weakref
from functools import partial
from typing import Any, Generic, TypeVar

from torch import Tensor

Value = TypeVar("Value")


class TensorMap(Generic[Value]):
    """Mapping whose keys are tensors, compared by identity. It does not keep them in memory: an entry disappears with
    its tensor, so a value must not refer to its own key.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Tensor], Value]] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def get(self, tensor: Tensor) -> Value | None:
        """Return the value of a tensor; None if it has none."""
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
        """Remove the value of a tensor, if it has one."""
        self._entries.pop(id(tensor), None)

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()


def _discard(entries: dict[int, tuple[weakref.ref[Tensor], Any]], key: int, reference: weakref.ref[Tensor]) -> None:
    """Remove the entry of a tensor that no longer exists, unless another tensor has taken its key."""
    entry = entries.get(key)
    if entry is not None and entry[0] is reference:
        del entries[key]
