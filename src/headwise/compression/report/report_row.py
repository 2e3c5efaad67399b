"""Rows of a compression report: a quantity of a dense and of a compressed model, and the change."""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from headwise.checks import is_whole
from headwise.compression.report.paired_times import PairedRatio
from headwise.errors import require
from headwise.runs.json_result import is_number, require_each
from headwise.runs.rows import MeanEstimate
from headwise.wording import counted

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
    """A quantity of a dense and of a compressed model. Numbers that are not known are None.

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
        """Return the row of a size, which is counted."""
        ratio = float(compressed / dense) if dense else None
        return ReportRow(quantity, SIZE, unit, float(dense), float(compressed), ratio)

    @staticmethod
    def of_times(quantity: str, times: PairedRatio) -> "ReportRow":
        """Return the row of a time."""
        return ReportRow(
            quantity,
            TIME,
            "seconds",
            times.dense,
            times.compressed,
            times.ratio,
            _known(times.low),
            _known(times.high),
            samples=times.rounds,
        )

    @staticmethod
    def of_losses(
        quantity: str, dense: Sequence[float], compressed: Sequence[float], documents: Sequence[Hashable]
    ) -> "ReportRow":
        """Return the row of a loss, from the losses of the same examples under both models."""
        differences = [after - before for before, after in zip(dense, compressed, strict=True)]
        before, after, change = (MeanEstimate.of(each, documents) for each in (dense, compressed, differences))
        low, high = _interval(change)
        means = before.value, after.value, change.value, low, high
        errors = _known(before.sem), _known(after.sem), _known(change.sem)
        return ReportRow(quantity, LOSS, "loss", *means, *errors, samples=_count(differences), documents=change.n)

    @staticmethod
    def of_agreement(quantity: str, unit: str, values: Sequence[float], documents: Sequence[Hashable]) -> "ReportRow":
        """Return the row of an agreement with the dense model, from the share or cosine of each example."""
        mean = MeanEstimate.of(values, documents)
        low, high = _interval(mean)
        least = 0.0 if unit == "share" else -1.0
        low, high = (None if each is None else min(max(each, least), 1.0) for each in (low, high))
        numbers = None, mean.value, None, low, high, None, _known(mean.sem)
        return ReportRow(quantity, AGREEMENT, unit, *numbers, samples=_count(values), documents=mean.n)

    def require_consistent(self) -> None:
        """Raise `InputError` unless values have their types and fit each other."""
        is_agreement = self.kind == AGREEMENT
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
                ((self.low, self.high), self._has_interval, f"an interval around {self._center}, or null, {of}"),
                (errors, all(each is None or is_number(each, 0.0) for each in errors), f"standard errors or null {of}"),
                (self.samples, is_whole(self.samples, 0), f"a number of samples {of}"),
                (self.documents, self.documents is None or is_whole(self.documents, 0), f"a number of documents {of}"),
            ),
        )

    @property
    def _has_change(self) -> bool:
        """True if the change is a number where there is one, and of a size the ratio of its two numbers."""
        if self.kind == AGREEMENT:
            return self.change is None
        if self.kind == SIZE and is_number(self.dense) and is_number(self.compressed):
            return self.change == (self.compressed / self.dense if self.dense else None)
        return is_number(self.change)

    @property
    def _center(self) -> float | None:
        """The number to which the interval belongs."""
        return self.compressed if self.kind == AGREEMENT else self.change

    @property
    def _has_interval(self) -> bool:
        """True if the interval is known and contains its number, or is unknown."""
        low, high, center = self.low, self.high, self._center
        if low is None or high is None:
            return all(each is None or is_number(each) for each in (low, high))
        if not (is_number(low) and is_number(high) and is_number(center)):
            return False
        assert center is not None
        rounding = 1e-6 * max(1.0, abs(center))  # a cosine of 1 may be computed as slightly more
        return low <= high and low - rounding <= center <= high + rounding

    @property
    def is_faster(self) -> bool:
        """True if the whole interval of a time's ratio is below 1."""
        return self.high is not None and self.high < 1.0

    @property
    def change_text(self) -> str:
        """The change with its interval, for display."""
        if self.change is None:
            return ""
        if self.kind != LOSS:
            return f"x {self.change:.3f}{self._interval_text('.3f')}"
        return f"{self.change:+.4f}{_error_text(self.change_sem, 4)}{self._interval_text('+.4f')}"

    @property
    def texts(self) -> tuple[str, str, str, str, str]:
        """Quantity, dense, compressed, change, and number of samples, for display."""
        if self.kind == AGREEMENT:
            if self.unit == "cosine":
                value = f"{self.compressed:.4f}{_error_text(self.compressed_sem, 4)}{self._interval_text('.4f')}"
            else:
                error = None if self.compressed_sem is None else 100 * self.compressed_sem
                value = f"{self.compressed:.1%}{_error_text(error, 1)}{self._interval_text('.1%')}"
            return self.quantity, "", value, "", self._samples_text
        if self.kind == LOSS:
            assert self.dense is not None
            before = f"{self.dense:.4f}{_error_text(self.dense_sem, 4)}"
            after = f"{self.compressed:.4f}{_error_text(self.compressed_sem, 4)}"
            return self.quantity, before, after, self.change_text, self._samples_text
        assert self.dense is not None
        units = {"bytes": BYTES, "seconds": SECONDS}.get(self.unit, COUNTS)
        before, after = (_with_unit(value, units) for value in (self.dense, self.compressed))
        return self.quantity, before, after, self.change_text, self._samples_text

    @property
    def _samples_text(self) -> str:
        """Number of samples, for display."""
        if self.kind == SIZE:
            return ""
        if self.kind == TIME:
            return counted(self.samples, "round")
        samples = counted(self.samples, "prompt" if self.unit == "share" else "example")
        return f"{samples}, {counted(self.documents or 0, 'document')}"

    def _interval_text(self, style: str) -> str:
        """The interval in brackets; empty if there is none."""
        return "" if self.low is None or self.high is None else f" ({self.low:{style}} to {self.high:{style}})"


def _known(value: float) -> float | None:
    """Return a number, or None if it is NaN or infinite."""
    return float(value) if math.isfinite(value) else None


def _count(values: Iterable[float]) -> int:
    """Return the number of values that are not NaN."""
    return sum(not math.isnan(value) for value in values)


def _interval(mean: MeanEstimate) -> tuple[float | None, float | None]:
    """Return the 95 % interval of a mean by Student's distribution; None if there is no standard error, or if one
    document has so large a share of the examples that the interval has no end.
    """
    if not math.isfinite(mean.sem):
        return None, None
    stats = require("scipy.stats", purpose="a compression report", extra="tables")
    length = float(stats.t.ppf(0.975, mean.df)) * mean.sem
    if not math.isfinite(length):
        return None, None
    return mean.value - length, mean.value + length


def _error_text(sem: float | None, decimals: int) -> str:
    """Return a standard error for display; empty if it is not known."""
    return "" if sem is None else f" ± {sem:.{decimals}f}"


def _with_unit(value: float, units: Sequence[tuple[str, float]]) -> str:
    """Return a number with the largest unit of which it has at least one, for display."""
    name, size = next(((name, size) for name, size in units if value >= size), units[-1])
    number = value / size
    digits = f"{number:,.0f}" if number == round(number) or number >= 1000 else f"{number:.3g}"
    return f"{digits} {name}".strip()
