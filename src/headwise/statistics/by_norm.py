"""Norm-weighted attention (Kobayashi et al. 2020): statistics of the norms of the vectors that a head adds up.

With A_ij the weight of key j for query i, v_j its value vector with its bias, and W the head's slice of the output
projection, the head adds up the vectors A_ij v_j W, whose norms are A_ij |v_j W|. So one number for each key and head,
|v_j W|, turns a block of attention weights into a block of norms, and no matrix is needed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.attention.backends.blockwise.tiles import LOG2_E
from headwise.attention.masks.grid import Grid
from headwise.shapes import Bool, Float
from headwise.statistics.registry import row_statistics
from headwise.statistics.tally import FurtherStatistics, FurtherSums, HeadSlices, MeasuredRows, Tally, Values

BY_NORM, CHANGE = " by norm", " change"
"""Suffixes of the names of a statistic of norms, and of its difference from the same statistic of weights."""

MOVED, PREFERENCE = "moved", "norm_preference"
"""Names of the share of attention that is on other keys by norm than by weight, and of the preference for long
vectors.
"""

NO_PROJECTION = (
    "no output projection of the heads of these modules was found, so norm-weighted attention is left out "
    "(see docs/norm-weighted.md)"
)
"""Reason for modules without a known output projection."""

UNCONFIRMED = (
    "the output projection was not seen to map the outputs of the heads of these modules, as where a gate changes "
    "them, so norm-weighted attention is left out (see docs/norm-weighted.md)"
)
"""Reason for modules whose projection has another input than the outputs of heads."""

NO_VALUES = (
    "the vectors that the attention weights of these modules average could not be established, so norm-weighted "
    "attention is left out (see docs/norm-weighted.md)"
)
"""Reason for modules whose values are unknown, or are not what the weights average."""

PART_NUMBERS = 2**22
"""Largest number of features of projected values that are in memory at once."""

LARGEST_DIFFERENCE = 1e-3
"""Largest difference, relative to the sum of the norms of what is added up, that counts as rounding in float32."""


@dataclass(frozen=True)
class NormStatistics(FurtherStatistics):
    """Statistics of norm-weighted attention: each attention weight is multiplied by the norm of the key's value vector
    after the output projection, and the products are divided by their sum over keys. Each statistic also has a second
    value: its difference from the same statistic of the attention weights.
    """

    measured: frozenset[str] | None = frozenset({"entropy", "output_norm"})
    """The statistics by which weights and outputs that are not finite are recognised."""

    unconfirmed: str | None = UNCONFIRMED

    @property
    def names(self) -> tuple[str, ...]:
        return (*(name + suffix for name in row_statistics() for suffix in (BY_NORM, CHANGE)), MOVED, PREFERENCE)

    def start(self, grid: Grid, context: CallContext, slices: HeadSlices | None) -> "NormSums | str":
        """Return empty sums for the statistics of norm-weighted attention in one attention call. `slices` are the
        heads' slices of the output projection; if they are unknown (None), return the reason as text.
        """
        return NO_PROJECTION if slices is None else NormSums(slices)


@dataclass
class NormSums(FurtherSums):
    """Sums of each statistic over the same query rows for two kinds of weights: norm-weighted attention (`by_norm`) and
    the attention weights (`by_weight`).

    Attributes:
        differences: sums over rows of the two statistics that compare norms with weights, and the number of rows.
    """

    slices: HeadSlices = field(repr=False)
    by_norm: Tally = field(default_factory=lambda: Tally(measured=frozenset(row_statistics())))
    by_weight: Tally = field(default_factory=lambda: Tally(measured=frozenset(row_statistics())))
    differences: Float[Tensor, "sums batch heads"] | None = field(default=None, repr=False)
    refused: str | None = None
    needs_weights = True
    _norms: Float[Tensor, "batch heads keys"] | None = field(default=None, repr=False)

    def add(self, measured: MeasuredRows, row_block: RowBlock | None) -> None:
        assert row_block is not None
        if self.refused is not None or not self._has_values(row_block):
            self.refused = NO_VALUES
            return
        if self._norms is None:
            self._norms = key_norms(row_block, self.slices)
        norms = self._norms[row_block.sequences_and_heads][..., row_block.visibility.key_indices]
        of_norms = _norm_block(row_block, norms)
        visibility = row_block.visibility
        counted = visibility.counted_rows & (of_norms.weight_per_power != 0)  # not rows whose norms are all 0
        if not bool((counted == visibility.counted_rows).all()):
            visibility = replace(visibility, _cache={})
            vars(visibility)["counted_rows"] = counted  # fills the cached property of the copy
        row_block, of_norms = (replace(each, visibility=visibility) for each in (row_block, of_norms))
        self.by_norm.add(of_norms)
        self.by_weight.add(replace(row_block, out=None, gram=None))
        sums = torch.stack(list(_compared(row_block, of_norms, norms)))
        if self.differences is None:
            self.differences = sums.new_zeros(len(sums), row_block.grid.batch, row_block.grid.heads)
        self.differences[:, measured.sequences, measured.heads] += sums

    def merge(self, other: "NormSums") -> None:
        self.refused = self.refused or other.refused
        self.by_norm.merge(other.by_norm)
        self.by_weight.merge(other.by_weight)
        if other.differences is not None:
            self.differences = other.differences if self.differences is None else self.differences + other.differences

    def values(self) -> Values:
        if self.differences is None or self.refused is not None:
            return {}
        found: Values = {}
        of_weights, has_value = self.by_weight.means(), self.by_norm.has_value()
        for name, of_norms in self.by_norm.means().items():
            found[name + BY_NORM] = of_norms, has_value[name]
            found[name + CHANGE] = of_norms - of_weights[name], has_value[name]
        *sums, count = self.differences.unbind(0)
        return found | {name: (each / count, count > 0) for name, each in zip((MOVED, PREFERENCE), sums, strict=True)}

    def _has_values(self, row_block: RowBlock) -> bool:
        """Return True if a row block (weights of some query rows) is known to have the value vectors that the attention
        weights average. To check this, the output of the block's last row is compared with the sum of weights times
        values; the two must be equal up to rounding.
        """
        values, grid = row_block.values, row_block.grid
        if values is None or row_block.out is None or values.shape[::2] != (grid.batch, grid.keys):
            return False
        if grid.heads % values.shape[1] or values.shape[-1] != self.slices.shape[1]:
            return False
        sequences, heads = row_block.sequences_and_heads
        group = grid.heads // values.shape[1]
        keys = row_block.visibility.key_indices
        of_heads = torch.arange(grid.heads, device=keys.device)[heads] // group
        weights = row_block.tile.by_head(row_block.powers)[:, :, -1:] * row_block.weight_per_power[:, :, -1:, None]
        known = values[sequences][:, of_heads][:, :, keys].to(weights.dtype)
        weights = weights.masked_fill(~row_block.visibility.counted_rows[..., -1:, None], 0.0)
        out = row_block.tile.by_head(row_block.out)[:, :, -1:]
        out = out.masked_fill(~row_block.visibility.counted_rows[..., -1:, None], 0.0)
        difference = (weights @ known - out).norm(dim=-1)
        scale = weights.abs() @ known.norm(dim=-1, keepdim=True)
        tolerance = max(LARGEST_DIFFERENCE, 4 * torch.finfo(values.dtype).eps)
        return not bool((difference > tolerance * scale[..., 0]).any())  # NaN is reported elsewhere


@torch.no_grad()
def key_norms(row_block: RowBlock, slices: HeadSlices) -> Float[Tensor, "batch heads keys"]:
    """Return the norm |v_j W| for each key and query head: v_j is the key's value vector, and W is the slice of the
    output projection that belongs to the query head. Norms are divided by the largest norm of the head. Query heads
    that share values have different slices.
    """
    values = row_block.values
    assert values is not None
    heads, group = len(slices), len(slices) // values.shape[1]
    norms = torch.empty(len(values), heads, values.shape[2], dtype=slices.dtype, device=values.device)
    step = max(1, PART_NUMBERS // (len(values) * slices.shape[2]))
    for head in range(heads):
        for start in range(0, values.shape[2], step):
            part = slice(start, start + step)
            norms[:, head, part] = (values[:, head // group, part].to(slices.dtype) @ slices[head]).norm(dim=-1)
    return norms / norms.amax(-1, keepdim=True).clamp(min=torch.finfo(norms.dtype).tiny)


def _norm_block(row_block: RowBlock, norms: Float[Tensor, "batch heads columns"]) -> RowBlock:
    """Return a row block (weights of some query rows) with norm-weighted attention in place of the attention weights.
    Each weight is multiplied by the norm in `norms` for its head and key, and divided by the sum of these products over
    the keys.
    """
    stacked, tile = row_block.powers.shape, row_block.tile
    powers = tile.by_head(row_block.powers).abs().mul_(norms[:, :, None]).reshape(stacked)
    total = powers.sum(-1, keepdim=True)
    total = total.masked_fill((row_block.power_sum == torch.inf) | (total == 0), torch.inf)
    return replace(
        row_block,
        powers=powers,
        power_score_sum=torch.special.xlogy(powers, powers).sum(-1, keepdim=True) * LOG2_E,
        power_sum=total,
        normalizer=total,
        largest_power=powers.amax(-1, keepdim=True),
        out=None,
        feature_products=None,
        gram=None,
    )


def _compared(
    by_weight: RowBlock, by_norm: RowBlock, norms: Float[Tensor, "batch heads columns"]
) -> Iterator[Float[Tensor, "batch heads"]]:
    """Yield three sums over the query rows of a block that see more than one key. First, half the sum over keys of the
    absolute difference between attention weights and norm-weighted attention. Second, the logarithm of a ratio: the
    norms averaged by the attention weights, divided by their plain mean over the visible keys. Third, the number of
    rows.
    """
    counted: Bool[Tensor, "batch heads rows"] = by_weight.visibility.counted_rows & (
        by_weight.visibility.visible_keys > 1
    )
    counted = counted.expand(*norms.shape[:2], -1)
    weights = by_weight.tile.by_head(by_weight.powers / by_weight.power_sum)
    of_attended = (weights.abs() @ norms[..., None].to(weights.dtype))[..., 0]
    difference = by_norm.tile.by_head(by_norm.powers / by_norm.normalizer).sub_(weights)
    moved = difference.abs_().sum(-1) / 2
    is_visible = by_weight.tile.is_visible.to(norms)
    of_visible = (is_visible @ norms[..., None])[..., 0] / by_weight.visibility.visible_keys
    for each in (moved, (of_attended / of_visible).log()):
        yield each.double().masked_fill(~counted, 0.0).sum(-1)
    yield counted.double().sum(-1)
