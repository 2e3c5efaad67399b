"""Attention as people write it by hand: every layout of heads, and what has gone wrong in measurements before."""

from collections.abc import Callable
from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from research.plain_models.registry import Built, called, plain_model

HEADS, DIM = 3, 5
WIDTH = HEADS * DIM


class Block(nn.Module):
    """Self-attention with projections, whose middle is a function of q, k and v, all `(batch, length, width)`.

    The class is called neither attention nor by a number of heads.
    """

    def __init__(self, mix: Callable[..., Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mix = mix

    def forward(self, x: Tensor, **options: Tensor) -> Tensor:
        """Return the attended input."""
        return self.o(self.mix(self.q(x), self.k(x), self.v(x), **options))


class SelfAttention(Block):
    """The same, with a name and a number of heads that show what it is."""

    def __init__(self, mix: Callable[..., Tensor]) -> None:
        super().__init__(mix)
        self.num_heads = HEADS


def split(x: Tensor) -> Tensor:
    """Return `(batch, heads, length, dim)`."""
    return x.unflatten(-1, (HEADS, DIM)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    """Return `(batch, length, width)`."""
    return x.transpose(1, 2).flatten(2)


def softmax_of(q: Tensor, k: Tensor) -> Tensor:
    """Return the weights of queries and keys, with any axes before."""
    return (q @ k.mT / DIM**0.5).softmax(-1)


def heads_second(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(b, h, q, k)."""
    q, k, v = split(q), split(k), split(v)
    return merge(softmax_of(q, k) @ v)


def batch_times_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(b*h, q, k)."""
    batch = len(q)
    q, k, v = (split(x).flatten(0, 1) for x in (q, k, v))
    return merge(torch.bmm(softmax_of(q, k), v).unflatten(0, (batch, HEADS)))


def heads_times_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(h*b, q, k)."""
    q, k, v = (torch.cat(x.split(DIM, -1)) for x in (q, k, v))
    return torch.cat((softmax_of(q, k) @ v).chunk(HEADS), -1)


def windows_after_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(b, h, windows, q, k)."""
    q, k, v = (split(x).unflatten(2, (-1, 4)) for x in (q, k, v))
    return merge((softmax_of(q, k) @ v).flatten(2, 3))


def batch_times_heads_windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(b*h, windows, q, k)."""
    batch = len(q)
    q, k, v = (split(x).flatten(0, 1).unflatten(1, (-1, 4)) for x in (q, k, v))
    return merge((softmax_of(q, k) @ v).flatten(1, 2).unflatten(0, (batch, HEADS)))


def batch_times_windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(b*windows, h, q, k)."""
    batch = len(q)
    q, k, v = (split(x.unflatten(1, (-1, 4)).flatten(0, 1)) for x in (q, k, v))
    return merge(softmax_of(q, k) @ v).unflatten(0, (batch, -1)).flatten(1, 2)


def queries_before_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(b, q, h, k)."""
    q, k, v = (x.unflatten(-1, (HEADS, DIM)) for x in (q, k, v))
    weights = torch.einsum("bqhd,bkhd->bqhk", q, k).div(DIM**0.5).softmax(-1)
    return torch.einsum("bqhk,bkhd->bqhd", weights, v).flatten(2)


def keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(b, k, q, h), with a softmax over the second axis."""
    q, k, v = (x.unflatten(-1, (HEADS, DIM)) for x in (q, k, v))
    weights = torch.einsum("bqhd,bkhd->bkqh", q, k).div(DIM**0.5).softmax(1)
    return torch.einsum("bkqh,bkhd->bqhd", weights, v).flatten(2)


def heads_first_unbatched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(h, q, k)."""
    q, k, v = (x.unflatten(-1, (HEADS, DIM)).transpose(0, 1) for x in (q, k, v))
    return (softmax_of(q, k) @ v).transpose(0, 1).flatten(1)


def one_head_at_a_time(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A loop over heads with (b, q, k) each."""
    parts = zip(*(x.split(DIM, -1) for x in (q, k, v)), strict=True)
    return torch.cat([softmax_of(*part[:2]) @ part[2] for part in parts], -1)


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The fused function, causal."""
    return merge(F.scaled_dot_product_attention(split(q), split(k), split(v), is_causal=True))


def fused_of_three_axes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The fused function with (b*h, length, dim)."""
    batch = len(q)
    q, k, v = (split(x).flatten(0, 1) for x in (q, k, v))
    return merge(F.scaled_dot_product_attention(q, k, v).unflatten(0, (batch, HEADS)))


def fused_of_windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The fused function with (b, h, windows, length, dim)."""
    q, k, v = (split(x).unflatten(2, (-1, 4)) for x in (q, k, v))
    return merge(F.scaled_dot_product_attention(q, k, v).flatten(2, 3))


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention: softmaxes over features and over the sequence, and no weights of keys."""
    q, k, v = split(q).softmax(-1), split(k).softmax(-2), split(v)
    return merge(q @ (k.mT @ v))


def channels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax over channels: weights (b, h, d, d)."""
    q, k, v = (split(x).mT for x in (q, k, v))
    return merge((softmax_of(q, k) @ v).mT)


def weights_used_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights that average the values and their squares."""
    q, k, v = split(q), split(k), split(v)
    weights = softmax_of(q, k)
    return merge(weights @ v) + merge(weights @ (v * v))


def null_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One key of zeros before the tokens."""
    q, k, v = split(q), F.pad(split(k), (0, 0, 1, 0)), F.pad(split(v), (0, 0, 1, 0))
    return merge(softmax_of(q, k) @ v)


def appended_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One key of zeros after the tokens."""
    q, k, v = split(q), F.pad(split(k), (0, 0, 0, 1)), F.pad(split(v), (0, 0, 0, 1))
    return merge(softmax_of(q, k) @ v)


def wrong_merge(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads merged without moving their axis: columns of the projection do not belong to heads."""
    q, k, v = split(q), split(k), split(v)
    return (softmax_of(q, k) @ v).reshape(len(q), -1, WIDTH)


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two documents in each sequence."""
    q, k, v = split(q), split(k), split(v)
    document = torch.arange(q.shape[2]) >= 5
    scores = (q @ k.mT).masked_fill(document[:, None] != document, -1e9)
    return merge(scores.softmax(-1) @ v)


def by_matrices(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same as the two functions below, by torch's softmax and a product of matrices."""
    q, k, v = split(q), split(k), split(v)
    return merge(softmax_of(q, k) @ v)


def manual_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Exponentials divided by their sum."""
    q, k, v = split(q), split(k), split(v)
    weights = (q @ k.mT / DIM**0.5).exp()
    return merge(weights / weights.sum(-1, keepdim=True) @ v)


def product_and_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights times values, summed without a product of matrices."""
    q, k, v = split(q), split(k), split(v)
    return merge((softmax_of(q, k)[..., None] * v[:, :, None]).sum(-2))


LAYOUTS = (
    *(heads_second, batch_times_heads, heads_times_batch, windows_after_heads, batch_times_heads_windows),
    *(batch_times_windows, queries_before_heads, keys_first, heads_first_unbatched, one_head_at_a_time, fused),
    *(fused_of_three_axes, fused_of_windows, linear, channels, weights_used_twice, null_key, appended_key),
    *(wrong_merge, packed, manual_softmax, product_and_sum),
)


def _layout(mix: Callable[..., Tensor], kind: type[Block]) -> None:
    """Register two layers of `kind` with this function."""

    def build() -> Built:
        shape = (7, WIDTH) if mix is heads_first_unbatched else (2, 8, WIDTH)
        not_attention = ("",) if mix is linear else ()
        model = nn.Sequential(kind(mix), nn.LayerNorm(WIDTH), kind(mix))
        same = None
        if mix in (manual_softmax, product_and_sum):
            same = nn.Sequential(*map(copy, model))
            same[0].mix = same[2].mix = by_matrices
        return Built(model, (called(torch.randn(*shape)),), not_attention=not_attention, same=same)

    plain_model("hand-written", "layouts", name=f"{mix.__name__}, {kind.__name__}")(build)


for function in LAYOUTS:
    _layout(function, Block)
    _layout(function, SelfAttention)
