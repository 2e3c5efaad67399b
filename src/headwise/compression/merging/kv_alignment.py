"""Alignment and choice of heads that are merged, from the products `E[x_i x_j^T]` of their features.

Heads are aligned by orthogonal matrices by which their keys or values can be multiplied without a change of the model.

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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.rotary import Rotary
from headwise.families.head_module import HeadModule
from headwise.families.registry import family_of
from headwise.nn.multihead import MultiHeadAttention
from headwise.shapes import Float

SMALLEST_GAIN = 1e-9
"""Relative gain of a round of alignment below which it has converged."""

MOST_ROUNDS = 200
"""Rounds after which alignment ends without convergence."""


@dataclass(frozen=True)
class Freedom:
    """Set of orthogonal matrices by which the keys or values of one head can be multiplied without a change of the
    model.

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
        """Return the matrix R in this set of orthogonal matrices that maximises `trace(R^T product)`. If `product` is
        `E[y x^T]`, R also minimises `E|y - R x|^2` (orthogonal Procrustes problem, Schönemann 1966).
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
    """Return the set of orthogonal matrices (a `Freedom`) by which the values of a head can be multiplied. The
    attention module's output stays the same if the output projection is multiplied by the inverse matrix.
    """
    attention = model.get_submodule(module.path)
    is_gated = getattr(attention, "output_gate", None) == "element"
    return Freedom(module.value_dim, block=() if is_gated else tuple(range(module.value_dim)))


def key_freedom(model: nn.Module, module: HeadModule) -> Freedom:
    """Return the set of orthogonal matrices (a `Freedom`) by which the queries and keys of a head can be multiplied
    without a change of the attention scores. For an unknown kind of module, the set contains the identity alone.
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
    """Return the set of orthogonal matrices (a `Freedom`) that commute with a rotary position embedding of the first
    `rotated` of `width` features. If `signs` is true, the matrices may change signs only.
    """
    half = rotated // 2
    pairs = [(2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half) for pair in range(half)]
    return Freedom(width, tuple(pairs), tuple(range(rotated, width)), signs)


def align(products: Float[Tensor, "heads heads width width"], freedom: Freedom) -> Float[Tensor, "heads width width"]:
    """Return one orthogonal matrix `R_j` per head j such that the aligned features `R_j x_j` differ least from their
    mean over heads. The sum over heads of `E|R_j x_j - mean|^2` is minimal. `products` contains `E[x_i x_j^T]` for all
    heads i and j. The first matrix is the identity.

    The matrices are improved in turn, each by the solution of the orthogonal Procrustes problem for the sum of the
    other heads, until none gains (generalised Procrustes analysis, Gower 1975). This ends in a local minimum. There are
    two starts, at the identity and with heads aligned one after the other, and the better end is returned. So the
    result is never worse than no alignment.
    """
    heads, width = products.shape[0], products.shape[2]
    identity = torch.eye(width, dtype=products.dtype, device=products.device).repeat(heads, 1, 1)
    in_turn = identity.clone()
    for head in range(1, heads):
        in_turn[head] = freedom.nearest(_sum_times(products, in_turn, head, range(head)))
    ends = [_improved(products, start, freedom) for start in (identity, in_turn)]
    return max(ends, key=lambda end: agreement(products, end))


def agreement(
    products: Float[Tensor, "heads heads width width"], matrices: Float[Tensor, "heads width width"]
) -> float:
    """Return `E|sum over heads of R_j x_j|^2` for the orthogonal matrices R_j and features x_j of the heads j. This
    number is larger when the aligned heads differ less.
    """
    return float(torch.einsum("iab,ijbc,jac->", matrices, products, matrices))


def _improved(products: Tensor, matrices: Tensor, freedom: Freedom) -> Tensor:
    """Return alignment matrices (one orthogonal matrix per head), improved one after the other. The improvement stops
    when the similarity of the aligned heads, computed by `agreement`, hardly increases.
    """
    matrices, before = matrices.clone(), agreement(products, matrices)
    heads = range(len(matrices))
    for _ in range(MOST_ROUNDS):
        for head in heads[1:]:
            others = [other for other in heads if other != head]
            matrices[head] = freedom.nearest(_sum_times(products, matrices, head, others))
        after = agreement(products, matrices)
        if after - before <= SMALLEST_GAIN * abs(after):
            break
        before = after
    return matrices


def _sum_times(products: Tensor, matrices: Tensor, head: int, others: Sequence[int]) -> Tensor:
    """Return `E[y x^T]`, where x are the features of `head`, and y is the sum of the aligned features of `others`."""
    chosen = list(others)
    return torch.einsum("iab,ibc->ac", matrices[chosen], products[chosen, head])


def pairwise_gains(
    products: Float[Tensor, "heads heads width width"], freedom: Freedom
) -> Float[Tensor, "heads heads"]:
    """Return the similarity of each pair of heads after alignment: `E[x_i^T R x_j]` with the best orthogonal matrix R,
    divided by the mean of `E|x|^2` over heads.

    Without alignment, R = 1, the sum over a group of `E|x_i - mean|^2` is the sum of `E|x_i|^2` minus the sum of
    `E[x_i^T x_j]` over all i and j, divided by the number of heads: a large sum of gains is a small error of the mean.
    """
    heads = products.shape[0]
    gains = products.diagonal(dim1=2, dim2=3).sum(2).clone()
    energy = gains.diagonal().mean().clamp(min=torch.finfo(gains.dtype).tiny)
    for i in range(heads):
        for j in range(i):
            matrix = freedom.nearest(products[i, j])
            gains[i, j] = gains[j, i] = (matrix * products[i, j]).sum()
    return gains / energy


def similar_groups(gains: Float[Tensor, "heads heads"], groups: int) -> list[list[int]]:
    """Divide heads into groups of equal size such that the sum of `gains` over pairs of heads in the same group is
    large. The search starts with groups of adjacent heads. It exchanges two heads between groups, the best exchange
    first, until no exchange increases the sum.
    """
    heads = len(gains)
    group_of = torch.arange(heads) // (heads // groups)
    gains = gains.detach().cpu().double()
    while True:
        members = torch.nn.functional.one_hot(group_of, groups).double()
        with_group = (gains - gains.diagonal().diag()) @ members  # gain of a head with all others of a group
        own = with_group.gather(1, group_of[:, None])
        moved = with_group[:, group_of] - own  # head i to the group of head j, before j leaves
        exchange = moved + moved.T - 2 * gains
        exchange[group_of[:, None] == group_of] = 0.0
        best = int(exchange.argmax())
        if exchange.flatten()[best] <= 1e-12 * gains.abs().max():
            break
        i, j = divmod(best, heads)
        group_of[[i, j]] = group_of[[j, i]]
    found = [(group_of == group).nonzero()[:, 0].tolist() for group in range(groups)]
    return sorted(found)
