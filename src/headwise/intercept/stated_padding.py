"""Padding that the user of `watch` states, for models in which it cannot be derived."""

from collections.abc import Hashable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from headwise.attention.masks.grid import Grid
from headwise.errors import InputError
from headwise.shapes import Bool

EXPECTED = "a boolean tensor (batch, tokens), True at tokens that are not padding, or a dict of them by module path"


class StatedPadding:
    """User's statement about which tokens are padding, for all attention calls of a model or for the calls in some
    modules.

    Args:
        padding: a boolean tensor `(batch, tokens)` that is True at tokens that are not padding, or a dict of such
            tensors by the path of a module, for all attention in this module; None to state nothing.
        model: the model.

    Raises:
        InputError: `padding` has another form, or names a module that the model has not.
    """

    def __init__(self, padding: Any, model: nn.Module) -> None:
        by_path = padding if isinstance(padding, Mapping) else {} if padding is None else {None: padding}
        paths = {path for path, _ in model.named_modules()} if by_path else set()
        for path, real in by_path.items():
            if not isinstance(real, Tensor) or real.ndim != 2 or bool(((real != 0) & (real != 1)).any()):
                got = f"{tuple(real.shape)}" if isinstance(real, Tensor) else type(real).__name__
                raise InputError("padding", expected=EXPECTED, got=got)
            if path is not None and path not in paths:
                raise InputError("padding", expected="paths of modules of the model", got=repr(path))
        self.by_path = {path: real.bool() for path, real in by_path.items()}
        self._stops: dict[tuple[str | None, str], int] = {}  # by statement and module: tokens up to the last query
        self._parts: dict[Hashable, Bool[Tensor, "batch queries"]] = {}

    def of_call(self, path: str, grid: Grid, first: int | None) -> Bool[Tensor, "batch queries"] | None:
        """Return the padding that the user states for the queries of an attention call, as a mask that is True at
        tokens and False at padding. The statement for the innermost module around the call applies. Return None if
        nothing is stated. Tokens after the end of the stated mask are generated ones, so they are not padding.

        Args:
            path: path of the module of the call.
            grid: sizes of the call.
            first: number of the first query's token in its sequence; None if it is unknown. The stated mask must then
                have as many tokens as the call has queries.

        Raises:
            InputError: the statement is about the module, and has another number of sequences, or of tokens.
        """
        around = [each for each in self.by_path if not each or f"{path}.".startswith(f"{each}.")]
        if not around:
            return None
        stated_for = max(around, key=lambda each: -1 if each is None else len(each))
        real, start = self.by_path[stated_for], first or 0
        stop = start + grid.queries
        if stated_for is None and (len(real) != grid.batch or (not first and real.shape[1] != grid.queries)):
            return None  # another part of the model, such as a vision tower
        if len(real) != grid.batch:
            raise InputError("padding", expected=f"{grid.batch} sequences in {path}", got=tuple(real.shape))
        if first is None and real.shape[1] != grid.queries:
            expected = f"the {grid.queries} tokens of the queries in {path}"
            raise InputError("padding", expected=expected, got=tuple(real.shape))
        self._stops[stated_for, path] = max(stop, self._stops.get((stated_for, path), 0))
        key = stated_for, first, grid
        if key not in self._parts:
            self._parts[key] = F.pad(real, (0, max(stop - real.shape[1], 0)), value=True)[:, start:stop].to(grid.device)
        return self._parts[key]

    def require_used(self) -> None:
        """Raise `InputError` if the user states padding that was never used, since its sizes fit no attention call, or
        more tokens than some module attended with, as for tokens that a model averages to fewer queries.
        """
        used = {stated_for for stated_for, _ in self._stops}
        for stated_for, real in self.by_path.items():
            if stated_for not in used:
                where = "" if stated_for is None else f" in {stated_for}"
                expected = f"the number of sequences and tokens of attention calls{where}"
                raise InputError("padding", expected=expected, got=f"{tuple(real.shape)}, which fits none")
        for (stated_for, path), stop in self._stops.items():
            if stop < self.by_path[stated_for].shape[1]:
                expected, got = f"the {stop} tokens of the queries in {path}", tuple(self.by_path[stated_for].shape)
                raise InputError("padding", expected=expected, got=got)


NOTHING_STATED = StatedPadding(None, nn.Module())
"""Padding of which the user states nothing."""
