"""A study as a picture: measured elsewhere, only drawn here."""

import math
from typing import TYPE_CHECKING, Any

from headwise.errors import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headwise.studies.conclusions import SettingRow, Study


def draw(study: "Study") -> "Figure":
    """A figure of held-out loss against heads, and against the time of a step."""
    figure: Figure = require_matplotlib()(figsize=(9.0, 3.8), layout="constrained")
    by_heads, by_time = figure.subplots(1, 2, sharey=True)
    losses, frontier = study.losses, study.frontier
    families: dict[tuple[Any, ...], list[SettingRow]] = {}
    trained = [row for row in study.rows if row.statistics["loss"].n]
    for row in trained:
        families.setdefault(_family(study, row), []).append(row)
    for family, rows in families.items():
        heads, means = [row.num_heads for row in rows], [row.statistics["loss"].value for row in rows]
        (line,) = by_heads.plot(heads, means, marker="_", markersize=12, label=family[0])
        for row in rows:
            seeds = [loss for loss in losses[row.setting].values() if math.isfinite(loss)]
            by_heads.plot([row.num_heads] * len(seeds), seeds, ".", color=line.get_color(), alpha=0.6)
    counts = sorted({row.num_heads for row in trained})
    by_heads.set_xscale("log", base=2)
    by_heads.set_xticks(counts, [str(count) for count in counts])
    by_heads.minorticks_off()
    by_heads.set(xlabel="heads", ylabel="held-out loss", title=f"{study.metadata['model']['name']}: each seed a point")
    if len(families) > 1:
        by_heads.legend(fontsize=8)
    for row in trained:
        on = row.setting in frontier
        step, loss = row.statistics["step_ms"], row.statistics["loss"]
        error: Any = [0.0 if math.isnan(each.sem) else each.sem for each in (step, loss)]
        colour = "C0" if on else "0.6"
        by_time.errorbar(step.value, loss.value, xerr=error[0], yerr=error[1], fmt="o", color=colour, capsize=2)
        by_time.annotate(row.name, (step.value, loss.value), textcoords="offset points", xytext=(5, 4), fontsize=8)
    by_time.set(xlabel="time of a step, ms", title="blue: on the frontier; bars: standard errors")
    return figure


def _family(study: "Study", row: "SettingRow") -> tuple[Any, ...]:
    """What stays the same along a line of the picture."""
    products = {each.num_heads * each.head_dim for each in study.rows}
    width = f"heads x width = {row.num_heads * row.head_dim}" if len(products) == 1 else f"width {row.head_dim}"
    shared = "" if row.num_kv_heads == row.num_heads else f", {row.num_kv_heads} key/value heads"
    return (width + shared,)


def require_matplotlib() -> Any:
    """Import matplotlib and return its class `Figure`."""
    return require("matplotlib.figure", purpose="drawing a study", extra="plot").Figure
