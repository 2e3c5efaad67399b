"""Changes of tensors in place, between an attention call and the reading of its tensors."""

from collections.abc import Iterable

from torch import Tensor


def version_of(tensor: Tensor) -> int | None:
    """Return torch's count of the in-place changes of a tensor. Return None for tensors made in inference mode, which
    have no count.
    """
    return None if tensor.is_inference() else tensor._version


class TensorVersions:
    """Version counters of some tensors, stored when this object is created. Torch increments a tensor's counter at each
    in-place change, except in inference mode.

    Args:
        tensors: the tensors.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]

    def have_changed(self) -> bool:
        """Return True if one of the tensors was changed in place since this object was created."""
        return any(tensor._version != version for tensor, version in self._versions)


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are views of the same memory, or the same tensor."""
    if one is other or not type(one) is type(other) is Tensor or one.is_nested or one.is_sparse:
        return one is other
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
