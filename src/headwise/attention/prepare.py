"""Rotation of queries and keys by their positions, and combination of new keys and values with cached ones.

A call has two sets of positions. Rotary embeddings and position biases use those that the user may pass. Masks use
the order of the tokens, which follows from the sizes unless a cache has dropped keys or has empty slots.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.attention import packed
from headwise.attention.caches import Cache, CachedTensors, CacheUpdate
from headwise.attention.masks.grid import Grid
from headwise.attention.rotary import Rotary
from headwise.attention.tensors import KeyPositions, Keys, Queries, QueryPositions
from headwise.errors import InputError
from headwise.shapes import Float


class AttentionInputs(NamedTuple):
    """Queries, keys and values of one layer call, ready for attention. Queries and keys are rotated if the layer has
    rotary embeddings. Cached keys and values come before the new ones.

    Attributes:
        q: queries of this call.
        k: cached keys, and those of this call.
        v: cached values, and those of this call.
        explicit_query_positions: positions for rotary embeddings and position biases; None where they follow from the
            sizes.
        explicit_key_positions: the same for the keys; None where key j is at position j.
        mask_query_positions: positions of the queries for masks; None where they follow from the sizes.
        mask_key_positions: positions of the keys for masks; None where they follow from the sizes.
        cache_update: argument of `Cache.commit`, which the layer calls last; None without a cache.
    """

    q: Queries
    k: Keys
    v: Float[Tensor, "batch value_heads keys value_dim"]
    explicit_query_positions: QueryPositions | None = None
    explicit_key_positions: KeyPositions | None = None
    mask_query_positions: QueryPositions | None = None
    mask_key_positions: KeyPositions | None = None
    cache_update: CacheUpdate | None = None

    @property
    def query_positions(self) -> QueryPositions:
        """Positions of the queries for rotary embeddings and position biases, `(batch or 1, queries)`. By default the
        last query is at the position of the last key.
        """
        if self.explicit_query_positions is None:
            queries, keys = self.q.shape[2], self.k.shape[2]
            return torch.arange(queries, device=self.q.device)[None] + (keys - queries)
        return self.explicit_query_positions

    @property
    def key_positions(self) -> KeyPositions:
        """Positions of all keys, cached ones included, for position biases: `(batch, keys)` or `(1, keys)`."""
        if self.explicit_key_positions is None:
            return torch.arange(self.k.shape[2], device=self.k.device)[None]
        return self.explicit_key_positions

    @property
    def grid(self) -> Grid:
        """Sizes of the score tensor `(batch, heads, queries, keys)` and its device. Keys have the positions 0, 1, 2 and
        so on, and the last query is at the position of the last key.
        """
        batch, heads, queries, _ = self.q.shape
        return Grid(batch, heads, queries, self.k.shape[2], self.q.device)


def prepare_qkv(
    q: Queries,
    k: Float[Tensor, "batch kv_heads new key_dim"],
    v: Float[Tensor, "batch value_heads new value_dim"] | None,
    rotary: Rotary | None,
    positions: QueryPositions | None,
    cache: Cache | None,
    lengths: Any,
    full_capacity: bool,
    offsets: packed.Offsets | None,
) -> AttentionInputs:
    """Return the queries, keys and values as attention needs them: rotated by `rotary`, with cached keys and values
    before the new ones. The new tokens do not count as cached yet: pass `cache_update` of the result to `Cache.commit`
    as the last step of the layer.

    Without `v`, as in latent attention, values are computed from the keys: the cache stores keys alone, and `v` of the
    result is `k` before a rotation by length. With `full_capacity` the keys are all slots of a `StaticCache`, empty
    ones included, as for a mask, a bias or weights with an axis of that size.
    """
    # Masks go by the order of the tokens, in which cached tokens come first. Rotary embeddings and position biases go
    # by `positions` if these are passed.
    order: Any = None
    query_positions: Any = None
    new_positions: Any = None
    follows_from_sizes = cache is not None and not cache.reads_positions and positions is None and lengths is None
    if rotary is not None or not follows_from_sizes:
        queries, keys = q.shape[2], k.shape[2]
        if cache is not None:
            order = new_positions = cache.next_positions(q.shape[0], queries, lengths, q.device)
        elif offsets is not None:
            order, new_positions = packed.positions_in_sequences(offsets, queries, keys, q.device)
        else:
            order = new_positions = torch.arange(keys, device=q.device)[None]
            if torch.compiler.is_compiling() or queries != keys:  # while compiling, lengths may be symbols
                order = torch.arange(queries, device=q.device)[None] + (keys - queries)
        query_positions = order
        if positions is not None:
            query_positions = new_positions = positions
    if rotary is not None and not rotary.depends_on_length:
        q, k = rotary.rotate_both(q, k, query_positions, new_positions)

    tensors: CachedTensors = (k,) if v is None else (k, v)
    update: CacheUpdate | None = None
    key_positions: KeyPositions | None = new_positions
    mask_positions: tuple[Tensor | None, Tensor | None] = None, None
    if cache is not None:
        update = cache.prepare_update(tensors, order, full_capacity=full_capacity)
        tensors, key_positions = update.tensors, update.key_positions
        if key_positions is not None:
            mask_positions = order, key_positions
    inputs = AttentionInputs(q, tensors[0], tensors[-1], query_positions, key_positions, *mask_positions, update)
    if rotary is not None and rotary.depends_on_length:
        # Every new token changes these angles, also those of cached keys; so keys are cached unrotated.
        return _rotated_by_length(rotary, inputs, offsets)
    return inputs


def _rotated_by_length(rotary: Rotary, inputs: AttentionInputs, offsets: packed.Offsets | None) -> AttentionInputs:
    """Return the inputs with queries and keys rotated by angles that depend on the length of the text. The length is
    the largest position plus 1, of each packed sequence or, without `offsets`, of the whole batch.
    """
    if offsets is None:
        texts = [(slice(None), slice(None))]
    elif isinstance(offsets.queries, Tensor):
        expected = "a list or a tensor on the CPU with a Rotary that depends on the length of each sequence"
        raise InputError("offsets", expected=expected, got=f"a tensor on {offsets.queries.device}")
    else:
        texts = list(zip(*map(packed.sequence_slices, offsets), strict=True))
    if not texts:
        return inputs
    rotated = []
    for queries, keys in texts:
        query_positions, key_positions = inputs.query_positions[:, queries], inputs.key_positions[:, keys]
        all_positions = [query_positions.flatten(), key_positions.flatten(), query_positions.new_zeros(1)]
        length = torch.cat(all_positions).max() + 1
        q = rotary.rotate(inputs.q[:, :, queries], query_positions, length=length)
        rotated.append((q, rotary.rotate(inputs.k[:, :, keys], key_positions, length=length)))
    q, k = (torch.cat(parts, dim=2) for parts in zip(*rotated, strict=True))
    return inputs._replace(q=q, k=k)
