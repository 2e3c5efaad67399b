"""Positions of tokens in their sequences, read from the causal mask of an attention call of `transformers`.

Position 0 is the first token of a sequence that is not padding. Padding has position -1.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.errors import InputError
from headwise.shapes import Bool, Int


class TokenPositions(NamedTuple):
    """Positions of the keys of an attention call. The last tokens are those of the queries.

    Attributes:
        tokens: number of keys that belong to tokens. Later keys are unused slots of a static cache.
        positions: position of each token, -1 for padding; None without padding.
    """

    tokens: int
    positions: Int[Tensor, "batch tokens"] | None


class PositionReader:
    """Reader of the masks of attention calls, which reads a mask that several layers share once."""

    def __init__(self) -> None:
        self._mask: Any = lambda: None
        self._version: int | None = None
        self._last = TokenPositions(0, None)

    def read(
        self, path: str, mask: Tensor | None, batch: int, queries: int, keys: int, is_causal: bool
    ) -> TokenPositions:
        """Return the positions of the keys of a call.

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
            if queries == 1:
                return TokenPositions(keys, None)
            if is_causal and queries <= keys:  # SDPA aligns the first query with the first key
                return TokenPositions(queries, None)
            raise _refusal(path, f"no mask for {queries} queries and {keys} keys")
        version = None if mask.is_inference() else mask._version
        if self._mask() is not mask or version is None or version != self._version:
            self._last = _positions_in(path, mask, queries, keys)
            self._mask, self._version = weakref.ref(mask), version
        tokens, positions = self._last
        return TokenPositions(tokens, None if positions is None else positions.expand(batch, -1))


def _refusal(path: str, got: str) -> InputError:
    """Return the error for a mask from which positions cannot be read."""
    return InputError("model", expected=f"causal attention to all tokens that are not padding in {path}", got=got)


def _positions_in(path: str, mask: Tensor, queries: int, keys: int) -> TokenPositions:
    """Return the positions of the keys from a mask."""
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[3] != keys or mask.shape[2] != queries:
        raise _refusal(path, f"a mask of shape {tuple(mask.shape)}")
    visible = _visible(path, mask[:, 0])
    tokens = keys if queries == keys else _last_visible(visible[:, -1])
    is_real = visible[:, -1]
    key, query = torch.arange(keys, device=mask.device), torch.arange(queries, device=mask.device) + tokens - queries
    if tokens < queries or not torch.equal(visible, (key <= query[:, None]) & is_real[:, None]):
        raise _refusal(path, "another mask")
    is_real = is_real[:, :tokens]
    if bool(is_real.all()):
        return TokenPositions(tokens, None)
    if int((is_real[:, 1:] & ~is_real[:, :-1]).sum(1).add(is_real[:, 0]).max()) > 1:
        raise _refusal(path, "padding between tokens")
    if queries != keys and bool((is_real.any(1) & ~is_real[:, -1]).any()):
        raise _refusal(path, "padding on the right with a cache")
    return TokenPositions(tokens, (is_real.cumsum(1) - 1).masked_fill(~is_real, -1))


def _last_visible(is_visible: Bool[Tensor, "batch keys"]) -> int:
    """Return the number of keys up to the last one that the last query of any sequence sees. This key is its own: the
    keys of a static cache that are not used yet come after it, and are hidden. All keys count if each of these queries
    is padding.
    """
    seen = is_visible.any(0).nonzero()
    return int(seen[-1]) + 1 if len(seen) else is_visible.shape[1]


def _visible(path: str, mask: Tensor) -> Bool[Tensor, "batch queries keys"]:
    """Return a mask as booleans, True where a query attends to a key."""
    if mask.dtype == torch.bool:
        return mask
    visible = mask == 0
    if not bool((visible | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
        raise _refusal(path, "a mask that adds other numbers to the scores")
    return visible
