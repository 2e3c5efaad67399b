"""A study on a terminal: every setting, what is on the frontier, and what to take."""

import math
from collections import Counter

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from headwise.runs.rows import NO_ESTIMATE, MeanEstimate
from headwise.studies.conclusions import SettingRow, Study

FEW = 3
"""Learning rates; with fewer a setting may have got one that does not suit it."""

COLUMNS = {
    "loss": ("loss", 4),
    "train_loss": ("training", 4),
    "accuracy": ("accuracy", 3),
    "step_ms": ("ms a step", 1),
    "decode_tokens_s": ("decoded a second", 0),
    "cache_bytes": ("cache bytes a token", 0),
}
"""Statistics that have a column of their own, with its head and digits."""


def print_study(study: Study, console: Console) -> None:
    """Print the table, the frontier and the recommendation."""
    metadata = study.metadata
    seeds = max((row.statistics["loss"].n for row in study.rows), default=0)
    title = (
        f"{metadata['model']['name']}: {len(study.rows)} settings, {_seeds(seeds)}, {metadata['steps']:,} steps each"
    )
    console.print(Text(title, style="bold"), soft_wrap=True)
    frontier = study.frontier
    shown = RichTable(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    names = [name for name in COLUMNS if any(name in row.statistics for row in study.rows)]
    for column in ("heads", *(COLUMNS[name][0] for name in names), "rate", "parameters", ""):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in study.rows:
        there = [_with_error(row.statistics.get(name, NO_ESTIMATE), COLUMNS[name][1]) for name in names]
        rate, size = row.statistics["rate"].value, row.statistics["parameters"].value
        mark = "frontier" if row.setting in frontier else ""
        shown.add_row(_name(study, row), *there, f"{rate:.2g}", f"{size:,.0f}", mark)
    console.print()
    console.print(shown)
    console.print(
        "\nloss on what was held out, ± the standard error over seeds; frontier: no other is as good in all and better "
        "in loss, time of a step, decoding or cache",
        style="dim",
    )
    if metadata["left_out"]:
        console.print(Text(f"left out: {'; '.join(metadata['left_out'])}", style="dim"), soft_wrap=True)
    tried = Counter(trial["setting"] for trial in metadata["search"])
    if tried and (least := min(tried.values())) < FEW:
        rates = "1 learning rate was" if least == 1 else f"{least} learning rates were"
        console.print(f"only {rates} tried for {', '.join(s for s in tried if tried[s] == least)}")
    if short := [row.name for row in study.rows if row.statistics["loss"].n < metadata["seeds"]]:
        console.print(f"time ran out: fewer than {_seeds(metadata['seeds'])} of {', '.join(short)}")
    console.print()
    console.print(Text(study.recommendation.sentence, style="bold"), soft_wrap=True)


def _seeds(number: int) -> str:
    return "1 seed" if number == 1 else f"{number} seeds"


def _name(study: Study, row: SettingRow) -> str:
    return f"{row.name} (in use)" if row.setting == study.baseline else row.name


def _with_error(measured: MeanEstimate, digits: int) -> str:
    if math.isnan(measured.value):
        return ""
    error = "" if math.isnan(measured.sem) or not measured.sem else f" ± {measured.sem:,.{digits}f}"
    return f"{measured.value:,.{digits}f}{error}"
