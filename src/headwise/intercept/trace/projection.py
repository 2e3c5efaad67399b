"""The output projection of an attention module, found by its name and by the map that it computes."""

import inspect
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from headwise.attention.autocast import without_autocast
from headwise.convert.layers import LinearMap
from headwise.families.registry import family_of, relative_path
from headwise.intercept.trace.state import paused
from headwise.intercept.unreadable_tensors import has_usual_values
from headwise.shapes import Float

PROJECTION_NAMES = (
    *("o_proj", "out_proj", "out", "c_proj", "o", "dense", "out_lin", "wo", "to_out", "proj", "output"),
    *("Wo", "linear_out", "projection", "projection_layer", "post_proj"),
)
"""Usual names of output projections in modules of unknown architectures, such as DistilBERT; in the second line, in
ModernBERT, Wav2Vec2-BERT, BLIP, InternVL and Funnel Transformer.
"""


class OutputProjection(NamedTuple):
    """Output projection of an attention module: the path of the module that applies it to the outputs of all heads, and
    the linear map that this module computes.

    Attributes:
        path: path of the module in the model.
        map: the linear map.
    """

    path: str
    map: LinearMap


def output_projection(modules: Mapping[str, nn.Module], path: str, width: int) -> OutputProjection | None:
    """Return the output projection of the attention module at `path`, with the linear map that it computes; None if
    there is none. The projection is searched for inside of and next to the attention module: first by the name that is
    known for the architecture, then by usual names (`o_proj`, `c_proj`, ...). It must compute a linear map of `width`
    features; adapters and dropout are allowed.

    It is a child of that module, of its parent, or, as in BERT, of the parent's child `output`. Else it is the only
    linear layer with such a name and width in that module, as where a model calls a method of its attention module.
    `modules` has all modules of the model by path.
    """
    for child_path, child in _named_modules(modules, path, width):
        found = linear_map(child, width)
        if found is not None:
            return OutputProjection(child_path, found)
    inside = [
        (each, module)
        for each, module in modules.items()
        if each.startswith(f"{path}." if path else "") and each.rpartition(".")[2] in PROJECTION_NAMES
    ]
    fitting = [(each, module) for each, module in inside if type(module) is nn.Linear and module.in_features == width]
    if len(fitting) != 1:
        return None
    found = linear_map(fitting[0][1], width)
    return None if found is None else OutputProjection(fitting[0][0], found)


