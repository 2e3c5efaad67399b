"""Alignment and choice of heads that are merged, from the products `E[x_i x_j^T]` of their features."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.compression.merging.head_freedom import Freedom
from headwise.shapes import Float

SMALLEST_GAIN = 1e-9
"""Relative gain of a round of alignment below which it has converged."""

MOST_ROUNDS = 200
"""Rounds after which alignment ends without convergence."""


def align(products: Float[Tensor, "heads heads width width"], freedom: Freedom) -> Float[Tensor, "heads width width"]:
    """Return a matrix `R_j` for each head j such that the aligned features `R_j x_j` differ least from their mean:
    the sum over heads of `E|R_j x_j - mean|^2` is minimal. The first matrix is the identity.

    The matrices are improved in turn, each by the solution of the orthogonal Procrustes problem for the sum of the
    other heads, until none gains (generalised Procrustes analysis, Gower 1975). This ends in a local minimum. There are
    two starts, at the identity and with heads aligned one after the other, and the better end is returned. So the
    result is never worse than no alignment.

    Args:
        products: `E[x_i x_j^T]` of heads i and j, or a multiple.
        freedom: matrices that are allowed.
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
    """Return `E|sum of R_j x_j|^2`, which is the larger, the less the aligned heads differ."""
    return float(torch.einsum("iab,ijbc,jac->", matrices, products, matrices))


def _improved(products: Tensor, matrices: Tensor, freedom: Freedom) -> Tensor:
    """Return matrices improved in turn until none gains."""
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
    """Return `E[y x^T]` for the features x of a head and the sum y of the aligned features of others."""
    chosen = list(others)
    return torch.einsum("iab,ibc->ac", matrices[chosen], products[chosen, head])


def pairwise_gains(
    products: Float[Tensor, "heads heads width width"], freedom: Freedom
) -> Float[Tensor, "heads heads"]:
    """Return `E[x_i^T R x_j]` for each pair of heads with the best matrix R, divided by the mean of `E|x|^2`.

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
    """Return groups of equally many heads whose pairs have a large sum of gains. Pairs of heads are exchanged
    between groups, the best exchange first, until none gains; so the sum is never below that of adjacent heads.

    Args:
        gains: symmetric gains of each pair.
        groups: number of groups.
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
