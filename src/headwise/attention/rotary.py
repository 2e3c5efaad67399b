"""Rotary position embedding: pairs of features rotated by an angle that grows with the position.

The score of a rotated query with a rotated key depends on the difference of their positions alone (Su et al. 2021,
section 3.4). Angles are computed once per call for all heads and never stored. On a CPU, frequencies are computed once
for all rotations with the same options, and few tokens are rotated by one native operator: in a step of decoding, the
operators of torch that compute the angles and rotate take longer than the attention to thousands of keys.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from headwise.attention.autocast import without_autocast
from headwise.attention.backends.native import library
from headwise.attention.tensors import KeyPositions, Queries, QueryPositions
from headwise.checks import (
    LARGEST_INTEGER,
    LARGEST_SIZE,
    finite_number,
    flag,
    has_own_class,
    makes_plain_tensors,
    position_ids,
    whole_number,
)
from headwise.errors import InputError
from headwise.shapes import Float, Int

# -- frequencies, and their scaling for texts longer than those a model was trained on ---------------------------------

TextLength = int | Int[Tensor, ""] | None
"""Number of tokens of the whole text; None for a scaling that does not depend on it."""

Frequencies = tuple[Float[Tensor, " pairs"], float]
"""Frequency of each pair of features, and the attention factor, by which rotated queries and keys are multiplied."""


def base_frequencies(
    theta: float | Float[Tensor, ""], width: int, device: torch.device | None = None
) -> Float[Tensor, " pairs"]:
    """Return the unscaled rotary frequency theta^(-2i / width) of each feature pair i, in radians per position (Su et
    al. 2021, equation 15).
    """
    exponents = torch.arange(0, -width, -2, dtype=most_precise_dtype(device), device=device) / width
    return theta**exponents


def in_program(number: float, device: torch.device | None) -> float | Float[Tensor, ""]:
    """Return `number` unchanged or, while torch exports a program, as a tensor. A Python number would be rounded to
    float32 by torch's ONNX exporter.
    """
    if not torch.compiler.is_exporting():
        return number
    return torch.tensor(number, dtype=most_precise_dtype(device), device=device)


def most_precise_dtype(device: torch.device | None) -> torch.dtype:
    """Return the most precise float dtype of a device: float32 on Apple's GPUs, float64 elsewhere."""
    return torch.float32 if device is not None and device.type == "mps" else torch.float64


