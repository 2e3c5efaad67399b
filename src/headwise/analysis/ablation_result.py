"""Result of an ablation: the loss without each head, or without each set of heads, and the ablation effect."""

import json
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headwise.checks import require_one_of, whole_number
from headwise.errors import InputError, require
from headwise.plots.kinds import Kind, plot_kind
from headwise.plots.points import PlottedNumbers, draw_ranking, standard_errors
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import HeadRow, MeanEstimate, Row
from headwise.runs.table import RowT, Table
from headwise.statistics.columns import Column
from headwise.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes


TRIMMED = 0.2
"""Share of the documents that the trimmed mean leaves out at each end (Wilcox 2012, section 3.2.2)."""

OUTLIER_SCORE = 3.5
"""Modified z-score above which a document is an outlier (Iglewicz and Hoaglin 1993, section 3.3)."""

PURPOSE = "robust summaries"


@dataclass(frozen=True)
class DocumentEffects:
    """Effect of each ablation (loss without some heads, minus the loss of the unchanged model) on each document of the
    data. A document can be split into several sequences; the effect on the document is then the mean over its
    sequences.

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
        """Return the effect of each ablation (loss without some heads, minus the unchanged loss) on each document.
        `baseline` has the loss of each sequence in the unchanged model. `ablated` has, for each ablation, the loss of
        each sequence without the ablated heads. `documents` has the document of each sequence. Sequences whose
        unchanged loss is NaN are left out.
        """
        members: dict[Any, list[int]] = {}
        for index, document in enumerate(range(len(baseline)) if documents is None else documents):
            if not math.isnan(baseline[index]):
                members.setdefault(document, []).append(index)
        members = dict(sorted(members.items()))

        def means(values: Sequence[float]) -> tuple[float, ...]:
            """Return the mean of `values` (one number per sequence) over the sequences of each document."""
            return tuple(math.fsum(values[index] for index in own) / len(own) for own in members.values())

        effects = ([loss - unchanged for loss, unchanged in zip(losses, baseline, strict=True)] for losses in ablated)
        sequences = tuple(map(len, members.values()))
        return DocumentEffects(tuple(members), sequences, means(baseline), tuple(map(means, effects)))


def modified_z(effects: Sequence[float]) -> list[float]:
    """Return the modified z-score of each effect (Iglewicz and Hoaglin 1993, section 3.3): its difference from the
    median, divided by a robust estimate of the standard deviation. The estimate is the median absolute deviation
    divided by 0.6745. If more than half of the effects are equal, it is the mean absolute deviation times the square
    root of pi / 2. The scores are 0 if all effects are equal.
    """
    numpy, stats = (require(package, purpose=PURPOSE, extra="tables") for package in ("numpy", "scipy.stats"))
    distances = numpy.asarray(effects) - numpy.median(effects)
    deviation = float(stats.median_abs_deviation(effects, scale="normal"))
    if deviation == 0.0:
        deviation = math.sqrt(math.pi / 2) * float(numpy.abs(distances).mean())
    return [0.0] * len(effects) if deviation == 0.0 else (distances / deviation).tolist()


@dataclass(frozen=True, repr=False)
class _AblationTable(Table[RowT]):
    """Base class of tables of ablation effects. Each row has the loss of the model without one head or set of heads,
    and this loss minus the loss of the unchanged model.

    Attributes:
        by_document: the effect on each document; None in tables of older versions of headwise.
    """

    by_document: DocumentEffects | None = None

    NAME = "ablation"
    SAMPLES = "example"
    COLUMNS = (
        Column("loss", "Mean loss of the model without the head."),
        Column("cost", "Mean loss without the head, minus the mean loss with it.", is_signed=True, is_tested=True),
    )

    @property
    def baseline(self) -> MeanEstimate:
        """Mean loss of the unchanged model, with its standard error and the number of examples. The losses after
        ablation are compared with it.
        """
        return MeanEstimate(**self.metadata["baseline"])

    @property
    def is_distance(self) -> bool:
        """True if the loss measures a distance from the unchanged model: 0 for each example in that model, and never
        below 0. Ablation effects then cannot be negative, and cannot be tested against 0.
        """
        return bool(self.metadata.get("measured", {}).get("is_distance"))

    def column(self, name: str) -> Column:
        """Return the description of one statistic (column) of the table. If the loss is a distance from the unchanged
        model, the description of the ablation effect `cost` states that it has no significance test.
        """
        return replace(super().column(name), is_tested=name == "cost" and not self.is_distance)

    def summaries(self) -> dict[str, list[Any]]:
        """Return three columns that summarise the effects of each ablation on single documents: the median, a trimmed
        mean, and the number of outliers. They show whether a mean effect comes from a few documents alone.

            cost_median     median of the effects on documents
            cost_trimmed    their mean without the 20 % lowest and the 20 % highest (scipy.stats.trim_mean)
            cost_outliers   number of documents farther from the median than 3.5 times the median absolute deviation
                            divided by 0.6745 (Iglewicz and Hoaglin 1993)

        The effect on a document is the mean over its sequences. There are no such columns in a table of an older
        version of headwise.

        Raises:
            MissingExtra: scipy is not installed.
        """
        if self.by_document is None:
            return {}
        numpy, stats = (require(package, purpose=PURPOSE, extra="tables") for package in ("numpy", "scipy.stats"))
        effects = self.by_document.effects
        return {
            "cost_median": [float(numpy.median(row)) for row in effects],
            "cost_trimmed": [float(stats.trim_mean(row, TRIMMED)) for row in effects],
            "cost_outliers": [sum(abs(score) > OUTLIER_SCORE for score in modified_z(row)) for row in effects],
        }

    def robust(self) -> Any:
        """Return the mean ablation effect of each head or set of heads, with its standard error, as a pandas DataFrame.
        Three further columns describe effects on single documents (see `summaries`). Rows are sorted by the median
        effect over documents, largest first.

        Raises:
            InputError: the table has no effects of single documents.
            MissingExtra: pandas or scipy is not installed.

        Example:
            >>> hw.ablate(model, texts, hw.next_token_loss).robust().head(10)  # doctest: +SKIP
        """
        self._effects_by_document()
        means = self._data_frame(lambda estimate: estimate.value).drop(columns="loss")
        errors = [row.statistics["cost"].sem for row in self.rows]
        found = means.assign(cost_sem=errors, **self.summaries())
        return found.sort_values("cost_median", ascending=False, kind="stable", ignore_index=True)

    def effects(self) -> Any:
        """Return the effect of each ablation on each document as a pandas DataFrame. It has one row per document, with
        the document's number in the data as index. It has one column per set of heads, or per head ("3.5" for head 5 of
        layer 3). The effect on a document is the mean over its sequences. The attribute `by_document` of this table has
        the number of sequences and the unchanged loss of each document.

        Raises:
            InputError: the table has no effects of single documents.
            MissingExtra: pandas is not installed.

        Example:
            >>> hw.ablate(model, texts, hw.next_token_loss).effects()["0.7"].nlargest(3)  # doctest: +SKIP
        """
        pandas = require("pandas", purpose="a table", extra="tables")
        found = self._effects_by_document()
        rows: Sequence[Any] = self.rows  # of heads or sets, all with names
        columns = {row.name: effects for row, effects in zip(rows, found.effects, strict=True)}
        return pandas.DataFrame(columns, index=pandas.Index(found.documents, name="document"))

    def outliers(self) -> Any:
        """Return a pandas DataFrame with one row for each pair of an ablated head (or set) and a document on which its
        ablation effect is an outlier. Columns are those that identify the head or set, the number of the `document` in
        the data, the `effect` on it, the `median` effect over all documents, and the `score`. The score is the effect
        minus the median, in units of the median absolute deviation divided by 0.6745. Outliers have a score above 3.5
        or below -3.5 (Iglewicz and Hoaglin 1993, section 3.3). The effects farthest from their median come first.

        Raises:
            InputError: the table has no effects of single documents.
            MissingExtra: pandas or scipy is not installed.

        Example:
            >>> hw.ablate(model, texts, hw.next_token_loss).outliers()  # doctest: +SKIP
        """
        pandas = require("pandas", purpose="a table", extra="tables")
        by_document = self._effects_by_document()
        medians = self.summaries()["cost_median"]
        found = [
            {**row.identifiers, "document": document, "effect": effect, "median": median, "score": score}
            for row, effects, median in zip(self.rows, by_document.effects, medians, strict=True)
            for document, effect, score in zip(by_document.documents, effects, modified_z(effects), strict=True)
            if abs(score) > OUTLIER_SCORE
        ]
        found.sort(key=lambda outlier: -abs(outlier["effect"] - outlier["median"]))
        columns = [*self.ROW_TYPE.identifier_columns(), "document", "effect", "median", "score"]
        return pandas.DataFrame(found, columns=columns)

    def _effects_by_document(self) -> DocumentEffects:
        """Return the effect of each ablation on each document. Raise `InputError` if the table has no such effects,
        because an older version of headwise wrote it.
        """
        if self.by_document is None:
            got = "a table without them, as older versions of headwise wrote it"
            remedy = "measure again, with --force (force=True) in the same folder"
            raise InputError(self.NAME, expected="effects of single documents", got=got, remedy=remedy)
        return self.by_document

    def _samples(self) -> tuple[list[Any], str] | None:
        if (found := self.by_document) is None:
            return None
        shared = {"documents": found.documents, "sequences": found.sequences, "losses": found.losses}
        return [list(effects) for effects in found.effects], json.dumps(shared)

    @classmethod
    def _from_samples(cls, lists: list[Any], shared: str) -> dict[str, Any]:
        parts = json.loads(shared)
        documents, sequences, losses = (tuple(parts[name]) for name in ("documents", "sequences", "losses"))
        return {"by_document": DocumentEffects(documents, sequences, losses, tuple(map(tuple, lists)))}


class Ablation(_AblationTable[HeadRow], HeadTable[HeadRow]):
    """Table of the ablation effect of each head, one row per head. Its columns are `loss`, the mean loss of the model
    without the head, and `cost`, that loss minus the mean loss of the unchanged model.

    With L the loss of an example and g_h the gate of head h, 1 in the unchanged model, the columns are

        loss   mean of L(g_h = 0) over examples
        cost   mean of L(g_h = 0) - L(g_h = 1) over examples, paired by example

    each with its standard error over examples and their number (leave-one-out: Michel, Levy and Neubig 2019, section
    3.2). `summaries` has medians and trimmed means over documents, `tests` has p-values, `effects` the effect on each
    document, and `outliers` the documents with outlying effects. Both columns are in units of the loss; nats for
    `next_token_loss`. A positive cost means that the model is worse without the head. Effects do not add up: the cost
    of a set of heads can differ much from the sum of their costs.
    """

    PLOTTED = "cost"


@dataclass(frozen=True, kw_only=True, repr=False)
class HeadSet(Row):
    """Row of a table of ablation effects, for a named set of heads that were ablated together. It has the loss of the
    model without these heads, and this loss minus the loss of the unchanged model.

    Attributes:
        name: name of the set.
        heads: each head as "layer.head", zero-based.
    """

    name: str
    heads: list[str]

    def _described(self) -> list[str]:
        return [repr(self.name), counted(len(self.heads), "head")]


class SetAblation(_AblationTable[HeadSet]):
    """Table of the ablation effects of layers, key/value groups or named sets of heads, one row per set of heads that
    were ablated together.

    The columns are `loss`, the mean loss without the heads of the set, and `cost`, that loss minus the unchanged
    model's, as for single heads in `Ablation`.
    """

    ROW_TYPE = HeadSet
    UNIT = "set"

    def plot(
        self,
        statistic: str | None = None,
        *,
        kind: str = "ranking",
        errors: float | None = None,
        top: int | None = None,
        ax: Any = None,
    ) -> "Axes":
        """Draw the sets of heads in descending order of a statistic, with error bars, and return the matplotlib axes.

        Args:
            statistic: "cost" or "loss"; "cost" by default.
            kind: the kind of plot; there is only "ranking".
            errors: length of the error bars to each side, in standard errors; 1.96 by default.
            top: number of sets that are named if there are more than 40; 10 by default.
            ax: matplotlib axes to draw on; those of a new figure by default.

        Raises:
            InputError: the table has no such statistic or kind, or no number to draw.
            MissingExtra: matplotlib is not installed.

        Example:
            >>> hw.ablate(model, texts, hw.next_token_loss, units="layers").plot()  # doctest: +SKIP
        """
        kinds = {"ranking": Kind(self._draw_ranking, ("statistic", "errors", "top"))}
        return plot_kind(kinds, kind, ax, statistic=statistic, errors=errors, top=top)

    def _draw_ranking(self, statistic: Any = "cost", *, errors: Any = 1.96, top: Any = 10, ax: Any = None) -> "Axes":
        """Draw the sets of heads in descending order of one statistic, the ablation effect by default. `errors` is the
        length of the error bars in standard errors, and `top` the number of sets that are named.
        """
        if not self.rows:
            raise InputError("heads", expected="at least one set of heads to plot", got="none")
        name = require_one_of("statistic", statistic, self.rows[0].statistics)
        estimates = [row.statistics[name] for row in self.rows]
        numbers = PlottedNumbers(name, [each.value for each in estimates], [each.sem for each in estimates])
        options: dict[str, Any] = {"errors": standard_errors(errors), "top": whole_number("top", top, least=0)}
        names = [row.name for row in self.rows]
        return draw_ranking(numbers, names, title=self.model_name, noun="set", **options, ax=ax)
