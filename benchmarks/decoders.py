"""Attention layers with a cache, which decode one token at a time: headwise, Llama's attention, and hand-written
blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from benchmarks.contestants import linear_parameters, load, our_layer, our_parameters
from benchmarks.library_peers import llama_layer, llama_parameters
from benchmarks.regime import Data, Regime
from benchmarks.torch_peers import cos_and_sin, rotated


@dataclass(frozen=True)
class Decoder:
    """An attention layer with a cache.

    Attributes:
        layer: the module.
        fresh: returns an empty cache.
        step: `step(layer, x, cache, position)` returns the output of the next tokens, the first of which has that
            position, and updates the cache. Its `layer` is the module, or the compiled module.
    """

    layer: nn.Module
    fresh: Callable[[], Any]
    step: Callable[[Any, Tensor, Any, int], Tensor]


def capacity(regime: Regime) -> int:
    """Return the capacity in tokens of the static caches: the length of the regime plus one, rounded up to a multiple
    of 256.
    """
    return -(-(regime.length + 1) // 256) * 256


def our_decoder(regime: Regime, data: Data, *, static: bool) -> Decoder:
    """Return headwise's layer with its static or its dynamic cache."""
    layer = our_layer(regime)
    load(our_parameters(layer), data)
    fresh = (lambda: layer.static_cache(regime.batch, capacity(regime))) if static else hw.DynamicCache
    return Decoder(layer, fresh, lambda layer, x, cache, _: layer(x, cache=cache))


def llama_decoder(regime: Regime, data: Data, *, static: bool) -> Decoder:
    """Return Llama's attention with the static or the dynamic cache of transformers."""
    from transformers import DynamicCache, StaticCache

    llama = llama_layer(regime)
    load(llama_parameters(llama), data)
    cos, sin = cos_and_sin(regime)
    masks = _masks(regime)

    def step(layer: Any, x: Tensor, cache: Any, position: int) -> Tensor:
        cos_sin = (cos[:, position : position + x.shape[1]], sin[:, position : position + x.shape[1]])
        mask = masks[:, :, position : position + 1] if static and x.shape[1] == 1 else None
        return layer(x, cos_sin, mask, past_key_values=cache)[0]

    def fresh() -> Any:
        return StaticCache(llama.config, max_cache_len=capacity(regime)) if static else DynamicCache()

    return Decoder(llama, fresh, step)


class AppendingBlock(nn.Module):
    """Hand-written attention block that appends new keys and values to the cached ones and calls SDPA."""

    def __init__(self, regime: Regime):
        super().__init__()
        self.widths, self.head_dim = regime.widths, regime.head_dim
        self.qkv = nn.Linear(regime.embed, sum(regime.widths), bias=False, dtype=regime.torch_dtype)
        self.out = nn.Linear(regime.embed, regime.embed, bias=False, dtype=regime.torch_dtype)

    def forward(
        self, x: Tensor, cache: dict[str, Tensor], cos: Tensor, sin: Tensor, positions: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Return the output of the new tokens, `(batch, new, embed)`, and add their keys and values to the cache.

        Args:
            x: the new tokens, `(batch, new, embed)`.
            cache: keys "k" and values "v" so far; is updated.
            cos: cosines of the rotary position embedding, `(1, new, head_dim)`.
            sin: its sines.
            positions: positions of the new tokens, `(new,)`.
            mask: True for keys that a query attends to, `(1, 1, new, keys)`; None for all keys up to the query's own.
        """
        batch, new, embed = x.shape
        q, k, v = (
            part.view(batch, new, -1, self.head_dim).transpose(1, 2) for part in self.qkv(x).split(self.widths, -1)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        k, v = self.stored(k, v, cache, positions)
        causal, grouped = mask is None and new > 1, k.shape[1] != q.shape[1]
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
        return self.out(heads.transpose(1, 2).reshape(batch, new, embed))

    def stored(self, k: Tensor, v: Tensor, cache: dict[str, Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens in the cache, and return those to attend to."""
        if cache:
            k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
        cache["k"], cache["v"] = k, v
        return k, v


class PreallocatedBlock(AppendingBlock):
    """The same block with memory for all keys and values, allocated once. It attends to all of it under a mask."""

    def stored(self, k: Tensor, v: Tensor, cache: dict[str, Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values of new tokens to their positions, and return all of them."""
        return cache["k"].index_copy_(2, positions, k), cache["v"].index_copy_(2, positions, v)


def block_decoder(regime: Regime, data: Data, *, static: bool) -> Decoder:
    """Return the hand-written block with preallocated keys and values, or the one that appends to them."""
    block = (PreallocatedBlock if static else AppendingBlock)(regime)
    load(linear_parameters([block.qkv], block.out), data)
    tables, positions, masks = cos_and_sin(regime), torch.arange(regime.length), _masks(regime)
    shape = (regime.batch, regime.kv_heads or regime.heads, capacity(regime), regime.head_dim)

    def step(layer: Any, x: Tensor, cache: dict[str, Tensor], position: int) -> Tensor:
        rows = slice(position, position + x.shape[1])
        cos, sin = (table[:, rows] for table in tables)
        return layer(x, cache, cos, sin, positions[rows], masks[:, :, rows] if static else None)

    def fresh() -> dict[str, Tensor]:
        return {name: torch.zeros(shape, dtype=regime.torch_dtype) for name in ("k", "v")} if static else {}

    return Decoder(block, fresh, step)


def _masks(regime: Regime) -> Tensor:
    """Return the causal mask over the capacity of the static caches, `(1, 1, length, capacity)`."""
    return (torch.arange(capacity(regime)) <= torch.arange(regime.length)[:, None])[None, None]
