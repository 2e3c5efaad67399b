"""A device that computes on the CPU and refuses what would make Python wait for a GPU, to test code without one.

`DeviceTensor` claims to be on another device and holds its values in a tensor on the CPU. Within `pretend_device()`
every operator runs on these values. Reads of values raise `HostRead`, and operators on tensors of two devices raise
`RuntimeError`, as on a GPU. Torch registers the device for the whole process, so use it in a process of its own.
"""

import contextlib

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten

READS = {
    *(aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.allclose, aten.nonzero),
    *(aten.nonzero_numpy, aten.argwhere, aten.masked_select, aten.bincount, aten.unique_consecutive),
    *(aten.unique_dim, aten._unique, aten._unique2, aten.histc),
}
"""Operators whose result, or its size, depends on values that Python has to wait for."""


_readers: list[object] = []
"""The `reads_allowed` contexts that are active."""


@contextlib.contextmanager
def reads_allowed():
    """Return a context in which values on the device may be read, for objects that are made outside of a pass."""
    _readers.append(object())
    try:
        yield
    finally:
        _readers.pop()


class HostRead(Exception):
    """An operator makes Python wait for a device."""


def reads(func, args, kwargs) -> bool:
    """Return True if an operator reads values: one of `READS`, indexing by a boolean tensor, or repetition by a
    tensor.
    """
    packet = func.overloadpacket
    if packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if packet is aten.repeat_interleave:
        return func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
    return packet in READS


class NoReads(TorchDispatchMode):
    """Mode in which every read of a value raises `HostRead`, also on the CPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if reads(func, args, kwargs or {}):
            raise HostRead(str(func))
        return func(*args, **(kwargs or {}))


class DeviceTensor(Tensor):
    """Tensor that claims to be on the pretended device, with its values in `values`, a tensor on the CPU."""

    @staticmethod
    def __new__(cls, values):
        tensor = Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=device(),
        )
        tensor.values_on_cpu = values.detach()
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run_on_device(func, types, args, kwargs or {})


class PretendDevice(TorchDispatchMode):
    """Mode in which new tensors on the pretended device are `DeviceTensor`s.

    Attributes:
        uploads: number of tensors that were copied from the CPU to the device.
    """

    def __init__(self):
        super().__init__()
        self.uploads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _uploads(func, args, kwargs):
            self.uploads += 1
        return run_on_device(func, types, args, kwargs)


def device() -> torch.device:
    """Return the pretended device; it is registered in the first call."""
    if torch._C._get_privateuse1_backend_name() != "pretended":
        _setup_privateuseone_for_python_backend("pretended")
    return torch.device("pretended:0")


@contextlib.contextmanager
def pretend_device():
    """Return a context in which operators run on the pretended device, as the mode that counts uploads."""
    device()
    with PretendDevice() as mode:
        yield mode


def run_on_device(func, types, args, kwargs):
    """Return the result of an operator as the pretended device computes it."""
    flat = [*_leaves(args), *_leaves(kwargs.values())]
    on_device = [each for each in flat if isinstance(each, DeviceTensor)]
    wanted = kwargs.get("device")
    makes = wanted is not None and torch.device(wanted).type == "pretended"
    if not on_device and not makes:
        return func(*args, **kwargs)
    if on_device and not _readers:
        if reads(func, args, kwargs):
            raise HostRead(str(func))
        if wanted is not None and not makes:
            raise HostRead(f"{func} to {wanted}")
        if _is_mixed(func, flat):
            raise RuntimeError(f"{func}: tensors on two devices")
    if on_device and wanted is not None and not makes:
        return func(*_on_cpu(args), **kwargs)
    result = func(*_on_cpu(args), **{name: _on_cpu(value) for name, value in kwargs.items()})
    wrapped = _wrapped(result)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if on_device else wrapped


def _leaves(values):
    """Yield arguments of an operator, and those in lists. For these few, torch's trees would take most of the time."""
    for each in values:
        if isinstance(each, list | tuple):
            yield from _leaves(each)
        else:
            yield each


def _is_mixed(func, flat) -> bool:
    """Return True if an operator has a tensor on the CPU that a GPU would refuse: all but numbers and sources of a
    copy.
    """
    if func in (aten.copy_.default, aten._to_copy.default):
        return False
    return any(isinstance(each, Tensor) and not isinstance(each, DeviceTensor) and each.ndim for each in flat)


def _uploads(func, args, kwargs) -> bool:
    """Return True if an operator copies a tensor of the CPU to the device."""
    if func is aten.copy_.default:
        return isinstance(args[0], DeviceTensor) and not isinstance(args[1], DeviceTensor)
    wanted = kwargs.get("device")
    is_new = wanted is not None and torch.device(wanted).type == "pretended"
    return func is aten._to_copy.default and is_new and not isinstance(args[0], DeviceTensor)


def _on_cpu(each):
    """Return the values of tensors, also in lists, and the CPU in place of a device."""
    if isinstance(each, DeviceTensor):
        return each.values_on_cpu
    if isinstance(each, list | tuple):
        return type(each)(map(_on_cpu, each))
    return torch.device("cpu") if isinstance(each, torch.device) else each


def _wrapped(result):
    """Return the result of an operator with its tensors on the device."""
    if isinstance(result, Tensor):
        return DeviceTensor(result)
    return type(result)(map(_wrapped, result)) if isinstance(result, list | tuple) else result


def on_device(tensor, *, requires_grad=False):
    """Return a tensor of the CPU as one on the pretended device."""
    if not isinstance(tensor, Tensor) or isinstance(tensor, DeviceTensor):
        return tensor
    return DeviceTensor(tensor.detach().clone()).requires_grad_(requires_grad)


def move_module(module: nn.Module, move=on_device) -> nn.Module:
    """Move the parameters of a module to a device by the function `move`, and return it."""
    moved = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                moved.setdefault(parameter, nn.Parameter(move(parameter.data)))
                part._parameters[name] = moved[parameter]
    return module
