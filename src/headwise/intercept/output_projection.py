"""The output projection of an attention module, found by its name and by the map that it computes."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headwise.convert.layers import LinearMap
from headwise.families.registry import family_of, relative_path
from headwise.intercept.linear_map import linear_map, may_fit
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
    there is none. It is searched inside of and next to the attention module: first by the name that is known for the
    architecture, then by usual names (`o_proj`, `c_proj`, ...). It must compute a linear map of `width` features;
    adapters and dropout are allowed.

    It is a child of that module, of its parent, or, as in BERT, of the parent's child `output`. Else it is the only
    linear layer with such a name and width in that module, as where a model calls a method of its attention module.

    Args:
        modules: all modules of the model by path.
        path: path of the attention module.
        width: input features of the map, heads times value_dim.
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
    """Yield candidates for the output projection of the attention module at `path`, each with its path. First comes the
    module that is known for the architecture. Then come modules with usual names, inside of and next to the attention
    module. If such a module is a sequence, its only element that fits `width` input features follows.
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
