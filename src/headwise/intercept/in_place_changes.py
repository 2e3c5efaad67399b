"""Changes of tensors in place, between an attention call and the reading of its tensors."""

from collections.abc import Iterable

from torch import Tensor

from headwise.intercept.function_call import FunctionCall, tensors_among
from headwise.intercept.undropped import DROPOUT_NAMES

_OPERATORS = frozenset(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
)
"""Names of the methods for operators such as `+=`."""

_WITHOUT_WRITING = frozenset({"requires_grad_", "detach_", "share_memory_", "rename_"})
"""Names of methods that end like those that overwrite a tensor, but change no element."""


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


def overwritten_tensors(call: FunctionCall) -> list[Tensor]:
    """Return the tensors that a function call overwrites in place, such as the argument of `add_`, the tensor `out`, or
    the list of a function such as `_foreach_mul_`.
    """
    name = getattr(call.function, "__name__", "")
    if "out" in call.kwargs:
        return tensors_among((call.kwargs["out"],))
    if name.startswith("_foreach_"):
        return tensors_among(call.args[:1]) if name.endswith("_") else []
    if name in DROPOUT_NAMES and not call.kwargs.get("training", True):
        return []
    is_method = name.endswith("_") and not name.startswith("_") and name not in _WITHOUT_WRITING
    if is_method or name in _OPERATORS or name == "__setitem__" or call.kwargs.get("inplace"):
        return call.tensors[:1]
    return []


def overwritten_tensor(call: FunctionCall) -> Tensor | None:
    """Return the first tensor that a function call overwrites in place; None if it overwrites none."""
    return next(iter(overwritten_tensors(call)), None)
