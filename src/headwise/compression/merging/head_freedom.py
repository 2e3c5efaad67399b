"""Orthogonal matrices by which keys or values of a head can be multiplied without a change of the model.

Values: the output of a head is a weighted sum of its values, so an orthogonal matrix R of the values is undone in the
columns of the output projection of all query heads that share them. An output gate with one factor per element comes
between the two, and leaves no freedom.

Keys: scores are products `q^T k`, so a matrix R of both queries and keys cancels if it commutes with what comes between
the projections and the scores.

- Rotary positions (Su et al. 2021) rotate pairs of features: R may rotate each pair by an angle. A reflection does not
  commute with a rotation. Features that are not rotated may be multiplied by any orthogonal matrix of their own.
- An RMS norm of each head divides by the norm, which R leaves unchanged, but multiplies each feature by a weight of its
  own: R may change signs alone, with rotary positions the same sign for both features of a pair.
- A layer norm subtracts the mean of the features, which a change of signs does not leave unchanged: R is the identity.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.rotary import Rotary
from headwise.families.head_module import HeadModule
from headwise.families.registry import family_of
from headwise.nn.multihead import MultiHeadAttention
from headwise.shapes import Float


@dataclass(frozen=True)
class Freedom:
    """Set of orthogonal matrices of the features of one head.

    Attributes:
        width: number of features.
        pairs: pairs of features; each may be rotated in its plane.
        block: features that may be multiplied by any orthogonal matrix of their own.
        signs: True if rotations and orthogonal matrices may change signs only.
    """

    width: int
    pairs: tuple[tuple[int, int], ...] = ()
    block: tuple[int, ...] = ()
    signs: bool = False

    def nearest(self, product: Float[Tensor, "width width"]) -> Float[Tensor, "width width"]:
        """Return the matrix R of the set that maximises `trace(R^T product)`, where `product = E[y x^T]`; it minimises
        `E|y - R x|^2` (orthogonal Procrustes problem, Schönemann 1966).
        """
        matrix = torch.eye(self.width, dtype=product.dtype, device=product.device)
        if self.pairs:
            first, second = torch.tensor(self.pairs, device=product.device).T
            cos = product[first, first] + product[second, second]
            sin = product[second, first] - product[first, second]
            angles = torch.atan2(torch.zeros_like(sin) if self.signs else sin, cos)
            matrix[first, first] = matrix[second, second] = angles.cos()
            matrix[second, first], matrix[first, second] = angles.sin(), -angles.sin()
        block = torch.tensor(self.block, dtype=torch.int64, device=product.device)
        if self.block and self.signs:
            matrix[block, block] = torch.where(product[block, block] < 0, -1.0, 1.0).to(product)
        elif self.block:
            part = product[block][:, block]
            # Directions without data keep their place.
            part = part + 1e-13 * part.norm() * torch.eye(len(block), dtype=part.dtype, device=part.device)
            left, _, right = torch.linalg.svd(part)
            matrix[block[:, None], block] = left @ right
        return matrix


def value_freedom(model: nn.Module, module: HeadModule) -> Freedom:
    """Return the matrices by which the values of an attention module may be multiplied."""
    attention = model.get_submodule(module.path)
    is_gated = getattr(attention, "output_gate", None) == "element"
    return Freedom(module.value_dim, block=() if is_gated else tuple(range(module.value_dim)))


def key_freedom(model: nn.Module, module: HeadModule) -> Freedom:
    """Return the matrices by which the queries and keys of an attention module may be multiplied. For a module of which
    nothing is known this is the identity.
    """
    attention: Any = model.get_submodule(module.path)
    width = module.head_dim
    if isinstance(attention, MultiHeadAttention):
        if attention.qk_norm is not None and attention.qk_norm.kind != "rms":
            return Freedom(width)
        rotary, signs = attention.rotary, attention.qk_norm is not None
        if rotary is None:
            return Freedom(width, block=tuple(range(width)), signs=signs)
        if type(rotary) is not Rotary:  # a class of another package may rotate other features
            return Freedom(width)
        return _rotary_freedom(width, rotary.width or width, interleaved=rotary.interleaved, signs=signs)
    family = family_of(attention)
    share = 0.0 if family is None else family.rotated_share(attention)
    norms = () if family is None else family.norms(attention)
    if not share or any(isinstance(norm, nn.LayerNorm) for norm in norms):
        return Freedom(width)
    return _rotary_freedom(width, int(width * share), interleaved=False, signs=bool(norms))


def _rotary_freedom(width: int, rotated: int, *, interleaved: bool, signs: bool) -> Freedom:
    """Return the matrices that commute with rotary positions of the first `rotated` features."""
    half = rotated // 2
    pairs = [(2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half) for pair in range(half)]
    return Freedom(width, tuple(pairs), tuple(range(rotated, width)), signs)
