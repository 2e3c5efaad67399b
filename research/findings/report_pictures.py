"""Pictures of docs/reports/findings.md."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

import headwise as hw
from research.findings.control_sets import KINDS
from research.findings.report_smollm2 import WORDS

DPI = 110


def draw(folder: Path, pictures: Path) -> None:
    """Draw the pictures of the report from the results on SmolLM2."""
    ablation, importance = hw.Ablation.load(folder / "heads"), hw.Importance.load(folder / "gradients")
    plots = {
        "findings-cost": ablation.plot("cost"),
        "findings-first-order": hw.agreement(importance, ablation).plot(),
    }
    for name, axes in plots.items():
        figure: Any = axes.figure
        figure.savefig(pictures / f"{name}.png", dpi=DPI)
    robust(ablation).savefig(pictures / "findings-robust.png", dpi=DPI)
    controls({name: hw.SetAblation.load(folder / name) for name in WORDS}).savefig(
        pictures / "findings-controls.png", dpi=DPI
    )


def robust(ablation: hw.Ablation) -> Figure:
    """Plot the mean of the effects of each head on documents against their median; name heads far from the diagonal."""
    figure = Figure(figsize=(5.2, 4.2), layout="constrained")
    axes = figure.subplots()
    means = [row.statistics["cost"].value for row in ablation.rows]
    medians = ablation.summaries()["cost_median"]
    axes.axline((0, 0), slope=1, color="0.7", linewidth=0.8, zorder=0)
    axes.scatter(medians, means, s=14)
    gaps = [abs(mean - median) for mean, median in zip(means, medians, strict=True)]
    largest = sorted(range(len(gaps)), key=lambda index: -max(gaps[index], means[index] / 4))[:8]
    for index in largest:
        place = (medians[index], means[index])
        axes.annotate(ablation.rows[index].name, place, xytext=(4, 2), textcoords="offset points", fontsize=8)
    axes.margins(x=0.12)
    axes.set(xlabel="median over documents, nats", ylabel="mean over documents, nats", title="effect of each head")
    return figure


def controls(tables: dict[str, hw.SetAblation]) -> Figure:
    """Plot the effects of all random sets, and that of the induction heads with its standard error."""
    figure = Figure(figsize=(10.2, 3.2), layout="constrained")
    for axes, (name, table) in zip(figure.subplots(1, len(tables)), tables.items(), strict=True):
        for place, kind in enumerate(KINDS):
            values = [row.statistics["cost"].value for row in table.rows if row.name.startswith(kind)]
            spread = [place + (index / max(1, len(values) - 1) - 0.5) * 0.5 for index in range(len(values))]
            axes.plot(spread, values, ".", markersize=4, alpha=0.7)
        effect = next(row.statistics["cost"] for row in table.rows if row.name == "induction")
        axes.errorbar([len(KINDS)], [effect.value], yerr=[1.96 * effect.sem], fmt="ks", markersize=4, capsize=3)
        axes.set_xticks(range(len(KINDS) + 1), [*KINDS, "induction"])
        data, replacement = WORDS[name]
        axes.set_title(f"{data},\nreplaced by {replacement}", fontsize=9)
        axes.set_ylabel("rise of the loss, nats")
    return figure
