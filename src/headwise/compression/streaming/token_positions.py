"""Positions of tokens in their sequences, read from the causal mask of an attention call of `transformers`.

Position 0 is the first token of a sequence that is not padding. Padding has position -1.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from headwise.errors import InputError
from headwise.shapes import Bool, Int


class TokenPositions:
    """Reader of the masks of attention calls, which reads a mask that several layers share once."""

    def __init__(self) -> None:
        self._mask: Any = lambda: None
        self._positions: Tensor | None = None

    def of(
        self, path: str, mask: Tensor | None, batch: int, queries: int, keys: int, is_causal: bool
    ) -> Int[Tensor, "batch keys"] | None:
        """Return the position of each key of a call; None if no key is padding. The last keys are those of the queries.

        Args:
            path: path of the attention module.
            mask: mask of the call: boolean, or added to the scores; None without.
            batch: number of sequences.
            queries: number of queries of each sequence.
            keys: number of keys of each sequence.
            is_causal: True if the attention function itself hides later keys where `mask` is None.

        Raises:
            InputError: the mask is not the causal mask, or the padding is not on one side.
        """
        if mask is None:
            if queries == 1 or (is_causal and queries == keys):
                return None
            raise _refusal(path, f"no mask for {queries} queries and {keys} keys")
        if self._mask() is not mask:
            self._positions = _read(path, mask, queries, keys)
            self._mask = weakref.ref(mask)
        return None if self._positions is None else self._positions.expand(batch, -1)


def _refusal(path: str, got: str) -> InputError:
    """Return the error for a mask from which positions cannot be read."""
    return InputError("model", expected=f"causal attention to all tokens that are not padding in {path}", got=got)


def _read(path: str, mask: Tensor, queries: int, keys: int) -> Int[Tensor, "#batch keys"] | None:
    """Return the position of each key from a mask; None if no key is padding."""
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[3] != keys or mask.shape[2] != queries:
        raise _refusal(path, f"a mask of shape {tuple(mask.shape)}")
    visible = _visible(path, mask[:, 0])
    is_real = visible[:, -1]
    key, query = torch.arange(keys, device=mask.device), torch.arange(queries, device=mask.device) + keys - queries
    if not torch.equal(visible, (key <= query[:, None]) & is_real[:, None]):
        raise _refusal(path, "another mask")
    if bool(is_real.all()):
        return None
    if int((is_real[:, 1:] & ~is_real[:, :-1]).sum(1).add(is_real[:, 0]).max()) > 1:
        raise _refusal(path, "padding between tokens")
    if queries != keys and bool((is_real.any(1) & ~is_real[:, -1]).any()):  # as with unused slots of a static cache
        raise _refusal(path, "keys after those of the queries, or padding on the right with a cache")
    return (is_real.cumsum(1) - 1).masked_fill(~is_real, -1)


def _visible(path: str, mask: Tensor) -> Bool[Tensor, "batch queries keys"]:
    """Return a mask as booleans, True where a query attends to a key."""
    if mask.dtype == torch.bool:
        return mask
    visible = mask == 0
    if not bool((visible | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
        raise _refusal(path, "a mask that adds other numbers to the scores")
    return visible
