"""Scalars of an observed training step, for the dashboards of training libraries.

A model may have a thousand heads, so only some heads have scalars of their own. Each layer has summaries.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

from headwise.checks import collection_of, head_pair, is_whole, whole_number
from headwise.errors import InputError
from headwise.monitoring.alarms import Alarm
from headwise.monitoring.history import History, Row, head_of

MOST_ALARMS = 32
"""Largest number of alarms of a step whose statistics are logged."""

LogHeads = int | Collection[tuple[int, int]]
"""Number of heads for each statistic, or the heads `(layer, head)`."""


def heads_to_log(log_heads: Any) -> int | tuple[tuple[int, int], ...]:
    """Return the argument `log_heads` of a callback, checked."""
    if isinstance(log_heads, int):
        return whole_number("log_heads", log_heads, least=0)
    heads = collection_of("log_heads", log_heads, of="heads (layer, head), or their number")
    pairs = tuple(head_pair("log_heads", head, of="a collection of (layer, head)") for head in heads)
    for pair in pairs:
        if not all(is_whole(number, 0) for number in pair):
            raise InputError("log_heads", expected="heads (layer, head) with whole numbers from 0", got=repr(pair))
    return pairs


def step_scalars(
    history: History, step: int, alarms: Sequence[Alarm], log_heads: int | tuple[tuple[int, int], ...]
) -> dict[str, float]:
    """Return the scalars of an observed step by name.

    - `heads/<layer>/<statistic>_mean`, `_min` and `_max`: over the heads of a layer with a finite value.
    - `heads/<layer>/<statistic>_nonfinite`: number of heads of a layer without one, if there are some.
    - `heads/<layer>.<head>/<statistic>`: value of one head.
    - `heads/alarms`: number of alarms.

    Args:
        history: history of the training.
        step: number of the step.
        alarms: alarms of the step. The statistics of the first 32 alarms are logged.
        log_heads: number of heads that are logged for each statistic, those that changed most since the first observed
            step; or the heads whose statistics are all logged.
    """
    rows = history.rows(step)
    scalars: dict[str, float] = {"heads/alarms": float(len(alarms))}
    of_layers: dict[int, list[Row]] = {}
    for row in rows:
        of_layers.setdefault(row["layer"], []).append(row)
    for layer, members in sorted(of_layers.items()):
        for statistic in history.statistics:
            scalars |= _summaries(f"heads/{layer}/{statistic}", [row[statistic] for row in members if statistic in row])
    values = {(row["layer"], row["head"]): row for row in rows}
    alarmed = [(alarm.layer, alarm.head, alarm.statistic) for alarm in alarms[:MOST_ALARMS]]
    for layer, head, statistic in [*_chosen(history, step, log_heads), *alarmed]:
        value = values.get((layer, head), {}).get(statistic)
        if value is not None:
            scalars[f"heads/{layer}.{head}/{statistic}"] = float(value)
    return scalars


def _summaries(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return mean, smallest and largest of the finite values of one layer, and the number of other values, by name."""
    finite = [value for value in values if math.isfinite(value)]
    summaries = {}
    if finite:
        mean = math.fsum(finite) / len(finite)
        summaries = {f"{name}_mean": mean, f"{name}_min": min(finite), f"{name}_max": max(finite)}
    if len(finite) < len(values):
        summaries[f"{name}_nonfinite"] = float(len(values) - len(finite))
    return summaries


def _chosen(history: History, step: int, log_heads: int | tuple[tuple[int, int], ...]) -> list[tuple[int, int, str]]:
    """Return layer, head and statistic of the scalars that `log_heads` states."""
    if not isinstance(log_heads, int):
        return [(layer, head, statistic) for layer, head in log_heads for statistic in history.statistics]
    first = history.steps[0]
    if step == first:
        return []
    before = {head_of(row): row for row in history.rows(first)}
    chosen = []
    for statistic in history.statistics:
        changes = []
        for row in history.rows(step):
            change = abs(row.get(statistic, math.nan) - before.get(head_of(row), {}).get(statistic, math.nan))
            if change > 0:  # False for NaN
                changes.append((-change, row["layer"], row["head"]))
        chosen += [(layer, head, statistic) for _, layer, head in sorted(changes)[:log_heads]]
    return chosen
