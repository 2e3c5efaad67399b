"""Rotary position embedding: pairs of features rotated by an angle that grows with the position.

The score of a rotated query with a rotated key depends on the difference of their positions alone (Su et al. 2021,
section 3.4). Angles are computed once per call for all heads and never stored. On a CPU, frequencies are computed once
for all rotations with the same options, and few tokens are rotated by one native operator: in a step of decoding, the
operators of torch that compute the angles and rotate take longer than the attention to thousands of keys.
"""

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from headwise.attention.autocast import without_autocast
from headwise.attention.backends.native import library
from headwise.attention.rotary_scaling import (
    LinearScaling,
    Llama3,
    Scaling,
    TextLength,
    YaRN,
    base_frequencies,
    in_program,
    most_precise_dtype,
)
from headwise.checks import (
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
        """Raise `InputError` if there are fewer `features` than `width`. If `width` is None, which means that all
        features are rotated, raise it if their number is odd. `name` is the argument for the number of features.
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
            rotated: Tensor = _native()(x, positions, *_kept_frequencies(self, width, x.device), self.interleaved)
            return rotated
        return self.apply_angles(x, self.angles(x, positions, length=length))

    def rotate_both(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch kv_heads keys key_dim"],
        query_positions: Int[Tensor, "#batch queries"],
        key_positions: Int[Tensor, "#batch keys"],
    ) -> tuple[Float[Tensor, "batch heads queries head_dim"], Float[Tensor, "batch kv_heads keys key_dim"]]:
        """Return queries and keys rotated by their positions, as by `rotate`. Angles of both are computed only once."""
        if self._is_kept and suits_native(q, query_positions) and suits_native(k, key_positions):
            self._check_input(q, query_positions)
            turns, factor = _kept_frequencies(self, q.shape[3] if self.width is None else self.width, q.device)
            native = _native()
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
        """Return the cosine and the signed sine of each feature's angle at each position, the input of `apply_angles`.
        The sine has the opposite sign for the first feature of each rotated pair. Both are multiplied by the attention
        factor of the scaling (1 without a scaling). `length` is the number of tokens of
        the whole text, as in `rotate`.

        They serve every tensor with the width and positions of `x`, whatever its number of heads. The arguments are
        those of `rotate`.
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
                frequencies, factor = _exported_frequencies(self, width, device)
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
        """Raise `InputError` unless `x` is a float tensor of four axes that fits, and `positions` are those of its
        tokens.
        """
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim != 4:
            got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise InputError("x", expected="a float tensor (batch, heads, length, head_dim)", got=got)
        self.check(x.shape[3])
        position_ids("positions", positions, batch=x.shape[0], length=x.shape[2], device=x.device)

    def apply_angles(
        self, x: Float[Tensor, "batch heads length head_dim"], angles: Angles
    ) -> Float[Tensor, "batch heads length head_dim"]:
        """Return queries or keys rotated by the result of `angles`. Features beyond `width` stay unchanged."""
        width = x.shape[3] if self.width is None else self.width
        # Autocast changes no dtype here, but under it torch.cat fails for some dtypes.
        with without_autocast(x.device):
            if width == x.shape[3]:
                return _rotated(x, *angles, self.interleaved)
            return torch.cat((_rotated(x[..., :width], *angles, self.interleaved), x[..., width:]), dim=-1)

    @property
    def _is_kept(self) -> bool:
        """True if the frequencies may be kept: they follow from the fields of this object alone."""
        return type(self) is Rotary and type(self.scaling) in SCALINGS_BY_FIELDS

    def _turns_per_position(
        self, width: int, length: TextLength, device: torch.device
    ) -> tuple[Float[Tensor, " pairs"], float]:
        """Return the frequency of each pair of features, in turns per position, and the attention factor."""
        if self.scaling is None:
            frequencies, factor = base_frequencies(self.theta, width, device), 1.0
        else:
            frequencies, factor = self.scaling.frequencies(self.theta, width, length, device=device)
        return frequencies / in_program(math.tau, device), factor


@lru_cache(maxsize=64)
def _kept_frequencies(rotary: Rotary, width: int, device: torch.device) -> tuple[Float[Tensor, " pairs"], float]:
    """Return the turns per position and the attention factor of a rotation that does not depend on the length of the
    text. They are computed once, and must not be changed.
    """
    with torch.inference_mode(False):
        return rotary._turns_per_position(width, None, device)


def _exported_frequencies(rotary: Rotary, width: int, device: torch.device) -> tuple[Float[Tensor, " pairs"], float]:
    """Return the result of `_kept_frequencies` as a constant of the program that is being exported. Other runtimes
    compute frequencies in float32, and angles far from the first position are then wrong.
    """
    with _disable_current_modes():
        frequencies, factor = _kept_frequencies(rotary, width, torch.device("cpu"))
        values = frequencies.tolist()
    return torch.tensor(values, dtype=most_precise_dtype(device), device=device), factor


def _rotated(
    x: Float[Tensor, "batch heads length width"],
    cos: Float[Tensor, "#batch 1 length width"],
    sin: Float[Tensor, "#batch 1 length width"],
    interleaved: bool,
) -> Float[Tensor, "batch heads length width"]:
    """Return `x` with each pair of features rotated in its plane: each feature times `cos`, plus the other feature of
    its pair times `sin`. `sin` already has the opposite sign for the first feature of a pair. The result has the dtype
    of `x`, but is computed in that of `cos`.
    """
    width = x.shape[-1]
    partners = x.reshape(*x.shape[:-1], width // 2, 2).flip(-1).flatten(-2) if interleaved else x.roll(width // 2, -1)
    return (x * cos).addcmul_(partners, sin).to(x.dtype)


def suits_native(x: Float[Tensor, "batch heads length head_dim"], positions: Int[Tensor, "#batch length"]) -> bool:
    """Return True if the native operator can rotate queries or keys by these positions, and is expected to be faster
    than the operators of torch. It has no gradient.
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


@cache
def _native() -> Any:
    """Return the native operator. Finding it anew takes as long as a rotation."""
    return torch.ops.headwise.rotate_few_tokens.default
