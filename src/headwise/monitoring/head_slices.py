"""Slices of parameters that compute the queries and keys of single heads, and their multiplication by factors.

The logit of head h is a bilinear form of its query and key, with their biases. Multiplying it by a factor g takes

- g^1/2 in the query projection and g^1/2 in the key projection, if the key is the head's own (Kimi Team 2025,
  section 2.1);
- g in the query projection, if heads share the key, which stays unchanged, so that the other heads keep their logits;
- in latent attention, g^1/2 in both parts that are not rotated and g in the rotated part of the query, since all heads
  share the rotated key.

A rotation by position is linear, and commutes with the factor.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.analysis.circuits.norms import is_norm
from headwise.attention.autocast import without_autocast
from headwise.attention.position_bias import ALiBi
from headwise.errors import InputError
from headwise.families.registry import LatentFamily, family_of, places_of_heads
from headwise.intercept.unreadable_tensors import has_usual_values
from headwise.nn.differential import DifferentialAttention
from headwise.nn.latent import LatentAttention
from headwise.nn.multihead import MultiHeadAttention
from headwise.shapes import Float


class HeadSlice(NamedTuple):
    """Slice of a parameter that computes a part of one head's query or key.

    Attributes:
        parameter: path of the parameter in the model.
        axis: axis along which it is cut.
        start: first index along the axis.
        length: number of indices.
        exponent: power of the factor of the head's logits by which the slice is multiplied.
    """

    parameter: str
    axis: int
    start: int
    length: int
    exponent: float


HeadSlices = tuple[tuple[HeadSlice, ...], ...]
"""Slices of each head of an attention module."""


def is_known(module: nn.Module) -> bool:
    """Return True for an attention module of a class whose projections are known by name: of headwise, or of a family
    of torch and transformers.
    """
    package, is_named = type(module).__module__.partition(".")[0], family_of(module) is not None
    return package == "headwise" or (package in ("torch", "transformers") and is_named) or bool(_why_not(module))


def head_slices(model: nn.Module, path: str) -> HeadSlices:
    """Return the slices that compute the query and the key of each head of the attention module at `path`.

    Raises:
        InputError: the module is of no known family, its logits do not scale with its projections, or its projections
            do more than to multiply by a weight.
    """
    module = model.get_submodule(path)
    if reason := _why_not(module):
        expected = "attention modules whose logits scale with their query and key projections"
        raise InputError("model", expected=expected, got=f"{reason} in {path or type(module).__name__}")
    places = places_of_heads(model, path)
    places.parameters(model)  # checks their lengths
    is_shared = places.num_kv_heads != places.num_heads
    exponents = {"query": 1.0 if is_shared else 0.5, "rotated query": 1.0} | ({} if is_shared else {"key": 0.5})
    slices: list[list[HeadSlice]] = [[] for _ in range(places.num_heads)]
    for blocks in places.blocks:
        if blocks.part in exponents:
            for head, of_head in enumerate(slices):
                start = blocks.start + head * blocks.step
                of_head.append(HeadSlice(blocks.parameter, blocks.axis, start, blocks.width, exponents[blocks.part]))
    return tuple(tuple(of_head) for of_head in slices)


def _why_not(module: Any) -> str | None:
    """Return what keeps the logits of an attention module from following a factor of its query and key projections,
    as a noun phrase; None for nothing.
    """
    if isinstance(module, DifferentialAttention):
        return "two maps of each head, of which the logits of one are unknown,"
    if isinstance(module, MultiHeadAttention | LatentAttention) and module.talking_before is not None:
        return "talking heads, which mix the logits of all heads,"
    has_bias = isinstance(module, MultiHeadAttention) and type(module.position_bias) not in (type(None), ALiBi)
    if has_bias or hasattr(module, "has_relative_attention_bias"):
        return "a position bias, which may be positive and does not scale with them,"
    if isinstance(family_of(module), LatentFamily):
        return None  # its norms are of the latents, in front of the projections into heads
    norms = (name for name, part in module.named_modules() if is_norm(part))
    norm = next((name for name in norms if name.rpartition(".")[2].startswith(("q", "k"))), None)
    return f"the norm {norm}, which undoes a factor of the projection before it," if norm else None


# -- multiplication by factors ----------------------------------------------------------------------------------------

Factors = Mapping[HeadSlice, float]
"""Factor of each slice."""

TOLERANCE = 2.0**-7
"""Largest difference from a product by a power of two, relative to the largest output, that counts as rounding. The
product is exact, unless the order of sums differs between calls."""


def require_scalable(model: nn.Module, slices: Iterable[HeadSlice]) -> None:
    """Raise `InputError` unless the slices can be multiplied by factors, with the effect that the output features of
    their projections are multiplied by these factors, and nothing else changes. Projections are called with random
    inputs to confirm it, with slices that are multiplied by 1/2 and restored.

    Args:
        model: the model.
        slices: the slices.
    """
    by_parameter = _by_parameter(slices)
    by_owner: dict[str, dict[str, list[HeadSlice]]] = {}
    for path, of_parameter in by_parameter.items():
        _require_values(path, model.get_parameter(path))
        owner, _, name = path.rpartition(".")
        by_owner.setdefault(owner, {})[name] = of_parameter
    _require_unshared(model, by_parameter)
    for owner, of_owner in by_owner.items():
        projection: Any = model.get_submodule(owner)
        if isinstance(projection, nn.MultiheadAttention):
            continue  # its own parameters, of which nothing else computes queries and keys
        if _is_distributed(projection.weight):
            _require_linear(owner, projection)
        elif not _scales(projection, of_owner):
            got = f"{owner} of the class {type(projection).__name__}, whose output does not"
            raise InputError("model", expected="projections whose output scales with their weight", got=got)


@torch.no_grad()
def scale_slices(model: nn.Module, factors: Factors) -> None:
    """Multiply slices of the parameters of a model by factors, in place."""
    for path, slices in _by_parameter(factors).items():
        parameter = model.get_parameter(path)
        if _is_distributed(parameter):
            _scale_distributed(parameter, {each: factors[each] for each in slices})
        else:
            for each in slices:
                _cut(parameter, each).mul_(factors[each])


def _by_parameter(slices: Iterable[HeadSlice]) -> dict[str, list[HeadSlice]]:
    by_parameter: dict[str, list[HeadSlice]] = {}
    for each in slices:
        by_parameter.setdefault(each.parameter, []).append(each)
    return by_parameter


def _cut(parameter: Tensor, piece: HeadSlice) -> Tensor:
    """Return a view of a slice of a parameter."""
    return parameter.narrow(piece.axis, piece.start, piece.length)


def _require_unshared(model: nn.Module, paths: Iterable[str]) -> None:
    """Raise `InputError` if the model uses one of the parameters at `paths` at another path too."""
    names_of: dict[Any, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), set()).add(name)
        if has_usual_values(parameter) and parameter.numel():
            names_of.setdefault((parameter.device, parameter.data_ptr()), set()).add(name)
    for path in paths:
        shared = set().union(*(names for names in names_of.values() if path in names)) - {path}
        if shared:
            expected = "query and key projections that one attention module uses alone"
            raise InputError("model", expected=expected, got=f"{path}, which is {min(shared)} too")


def _require_values(path: str, parameter: Tensor) -> None:
    """Raise `InputError` for a parameter whose values cannot be multiplied."""
    if _is_distributed(parameter):
        placements: Sequence[Any] = parameter.placements  # type: ignore[attr-defined]
        if not any(each.is_partial() for each in placements) and parameter.is_floating_point():
            return
    elif has_usual_values(parameter):
        return
    kind = type(parameter).__name__ if type(parameter) is not nn.Parameter else "a parameter"
    got = f"{path}, {kind} of {str(parameter.dtype).removeprefix('torch.')} on {parameter.device}"
    raise InputError("model", expected="weights that can be multiplied by a factor", got=got)


def _is_distributed(parameter: Tensor) -> bool:
    """Return True for a DTensor, which is divided among processes."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)


