"""The statistics of attention heads, computed from whole matrices of attention weights, without padding.

Nothing here imports headwise. In float64 these statistics are the definition that watched models are compared with. In
float32 they are part of the timing of every peer that returns matrices.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from benchmarks.oracle import WrongError

Statistics = dict[str, Tensor]
"""Every statistic by name, `(heads,)` or `(layers, heads)`."""

RELATIVE, ABSOLUTE = 1e-4, 1e-7
"""Accepted difference from the definition: relative to its absolute value, and absolute for values near 0."""

OF_SCORES = frozenset(("max_logit", "max_logit_uncapped"))
"""Statistics that do not follow from attention weights, and are not compared."""


@dataclass(frozen=True, eq=False)
class Text:
    """Token ids of one sequence, and masks that depend on them alone, which are computed once for all layers.

    Attributes:
        tokens: token ids, `(length,)`.
        special: True at special tokens, `(length,)`; None to leave out that statistic.
    """

    tokens: Tensor
    special: Tensor | None = None

    @cached_property
    def away(self) -> Tensor:
        """Distance in tokens between each query and each key, `(length, length)`."""
        positions = torch.arange(len(self.tokens), dtype=torch.float32)
        return (positions[:, None] - positions).abs()

    @cached_property
    def copies(self) -> Tensor:
        """True where a key is an earlier copy of the query's token, `(length, length)`."""
        return (self.tokens[:, None] == self.tokens).tril(-1)

    @cached_property
    def after_copies(self) -> Tensor:
        """True where a key directly follows an earlier copy of the query's token, `(length, length)`."""
        return torch.cat([torch.zeros_like(self.copies[:, :1]), self.copies[:, :-1]], 1)

    @cached_property
    def has_copy(self) -> Tensor:
        """True for queries whose token has an earlier copy, `(length,)`."""
        return self.copies.any(-1)


def statistics(
    weights: Tensor, out: Tensor, text: Text, written: Tensor | None = None, *, causal: bool = True
) -> Statistics:
    """Return every statistic of one layer, by name, each `(heads,)`: means over the query rows.

    Args:
        weights: `(heads, length, length)`.
        out: the output of every head, `(heads, length, head_dim)`.
        text: the tokens.
        written: the output projection by heads, `(heads, head_dim, embed)`; None to leave out the norm after it.
        causal: whether a query attends to the keys up to its own; if not, it attends to all keys.
    """
    length = weights.shape[-1]
    visible_keys = torch.arange(1, length + 1, dtype=weights.dtype) if causal else torch.full((length,), float(length))
    entropy = torch.special.entr(weights).sum(-1)
    by_row = {
        "entropy": entropy,
        "evenness": (entropy / visible_keys.log())[:, visible_keys > 1],
        "confidence": weights.amax(-1),
        "distance": (weights * text.away).sum(-1),
        "self": weights.diagonal(0, -2, -1),
        "previous": weights.diagonal(-1, -2, -1),
        "next": weights.diagonal(1, -2, -1),
        "first": weights[:, :, 0],
        "duplicate": (weights * text.copies).sum(-1)[:, text.has_copy],
        "induction": (weights * text.after_copies).sum(-1)[:, text.has_copy],
        "output_norm": out.norm(dim=-1),
    }
    if text.special is not None:
        by_row["special"] = weights[:, :, text.special].sum(-1)
        by_row["confidence_content"] = weights.masked_fill(text.special, 0.0).amax(-1)
    if written is not None:
        by_row["written_norm"] = (out @ written).norm(dim=-1)
    means = {name: rows.mean(-1) for name, rows in by_row.items()}
    # Each of these keys is visible to at least half of the rows.
    common_keys = slice(length // 2 + 1 if causal else length)
    return means | {"received": (weights.sum(-2) / visible_keys.flip(0))[:, common_keys].amax(-1)}


def of_layers(layers: list[Statistics]) -> Statistics:
    """Return the statistics of all layers, stacked to `(layers, heads)`."""
    return {name: torch.stack([layer[name] for layer in layers]) for name in layers[0]}


def check(measured: Statistics, exact: Statistics) -> None:
    """Raise `WrongError` unless every statistic of every head equals the definition within the accepted difference."""
    if measured.keys() - OF_SCORES != exact.keys():
        raise WrongError(f"measured {sorted(measured)} where {sorted(exact)} is wanted")
    for name, expected in exact.items():
        difference = (measured[name].double() - expected).abs()
        is_equal = (difference <= RELATIVE * expected.abs() + ABSOLUTE) | (measured[name].isnan() & expected.isnan())
        if not is_equal.all():
            worst = (difference / expected.abs()).nan_to_num(torch.inf).max()
            raise WrongError(f"{name} is off by {float(worst):.1e} of its size in {int((~is_equal).sum())} heads")
