"""Result of `compression_report`: quantities of a dense and of a compressed model, as a table and a picture."""

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from headwise.checks import is_whole, require_one_of
from headwise.errors import require
from headwise.plots.before_after import draw_before_after
from headwise.runs.json_result import JsonResult, is_number, require_each
from headwise.runs.rows import MeanEstimate
from headwise.wording import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE, TIME, LOSS, AGREEMENT = "size", "time", "loss", "agreement"
"""Kinds of rows."""

UNITS = {SIZE: ("parameters", "bytes"), TIME: ("seconds",), LOSS: ("loss",), AGREEMENT: ("share", "cosine")}
"""Units of each kind."""

BYTES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0))
SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
COUNTS = (("billion", 1e9), ("million", 1e6), ("", 1.0))
"""Parts of units for display, the largest first."""


@dataclass(frozen=True)
class ReportRow:
    """Row of a compression report: one quantity, measured for the dense and for the compressed model. Unknown numbers
    are None.

    Attributes:
        quantity: name of the quantity.
        kind: "size", "time", "loss" or "agreement".
        unit: unit of `dense` and `compressed`: "parameters", "bytes", "seconds", "loss", "share" or "cosine".
        dense: of the dense model: a size, the median time, or the mean loss; None for an agreement.
        compressed: of the compressed model; the mean share or cosine of an agreement.
        change: of a size or a time, compressed / dense, for times the median ratio of paired runs; of a loss, the mean
            of compressed - dense over examples; None for an agreement.
        low, high: 95 % confidence interval of the change; of an agreement, that of `compressed`.
        dense_sem, compressed_sem, change_sem: standard errors of means, clustered by document.
        samples: number of rounds, examples or prompts; 1 for a size.
        documents: number of documents of the examples or prompts; None for sizes and times.
    """

    quantity: str
    kind: str
    unit: str
    dense: float | None
    compressed: float
    change: float | None
    low: float | None = None
    high: float | None = None
    dense_sem: float | None = None
    compressed_sem: float | None = None
    change_sem: float | None = None
    samples: int = 1
    documents: int | None = None

    @staticmethod
    def of_sizes(quantity: str, unit: str, dense: float | int, compressed: float | int) -> "ReportRow":
        """Return the report row of a size, such as a number of parameters or bytes, which has no error."""
        ratio = float(compressed / dense) if dense else None
        return ReportRow(quantity, SIZE, unit, float(dense), float(compressed), ratio)

    @staticmethod
    def of_times(quantity: str, dense: Sequence[float], compressed: Sequence[float]) -> "ReportRow":
        """Return the report row of a time, from the seconds that each model took in the same rounds of a measurement.
        The row has the median ratio of the compressed model's time to the dense model's time. Its confidence interval
        is that of the sign test (Conover 1999, section 3.2), which assumes no distribution and is exact for independent
        rounds.
        """
        ratios = [after / before for before, after in zip(dense, compressed, strict=True)]
        interval = _scipy_stats().quantile_test(ratios, q=1.0, p=0.5).confidence_interval(0.95)
        ends = _known(interval.low), _known(interval.high)
        medians = statistics.median(dense), statistics.median(compressed), statistics.median(ratios)
        return ReportRow(quantity, TIME, "seconds", *medians, *ends, samples=len(ratios))

    @staticmethod
    def of_losses(
        quantity: str, dense: Sequence[float], compressed: Sequence[float], documents: Sequence[Hashable]
    ) -> "ReportRow":
        """Return the report row of a loss, from the losses of the same examples under the dense and the compressed
        model. Standard errors are clustered by document.
        """
        differences = [after - before for before, after in zip(dense, compressed, strict=True)]
        before, after, change = (MeanEstimate.of(each, documents) for each in (dense, compressed, differences))
        low, high = _interval(change)
        means = before.value, after.value, change.value, low, high
        errors = _known(before.sem), _known(after.sem), _known(change.sem)
        samples = sum(not math.isnan(each) for each in differences)
        return ReportRow(quantity, LOSS, "loss", *means, *errors, samples=samples, documents=change.n)

    @staticmethod
    def of_agreement(quantity: str, unit: str, values: Sequence[float], documents: Sequence[Hashable]) -> "ReportRow":
        """Return the report row of a compressed model's agreement with the dense one, as the mean of a share or cosine
        per example. The standard error is clustered by document.
        """
        mean = MeanEstimate.of(values, documents)
        low, high = _interval(mean)
        least = 0.0 if unit == "share" else -1.0
        low, high = (None if each is None else min(max(each, least), 1.0) for each in (low, high))
        numbers = None, mean.value, None, low, high, None, _known(mean.sem)
        samples = sum(not math.isnan(each) for each in values)
        return ReportRow(quantity, AGREEMENT, unit, *numbers, samples=samples, documents=mean.n)

    def require_consistent(self) -> None:
        """Raise `InputError` if a field of this row has the wrong type or contradicts another one, such as an interval
        that does not contain its number.
        """
        is_agreement = self.kind == AGREEMENT
        center = self.compressed if is_agreement else self.change
        errors = self.dense_sem, self.compressed_sem, self.change_sem
        of = f"for {self.quantity}"
        require_each(
            "report",
            (
                (self.quantity, isinstance(self.quantity, str), "the name of a quantity"),
                (self.unit, self.unit in UNITS.get(self.kind, ()), f"a kind {self.kind!r} and its unit {of}"),
                (self.compressed, is_number(self.compressed), f"a number {of}"),
                (self.dense, self.dense is None if is_agreement else is_number(self.dense), f"a number {of}"),
                (self.change, self._has_change, f"the change from {self.dense} to {self.compressed} {of}"),
                (
                    (self.low, self.high),
                    _is_interval(self.low, self.high, center),
                    f"an interval around {center}, or null, {of}",
                ),
                (errors, all(each is None or is_number(each, 0.0) for each in errors), f"standard errors or null {of}"),
                (self.samples, is_whole(self.samples, 0), f"a number of samples {of}"),
                (self.documents, self.documents is None or is_whole(self.documents, 0), f"a number of documents {of}"),
            ),
        )

    @property
    def _has_change(self) -> bool:
        """True if the field `change` fits the other fields: None for an agreement, the ratio of both numbers for a
        size, and any number for a time or loss.
        """
        if self.kind == AGREEMENT:
            return self.change is None
        if self.kind == SIZE and is_number(self.dense) and is_number(self.compressed):
            return self.change == (self.compressed / self.dense if self.dense else None)
        return is_number(self.change)

    @property
    def is_faster(self) -> bool:
        """True if the compressed model is significantly faster: the 95 % interval of the ratio of times is below 1."""
        return self.high is not None and self.high < 1.0

    @property
    def change_text(self) -> str:
        """Change from the dense to the compressed model with its confidence interval, as text for display; empty for an
        agreement.
        """
        if self.change is None:
            return ""
        if self.kind != LOSS:
            return f"x {self.change:.3f}{self._interval_text('.3f')}"
        return f"{self.change:+.4f}{_error_text(self.change_sem, 4)}{self._interval_text('+.4f')}"

    @property
    def texts(self) -> tuple[str, str, str, str, str]:
        """Table cells of this row, as texts: quantity, value of the dense model, value of the compressed model, change,
        and number of samples.
        """
        if self.kind in (SIZE, TIME):
            assert self.dense is not None
            units = {"bytes": BYTES, "seconds": SECONDS}.get(self.unit, COUNTS)
            texts: list[str] = []
            for value in (self.dense, self.compressed):  # with the largest unit of which there is at least one
                name, size = next(((name, size) for name, size in units if value >= size), units[-1])
                number = value / size
                digits = f"{number:,.0f}" if number == round(number) or number >= 1000 else f"{number:.3g}"
                texts.append(f"{digits} {name}".strip())
            rounds = counted(self.samples, "round") if self.kind == TIME else ""
            return self.quantity, texts[0], texts[1], self.change_text, rounds
        samples = counted(self.samples, "prompt" if self.unit == "share" else "example")
        samples += f", {counted(self.documents or 0, 'document')}"
        if self.kind == LOSS:
            means = (self.dense, self.dense_sem), (self.compressed, self.compressed_sem)
            before, after = (f"{mean:.4f}{_error_text(sem, 4)}" for mean, sem in means)
            return self.quantity, before, after, self.change_text, samples
        style, error = ".4f", _error_text(self.compressed_sem, 4)
        if self.unit == "share":
            style, error = ".1%", _error_text(None if self.compressed_sem is None else 100 * self.compressed_sem, 1)
        return self.quantity, "", f"{self.compressed:{style}}{error}{self._interval_text(style)}", "", samples

    def _interval_text(self, style: str) -> str:
        """Confidence interval in brackets, as text for display; empty if the interval is unknown."""
        return "" if self.low is None or self.high is None else f" ({self.low:{style}} to {self.high:{style}})"


