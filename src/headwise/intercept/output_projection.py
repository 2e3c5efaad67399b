"""Where the output of heads is projected: found by name and width, in a module that attends or beside it."""

import torch
from torch import Tensor, nn

from headwise.shapes import Float

OUTPUT = ("o_proj", "out_proj", "out", "c_proj", "o", "dense", "out_lin", "wo", "to_out", "proj", "output")
"""What the output projection is called: by Llama, torch, ours, GPT-2, T5, BERT, DistilBERT, others."""


def output_projection(model: nn.Module, path: str, width: int) -> nn.Module | None:
    """The linear layer that takes the `width` features of all heads of the module at `path`; None where none is found.

    It is a child of that module, or, as in BERT, of a neighbour called output.
    """
    module = model.get_submodule(path)
    beside = model.get_submodule(path.rpartition(".")[0]) if path else module
    for owner in (module, getattr(beside, "output", None), beside):
        for name in OUTPUT:
            found = getattr(owner, name, None)
            found = found[0] if isinstance(found, nn.Sequential | nn.ModuleList) and len(found) else found
            if isinstance(found, nn.Module) and weight_of(found, width) is not None:
                return found
    return None


def weight_of(projection: nn.Module, width: int) -> Float[Tensor, "out width"] | None:
    """Its weight, outputs first; None where it is no linear layer of that many inputs."""
    weight = getattr(projection, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        return None
    if type(projection).__name__ == "Conv1D":  # transformers' keeps inputs first
        weight = weight.mT
    return weight if weight.shape[1] == width else None


@torch.no_grad()
def gram_of(projection: nn.Module, heads: int, value_dim: int) -> Float[Tensor, "heads value_dim value_dim"]:
    """`W_h^T W_h` of each head's slice `W_h (out, value_dim)`: `o^T (W_h^T W_h) o` is the square of what o writes."""
    weight = weight_of(projection, heads * value_dim)
    assert weight is not None
    slices = weight.detach().to(torch.promote_types(weight.dtype, torch.float32)).unflatten(1, (heads, value_dim))  # type: ignore[no-untyped-call]
    of_heads: Tensor = slices.permute(1, 0, 2)
    return of_heads.mT @ of_heads
