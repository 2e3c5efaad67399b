"""What a study shows: which settings differ by more than the spread over seeds, and which are worth their cost."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from headwise.errors import InputError, MissingExtra
from headwise.heads.table import Measured, Row, Table
from headwise.studies.ledger import Done
from headwise.studies.picture import draw
from headwise.studies.settings import Setting

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

    Losses are in the units of the loss; `step_ms` in milliseconds. `about["runs"]` has every training by itself.
    """

    NAME: ClassVar[str] = "study"
    ROW: ClassVar[type[Any]] = SettingRow

    @property
    def losses(self) -> dict[Setting, dict[int, float]]:
        """The held-out loss of each setting, by seed."""
        found: dict[Setting, dict[int, float]] = {row.setting: {} for row in self.rows}
        for run in self.about["runs"]:
            found[Setting(*run["setting"])][run["seed"]] = run["loss"]
        return found

    @property
    def baseline(self) -> Setting | None:
        """The setting that is in use."""
        return None if self.about["baseline"] is None else Setting(*self.about["baseline"])

    @property
    def margin(self) -> float:
        """The least difference between the mean losses of two settings that can be told; NaN of fewer than two."""
        return margin(self.losses)

    @property
    def frontier(self) -> tuple[Setting, ...]:
        """Settings that no other beats: as good in everything by which one may choose, and better in something."""
        return tuple(row.setting for row in self.rows if not any(beats(other, row) for other in self.rows))

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
    about: Mapping[str, Any],
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
    rows = []
    for setting in settings:
        here = [each for each in finals if each.job.setting == setting]
        values: dict[str, list[float]] = {"loss": [each.loss for each in here]}
        for each in here:
            for name, value in each.measured.items():
                values.setdefault(name, []).append(value)
        values.pop("seconds", None)
        statistics = {name: Measured.of(numbers) for name, numbers in values.items()}
        statistics |= {
            "parameters": Measured(float(parameters[setting.name]), 0.0, len(here)),
            "rate": Measured.of({each.rate for each in here}),
        }
        rows.append(SettingRow(**vars(setting), statistics=statistics))
    tried = [
        {"setting": each.job.setting.name, "rate": each.rate, "loss": each.loss, "pruned": each.pruned}
        for each in done
        if not each.job.final
    ]
    used = None if baseline is None else list(vars(baseline).values())
    return Study(tuple(rows), {**about, "seeds": seeds, "baseline": used, "runs": runs, "search": tried})


def margin(losses: Mapping[Setting, Mapping[int, float]]) -> float:
    """The least difference of two means that is more than chance, by Tukey's range test over seeds as blocks.

    All settings of a seed have seen the same batches in the same order: what a seed does to all of them is taken out.
    `q sqrt(MSE / seeds)`, q of the studentized range for k settings and (k - 1)(seeds - 1) degrees of freedom, MSE the
    mean square of what neither setting nor seed explains (Tukey 1949).
    """
    kept = {setting: runs for setting, runs in losses.items() if runs and all(map(math.isfinite, runs.values()))}
    seeds = sorted(set.intersection(*(set(runs) for runs in kept.values()))) if kept else []
    k, n = len(kept), len(seeds)
    if k < 2 or n < 2:
        return math.nan
    table = [[runs[seed] for seed in seeds] for runs in kept.values()]
    of_setting = [sum(row) / n for row in table]
    of_seed = [sum(column) / k for column in zip(*table, strict=True)]
    whole = sum(of_setting) / k
    squares = sum((table[i][j] - of_setting[i] - of_seed[j] + whole) ** 2 for i in range(k) for j in range(n))
    degrees = (k - 1) * (n - 1)
    q = float(require_scipy().stats.studentized_range.ppf(CONFIDENCE, k, degrees))
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
    rows = sorted((row for row in study.rows if not math.isnan(_loss(row))), key=_loss)
    told, settings = study.margin, tuple(row.setting for row in rows)
    if len(rows) < 2:
        sentence = "nothing to compare: fewer than two settings were trained to the end"
        return Recommendation(None, settings, told, sentence)
    if math.isnan(told):
        sentence = "undecided: of one seed there is no spread; two or more (--seeds, seeds=) can decide"
        return Recommendation(None, settings, told, sentence)
    alike = [row for row in rows if _loss(row) - _loss(rows[0]) <= told]
    used = study.baseline
    if used in settings[: len(alike)] or len(alike) == len(rows):
        return Recommendation(None, settings[: len(alike)], told, _no_difference(rows, alike, used, told))
    chosen = min(alike, key=lambda row: (row.statistics["step_ms"].value, _loss(row)))
    gap, names = _loss(rows[len(alike)]) - _loss(rows[0]), ", ".join(row.name for row in alike)
    among = f", the quickest to train of {names}, which show no difference at this budget" if len(alike) > 1 else ""
    behind = f"the next, {rows[len(alike)].name}, is {gap:.4f} behind the best, where {told:.4f} can be told"
    return Recommendation(chosen.setting, settings[: len(alike)], told, f"{chosen.name}{among}: {behind}")


def _no_difference(rows: list[SettingRow], alike: list[SettingRow], used: Setting | None, told: float) -> str:
    """Why nothing is recommended."""
    others = ", ".join(row.name for row in alike if row.setting != used)
    if len(alike) == len(rows):
        apart = _loss(rows[-1]) - _loss(rows[0])
        return f"no difference at this budget: losses are within {apart:.4f}, and {told:.4f} can be told"
    if not others:
        return f"keep {used}: no other setting is as good at this budget"
    return f"no difference at this budget between {used}, which is in use, and {others}: {told:.4f} can be told"


def _loss(row: SettingRow) -> float:
    return row.statistics["loss"].value


def require_scipy() -> Any:
    """The library with its distributions, or a sentence that says how to install it."""
    try:
        import scipy.stats
    except ImportError as error:
        raise MissingExtra("scipy", extra="study", purpose="a study") from error
    return scipy
