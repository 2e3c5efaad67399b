"""What a study shows: which settings differ by more than the spread over seeds, and which are worth their cost."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from headwise.errors import InputError, require
from headwise.runs.rows import MeanEstimate, Row
from headwise.runs.table import Table
from headwise.studies.space import Setting
from headwise.studies.study_plot import draw
from headwise.studies.trial_store import Done

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONFIDENCE = 0.95
"""That no two settings are told apart which do not differ."""

LESS_IS_BETTER = ("loss", "step_ms", "cache_bytes")
MORE_IS_BETTER = ("decode_tokens_s",)
"""Statistics by which a setting may be worth having."""

TIMED = ("step_ms", "decode_tokens_s")
"""Those of them that are measured by the clock: as good where they differ by no more than their errors allow."""


@dataclass(frozen=True, kw_only=True)
class SettingRow(Row):
    """One setting, and what was measured of the models that were trained with it, one a seed."""

    num_heads: int
    head_dim: int
    num_kv_heads: int

    @property
    def setting(self) -> Setting:
        """As it was compared."""
        return Setting(self.num_heads, self.head_dim, self.num_kv_heads)

    @property
    def name(self) -> str:
        """Of the setting."""
        return self.setting.name


@dataclass(frozen=True)
class Recommendation:
    """What a study comes to.

    Attributes:
        setting: the one to take; None where there is nothing to choose by.
        alike: those that are not told from the one of least loss, itself among them.
        margin: the least difference in loss that can be told, nats; NaN of one seed.
        sentence: all that, to read.
    """

    setting: Setting | None
    alike: tuple[Setting, ...]
    margin: float
    sentence: str


class Study(Table[SettingRow]):
    """One row a setting: held-out loss, training loss, time of a step and what else was measured, over seeds.

    Losses are in the units of the loss; `step_ms` in milliseconds. `metadata["runs"]` has every training by itself.
    """

    NAME: ClassVar[str] = "study"
    ROW_TYPE: ClassVar[type[Any]] = SettingRow

    @property
    def losses(self) -> dict[Setting, dict[int, float]]:
        """The held-out loss of each setting, by seed."""
        found: dict[Setting, dict[int, float]] = {row.setting: {} for row in self.rows}
        for run in self.metadata["runs"]:
            found[Setting(*run["setting"])][run["seed"]] = run["loss"]
        return found

    @property
    def baseline(self) -> Setting | None:
        """The setting that is in use."""
        return None if self.metadata["baseline"] is None else Setting(*self.metadata["baseline"])

    @property
    def margin(self) -> float:
        """The least difference between the mean losses of two settings that can be told; NaN of fewer than two."""
        return margin(self.losses)

    @property
    def frontier(self) -> tuple[Setting, ...]:
        """Settings that no other beats: as good in everything by which one may choose, and better in something."""
        rows = [row for row in self.rows if row.statistics["loss"].n]
        return tuple(row.setting for row in rows if not any(beats(other, row) for other in rows))

    @property
    def recommendation(self) -> Recommendation:
        """The setting to take, where the spread over seeds allows to say so."""
        return recommended(self)

    def row(self, setting: Setting) -> SettingRow:
        """Of one setting. `InputError` where it was not compared."""
        for row in self.rows:
            if row.setting == setting:
                return row
        raise InputError("setting", expected=f"one of {', '.join(row.name for row in self.rows)}", got=str(setting))

    def plot(self) -> "Figure":
        """A matplotlib figure: loss against heads, each seed a point; loss against the time of a step.

        Raises:
            MissingExtra: matplotlib is not installed.
        """
        return draw(self)


def collected(
    done: Sequence[Done],
    settings: Sequence[Setting],
    parameters: Mapping[str, int],
    metadata: Mapping[str, Any],
    seeds: int,
    baseline: Setting | None,
) -> Study:
    """The table of what was trained."""
    finals = [each for each in done if each.job.final]
    runs = [
        {
            "setting": [each.job.setting.num_heads, each.job.setting.head_dim, each.job.setting.num_kv_heads],
            "seed": each.job.number,
            "rate": each.rate,
            "loss": each.loss,
            **each.measured,
        }
        for each in finals
    ]
    names = [name for name in dict.fromkeys(name for each in finals for name in each.measured) if name != "seconds"]
    rows = []
    for setting in settings:
        here = [each for each in finals if each.job.setting == setting]
        measured = {"loss": MeanEstimate.of(each.loss for each in here)}
        measured |= {name: MeanEstimate.of(each.measured[name] for each in here) for name in names}
        measured |= {
            "parameters": MeanEstimate(float(parameters[setting.name]), 0.0, len(here)),
            "rate": MeanEstimate.of({each.rate for each in here}),
        }
        rows.append(SettingRow(**vars(setting), statistics=measured))
    tried = [
        {"setting": each.job.setting.name, "rate": each.rate, "loss": each.loss, "pruned": each.pruned}
        for each in done
        if not each.job.final
    ]
    used = None if baseline is None else list(vars(baseline).values())
    return Study(tuple(rows), {**metadata, "seeds": seeds, "baseline": used, "runs": runs, "search": tried})


def comparable(losses: Mapping[Setting, Mapping[int, float]]) -> dict[Setting, list[float]]:
    """The losses of settings that never diverged, of the seeds that all of them have, in one order."""
    kept = {setting: runs for setting, runs in losses.items() if runs and all(map(math.isfinite, runs.values()))}
    seeds = sorted(set.intersection(*(set(runs) for runs in kept.values()))) if kept else []
    return {setting: [runs[seed] for seed in seeds] for setting, runs in kept.items()}


def margin(losses: Mapping[Setting, Mapping[int, float]]) -> float:
    """The least difference of two means that is more than chance, by Tukey's range test over seeds as blocks.

    All settings of a seed have seen the same batches in the same order: what a seed does to all of them is taken out.
    `q sqrt(MSE / seeds)`, q of the studentized range for k settings and (k - 1)(seeds - 1) degrees of freedom, MSE the
    mean square of what neither setting nor seed explains (Tukey 1949).
    """
    table = list(comparable(losses).values())
    k, n = len(table), len(table[0]) if table else 0
    if k < 2 or n < 2:
        return math.nan
    of_setting = [sum(row) / n for row in table]
    of_seed = [sum(column) / k for column in zip(*table, strict=True)]
    whole = sum(of_setting) / k
    squares = sum((table[i][j] - of_setting[i] - of_seed[j] + whole) ** 2 for i in range(k) for j in range(n))
    degrees = (k - 1) * (n - 1)
    q = float(require_scipy().studentized_range.ppf(CONFIDENCE, k, degrees))
    return q * math.sqrt(squares / degrees / n)


def beats(one: SettingRow, other: SettingRow) -> bool:
    """Whether `one` is as good as `other` in everything by which one may choose, and better in something."""
    better = False
    for name in (*LESS_IS_BETTER, *MORE_IS_BETTER):
        if name not in one.statistics or name not in other.statistics:
            continue
        a, b = one.statistics[name], other.statistics[name]
        gain = (b.value - a.value) * (1 if name in LESS_IS_BETTER else -1)
        room = 2 * math.hypot(*(0.0 if math.isnan(each.sem) else each.sem for each in (a, b))) if name in TIMED else 0.0
        if gain < -room:
            return False
        better = better or gain > room
    return better


def recommended(study: Study) -> Recommendation:
    """The setting of least loss, the cheapest of those alike, or neither: see `Study.recommendation`."""
    compared, trained = comparable(study.losses), [setting for setting, runs in study.losses.items() if runs]
    # What diverged once is worse than anything.
    loss = {each: statistics.fmean(compared[each]) if compared.get(each) else math.inf for each in trained}
    settings, told = tuple(sorted(loss, key=loss.__getitem__)), study.margin
    if math.isnan(told):
        return Recommendation(None, settings, told, _undecided(trained, compared))
    alike = tuple(setting for setting in settings if loss[setting] - loss[settings[0]] <= told)
    others = ", ".join(setting.name for setting in alike if setting != study.baseline)
    if alike == settings:
        apart = loss[settings[-1]] - loss[settings[0]]
        sentence = f"no difference at this budget: losses are within {apart:.4f}, and {told:.4f} can be told"
    elif study.baseline in alike and not others:
        sentence = f"keep {study.baseline}: no other setting is as good at this budget"
    elif study.baseline in alike:
        used = f"{study.baseline}, which is in use,"
        sentence = f"no difference at this budget between {used} and {others}: {told:.4f} can be told"
    else:
        chosen = min(alike, key=lambda each: (study.row(each).statistics["step_ms"].value, loss[each]))
        among = f", the quickest to train of {others}, which show no difference at this budget" if alike[1:] else ""
        after = settings[len(alike)]
        behind = f"is {loss[after] - loss[settings[0]]:.4f} behind the best, where {told:.4f} can be told"
        return Recommendation(chosen, alike, told, f"{chosen}{among}: the next, {after}, {behind}")
    return Recommendation(None, alike, told, sentence)


def _undecided(trained: Sequence[Setting], compared: Mapping[Setting, Sequence[float]]) -> str:
    """Why nothing can be told."""
    if len(trained) < 2:
        return "nothing to compare: fewer than two settings were trained to the end"
    if len(compared) < 2:
        names = ", ".join(setting.name for setting in trained if setting not in compared)
        return f"undecided: the loss of {names} was not finite, and fewer than two settings are left"
    return "undecided: of one seed there is no spread; two or more (--seeds, seeds=) can decide"


def require_scipy() -> Any:
    """Import and return `scipy.stats`, the distributions of SciPy."""
    return require("scipy.stats", purpose="a study", extra="study")
