"""Cache of constant size: the last tokens of a text, and its first ones."""

import torch
from torch import Tensor

from headwise.attention.caches.base import CachedTensors, CacheUpdate, first_tokens
from headwise.attention.caches.growing import GrowingCache
from headwise.attention.masks.base import Mask
from headwise.attention.masks.factories import causal, prefix, window
from headwise.checks import whole_number
from headwise.errors import InputError
from headwise.shapes import Float, Int


class SlidingCache(GrowingCache):
    """Cache whose memory stops growing: a query attends to the last `window` tokens, its own included, and to the first
    `sinks` tokens of the text (attention sinks, Xiao et al. 2023). Tokens that no later query attends to are dropped.

    A layer with this cache attends as under the mask `window(window) | causal() & prefix(sinks)`. The output is the
    same for a whole text, for the text in pieces, and for one token at a time.

    Args:
        window: number of keys that each query attends to, its own among them.
        sinks: number of tokens at the beginning of the text that every query attends to as well.

    Raises:
        InputError: a `window` below 1 or negative `sinks`.
    """

    def __init__(self, window: int, *, sinks: int = 0) -> None:
        self.window = whole_number("window", window, least=1)
        self.sinks = whole_number("sinks", sinks, least=0)
        self.mask = _window_and_sinks(self.window, self.sinks)
        super().__init__()

    def prepare_update(
        self, new: CachedTensors, positions: Int[Tensor, "#batch new"], *, full_capacity: bool = False
    ) -> CacheUpdate:
        """Return the stored tokens (the first `sinks` tokens and the most recent ones) followed by the new ones, with
        their positions (None if no token has been dropped), as a `CacheUpdate`. Only `commit` drops tokens.
        `full_capacity` is ignored.
        """
        tensors, buffers = self._append(new)
        token_count = self.token_count + positions.shape[1]
        key_positions = self._key_positions(tensors[0].shape[2], token_count, positions.device)
        return CacheUpdate(tensors, key_positions, token_count, buffers)

    def _key_positions(self, keys: int, token_count: int, device: torch.device) -> Int[Tensor, "1 keys"] | None:
        """Return the positions of `keys` stored and new keys: those of the first `sinks` tokens of the text, then those
        of its last tokens. `token_count` is the number of tokens of the text so far, new ones included. Return None if
        no token has been dropped, since key j is then at position j.
        """
        if keys == token_count:
            return None
        sinks = torch.arange(self.sinks, device=device)
        return torch.cat([sinks, torch.arange(token_count - keys + self.sinks, token_count, device=device)])[None]

    def commit(self, update: CacheUpdate) -> None:
        """Store the first `sinks` and the last `window - 1` tokens of an update, and drop those between. The next query
        attends to these and to its own key.
        """
        keys = update.tensors[0].shape[2]
        sinks = min(self.sinks, keys)
        dropped = max(keys - (self.window - 1) - sinks, 0)
        tensors, buffers = update.tensors, update.buffers
        if dropped and (buffers is None or dropped > keys - dropped):
            tensors, buffers = tuple(_without(tensor, sinks, sinks + dropped) for tensor in tensors), None
        elif dropped and buffers is not None:
            buffers = tuple(_shifted(buffer, sinks, dropped) for buffer in buffers)
            tensors = first_tokens(keys - dropped, buffers)
        self.tensors, self.buffers, self.token_count = tensors, buffers, update.token_counts

    def crop(self, length: int) -> None:
        """Remove all but the first `length` tokens of each sequence. Raises `InputError` once the cache has dropped
        tokens, unless `length` removes nothing.

        Raises:
            InputError: tokens before `length` have been dropped already.
        """
        length = whole_number("length", length, least=0)
        if self.tensors is None or length >= self.token_count:
            return
        if self.tensors[0].shape[2] < self.token_count:
            expected = f"{self.token_count} or more: a sliding cache has dropped what an earlier query would need"
            raise InputError("length", expected=expected, got=length)
        self.tensors, self.token_count = first_tokens(length, self.tensors), length

    def __repr__(self) -> str:
        return f"SlidingCache(window={self.window}, sinks={self.sinks}, {self.token_count} tokens seen)"


def _window_and_sinks(width: int, sinks: int) -> Mask:
    """Return the mask under which a query attends to the last `width` keys up to its own, and to the first `sinks`."""
    return window(width) | causal() & prefix(sinks) if sinks else window(width)


def _without(
    tensor: Float[Tensor, "batch heads length width"], start: int, stop: int
) -> Float[Tensor, "batch heads remaining width"]:
    """Return a copy of the tensor without the tokens `start` to `stop - 1`, so that no dropped token uses memory."""
    return torch.cat([tensor[:, :, :start], tensor[:, :, stop:]], dim=2)


def _shifted(
    buffer: Float[Tensor, "batch heads capacity width"], sinks: int, dropped: int
) -> Float[Tensor, "batch heads remaining width"]:
    """Return a view of a buffer without the `dropped` tokens that follow the first `sinks` tokens. For this, the first
    `sinks` tokens are moved in the buffer by `dropped` places, to directly before the other tokens that remain.
    """
    if sinks:
        # The window stays where it is, and the sinks overwrite dropped tokens.
        buffer[:, :, dropped : dropped + sinks] = buffer[:, :, :sinks].clone()
    return buffer[:, :, dropped:]
