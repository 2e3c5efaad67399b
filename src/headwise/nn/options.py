"""Options of the attention layers: `Scores`, `QKNorm` and the kinds of output gate."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from headwise.checks import finite_number, flag
from headwise.errors import InputError


@dataclass(frozen=True)
class Scores:
    """Options of a layer for its attention scores: scale, softcap, attention sinks, temperature and talking heads. They
    change the scores before the softmax or the softmax itself; talking heads also mix the attention weights of the
    heads.

    Example:
        >>> layer = MultiHeadAttention(512, num_heads=8, scores=Scores(softcap=30.0, sinks=True), backend="blockwise")

    Args:
        scale: factor of the scores. Default `head_dim ** -0.5`.
        softcap: c bounds the scaled scores to (-c, c), as c tanh(score / c) (Gemma Team 2024, section 2).
        sinks: True for a learned logit per head that takes part in the softmax and has no value, an attention sink
            (gpt-oss). It is 0 initially.
        temperature: True for a learned number per head that divides its scores. It is 1 initially.
        talking_heads: True for learned matrices that mix the scores of the heads before the softmax and their weights
            after it (Shazeer et al. 2020). They are the identity initially.

    Raises:
        InputError: a scale or softcap that is not finite, a softcap of 0 or less, other values than True and False
            for the rest.
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    temperature: bool = False
    talking_heads: bool = False

    def __post_init__(self) -> None:
        if self.scale is not None:
            finite_number("Scores(scale)", self.scale)
        if self.softcap is not None:
            finite_number("Scores(softcap)", self.softcap, above=0.0)
        for name in ("sinks", "temperature", "talking_heads"):
            flag(f"Scores({name})", getattr(self, name))

    def parameter_shapes(self, heads: int) -> dict[str, tuple[int, ...] | None]:
        """Return the shape of each learned parameter that these options switch on, by its name in the layer; None for a
        parameter that is switched off. `heads` is the number of score maps: one per head, or two per head in
        differential attention.
        """
        matrix = (heads, heads) if self.talking_heads else None
        return {
            "sinks": (heads,) if self.sinks else None,
            "temperature": (heads,) if self.temperature else None,
            "talking_before": matrix,
            "talking_after": matrix,
        }


@dataclass(frozen=True)
class QKNorm:
    """Option of a layer: normalisation of queries and keys before they are rotated by position (Henry et al. 2020;
    Dehghani et al. 2023).

    Example:
        >>> layer = MultiHeadAttention(512, num_heads=8, qk_norm=QKNorm("rms"))

    Args:
        kind: "rms" divides by the root mean square (Zhang and Sennrich 2019), "layer" also subtracts the mean.
        over: "head" normalises each head separately, with one weight for all heads (Qwen3). "heads" normalises all
            heads together, side by side (OLMo 2).
        eps: added under the root.

    Raises:
        InputError: another kind, another `over`, an eps of 0 or less.
    """

    kind: Literal["rms", "layer"] = "rms"
    over: Literal["head", "heads"] = "head"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.kind not in ("rms", "layer"):
            raise InputError("QKNorm(kind)", expected="'rms' or 'layer'", got=repr(self.kind))
        if self.over not in ("head", "heads"):
            raise InputError("QKNorm(over)", expected="'head' or 'heads'", got=repr(self.over))
        finite_number("QKNorm(eps)", self.eps, above=0.0)

    def module(self, heads: int, head_dim: int, **factory: Any) -> nn.RMSNorm | nn.LayerNorm:
        """Return a new norm module for the queries or keys of a layer. It normalises each head by itself, with width
        `head_dim`, or all heads together with `over="heads"`. `factory` has the device and dtype of the norm's weight.
        """
        width = head_dim if self.over == "head" else heads * head_dim
        norm = nn.RMSNorm if self.kind == "rms" else nn.LayerNorm
        return norm(width, eps=self.eps, **factory)


OutputGate = Literal["head", "element"]
"""Kind of output gate: one factor per head, or one per element of a head's output."""
