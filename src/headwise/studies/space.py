"""Heads that a study compares, and the limits of its work: number of heads, head dimension, key/value heads, budget."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from headwise.checks import finite_number, whole_number
from headwise.errors import InputError

DEFAULT_HEADS = (1, 2, 4, 8, 16)
"""Numbers of query heads that are compared by default."""

SETTING_PATTERN = re.compile(r"([1-9]\d*)(?:x([1-9]\d*))?(?:/([1-9]\d*))?")
"""`HEADS[xHEAD_DIM][/KV_HEADS]`, such as 8, 8x64, 8x64/2 or 8/2."""

MAX_REASONS = 3
"""Largest number of invalid settings that an error message lists."""


@dataclass(frozen=True, order=True)
class Setting:
    """Head setting of a model: the number of query heads, the head dimension and the number of key/value heads, which
    are the same in all its attention layers.

    Attributes:
        num_heads: number of query heads.
        head_dim: number of features of each head's queries, keys and values.
        num_kv_heads: number of key/value heads; each is shared by `num_heads / num_kv_heads` query heads.

    Raises:
        InputError: a number is not positive.
    """

    num_heads: int
    head_dim: int
    num_kv_heads: int

    def __post_init__(self) -> None:
        for name, number in vars(self).items():
            whole_number(name, number, least=1)

    @property
    def name(self) -> str:
        """Short name of the setting: `HEADSxHEAD_DIM`, followed by `/KV_HEADS` if query heads share key/value heads,
        such as 8x64 or 8x64/2.
        """
        shared = f"/{self.num_kv_heads}" if self.num_kv_heads != self.num_heads else ""
        return f"{self.num_heads}x{self.head_dim}{shared}"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Space:
    """Space of head settings to compare in a study: every valid combination of the stated numbers of query heads, head
    dimensions and numbers of key/value heads.

    Attributes:
        embed_dim: width of the model. Required by `hw.study`; `hw.study_texts` derives it from the model size.
        heads: numbers of query heads.
        head_dims: head dimensions; by default `embed_dim / heads`.
        kv_heads: numbers of key/value heads; by default as many as query heads.
        tensor_parallel: number of tensor-parallel ranks, over which the heads must divide equally.

    Raises:
        InputError: a number is not positive, or a sequence is empty.

    Example:
        >>> [setting.name for setting in Space(64, heads=(4, 8), kv_heads=(1, 8)).settings()]
        ['4x16/1', '8x8/1', '8x8']
    """

    embed_dim: int | None = None
    heads: Sequence[int] = DEFAULT_HEADS
    head_dims: Sequence[int] | None = None
    kv_heads: Sequence[int] | None = None
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        if self.embed_dim is not None:
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
        """Return all valid head settings of the space without duplicates, ordered by number of query heads, head
        dimension and number of key/value heads. Raise `InputError` if there are none.

        Raises:
            InputError: no combination is valid, or `embed_dim` is None.
        """
        valid = tuple(sorted({setting for setting in self._combinations() if self.why_not(setting) is None}))
        if not valid:
            reasons = self.left_out()
            more = f" and {len(reasons) - MAX_REASONS} more" if len(reasons) > MAX_REASONS else ""
            got = f"none: {'; '.join(reasons[:MAX_REASONS])}{more}"
            raise InputError("space", expected="at least one valid setting", got=got)
        return valid

    def left_out(self) -> tuple[str, ...]:
        """Return sentences that state which combinations of heads, head dimension and key/value heads in the space are
        invalid, and why. A sentence that applies to several combinations is returned once.
        """
        reasons = (self.why_not(setting) for setting in self._combinations())
        return tuple(dict.fromkeys(reason for reason in reasons if reason is not None))

    def why_not(self, setting: Setting) -> str | None:
        """Return a sentence that states why a head setting is invalid, or None if it is valid. In a valid setting,
        query heads divide `embed_dim`, key/value heads divide query heads, and the head dimension is even.
        `tensor_parallel` ranks must be able to share the heads equally.
        """
        heads, kv_heads = setting.num_heads, setting.num_kv_heads
        if self._width % heads:  # transformers requires it in a configuration, even when head_dim is set
            return f"{heads} heads do not divide embed_dim {self.embed_dim}"
        if setting.head_dim < 2 or setting.head_dim % 2:  # rotary positions rotate pairs of features
            return f"{setting} has an odd head_dim"
        if heads % kv_heads:
            return f"{setting} has key/value heads that do not divide its query heads"
        if heads % self.tensor_parallel or kv_heads % self.tensor_parallel:
            return f"{setting} has heads that {self.tensor_parallel} ranks cannot share equally"
        return None

    def parse(self, text: str) -> Setting:
        """Return the head setting that a text states as `8`, `8x64`, `8x64/2` or `8/2` (heads, head dimension,
        key/value heads). By default, the head dimension is `embed_dim / heads`, and there are as many key/value heads
        as heads. Raise `InputError` if the setting is invalid.

        Raises:
            InputError: the text has another form, or the setting is invalid.
        """
        match = SETTING_PATTERN.fullmatch(text.strip())
        if match is None:
            raise InputError("baseline", expected="heads as in 8, 8x64, 8x64/2 or 8/2", got=repr(text))
        heads, head_dim, kv_heads = (None if number is None else int(number) for number in match.groups())
        assert heads is not None
        setting = self._setting(heads, head_dim, kv_heads)
        if (reason := self.why_not(setting)) is not None:
            raise InputError("baseline", expected="a valid setting", got=f"{text.strip()!r}: {reason}")
        return setting

    @property
    def _width(self) -> int:
        """Width of the model, `embed_dim`; raises `InputError` if it is not set."""
        if self.embed_dim is None:
            raise InputError("embed_dim", expected="the width of the model, as in hw.Space(512)", got=None)
        return self.embed_dim

    def _combinations(self) -> Iterator[Setting]:
        """Yield a setting for every combination of the numbers in the space, valid or not."""
        for heads, head_dim, kv_heads in product(self.heads, self.head_dims or (None,), self.kv_heads or (None,)):
            yield self._setting(heads, head_dim, kv_heads)

    def _setting(self, heads: int, head_dim: int | None, kv_heads: int | None) -> Setting:
        """Return a head setting. `head_dim` None stands for `embed_dim / heads`, and `kv_heads` None for as many as
        `heads`.
        """
        return Setting(heads, head_dim or max(1, self._width // heads), kv_heads or heads)


MIN_TRIALS, MAX_TRIALS = 3, 8
"""Learning rates tried for each setting when their number is not set: at least, and at most with a time limit."""


@dataclass(frozen=True)
class StudyBudget:
    """Limits of a study, which compares models with different heads: the total time in seconds, the length of each
    training in batches or tokens, and the number of trainings. Each head setting is trained with several learning
    rates, and then, with the best of these, once for each seed.

    One of `seconds`, `steps` and `tokens` is required.

    Attributes:
        seconds: time for the whole study, counted while at least one process works on it.
        steps: batches of each training; by default derived from `seconds`.
        tokens: tokens of each training, as an alternative to `steps` for `hw.study_texts`.
        trials: learning rates tried for each setting; by default as many as `seconds` allows (3 to 8), or 3 without
            a time limit.
        seeds: trainings of each setting with its best learning rate; these are compared.

    Raises:
        InputError: a number is not positive; no limit is set; both `steps` and `tokens` are set.
    """

    seconds: float | None = None
    steps: int | None = None
    tokens: int | None = None
    trials: int | None = None
    seeds: int = 3

    def __post_init__(self) -> None:
        if self.seconds is None and self.steps is None and self.tokens is None:
            raise InputError("budget", expected="seconds, or the steps or tokens of each training", got="none of them")
        if self.steps is not None and self.tokens is not None:
            raise InputError("tokens", expected="steps or tokens, not both", got=f"{self.steps} and {self.tokens}")
        if self.seconds is not None:
            finite_number("seconds", self.seconds, above=0.0)
        for name in ("steps", "tokens", "trials", "seeds"):
            if (number := getattr(self, name)) is not None:
                whole_number(name, number, least=1)

    @property
    def max_trials(self) -> int:
        """Largest number of learning rates to try for each head setting: `trials` or, by default, 8 with a time limit
        and 3 without.
        """
        return self.trials or (MIN_TRIALS if self.seconds is None else MAX_TRIALS)

    def in_steps(self, tokens_per_step: int) -> "StudyBudget":
        """Return this budget with the training length in steps instead of tokens, rounded up; a step is a batch of
        `tokens_per_step` tokens.
        """
        if self.tokens is None:
            return self
        return replace(self, tokens=None, steps=-(-self.tokens // tokens_per_step))
