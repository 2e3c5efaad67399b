"""Result of a study: a table with one row per setting, and the conclusions from it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from headwise.errors import InputError
from headwise.plots.canvas import LINE_COLOURS, axes_for, set_title, without_upper_frame
from headwise.plots.kinds import Kind, plot_kind
from headwise.runs.rows import MeanEstimate, Row
from headwise.runs.table import Table, require_statistic
from headwise.studies.conclusions import Recommendation, dominates, recommend, significant_difference
from headwise.studies.space import Setting
from headwise.studies.trials import FinishedTrial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FRONTIER, OTHERS = "#0072b2", "0.6"
"""Colours of settings on the Pareto frontier and of other settings in plots."""

LABELS = {"loss": "held-out loss"}
"""Labels in plots of statistics whose names are too short."""


@dataclass(frozen=True, kw_only=True, repr=False)
class SettingRow(Row):
    """Row of a study's table: one head setting, with mean and standard error of its held-out loss and other
    measurements over models that were trained with different seeds.

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
    """Table of a study's results, one row per head setting: held-out loss, milliseconds per training step and further
    measurements, each averaged over seeds. Its properties compute the smallest significant difference, the Pareto
    frontier and the recommendation.

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
        """Head setting that the caller of the study declared as the one in use, or None."""
        return None if self.metadata["baseline"] is None else Setting(*self.metadata["baseline"])

    @property
    def margin(self) -> float:
        """Smallest significant difference between the mean held-out losses of two settings; NaN with fewer than two
        settings or fewer than two seeds.
        """
        return significant_difference(self.losses)

    @property
    def frontier(self) -> tuple[Setting, ...]:
        """Head settings on the Pareto frontier: those for which no other setting is at least as good in loss, time per
        step, decoding speed and cache size, and better in one of them.
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
        """Draw a measurement of every head setting, and return the matplotlib axes. Notebooks display these;
        `ax.figure.savefig("x.svg")` saves the plot as SVG, PDF or PNG.

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
        """Draw a statistic against the number of heads, with a dot for each seed and lines through the means. One line
        joins the settings with the same heads x head_dim if that is the same for all settings, otherwise those with the
        same head_dim. Each number of shared key/value heads has a line of its own.
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
        """Draw a statistic against the time per training step: a point for each setting with its standard errors and
        its name, blue if it is on the Pareto frontier.
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
        """Return the rows that have a value of a statistic.

        Raises:
            InputError: the study has no such statistic, or no setting has a value of it.
        """
        require_statistic(statistic, self.statistics)
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
    """Return the table of a study, with one row per head setting: the loss and other measurements of its final
    trainings (with its best learning rate, one for each seed), averaged over seeds. Every trial is also listed in the
    table's metadata.

    Args:
        trials: learning-rate trials and final trainings.
        settings: settings of the rows, in order; one without final trainings has an empty row.
        parameters: number of parameters of a model, by setting name.
        metadata: title, fingerprint and number of steps, stored with the table.
        seeds: number of final trainings that each setting should have.
        baseline: setting in use.
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