def _known(value: float) -> float | None:
    """Return a number as float, or None if it is NaN or infinite."""
    return float(value) if math.isfinite(value) else None


def _scipy_stats() -> Any:
    return require("scipy.stats", purpose="a compression report", extra="tables")


def _interval(mean: MeanEstimate) -> tuple[float | None, float | None]:
    """Return the 95 % confidence interval of a mean, by Student's t distribution. Return None for both ends if the
    standard error is unknown, or if too few degrees of freedom make the interval infinite.
    """
    if not math.isfinite(mean.sem):
        return None, None
    length = float(_scipy_stats().t.ppf(0.975, mean.df)) * mean.sem
    return (mean.value - length, mean.value + length) if math.isfinite(length) else (None, None)


def _is_interval(low: Any, high: Any, center: Any) -> bool:
    """Return True if `low` and `high` are the ends of an interval that contains `center`. Also return True if one or
    both are None.
    """
    if low is None or high is None:
        return all(each is None or is_number(each) for each in (low, high))
    if not all(map(is_number, (low, high, center))):
        return False
    rounding = 1e-6 * max(1.0, abs(center))  # a cosine of 1 may be computed as slightly more
    return bool(low <= high and low - rounding <= center <= high + rounding)


def _error_text(sem: float | None, decimals: int) -> str:
    """Return a standard error as text for display, such as " ± 0.01"; empty if it is None."""
    return "" if sem is None else f" ± {sem:.{decimals}f}"


