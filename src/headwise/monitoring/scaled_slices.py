"""Multiplication of slices of parameters by factors, in place."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.autocast import without_autocast
from headwise.errors import InputError
from headwise.intercept.unreadable_tensors import has_usual_values
from headwise.monitoring.head_slices import HeadSlice
from headwise.shapes import Float

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
