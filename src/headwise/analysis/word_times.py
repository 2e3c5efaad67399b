"""Times in a sound to which words attend: quantiles of attention on strips of time."""

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from headwise.checks import named_head
from headwise.errors import InputError
from headwise.page.contents import AllWeights
from headwise.shapes import Float

QUANTILES = {"lower_quartile": 0.25, "median": 0.5, "upper_quartile": 0.75}
"""Shares of the attention on the sound that lie before the times of a row, by the name of the column."""


def word_time_rows(view: Any, heads: Collection[Any] | None) -> list[dict[str, Any]]:
    """Return the rows of `View.word_times` of a `View`."""
    reading = [
        head
        for head in view.heads
        if view.texts[head.attention.keys].seconds is not None and view.texts[head.attention.queries].ids is not None
    ]
    if not reading:
        raise InputError("view", expected="one of words with attention on a sound", got="none")
    if heads is None:
        present = {(head.layer, head.head) for head in reading}
        wanted: list[Any] = [pair for pair in view.alignment_heads if pair in present]
    else:
        wanted = [named_head(head) for head in heads]
    chosen = [head for head in reading if not wanted or (head.layer, head.head) in wanted]
    missing = [each for each in wanted if each not in [(head.layer, head.head) for head in chosen]]
    if heads is not None and (missing or not wanted):
        got = ", ".join(f"{each[0]}.{each[1]}" if isinstance(each, tuple) else str(each) for each in missing)
        places = f"{reading[0].name} to {reading[-1].name}"
        raise InputError("heads", expected=f"heads with attention of words on the sound ({places})", got=got or "none")
    rows = []
    for head in chosen:
        queries, keys = view.texts[head.attention.queries], view.texts[head.attention.keys]
        if not isinstance(head.attention.weights, AllWeights):
            size = math.ceil(math.sqrt(len(queries.tokens) * len(keys.tokens)))
            remedy = f"pass keep_all={size} to view, which then keeps all weights in memory"
            got = f"{len(queries.tokens)} x {len(keys.tokens)} tokens"
            raise InputError("view", expected="a view whose weights were all kept", got=got, remedy=remedy)
        weights = head.attention.weights.weights.double()
        seconds = keys.seconds or 0.0
        strips = [index for index, patch in enumerate(keys.patches) if patch is not None]
        centres = torch.tensor([patch.left + patch.width / 2 for patch in keys.patches if patch is not None])
        order = centres.argsort(stable=True)
        times = seconds * centres[order].double()
        first = queries.first_generated or 0
        is_patch = [patch is not None for patch in queries.patches] or [False] * len(queries.tokens)
        for index, word in enumerate(queries.words):
            tokens = (queries.word_of == index).nonzero()[:, 0].tolist()
            if word.special or any(token < max(first, 1) or is_patch[token] for token in tokens):
                continue
            on_tokens = weights[[token - 1 for token in tokens]].mean(0)
            on_strips = on_tokens[strips][order]
            total = float(on_strips.sum())
            shares = {name: _quantile(times, on_strips, share) for name, share in QUANTILES.items()}
            elsewhere = float(on_tokens.sum()) - total
            rows.append({"word": word.text, "index": index, **head.identifiers, **shares, "elsewhere": elsewhere})
    rows.sort(key=lambda row: row["index"])
    return rows


def _quantile(times: Float[Tensor, " strips"], weights: Float[Tensor, " strips"], share: float) -> float:
    """Return the first time up to which at least a share of the weights lies; NaN if all weights are 0."""
    sums = weights.cumsum(0)
    if not float(sums[-1]) > 0:
        return float("nan")
    reached = sums >= share * sums[-1] * (1 - 1e-12)
    return float(times[int(reached.nonzero()[0])])
