"""Tensors whose attention cannot be read: of classes that store values in their own way, or without readable values."""

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack

from headwise.attention.problem import DTYPES


def has_usual_values(tensor: Tensor) -> bool:
    """Return True if a tensor's values can be used in products with other tensors. They cannot if the tensor is nested,
    distributed, quantised, on the meta device, or of a dtype such as float8.
    """
    is_usual_class = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and not tensor.is_nested
    return is_usual_class and not tensor.is_meta and tensor.dtype in DTYPES


def why_not_read(tensor: Tensor) -> str | None:
    """Return the reason why attention over `tensor` cannot be read, if the tensor stores its values in its own way, as
    nested and distributed tensors do. Return None for usual tensors.
    """
    if not tensor.is_nested and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__:
        return None
    kind = "NestedTensor" if tensor.is_nested else type(tensor).__name__
    return f"attention over tensors of the class {kind} is neither observed nor changed; pass padded, local tensors"


def has_no_numbers() -> bool:
    """Return True inside function transforms such as `torch.func.vmap`. Tensors have no concrete numbers there, so
    Python conditions cannot depend on them.
    """
    return bool(get_interpreter_stack())


def why_not_observed(device: torch.device) -> str | None:
    """Return the reason why attention on `device` cannot be observed now: it is the meta device, or the code runs in
    `torch.func.vmap`. Return None if attention can be observed.
    """
    if device.type == "meta":
        return "attention on the meta device has no values; load the weights on another device"
    if any(interpreter.key() == TransformType.Vmap for interpreter in get_interpreter_stack() or ()):
        return "attention under torch.func.vmap cannot be observed; call the model with a batch"
    return None
