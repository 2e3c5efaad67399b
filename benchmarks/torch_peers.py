"""Peers that need only torch: its attention layer, and blocks as users write them by hand.

Each peer receives the same weights as headwise and its best options for the regime: a flag where it has one, otherwise
a precomputed boolean mask. Rotary tables are also precomputed, as a model does once for all its layers.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contestants import Contestant, LeftOutError, linear_parameters, of_torch
from benchmarks.regime import NARROW, WINDOW, Data, Regime

FLAGS = ("full", "causal")
"""Masks for which peers have a flag."""
LARGEST_MATRIX = 1e9
"""Largest size in bytes of one copy of the scores; above it, peers that store several copies are left out."""


def boolean_mask(regime: Regime) -> Tensor | None:
    """Return the mask of a regime, True where a query attends; None if peers have a flag for it."""
    return None if regime.mask in FLAGS else regime.allowed()


def require_room(regime: Regime) -> None:
    """Raise `LeftOutError` if the score matrix of a regime is too large for peers that store it."""
    if regime.matrix_bytes > LARGEST_MATRIX:
        raise LeftOutError(f"keeps the whole matrix, {regime.matrix_bytes / 1e9:.1f} GB a copy")


def cos_and_sin(regime: Regime, length: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the rotary tables of cosines and sines for every position, each `(1, length, head_dim)`, in the layout of
    Llama.
    """
    half = regime.head_dim // 2
    angles = torch.arange(length or regime.length)[:, None] * 10_000.0 ** -(torch.arange(half) / half)
    angles = torch.cat([angles, angles], -1)[None]
    return angles.cos().to(regime.torch_dtype), angles.sin().to(regime.torch_dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embeddings to x, `(batch, heads, length, head_dim)`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


class Block(nn.Module):
    """Hand-written self-attention: one projection to queries, keys and values, a given attention function, and an
    output projection.
    """

    def __init__(self, regime: Regime, attention: Callable[[Tensor, Tensor, Tensor], Tensor]):
        super().__init__()
        self.widths, self.head_dim, self.attention = regime.widths, regime.head_dim, attention
        self.qkv = nn.Linear(regime.embed, sum(regime.widths), bias=regime.bias, dtype=regime.torch_dtype)
        self.out = nn.Linear(regime.embed, regime.embed, bias=regime.bias, dtype=regime.torch_dtype)
        self.cos_sin = cos_and_sin(regime) if regime.rotary else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the output `(batch, length, embed)` for an input of the same shape."""
        batch, length, embed = x.shape
        q, k, v = (
            part.view(batch, length, -1, self.head_dim).transpose(1, 2) for part in self.qkv(x).split(self.widths, -1)
        )
        if self.cos_sin is not None:
            q, k = rotated(q, *self.cos_sin), rotated(k, *self.cos_sin)
        return self.out(self.attention(q, k, v).transpose(1, 2).reshape(batch, length, embed))


def _block(regime: Regime, data: Data, attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Contestant:
    """Return the contestant for the hand-written block with this attention function."""
    block = Block(regime, attention)
    return of_torch(block, [block], linear_parameters([block.qkv], block.out), regime, data)


def sdpa_block(regime: Regime, data: Data) -> Contestant:
    """Return the contestant for the hand-written block around `scaled_dot_product_attention`."""
    mask, causal, grouped = boolean_mask(regime), regime.mask == "causal", regime.kv_heads is not None

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)

    return _block(regime, data, attention)


def flex_attention(regime: Regime) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return compiled FlexAttention with the block mask of a regime, as a function of q, k and v. Raise `LeftOutError`
    if the regime trains.
    """
    if regime.training:
        raise LeftOutError("FlexAttention has no backward on CPU")
    from torch.nn.attention import flex_attention as flex

    torch.compiler.reset()  # above its limit of compilations it would silently run unfused
    length, half, lengths, block_mask = regime.length, regime.heads // 2, regime.lengths, None
    rules = {
        "causal": lambda b, h, i, j: j <= i,
        "window": lambda b, h, i, j: (j <= i) & (i - j < WINDOW),
        "heads": lambda b, h, i, j: (j <= i) & ((i - j < NARROW) | (h >= half)),
        "padding": lambda b, h, i, j: j < lengths[b],
    }
    if regime.mask in rules:
        batch = regime.batch if regime.mask == "padding" else None
        heads = regime.heads if regime.mask == "heads" else None
        block_mask = flex.create_block_mask(rules[regime.mask], batch, heads, length, length, device="cpu")
    compiled, grouped = torch.compile(flex.flex_attention, dynamic=False), regime.kv_heads is not None
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask, enable_gqa=grouped)


def flex_block(regime: Regime, data: Data) -> Contestant:
    """Return the contestant for the hand-written block around compiled FlexAttention with its block mask."""
    return _block(regime, data, flex_attention(regime))


def torch_layer(regime: Regime, data: Data, *, need_weights: bool = False) -> Contestant:
    """Return the contestant for `nn.MultiheadAttention`. Its masks are True where a query must not attend."""
    if regime.kv_heads is not None:
        raise LeftOutError("has no grouped heads")
    if need_weights:
        require_room(regime)
    layer = nn.MultiheadAttention(regime.embed, regime.heads, batch_first=True, dtype=regime.torch_dtype)
    options = {"need_weights": need_weights}
    if regime.mask == "padding":
        options["key_padding_mask"] = ~regime.real
    elif (allowed := regime.allowed()) is not None:
        hidden = ~allowed.expand(regime.batch, -1, -1, -1)
        differs_by_head = regime.mask == "heads"
        options["attn_mask"] = hidden.flatten(0, 1) if differs_by_head else hidden[0, 0]
        options["is_causal"] = regime.mask == "causal"
    parameters = {
        "qkv": [layer.in_proj_weight],
        "out_proj": [layer.out_proj.weight],
        "qkv_bias": [layer.in_proj_bias],
        "out_bias": [layer.out_proj.bias],
    }
    return of_torch(lambda x: layer(x, x, x, **options)[0], [layer], parameters, regime, data)


def torch_layer_with_weights(regime: Regime, data: Data) -> Contestant:
    """Return the contestant for `nn.MultiheadAttention` with its default options, which also returns the weights."""
    return torch_layer(regime, data, need_weights=True)
