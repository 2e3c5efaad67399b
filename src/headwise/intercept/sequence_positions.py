"""Number of each query's token in its sequence or document, counted without padding."""

import torch
from torch import Tensor

from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.masks.grid import Grid
from headwise.intercept.sequences import History
from headwise.shapes import Bool, Int


def separates_documents(context: CallContext, grid: Grid) -> bool:
    """Return True if the mask of an attention call separates documents that are packed in one sequence. In this case
    `context` contains the first visible key of each query.
    """
    return context.first_keys is not None and context.first_keys.shape[1] == grid.queries > 1


def positions_in_sequences(
    history: History,
    grid: Grid,
    real: Bool[Tensor, "batch queries"] | None,
    first_keys: Int[Tensor, "batch #queries"] | None,
) -> Int[Tensor, "#batch queries"] | None:
    """Return, for each query of an attention call, the position of its token in its sequence or document, counted from
    0 without padding. Return None if the call continues sequences that contain several documents, since it is unknown
    to which document a query belongs.

    Args:
        history: tokens of the sequences up to the last query.
        grid: sizes of the call.
        real: True at queries that are not padding; None if none is.
        first_keys: index of the first key of the document of each query, if a mask separates documents.
    """
    queries = grid.queries
    if first_keys is not None and first_keys.shape[1] == queries > 1:
        return _ranks(first_keys if real is None else first_keys.masked_fill(~real, -1))
    if history.has_documents:
        return None
    if history.is_real is None and real is None:
        return torch.arange(history.length - queries, history.length, device=grid.device)[None]
    is_real = history.is_real
    if is_real is None:
        assert real is not None
        is_real = real.new_ones(len(real), history.length)
    if real is not None:
        before = is_real[:, : history.length - queries]
        is_real = torch.cat([before, is_real[:, history.length - queries :] & real], 1)
    return is_real.cumsum(1)[:, history.length - queries :] - 1


def stated_positions(grid: Grid) -> Int[Tensor, "#batch queries"]:
    """Return the positions of the queries in a call of `headwise.attend`, as the caller states them or by default."""
    return grid.query_position(torch.arange(grid.queries, device=grid.device)[None])


def _ranks(groups: Int[Tensor, "batch rows"]) -> Int[Tensor, "batch rows"]:
    """Return, for each element of `groups`, how many earlier elements of the same sequence are equal to it."""
    order = groups.argsort(dim=1, stable=True)
    in_order = groups.gather(1, order)
    numbers = torch.arange(groups.shape[1], device=groups.device).expand_as(groups)
    is_start = torch.ones_like(groups, dtype=torch.bool)
    is_start[:, 1:] = in_order[:, 1:] != in_order[:, :-1]
    starts = torch.where(is_start, numbers, 0).cummax(1).values
    return torch.empty_like(groups).scatter(1, order, numbers - starts)
