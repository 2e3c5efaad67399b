"""Heads that attention may be made of: how many, how wide, and how many share keys and values."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from headwise.checks import whole_number
from headwise.errors import InputError

HEADS = (1, 2, 4, 8, 16)
"""Numbers of heads that are compared where nobody says otherwise."""

WRITTEN = re.compile(r"([1-9]\d*)(?:x([1-9]\d*))?(?:/([1-9]\d*))?")
"""Heads, their width, key/value heads; the last two may be left out."""

SHOWN = 3
"""Settings that cannot exist which a message names."""


@dataclass(frozen=True, order=True)
class Setting:
    """The heads of each layer.

    Attributes:
        num_heads: query heads.
        head_dim: width of a head's queries, keys and values.
        num_kv_heads: key/value heads, each shared by `num_heads / num_kv_heads` query heads.

    Raises:
        InputError: numbers that are not positive.
    """

    num_heads: int
    head_dim: int
    num_kv_heads: int

    def __post_init__(self) -> None:
        for name, number in vars(self).items():
            whole_number(name, number, least=1)

    @property
    def name(self) -> str:
        """`heads x width`, and `/ key/value heads` where they are fewer: 8x64, 8x64/2."""
        shared = f"/{self.num_kv_heads}" if self.num_kv_heads != self.num_heads else ""
        return f"{self.num_heads}x{self.head_dim}{shared}"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Space:
    """Settings to compare: every combination that can exist.

    Attributes:
        embed_dim: width of the model.
        heads: numbers of query heads.
        head_dims: widths of a head; by default `embed_dim / heads`.
        kv_heads: numbers of key/value heads; by default as many as query heads.
        tensor_parallel: over how many ranks heads are divided: each gets as many as the others.

    Raises:
        InputError: numbers that are not positive, or none.
    """

    embed_dim: int
    heads: Sequence[int] = HEADS
    head_dims: Sequence[int] | None = None
    kv_heads: Sequence[int] | None = None
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        whole_number("embed_dim", self.embed_dim, least=1)
        whole_number("tensor_parallel", self.tensor_parallel, least=1)
        for name in ("heads", "head_dims", "kv_heads"):
            numbers = getattr(self, name)
            if numbers is None:
                continue
            if not isinstance(numbers, Iterable) or not (numbers := tuple(numbers)):
                raise InputError(name, expected="one number or more", got=repr(numbers))
            object.__setattr__(self, name, tuple(whole_number(name, number, least=1) for number in numbers))

    def settings(self) -> tuple[Setting, ...]:
        """The settings that can exist, by heads, width, key/value heads.

        Raises:
            InputError: there is none.
        """
        found = tuple(sorted({setting for setting in self._combinations() if self.why_not(setting) is None}))
        if not found:
            refused = self.left_out()
            more = f" and {len(refused) - SHOWN} more" if len(refused) > SHOWN else ""
            raise InputError("space", expected="a setting that can exist", got=f"{'; '.join(refused[:SHOWN])}{more}")
        return found

    def left_out(self) -> tuple[str, ...]:
        """What cannot exist, and why."""
        reasons = (self.why_not(setting) for setting in self._combinations())
        return tuple(dict.fromkeys(reason for reason in reasons if reason is not None))

    def _combinations(self) -> Iterator[Setting]:
        for heads, head_dim, kv_heads in product(self.heads, self.head_dims or (None,), self.kv_heads or (None,)):
            yield self._setting(heads, head_dim, kv_heads)

    def _setting(self, heads: int, head_dim: int | None, kv_heads: int | None) -> Setting:
        """With what is usual where nothing is said."""
        return Setting(heads, head_dim or max(1, self.embed_dim // heads), kv_heads or heads)

    def why_not(self, setting: Setting) -> str | None:
        """Why attention cannot be made of these heads here, in a few words; None where it can."""
        heads, kv_heads = setting.num_heads, setting.num_kv_heads
        if self.embed_dim % heads:  # configurations of transformers ask for it, also beside a width of its own
            return f"num_heads {heads}, which does not divide embed_dim {self.embed_dim}"
        if setting.head_dim < 2 or setting.head_dim % 2:  # positions turn pairs of features
            return f"{setting}, whose width is not even"
        if heads % kv_heads:
            return f"{setting}, whose key/value heads do not divide its heads"
        if heads % self.tensor_parallel or kv_heads % self.tensor_parallel:
            return f"{setting}, which {self.tensor_parallel} ranks cannot share evenly"
        return None

    def read(self, text: str) -> Setting:
        """A setting as it is written: `8`, `8x64`, `8x64/2`, `8/2`.

        Raises:
            InputError: something else, or a setting that cannot exist.
        """
        parts = WRITTEN.fullmatch(text.strip())
        if parts is None:
            raise InputError("baseline", expected="heads as in 8, 8x64, 8x64/2 or 8/2", got=repr(text))
        heads, *others = parts.groups()
        head_dim, kv_heads = (None if each is None else int(each) for each in others)
        setting = self._setting(int(heads), head_dim, kv_heads)
        if (reason := self.why_not(setting)) is not None:
            raise InputError("baseline", expected="a setting that can exist", got=reason)
        return setting
