"""The linear map that a module computes: read from its weight, or found by calls of a copy of the module."""

import inspect
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from headwise.attention.autocast import without_autocast
from headwise.intercept.call_stack import call_stack
from headwise.intercept.unreadable_tensors import has_usual_values
from headwise.shapes import Float

LARGEST_NONLINEARITY = 1e-4
"""Largest relative difference between a module's output and that of a linear map which counts as rounding in float32.
In other dtypes, four times the distance between 1 and the next number may be more.
"""

LARGEST_MODULE = 16
"""Largest number of parameters of a module that is called to find its map, in multiples of the parameters of a square
map."""


class LinearMap(NamedTuple):
    """Matrix and offset of the map x -> W x + b.

    Attributes:
        weight: the matrix.
        bias: the offset; None if it is 0.
    """

    weight: Float[Tensor, "out width"]
    bias: Float[Tensor, " out"] | None


def linear_map(module: nn.Module, width: int) -> LinearMap | None:
    """Return the map that a module computes from its input to its output in evaluation mode, if this is a linear map of
    `width` features; otherwise None.

    The map of a plain linear layer is its weight. Other modules are copied, and the copy is called with unit vectors:
    layers with adapters, parametrised or quantised weights, sequences of layers, convolutions of width 1. Hooks of the
    module are not called.
    """
    plain = _plain_map(module)
    if plain is not None:
        return plain if plain.weight.shape[1] == width else None
    if not _takes_one_input(module) or not may_fit(module, width):
        return None
    with call_stack.paused(), torch.no_grad(), torch.random.fork_rng(_gpus_of(module)):
        try:
            return _found_map(_copy_without_hooks(module).eval(), width)
        except Exception:  # whatever a module of unknown class raises for an input that it was not written for
            return None


def has_convolution(module: nn.Module) -> bool:
    """Return True if a module is or contains a convolution, so that its features are on the second axis."""
    return _first_convolution(module) is not None


def _first_convolution(module: nn.Module) -> nn.Conv1d | nn.Conv2d | nn.Conv3d | None:
    """Return the first convolution in a module, which may be the module itself; None if there is none."""
    return next((each for each in module.modules() if isinstance(each, nn.Conv1d | nn.Conv2d | nn.Conv3d)), None)


def _plain_map(module: nn.Module) -> LinearMap | None:
    """Return the map of a linear layer of torch, or of a `Conv1D` of transformers, whose weight and `forward` are those
    of its class; None for every other module.
    """
    is_conv1d = type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
    if not is_conv1d and type(module) not in (nn.Linear, NonDynamicallyQuantizableLinear):
        return None
    weight = module._parameters.get("weight")
    if "forward" in vars(module) or weight is None or weight.ndim != 2 or not has_usual_values(weight):
        return None
    return LinearMap(weight.mT if is_conv1d else weight, module._parameters.get("bias"))


def _takes_one_input(module: nn.Module) -> bool:
    """Return True if a module can be called with one positional argument."""
    try:
        inspect.signature(module.forward).bind(None)
    except (TypeError, ValueError):  # other arguments are required, or `forward` has no signature
        return False
    return True


def may_fit(module: nn.Module, width: int) -> bool:
    """Return True if a module has tensors on a device, one of them with an axis of `width`, and is not so large that a
    copy would cost much more than a square map of `width` features.
    """
    tensors = [*module.parameters(), *module.buffers()]
    if not tensors or any(tensor.is_meta for tensor in tensors):
        return False
    is_small = sum(tensor.numel() for tensor in tensors) <= LARGEST_MODULE * width**2 + 2**20
    return is_small and any(size % width == 0 for tensor in tensors for size in (*tensor.shape, tensor.numel()) if size)


def _copy_without_hooks(module: nn.Module) -> nn.Module:
    """Return a deep copy of a module that calls no hooks but those of torch's `weight_norm` and `spectral_norm`, which
    compute weights. Other hooks are not copied: with them, the objects that they belong to would be.
    """
    memo: dict[int, Any] = {}  # copies by the identity of what is copied
    for each in module.modules():
        for name, value in vars(each).items():
            if "_hooks" in name and isinstance(value, dict):
                hooks = [hook for hook in value.values() if callable(hook)]
                foreign = [hook for hook in hooks if not type(hook).__module__.startswith("torch.nn.utils")]
                memo.update((id(hook), _do_nothing) for hook in foreign)
            elif isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach()  # a weight that such a hook has computed
    return deepcopy(module, memo)


def _do_nothing(*_: Any, **__: Any) -> None:
    """Take the place of a hook in a copy of a module."""


def _found_map(module: nn.Module, width: int) -> LinearMap | None:
    """Return the linear map that a module computes, by its outputs for 0 and for unit vectors. Return None if its
    outputs for other vectors differ from the map by more than rounding.
    """
    tensors = [*module.parameters(), *module.buffers()]
    dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
    device = tensors[0].device
    wave = torch.arange(width, device=device, dtype=torch.float64)
    tests = torch.stack([(0.7 * wave).cos(), -(0.7 * wave).cos(), 3.0 * (1.9 * wave).sin()]).to(dtype)
    units = torch.eye(width, device=device, dtype=dtype)
    with without_autocast(device):
        outputs = _outputs(module, torch.cat([torch.zeros_like(units[:1]), units, tests]))
    if outputs is None:
        return None
    exact = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    bias, weight, found = exact[0], (exact[1 : 1 + width] - exact[0]).mT, exact[1 + width :]
    mapped = tests.to(exact.dtype) @ weight.mT + bias
    tolerance = max(LARGEST_NONLINEARITY, 4 * torch.finfo(outputs.dtype).eps)
    is_linear = (mapped - found).norm(dim=-1) <= tolerance * (mapped.norm(dim=-1) + bias.norm())
    return LinearMap(weight, bias) if bool(is_linear.all()) else None


def _outputs(module: nn.Module, inputs: Float[Tensor, "rows width"]) -> Float[Tensor, "rows out"] | None:
    """Return the outputs of a module for input vectors; None if they are not one vector each. The vectors are passed as
    tokens `(1, rows, width)`; to a module of convolutions as `(rows, width, 1, ...)`, with as many axes as these have.
    """
    convolution = _first_convolution(module)
    if convolution is not None:
        outputs = module(inputs[(..., *(None,) * (len(convolution.kernel_size)))])
        is_usable = isinstance(outputs, Tensor) and outputs.shape[2:].numel() == 1
        return outputs.flatten(1) if is_usable else None
    outputs = module(inputs[None])
    is_usable = isinstance(outputs, Tensor) and outputs.ndim == 3 and outputs.shape[:2] == (1, len(inputs))
    return outputs[0] if is_usable else None


def _gpus_of(module: nn.Module) -> set[torch.device]:
    """Return the GPUs on which a module has parameters."""
    return {parameter.device for parameter in module.parameters() if parameter.is_cuda}