@dataclass(frozen=True)
class CompressionReport(JsonResult):
    """Comparison of a dense and a compressed model: one row per quantity, such as a size, time or loss, measured in the
    same run.

    `print(report)` prints them as a table, with what was not measured and which times did not become shorter.

    Attributes:
        rows: the quantities.
        notes: statements about what was not measured, by name, and how numbers are to be read.
        metadata: models, data, versions and settings, as JSON-compatible values.
    """

    ARGUMENT, NOUN = "report", "a report of hw.compression_report"

    rows: tuple[ReportRow, ...]
    notes: tuple[str, ...]
    metadata: Mapping[str, Any]

    @property
    def warnings(self) -> tuple[str, ...]:
        """One sentence for each time that is not significantly shorter in the compressed model."""
        return tuple(
            f"no speed-up is shown for {row.quantity}: {row.change_text}"
            for row in self.rows
            if row.kind == TIME and not row.is_faster
        )

    def row(self, quantity: str) -> ReportRow:
        """Return the row of the quantity with the name `quantity`.

        Raises:
            InputError: there is no such row.
        """
        rows = {row.quantity: row for row in self.rows}
        require_one_of("quantity", quantity, rows)
        return rows[quantity]

    def __repr__(self) -> str:
        return f"CompressionReport({counted(len(self.rows), 'row')}, {counted(len(self.warnings), 'warning')})"

    def __str__(self) -> str:
        texts = [row.texts for row in self.rows]
        columns = ("", "dense", "compressed", "change", "")
        table = require("pandas", purpose="a table", extra="tables").DataFrame(texts, columns=columns)
        width = max((len(each[0]) for each in texts), default=0)
        left = {0: lambda text: text.ljust(width)}
        formatters = [left.get(index, str) for index in range(len(columns))]
        lines = [self._title, "", table.to_string(index=False, formatters=formatters)]
        lines += ["", *(f"note: {note}" for note in self.notes)] if self.notes else []
        lines += ["", *(f"warning: {warning}" for warning in self.warnings)] if self.warnings else []
        return "\n".join(lines)

    @property
    def _title(self) -> str:
        """Title of the report: names and data types of both models, and the device where they ran."""
        dense, compressed = self.metadata["dense"], self.metadata["compressed"]
        threads = f", {counted(self.metadata['threads'], 'thread')}" if dense["device"] == "cpu" else ""
        names, dtypes = (" and ".join(dict.fromkeys((dense[key], compressed[key]))) for key in ("name", "dtype"))
        return f"{names}: {dtypes} on {dense['device']}{threads}"

    def table(self) -> Any:
        """Return a pandas DataFrame with one row per quantity. The column `unit` states the unit of the numbers in a
        row.

        Raises:
            MissingExtra: pandas is not installed.
        """
        return require("pandas", purpose="a table", extra="tables").DataFrame([asdict(row) for row in self.rows])

    def plot(self) -> "Figure":
        """Draw each quantity of the compressed model relative to the dense model's, with confidence intervals, and
        return the matplotlib figure. Notebooks display it; `figure.savefig("report.svg")` saves it.

        Raises:
            MissingExtra: matplotlib is not installed.

        Example:
            >>> headwise.CompressionReport.load("report.json").plot().savefig("report.png")  # doctest: +SKIP
        """
        return draw_before_after(self.rows, title=self._title)

    def require_consistent(self) -> None:
        """Raise `InputError` if a field has the wrong type, two rows have the same quantity, or a row contradicts
        itself.
        """
        names = [row.quantity for row in self.rows]
        models, in_title = [self.metadata.get(name) for name in ("dense", "compressed")], ("name", "dtype", "device")
        stated = [each.get(key) if isinstance(each, Mapping) else None for each in models for key in in_title]
        require_each(
            self.ARGUMENT,
            (
                (names, len(set(names)) == len(names), "different quantities"),
                (self.notes, all(isinstance(note, str) for note in self.notes), "notes as texts"),
                (models, all(isinstance(each, str) for each in stated), f"{', '.join(in_title)} of both models"),
                (self.metadata.get("threads"), is_whole(self.metadata.get("threads"), 1), "a number of threads"),
            ),
        )
        for row in self.rows:
            row.require_consistent()
