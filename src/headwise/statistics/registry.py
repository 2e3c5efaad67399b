"""Definitions of all statistics of a head's attention weights.

A is the weight matrix of one head, A[i, j] the weight of key j for query i; query i is at key position p_i. Most
statistics have a value in each row, and a head's value is the mean over its rows. Padding and rows without a visible
key do not count. Nor do rows in which a statistic has no meaning, such as the weight of the previous token in the row
of the first one.

A new statistic is one entry in `STATISTICS`. From it come the columns of tables, plots and pages, and the row in
`docs/watch.md`. Kernels compute the statistics in `COMPUTED` of `kernel_statistics.py`, and row blocks the others.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.attention.backends.blockwise.call_context import TileVisibility
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.shapes import Bool, Float

Sums = tuple[Float[Tensor, "batch heads *more"], ...]
RowValues = Float[Tensor, "batch heads rows"]
CountedRows = Bool[Tensor, "*#batch_heads rows"]


@dataclass(frozen=True)
class Statistic:
    """Description of one statistic of a head's attention weights, such as the entropy: name, unit, meaning and
    definition.

    Attributes:
        name: name of the statistic.
        unit: "nats", "tokens", "share", "norm" or "logit".
        meaning: what the value of a head is, in one sentence, for tables and pages.
        definition: formula or words that define the value, with its source, for the docs.
    """

    name: str
    unit: str
    meaning: str
    definition: str


@dataclass(frozen=True)
class MeanOfRows(Statistic):
    """Statistic with one value per query row. The value of a head is the mean over its query rows. Rows are left out if
    they are padding, if they have no visible key, or if the statistic is not defined for them.

    Attributes:
        measure: function that returns the value of each row of a row block (some query rows of a call); None if the
            call lacks something, such as token ids.
        counted: function that returns True for the rows of a tile in which the statistic has a meaning; None for all.
            Padding and rows without a visible key never count.
    """

    measure: Callable[[RowBlock], RowValues | None]
    counted: Callable[[TileVisibility], CountedRows | None] = lambda _: None


@dataclass(frozen=True)
class FromSums(Statistic):
    """Statistic that is not a mean over query rows. It is computed from sums over each row block (some query rows of a
    call); the sums are merged over all blocks, and the value of each head follows from the merged sums.

    Attributes:
        contribute: function that returns a row block's sums, tensors `(batch, heads, ...)` of the same shapes for all
            blocks of a call; None if the call lacks something, such as token ids.
        value: function that returns each head's value `(batch, heads)` from the merged sums; NaN without any row.
        merge: function that merges two sums into one.
        start: number that does not change a sum that it is merged with.
        is_per_key: True if the last axis of the sums is the keys of the call.
        is_largest: True if the value over several sequences is the largest one, not the mean.
    """

    contribute: Callable[[RowBlock], Sums | None]
    value: Callable[..., Float[Tensor, "batch heads"]]
    merge: Callable[[Tensor, Tensor], Tensor] = torch.add
    start: float = 0.0
    is_per_key: bool = False
    is_largest: bool = False


def _weight_after_copies(row_block: RowBlock, shift: int) -> RowValues | None:
    """Return, for each query row, the attention weight on the keys that are `shift` tokens after earlier copies of the
    row's token. Return None if the tokens are unknown.
    """
    return None if row_block.visibility.has_earlier_copy is None else row_block.weight_after_copies(shift)


def _written_norm(row_block: RowBlock) -> RowValues | None:
    """Return, for each query row, the norm of a head's contribution to the layer output. The contribution is the head's
    output times the head's slice of the output projection. Return None if the output or the projection is unknown.
    """
    if row_block.out is None or row_block.gram is None:
        return None
    out = row_block.tile.by_head(row_block.out)
    squares = ((out @ row_block.gram[row_block.tile.heads].to(out.dtype)) * out).sum(-1)
    return squares.clamp(min=0.0).sqrt()


def _largest_logit(
    name: str, meaning: str, definition: str, scores: Callable[[RowBlock], Float[Tensor, "kv stacked 1"] | None]
) -> FromSums:
    """Return the definition of a statistic: the largest attention score of each head. The function `scores` returns the
    largest score of each query row in a row block (some query rows of a call). Rows that are padding or have no visible
    key are left out.
    """

    def contribute(row_block: RowBlock) -> Sums | None:
        of_rows = scores(row_block)
        if of_rows is None:
            return None
        by_head = row_block.tile.by_head(of_rows)[..., 0].double()
        return (by_head.masked_fill(~row_block.visibility.counted_rows, -torch.inf).amax(-1),)

    def value(largest: Float[Tensor, "batch heads"]) -> Float[Tensor, "batch heads"]:
        return largest.masked_fill(largest == -torch.inf, torch.nan)

    return FromSums(
        *(name, "logit", meaning, definition, contribute, value),
        merge=torch.maximum,
        start=-torch.inf,
        is_largest=True,
    )


def _received_sums(row_block: RowBlock) -> Sums:
    """Return two sums for each key over the query rows of a row block: the attention weight that the key received, and
    the number of rows that may attend to it. Both are `(batch, heads, keys)` in float64. Rows that are padding or have
    no visible key are left out.
    """
    totals = []
    for columns in row_block.received:
        total = columns.new_zeros((*columns.shape[:2], row_block.grid.keys), dtype=torch.float64)
        for keys, span in row_block.tile.spans(columns):
            total[..., keys.start : keys.stop] = span
        totals.append(total)
    return tuple(totals)


def _largest_received(
    received: Float[Tensor, "batch heads keys"], seen_by: Float[Tensor, "batch heads keys"]
) -> Float[Tensor, "batch heads"]:
    """Return, for each head, the largest attention weight that a key receives on average over the rows that may attend
    to it. A key is left out if fewer than half as many rows may attend to it as to the key with the most such rows. The
    result is NaN if no row may attend to any key.
    """
    most = seen_by.amax(-1, keepdim=True)
    means = (received / seen_by).masked_fill(2 * seen_by < most, -torch.inf)
    return means.amax(-1).masked_fill(most[..., 0] == 0, torch.nan)


STATISTICS: dict[str, MeanOfRows | FromSums] = {
    statistic.name: statistic
    for statistic in (
        MeanOfRows(
            "entropy",
            "nats",
            "Mean entropy of the attention weights of a query.",
            "-sum_j A_ij ln A_ij",
            lambda row_block: row_block.entropy,
        ),
        MeanOfRows(
            "evenness",
            "share",
            "Mean entropy of the weights of a query, divided by the logarithm of its number of visible keys.",
            "entropy divided by ln(number of visible keys), in rows with at least two",
            lambda rows: rows.entropy / rows.visibility.visible_keys.clamp(min=2).to(rows.entropy.dtype).log(),
            lambda tile: tile.visible_keys > 1,
        ),
        MeanOfRows(
            "confidence",
            "share",
            "Mean of the largest attention weight of each query.",
            "max_j A_ij over all keys",
            lambda row_block: row_block.largest_weight,
        ),
        MeanOfRows(
            "confidence_content",
            "share",
            "Mean of the largest attention weight of each query on a token that is not special.",
            "max_j A_ij over the keys j that are not special tokens, 0 in a row that sees none of them (Voita et al. "
            "2019, section 4)",
            lambda row_block: None if row_block.visibility.is_special is None else row_block.largest_content_weight,
        ),
        MeanOfRows(
            "distance",
            "tokens",
            "Mean distance between a query and the keys that it attends to.",
            "sum_j A_ij abs(p_i - p_j)",
            lambda row_block: row_block.distance,
        ),
        MeanOfRows(
            "self",
            "share",
            "Mean attention on the query's own token.",
            "weight of the key at p_i, in rows that have one",
            lambda row_block: row_block.weight_at_lag(0),
            lambda tile: tile.has_key_at_lag(0),
        ),
        MeanOfRows(
            "previous",
            "share",
            "Mean attention on the token before.",
            "weight of the key at p_i - 1, in rows that have one",
            lambda row_block: row_block.weight_at_lag(1),
            lambda tile: tile.has_key_at_lag(1),
        ),
        MeanOfRows(
            "next",
            "share",
            "Mean attention on the token after.",
            "weight of the key at p_i + 1, in rows that have one",
            lambda row_block: row_block.weight_at_lag(-1),
            lambda tile: tile.has_key_at_lag(-1),
        ),
        MeanOfRows(
            "first",
            "share",
            "Mean attention on the first token.",
            "weight of the first token that is not padding, the attention sink of most decoders (Xiao et al. 2023)",
            lambda row_block: row_block.weight_on_first,
        ),
        MeanOfRows(
            "special",
            "share",
            "Mean attention on special tokens.",
            "weight of all special tokens (Clark et al. 2019, section 3.2)",
            lambda row_block: None if row_block.visibility.is_special is None else row_block.feature_sums["special"],
        ),
        MeanOfRows(
            "duplicate",
            "share",
            "Mean attention on earlier copies of the query's token.",
            "weight of earlier copies of the query's token, in rows whose token has one",
            lambda row_block: _weight_after_copies(row_block, 0),
            lambda tile: tile.has_earlier_copy,
        ),
        MeanOfRows(
            "induction",
            "share",
            "Mean attention on the tokens after earlier copies of the query's token.",
            "weight of the tokens after earlier copies, in rows whose token has one (Olsson et al. 2022)",
            lambda row_block: _weight_after_copies(row_block, 1),
            lambda tile: tile.has_earlier_copy,
        ),
        FromSums(
            "received",
            "share",
            "Largest mean attention that one token receives.",
            "largest mean weight of a key over the rows that may see it (Gu et al. 2024, equation 7)",
            _received_sums,
            _largest_received,
            is_per_key=True,
        ),
        _largest_logit(
            "max_logit",
            "Largest attention score of any query and visible key, as it enters the softmax.",
            "largest score of any query and visible key, as it enters the softmax: after the scale, the softcap and "
            "the bias (Kimi Team 2025, section 2.1; Zhai et al. 2023)",
            lambda row_block: row_block.largest_score,
        ),
        _largest_logit(
            "max_logit_uncapped",
            "Largest attention score of any query and visible key, before the softcap and the bias.",
            "the largest score before the softcap and without the bias; only with a softcap",
            lambda row_block: row_block.largest_uncapped_score,
        ),
        MeanOfRows(
            "output_norm",
            "norm",
            "Mean norm of the head's output, before the output projection.",
            "norm of the head's output, sum_j A_ij v_j",
            lambda row_block: None if row_block.out is None else row_block.tile.by_head(row_block.out).norm(dim=-1),
        ),
        MeanOfRows(
            "written_norm",
            "norm",
            "Mean norm of the head's output after its slice of the output projection.",
            "norm of the head's output after its slice of the output projection, if it is found by name and confirmed",
            _written_norm,
        ),
    )
}
"""Every statistic by name."""

OF_TOKENS = frozenset({"special", "confidence_content", "duplicate", "induction"})
"""Names of the statistics that need the ids of special tokens, or of all tokens."""


def row_statistics() -> tuple[str, ...]:
    """Return the names of the statistics that have one value per query row, so that a head's value is the mean over
    rows.
    """
    return tuple(name for name, statistic in STATISTICS.items() if isinstance(statistic, MeanOfRows))


def unit_of(name: str) -> str:
    """Return the unit of the statistic called `name`, such as "nats", or an empty string for an unknown name."""
    return STATISTICS[name].unit if name in STATISTICS else ""


LARGEST = frozenset(
    name for name, statistic in STATISTICS.items() if isinstance(statistic, FromSums) and statistic.is_largest
)
"""Names of the statistics whose value over several sequences is the largest of theirs."""
