"""Attention problems drawn at random: sizes, masks, options, memory layouts and values. The seed determines all."""

from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

import headwise as hw
from research.native_kernels.masks import Score, draw_mask, draw_positions
from tests.oracles import kept_by_dropout

MOST_WORK = 1_500_000
"""Largest number of multiplications in the scores and the output of a problem."""


class Sizes(NamedTuple):
    """Sizes of an attention problem."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int


class Draw(NamedTuple):
    """Number of a set of values, and of an order of the features of queries and keys, and of values. Results are the
    same in any order, but rounding errors are not.
    """

    values: int
    order: int = 0

    def order_of(self, width: int) -> Tensor:
        """Return the order of `width` features."""
        if not self.order:
            return torch.arange(width)
        return torch.randperm(width, generator=torch.Generator().manual_seed(self.order))


@dataclass(frozen=True)
class DrawnProblem:
    """One attention problem. Tensors of options are in float32; a bias that is not learned may be in bfloat16.

    Attributes:
        seed: number that the problem was drawn with.
        sizes: its sizes.
        layouts: memory layout of q, k and v.
        spread: factor of the queries.
        mask: mask for `attend`; None without.
        allowed: its values, `(batch, heads, queries, keys)`; None without.
        bias: bias for `attend`, each axis of full size or 1; None without.
        scale: factor of the scores, one number or one for each head; None for the default.
        softcap: limit of the scores; None without.
        sinks: sink logit of each head; None without.
        positions: positions of queries and keys; None for the default.
        has_lse_gradient: True if the loss has the log-sum-exp in it.
        learns_scale: True if the gradient of the scale is asked for.
        upstream_layout: memory layout of the gradient of the output.
        learns_bias: True if the gradient of the bias is asked for.
        dropout: probability with which a weight is dropped.
    """

    seed: int
    sizes: Sizes
    layouts: tuple[str, str, str]
    spread: float
    mask: hw.Mask | None
    allowed: Tensor | None
    bias: Tensor | None
    scale: float | Tensor | None
    softcap: float | None
    sinks: Tensor | None
    positions: tuple[Tensor, Tensor] | None
    has_lse_gradient: bool
    learns_scale: bool
    upstream_layout: str
    learns_bias: bool
    dropout: float

    @property
    def attend_options(self) -> dict:
        """Keyword arguments for `attend` that are not learned."""
        options = {"mask": self.mask, "bias": self.bias, "softcap": self.softcap}
        if self.positions is not None:
            options |= {"query_positions": self.positions[0], "key_positions": self.positions[1]}
        return options

    @property
    def oracle_options(self) -> dict:
        """Keyword arguments for `plain_attention` that are not learned, with mask and bias as full tensors."""
        allowed = None if self.allowed is None else self.allowed.expand(self.score_shape)
        bias = None if self.bias is None else self.bias.expand(self.score_shape)
        return {"allowed": allowed, "bias": bias, "softcap": self.softcap}

    @property
    def score_shape(self) -> tuple[int, int, int, int]:
        """Shape of the scores."""
        return self.sizes.batch, self.sizes.heads, self.sizes.queries, self.sizes.keys

    def factors_of_dropout(self, draw: Draw) -> Tensor | None:
        """Return the factors of the weights in the output, for the seed that the kernels draw from torch's generator
        after `start_dropout(draw)`; None without dropout.
        """
        if not self.dropout:
            return None
        self.start_dropout(draw)
        seed = int(torch.randint(2**62, (), dtype=torch.int64))
        return kept_by_dropout(self.dropout, seed, *self.score_shape).double() / (1 - self.dropout)

    def start_dropout(self, draw: Draw) -> None:
        """Seed torch's generator for the dropout of a set of values."""
        torch.manual_seed(self.seed * 1000 + draw.values)

    def tensors(self, dtype: torch.dtype, draw: Draw) -> list[Tensor]:
        """Return q, k, v and the gradients of the output and of the log-sum-exp. The first four are in `dtype` with
        the strides of their layouts, the last is in float32.
        """
        batch, heads, kv_heads, queries, keys, head_dim, value_dim = self.sizes
        shapes = [
            *((heads, queries, head_dim), (kv_heads, keys, head_dim)),
            *((kv_heads, keys, value_dim), (heads, queries, value_dim)),
        ]
        generator = torch.Generator().manual_seed(self.seed * 1000 + draw.values)
        orders = [draw.order_of(head_dim), draw.order_of(value_dim)]
        tensors: list[Tensor] = []
        for n, (shape, layout) in enumerate(zip(shapes, (*self.layouts, self.upstream_layout), strict=True)):
            tensor = torch.randn(batch, *shape, generator=generator)[..., orders[n // 2]]
            factor = self.spread if n == 0 else 1.0
            tensors.append(laid_out((factor * tensor).to(dtype), layout))
        return [*tensors, torch.randn(batch, heads, queries, generator=generator)]

    def __str__(self) -> str:
        options = [f"{self.sizes}", f"layouts {self.layouts}", f"spread {self.spread:.3g}"]
        named = {"mask": self.mask, "scale": self.scale, "softcap": self.softcap}
        options += [f"{name} {value!r}" for name, value in named.items() if value is not None]
        flags = {"bias": self.bias, "sinks": self.sinks, "positions": self.positions}
        options += [name for name, value in flags.items() if value is not None]
        options += [f"dropout {self.dropout}"] * (self.dropout > 0) + ["gradient of bias"] * self.learns_bias
        options += ["gradient of lse"] * self.has_lse_gradient + ["learned scale"] * self.learns_scale
        return f"seed {self.seed}: {', '.join(options)}".replace("\n", " ")


def laid_out(values: Tensor, layout: str) -> Tensor:
    """Return values `(batch, heads, length, width)` with the strides of a layout. Layouts that repeat an axis return
    the first value of the axis everywhere.
    """
    if layout in ("repeated batch", "repeated heads", "repeated length"):
        axis = ("repeated batch", "repeated heads", "repeated length").index(layout)
        return values.narrow(axis, 0, min(1, values.shape[axis])).contiguous().expand_as(values)
    if layout == "with gaps":  # every second row and an odd offset, as in a buffer with other tensors between
        room = values.new_zeros(*values.shape[:2], 2 * values.shape[2], values.shape[3] + 3)
        view = room[:, :, ::2, 1 : 1 + values.shape[3]]
        view.copy_(values)
        return view
    orders = {"heads first": (0, 1, 2, 3), "length first": (0, 2, 1, 3), "width first": (3, 0, 1, 2)}
    order = orders[layout]
    return values.permute(order).contiguous().permute([order.index(axis) for axis in range(4)])


LAYOUTS = ("heads first", "heads first", "length first", "length first", "width first", "with gaps")
REPEATED = ("repeated batch", "repeated heads", "repeated length")


def draw_sizes(random: Random) -> Sizes:
    """Return the sizes of a problem: small ones, several tiles of keys and blocks of rows, wide heads, steps of
    decoding, and sometimes an axis without elements.
    """
    batch, kv_heads, group = random.randint(1, 3), random.randint(1, 3), random.choice((1, 1, 2, 3, 5))
    kind = random.choices(("small", "tiles", "wide", "decoding"), (4, 3, 2, 2))[0]
    lengths = {"small": (23, 23), "tiles": (200, 330), "wide": (40, 60), "decoding": (4, 700)}[kind]
    queries, keys = random.randint(1, lengths[0]), random.randint(1, lengths[1])
    widest = {"small": 19, "tiles": 96, "wide": 300, "decoding": 128}[kind]
    head_dim, value_dim = (
        random.choice((random.randint(1, widest), random.choice((16, 32, 64, 80)))) for _ in range(2)
    )
    if random.random() < 0.3:
        value_dim = head_dim
    sizes = Sizes(batch, kv_heads * group, kv_heads, queries, keys, head_dim, value_dim)
    while work(sizes) > MOST_WORK:
        if sizes.batch > 1:
            sizes = sizes._replace(batch=1)
        elif sizes.kv_heads > 1:
            sizes = sizes._replace(heads=group, kv_heads=1)
        elif sizes.queries > 80:
            sizes = sizes._replace(queries=sizes.queries // 2)
        else:
            sizes = sizes._replace(keys=max(sizes.keys // 2, 1), heads=1)
    if random.random() < 0.01:
        sizes = sizes._replace(**{random.choice(("batch", "queries", "keys")): 0})
    return sizes


def work(sizes: Sizes) -> int:
    """Return the number of multiplications in the scores and the output."""
    return sizes.batch * sizes.heads * sizes.queries * sizes.keys * (sizes.head_dim + sizes.value_dim)


def draw_problem(seed: int) -> DrawnProblem:
    """Return the problem of a seed."""
    random = Random(seed)
    generator = torch.Generator().manual_seed(random.getrandbits(31))
    sizes = draw_sizes(random)
    batch, heads, _, queries, keys, head_dim, _ = sizes
    has_positions = keys > 0 and random.random() < 0.1
    positions = draw_positions(random, batch, queries, keys) if has_positions else None
    mask, allowed = draw_mask_of(random, sizes, positions)
    q_layout, k_layout, v_layout = (random.choice(LAYOUTS if random.random() < 0.9 else REPEATED) for _ in range(3))
    bias, has_least_numbers = None, False
    if random.random() < 0.3:
        bias = torch.randn([random.choice((1, size)) for size in (batch, heads, queries, keys)], generator=generator)
        if random.random() < 0.5:
            hidden = random.choice((-torch.inf, -torch.inf, torch.finfo(torch.float32).min))
            has_least_numbers = hidden > -torch.inf
            bias = bias.masked_fill(torch.rand(bias.shape, generator=generator) < random.choice((0.3, 0.9)), hidden)
    scale: float | Tensor | None = None
    learns_scale = False
    if random.random() < 0.5:
        scale = random.choice((1.0, random.uniform(0.05, 1.0), -0.3, 0.0))
        if random.random() < 0.5:
            scale, learns_scale = torch.randn(heads, generator=generator), random.random() < 0.3
    spread = random.choice((0.1, 1.0, 3.0))
    if random.random() < 0.06:  # scores of up to about 1e5
        largest = head_dim**-0.5 if scale is None else float(torch.as_tensor(scale).abs().max())
        spread = random.choice((1e3, 1e4, 1e5)) / (4 * max(largest, 1e-2) * head_dim**0.5)
    drawn = DrawnProblem(
        seed=seed,
        sizes=sizes,
        layouts=(q_layout, k_layout, v_layout),
        spread=spread,
        mask=mask,
        allowed=allowed,
        bias=bias,
        scale=scale,
        softcap=random.uniform(1.0, 30.0) if random.random() < 0.2 else None,
        sinks=2 * torch.randn(heads, generator=generator) if random.random() < 0.25 else None,
        positions=positions,
        # torch's gradient of a log-sum-exp near the least float does not divide by the number of keys.
        has_lse_gradient=random.random() < 0.5 and not has_least_numbers,
        learns_scale=learns_scale,
        upstream_layout=random.choice((*LAYOUTS, *REPEATED)),
        learns_bias=random.random() < 0.5 and bias is not None,
        dropout=random.choice((0.1, 0.5, 0.9)) if random.random() < 0.15 else 0.0,
    )
    if bias is None or has_least_numbers or drawn.learns_bias or seed % 4 != 1:
        return drawn
    return replace(drawn, bias=bias.bfloat16())


def draw_mask_of(
    random: Random, sizes: Sizes, positions: tuple[Tensor, Tensor] | None
) -> tuple[hw.Mask | None, Tensor | None]:
    """Return the mask of a problem with its values, and without pairs that positions hide; None twice for no mask."""
    batch, heads, _, queries, keys, _, _ = sizes
    if positions is None:
        query, key = torch.arange(queries)[None] + keys - queries, torch.arange(keys)[None]
    else:
        query, key = positions
    score = Score((batch, heads, queries, keys), query[:, None, :, None], key[:, None, None, :], positions is None)
    mask, allowed = None, None
    if random.random() < 0.75:
        mask, allowed = draw_mask(random, score)
    if positions is not None:
        has_position = (score.query >= 0) & (score.key >= 0)
        allowed = has_position if allowed is None else allowed & has_position
    return mask, allowed
