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
    """Compute the attention weights of a problem and yield them in row blocks, each with some of the query rows for all
    heads and all keys. The weights are computed one row block at a time, so the whole matrix is never stored.

    Args:
        problem: the attention call.
        call_context: its tokens and padding.
        with_output: compute each row's output too, the weights times the values.
        out: head outputs of all rows, if they are known already.
    """
    grid = problem.grid
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
        context = call_context or CallContext()
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
    """Split existing attention weights into row blocks, each with some of the query rows for all heads and all keys,
    and yield these.

    Args:
        weights: the weights.
        out: output of each row; None if unknown.
        call_context: tokens and padding of the call.
        visible: function that returns a boolean tensor for a range of rows, True where a row may attend to a key. It
            may leave out hidden keys at the end. By default, keys of weight 0 are hidden.
        values: the values; None if unknown.
        with_output: compute each row's output from the values.
        scores: the scores behind the weights, and those before a softcap; None if unknown, or without a softcap.
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
    """Yield consecutive ranges that together cover all query rows of an attention call with the sizes in `grid`. The
    float32 weights of one range, over all sequences, heads and keys, have at most `ROW_BLOCK_BYTES` (16 MiB), unless
    the range is a single row.
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
    """Return the `RowBlock` (attention weights with statistics of each row) of the query rows `rows`, from their
    `weights` for all heads and keys. `is_visible` is True at keys that a row may attend to; `grid` and `call_context`
    contain the sizes, tokens and padding of the whole call; `out` is the head output of these rows, and `values` are
    those of all keys, if known, as are the largest score of each row and the largest before the softcap.
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
    """Return the largest score of each row, with the axes of a row block."""
    return scores.detach().flatten(0, 1).amax(-1, keepdim=True)
