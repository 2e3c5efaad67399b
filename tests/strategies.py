"""Random attention problems for hypothesis: sizes, masks, biases, layouts."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

import headwise as hw


@dataclass
class Drawn:
    """Arguments for `attend` in float64, and the same mask and bias as whole tensors for an oracle."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: hw.Mask | Tensor | None
    bias: Tensor | None
    scale: float | Tensor | None
    softcap: float | None
    sinks: Tensor | None
    talking: tuple[Tensor, Tensor] | None
    allowed: Tensor
    whole_bias: Tensor | None

    @property
    def options(self) -> dict:
        """The options of `attend`."""
        return {"mask": self.mask, "bias": self.bias, "talking_heads": self.talking, **self.scores}

    @property
    def rule(self) -> dict:
        """The options of the oracle."""
        return {"allowed": self.allowed, "bias": self.whole_bias, "talking": self.talking, **self.scores}

    def has_key(self) -> Tensor:
        """Whether each row of the scores has a key, `(batch, heads, queries)`."""
        hidden = ~self.allowed if self.whole_bias is None else ~self.allowed | (self.whole_bias == -torch.inf)
        return ~hidden.all(-1)

    @property
    def scores(self) -> dict:
        """What is done to the scores, said in the same way to both."""
        return {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks}

    def tensors(self, dtype: torch.dtype, shuffle: int = 0) -> tuple[Tensor, ...]:
        """q, k and v rounded to `dtype`, in the layout that was drawn; their values in another order if asked."""
        generator = torch.Generator().manual_seed(shuffle)
        drawn = []
        for tensor in (self.q, self.k, self.v):
            values = tensor.flatten()
            if shuffle:
                values = values[torch.randperm(len(values), generator=generator)]
            laid_out = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
            drawn.append(laid_out.copy_(values.view(tensor.shape)))
        return tuple(drawn)


def _laid_out(values: Tensor, layout: str) -> Tensor:
    """The values as a projection leaves them, `(batch, length, heads, width)`, or stranger."""
    order = {"heads first": (0, 1, 2, 3), "length first": (0, 2, 1, 3), "width first": (3, 0, 1, 2)}[layout]
    back = [order.index(axis) for axis in range(4)]
    return values.permute(order).contiguous().permute(back)