def _named_modules(modules: Mapping[str, nn.Module], path: str, width: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield candidates for the output projection with their paths: first the module that is known for the architecture,
    then those with usual names, inside of and next to the attention module. If such a module is a sequence or list of
    modules, and only one element fits `width`, yield this element, too.
    """
    family = family_of(modules[path]) if path in modules else None
    if family is not None and (known := modules.get(relative_path(path, family.output))) is not None:
        yield relative_path(path, family.output), known
    parent = path.rpartition(".")[0] if path else ""
    beside = f"{parent}.output" if parent else "output"
    for owner in (path, beside, parent):
        for name in PROJECTION_NAMES:
            child_path = f"{owner}.{name}" if owner else name
            child = modules.get(child_path)
            if child is None or child_path == path:
                continue
            if not isinstance(child, nn.ModuleList | nn.ModuleDict):
                yield child_path, child
            if isinstance(child, nn.Sequential | nn.ModuleList):
                fitting = [(number, element) for number, element in child.named_children() if may_fit(element, width)]
                yield from [(f"{child_path}.{number}", element) for number, element in fitting if len(fitting) == 1]


@torch.no_grad()
def gram_of(
    weight: Float[Tensor, "out width"], heads: int, value_dim: int
) -> Float[Tensor, "heads value_dim value_dim"]:
    """Return the matrix `W_h^T W_h` for each head h, where `W_h (out, value_dim)` is the slice of the output
    projection's weight that multiplies the output of head h.

    For a head's output `o`, `o^T (W_h^T W_h) o` is the squared norm of its projection.
    """
    slices = weight.detach().to(torch.promote_types(weight.dtype, torch.float32)).unflatten(1, (heads, value_dim))  # type: ignore[no-untyped-call]
    by_head: Tensor = slices.permute(1, 0, 2)
    return by_head.mT @ by_head


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
    with (
        paused(),
        torch.no_grad(),
        torch.random.fork_rng({each.device for each in module.parameters() if each.is_cuda}),
    ):
        try:
            return _found_map(_copy_without_hooks(module).eval(), width)
        except Exception:  # whatever a module of unknown class raises for an input that it was not written for
            return None


def has_convolution(module: nn.Module) -> bool:
    """Return True if a module contains a convolution, so that its features are on the second axis."""
    return _first_convolution(module) is not None


def _first_convolution(module: nn.Module) -> nn.Conv1d | nn.Conv2d | nn.Conv3d | None:
    return next((each for each in module.modules() if isinstance(each, nn.Conv1d | nn.Conv2d | nn.Conv3d)), None)


def _plain_map(module: nn.Module) -> LinearMap | None:
    """Return the linear map (weight and bias) of a module that is torch's `nn.Linear`, or `Conv1D` of `transformers`.
    Return None for any other module, and for a layer whose weight or `forward` was replaced.
    """
    is_conv1d = type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
    if not is_conv1d and type(module) not in (nn.Linear, NonDynamicallyQuantizableLinear):
        return None
    weight = module._parameters.get("weight")
    if "forward" in vars(module) or weight is None or weight.ndim != 2 or not has_usual_values(weight):
        return None
    return LinearMap(weight.mT if is_conv1d else weight, module._parameters.get("bias"))


def _takes_one_input(module: nn.Module) -> bool:
    try:
        inspect.signature(module.forward).bind(None)
    except (TypeError, ValueError):  # other arguments are required, or `forward` has no signature
        return False
    return True


def may_fit(module: nn.Module, width: int) -> bool:
    """Return True if a module may be a linear map of `width` input features: the size of some tensor is a multiple of
    `width`, no tensor is on the meta device, and the module is small enough to copy it.
    """
    tensors = [*module.parameters(), *module.buffers()]
    if not tensors or any(tensor.is_meta for tensor in tensors):
        return False
    is_small = sum(tensor.numel() for tensor in tensors) <= LARGEST_MODULE * width**2 + 2**20
    return is_small and any(size % width == 0 for tensor in tensors for size in (*tensor.shape, tensor.numel()) if size)


def _copy_without_hooks(module: nn.Module) -> nn.Module:
    """Return a deep copy of a module without hooks, except torch's `weight_norm` and `spectral_norm`, which compute
    weights. Other hooks are left out, since the objects that own them would be copied, too.
    """
    memo: dict[int, Any] = {}  # copies by the identity of what is copied
    for each in module.modules():
        for name, value in vars(each).items():
            if "_hooks" in name and isinstance(value, dict):
                hooks = [hook for hook in value.values() if callable(hook)]
                foreign = [hook for hook in hooks if not type(hook).__module__.startswith("torch.nn.utils")]
                memo.update((id(hook), lambda *_, **__: None) for hook in foreign)
            elif isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach()  # a weight that such a hook has computed
    return deepcopy(module, memo)


def _found_map(module: nn.Module, width: int) -> LinearMap | None:
    """Return the linear map that a module computes, derived from its outputs. The output for 0 is the bias, and the
    outputs for unit vectors, minus the bias, are the columns of the weight. Return None if outputs for test vectors
    differ from this map by more than rounding.
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
    """Return the output vectors of a module for the vectors `inputs`, passed as tokens `(1, rows, width)`, or as
    `(rows, width, 1, ...)` if it contains a convolution. Return None if the output has another form.
    """
    convolution = _first_convolution(module)
    if convolution is not None:
        outputs = module(inputs[(..., *(None,) * (len(convolution.kernel_size)))])
        is_usable = isinstance(outputs, Tensor) and outputs.shape[2:].numel() == 1
        return outputs.flatten(1) if is_usable else None
    outputs = module(inputs[None])
    is_usable = isinstance(outputs, Tensor) and outputs.ndim == 3 and outputs.shape[:2] == (1, len(inputs))
    return outputs[0] if is_usable else None
