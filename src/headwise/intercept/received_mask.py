"""Masks that a model passes to its attention calls, in headwise's form, and facts that follow from them.

Other libraries hide keys with large negative numbers that are added to the scores, instead of -inf.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.masks.base import And, Mask
from headwise.attention.masks.grid import Grid
from headwise.attention.masks.kinds import Dense, HasPosition
from headwise.attention.problem import Problem
from headwise.shapes import Bool, Float, Int

HIDING_DIFFERENCE = 5e3
"""A key is hidden if a mask adds at least this much less to its score than to another key's: its weight is then 0 in
every dtype, since no score makes up for it. Libraries write -10000, which is -9984 in bfloat16, or lower numbers.
"""

CERTAIN_DIFFERENCE = 1e6
"""A difference that is no bias, such as one for each token of distance, but hides a key."""


def with_infinite(added: Float[Tensor, "*batch rows keys"]) -> Float[Tensor, "*batch rows keys"]:
    """Return a copy of `added` (an additive mask, or scores that include one) with -inf at every hidden key. A key is
    hidden if its number is far below the largest number in the same query row. If all numbers of a row are far below 0,
    all its keys are hidden.
    """
    hidden = _is_far_below(added, added.amax(-1, keepdim=True), -1) | hides_all_keys(added)
    return added.masked_fill(hidden, -torch.inf)


def hides_all_keys(added: Float[Tensor, "*batch rows keys"]) -> Bool[Tensor, "*batch rows 1"]:
    """Return True for each query row of `added` that hides every key, which means that all its numbers are far below 0.
    `added` is an additive mask, or scores that include one.
    """
    return _is_far_below(added.amax(-1, keepdim=True), torch.zeros_like(added[..., :1, :1]), -2)


def _is_far_below(numbers: Tensor, reference: Tensor, dim: int) -> Bool[Tensor, "*shape"]:
    """Return True where an element of `numbers` (an additive mask, or scores that include one) is so far below
    `reference` that its key must be hidden. The limit is 5000 below `reference`. If any number along axis `dim` is near
    this limit, as with a bias that grows with distance, the limit is 1000000 below.
    """
    difference = (numbers - reference).to(torch.promote_types(numbers.dtype, torch.float32))
    is_below = difference <= -HIDING_DIFFERENCE
    is_near = (difference + HIDING_DIFFERENCE).abs() < HIDING_DIFFERENCE / 2
    return (is_below & ~is_near.any(dim, keepdim=True)) | (difference <= -CERTAIN_DIFFERENCE)


def is_uniform_where_hidden(mask: Tensor | None) -> bool:
    """Return True if torch's softmax returns equal weights in every query row in which `mask` hides all keys by finite
    numbers. That is the case if the numbers of such a row are equal, and so large in magnitude that adding the scores
    does not change them. Also return True if there is no such row, as in boolean masks.
    """
    if mask is None or not mask.is_floating_point():
        return True
    largest = mask.amax(-1, keepdim=True)
    is_hidden = hides_all_keys(mask) & (largest > -torch.inf)
    if not bool(is_hidden.any()):
        return True
    is_uniform = (largest <= torch.finfo(mask.dtype).min / 2) & (mask.amin(-1, keepdim=True) == largest)
    return bool((is_uniform | ~is_hidden).all())


def fill_hidden_rows_as_torch(
    out: Float[Tensor, "batch heads queries value_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    mask: Tensor | None = None,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """Return the head outputs `out`, with torch's result in each query row where an additive `mask` hides every key by
    a large finite negative number. Torch's softmax attends uniformly in such a row, so the result is the mean of all
    values `v`, while headwise itself outputs 0. Other rows are unchanged.

    A finite number that is added to all scores of a row cancels in torch's softmax: the row attends uniformly to all
    keys. Some models read such rows.
    """
    if mask is None or not mask.is_floating_point():
        return out
    rows = hides_all_keys(mask) & (mask.amax(-1, keepdim=True) > -torch.inf)
    if not bool(rows.any()):
        return out
    return torch.where(rows, v.mean(-2, keepdim=True).repeat_interleave(out.shape[1] // v.shape[1], 1), out)


# -- the mask of a call ------------------------------------------------------------------------------------------------

CELLS_AT_ONCE = 2**24
"""Largest number of cells of a mask that are evaluated at a time."""


class ReceivedMask(NamedTuple):
    """Mask that one attention call received, with the sizes and positions for which it is evaluated (`Grid`).

    Attributes:
        mask: the keys that each query may attend to; None if it hides nothing.
        grid: sizes and positions for the mask. It may have fewer keys than the call: further keys are hidden.
    """

    mask: Mask | None
    grid: Grid

    @staticmethod
    def of_problem(problem: Problem) -> "ReceivedMask":
        """Return the mask of the attention call that `problem` describes. A key is hidden if the problem's mask hides
        it, or if its bias (a number added to its score) is -inf.
        """
        mask, bias = problem.mask, None if problem.bias is None else problem.bias.detach()
        if bias is not None and bool(bias.amin() == -torch.inf):
            visible = Dense(bias != -torch.inf)
            mask = visible if mask is None else mask & visible
        return ReceivedMask(mask, problem.grid)

    def equals(self, other: "ReceivedMask") -> bool:
        """Return True if this mask and `other` are stored as tensors with equal values, for equal sizes and without
        explicit positions of queries and keys. Return False for masks that are computed from a rule.
        """
        if not isinstance(self.mask, Dense) or not isinstance(other.mask, Dense) or self.grid != other.grid:
            return False
        if not (self.grid.uses_default_positions and other.grid.uses_default_positions):
            return False
        one, another = self.mask.values, other.mask.values
        return one.shape == another.shape and one.device == another.device and torch.equal(one, another)

    def block(self, rows: range) -> Bool[Tensor, "#batch #heads rows keys"]:
        """Return the mask for the query rows in `rows` and all keys as a boolean tensor. It is True where a row may
        attend to a key.
        """
        if self.mask is None:
            return torch.ones(1, 1, len(rows), self.grid.keys, dtype=torch.bool, device=self.grid.device)
        return self.mask.block(self.grid, rows)

    def by_sequence(self) -> Iterator[tuple[range, Bool[Tensor, "#batch rows keys"]]]:
        """Yield the mask in parts, each with a range of query rows and a boolean tensor for these rows. The tensor is
        True where a row may attend to a key in at least one head. If all rows of the mask are equal, yield only the
        first one.
        """
        for rows, block in self.by_head():
            yield rows, block[:, 0] if block.shape[1] == 1 else block.any(1)

    def by_head(self) -> Iterator[tuple[range, Bool[Tensor, "#batch #heads rows keys"]]]:
        """Yield the mask in parts, each with a range of query rows and a boolean tensor for these rows. The tensor is
        True where a row may attend to a key, separately for each head. If all rows of the mask are equal, yield only
        the first one.
        """
        grid, queries = self.grid, 1 if self.has_equal_rows else self.grid.queries
        step = max(1, CELLS_AT_ONCE // max(1, grid.batch * grid.heads * grid.keys))
        for start in range(0, queries, step):
            rows = range(start, min(start + step, queries))
            yield rows, self.block(rows)

    @property
    def has_equal_rows(self) -> bool:
        """True if the mask is stored as one row that applies to all query rows."""
        return isinstance(self.mask, Dense) and self.mask.values.shape[2] == 1


class MaskSource(NamedTuple):
    """Function that reads the mask of an attention call when the mask is needed, and the tensors and options that
    determine the mask. Calls with the same tensors and options have the same mask.

    Attributes:
        read: function that returns the mask; None if the mask is not known.
        origin: tensors and options that determine the mask: calls with the same ones have the same mask. Empty if
            that is unknown, so that the mask is read for every call.
    """

    read: Callable[[], ReceivedMask | None] = lambda: None
    origin: tuple[Any, ...] = ()


NO_MASK_SOURCE = MaskSource()
"""Source of a mask that is not known."""


# -- facts -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class MaskFacts:
    """Facts about the mask of an attention call, such as the first and last key that each query row sees. A row sees a
    key if the mask lets it attend to the key in at least one head.

    Attributes:
        sees_any: True at query rows that see at least one key.
        is_seen: True at keys that at least one row sees, or that would be seen by rows that select them.
        first_visible: index of the first key that each row sees; 0 in a row that sees none.
        last_visible: index of the last key that each row sees; -1 in a row that sees none.
        sees_own: True at rows that see the key with the index of the row; in a call with as many queries as keys.
        hides_by_distance: True if the mask hides keys by their distance from the query alone, as a causal one, so that
            it shows no padding.
        selects_keys: True if rows see keys that were selected by content, not by position.
    """

    sees_any: Bool[Tensor, "#batch queries"]
    is_seen: Bool[Tensor, "#batch keys"]
    first_visible: Int[Tensor, "#batch queries"]
    last_visible: Int[Tensor, "#batch queries"]
    sees_own: Bool[Tensor, "#batch queries"]
    hides_by_distance: bool = False
    selects_keys: bool = False

    @staticmethod
    def of(received: ReceivedMask, keys: int) -> "MaskFacts | None":
        """Return facts about the mask that an attention call received, such as which keys it hides. `keys` is the
        number of keys of the call. Return None if the mask hides nothing, or if it depends only on the distance between
        query and key, as a causal mask.
        """
        mask, grid = received
        if mask is None or (mask.depends_on_distance_only and grid.uses_default_positions):
            return None
        parts = [_facts_of_rows(visible, rows.start) for rows, visible in received.by_sequence()]
        per_row = [torch.cat(tensors, 1) for tensors in zip(*(part[:4] for part in parts), strict=True)]
        is_seen = torch.stack([part[4] for part in parts]).any(0)
        if received.has_equal_rows:
            per_row = [tensor.expand(-1, grid.queries) for tensor in per_row]
            per_row[3] = F.pad(is_seen, (0, max(grid.queries - grid.keys, 0)))[:, : grid.queries]
        sees_any, first_visible, last_visible, sees_own = per_row
        is_seen = F.pad(is_seen, (0, keys - grid.keys))
        hides_by_distance = _hides_by_distance(mask, grid)
        return MaskFacts(sees_any, is_seen, first_visible, last_visible, sees_own, hides_by_distance)

    def own_key_of_first_row(self) -> tuple[int | None, bool]:
        """In self-attention, return the index of the key that belongs to the first query's token. It is the largest
        difference, over all query rows, between the index of the last visible key and the row's own index. It is None
        if it differs between sequences, or if no row sees a key. The second result is True if the index is certain:
        several rows have the largest difference, as under a causal mask, or there is only one row.

        Rows with a smaller difference are padding.
        """
        queries = self.last_visible.shape[1]
        rows = torch.arange(queries, device=self.last_visible.device)
        differences = (self.last_visible - rows).masked_fill(~self.sees_any, -(2**62))
        largest = differences.amax(1)[self.sees_any.any(1)]
        if not len(largest) or bool((largest != largest[0]).any()):
            return None, False
        is_causal_row = (differences == largest[0]).sum(1)
        return int(largest[0]), queries == 1 or bool((is_causal_row > 1).any())


def _hides_by_distance(mask: Mask, grid: Grid) -> bool:
    """Return True if a mask hides keys only by the distance between query and key, and no position is negative, which
    would mark padding.
    """
    positions = [each for each in (grid.query_positions, grid.key_positions) if each is not None]
    if any(bool((each < 0).any()) for each in positions):
        return False
    parts = mask.parts if isinstance(mask, And) else (mask,)
    return all(part.depends_on_distance_only or isinstance(part, HasPosition) for part in parts)


def _facts_of_rows(visible: Bool[Tensor, "#batch rows keys"], first_row: int) -> tuple[Tensor, ...]:
    """Return five tensors of facts about a block of query rows, whose first row has the index `first_row`. Four tensors
    have an element for each row: True if it may attend to any key, the first such key, the last such key, and True if
    it may attend to the key with its own index. The fifth has an element for each key: True if one of these rows may
    attend to it.
    """
    sees_any, keys = visible.any(-1), visible.shape[-1]
    as_numbers = visible.to(torch.uint8)
    first_visible = as_numbers.argmax(-1)
    last_visible = (keys - 1 - as_numbers.flip(-1).argmax(-1)).masked_fill(~sees_any, -1)
    sees_own = torch.zeros_like(sees_any)
    diagonal = visible.diagonal(first_row, -2, -1)
    sees_own[:, : diagonal.shape[-1]] = diagonal
    return sees_any, first_visible, last_visible, sees_own, visible.any(-2)
