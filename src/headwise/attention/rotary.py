"""Rotary positions: pairs of features turned by an angle that grows with the position.

The score of a turned query with a turned key depends on how far apart they stand, not on where (Su et al. 2021,
section 3.4). Nothing is kept between calls: angles belong to positions, so they are worked out once for all heads
and cost little, and a table that is never kept cannot be another layer's.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from headwise.attention.autocast import without_autocast
from headwise.checks import finite_number, flag, position_ids, whole_number
from headwise.errors import InputError
from headwise.shapes import Float, Int

Length = int | Int[Tensor, ""] | None
"""How many positions there are now; None where a scaling has no use for it."""

Angles = tuple[Float[Tensor, "#batch 1 length width"], Float[Tensor, "#batch 1 length width"]]
"""What each feature is multiplied by, and what the other one of its pair: cosine and sine, negative for the first.

Float32 at least.
"""


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding (Su et al. 2021, RoFormer, section 3.2.2).

    Pair i of a head's features, `width / 2` pairs in all, is turned by `position * theta^(-2i / width)` radians.

    Args:
        theta: the base of the frequencies.
        width: how many features of a head are turned, the first ones; None turns all. The rest is left as it is
            (partial rotary, as in GPT-NeoX and Phi).
        interleaved: features (0, 1), (2, 3), ... are pairs, as in the paper, GPT-J and DeepSeek; otherwise
            (0, width / 2), (1, width / 2 + 1), ... are, as in Llama.
        scaling: how the frequencies are changed for texts longer than those a model was trained on.

    Raises:
        InputError: a theta of 1 or less, a width that is odd or below 2, a scaling that is none.
    """

    theta: float = 10_000.0
    width: int | None = None
    interleaved: bool = False
    scaling: "Scaling | None" = None

    def __post_init__(self) -> None:
        finite_number("Rotary(theta)", self.theta, above=1.0)
        if self.width is not None and whole_number("Rotary(width)", self.width, least=2) % 2:
            raise InputError("Rotary(width)", expected="an even number, since pairs are turned", got=self.width)
        flag("Rotary(interleaved)", self.interleaved)
        if self.scaling is not None and (isinstance(self.scaling, type) or not isinstance(self.scaling, Scaling)):
            raise InputError("Rotary(scaling)", expected="a Scaling, such as YaRN(...)", got=repr(self.scaling))

    @property
    def depends_on_length(self) -> bool:
        """Whether the angles depend on how many positions there are now: then keys must be cached unturned."""
        return self.scaling is not None and self.scaling.depends_on_length

    def check(self, head_dim: int) -> None:
        """Raise `InputError` unless heads of `head_dim` features can be turned."""
        if self.width is None and head_dim % 2:
            raise InputError(
                "head_dim",
                expected="an even number, since Rotary turns pairs of features",
                got=head_dim,
                remedy="or give Rotary a width",
            )
        if self.width is not None and self.width > head_dim:
            raise InputError("Rotary(width)", expected=f"at most the head_dim, {head_dim}", got=self.width)

    def rotate(
        self,
        x: Float[Tensor, "batch heads length head_dim"],
        positions: Int[Tensor, "#batch length"],
        *,
        length: Length = None,
    ) -> Float[Tensor, "batch heads length head_dim"]:
        """Queries or keys, turned by their positions; in the dtype of `x`, computed in float32 at least.

        Args:
            x: `(batch, heads, length, head_dim)`.
            positions: where each token stands, `(batch, length)` or `(1, length)`. What stands nowhere may have
                any number, such as -1.
            length: how many positions there are in all, a number or a tensor `()`. It matters only where
                `depends_on_length`. The default is the largest of `positions` plus 1; pass it where `x` is a part of
                a text.

        Raises:
            InputError: a head_dim that does not fit, positions that are not whole numbers of such a shape.
        """
        return self.apply_angles(x, self.angles(x, positions, length=length))

    def angles(
        self,
        x: Float[Tensor, "batch heads length head_dim"],
        positions: Int[Tensor, "#batch length"],
        *,
        length: Length = None,
    ) -> Angles:
        """The argument of `apply_angles` for `x` and any other tensor of its width with tokens at these positions."""
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim != 4:
            got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise InputError("x", expected="a float tensor (batch, heads, length, head_dim)", got=got)
        self.check(x.shape[3])
        position_ids("positions", positions, batch=x.shape[0], length=x.shape[2], device=x.device)
        if self.depends_on_length and length is None:
            length = positions.max() + 1 if positions.numel() else 0
        width = x.shape[3] if self.width is None else self.width
        with without_autocast(x.device):
            return self._cos_and_sin(width, positions, length, torch.promote_types(x.dtype, torch.float32))

    def apply_angles(
        self, x: Float[Tensor, "batch heads length head_dim"], angles: Angles
    ) -> Float[Tensor, "batch heads length head_dim"]:
        """`x` turned by `angles`."""
        width = x.shape[3] if self.width is None else self.width
        # Nothing here is narrowed by autocast, but torch's cat fails under it where it does not expect float16.
        with without_autocast(x.device):
            if width == x.shape[3]:
                return _rotated(x, *angles, self.interleaved)
            return torch.cat((_rotated(x[..., :width], *angles, self.interleaved), x[..., width:]), dim=-1)

    def _cos_and_sin(
        self, width: int, positions: Int[Tensor, "#batch length"], length: Length, dtype: torch.dtype
    ) -> Angles:
        """Cosine and sine of each feature's angle, times the factor of the scaling."""
        device = positions.device
        if self.scaling is None:
            frequencies, factor = base_frequencies(self.theta, width, device), 1.0
        else:
            frequencies, factor = self.scaling.frequencies(self.theta, width, length, device=device)
        # Whole turns are taken off before rounding: a float32 angle is off by thousandths at position 100,000.
        turns = positions[:, None, :, None] * (frequencies / math.tau)
        angles = ((turns - turns.round()) * math.tau).to(dtype)
        cos, sin = angles.cos(), angles.sin()
        if factor != 1.0:
            cos, sin = cos * factor, sin * factor
        both = ((cos, cos), (-sin, sin))
        if self.interleaved:
            first, other = (torch.stack(each, dim=-1).flatten(-2) for each in both)
        else:
            first, other = (torch.cat(each, dim=-1) for each in both)
        return first, other


