"""Facts that follow from the mask of an attention call: rows that see a key, keys that are seen, last visible keys."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.masks.base import And, Mask
from headwise.attention.masks.grid import Grid
from headwise.attention.masks.kinds import HasPosition
from headwise.intercept.received_mask import ReceivedMask
from headwise.shapes import Bool, Int


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
        """Return the facts about the mask that an attention call with this number of keys received. Return None if the
        mask hides nothing, or if it depends only on the distance between query and key, as a causal mask.
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
        """In self-attention, return the index of the key that belongs to the token of the first query row: the largest
        value of `last visible key - row` over all rows. The index is None if this value differs between sequences, or
        if no row sees a key. The second result is True if the index is certain: several rows have the largest value, as
        under a causal mask, or there is only one row.

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
    """Return True if a mask hides keys only by the distance between the positions of query and key, and no position
    marks padding.
    """
    positions = [each for each in (grid.query_positions, grid.key_positions) if each is not None]
    if any(bool((each < 0).any()) for each in positions):
        return False
    parts = mask.parts if isinstance(mask, And) else (mask,)
    return all(part.depends_on_distance_only or isinstance(part, HasPosition) for part in parts)


def _facts_of_rows(visible: Bool[Tensor, "#batch rows keys"], first_row: int) -> tuple[Tensor, ...]:
    """Return facts about some query rows, of which the first has the index `first_row`. Four tensors have an element
    for each row: True if it sees a key, the first key that it sees, the last one, and True if it sees the key with its
    own index. The fifth tensor has an element for each key: True if one of these rows sees it.
    """
    sees_any, keys = visible.any(-1), visible.shape[-1]
    as_numbers = visible.to(torch.uint8)
    first_visible = as_numbers.argmax(-1)
    last_visible = (keys - 1 - as_numbers.flip(-1).argmax(-1)).masked_fill(~sees_any, -1)
    sees_own = torch.zeros_like(sees_any)
    diagonal = visible.diagonal(first_row, -2, -1)
    sees_own[:, : diagonal.shape[-1]] = diagonal
    return sees_any, first_visible, last_visible, sees_own, visible.any(-2)
