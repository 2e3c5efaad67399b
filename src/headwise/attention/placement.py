"""Where tokens stand: queries and keys rotated to their places, and what a cache kept put before them.

There are two sets of positions. Rotations and position biases go by those that a user may give. Masks go by the order
in which tokens came, which follows from the layout unless a cache has dropped keys or has room between them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.attention import packed
from headwise.attention.cache import Cache, Joined, Kept
from headwise.attention.masks import Grid
from headwise.attention.rotary import Rotary
from headwise.shapes import Float, Int


class Placed(NamedTuple):
    """Queries, keys and values, ready to attend, and where they stand."""

    q: Float[Tensor, "batch heads queries head_dim"]
    k: Float[Tensor, "batch kv_heads keys head_dim"]
    v: Float[Tensor, "batch value_heads keys value_dim"]
    query_positions: Int[Tensor, "#batch queries"]
    key_positions: Int[Tensor, "#batch keys"]
    mask_positions: dict[str, Any]
    """`query_positions` and `key_positions` of `attend`, for masks; empty where they follow from the layout."""
    joined: Joined | None
    """What the cache is to keep once attention has succeeded."""

    @property
    def grid(self) -> Grid:
        """The grid of the scores."""
        batch, heads, queries, _ = self.q.shape
        return Grid(batch, heads, queries, self.k.shape[2], self.q.device)


def place(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads new key_dim"],
    v: Float[Tensor, "batch value_heads new value_dim"] | None,
    *,
    rotary: Rotary | None = None,
    positions: Int[Tensor, "#batch queries"] | None = None,
    cache: Cache | None = None,
    lengths: Any = None,
    offsets: packed.Offsets | None = None,
) -> Placed:
    """Rotate by position and join with the cache.

    Args:
        q: queries.
        k: keys of this call.
        v: values of this call; None where they are read from the keys, as those of latent attention, so that the
            cache keeps keys alone. The values placed are then the keys as they were kept.
        rotary: how positions rotate queries and keys.
        positions: where the tokens stand, if not in order; they decide the angles, not the masks.
        cache: what was there before.
        lengths: the tokens that are real, of a batch that shares a static cache.
        offsets: of packed sequences, among the queries and among the keys.
    """
    queries, keys, device = q.shape[2], k.shape[2], q.device
    in_order: Int[Tensor, "#batch queries"] | None = None
    if cache is not None:
        of_queries = of_keys = in_order = cache.positions(q.shape[0], queries, lengths, device)
    elif offsets is not None:
        of_queries, of_keys = packed.positions(*offsets, device)
    else:
        of_keys = torch.arange(keys, device=device)[None]
        of_queries = torch.arange(queries, device=device)[None] + (keys - queries)
    if positions is not None:
        of_queries = of_keys = positions

    if rotary is not None and not rotary.grows:
        q, k = rotary.rotate(q, of_queries), rotary.rotate(k, of_keys)
    kept: Kept = (k,) if v is None else (k, v)
    joined: Joined | None = None
    mask_positions: dict[str, Any] = {}
    if cache is not None and in_order is not None:
        joined = cache.joined(kept, in_order)
        kept = joined.tensors
        if joined.key_positions is None:
            of_keys = torch.arange(kept[0].shape[2], device=device)[None]
        else:
            of_keys = joined.key_positions
            mask_positions = {"query_positions": in_order, "key_positions": of_keys}
    k, v = kept[0], kept[-1]
    if rotary is not None and rotary.grows:
        # These angles change with the length, also those of keys that were cached; so keys are cached unrotated.
        texts = list(zip(*map(packed.slices, offsets), strict=True)) if offsets else [(slice(None), slice(None))]
        rotated = [_rotated_at_length(rotary, q, k, of_queries, of_keys, text) for text in texts]
        q, k = (torch.cat(each, dim=2) for each in zip(*rotated, strict=True))
    return Placed(q, k, v, of_queries, of_keys, mask_positions, joined)


def _rotated_at_length(
    rotary: Rotary,
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys key_dim"],
    of_queries: Int[Tensor, "#batch queries"],
    of_keys: Int[Tensor, "#batch keys"],
    text: tuple[slice, slice],
) -> tuple[Float[Tensor, "batch heads some_queries head_dim"], Float[Tensor, "batch kv_heads some_keys key_dim"]]:
    """The queries and keys of one text, rotated by angles that its length decides."""
    at_q, at_k = of_queries[:, text[0]], of_keys[:, text[1]]
    length = torch.cat([at_q.flatten(), at_k.flatten(), at_q.new_zeros(1)]).max() + 1
    return (
        rotary.rotate(q[:, :, text[0]], at_q, length=length),
        rotary.rotate(k[:, :, text[1]], at_k, length=length),
    )