@runtime_checkable
class Scaling(Protocol):
    """Interface of rotary scalings. A rotary scaling changes the rotary frequencies, for texts longer than those a
    model was trained on.
    """

    @property
    def depends_on_length(self) -> bool:
        """True if the rotary frequencies depend on the number of tokens of the whole text."""

    def frequencies(
        self, theta: float, width: int, length: TextLength = None, *, device: torch.device | None = None
    ) -> tuple[Float[Tensor, " pairs"], float]:
        """Return the frequency of each of `width / 2` feature pairs in radians per position, for a text of `length`
        tokens. Also return the attention factor, whose square multiplies the scores.
        """


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: all rotary frequencies are divided by `factor` (Chen et al. 2023, equation 4)."""

    factor: float
    depends_on_length: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _require_at_least_one("LinearScaling(factor)", self.factor)

    def frequencies(
        self, theta: float, width: int, length: TextLength = None, *, device: torch.device | None = None
    ) -> tuple[Float[Tensor, " pairs"], float]:
        """Return the unscaled frequencies divided by `factor`, and the attention factor 1.0."""
        return base_frequencies(theta, width, device) / self.factor, 1.0


@dataclass(frozen=True)
class DynamicNTK:
    """Dynamic NTK scaling: the rotary base theta grows with the length of the text beyond `trained_length` tokens.
    Source: Peng et al. 2023, sections 3.1 and 3.3.

    With s = factor * length / trained_length - (factor - 1), theta becomes theta * s^(width / (width - 2)). The
    longest sequence of a batch decides for the whole batch; each packed sequence decides for itself.

    Args:
        factor: strength of the growth, 1 or more.
        trained_length: number of tokens of the training texts.
    """

    factor: float
    trained_length: int
    depends_on_length: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _require_at_least_one("DynamicNTK(factor)", self.factor)
        whole_number("DynamicNTK(trained_length)", self.trained_length, least=1, most=LARGEST_INTEGER)

    def frequencies(
        self, theta: float, width: int, length: TextLength = None, *, device: torch.device | None = None
    ) -> tuple[Float[Tensor, " pairs"], float]:
        """Return the frequencies for a base theta enlarged for a text of `length` tokens, and the attention factor 1.0.
        Up to `trained_length` tokens, or if `length` is None, the base is `theta` itself.
        """
        # The single pair of width 2 has frequency 1 for every theta.
        exponent = width / max(width - 2, 1)
        if isinstance(length, Tensor):
            excess = (length.to(most_precise_dtype(length.device)) / self.trained_length - 1).clamp(min=0)
            base, factor, power = (in_program(number, length.device) for number in (theta, self.factor, exponent))
            return base_frequencies(base * (1 + factor * excess) ** power, width, device), 1.0
        excess_ratio = max((length or 0) / self.trained_length - 1, 0)
        return base_frequencies(theta * (1 + self.factor * excess_ratio) ** exponent, width, device), 1.0


@dataclass(frozen=True)
class YaRN:
    """YaRN scaling: frequencies of slow feature pairs are divided by `factor`, those of fast pairs stay unchanged. A
    pair is slow or fast by the number of turns it makes over `trained_length` tokens. Between slow and fast pairs, the
    frequency is a weighted mean of the divided and the unchanged frequency, with a weight that is linear in the index
    of the pair (Peng et al. 2023, section 3.2).

    The authors' code and all models trained with it use this line over pairs. Equation 18 of the paper has a line over
    the number of turns instead.

    Args:
        factor: ratio of the intended length to `trained_length`.
        trained_length: number of tokens of the training texts.
        fast: number of turns over `trained_length` above which a pair keeps its frequency.
        slow: number of turns over `trained_length` below which the frequency of a pair is divided by `factor`.
        attention_factor: multiplies rotated queries and keys, so it multiplies scores by its square. The default is
            0.1 ln(factor) + 1 (section 3.4).
        truncate: whether the ends of the line are moved outwards to whole pairs.
    """

    factor: float
    trained_length: int
    fast: float = 32.0
    slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    depends_on_length: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _require_at_least_one("YaRN(factor)", self.factor)
        whole_number("YaRN(trained_length)", self.trained_length, least=1, most=LARGEST_INTEGER)
        finite_number("YaRN(slow)", self.slow, above=0.0)
        finite_number("YaRN(fast)", self.fast, above=self.slow)
        if self.attention_factor is not None:
            finite_number("YaRN(attention_factor)", self.attention_factor, above=0.0)
        flag("YaRN(truncate)", self.truncate)

    def frequencies(
        self, theta: float, width: int, length: TextLength = None, *, device: torch.device | None = None
    ) -> tuple[Float[Tensor, " pairs"], float]:
        """Return the frequency of each feature pair: unchanged for fast pairs, divided by `factor` for slow ones, and a
        weighted mean of both frequencies for pairs between slow and fast. Also return the attention factor: the
        attribute `attention_factor`, or 0.1 ln(factor) + 1 if that is None.
        """
        first, last = self._pair_with_turns(self.fast, theta, width), self._pair_with_turns(self.slow, theta, width)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        pairs = torch.arange(width // 2, dtype=most_precise_dtype(device), device=device)
        slowness = ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
        base = base_frequencies(theta, width, device)
        factor = 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor
        return (1 - slowness) * base + slowness * base / self.factor, factor

    def _pair_with_turns(self, turns: float, theta: float, width: int) -> float:
        """Return the fractional index of the feature pair that makes `turns` turns over `trained_length` tokens."""
        return width * math.log(self.trained_length / (turns * math.tau)) / (2 * math.log(theta))


@dataclass(frozen=True)
class Llama3:
    """Scaling of Llama 3.1: frequencies of slow feature pairs are divided by `factor`, those of fast ones stay
    unchanged. A pair is slow or fast by the number of turns it makes over `trained_length` tokens. Between slow and
    fast pairs, the frequency is a weighted mean of the divided and the unchanged frequency, with a weight that is
    linear in the number of turns.

    Args:
        factor: divisor of the frequencies of slow pairs.
        trained_length: number of tokens of the training texts.
        low: number of turns over `trained_length` below which a pair is slow.
        high: number of turns over `trained_length` above which a pair is fast.
    """

    factor: float
    trained_length: int
    low: float = 1.0
    high: float = 4.0
    depends_on_length: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _require_at_least_one("Llama3(factor)", self.factor)
        whole_number("Llama3(trained_length)", self.trained_length, least=1, most=LARGEST_INTEGER)
        finite_number("Llama3(low)", self.low, above=0.0)
        finite_number("Llama3(high)", self.high, above=self.low)

    def frequencies(
        self, theta: float, width: int, length: TextLength = None, *, device: torch.device | None = None
    ) -> tuple[Float[Tensor, " pairs"], float]:
        """Return the frequency of each feature pair: unchanged for fast pairs, divided by `factor` for slow ones, and a
        weighted mean of both frequencies for pairs between slow and fast. Also return the attention factor 1.0.
        """
        base = base_frequencies(theta, width, device)
        turns = self.trained_length * base / math.tau
        fastness = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return fastness * base + (1 - fastness) * base / self.factor, 1.0


def _require_at_least_one(argument: str, factor: Any) -> None:
    """Raise `InputError` unless a scaling factor is a finite number of 1 or more."""
    if finite_number(argument, factor) < 1:
        raise InputError(argument, expected="a factor of 1 or more", got=repr(factor))


# -- rotation ----------------------------------------------------------------------------------------------------------

Angles = tuple[Float[Tensor, "#batch 1 length width"], Float[Tensor, "#batch 1 length width"]]
"""Cosine and signed sine of the angle of each feature, in float32 at least.

