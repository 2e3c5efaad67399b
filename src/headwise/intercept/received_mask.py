"""Mask that a model passed to one of its attention calls, in headwise's form."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.attention.masks.base import Mask
from headwise.attention.masks.grid import Grid
from headwise.attention.masks.kinds import Dense
from headwise.attention.problem import Problem
from headwise.shapes import Bool

CELLS_AT_ONCE = 2**24
"""Largest number of cells of a mask that are evaluated at a time."""


class ReceivedMask(NamedTuple):
    """Mask of one attention call, with the sizes and positions for which it is evaluated (`Grid`).

    Attributes:
        mask: the keys that each query may attend to; None if it hides nothing.
        grid: sizes and positions for the mask. It may have fewer keys than the call: further keys are hidden.
    """

    mask: Mask | None
    grid: Grid

    @staticmethod
    def of_problem(problem: Problem) -> "ReceivedMask":
        """Return the mask of an attention call that is stated as a `Problem`. A key is hidden if the problem's mask
        hides it, or if its bias is -inf.
        """
        mask, bias = problem.mask, None if problem.bias is None else problem.bias.detach()
        if bias is not None and bool(bias.amin() == -torch.inf):
            visible = Dense(bias != -torch.inf)
            mask = visible if mask is None else mask & visible
        return ReceivedMask(mask, problem.grid)

    def equals(self, other: "ReceivedMask") -> bool:
        """Return True if both masks are stored as tensors with equal values, for equal sizes and without explicit
        positions. Return False for masks that are computed from a rule.
        """
        if not isinstance(self.mask, Dense) or not isinstance(other.mask, Dense) or self.grid != other.grid:
            return False
        if not (self.grid.uses_default_positions and other.grid.uses_default_positions):
            return False
        one, another = self.mask.values, other.mask.values
        return one.shape == another.shape and one.device == another.device and torch.equal(one, another)

    def block(self, rows: range) -> Bool[Tensor, "#batch #heads rows keys"]:
        """Return a boolean tensor for the query rows in `rows` and all keys. It is True where a row may attend to a
        key.
        """
        if self.mask is None:
            return torch.ones(1, 1, len(rows), self.grid.keys, dtype=torch.bool, device=self.grid.device)
        return self.mask.block(self.grid, rows)

    def by_sequence(self) -> Iterator[tuple[range, Bool[Tensor, "#batch rows keys"]]]:
        """Yield the mask in parts: a range of query rows and a boolean tensor for these rows. The tensor is True where
        a row may attend to a key in at least one head. If all rows are equal, yield the first row alone.
        """
        for rows, block in self.by_head():
            yield rows, block[:, 0] if block.shape[1] == 1 else block.any(1)

    def by_head(self) -> Iterator[tuple[range, Bool[Tensor, "#batch #heads rows keys"]]]:
        """Yield the mask in parts: a range of query rows and a boolean tensor for these rows. The tensor is True where
        a row may attend to a key, separately for each head. If all rows are equal, yield the first row alone.
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
