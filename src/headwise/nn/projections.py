"""Linear projections of a layer: their initialisation, and checks for modules put in their place."""

import torch
from torch import Tensor, nn

from headwise.shapes import Float


def is_plain_linear(module: nn.Module) -> bool:
    """Return True for an `nn.Linear` that computes `weight x + bias` and nothing else.

    Derived classes, such as adapters, and modules with hooks may compute more, so they return False.
    """
    return type(module) is nn.Linear and not has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    """Return True if a module's output may be changed by a forward hook or forward pre-hook, or by a `forward` set on
    the instance.
    """
    return bool("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)


def reset_linear(linear: nn.Linear, blocks: tuple[int, ...]) -> None:
    """Initialise the weight of a linear layer uniformly after Glorot and Bengio 2010, and its bias with zeros. The
    weight is split into blocks of `blocks[0]`, `blocks[1]`, ... rows, each initialised as a matrix of its own.

    Args:
        linear: projection to initialise.
        blocks: numbers of consecutive rows that form one projection each, so that the bound of each block follows from
            its own number of rows; a fused projection has several.
    """
    for weight in torch.split(linear.weight, list(blocks)):
        nn.init.xavier_uniform_(weight)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def apply_norm(norm: nn.Module, x: Float[Tensor, "*axes width"]) -> Float[Tensor, "*axes width"]:
    """Return `norm(x)` in the dtype of x. The norm is computed in the dtype of its weight, or in that of x if it has no
    weight.

    Under autocast the weight has a wider dtype than x.
    """
    weight = next(norm.parameters(), None)
    normalised: Tensor = norm(x if weight is None else x.to(weight.dtype))
    return normalised.to(x.dtype)
