"""Attention with padding, caches and other tokens, written by hand."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from research.plain_models.registry import Built, Case, called, plain_model, simple
from research.plain_models.zoo.hand_written_layouts_models import (
    DIM,
    HEADS,
    WIDTH,
    SelfAttention,
    heads_second,
    merge,
    softmax_of,
    split,
)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention with an additive mask."""
    return merge((split(q) @ split(k).mT / DIM**0.5 + mask).softmax(-1) @ split(v))


def filled(q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
    """Attention with a mask that is True at padding."""
    scores = split(q) @ split(k).mT / DIM**0.5
    return merge(scores.masked_fill(pad[:, None, None], -torch.inf).softmax(-1) @ split(v))


def _padded(name: str, mix: Callable[..., Tensor], unpadded: Tensor | None, **options: Tensor) -> None:
    """Register a model whose second sequence has two padding tokens, on the left or the right."""

    def build() -> Built:
        x = torch.randn(2, 7, WIDTH)
        tokens = slice(2, None) if "left" in name else slice(0, 5)
        empty = {key: torch.zeros_like(value) for key, value in options.items()}

        def alone(i: int, part: slice) -> Case:
            one = {
                key: value[i : i + 1, ..., part] if len(value) > 1 else value[..., part] for key, value in empty.items()
            }
            return called(x[i : i + 1, part], **one)

        case = Case("padding", called(x, **options).call, (alone(0, slice(None)).call, alone(1, tokens).call))
        return Built(SelfAttention(mix), (case,))

    del unpadded
    plain_model("hand-written", "padding", name=name)(build)


IS_RIGHT = torch.tensor([[False] * 7, [False] * 5 + [True] * 2])
IS_LEFT = IS_RIGHT.flip(1)
_padded("right, added -1e9", masked, None, mask=IS_RIGHT[:, None, None].float() * -1e9)
_padded("left, added -1e9", masked, None, mask=IS_LEFT[:, None, None].float() * -1e9)
_padded("right, added -10000", masked, None, mask=IS_RIGHT[:, None, None].float() * -1e4)
_padded("right, True at padding", filled, None, pad=IS_RIGHT)
_padded("left, True at padding", filled, None, pad=IS_LEFT)


class CachedBlock(SelfAttention):
    """Causal attention with a preallocated cache."""

    def __init__(self) -> None:
        super().__init__(heads_second)

    def forward(self, x: Tensor, cache: Tensor | None = None, start: int = 0) -> Tensor:  # type: ignore[override]
        """Return the attended input; write its keys and values into the cache from slot `start`."""
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        end = start + x.shape[1]
        if cache is not None:
            cache[0, :, :, start:end], cache[1, :, :, start:end] = k, v
            k, v = cache[0], cache[1]
        rows, slots = torch.arange(start, end)[:, None], torch.arange(k.shape[2])
        weights = (q @ k.mT).masked_fill(slots > rows, -torch.inf).softmax(-1)
        return self.o(merge(weights @ v))


@plain_model("hand-written", "caches", name="preallocated, decoding")
def preallocated() -> Built:
    """A prompt of five tokens, then two more, one at a time."""
    x = torch.randn(2, 7, WIDTH)

    def cached(model: nn.Module) -> Tensor:
        cache = torch.zeros(2, 2, HEADS, 11, DIM)
        model(x[:, :5], cache)
        model(x[:, 5:6], cache, 5)
        return model(x[:, 6:], cache, 6)

    return Built(
        CachedBlock(), (Case("decoding", cached, (lambda model: model(x),)), Case("no cache", lambda model: model(x)))
    )


@plain_model("hand-written", "caches", name="preallocated, prompt in parts")
def prompt_in_parts() -> Built:
    """A prompt of seven tokens in two parts, into a cache with more slots."""
    x = torch.randn(2, 7, WIDTH)

    def cached(model: nn.Module) -> Tensor:
        cache = torch.zeros(2, 2, HEADS, 11, DIM)
        model(x[:, :3], cache)
        return model(x[:, 3:], cache, 3)

    return Built(CachedBlock(), (Case("parts", cached, (lambda model: model(x),)),))


class CrossBlock(nn.Module):
    """Cross-attention whose second argument has a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, state: Tensor, notes: Tensor) -> Tensor:
        """Return `state` after attention to `notes`."""
        return self.o(heads_second(self.q(state), self.k(notes), self.v(notes)))


@plain_model("hand-written", "kinds", name="cross-attention, other length")
def cross() -> Built:
    """Queries and keys of different lengths."""
    return Built(CrossBlock(), (called(torch.randn(2, 7, WIDTH), torch.randn(2, 5, WIDTH)),), cross=("",))


@plain_model("hand-written", "kinds", name="cross-attention, equal length")
def cross_equal() -> Built:
    """Queries and keys of the same length."""
    return Built(CrossBlock(), (called(torch.randn(2, 7, WIDTH), torch.randn(2, 7, WIDTH)),), cross=("",))


@plain_model("hand-written", "kinds", name="joint attention")
def joint() -> Built:
    """Two streams attend to both."""

    class Joint(CrossBlock):
        def forward(self, state: Tensor, notes: Tensor) -> Tensor:
            both = torch.cat([state, notes], 1)
            return self.o(heads_second(self.q(both), self.k(both), self.v(both)))

    return simple(Joint(), torch.randn(2, 7, WIDTH), torch.randn(2, 5, WIDTH))


@plain_model("hand-written", "kinds", name="layers that are no modules")
def layers_without_modules() -> Built:
    """Two layers in one module."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
            self.o = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for qkv, o in zip(self.qkv, self.o, strict=True):
                x = x + o(heads_second(*qkv(x).chunk(3, -1)))
            return x

    return simple(Flat(), torch.randn(2, 7, WIDTH))


@plain_model("hand-written", "kinds", name="pooling by a learned query")
def pooling() -> Built:
    """One learned query attends to all tokens."""

    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Parameter(torch.randn(1, 1, WIDTH))
            self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.o(heads_second(self.q(self.query.expand(len(x), -1, -1)), self.k(x), self.v(x)))

    return Built(Pool(), (called(torch.randn(2, 7, WIDTH)),), cross=("",))


@plain_model("hand-written", "kinds", name="experts")
def experts() -> Built:
    """A softmax over experts next to attention."""

    class Experts(SelfAttention):
        def __init__(self) -> None:
            super().__init__(heads_second)
            self.route, self.experts = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(4, WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            x = super().forward(x)
            shares = self.route(x).softmax(-1)
            return torch.einsum("ble,bled->bld", shares, torch.einsum("bld,edf->blef", x, self.experts))

    return simple(Experts(), torch.randn(2, 7, WIDTH))


@plain_model("hand-written", "kinds", name="grouped queries")
def grouped() -> Built:
    """Six query heads that share two heads of keys, packed as rows of queries."""

    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.o = nn.Linear(30, 30), nn.Linear(30, 30)
            self.k, self.v = nn.Linear(30, 10), nn.Linear(30, 10)

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x).view(*x.shape[:2], 2, 3, 5).permute(0, 2, 3, 1, 4)
            k, v = (layer(x).view(*x.shape[:2], 2, 5).transpose(1, 2)[:, :, None] for layer in (self.k, self.v))
            return self.o((softmax_of(q, k) @ v).permute(0, 3, 1, 2, 4).flatten(2))

    return simple(Grouped(), torch.randn(2, 7, 30))
