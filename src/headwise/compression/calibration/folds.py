"""Folds: parts of the calibration data, for cross-validation. A fit is judged on the fold that it was not made on.

Neighbouring tokens of a text have similar inputs. A projection that is fitted to few texts can learn what is peculiar
to each of them, so that its error on these texts is much smaller than that on others. Folds therefore consist of whole
sequences.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

from headwise.compression.calibration.output_moments import OutputMoments
from headwise.data.batches import count_sequences_and_tokens
from headwise.errors import InputError

FOLDS = 4
"""Number of folds; as many as sequences if there are fewer."""


def folds_of(batches: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the fold of each sequence of each batch. Consecutive sequences, which may be parts of one document, are in
    the same fold as far as possible.

    Raises:
        InputError: there is one sequence alone.
    """
    numbers = [count_sequences_and_tokens(batch)[0] for batch in batches]
    total = sum(numbers)
    if total < 2:
        remedy = "use several texts, or parts of a text"
        raise InputError("calibration", expected="at least 2 sequences", got=total, remedy=remedy)
    folds = iter(number * min(FOLDS, total) // total for number in range(total))
    return [[next(folds) for _ in range(number)] for number in numbers]


class FoldedMoments:
    """Moments of an output projection in each fold.

    Args:
        path: path of the projection, for errors.

    Attributes:
        folds: moments by fold.
    """

    def __init__(self, path: str) -> None:
        self.folds: dict[int, OutputMoments] = {}
        self._path = path

    def add(self, fold: int, moments: OutputMoments) -> None:
        """Add moments to those of a fold."""
        if moments.tokens:
            self.folds[fold] = self.folds[fold] + moments if fold in self.folds else moments

    def checked(self) -> "FoldedMoments":
        """Return these moments.

        Raises:
            InputError: the projection ran on no data, on padding alone or in one fold alone, or on numbers that are NaN
                or infinite.
        """
        expected = f"texts for which inputs and outputs of {self._path} are finite numbers"
        if not self.folds:
            raise InputError("calibration", expected=expected, got="padding alone")
        if any(not bool(each.xx.isfinite().all() and each.yx.isfinite().all()) for each in self.folds.values()):
            raise InputError("calibration", expected=expected, got="NaN or infinity")
        if len(self.folds) == 1:
            expected = f"at least 2 sequences or batches on which {self._path} runs"
            raise InputError("calibration", expected=expected, got="1", remedy="use more batches")
        return self

    @property
    def total(self) -> OutputMoments:
        """Moments of all folds."""
        return reduce(add, self.folds.values())

    def without(self, fold: int) -> OutputMoments:
        """Return the moments of all folds but one."""
        return reduce(add, (moments for number, moments in self.folds.items() if number != fold))
