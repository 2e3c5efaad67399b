"""Sequences over several calls of a model: a call with cached keys continues the sequences of the call before."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.shapes import Bool, Float, Int

FINGERPRINT_WIDTH = 4
"""Number of features of each key that are compared with those of cached keys."""

NO_TOKEN = -1
"""Id that stands for a token that is padding; no real token has it."""


@dataclass(frozen=True, eq=False)
class History:
    """Tokens of the sequences of a batch so far: their number, their ids and which of them are padding.

    Attributes:
        length: number of tokens of each sequence, with padding.
        token_ids: ids of the tokens; None if unknown.
        is_real: True at tokens that are not padding; None if none is padded.
    """

    length: int
    token_ids: Int[Tensor, "batch length"] | None
    is_real: Bool[Tensor, "batch length"] | None

    def cropped(self, length: int, order: Int[Tensor, " batch"] | None) -> "History":
        """Return the history of the first `length` tokens. If `order` is passed, sequence `order[b]` moves to index b
        of the batch.
        """
        token_ids, is_real = (
            tensor if tensor is None else (tensor if order is None else tensor[order])[:, :length]
            for tensor in (self.token_ids, self.is_real)
        )
        return History(length, token_ids, is_real)

    def extended(
        self, count: int, token_ids: Int[Tensor, "batch count"] | None, is_real: Bool[Tensor, "batch count"] | None
    ) -> "History":
        """Return the history with `count` more tokens of each sequence. Token ids are unknown if they are unknown for
        one of the two parts.
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
        return History(self.length + count, ids, real)


EMPTY = History(0, None, None)
"""History of sequences without tokens."""


@dataclass(frozen=True, eq=False)
class Continuation:
    """Sequences of an earlier call that an attention call continues.

    Attributes:
        history: the tokens of these sequences before this call.
        dropped: number of tokens at their start whose keys are not among the keys of this call.
    """

    history: History
    dropped: int


@dataclass(frozen=True, eq=False)
class SiteMemory:
    """Sequences of the latest attention call of a site, by which a later call that continues them is recognised.

    Attributes:
        history: tokens of the sequences after that call.
        dropped: number of tokens at their start whose keys were not among the keys of that call.
        batch: number of sequences.
        fingerprint: some features of each key of a token; None where the keys are unknown.
    """

    history: History
    dropped: int
    batch: int
    fingerprint: Float[Tensor, "batch keys features"] | None

    def continuation(
        self, batch: int, cached: int, keys: Float[Tensor, "batch kv_heads keys head_dim"] | None
    ) -> Continuation | None:
        """Return the sequences that a call continues if its first `cached` keys are keys of the remembered call: from
        the first key on, or the last ones where a cache drops old keys. Return None if they are not.

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
            if start < 0 or start + cached > before:
                continue
            order = _order(seen, remembered[:, start : start + cached])
            if order is not None:
                is_unchanged = torch.equal(order, torch.arange(batch, device=order.device))
                history = self.history.cropped(self.dropped + start + cached, None if is_unchanged else order)
                return Continuation(history, self.dropped + start)
        return None


def fingerprint_of(
    keys: Float[Tensor, "batch kv_heads keys head_dim"], count: int
) -> Float[Tensor, "batch count features"]:
    """Return a copy of some features of the first `count` keys of the first head."""
    return keys[:, 0, :count, :FINGERPRINT_WIDTH].detach().clone()


def _order(seen: Tensor, remembered: Tensor) -> Int[Tensor, " batch"] | None:
    """Return for each sequence of `seen` the index of an equal sequence of `remembered`, its own index if that is one;
    None if a sequence has no equal.
    """
    batch = len(seen)
    if seen.shape != remembered.shape:
        return None
    own = torch.arange(batch, device=seen.device)
    if torch.equal(seen, remembered):
        return own
    is_equal = torch.stack([(seen[index] == remembered).flatten(1).all(1) for index in range(batch)])
    if not bool(is_equal.any(1).all()):
        return None
    first = is_equal.to(torch.uint8).argmax(1)
    return torch.where(is_equal.diagonal(), own, first)


def padded_to(tensor: Tensor, length: int, value: int) -> Tensor:
    """Return a tensor `(batch, tokens)`, cut or filled with `value` to `(batch, length)`."""
    return F.pad(tensor[:, :length], (0, max(length - tensor.shape[1], 0)), value=value)
