"""Calls with packed sequences, keys in pages and windows around the query: steps that several adapters share."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headwise.attention.masks.base import Mask
from headwise.attention.masks.factories import padding
from headwise.attention.masks.grid import MAX_DISTANCE, Grid
from headwise.attention.masks.kinds import Band
from headwise.intercept.adapters.engine import EngineCall, UnreadableCall, packed_layout
from headwise.intercept.packed_sequences import PackedSequences
from headwise.shapes import Float, Int

Lengths = Int[Tensor, " _"]
"""A number for each sequence."""


def band(left: int | None, right: int | None) -> Mask | None:
    """Return the mask by which a query attends to at most `left` keys before its own and `right` keys after it. None
    stands for any number. Return None if the mask hides nothing.
    """
    if left is None and right is None:
        return None
    return Band(None if left is None else left + 1, MAX_DISTANCE if right is None else right)


def both(one: Mask | None, other: Mask | None) -> Mask | None:
    """Return the mask that allows what both masks allow; None stands for a mask that hides nothing."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


def alibi_bias(slopes: Float[Tensor, "..."], grid: Grid) -> Float[Tensor, "#batch heads queries keys"]:
    """Return the bias of ALiBi for slopes of the heads, `(heads,)` or `(batch, heads)`: minus the slope times the
    distance between query and key (Press et al. 2022).
    """
    of_queries = torch.arange(grid.queries, device=grid.device) + grid.offset
    distances = (of_queries[:, None] - torch.arange(grid.keys, device=grid.device)).abs()
    slopes = slopes.detach()[None] if slopes.ndim == 1 else slopes.detach()
    return -slopes[..., None, None] * distances


def offsets(name: str, cumulative: Any, total: int) -> tuple[Lengths, Lengths]:
    """Return the starts and the lengths of packed sequences, given their offsets `cumulative`, the argument `name`:
    the index of each sequence's first token, followed by the end of the last one.

    Raises:
        UnreadableCall: the offsets do not rise from 0 to at most `total`, the number of tokens.
    """
    if not isinstance(cumulative, Tensor) or cumulative.ndim != 1 or len(cumulative) < 2:
        raise UnreadableCall(f"with {name} of another form than (sequences + 1,)")
    starts, lengths = cumulative[:-1].long(), cumulative.long().diff()
    if int(starts[0]) != 0 or bool((lengths < 0).any()) or int(cumulative[-1]) > total:
        raise UnreadableCall(f"with {name} that do not rise from 0 to the number of tokens")
    return starts, lengths


def places_in_pages(table: Int[Tensor, "sequences pages"], page_size: int, longest: int) -> Int[Tensor, "..."]:
    """Return for each sequence the indices of its first `longest` keys among those of all pages. `table` has the pages
    of each sequence.
    """
    key = torch.arange(longest, device=table.device)
    return table.long()[:, key // page_size] * page_size + key % page_size


def packed_call(
    q: Float[Tensor, "tokens heads head_dim"],
    k: Float[Tensor, "places kv_heads head_dim"],
    v: Float[Tensor, "places kv_heads value_dim"],
    of_queries: tuple[Lengths, Lengths],
    of_keys: tuple[Lengths, Lengths],
    mask: Mask | None = None,
    *,
    slopes: Tensor | None = None,
    is_top_left: bool = False,
    pages: Int[Tensor, "_ _"] | None = None,
    has_batch_axis: bool = False,
    mask_origin: tuple[Any, ...] = (),
    **options: Any,
) -> EngineCall:
    """Return a call with packed sequences. Each of them becomes a row of the batch, with padding that does not count.

    Args:
        q: queries of all sequences.
        k: keys of all sequences, or of all pages.
        v: values, in the same places.
        of_queries: start and length of each sequence among the queries.
        of_keys: start and length of each sequence among the keys; starts in pages are not used.
        mask: rule that goes by the distance between query and key alone; None to hide nothing.
        slopes: slopes of ALiBi; None without.
        is_top_left: True if the first query of a sequence has the position of its first key; by default the last query
            has the position of the last key.
        pages: index of each key among those of all pages, if keys and values are stored in pages.
        has_batch_axis: True if the engine's output has its queries in two axes, of which the first is a batch.
        mask_origin: values that determine the mask, as in `EngineCall`.
        options: further options of `EngineCall`.
    """
    (_, query_lengths), (_, key_lengths) = of_queries, of_keys
    if len(query_lengths) != len(key_lengths):
        raise UnreadableCall("with other numbers of sequences for queries than for keys")
    goes_by_position = mask is not None or slopes is not None
    has_equal_lengths = bool((query_lengths == key_lengths).all())
    # With padding on the left, the last query of each sequence has the position of the last key.
    is_padded_left = goes_by_position and not has_equal_lengths and not is_top_left
    queries = PackedSequences.of(*of_queries, len(q), is_padded_left=is_padded_left)
    keys = PackedSequences.of(*of_keys, len(k), is_padded_left=is_padded_left)
    if pages is not None:
        keys = PackedSequences(pages.gather(1, _rank(keys)), keys.is_real, len(k))
    q_padded, k_padded, v_padded = (
        places.padded(tensor).transpose(1, 2) for places, tensor in ((queries, q), (keys, k), (keys, v))
    )
    grid = Grid(len(query_lengths), q.shape[1], queries.index.shape[1], keys.index.shape[1], q.device)
    if is_top_left and goes_by_position and not has_equal_lengths:
        options["query_positions"], options["key_positions"] = (
            _rank(places).masked_fill(~places.is_real, -1) for places in (queries, keys)
        )
    elif not keys.is_full:
        mask = both(padding(key_lengths, "left" if is_padded_left else "right"), mask)
    if slopes is not None:
        options["bias"] = alibi_bias(slopes, grid)
    return EngineCall(
        q_padded,
        k_padded,
        v_padded,
        options={"mask": mask, **options},
        layout=packed_layout(queries, has_batch_axis=has_batch_axis),
        packed=replace(queries, real_keys=keys.is_real),
        mask_origin=mask_origin,
    )


def _rank(places: PackedSequences) -> Int[Tensor, "sequences longest"]:
    """Return the number of each token in its sequence; 0 at padding before the tokens."""
    return (places.is_real.cumsum(1) - 1).clamp(min=0)
