"""Frequencies of rotary embeddings, and their scaling for texts longer than those a model was trained on."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from headwise.checks import LARGEST_INTEGER, finite_number, flag, whole_number
from headwise.errors import InputError
from headwise.shapes import Float, Int

TextLength = int | Int[Tensor, ""] | None
"""Number of tokens of the whole text; None for a scaling that does not depend on it."""


def base_frequencies(
    theta: float | Float[Tensor, ""], width: int, device: torch.device | None = None
) -> Float[Tensor, " pairs"]:
    """Return the unscaled frequency of each pair of features: theta^(-2i / width) radians per position for pair i.

    Source: Su et al. 2021, equation 15.
    """
    exponents = torch.arange(0, -width, -2, dtype=most_precise_dtype(device), device=device) / width
    return theta**exponents


def in_program(number: float, device: torch.device | None) -> float | Float[Tensor, ""]:
    """Return a number unchanged, or as a tensor while a program is exported: the ONNX exporter of torch rounds Python
    numbers to float32.
    """
    if not torch.compiler.is_exporting():
        return number
    return torch.tensor(number, dtype=most_precise_dtype(device), device=device)


def most_precise_dtype(device: torch.device | None) -> torch.dtype:
    """Return the most precise float dtype of a device: float32 on Apple's GPUs, float64 elsewhere."""
    return torch.float32 if device is not None and device.type == "mps" else torch.float64


@runtime_checkable
class Scaling(Protocol):
    """Interface of rotary scalings, which change the frequencies for texts longer than those a model was trained on."""

    @property
    def depends_on_length(self) -> bool:
        """True if the rotary frequencies depend on the number of tokens of the whole text."""

    def frequencies(
        self, theta: float, width: int, length: TextLength = None, *, device: torch.device | None = None
    ) -> tuple[Float[Tensor, " pairs"], float]:
        """Return the frequency of each of `width / 2` feature pairs in radians per position, for a text of `length`
        tokens, and an attention factor. Rotated queries are multiplied by this factor, and so are rotated keys.

        Scores are therefore multiplied by its square.
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
        """Return the unscaled frequencies of all feature pairs, divided by `factor`, and the number 1.0, by which each
        rotated query and key is multiplied (the attention factor).
        """
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
        """Return the frequency of each feature pair for a base theta enlarged for a text of `length` tokens, and the
        number 1.0, by which each rotated query and key is multiplied (the attention factor). Up to `trained_length`
        tokens, or if `length` is None, the base is `theta` itself.
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
    pair is slow or fast by the number of turns it makes over `trained_length` tokens. For pairs between slow and fast,
    both frequencies are mixed along a straight line over the index of the pair (Peng et al. 2023, section 3.2).

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
        """Return the frequency of each feature pair, and the attention factor, by which each rotated query and key is
        multiplied: `attention_factor`, or 0.1 ln(factor) + 1 if that is None. Fast pairs, with many turns over
        `trained_length` tokens, keep their frequency. That of slow pairs is divided by `factor`, and pairs between
        have a weighted mean of the two frequencies.
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
    unchanged. A pair is slow or fast by the number of turns it makes over `trained_length` tokens. For pairs between
    slow and fast, both frequencies are mixed along a straight line over the number of turns.

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
        """Return the frequency of each feature pair, and the number 1.0, by which each rotated query and key is
        multiplied (the attention factor). Pairs with more than `high` turns over `trained_length` tokens keep their
        frequency. That of pairs with fewer than `low` turns is divided by `factor`, and pairs between have a weighted
        mean of the two frequencies.
        """
        base = base_frequencies(theta, width, device)
        turns = self.trained_length * base / math.tau
        fastness = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return fastness * base + (1 - fastness) * base / self.factor, 1.0


def _require_at_least_one(argument: str, factor: Any) -> None:
    """Raise `InputError` unless a scaling factor is a finite number of 1 or more."""
    if finite_number(argument, factor) < 1:
        raise InputError(argument, expected="a factor of 1 or more", got=repr(factor))