def _scale_distributed(parameter: Any, factors: Factors) -> None:
    """Multiply slices of a DTensor by factors, in place and without communication: by a vector along the axis of the
    slices, with ones elsewhere, which every process has.
    """
    from torch.distributed.tensor import DTensor, Replicate

    axis = next(iter(factors)).axis
    shape = [1] * parameter.ndim
    shape[axis] = parameter.shape[axis]
    vector = torch.ones(shape, dtype=torch.promote_types(parameter.dtype, torch.float32), device=parameter.device)
    for piece, factor in factors.items():
        _cut(vector, piece).fill_(factor)
    mesh = parameter.device_mesh
    replicated = DTensor.from_local(vector, mesh, [Replicate()] * mesh.ndim, run_check=False)
    parameter.mul_(replicated)


def _require_linear(path: str, projection: nn.Module) -> None:
    """Raise `InputError` unless a projection computes what `nn.Linear` or `Conv1D` of transformers does."""
    is_linear = isinstance(projection, nn.Linear) and type(projection).forward is nn.Linear.forward
    if "forward" in vars(projection) or not (is_linear or type(projection).__name__ == "Conv1D"):
        got = f"{path} of the class {type(projection).__name__}"
        raise InputError("model", expected="nn.Linear or Conv1D for weights that are divided among processes", got=got)


@torch.no_grad()
def _scales(projection: Any, slices_of: Mapping[str, Sequence[HeadSlice]]) -> bool:
    """Return True if the output of a projection for random inputs follows from its output before, when slices of its
    parameters are multiplied by 1/2: the features of these slices are multiplied by 1/2, and the others unchanged.

    Args:
        projection: module whose parameters have the slices; they are restored.
        slices_of: slices by the name of the parameter in the module.
    """
    weight, axis = projection.weight, slices_of["weight"][0].axis
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, weight.shape[1 - axis], generator=generator).to(weight.device, weight.dtype)
    expected = torch.ones(weight.shape[axis], dtype=weight.dtype, device=weight.device)
    pieces = [(_cut(getattr(projection, name), each), each) for name, of_name in slices_of.items() for each in of_name]
    saved = [piece.clone() for piece, _ in pieces]
    with without_autocast(weight.device):
        # `forward`, since hooks are to count calls of the model alone.
        before = projection.forward(inputs)
        try:
            for piece, each in pieces:
                piece.mul_(0.5)
                expected[each.start : each.start + each.length] = 0.5
            after = projection.forward(inputs)
        finally:
            for (piece, _), values in zip(pieces, saved, strict=True):
                piece.copy_(values)
    return _is_close(after, before * expected, TOLERANCE * before.abs().amax())


def _is_close(one: Any, other: Tensor, limit: Float[Tensor, ""]) -> bool:
    return isinstance(one, Tensor) and one.shape == other.shape and bool(((one - other).abs() <= limit).all())
