"""The linear map that a module computes: read from its weight, or found by calls of a copy of the module."""

import inspect
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from headwise.attention.autocast import without_autocast
from headwise.convert.layers import LinearMap
from headwise.intercept.session import current_session
from headwise.intercept.unreadable_tensors import has_usual_values
from headwise.shapes import Float

LARGEST_NONLINEARITY = 1e-4
"""Largest relative difference between a module's output and that of a linear map which counts as rounding in float32.
In other dtypes, four times the distance between 1 and the next number may be more.
"""

LARGEST_MODULE = 16
"""Largest number of parameters of a module that is called to find its map, in multiples of the parameters of a square
map."""


def linear_map(module: nn.Module, width: int) -> LinearMap | None:
    """Return the linear map (weight and bias) that a module computes in evaluation mode. Return None if the module
    computes no linear map of `width` input features.

    The map of a plain linear layer is its weight. Other modules are copied, and the copy is called with unit vectors:
    layers with adapters, parametrised or quantised weights, sequences of layers, convolutions of width 1. Hooks of the
    module are not called.
    """
    plain = _plain_map(module)
    if plain is not None:
        return plain if plain.weight.shape[1] == width else None
    if not _takes_one_input(module) or not may_fit(module, width):
        return None
    with current_session().paused(), torch.no_grad(), torch.random.fork_rng(_gpus_of(module)):
        try:
            return _found_map(_copy_without_hooks(module).eval(), width)
        except Exception:  # whatever a module of unknown class raises for an input that it was not written for
            return None


def has_convolution(module: nn.Module) -> bool:
    """Return True if a module is or contains a convolution. Its input and output then have their features on the second
    axis.
    """
    return _first_convolution(module) is not None


def _first_convolution(module: nn.Module) -> nn.Conv1d | nn.Conv2d | nn.Conv3d | None:
    """Return the first convolution in a module, which may be the module itself; None if there is none."""
    return next((each for each in module.modules() if isinstance(each, nn.Conv1d | nn.Conv2d | nn.Conv3d)), None)


def _plain_map(module: nn.Module) -> LinearMap | None:
    """Return the weight and bias of a plain linear layer: torch's `nn.Linear`, or `Conv1D` of `transformers`. Return
    None for any other module, and for layers whose weight or `forward` was replaced.
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
    """Return True if a module may be a linear map of `width` input features. Some of its tensors must have a size that
    `width` divides, none may be on the meta device, and the module must be small enough to copy it.
    """
    tensors = [*module.parameters(), *module.buffers()]
    if not tensors or any(tensor.is_meta for tensor in tensors):
        return False
    is_small = sum(tensor.numel() for tensor in tensors) <= LARGEST_MODULE * width**2 + 2**20
    return is_small and any(size % width == 0 for tensor in tensors for size in (*tensor.shape, tensor.numel()) if size)


def _copy_without_hooks(module: nn.Module) -> nn.Module:
    """Return a deep copy of a module that runs without most of its hooks. Only hooks of torch's `weight_norm` and
    `spectral_norm` are kept, since they compute weights. Other hooks are not copied, because the objects that own them
    would be copied too.
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
    """Do nothing; this function replaces a hook in a copy of a module."""


def _found_map(module: nn.Module, width: int) -> LinearMap | None:
    """Return the linear map that a module computes: its output for 0 is the bias, and those for unit vectors are the
    columns of the weight. Return None if outputs for test vectors differ from this map by more than rounding.
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
    """Call a module with the vectors `inputs`, and return one output vector for each. Return None if the output has
    another form. The vectors are passed as tokens `(1, rows, width)`, or as `(rows, width, 1, ...)` if the module
    contains a convolution.
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
    """Return the GPUs that store parameters of a module."""
    return {parameter.device for parameter in module.parameters() if parameter.is_cuda}
