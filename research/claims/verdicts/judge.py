"""All verdicts of a folder of results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .cells import at_edge, cell_name, cells_of, read
from .definitions import DEPENDS, EXPECTED, FEW, HELD, NOT, OPEN, PUBLISHED, ROBUST, SEEDS, SOURCES
from .distances import different
from .losses import capacity, eight, more, regularises
from .removals import robust
from .settings import complete_settings
from .timings import parallel


def judge(folder: Path) -> dict[str, Any]:
    """Return the verdicts of all claims, and what they could not use.

    Raises:
        ValueError: a file of results is malformed.
    """
    cells = cells_of(folder)
    settings, missing = complete_settings(cells)
    published = (read(folder / "published.json") or {"measured": {}})["measured"]
    verdicts = {
        "different": different(settings, published),
        "capacity": withheld(capacity(settings), missing, SOURCES),
        "parallel": parallel(read(folder / "timings.json")),
        "regularises": withheld(regularises(settings), missing, FEW),
        "robust": withheld(robust(settings), missing, ROBUST),
        "more": withheld(more(settings), missing, SOURCES),
        "eight": withheld(eight(settings), missing, SOURCES),
    }
    lacking = [name for name in PUBLISHED if name not in published]
    lacking += [name for name in missing if name.split(",")[0] in ROBUST]
    if lacking and verdicts["different"]["outcome"] != DEPENDS:
        verdicts["different"]["outcome"] = OPEN
    few = [each.name for each in settings if len(each.values(each.most)) < SEEDS[each.task]]
    return {
        **verdicts,
        "incomplete settings": missing + [name for name in PUBLISHED if name not in published],
        "fewer seeds": few,
        "diverged": {setting.name: setting.diverged for setting in settings if setting.diverged},
        "rates at an edge": [cell_name(cell) for cell in cells if cell["complete"] and at_edge(cell)],
        "rates": sum(cell["complete"] for cell in cells),
    }


def withheld(verdict: dict[str, Any], missing: Sequence[str], tasks: Sequence[str]) -> dict[str, Any]:
    """Return a verdict without the outcomes that a missing setting could change: they become "not measured"."""
    lacking = [(task, scheme) for task in tasks for scheme in EXPECTED[task] if f"{task}, {scheme}" in missing]
    for task, scheme in lacking:
        row = verdict["schemes"].setdefault(scheme, {"true in": [], "false in": [], "outcome": OPEN})
        row.setdefault("missing", []).append(task)
        row["outcome"] = DEPENDS if row["outcome"] == DEPENDS else OPEN
    outcomes = {row["outcome"] for row in verdict["schemes"].values()}
    if lacking:
        verdict["outcome"] = DEPENDS if DEPENDS in outcomes or {HELD, NOT} <= outcomes else OPEN
    return verdict
