"""Budget of a study: total time, length of each training, number of learning rates and seeds."""

from dataclasses import dataclass, replace

from headwise.checks import finite_number, whole_number
from headwise.errors import InputError

MIN_TRIALS, MAX_TRIALS = 3, 8
"""Learning rates tried for each setting when their number is not set: at least, and at most with a time limit."""


@dataclass(frozen=True)
class StudyBudget:
    """Limits of a study, which compares models with different head settings (numbers of heads and head dimension): the
    total time in seconds, the length of each training in batches or tokens, and the number of trainings. Each head
    setting is first trained with several learning rates, and then, with the best of these rates, once for each seed.

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
    def min_trials(self) -> int:
        """Number of learning rates per head setting that the time limit of a study must allow: `trials` if that is set,
        otherwise 3. A study with a shorter time limit raises `InputError`.
        """
        return self.trials or MIN_TRIALS

    @property
    def max_trials(self) -> int:
        """Largest number of learning rates tried for each head setting: `trials` if it is set, otherwise 8 with a time
        limit and 3 without one.
        """
        return self.trials or (MIN_TRIALS if self.seconds is None else MAX_TRIALS)

    def in_steps(self, tokens_per_step: int) -> "StudyBudget":
        """Return this budget with `tokens`, the length of each training in tokens, converted to `steps` (batches of
        `tokens_per_step` tokens), rounded up. If `tokens` is None, return the budget unchanged.
        """
        if self.tokens is None:
            return self
        return replace(self, tokens=None, steps=-(-self.tokens // tokens_per_step))
