"""Ablation effects of single documents, with summaries that a few outlying documents cannot change much."""

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwise.errors import require

TRIMMED = 0.2
"""Share of the documents that the trimmed mean leaves out at each end (Wilcox 2012, section 3.2.2)."""

OUTLIER_SCORE = 3.5
"""Modified z-score above which a document is an outlier (Iglewicz and Hoaglin 1993, section 3.3)."""

PURPOSE = "robust summaries"


@dataclass(frozen=True)
class DocumentEffects:
    """Effect of each ablation on each document: the mean of the effects over the document's sequences.

    Attributes:
        documents: number of each document, in the order of the data. Without known documents, each sequence is one.
        sequences: number of sequences of each document that have a loss.
        losses: mean loss of each document in the unchanged model.
        effects: for each row of the table, the effect on each document.
    """

    documents: tuple[int, ...]
    sequences: tuple[int, ...]
    losses: tuple[float, ...]
    effects: tuple[tuple[float, ...], ...]

    @staticmethod
    def of(
        baseline: Sequence[float], ablated: Sequence[Sequence[float]], documents: Sequence[Hashable] | None
    ) -> "DocumentEffects":
        """Return the effects from the losses of sequences. Sequences whose loss is NaN are left out.

        Args:
            baseline: loss of each sequence in the unchanged model.
            ablated: for each row, the loss of each sequence without its heads.
            documents: number of the document of each sequence; by default each sequence is a document.
        """
        members: dict[Any, list[int]] = {}
        for index, document in enumerate(range(len(baseline)) if documents is None else documents):
            if not math.isnan(baseline[index]):
                members.setdefault(document, []).append(index)
        members = dict(sorted(members.items()))
        return DocumentEffects(
            tuple(members),
            tuple(map(len, members.values())),
            tuple(_mean(baseline[index] for index in indices) for indices in members.values()),
            tuple(
                tuple(_mean(losses[index] - baseline[index] for index in indices) for indices in members.values())
                for losses in ablated
            ),
        )

    def summaries(self, name: str) -> dict[str, list[Any]]:
        """Return three columns with one number per row: `name_median`, `name_trimmed` and `name_outliers`.

        Raises:
            MissingExtra: scipy is not installed.
        """
        numpy, stats = require("numpy", purpose=PURPOSE, extra="tables"), require_stats()
        return {
            f"{name}_median": [float(numpy.median(row)) for row in self.effects],
            f"{name}_trimmed": [float(stats.trim_mean(row, TRIMMED)) for row in self.effects],
            f"{name}_outliers": [sum(abs(score) > OUTLIER_SCORE for score in modified_z(row)) for row in self.effects],
        }

    def to_json(self) -> str:
        """Return what all rows share, as JSON: the documents, their numbers of sequences, and their losses."""
        return json.dumps({"documents": self.documents, "sequences": self.sequences, "losses": self.losses})

    @staticmethod
    def from_json(shared: str | bytes, effects: Sequence[Sequence[float]]) -> "DocumentEffects":
        """Return effects of documents, as `to_json` stores them.

        Args:
            shared: JSON text with the documents, their numbers of sequences and their losses.
            effects: effect on each document of each row of the table, such as each head.
        """
        parts: Mapping[str, Any] = json.loads(shared)
        documents, sequences, losses = (tuple(parts[name]) for name in ("documents", "sequences", "losses"))
        return DocumentEffects(documents, sequences, losses, tuple(tuple(row) for row in effects))


def modified_z(effects: Sequence[float]) -> list[float]:
    """Return the modified z-score of each effect: its distance from the median in units of the median absolute
    deviation, which is divided by 0.6745 to be the standard deviation of normal values (Iglewicz and Hoaglin 1993,
    section 3.3). If more than half of the effects are equal, that deviation is 0, and the mean absolute deviation,
    times the square root of pi / 2, takes its place. The scores are 0 if all effects are equal.

    Raises:
        MissingExtra: scipy is not installed.
    """
    numpy, stats = require("numpy", purpose=PURPOSE, extra="tables"), require_stats()
    distances = numpy.asarray(effects) - numpy.median(effects)
    deviation = float(stats.median_abs_deviation(effects, scale="normal"))
    if deviation == 0.0:
        deviation = math.sqrt(math.pi / 2) * float(numpy.abs(distances).mean())
    return [0.0] * len(effects) if deviation == 0.0 else (distances / deviation).tolist()


def require_stats() -> Any:
    """Return the module `scipy.stats`; raise `MissingExtra` if scipy is not installed."""
    return require("scipy.stats", purpose=PURPOSE, extra="tables")


def _mean(values: Any) -> float:
    """Return the mean of numbers, of which there is at least one."""
    numbers = list(values)
    return math.fsum(numbers) / len(numbers)
