"""Row blocks of whole rows: of a problem, computed from its scores, or of weights that exist already."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.attention.backends.blockwise.tiles import LOG2_E, full_width_tile
from headwise.attention.backends.reference import (
    attention_weights,
    grouped_matmul,
    masked_scores,
    mix_heads,
    scaled_products,
)
from headwise.attention.masks.grid import Grid
from headwise.attention.problem import Problem
from headwise.shapes import Bool, Float

ROW_BLOCK_BYTES = 2**24
"""Largest size of the weights of one row block over all heads and keys; large enough for products at full speed."""


Scores = Float[Tensor, "batch heads queries keys"]


def row_blocks_of_problem(
    problem: Problem,
    call_context: CallContext | None = None,
    with_output: bool = False,
    out: Float[Tensor, "batch heads queries value_dim"] | None = None,
) -> Iterator[RowBlock]:
    """Compute the attention weights of a call (`problem`: its tensors and options), and yield them in row blocks. Each
    block has some of the query rows, for all heads and keys, so the whole weight matrix is never stored. The blocks
    also contain the head outputs in `out` or, with `with_output`, the weights times the values.
    """
    grid, context = problem.grid, call_context or CallContext()
    for rows in _row_ranges(grid):
        scores = masked_scores(problem, rows)
        uncapped = (
            None if problem.softcap is None else scaled_products(problem, rows).where(scores != -torch.inf, -torch.inf)
        )
        weights = attention_weights(scores, problem.sinks)
        if problem.talking is not None:
            weights = mix_heads(weights, problem.talking.after)
        block_out = None if out is None else out[:, :, rows.start : rows.stop]
        if with_output:
            block_out = grouped_matmul(weights, problem.v.to(weights.dtype))
        largest = _largest(scores), None if uncapped is None else _largest(uncapped)
        yield _row_block(weights, scores != -torch.inf, grid, rows, context, block_out, problem.v.detach(), *largest)


def row_blocks_of_weights(
    weights: Float[Tensor, "batch heads queries keys"],
    out: Float[Tensor, "batch heads queries value_dim"] | None,
    call_context: CallContext,
    visible: Callable[[range], Bool[Tensor, "#batch #heads rows keys"]] | None = None,
    values: Float[Tensor, "batch kv_heads keys value_dim"] | None = None,
    with_output: bool = False,
    scores: tuple[Scores | None, Scores | None] = (None, None),
) -> Iterator[RowBlock]:
    """Split existing attention weights into row blocks (some of the query rows, for all heads and keys), and yield
    them. `visible(rows)` returns a mask that is True where a row may attend to a key. The mask may lack hidden keys at
    its end. By default, keys of weight 0 are hidden. The head outputs are `out` or, with `with_output`, the weights
    times `values`. `scores` has the attention scores after and before a softcap.
    """
    batch, heads, queries, keys = weights.shape
    grid = Grid(batch, heads, queries, keys, weights.device)
    for rows in _row_ranges(grid):
        selected = slice(rows.start, rows.stop)
        block = weights[:, :, selected].to(torch.promote_types(weights.dtype, torch.float32))
        block_out = None if out is None else out[:, :, selected]
        if with_output and values is not None:
            block_out = grouped_matmul(block, values.to(block.dtype))
        is_visible = block != 0
        if visible is not None:
            is_visible = visible(rows)
            is_visible = F.pad(is_visible, (0, keys - is_visible.shape[-1]))
        largest = [
            None if each is None else _largest(each[:, :, selected].to(block.dtype).where(is_visible, -torch.inf))
            for each in scores
        ]
        yield _row_block(block, is_visible, grid, rows, call_context, block_out, values, *largest)


def _row_ranges(grid: Grid) -> Iterator[range]:
    """Split the query rows of a call into consecutive ranges, and yield the ranges. The float32 attention weights of
    the rows in a range have at most `ROW_BLOCK_BYTES`; a range of a single row may have more.
    """
    step = max(1, ROW_BLOCK_BYTES // (4 * max(1, grid.batch * grid.heads * grid.keys)))
    for start in range(0, grid.queries, step):
        yield range(start, min(start + step, grid.queries))


def _row_block(
    weights: Float[Tensor, "batch heads rows keys"],
    is_visible: Bool[Tensor, "#batch #heads rows keys"],
    grid: Grid,
    rows: range,
    call_context: CallContext,
    out: Float[Tensor, "batch heads rows value_dim"] | None,
    values: Float[Tensor, "batch kv_heads keys value_dim"] | None,
    largest_score: Float[Tensor, "kv stacked 1"] | None = None,
    largest_uncapped_score: Float[Tensor, "kv stacked 1"] | None = None,
) -> RowBlock:
    """Return a row block: the attention weights, head outputs and largest scores of the query rows `rows`, for all
    heads and keys. `is_visible` is True where a row may attend to a key.
    """
    powers = weights.flatten(0, 1)
    tile = full_width_tile(grid, rows, is_visible)
    power_score_sum = torch.special.xlogy(powers, powers).sum(-1, keepdim=True) * LOG2_E
    return RowBlock(
        tile=tile,
        grid=grid,
        call_context=call_context,
        visibility=call_context.visibility(tile, grid),
        powers=powers,
        power_score_sum=power_score_sum,
        power_sum=powers.sum(-1, keepdim=True),
        normalizer=torch.ones_like(power_score_sum),
        largest_power=powers.amax(-1, keepdim=True),
        largest_score=largest_score,
        largest_uncapped_score=largest_uncapped_score,
        out=None if out is None else out.to(weights.dtype).flatten(0, 1),
        values=values,
    )


def _largest(scores: Float[Tensor, "batch heads rows keys"]) -> Float[Tensor, "kv stacked 1"]:
    """Return the largest score of each query row, in the shape that a row block stores: batch and heads joined, and one
    column.
    """
    return scores.detach().flatten(0, 1).amax(-1, keepdim=True)
