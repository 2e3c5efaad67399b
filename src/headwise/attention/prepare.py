"""Where tokens stand: queries and keys rotated to their places, and what a cache kept put before them.

There are two sets of positions. Rotations and position biases go by those that a user may give. Masks go by the order
in which tokens came, which follows from the layout unless a cache has dropped keys or has room between them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.attention import packed
from headwise.attention.cache import Cache, CacheUpdate, Kept
from headwise.attention.masks.base import Grid
from headwise.attention.rotary import Rotary
from headwise.shapes import Float, Int


class AttentionInputs(NamedTuple):
    """Queries, keys and values, ready to attend, and where they stand."""

    q: Float[Tensor, "batch heads queries head_dim"]
    k: Float[Tensor, "batch kv_heads keys head_dim"]
    v: Float[Tensor, "batch value_heads keys value_dim"]
    query_positions: Int[Tensor, "#batch queries"]
    given_key_positions: Int[Tensor, "#batch keys"] | None
    """None where keys stand in order, the first at 0."""
    mask_positions: dict[str, Any]
    """`query_positions` and `key_positions` of `attend`, for masks; empty where they follow from the layout."""
    joined: CacheUpdate | None
    """What the cache is to keep once attention has succeeded."""

    @property
    def key_positions(self) -> Int[Tensor, "#batch keys"]:
        """Where the keys stand."""
        if self.given_key_positions is None:
            return torch.arange(self.k.shape[2], device=self.k.device)[None]
        return self.given_key_positions

    @property
    def grid(self) -> Grid:
        """The grid of the scores."""
        batch, heads, queries, _ = self.q.shape
        return Grid(batch, heads, queries, self.k.shape[2], self.q.device)


def prepare_qkv(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads new key_dim"],
    v: Float[Tensor, "batch value_heads new value_dim"] | None,
    *,
    rotary: Rotary | None = None,
    positions: Int[Tensor, "#batch queries"] | None = None,
    cache: Cache | None = None,
    lengths: Any = None,
    whole: bool = False,
    offsets: packed.Offsets | None = None,
) -> AttentionInputs:
    """Rotate by position and join with the cache.

    Args:
        q: queries.
        k: keys of this call.
        v: values of this call; None where they are read from the keys, as those of latent attention, so that the
            cache keeps keys alone. The values inputs are then the keys as they were kept.
        rotary: how positions rotate queries and keys.
        positions: where the tokens stand, if not in order; they decide the angles, not the masks.
        cache: what was there before.
        lengths: the tokens that are real, of a batch that shares a static cache.
        whole: whether the keys are to be all that the cache has room for, since tensors speak of them.
        offsets: of packed sequences, among the queries and among the keys.
    """
    queries, keys, device = q.shape[2], k.shape[2], q.device
    in_order: Int[Tensor, "#batch queries"] | None = None
    if cache is not None:
        of_queries = of_new = in_order = cache.positions(q.shape[0], queries, lengths, device)
    elif offsets is not None:
        of_queries, of_new = packed.positions(*offsets, device)
    else:
        of_queries = of_new = torch.arange(keys, device=device)[None]
        if torch.compiler.is_compiling() or queries != keys:  # while compiling, lengths may be symbols
            of_queries = torch.arange(queries, device=device)[None] + (keys - queries)
    if positions is not None:
        of_queries = of_new = positions

    if rotary is not None and not rotary.grows:
        angles = rotary.angles(q, of_queries)
        q = rotary.turned(q, angles)
        k = rotary.turned(k, angles if of_new is of_queries else rotary.angles(k, of_new))
    kept: Kept = (k,) if v is None else (k, v)
    joined: CacheUpdate | None = None
    of_keys: Int[Tensor, "#batch keys"] | None = of_new
    mask_positions: dict[str, Any] = {}
    if cache is not None and in_order is not None:
        joined = cache.joined(kept, in_order, whole=whole)
        kept, of_keys = joined.tensors, joined.key_positions
        if of_keys is not None:
            mask_positions = {"query_positions": in_order, "key_positions": of_keys}
    k, v = kept[0], kept[-1]
    inputs = AttentionInputs(q, k, v, of_queries, of_keys, mask_positions, joined)
    if rotary is not None and rotary.grows:
        # These angles change with the length, also those of keys that were cached; so keys are cached unrotated.
        texts = list(zip(*map(packed.slices, offsets), strict=True)) if offsets else [(slice(None), slice(None))]
        rotated = [_rotated_at_length(rotary, inputs, text) for text in texts]
        q, k = (torch.cat(each, dim=2) for each in zip(*rotated, strict=True))
        inputs = inputs._replace(q=q, k=k)
    return inputs


def _rotated_at_length(
    rotary: Rotary, inputs: AttentionInputs, text: tuple[slice, slice]
) -> tuple[Float[Tensor, "batch heads some_queries head_dim"], Float[Tensor, "batch kv_heads some_keys key_dim"]]:
    """The queries and keys of one text, rotated by angles that its length decides."""
    at_q, at_k = inputs.query_positions[:, text[0]], inputs.key_positions[:, text[1]]
    length = torch.cat([at_q.flatten(), at_k.flatten(), at_q.new_zeros(1)]).max() + 1
    return (
        rotary.rotate(inputs.q[:, :, text[0]], at_q, length=length),
        rotary.rotate(inputs.k[:, :, text[1]], at_k, length=length),
    )