def _rotated(
    x: Float[Tensor, "batch heads length width"],
    cos: Float[Tensor, "#batch 1 length width"],
    sin: Float[Tensor, "#batch 1 length width"],
    interleaved: bool,
) -> Float[Tensor, "batch heads length width"]:
    """Every pair of features as a point in the plane, turned; half precision is widened by the cosines it meets."""
    width = x.shape[-1]
    others = x.reshape(*x.shape[:-1], width // 2, 2).flip(-1).flatten(-2) if interleaved else x.roll(width // 2, -1)
    return (x * cos).addcmul_(others, sin).to(x.dtype)


def base_frequencies(
    theta: float | Float[Tensor, ""], width: int, device: torch.device | None = None
) -> Float[Tensor, " pairs"]:
    """theta^(-2i / width) for pair i, radians per position (Su et al. 2021, equation 15)."""
    exponents = torch.arange(0, -width, -2, dtype=most_precise_dtype(device), device=device) / width
    return theta**exponents


def most_precise_dtype(device: torch.device | None) -> torch.dtype:
    """The most precise dtype that `device` has: float64, but for Apple's GPUs."""
    return torch.float32 if device is not None and device.type == "mps" else torch.float64


# -- scalings: frequencies for longer texts than those of the training -----------------------------------------


@runtime_checkable
class Scaling(Protocol):
    """A change of the frequencies for texts longer than those a model was trained on."""

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies depend on the length."""

    def frequencies(
        self, theta: float, width: int, length: Length = None, *, device: torch.device | None = None
    ) -> tuple[Float[Tensor, " pairs"], float]:
        """The frequency of each of `width / 2` pairs, radians per position, and a factor on the turned vectors."""


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023, position interpolation, equation 4)."""

    factor: float
    depends_on_length: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _at_least_one("LinearScaling(factor)", self.factor)

    def frequencies(
        self, theta: float, width: int, length: Length = None, *, device: torch.device | None = None
    ) -> tuple[Float[Tensor, " pairs"], float]:
        return base_frequencies(theta, width, device) / self.factor, 1.0


@dataclass(frozen=True)
class DynamicNTK:
    """A theta that grows with the text once it is longer than `trained_length` (Peng et al. 2023, sections 3.1, 3.3).

    The longest sequence of a batch decides for all of it; packed sequences each decide for themselves.

    With s = factor * length / trained_length - (factor - 1), theta becomes theta * s^(width / (width - 2)).
    """

    factor: float
    trained_length: int
    depends_on_length: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _at_least_one("DynamicNTK(factor)", self.factor)
        whole_number("DynamicNTK(trained_length)", self.trained_length, least=1)

    def frequencies(
        self, theta: float, width: int, length: Length = None, *, device: torch.device | None = None
    ) -> tuple[Float[Tensor, " pairs"], float]:
        # The one pair of width 2 has frequency 1 whatever theta is.
        exponent = width / max(width - 2, 1)
        if isinstance(length, Tensor):
            beyond = (length.to(most_precise_dtype(length.device)) / self.trained_length - 1).clamp(min=0)
            return base_frequencies(theta * (1 + self.factor * beyond) ** exponent, width, device), 1.0
        longer = max((length or 0) / self.trained_length - 1, 0)
        return base_frequencies(theta * (1 + self.factor * longer) ** exponent, width, device), 1.0


@dataclass(frozen=True)
class YaRN:
    """Slow pairs interpolated, fast ones kept, a ramp between (Peng et al. 2023, section 3.2).

    Args:
        factor: how many times longer the texts are to be.
        trained_length: tokens of the training's texts.
        fast: a pair that turns more often than this over `trained_length` keeps its frequency.
        slow: one that turns less often than this has it divided by `factor`.
        attention_factor: multiplies the turned vectors, so the scores by its square; 0.1 ln(factor) + 1 unless
            given (section 3.4).
        truncate: whether the ends of the ramp are moved outwards to whole pairs.

    The ramp is a straight line over the pairs, as in the authors' code and all models trained with it; the paper's
    equation 18 has one over the number of turns.
    """

    factor: float
    trained_length: int
    fast: float = 32.0
    slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    depends_on_length: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _at_least_one("YaRN(factor)", self.factor)
        whole_number("YaRN(trained_length)", self.trained_length, least=1)
        finite_number("YaRN(slow)", self.slow, above=0.0)
        finite_number("YaRN(fast)", self.fast, above=self.slow)
        if self.attention_factor is not None:
            finite_number("YaRN(attention_factor)", self.attention_factor, above=0.0)

    def frequencies(
        self, theta: float, width: int, length: Length = None, *, device: torch.device | None = None
    ) -> tuple[Float[Tensor, " pairs"], float]:
        first, last = self._pair_that_turns(self.fast, theta, width), self._pair_that_turns(self.slow, theta, width)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        pairs = torch.arange(width // 2, dtype=most_precise_dtype(device), device=device)
        slowness = ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
        kept = base_frequencies(theta, width, device)
        factor = 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor
        return (1 - slowness) * kept + slowness * kept / self.factor, factor

    def _pair_that_turns(self, times: float, theta: float, width: int) -> float:
        """The index, not a whole number, of the pair that turns so often over the trained length."""
        return width * math.log(self.trained_length / (times * math.tau)) / (2 * math.log(theta))


@dataclass(frozen=True)
class Llama3:
    """Slow pairs interpolated, fast ones kept, a ramp over the number of turns between (Llama 3.1's rule).

    Args:
        factor: what the frequency of slow pairs is divided by.
        trained_length: tokens of the training's texts.
        low: a pair that turns less often than this over `trained_length` is slow.
        high: one that turns more often than this is fast.
    """

    factor: float
    trained_length: int
    low: float = 1.0
    high: float = 4.0
    depends_on_length: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _at_least_one("Llama3(factor)", self.factor)
        whole_number("Llama3(trained_length)", self.trained_length, least=1)
        finite_number("Llama3(low)", self.low, above=0.0)
        finite_number("Llama3(high)", self.high, above=self.low)

    def frequencies(
        self, theta: float, width: int, length: Length = None, *, device: torch.device | None = None
    ) -> tuple[Float[Tensor, " pairs"], float]:
        kept = base_frequencies(theta, width, device)
        turns = self.trained_length * kept / math.tau
        fastness = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return fastness * kept + (1 - fastness) * kept / self.factor, 1.0


def _at_least_one(argument: str, factor: Any) -> None:
    if finite_number(argument, factor) < 1:
        raise InputError(argument, expected="a factor of 1 or more", got=repr(factor))
