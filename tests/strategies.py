"""Hypothesis strategies that draw random attention problems: sizes, masks, biases, options and memory layouts."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

import headwise as hw


@dataclass
class DrawnProblem:
    """Arguments of one attention problem in float64, and its mask and bias as full tensors for `plain_attention`.

    Attributes:
        q: queries, `(batch, heads, queries, head_dim)`.
        k: keys, `(batch, kv_heads, keys, head_dim)`.
        v: values, `(batch, kv_heads, keys, value_dim)`.
        mask: mask for `attend`.
        bias: bias for `attend`, each axis of full size or 1.
        scale: factor of the scores, one number or one for each head.
        softcap: limit of the scores.
        sinks: score of the sink of each head.
        talking: two matrices that mix the scores and the weights of heads.
        allowed: the mask as a boolean tensor, `(batch, heads, queries, keys)`.
        full_bias: the bias as a tensor of the same shape.
    """

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
    full_bias: Tensor | None

    @property
    def attend_options(self) -> dict:
        """Keyword arguments for `attend`: mask, bias, talking heads, scale, softcap and sinks."""
        return {"mask": self.mask, "bias": self.bias, "talking_heads": self.talking, **self.scores}

    @property
    def oracle_options(self) -> dict:
        """Keyword arguments for `plain_attention`, with the mask and the bias as full tensors."""
        return {"allowed": self.allowed, "bias": self.full_bias, "talking": self.talking, **self.scores}

    def rows_with_keys(self) -> Tensor:
        """Return True for each query that sees at least one key, `(batch, heads, queries)`."""
        hidden = ~self.allowed if self.full_bias is None else ~self.allowed | (self.full_bias == -torch.inf)
        return ~hidden.all(-1)

    @property
    def scores(self) -> dict:
        """Options of the scores that `attend` and `plain_attention` name alike: scale, softcap and sinks."""
        return {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks}

    def tensors(self, dtype: torch.dtype, shuffle: int = 0) -> tuple[Tensor, ...]:
        """Return q, k and v rounded to `dtype`, with the strides that were drawn.

        With `shuffle` above 0, the values of each tensor are permuted at random; `shuffle` is the seed.
        """
        generator = torch.Generator().manual_seed(shuffle)
        tensors = []
        for tensor in (self.q, self.k, self.v):
            values = tensor.flatten()
            if shuffle:
                values = values[torch.randperm(len(values), generator=generator)]
            laid_out = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
            tensors.append(laid_out.copy_(values.view(tensor.shape)))
        return tuple(tensors)


def _laid_out(values: Tensor, layout: str) -> Tensor:
    """Return the values `(batch, heads, length, width)` with the strides of a layout, such as "length first".

    "length first" is the layout of a projection that is split into heads, `(batch, length, heads, width)` in memory.
    """
    order = {"heads first": (0, 1, 2, 3), "length first": (0, 2, 1, 3), "width first": (3, 0, 1, 2)}[layout]
    inverse = [order.index(axis) for axis in range(4)]
    return values.permute(order).contiguous().permute(inverse)


SIMPLE_MASKS = (
    *("causal", "window", "per head", "prefix", "segments"),
    *("chunked", "mask_rule", "right", "left", "dense"),
)
MASKS = (*SIMPLE_MASKS, "and", "or", "not")
"""Kinds of masks; "right" and "left" are the sides of padding."""


@st.composite
def masks(draw, batch: int, heads: int, queries: int, keys: int, depth: int = 2, kinds: tuple[str, ...] = MASKS):
    """Draw a mask of headwise, and return it with its values as a boolean tensor `(batch, heads, queries, keys)`.

    The tensor is computed here, independently of headwise. Masks are combined with &, | and ~ up to `depth` times. The
    outermost mask is one of `kinds`.
    """
    position = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)[None, :]
    kind = draw(st.sampled_from([kind for kind in kinds if depth or kind in SIMPLE_MASKS]))
    full = (batch, heads, queries, keys)
    if kind == "causal":
        return hw.causal(), (key <= position).expand(full)
    if kind == "window":
        width, ahead, step = draw(st.integers(1, keys + 2)), draw(st.integers(0, 3)), draw(st.integers(1, 3))
        distance = position - key
        near = (distance >= -ahead * step) & (distance < width * step) & (distance % step == 0)
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
        query_ids = torch.where(position[:, 0] >= 0, ids[:, position[:, 0].clamp(min=0)], -1)
        return hw.segments(ids), (query_ids[:, None, :, None] == ids[:, None, None, :]).expand(full)
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
        is_token = key < column if kind == "right" else key >= keys - column
        return hw.padding(lengths, side=kind), is_token.expand(full)
    if kind == "dense":
        shape = draw(st.sampled_from([(1, 1), (batch, 1), (1, heads), (batch, heads)]))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        values = torch.rand(*shape, queries, keys, generator=generator) > draw(st.sampled_from([0.1, 0.5, 0.9]))
        return hw.dense(values), values.expand(full)
    mask, allowed = draw(masks(batch, heads, queries, keys, depth - 1))
    if kind == "not":
        return ~mask, ~allowed
    other, other_allowed = draw(masks(batch, heads, queries, keys, depth - 1))
    return (mask & other, allowed & other_allowed) if kind == "and" else (mask | other, allowed | other_allowed)


@st.composite
def biases(draw, batch: int, heads: int, queries: int, keys: int):
    """Draw a float32 bias for the scores, each axis of full size or 1; sometimes a part of its entries is -inf."""
    shape = [draw(st.sampled_from([1, size])) for size in (batch, heads, queries, keys)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    bias = torch.randn(shape, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):
        bias = bias.masked_fill(torch.rand(shape, generator=generator) < 0.3, -torch.inf)
    return bias.float()


@st.composite
def problems(draw, mask_kind: str | None = "any") -> DrawnProblem:
    """Draw an attention problem: sizes, tensors with memory layouts, mask, bias, scale, softcap, sinks, head mixing.

    The mask is of the given kind of `MASKS`, or the same rule as a boolean tensor; None stands for no mask. By
    default half the problems have a mask, of any kind.
    """
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
    no_mask = (None, torch.ones(full, dtype=torch.bool))
    if mask_kind == "any":
        mask, allowed = draw(st.none() | masks(*full)) or no_mask
    else:
        mask, allowed = draw(masks(*full, kinds=(mask_kind,))) if mask_kind else no_mask
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
    full_bias = None if bias is None else bias.double().expand(full)
    return DrawnProblem(q, k, v, mask, bias, scale, softcap, sinks, talking, allowed, full_bias)
