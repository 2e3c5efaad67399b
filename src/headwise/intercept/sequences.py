"""Sequences over several calls of a model: a call with cached keys continues the sequences of the call before."""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.masks.grid import Grid
from headwise.shapes import Bool, Float, Int

Keys = Float[Tensor, "batch kv_heads keys head_dim"]
"""Keys of a call."""

FINGERPRINT_WIDTH = 4
"""Number of features of each key that are compared with those of cached keys."""

NO_TOKEN = -1
"""Id that stands for a token that is padding; no real token has it."""


@dataclass(frozen=True, eq=False)
class History:
    """Tokens that each sequence of a batch has so far, over several calls of the model: their number, their ids, and
    which of them are padding.

    Attributes:
        length: number of tokens of each sequence, with padding.
        token_ids: ids of the tokens; None if unknown.
        is_real: True at tokens that are not padding; None if none is padded.
        has_documents: True if a mask separated documents in some sequence.
    """

    length: int
    token_ids: Int[Tensor, "batch length"] | None
    is_real: Bool[Tensor, "batch length"] | None
    has_documents: bool = False

    def cropped(self, length: int, order: Int[Tensor, " batch"] | None) -> "History":
        """Return a copy of this `History` (tokens of a batch of sequences) with only the first `length` tokens of each
        sequence. If `order` is passed, also reorder the batch: sequence `order[b]` moves to index b.
        """
        token_ids, is_real = (
            tensor if tensor is None else (tensor if order is None else tensor[order])[:, :length]
            for tensor in (self.token_ids, self.is_real)
        )
        return History(length, token_ids, is_real, self.has_documents)

    def extended(
        self, count: int, token_ids: Int[Tensor, "batch count"] | None, is_real: Bool[Tensor, "batch count"] | None
    ) -> "History":
        """Return a copy of this `History` (tokens of a batch of sequences) with `count` more tokens at the end of each
        sequence. If the ids of the earlier or of the new tokens are unknown, the ids of all tokens become unknown
        (None).
        """
        ids = None
        if token_ids is not None and (self.token_ids is not None or not self.length):
            ids = token_ids if self.token_ids is None else torch.cat([self.token_ids, token_ids], 1)
        real = None
        if self.is_real is not None or is_real is not None:
            like = self.is_real if self.is_real is not None else is_real
            assert like is not None
            before, after = (
                like.new_ones(len(like), size) if part is None else part
                for part, size in ((self.is_real, self.length), (is_real, count))
            )
            real = torch.cat([before, after], 1)
        return History(self.length + count, ids, real, self.has_documents)


EMPTY = History(0, None, None)
"""History of sequences without tokens."""


@dataclass(frozen=True, eq=False)
class Continuation:
    """Sequences of an earlier attention call that a new call continues, as in generation with a key/value cache.

    Attributes:
        history: the tokens of these sequences before this call.
        dropped: number of tokens at their start whose keys are not among the keys of this call.
    """

    history: History
    dropped: int


