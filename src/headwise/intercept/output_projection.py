"""The linear layer that projects the heads' output, found by its name and width."""

import torch
from torch import Tensor, nn

from headwise.intercept.unreadable_tensors import has_usual_values
from headwise.shapes import Float

PROJECTION_NAMES = ("o_proj", "out_proj", "out", "c_proj", "o", "dense", "out_lin", "wo", "to_out", "proj", "output")
"""Names of output projections in Llama, torch, headwise, GPT-2, T5, BERT, DistilBERT and others."""


def output_projection(model: nn.Module, path: str, width: int) -> nn.Module | None:
    """Return the linear layer that projects the outputs of all heads of the attention module at `path`; None if there
    is none. The layer is looked for in and next to that module, by usual names of such layers (`o_proj`, `c_proj`, ...)
    and by its number of input features, `width`.

    It is a child of that module, of its parent, or, as in BERT, of the parent's child `output`.

    Args:
        model: the model.
        path: path of the attention module.
        width: input features of the layer, heads times value_dim.
    """
    module = model.get_submodule(path)
    parent = model.get_submodule(path.rpartition(".")[0]) if path else module
    for owner in (module, getattr(parent, "output", None), parent):
        for name in PROJECTION_NAMES:
            child = getattr(owner, name, None)
            if isinstance(child, nn.Sequential | nn.ModuleList):  # of several layers, or of a projection and dropout
                fitting = [element for element in child if weight_of(element, width) is not None]
                child = fitting[0] if len(fitting) == 1 else None
            if isinstance(child, nn.Module) and weight_of(child, width) is not None:
                return child
    return None


def weight_of(projection: nn.Module, width: int) -> Float[Tensor, "out width"] | None:
    """Return the weight of a linear layer with axes `(out, width)`; the weight of a `Conv1D`, which is stored as
    `(width, out)`, is transposed. Return None if the module has no weight matrix of a usual dtype on its device, or if
    its number of input features is not `width`.
    """
    weight = getattr(projection, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not has_usual_values(weight):
        return None
    if type(projection).__name__ == "Conv1D":  # of transformers, whose weight has input features first
        weight = weight.mT
    return weight if weight.shape[1] == width else None


@torch.no_grad()
def gram_of(projection: nn.Module, heads: int, value_dim: int) -> Float[Tensor, "heads value_dim value_dim"]:
    """Return the matrix `W_h^T W_h` for each head h, where `W_h (out, value_dim)` is the slice of the output
    projection's weight that multiplies the output of head h.

    For a head's output `o`, `o^T (W_h^T W_h) o` is the squared norm of its projection.
    """
    weight = weight_of(projection, heads * value_dim)
    assert weight is not None
    slices = weight.detach().to(torch.promote_types(weight.dtype, torch.float32)).unflatten(1, (heads, value_dim))  # type: ignore[no-untyped-call]
    by_head: Tensor = slices.permute(1, 0, 2)
    return by_head.mT @ by_head
