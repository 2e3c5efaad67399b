"""Study in a terminal: one line per setting, the Pareto frontier and the recommendation."""

from collections import Counter

from rich.console import Console
from rich.text import Text

from headwise.runs.rows import NO_ESTIMATE
from headwise.show.tables import print_table, print_title
from headwise.studies.study_result import SettingRow, Study
from headwise.wording import counted, number

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
    """Print the results of a study: a table of its head settings with the Pareto frontier marked, the invalid settings
    that were left out, and the recommendation. Warnings name the settings for which fewer than 3 learning rates were
    tried, and the settings that were trained with fewer seeds than planned.
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