@dataclass(frozen=True, eq=False)
class SiteMemory:
    """Sequences of the latest attention call at one site (attention module, self or cross). A later call that continues
    them is recognised by its cached keys.

    Attributes:
        history: tokens of the sequences after that call.
        dropped: number of tokens at their start whose keys were not among the keys of that call.
        batch: number of sequences.
        fingerprint: some features of each key of a token; None where the keys are unknown.
        given: number of tokens whose keys were cached before the first observed call of these sequences.
        is_newest: True at keys of the tokens of the remembered call itself; None if they are unknown.
    """

    history: History
    dropped: int
    batch: int
    fingerprint: Float[Tensor, "batch keys features"] | None
    given: int = 0
    is_newest: Bool[Tensor, "batch keys"] | None = None

    @staticmethod
    def of(grid: Grid, keys: Keys | None, history: History, dropped: int = 0, given: int = 0) -> "SiteMemory":
        """Return a record of an attention call whose queries are the last tokens in `history`. The record is used to
        recognise a later call that continues the same sequences.
        """
        filled = history.length - dropped
        fingerprint = None if keys is None else fingerprint_of(keys, filled)
        is_newest = _are_last(grid.batch, filled, grid.queries, grid.device)
        return SiteMemory(history, dropped, grid.batch, fingerprint, given, is_newest)

    @staticmethod
    def without_positions(grid: Grid, keys: Keys | None, is_newest: Bool[Tensor, "batch keys"] | None) -> "SiteMemory":
        """Return a record of an attention call for which it is unknown which keys belong to its queries. The record is
        used to recognise a later call that continues the same sequences.
        """
        fingerprint = None if keys is None else fingerprint_of(keys, grid.keys)
        return SiteMemory(History(grid.keys, None, None), 0, grid.batch, fingerprint, is_newest=is_newest)

    def continuation(self, batch: int, cached: int, keys: Keys | None) -> Continuation | None:
        """Return the sequences that a new attention call continues, or None if it starts new ones. It continues the
        sequences of the remembered call (the previous one at the same attention module) if its first `cached` keys come
        from that call. They may be the first keys of the remembered call, or the last ones if a cache drops old keys.

        Sequences may have other places in the batch than in the remembered call, as in beam search.

        Args:
            batch: number of sequences of the call.
            cached: number of keys in front of those of the call's own tokens.
            keys: keys of the call; None if unknown. It then continues the sequences if their lengths fit.
        """
        before = self.history.length - self.dropped
        if not cached or batch != self.batch:
            return None
        if keys is None or self.fingerprint is None:
            return Continuation(self.history, self.dropped) if cached == before else None
        seen, remembered = fingerprint_of(keys, cached), self.fingerprint
        for start in dict.fromkeys((0, before - cached)):
            if start < 0 or start + cached > before or (self.is_newest is None and cached < before):
                continue
            order = _order(seen, remembered[:, start : start + cached])
            if order is not None:
                is_unchanged = torch.equal(order, torch.arange(batch, device=order.device))
                history = self.history.cropped(self.dropped + start + cached, None if is_unchanged else order)
                return Continuation(history, self.dropped + start)
        return None

    def starts_again(self, cached: int, keys: Keys | None) -> bool:
        """Return True if an attention call starts new sequences after the same cached prefix (such as learned keys) as
        the remembered call, the previous one at the same attention module. In this case, the first `cached` keys of the
        new call are those that were cached before the sequences of the remembered call began.
        """
        if keys is None or self.fingerprint is None or self.dropped or not cached == self.given > 0:
            return False
        seen, remembered = fingerprint_of(keys, cached), self.fingerprint[:, :cached]
        return all(bool(_are_same(each, remembered).flatten(1).all(1).any()) for each in seen)

    def new_keys(self, queries: int, keys: Keys | None) -> Bool[Tensor, "batch keys"] | None:
        """Return a mask that is True at the new keys of an attention call, which the remembered call (the previous one
        at the same attention module) did not have. Return None if the new call does not continue the same sequences. It
        continues them if it has at most as many new keys as `queries`, and contains some of the newest remembered keys.
        If the newest ones are unknown, it must contain all remembered keys. Cached keys may be at any place.
        """
        if keys is None or self.fingerprint is None:
            return None
        if len(keys) != self.batch or queries >= keys.shape[2]:
            return None
        seen, remembered = _codes(fingerprint_of(keys, keys.shape[2])), _codes(self.fingerprint)
        is_new = torch.stack([~torch.isin(own, before) for own, before in zip(seen, remembered, strict=True)])
        is_new &= seen != 0  # an empty place of a preallocated cache
        is_kept = torch.stack([torch.isin(before, own) for own, before in zip(seen, remembered, strict=True)])
        continues = is_kept.all(1) if self.is_newest is None else (is_kept & self.is_newest).any(1)
        if not bool((continues & (is_new.sum(1) <= queries)).all()):
            return None
        return is_new | ~is_new.any(1, keepdim=True)  # a new key may be equal to an old one


@lru_cache(maxsize=8)  # all layers of a model have the same tokens
def _are_last(batch: int, length: int, count: int, device: torch.device) -> Bool[Tensor, "batch length"]:
    """Return a mask `(batch, length)` that is True at the last `count` tokens of each sequence."""
    return (torch.arange(length, device=device) >= length - count).expand(batch, -1)


def _codes(fingerprint: Float[Tensor, "batch keys features"]) -> Int[Tensor, "batch keys"]:
    """Return one integer for each key, computed from its fingerprint (some of the key's features). Different
    fingerprints have different integers, except by chance.
    """
    bits = fingerprint.float().contiguous().view(torch.int32).long()
    return (bits * torch.tensor(_PRIMES[: bits.shape[-1]], device=bits.device)).sum(-1)


_PRIMES = (1, 4294967291, 2147483647, 1000000007)
"""Odd factors for the features of a fingerprint."""


def fingerprint_of(keys: Keys, count: int) -> Float[Tensor, "batch count features"]:
    """Return a fingerprint of the first `count` keys: a copy of the first few features of these keys in the first head.
    Later attention calls recognise cached keys by it.
    """
    return keys[:, 0, :count, :FINGERPRINT_WIDTH].detach().clone()


def _order(seen: Tensor, remembered: Tensor) -> Int[Tensor, " batch"] | None:
    """Return, for each sequence in `seen`, the index of an equal sequence in `remembered`. If several are equal, prefer
    the one with the same index. Return None if some sequence in `seen` has no equal one.
    """
    batch = len(seen)
    if seen.shape != remembered.shape:
        return None
    own = torch.arange(batch, device=seen.device)
    if torch.equal(seen, remembered):
        return own
    is_equal = torch.stack([_are_same(seen[index], remembered).flatten(1).all(1) for index in range(batch)])
    if not bool(is_equal.any(1).all()):
        return None
    first = is_equal.to(torch.uint8).argmax(1)
    return torch.where(is_equal.diagonal(), own, first)


def _are_same(features: Tensor, others: Tensor) -> Bool[Tensor, "*axes"]:
    """Return True where features of keys in two attention calls are equal up to rounding. A model that caches a
    compressed form of its keys computes the keys again in each call, and their last bits depend on the number of keys.
    """
    eps = torch.finfo(others.dtype).eps
    rounding = (16 if eps < 1e-6 else 2) * eps  # products in float16 and bfloat16 are rounded once, at their end
    largest = others.abs().where(others.isfinite(), 0.0).amax()
    return (features == others) | ((features - others).abs() <= rounding * largest)


def padded_to(tensor: Tensor, length: int, value: int) -> Tensor:
    """Return a tensor `(batch, tokens)` with exactly `length` tokens: cut at the end, or extended with the number
    `value`.
    """
    return F.pad(tensor[:, :length], (0, max(length - tensor.shape[1], 0)), value=value)
