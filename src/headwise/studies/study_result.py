"""Result of a study: a table with one row per setting, and the conclusions from the losses: significant differences,
Pareto frontier and recommendation.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from headwise.checks import require_one_of
from headwise.errors import InputError, require
from headwise.plots.canvas import LINE_COLOURS, axes_for, set_title, without_upper_frame
from headwise.plots.kinds import Kind, plot_kind
from headwise.runs.rows import MeanEstimate, Row
from headwise.runs.table import Table
from headwise.studies.space import Setting
from headwise.studies.trials import FinishedTrial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONFIDENCE = 0.95
"""Probability that no two settings with equal expected losses are found to be significantly different."""

LOWER_IS_BETTER = ("loss", "step_ms", "cache_bytes")
HIGHER_IS_BETTER = ("decode_tokens_s",)
"""Statistics that decide which settings are on the Pareto frontier."""

TIMINGS = ("step_ms", "decode_tokens_s")
"""Statistics measured by the clock: they count as equal if they differ by less than two standard errors."""

Losses = Mapping[Setting, Mapping[int, float]]
"""Held-out loss of each final training, by setting and seed."""


@dataclass(frozen=True)
class Recommendation:
    """Conclusion of a study: the recommended head setting (numbers of heads and head dimension) or None, with the
    reason in a sentence. It also has the head settings whose mean held-out loss does not differ significantly from the
    lowest, and the smallest significant difference between two mean losses.

    Attributes:
        setting: recommended setting; None if no setting is significantly better than the alternatives.
        equivalent: settings whose loss does not differ significantly from the lowest loss, lowest first.
        margin: smallest significant difference between two mean losses, in nats; NaN with fewer than two seeds.
        sentence: the recommendation and its reason in one sentence.
    """

    setting: Setting | None
    equivalent: tuple[Setting, ...]
    margin: float
    sentence: str


def comparable(losses: Losses) -> dict[Setting, list[float]]:
    """Return, for each head setting, its held-out losses in the order of the seeds, for a paired comparison. Settings
    without a loss, or with a loss that is not finite, are left out. Only the seeds for which all remaining settings
    have a loss are used.
    """
    finite = {setting: runs for setting, runs in losses.items() if runs and all(map(math.isfinite, runs.values()))}
    seeds = sorted(set.intersection(*(set(runs) for runs in finite.values()))) if finite else []
    return {setting: [runs[seed] for seed in seeds] for setting, runs in finite.items()}


def significant_difference(losses: Losses) -> float:
    """Return the smallest difference between the mean losses of two settings that is significant (at 95 %), by Tukey's
    range test with seeds as blocks; NaN with fewer than two settings or fewer than two seeds.

    All settings of a seed are trained on the same batches in the same order, so the effect that a seed has on all
    settings is removed. The difference is `q sqrt(MSE / seeds)`, with q of the studentized range for k settings and (k
    - 1)(seeds - 1) degrees of freedom, and MSE the mean square of the residuals of setting and seed (Tukey 1949).
    """
    table = list(comparable(losses).values())
    k, n = len(table), len(table[0]) if table else 0
    if k < 2 or n < 2:
        return math.nan
    setting_means = [sum(row) / n for row in table]
    seed_means = [sum(column) / k for column in zip(*table, strict=True)]
    grand_mean = sum(setting_means) / k
    squares = sum(
        (table[i][j] - setting_means[i] - seed_means[j] + grand_mean) ** 2 for i in range(k) for j in range(n)
    )
    degrees = (k - 1) * (n - 1)
    stats = require("scipy.stats", purpose="a study", extra="study")
    q = float(stats.studentized_range.ppf(CONFIDENCE, k, degrees))
    return q * math.sqrt(squares / degrees / n)


def dominates(one: Mapping[str, MeanEstimate], other: Mapping[str, MeanEstimate]) -> bool:
    """Return True if a head setting with the statistics `one` dominates a head setting with the statistics `other`: it
    is at least as good in loss, time per step, decoding speed and cache size, and better in one of them. Times and
    speeds count as equal within two standard errors of their difference. A statistic that one of the settings lacks is
    ignored.
    """
    better = False
    for name in (*LOWER_IS_BETTER, *HIGHER_IS_BETTER):
        if name not in one or name not in other:
            continue
        a, b = one[name], other[name]
        gain = (b.value - a.value) * (1 if name in LOWER_IS_BETTER else -1)
        errors = [0.0 if math.isnan(measured.sem) else measured.sem for measured in (a, b)]
        tolerance = 2 * math.hypot(*errors) if name in TIMINGS else 0.0
        if gain < -tolerance:
            return False
        better = better or gain > tolerance
    return better


def recommend(losses: Losses, step_ms: Mapping[Setting, float], baseline: Setting | None) -> Recommendation:
    """Return the recommendation of a study, from held-out losses and milliseconds per training step. Candidates are the
    settings whose mean loss is not significantly higher than the lowest; the one that trains fastest is recommended. No
    setting is recommended if all settings or the `baseline` are candidates, or if the losses allow no significance
    test.
    """
    compared, trained = comparable(losses), [setting for setting, runs in losses.items() if runs]
    # A setting that diverged once is worse than every other.
    mean = {setting: statistics.fmean(compared[setting]) if compared.get(setting) else math.inf for setting in trained}
    settings, margin = tuple(sorted(mean, key=mean.__getitem__)), significant_difference(losses)
    if math.isnan(margin):
        sentence = "undecided: one seed shows no variation; use two or more (--seeds, seeds=)"
        if len(trained) < 2:
            sentence = "nothing to compare: fewer than two settings were trained to the end"
        elif len(compared) < 2:
            names = ", ".join(setting.name for setting in trained if setting not in compared)
            sentence = f"undecided: the loss of {names} was not finite, and fewer than two settings are left"
        return Recommendation(None, settings, margin, sentence)
    equivalent = tuple(setting for setting in settings if mean[setting] - mean[settings[0]] <= margin)
    others = ", ".join(setting.name for setting in equivalent if setting != baseline)
    significant = f"differences above {margin:.4f} are significant"
    if equivalent == settings:
        spread = mean[settings[-1]] - mean[settings[0]]
        sentence = f"no significant difference at this budget: mean losses differ by up to {spread:.4f}; {significant}"
    elif baseline in equivalent and not others:
        sentence = f"keep {baseline}: every other setting is significantly worse at this budget"
    elif baseline in equivalent:
        sentence = f"no significant difference at this budget between {baseline}, the baseline, and {others}"
        sentence += f"; {significant}"
    else:
        chosen = min(equivalent, key=lambda setting: (step_ms[setting], mean[setting]))
        among = f", the fastest to train of {others}, which do not differ significantly" if equivalent[1:] else ""
        following = settings[len(equivalent)]
        behind = f"the next, {following}, is {mean[following] - mean[settings[0]]:.4f} worse than the best"
        return Recommendation(chosen, equivalent, margin, f"{chosen}{among}: {behind}; {significant}")
    return Recommendation(None, equivalent, margin, sentence)


FRONTIER, OTHERS = "#0072b2", "0.6"
"""Colours of settings on the Pareto frontier and of other settings in plots."""

LABELS = {"loss": "held-out loss"}
"""Labels in plots of statistics whose names are too short."""


@dataclass(frozen=True, kw_only=True, repr=False)
class SettingRow(Row):
    """Row of a study's table: one head setting (numbers of heads and head dimension), with mean and standard error of
    its held-out loss and other measurements over models that were trained with different seeds.

    Attributes:
        num_heads: number of query heads.
        head_dim: number of features of each head's queries, keys and values.
        num_kv_heads: number of key/value heads.
    """

    num_heads: int
    head_dim: int
    num_kv_heads: int

    @property
    def setting(self) -> Setting:
        """Head setting of this row, as a `Setting`."""
        return Setting(self.num_heads, self.head_dim, self.num_kv_heads)

    @property
    def name(self) -> str:
        """Short name of the row's head setting: `HEADSxHEAD_DIM`, such as 8x64, or 8x64/2 if the 8 query heads share 2
        key/value heads.
        """
        return self.setting.name

    def _described(self) -> list[str]:
        return [self.name]


class Study(Table[SettingRow]):
    """Table of a study's results, one row per head setting (numbers of heads and head dimension): held-out loss,
    milliseconds per training step and further measurements, each averaged over seeds. Its properties compute the
    smallest significant difference, the Pareto frontier and the recommendation.

    Losses are in the units of the loss, `step_ms` in milliseconds. `metadata["runs"]` lists every final training, and
    `metadata["search"]` every learning-rate trial.
    """

    NAME: ClassVar[str] = "study"
    ROW_TYPE: ClassVar[type[Any]] = SettingRow
    UNIT: ClassVar[str] = "setting"
    SAMPLES: ClassVar[str] = "seed"

    @property
    def losses(self) -> dict[Setting, dict[int, float]]:
        """Held-out loss of each final training (with the best learning rate of its setting), by setting and then by
        seed.
        """
        losses: dict[Setting, dict[int, float]] = {row.setting: {} for row in self.rows}
        for run in self.metadata["runs"]:
            losses[Setting(*run["setting"])][run["seed"]] = run["loss"]
        return losses

    @property
    def baseline(self) -> Setting | None:
        """Head setting that the caller of the study stated as the one in use now, to which others are compared; None if
        there is none.
        """
        return None if self.metadata["baseline"] is None else Setting(*self.metadata["baseline"])

    @property
    def margin(self) -> float:
        """Smallest significant difference between the mean held-out losses of two settings; NaN with fewer than two
        settings or fewer than two seeds.
        """
        return significant_difference(self.losses)

    @property
    def frontier(self) -> tuple[Setting, ...]:
        """Head settings on the Pareto frontier. A setting is on it if no other setting is at least as good in loss,
        time per step, decoding speed and cache size, and better in one of them.
        """
        rows = [row for row in self.rows if row.statistics["loss"].n]
        return tuple(
            row.setting for row in rows if not any(dominates(other.statistics, row.statistics) for other in rows)
        )

    @property
    def recommendation(self) -> Recommendation:
        """Recommended head setting with the reason, computed from held-out losses and training times. No setting is
        recommended (the attribute `setting` is None) in three cases: the losses allow no significance test, no
        difference is significant, or the loss of the baseline is not significantly higher than the lowest.
        """
        step_ms = {row.setting: row.statistics["step_ms"].value for row in self.rows if "step_ms" in row.statistics}
        return recommend(self.losses, step_ms, self.baseline)

    def row(self, setting: Setting) -> SettingRow:
        """Return the table row of `setting`, or raise `InputError` if this head setting was not compared."""
        for row in self.rows:
            if row.setting == setting:
                return row
        raise InputError("setting", expected=f"one of {', '.join(row.name for row in self.rows)}", got=str(setting))

    def plot(self, statistic: str | None = None, *, kind: str = "heads", ax: Any = None) -> "Axes":
        """Draw one statistic of every head setting, such as the held-out loss, and return the matplotlib axes.
        Notebooks display these; `ax.figure.savefig("x.svg")` saves the plot as SVG, PDF or PNG.

        | kind    | plot                                                                                       |
        | ------- | ------------------------------------------------------------------------------------------ |
        | "heads" | `statistic` against the number of heads, with one dot per seed and lines through the means |
        | "time"  | `statistic` against time per training step, with standard errors; blue: Pareto frontier    |

        Args:
            statistic: name of a statistic of the table; "loss", the held-out loss, by default.
            kind: the kind of plot.
            ax: matplotlib axes to draw on; those of a new figure by default, which pyplot does not keep in memory.

        Raises:
            InputError: the study has no such statistic or kind, or no setting has a value of it.
            MissingExtra: matplotlib is not installed.

        Example:
            >>> hw.Study.load("study").plot(kind="time").figure.savefig("time.pdf")  # doctest: +SKIP
        """
        kinds = {"heads": Kind(self._draw_by_heads, ("statistic",)), "time": Kind(self._draw_by_time, ("statistic",))}
        return plot_kind(kinds, kind, ax, statistic=statistic)

    def _draw_by_heads(self, statistic: Any = "loss", *, ax: Any = None) -> "Axes":
        """Draw a statistic against the number of heads, with a dot for each seed and lines through the means. If heads
        x head_dim is the same for all settings, one line joins all; otherwise, a line joins settings with the same
        head_dim. Settings with shared key/value heads have a separate line for each number of key/value heads.
        """
        rows = self._rows_with(statistic)
        axes = axes_for(ax, 5.0, 3.8)
        is_one_width = len({row.num_heads * row.head_dim for row in self.rows}) == 1
        lines: dict[str, list[SettingRow]] = {}
        for row in rows:
            width = row.num_heads * row.head_dim
            label = f"heads x head_dim = {width}" if is_one_width else f"head_dim {row.head_dim}"
            shared = "" if row.num_kv_heads == row.num_heads else f", {row.num_kv_heads} key/value heads"
            lines.setdefault(label + shared, []).append(row)
        for index, (label, members) in enumerate(lines.items()):
            heads, means = [row.num_heads for row in members], [row.statistics[statistic].value for row in members]
            colour = LINE_COLOURS[index % len(LINE_COLOURS)]
            axes.plot(heads, means, marker="_", markersize=12, label=label, color=colour)
            for row in members:
                runs = [run for run in self.metadata["runs"] if Setting(*run["setting"]) == row.setting]
                of_seeds = [run[statistic] for run in runs if math.isfinite(run.get(statistic, math.nan))]
                axes.plot([row.num_heads] * len(of_seeds), of_seeds, ".", color=colour, alpha=0.6)
        counts = sorted({row.num_heads for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.set(xlabel="heads", ylabel=LABELS.get(statistic, statistic))
        without_upper_frame(axes)
        if len(lines) > 1:
            axes.legend(fontsize=8, frameon=False)
        set_title(axes, self.model_name, "one point per seed")
        return axes

    def _draw_by_time(self, statistic: Any = "loss", *, ax: Any = None) -> "Axes":
        """Draw a statistic of each head setting against its time per training step. Settings on the Pareto frontier,
        which no other setting dominates, are blue.
        """
        rows = self._rows_with(statistic)
        axes, frontier = axes_for(ax, 5.0, 3.8), self.frontier
        for row in rows:
            x, y = row.statistics["step_ms"], row.statistics[statistic]
            xerr, yerr = (0.0 if math.isnan(measured.sem) else measured.sem for measured in (x, y))
            colour = FRONTIER if row.setting in frontier else OTHERS
            axes.errorbar(x.value, y.value, xerr=xerr, yerr=yerr, fmt="o", color=colour, capsize=2)
            axes.annotate(row.name, (x.value, y.value), textcoords="offset points", xytext=(5, 4), fontsize=8)
        axes.set(xlabel="time per step, ms", ylabel=LABELS.get(statistic, statistic))
        without_upper_frame(axes)
        set_title(axes, self.model_name, "Pareto frontier blue, bars: ±1 standard error")
        return axes

    def _rows_with(self, statistic: Any) -> list[SettingRow]:
        """Return the rows of the head settings for which a statistic was measured. Raise `InputError` if there are
        none.
        """
        require_one_of("statistic", statistic, self.statistics)
        rows = [row for row in self.rows if row.statistics[statistic].n]
        if not rows:
            raise InputError("statistic", expected="a statistic that some setting has", got=repr(statistic))
        return rows


def collect_results(
    trials: Sequence[FinishedTrial],
    settings: Sequence[Setting],
    parameters: Mapping[str, int],
    metadata: Mapping[str, Any],
    seeds: int,
    baseline: Setting | None,
) -> Study:
    """Return the table of a study from its trials (trainings). Each head setting has one row: loss and other
    measurements of its final trainings, averaged over `seeds` seeds. Every trial is also listed in the metadata.
    `parameters` has the number of parameters of a model by setting name.
    """
    finals = [trial for trial in trials if trial.key.final]
    runs = [
        {
            "setting": list(vars(trial.key.setting).values()),
            "seed": trial.key.number,
            "rate": trial.rate,
            "loss": trial.loss,
            **trial.measured,
        }
        for trial in finals
    ]
    names = [name for name in dict.fromkeys(name for trial in finals for name in trial.measured) if name != "seconds"]
    rows = []
    for setting in settings:
        of_setting = [trial for trial in finals if trial.key.setting == setting]
        statistics = {"loss": MeanEstimate.of(trial.loss for trial in of_setting)}
        statistics |= {name: MeanEstimate.of(trial.measured[name] for trial in of_setting) for name in names}
        statistics |= {
            "parameters": MeanEstimate(float(parameters[setting.name]), 0.0, len(of_setting), 0.0),
            "rate": MeanEstimate.of({trial.rate for trial in of_setting}),
        }
        rows.append(SettingRow(**vars(setting), statistics=statistics))
    search = [
        {"setting": trial.key.setting.name, "rate": trial.rate, "loss": trial.loss, "pruned": trial.pruned}
        for trial in trials
        if not trial.key.final
    ]
    in_use = None if baseline is None else list(vars(baseline).values())
    return Study(tuple(rows), {**metadata, "seeds": seeds, "baseline": in_use, "runs": runs, "search": search})