A rotated feature is the feature times its cosine, plus the other feature of its pair times the sine, which is negative
for the first feature of a pair.
"""

SCALINGS_BY_FIELDS = (type(None), LinearScaling, Llama3, YaRN)
"""Types of scaling for which the frequencies follow from the fields of a `Rotary` alone; a scaling of another package
may depend on anything.
"""


MOST_TOKENS = 8
"""Largest number of tokens, over all sequences, that the native operator rotates."""


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding: pair i of a head's features is rotated by `position * theta^(-2i / width)` radians,
    where `width` is the number of rotated features. A `scaling` changes the frequencies `theta^(-2i / width)`.

    Source: Su et al. 2021, RoFormer, section 3.2.2.

    Args:
        theta: base of the frequencies.
        width: number of rotated features of a head, the first ones; None for all. The other features stay unchanged
            (partial rotary embedding, as in GPT-NeoX and Phi).
        interleaved: True if the pairs are features (0, 1), (2, 3), ..., as in the paper, GPT-J and DeepSeek; False
            if they are (0, width / 2), (1, width / 2 + 1), ..., as in Llama.
        scaling: change of the frequencies for texts longer than those a model was trained on.

    Raises:
        InputError: a theta of 1 or less, a width that is odd or below 2, a scaling of another kind.

    Example:
        >>> q = Rotary(theta=1e5).rotate(torch.randn(2, 4, 7, 16), torch.arange(7)[None])
        >>> q.shape
        torch.Size([2, 4, 7, 16])
    """

    theta: float = 10_000.0
    width: int | None = None
    interleaved: bool = False
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "theta", finite_number("Rotary(theta)", self.theta, above=1.0))
        if self.width is not None and whole_number("Rotary(width)", self.width, least=2, most=LARGEST_SIZE) % 2:
            raise InputError("Rotary(width)", expected="an even number, since pairs are rotated", got=self.width)
        flag("Rotary(interleaved)", self.interleaved)
        if self.scaling is not None and (isinstance(self.scaling, type) or not isinstance(self.scaling, Scaling)):
            raise InputError("Rotary(scaling)", expected="a Scaling, such as YaRN(...)", got=repr(self.scaling))

    @property
    def depends_on_length(self) -> bool:
        """True if angles depend on the length of the text, not on positions alone; keys are then cached unrotated."""
        return self.scaling is not None and self.scaling.depends_on_length

    def check(self, features: int, name: str = "head_dim") -> None:
        """Raise `InputError` if a head of `features` features cannot be rotated: if `features` is smaller than the
        attribute `width` or, where `width` is None, odd. `name` is the name of the argument in the error message.
        """
        if self.width is None and features % 2:
            expected = "an even number, since Rotary rotates pairs of features"
            raise InputError(name, expected=expected, got=features, remedy="or give Rotary a width")
        if self.width is not None and self.width > features:
            raise InputError("Rotary(width)", expected=f"at most the {name}, {features}", got=self.width)

    def rotate(
        self,
        x: Float[Tensor, "batch heads length head_dim"],
        positions: Int[Tensor, "#batch length"],
        *,
        length: TextLength = None,
    ) -> Float[Tensor, "batch heads length head_dim"]:
        """Return queries or keys rotated by their positions, in the dtype of `x`, computed in float32 at least.
        `length`, the number of tokens of the whole text, matters only if `depends_on_length` is True; by default it is
        the largest position plus 1.

        Args:
            x: `(batch, heads, length, head_dim)`.
            positions: of the tokens, `(batch, length)` or `(1, length)`. Padding may have any number, such as -1.
            length: length of the whole text, a number or a tensor `()`. It matters only where `depends_on_length`.
                The default is the largest of `positions` plus 1; pass it where `x` is a part of a text.

        Raises:
            InputError: a head_dim that does not fit, positions that are not whole numbers of such a shape.
        """
        self._check_input(x, positions)
        if self._is_kept and suits_native(x, positions):
            width = x.shape[3] if self.width is None else self.width
            frequencies = _kept_frequencies(self, width, x.device)
            rotated: Tensor = library.operator("rotate_few_tokens")(x, positions, *frequencies, self.interleaved)
            return rotated
        return self.apply_angles(x, self.angles(x, positions, length=length))

    def rotate_both(
        self,
        q: Queries,
        k: Float[Tensor, "batch kv_heads keys key_dim"],
        query_positions: QueryPositions,
        key_positions: KeyPositions,
    ) -> tuple[Queries, Float[Tensor, "batch kv_heads keys key_dim"]]:
        """Return queries and keys, each rotated by its positions. If both have the same positions, the angles are
        computed only once.
        """
        if self._is_kept and suits_native(q, query_positions) and suits_native(k, key_positions):
            self._check_input(q, query_positions)
            turns, factor = _kept_frequencies(self, q.shape[3] if self.width is None else self.width, q.device)
            native = library.operator("rotate_few_tokens")
            return (
                native(q, query_positions, turns, factor, self.interleaved),
                native(k, key_positions, turns, factor, self.interleaved),
            )
        angles = self.angles(q, query_positions)
        of_keys = angles if key_positions is query_positions else self.angles(k, key_positions)
        return self.apply_angles(q, angles), self.apply_angles(k, of_keys)

    def angles(
        self,
        x: Float[Tensor, "batch heads length head_dim"],
        positions: Int[Tensor, "#batch length"],
        *,
        length: TextLength = None,
    ) -> Angles:
        """Return the cosine and the signed sine of each feature's angle at each position, both multiplied by the
        attention factor of the scaling. `apply_angles` uses them to rotate any tensor that has the width and the
        positions of `x`.
        """
        self._check_input(x, positions)
        if self.depends_on_length and length is None:
            length = positions.max() + 1 if positions.numel() else 0
        width = x.shape[3] if self.width is None else self.width
        dtype, device = torch.promote_types(x.dtype, torch.float32), positions.device
        with without_autocast(x.device):
            if device.type == "cpu" and self._is_kept and makes_plain_tensors():
                frequencies, factor = _kept_frequencies(self, width, device)
            elif self._is_kept and torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
                # A constant of the program: other runtimes compute frequencies in float32, and angles far from the
                # first position are then wrong.
                with _disable_current_modes():
                    frequencies, factor = _kept_frequencies(self, width, torch.device("cpu"))
                    values = frequencies.tolist()
                frequencies = torch.tensor(values, dtype=most_precise_dtype(device), device=device)
            else:
                frequencies, factor = self._turns_per_position(width, length, device)
            # Full turns are removed before rounding: a float32 angle is off by thousandths at position 100,000.
            turns = positions[:, None, :, None] * frequencies
            angles = ((turns - turns.round()) * math.tau).to(dtype)
            # The sine of an opposite angle has the opposite sign.
            if self.interleaved:
                angles = torch.stack((-angles, angles), dim=-1).flatten(-2)
            else:
                angles = torch.cat((-angles, angles), dim=-1)
            cos, sin = angles.cos(), angles.sin()
            return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)

    def _check_input(self, x: Any, positions: Any) -> None:
        """Raise `InputError` unless `x` is a float tensor `(batch, heads, length, head_dim)` whose head_dim can be
        rotated. Also raise it unless `positions` has a whole number for each token of `x`.
        """
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim != 4:
            got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise InputError("x", expected="a float tensor (batch, heads, length, head_dim)", got=got)
        self.check(x.shape[3])
        position_ids("positions", positions, batch=x.shape[0], length=x.shape[2], device=x.device)

    def apply_angles(
        self, x: Float[Tensor, "batch heads length head_dim"], angles: Angles
    ) -> Float[Tensor, "batch heads length head_dim"]:
        """Return queries or keys `x` rotated by `angles`, the cosines and sines that the method `angles` returns.
        Features with an index of `width` or above stay unchanged.
        """
        width = x.shape[3] if self.width is None else self.width
        # Autocast changes no dtype here, but under it torch.cat fails for some dtypes.
        with without_autocast(x.device):
            if width == x.shape[3]:
                return _rotated(x, *angles, self.interleaved)
            return torch.cat((_rotated(x[..., :width], *angles, self.interleaved), x[..., width:]), dim=-1)

    @property
    def _is_kept(self) -> bool:
        """True if the rotary frequencies may be cached: they depend only on the attributes of this object, not on the
        length of the text.
        """
        return type(self) is Rotary and type(self.scaling) in SCALINGS_BY_FIELDS

    def _turns_per_position(self, width: int, length: TextLength, device: torch.device) -> Frequencies:
        """Return the rotary frequency of each pair of features, in turns per position, and the attention factor, for a
        text of `length` tokens.
        """
        if self.scaling is None:
            frequencies, factor = base_frequencies(self.theta, width, device), 1.0
        else:
            frequencies, factor = self.scaling.frequencies(self.theta, width, length, device=device)
        return frequencies / in_program(math.tau, device), factor


