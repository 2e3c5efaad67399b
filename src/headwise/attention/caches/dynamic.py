"""Cache that stores every token and grows with the text."""

from torch import Tensor

from headwise.attention.caches.base import CachedTensors, CacheUpdate, first_tokens
from headwise.attention.caches.growing import GrowingCache
from headwise.checks import whole_number
from headwise.shapes import Int


class DynamicCache(GrowingCache):
    """Cache that stores every token; its memory grows with the text."""

    reads_positions = False

    def prepare_update(
        self, new: CachedTensors, positions: Int[Tensor, "#batch new"] | None, *, full_capacity: bool = False
    ) -> CacheUpdate:
        """Return the tensors of all stored tokens followed by the new ones, and the number of tokens per sequence, new
        ones included, as a `CacheUpdate`. The arguments `positions` and `full_capacity` are ignored.
        """
        tensors, buffers = self._append(new)
        return CacheUpdate(tensors, None, tensors[0].shape[2], buffers)

    def commit(self, update: CacheUpdate) -> None:
        """Make the tokens of an update, stored and new, the content of the cache."""
        self.tensors, self.buffers, self.token_count = update.tensors, update.buffers, update.token_counts

    def crop(self, length: int) -> None:
        """Remove all but the first `length` tokens of each sequence."""
        length = whole_number("length", length, least=0)
        if self.tensors is not None and length < self.token_count:
            self.tensors, self.token_count = first_tokens(length, self.tensors), length

    def __repr__(self) -> str:
        return f"DynamicCache({self.token_count} tokens)"