@st.composite
def masks(draw, batch: int, heads: int, queries: int, keys: int, depth: int = 2):
    """A mask together with its values as one tensor, worked out here and not by headwise."""
    position = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)[None, :]
    kinds = ["causal", "window", "per head", "prefix", "segments", "chunked", "mask_rule", "right", "left", "dense"]
    kinds += ["and", "or", "not"] if depth else []
    kind = draw(st.sampled_from(kinds))
    full = (batch, heads, queries, keys)
    if kind == "causal":
        return hw.causal(), (key <= position).expand(full)
    if kind == "window":
        width, ahead, step = draw(st.integers(1, keys + 2)), draw(st.integers(0, 3)), draw(st.integers(1, 3))
        back = position - key
        near = (back >= -ahead * step) & (back < width * step) & (back % step == 0)
        return hw.window(width, ahead=ahead, dilation=step), near.expand(full)
    if kind == "per head":
        widths = draw(st.lists(st.none() | st.integers(1, keys + 2), min_size=heads, max_size=heads))
        near = [(key <= position) & (position - key < (width or keys + queries)) for width in widths]
        return hw.window(widths), torch.stack(near).expand(full)
    if kind == "prefix":
        lengths = draw(st.lists(st.integers(0, keys), min_size=batch, max_size=batch))
        if draw(st.booleans()):
            return hw.prefix(lengths[0]), (key < lengths[0]).expand(full)
        return hw.prefix(lengths), (key < torch.tensor(lengths)[:, None, None, None]).expand(full)
    if kind == "segments":
        count = draw(st.sampled_from([1, batch]))
        rows = st.lists(st.integers(0, 3), min_size=keys, max_size=keys)
        ids = torch.tensor([draw(rows) for _ in range(count)])
        if draw(st.booleans()):
            ids = ids.sort(-1).values
        own = torch.where(position[:, 0] >= 0, ids[:, position[:, 0].clamp(min=0)], -1)
        return hw.segments(ids), (own[:, None, :, None] == ids[:, None, None, :]).expand(full)
    if kind == "chunked":
        size = draw(st.integers(1, keys + 2))
        return hw.chunked(size), (position.div(size, rounding_mode="floor") == key // size).expand(full)
    if kind == "mask_rule":
        index = [
            torch.arange(size).view([-1 if axis == at else 1 for at in range(4)]) for axis, size in enumerate(full)
        ]
        allowed = (index[0] + 2 * index[1] + (index[2] + keys - queries) * index[3]) % 3 > 0
        return hw.mask_rule(lambda b, h, q, k: (b + 2 * h + q * k) % 3 > 0), allowed.expand(full)
    if kind in ("right", "left"):
        lengths = torch.tensor(draw(st.lists(st.integers(0, keys), min_size=batch, max_size=batch)))
        column = lengths[:, None, None, None]
        there = key < column if kind == "right" else key >= keys - column
        return hw.padding(lengths, side=kind), there.expand(full)
    if kind == "dense":
        shape = draw(st.sampled_from([(1, 1), (batch, 1), (1, heads), (batch, heads)]))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        values = torch.rand(*shape, queries, keys, generator=generator) > draw(st.sampled_from([0.1, 0.5, 0.9]))
        return hw.dense(values), values.expand(full)
    mask, allowed = draw(masks(batch, heads, queries, keys, depth - 1))
    if kind == "not":
        return ~mask, ~allowed
    other, also = draw(masks(batch, heads, queries, keys, depth - 1))
    return (mask & other, allowed & also) if kind == "and" else (mask | other, allowed | also)


@st.composite
def biases(draw, batch: int, heads: int, queries: int, keys: int):
    """An additive bias whose axes are whole or 1, some entries -inf."""
    shape = [draw(st.sampled_from([1, size])) for size in (batch, heads, queries, keys)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    bias = torch.randn(shape, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):
        bias = bias.masked_fill(torch.rand(shape, generator=generator) < 0.3, -torch.inf)
    return bias.float()


@st.composite
def problems(draw) -> Drawn:
    """A whole problem."""
    batch, kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    queries, keys = draw(st.integers(1, 23)), draw(st.integers(1, 23))
    head_dim, value_dim = draw(st.integers(1, 19)), draw(st.integers(1, 19))
    heads = kv_heads * group
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([0.1, 1.0, 3.0]))

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    layouts = st.sampled_from(["heads first", "length first", "width first"])
    q = _laid_out(spread * random(batch, heads, queries, head_dim), draw(layouts))
    k = _laid_out(spread * random(batch, kv_heads, keys, head_dim), draw(layouts))
    v = _laid_out(random(batch, kv_heads, keys, value_dim), draw(layouts))
    full = (batch, heads, queries, keys)
    mask, allowed = draw(st.none() | masks(*full)) or (None, torch.ones(full, dtype=torch.bool))
    if mask is not None and draw(st.booleans()):
        mask = allowed.contiguous()  # the same rule as a boolean tensor
    bias = draw(st.none() | biases(*full))
    kind = draw(st.sampled_from(["default", "given", "per head"]))
    scale = {"default": None, "given": draw(st.floats(0.05, 1.0)), "per head": 0.1 + 0.5 * random(heads).abs()}[kind]
    softcap = draw(st.none() | st.floats(1.0, 30.0))
    sinks = 2 * random(heads) if draw(st.booleans()) else None
    talking = None
    if draw(st.sampled_from([False, False, False, True])):
        talking = (torch.eye(heads) + 0.3 * random(heads, heads), torch.eye(heads) + 0.3 * random(heads, heads))
    whole_bias = None if bias is None else bias.double().expand(full)
    return Drawn(q, k, v, mask, bias, scale, softcap, sinks, talking, allowed, whole_bias)
