"""Torch functions by how the sources of their result follow from the sources of their arguments."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.intercept.contractions import multiplied_and_summed

INPUT_AND_WEIGHT: frozenset[Any] = frozenset(
    {
        *(F.linear, F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d),
        *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    }
)
"""Functions whose first two arguments are an input and the weight of a linear map."""

PRODUCTS: frozenset[Any] = frozenset(
    {
        *(torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm),
        *(torch.bmm, Tensor.bmm, torch.einsum, multiplied_and_summed),
    }
)
"""Functions that multiply all their tensors."""

ADDED_PRODUCTS: frozenset[Any] = frozenset(
    {torch.addmm, Tensor.addmm, Tensor.addmm_, torch.baddbmm, Tensor.baddbmm, Tensor.baddbmm_}
)
"""Functions that add a tensor, the first argument, to the product of two others."""

CONCATENATIONS: frozenset[Any] = frozenset({torch.cat, torch.concat, torch.concatenate})
"""Functions that concatenate tensors."""

REORDERINGS: frozenset[Any] = frozenset({torch.flip, Tensor.flip, torch.roll, Tensor.roll})
"""Functions that move tokens to other places."""

SELECTIONS: frozenset[Any] = REORDERINGS | {
    *(Tensor.__getitem__, torch.chunk, Tensor.chunk, torch.split, Tensor.split, torch.tensor_split),
    *(Tensor.tensor_split, torch.unbind, Tensor.unbind, torch.select, Tensor.select, torch.narrow, Tensor.narrow),
    *(torch.index_select, Tensor.index_select, torch.gather, Tensor.gather, torch.take_along_dim),
    *(Tensor.take_along_dim, torch.masked_select, Tensor.masked_select),
}
"""Functions that may return some of the tokens of a tensor."""

PLACEMENTS: frozenset[Any] = frozenset(
    {Tensor.__setitem__}
    | {
        getattr(owner, name)
        for owner in (torch, Tensor)
        for operation in ("index_copy", "index_add", "index_put", "scatter", "scatter_add")
        for name in (operation, f"{operation}_")
        if hasattr(owner, name)
    }
)
"""Functions that write tokens to places in another tensor, perhaps by an index."""

CONSTANTS: frozenset[Any] = frozenset(
    {
        *(torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like, torch.rand_like, torch.randn_like),
        *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty),
    }
)
"""Functions whose result does not depend on the numbers in a tensor that is passed to them."""
