"""Folds: parts of the calibration data, for cross-validation. A fit is judged on the fold that it was not made on.

Neighbouring tokens of a text have similar inputs. A projection that is fitted to few texts can learn what is peculiar
to each of them, so that its error on these texts is much smaller than that on others. Folds therefore consist of whole
documents, or of whole sequences if documents are unknown.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import accumulate, islice
from operator import add
from typing import Any

from torch import Tensor

from headwise.compression.calibration.output_moments import OutputMoments
from headwise.data.batches import count_sequences_and_tokens
from headwise.errors import InputError

FOLDS = 4
"""Largest number of folds."""


def folds_of(batches: Sequence[Mapping[str, Any]], documents: Sequence[int] | None = None) -> list[list[int]]:
    """Return the fold of each sequence of each batch. Folds have similar numbers of tokens. All sequences of a document
    are in the same fold, unless one document has more than half of the tokens.

    Args:
        batches: arguments of the model.
        documents: number of the document of each sequence; None if it is unknown. Then consecutive sequences, which may
            be parts of one document, are in the same fold.

    Raises:
        InputError: there is one sequence alone.
    """
    numbers = [count_sequences_and_tokens(batch)[0] for batch in batches]
    lengths = [length for batch in batches for length in _lengths(batch)]
    if len(lengths) < 2:
        remedy = "use several texts, or parts of a text"
        raise InputError("calibration", expected="at least 2 sequences", got=len(lengths), remedy=remedy)
    tokens_of: Counter[int] = Counter()
    for document, length in zip(documents or [], lengths, strict=False):
        tokens_of[document] += length
    if documents is None or max(tokens_of.values()) > sum(lengths) / 2:
        folds = iter(_consecutive(lengths))
    else:
        fold_of = _balanced(tokens_of)
        folds = iter([fold_of[document] for document in documents])
    return [list(islice(folds, number)) for number in numbers]


def _lengths(batch: Mapping[str, Any]) -> list[int]:
    """Return the number of tokens of each sequence of a batch, at least 1."""
    sequences, tokens = count_sequences_and_tokens(batch)
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return [max(1, number) for number in mask.sum(1).tolist()]
    return [max(1, tokens // max(1, sequences))] * sequences


def _consecutive(lengths: Sequence[int]) -> list[int]:
    """Return the fold of each sequence, so that folds are consecutive sequences; at least two folds."""
    total, number = sum(lengths), min(FOLDS, len(lengths))
    middles = [start + length / 2 for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False)]
    folds = [int(number * middle / total) for middle in middles]
    return folds if len(set(folds)) > 1 else [0] + [1] * (len(lengths) - 1)


def _balanced(tokens_of: Mapping[int, int]) -> dict[int, int]:
    """Return the fold of each document: from the longest one on, each goes to the fold with the fewest tokens."""
    sizes = [0] * min(FOLDS, len(tokens_of))
    fold_of = {}
    for document in sorted(tokens_of, key=lambda each: (-tokens_of[each], each)):
        fold_of[document] = sizes.index(min(sizes))
        sizes[fold_of[document]] += tokens_of[document]
    return fold_of


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
        if moments.mass:
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
