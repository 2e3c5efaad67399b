"""The statistics of heads from whole matrices of weights, as one computes them who has these. Causal, no padding.

Nothing here imports headwise. In float64 it is the definition that what is watched is compared with; in float32, what
everyone is timed with who asks for the matrices.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from benchmarks.oracle import WrongError

Found = dict[str, Tensor]
"""Every statistic by name, `(heads,)` or `(layers, heads)`."""

RELATIVE, ABSOLUTE = 1e-4, 1e-7
"""How far a statistic may be from the definition: of its size, and where it is next to nothing."""


@dataclass(frozen=True, eq=False)
class Text:
    """The tokens `(length,)`, and which of them are special. What depends on them alone is made once for all layers."""

    tokens: Tensor
    special: Tensor | None = None

    @cached_property
    def away(self) -> Tensor:
        """How many tokens lie between, `(length, length)`."""
        place = torch.arange(len(self.tokens), dtype=torch.float32)
        return (place[:, None] - place).abs()

    @cached_property
    def copies(self) -> Tensor:
        """True where a key is an earlier copy of the query's token, `(length, length)`."""
        return (self.tokens[:, None] == self.tokens).tril(-1)

    @cached_property
    def after_copies(self) -> Tensor:
        """True where a key comes next after such a copy."""
        return torch.cat([torch.zeros_like(self.copies[:, :1]), self.copies[:, :-1]], 1)

    @cached_property
    def has_copy(self) -> Tensor:
        """Rows whose token has an earlier copy, `(length,)`."""
        return self.copies.any(-1)


def statistics(weights: Tensor, out: Tensor, text: Text, written: Tensor | None = None) -> Found:
    """Every statistic of a layer's heads.

    Args:
        weights: `(heads, length, length)`.
        out: of every head, `(heads, length, head_dim)`.
        text: which tokens they are.
        written: the slices of the output projection, `(heads, head_dim, embed)`.
    """
    length = weights.shape[-1]
    seen = torch.arange(1, length + 1, dtype=weights.dtype)
    entropy = torch.special.entr(weights).sum(-1)
    found = {
        "entropy": entropy,
        "evenness": entropy[:, 1:] / seen[1:].log(),
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
        found["special"] = weights[:, :, text.special].sum(-1)
    if written is not None:
        found["written_norm"] = (out @ written).norm(dim=-1)
    means = {name: rows.mean(-1) for name, rows in found.items()}
    # Of these keys each is seen by at least half of the rows.
    often = slice(length // 2 + 1)
    return means | {"received": (weights.sum(-2) / seen.flip(0))[:, often].amax(-1)}


def of_layers(found: list[Found]) -> Found:
    """The layers of a model, one after the other."""
    return {name: torch.stack([each[name] for each in found]) for name in found[0]}


def check(found: Found, exact: Found) -> None:
    """`WrongError` unless every statistic of every head is that of the definition."""
    if found.keys() != exact.keys():
        raise WrongError(f"measured {sorted(found)} where {sorted(exact)} is wanted")
    for name, right in exact.items():
        off = (found[name].double() - right).abs()
        alike = (off <= RELATIVE * right.abs() + ABSOLUTE) | (found[name].isnan() & right.isnan())
        if not alike.all():
            worst = (off / right.abs()).nan_to_num(torch.inf).max()
            raise WrongError(f"{name} is off by {float(worst):.1e} of its size in {int((~alike).sum())} heads")
