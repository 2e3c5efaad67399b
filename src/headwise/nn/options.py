"""Options of the layer that belong together, each a small object that says what it is."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from headwise.checks import finite_number, flag
from headwise.errors import InputError


@dataclass(frozen=True)
class Scores:
    """What happens to the scores between the product of queries and keys and the softmax.

    Args:
        scale: multiplies them; default `head_dim ** -0.5`.
        softcap: c keeps them between -c and c, as c tanh(score / c) (Gemma Team 2024, section 2).
        sinks: a learned logit for each head that takes its share of the softmax and gives nothing (gpt-oss); 0 at
            first.
        temperature: a learned number for each head that its scores are divided by; 1 at first.
        talking_heads: learned matrices that mix the heads' scores before the softmax and their weights after it
            (Shazeer et al. 2020); the identity at first.

    Raises:
        InputError: a scale or softcap that is no finite number, a softcap of 0 or less, no True or False elsewhere.
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
        """The layer's parameters for this, by name, with their shapes; None for one that is not wanted."""
        matrix = (heads, heads) if self.talking_heads else None
        return {
            "sinks": (heads,) if self.sinks else None,
            "temperature": (heads,) if self.temperature else None,
            "talking_before": matrix,
            "talking_after": matrix,
        }


@dataclass(frozen=True)
class QKNorm:
    """Normalisation of queries and keys before the rotation (Henry et al. 2020; Dehghani et al. 2023).

    Args:
        kind: "rms" divides by the root mean square (Zhang and Sennrich 2019), "layer" also subtracts the mean.
        over: "head" normalises each head by itself, with one weight for all of them (Qwen3); "heads" all of them
            side by side (OLMo 2).
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
        """The normalisation of so many heads of this width."""
        width = head_dim if self.over == "head" else heads * head_dim
        norm = nn.RMSNorm if self.kind == "rms" else nn.LayerNorm
        return norm(width, eps=self.eps, **factory)


OutputGate = Literal["head", "element"]
"""Whether a gated output has one gate for each head, or one for each element of it."""
