"""Trainings in a terminal, and as rows: a study with its settings and conclusions, and the state of a monitored one."""

import math
from collections import Counter
from typing import Any

from rich.console import Console
from rich.text import Text

from headwise.monitoring.alarms import AlarmLimits
from headwise.monitoring.history import IDENTIFIERS, History
from headwise.runs.rows import NO_ESTIMATE
from headwise.show.records import Records
from headwise.show.tables import plain_table, print_table, print_title
from headwise.studies.study_result import SettingRow, Study
from headwise.wording import UNKNOWN, counted, number

FEW_TRIALS = 3
"""With fewer learning rates than this, a setting may have been trained with an unsuitable one."""

COLUMNS = {
    "loss": ("loss", 4),
    "train_loss": ("training loss", 4),
    "accuracy": ("accuracy", 3),
    "step_ms": ("ms per step", 1),
    "decode_tokens_s": ("decoded tokens/s", 0),
    "cache_bytes": ("cache bytes/token", 0),
}
"""Statistics that are shown, each with the title and the decimals of its column."""


def print_study(study: Study, console: Console) -> None:
    """Print the head settings of a study with the Pareto frontier marked, what limited the study, and the
    recommendation.
    """
    metadata = study.metadata
    seeds = max((row.statistics["loss"].n for row in study.rows), default=0)
    settings, steps = counted(len(study.rows), "setting"), counted(metadata["steps"], "step")
    print_title(console, f"{metadata['model']['name']}: {settings}, {counted(seeds, 'seed')}, {steps} each")
    frontier = study.frontier
    names = [name for name in COLUMNS if any(name in row.statistics for row in study.rows)]

    def cells(row: SettingRow) -> list[str]:
        values = [row.statistics.get(name, NO_ESTIMATE).text(f"z,.{COLUMNS[name][1]}f") for name in names]
        rate, parameters = row.statistics["rate"].value, row.statistics["parameters"].value
        name = f"{row.name} (baseline)" if row.setting == study.baseline else row.name
        mark = "frontier" if row.setting in frontier else ""
        return [name, *values, number(rate, ".2g"), number(parameters, ",.0f"), mark]

    columns = ("heads", *(COLUMNS[name][0] for name in names), "learning rate", "parameters", "")
    print_table(console, columns, map(cells, study.rows))
    console.print(
        "\nloss: on held-out data, ± standard error over seeds\n"
        "frontier: no other setting is as good in loss, time per step, decoding and cache, and better in one of them",
        style="dim",
        soft_wrap=True,
    )
    if metadata["left_out"]:
        console.print(Text(f"left out: {'; '.join(metadata['left_out'])}", style="dim"), soft_wrap=True)
    trials = Counter(trial["setting"] for trial in metadata["search"])
    if few := [f"{name} ({count})" for name, count in trials.items() if count < FEW_TRIALS]:
        console.print(f"fewer than {FEW_TRIALS} learning rates were tried for {', '.join(few)}")
    if incomplete := [row.name for row in study.rows if row.statistics["loss"].n < metadata["seeds"]]:
        planned = counted(metadata["seeds"], "seed")
        console.print(f"the time limit ended the study: fewer than {planned} for {', '.join(incomplete)}")
    console.print()
    console.print(Text(study.recommendation.sentence, style="bold"), soft_wrap=True)


MOST_NAMED = 5
"""Largest number of heads that are named for a kind of alarm."""


def print_history(history: History, limits: AlarmLimits, console: Console, changed: int) -> None:
    """Print the state of a training: each statistic in the last step, the heads that changed most (`changed` per
    statistic), and the alarms.
    """
    first, last = history.steps[0], history.steps[-1]
    rows = history.rows(last)
    model = str(history.settings.get("model", "model"))
    observed = f"{counted(len(history.steps), 'observed step')}, the last is {last}"
    print_title(console, f"{model}: {counted(len(rows), 'head')}, {observed}")
    shown = plain_table("", "smallest", "median", "largest", left=("",), gap=2)
    if last > first and changed:
        shown.add_column(f"largest changes since step {first}", overflow="fold")
    for statistic in history.statistics:
        values = sorted(
            (row[statistic], row["layer"], row["head"]) for row in rows if math.isfinite(row.get(statistic, math.nan))
        )
        places = [values[0], values[(len(values) - 1) // 2], values[-1]] if values else []
        cells = [f"{number(value, 'z.4g')} ({layer}.{head})" for value, layer, head in places] or [UNKNOWN] * 3
        changes = history.changes(statistic)[:changed] if last > first else []
        moved = ", ".join(f"{layer}.{head} {number(change, '+.3g')}" for layer, head, change in changes)
        shown.add_row(statistic, *cells, *([moved] if last > first and changed else []))
    console.print()
    console.print(shown)
    console.print()
    alarms = list(limits.alarms(rows))
    kinds = []
    for kind, count in Counter(alarm.kind for alarm in alarms).most_common():
        heads = [f"{alarm.layer}.{alarm.head}" for alarm in alarms if alarm.kind == kind]
        more = ", ..." if count > MOST_NAMED else ""
        kinds.append(f"{count:,} {kind} ({', '.join(heads[:MOST_NAMED])}{more})")
    line = f"alarms in step {last}: {', '.join(kinds)}" if kinds else f"no alarms in step {last}"
    console.print(Text(line), soft_wrap=True)


def history_records(history: History, limits: AlarmLimits) -> Records:
    """Return one row per head for the last step of a training, with the changes since the first step. The metadata has
    the steps and alarms.
    """
    last = history.steps[-1]
    names = history.statistics
    changes: dict[tuple[str, int, int], float] = {}
    if len(history.steps) > 1:
        changes = {(name, layer, head): each for name in names for layer, head, each in history.changes(name)}
    rows = []
    for row in history.rows(last):
        record: dict[str, Any] = {name: row[name] for name in IDENTIFIERS}
        for name in names:
            record |= {name: row.get(name), f"{name}_change": changes.get((name, row["layer"], row["head"]))}
        rows.append(record)
    alarms = [alarm._asdict() for alarm in limits.alarms(history.rows(last))]
    return Records(rows, {**history.settings, "steps": history.steps, "alarms": alarms})