@lru_cache(maxsize=64)
def _kept_frequencies(rotary: Rotary, width: int, device: torch.device) -> Frequencies:
    """Return the cached rotary frequencies, in turns per position, and the attention factor of `rotary`, whose
    frequencies do not depend on the length of the text. The result must not be changed in place.
    """
    with torch.inference_mode(False):
        return rotary._turns_per_position(width, None, device)


def _rotated(
    x: Float[Tensor, "batch heads length width"],
    cos: Float[Tensor, "#batch 1 length width"],
    sin: Float[Tensor, "#batch 1 length width"],
    interleaved: bool,
) -> Float[Tensor, "batch heads length width"]:
    """Return `x` with each pair of features rotated: each feature times `cos`, plus the other feature of its pair times
    `sin`. `sin` already has a negative sign for the first feature of a pair. The product is computed in the dtype of
    `cos`.
    """
    width = x.shape[-1]
    partners = x.reshape(*x.shape[:-1], width // 2, 2).flip(-1).flatten(-2) if interleaved else x.roll(width // 2, -1)
    return (x * cos).addcmul_(partners, sin).to(x.dtype)


def suits_native(x: Float[Tensor, "batch heads length head_dim"], positions: Int[Tensor, "#batch length"]) -> bool:
    """Return True if the native operator can rotate `x` by `positions`, and is likely faster than torch. This requires
    few tokens on a CPU, and no gradient.
    """
    return (
        makes_plain_tensors()  # first: while exporting, reading sizes would fix them
        and x.shape[0] * x.shape[2] <= MOST_TOKENS
        and x.is_cpu
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.stride(3) == 1
        and has_own_class(x)
        and has_own_class(positions)
        and positions.dtype == torch.int64
        and positions.is_contiguous()
        and not (x.requires_grad and torch.is_grad_enabled())
        and forward_ad._current_level < 0
        and library.load() is None
    )
