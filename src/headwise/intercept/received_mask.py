"""Mask that a model passed to one of its attention calls, in headwise's form."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from headwise.attention.masks.arbitrary import Dense
from headwise.attention.masks.base import Mask
from headwise.attention.masks.grid import Grid
from headwise.attention.problem import Problem
from headwise.shapes import Bool


class ReceivedMask(NamedTuple):
    """Mask of one attention call, and the score grid on which it is evaluated.

    Attributes:
        mask: the keys that each query may attend to; None if it hides nothing.
        grid: sizes and positions for the mask. It may have fewer keys than the call: further keys are hidden.
    """

    mask: Mask | None
    grid: Grid

    @staticmethod
    def of_problem(problem: Problem) -> "ReceivedMask":
        """Return the mask of an attention problem. It hides keys by the problem's mask, and by a bias of -inf."""
        mask, bias = problem.mask, problem.bias
        if bias is not None and bool(bias.amin() == -torch.inf):
            visible = Dense(bias > -torch.inf)
            mask = visible if mask is None else mask & visible
        return ReceivedMask(mask, problem.grid)

    def block(self, rows: range) -> Bool[torch.Tensor, "#batch #heads rows keys"]:
        """Return a boolean tensor for a range of query rows and all keys of `grid`, True where a row attends to a
        key.
        """
        if self.mask is None:
            return torch.ones(1, 1, len(rows), self.grid.keys, dtype=torch.bool, device=self.grid.device)
        return self.mask.block(self.grid, rows)


class MaskSource(NamedTuple):
    """Function that reads the mask of an attention call, and the objects from which it reads the mask.

    Attributes:
        read: function that returns the mask; None if the mask is not known.
        origin: tensors and options that determine the mask: calls with the same ones have the same mask. Empty if
            that is unknown, so that the mask is read for every call.
    """

    read: Callable[[], ReceivedMask | None] = lambda: None
    origin: tuple[Any, ...] = ()


NO_MASK_SOURCE = MaskSource()
"""Source of a mask that is not known."""
