"""Masks drawn at random, with their values computed independently of headwise."""

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

import headwise as hw


@dataclass(frozen=True)
class Score:
    """Sizes of the scores of a problem, and the positions of its queries and keys.

    Attributes:
        sizes: `(batch, heads, queries, keys)`.
        query: position of each query, `(1 or batch, 1, queries, 1)`; -1 for padding.
        key: position of each key, `(1 or batch, 1, 1, keys)`; -1 for padding.
        is_default: True if the caller passes no positions.
    """

    sizes: tuple[int, int, int, int]
    query: Tensor
    key: Tensor
    is_default: bool


BY_POSITION = ("causal", "window", "prefix", "chunked", "mask_rule", "per head", "right", "dense")
BY_LENGTH = ("segments", "left", "prefixes")
COMBINED = ("and", "or", "not")
MOST_PARTS = 3
"""Depth to which masks are combined."""


def draw_mask(random: Random, score: Score, depth: int = MOST_PARTS) -> tuple[hw.Mask, Tensor]:
    """Return a mask and its values, a boolean tensor that broadcasts to the scores. Pairs with a query or key at
    position -1 are not hidden: `attend` does so in addition.
    """
    kinds = BY_POSITION + (BY_LENGTH if score.is_default and score.sizes[3] else ()) + (COMBINED * 2 if depth else ())
    kind = random.choice(kinds)
    if kind == "not":
        mask, allowed = draw_mask(random, score, depth - 1)
        return ~mask, ~allowed
    if kind in COMBINED:
        (left, first), (right, second) = (draw_mask(random, score, depth - 1) for _ in range(2))
        return (left & right, first & second) if kind == "and" else (left | right, first | second)
    if kind == "per head":
        rules = ("causal", "window", "prefix")
        parts = [_draw_simple(random, score, random.choice(rules)) for _ in range(score.sizes[1])]
        return hw.per_head([mask for mask, _ in parts]), torch.cat([allowed for _, allowed in parts], 1)
    return _draw_simple(random, score, kind)


def _draw_simple(random: Random, score: Score, kind: str) -> tuple[hw.Mask, Tensor]:  # noqa: PLR0911
    """Return a mask of a kind that is not made of others, and its values."""
    batch, heads, queries, keys = score.sizes
    query, key = score.query, score.key
    back = query - key
    if kind == "causal":
        return hw.causal(), back >= 0
    if kind == "window":
        width, ahead, step = (
            random.randint(1, keys + 2),
            random.choice((0, 0, 1, 3, 40)),
            random.choice((1, 1, 1, 2, 3)),
        )
        allowed = (back >= -ahead * step) & (back < width * step) & (back % step == 0)
        return hw.window(width, ahead=ahead, dilation=step), allowed
    if kind == "prefix":
        length = random.randint(0, keys + 1)
        return hw.prefix(length), (key < length).expand(-1, -1, queries, -1)
    if kind == "chunked":
        size = random.randint(1, keys + 2)
        return hw.chunked(size), query.div(size, rounding_mode="floor") == key.div(size, rounding_mode="floor")
    if kind == "mask_rule":
        modulus = random.randint(2, 5)
        sequence, head = torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None]
        allowed = (sequence + 2 * head + query * key) % modulus > 0
        return hw.mask_rule(lambda b, h, q, k: (b + 2 * h + q * k) % modulus > 0), allowed
    if kind == "dense":
        shape = (random.choice((1, batch)), random.choice((1, heads)), random.choice((1, queries)), keys)
        generator = torch.Generator().manual_seed(random.getrandbits(31))
        values = torch.rand(shape, generator=generator) < random.choice((0.02, 0.5, 0.98))
        return hw.dense(values), values
    if kind == "segments":
        rows = random.choice((1, max(batch, 1)))
        ids = torch.tensor([[random.randint(0, 3) for _ in range(keys)] for _ in range(rows)], dtype=torch.int64)
        ids = ids.sort(-1).values if random.random() < 0.7 else ids
        at_query = query[0, 0, :, 0]
        padded = torch.nn.functional.pad(ids, (0, 1))  # there may be no key
        of_query = torch.where(at_query >= 0, padded[:, at_query.clamp(min=0)], -1)
        return hw.segments(ids), of_query[:, None, :, None] == ids[:, None, None, :]
    lengths = torch.tensor([random.randint(0, keys) for _ in range(batch)], dtype=torch.long)
    column = lengths[:, None, None, None]
    if kind == "left":
        return hw.padding(lengths, side="left"), (key >= keys - column).expand(-1, -1, queries, -1)
    if kind == "prefixes":
        return hw.prefix(lengths), (key < column).expand(-1, -1, queries, -1)
    return hw.padding(lengths), (key < column).expand(-1, -1, queries, -1)


def draw_positions(random: Random, batch: int, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Return explicit positions `(1 or batch, queries)` and `(1 or batch, keys)`: increasing with gaps, as after tokens
    were dropped from a cache, or in any order, as in a ring buffer; some are -1.
    """
    generator = torch.Generator().manual_seed(random.getrandbits(31))
    rows = random.choice((1, max(batch, 1)))
    of_keys = torch.stack([torch.randperm(2 * keys + 1, generator=generator)[:keys] for _ in range(rows)])
    if random.random() < 0.6:
        of_keys = of_keys.sort(-1).values
    of_queries = torch.stack([torch.randperm(3 * (queries + keys), generator=generator)[:queries] for _ in range(rows)])
    of_queries = of_queries.sort(-1).values
    if random.random() < 0.5:
        of_keys = of_keys.masked_fill(torch.rand(of_keys.shape, generator=generator) < 0.2, -1)
        of_queries = of_queries.masked_fill(torch.rand(of_queries.shape, generator=generator) < 0.1, -1)
    return of_queries, of_keys
