"""Write docs/reports/gpu.md from the results in benchmarks/results/gpu.json, or without results the targets alone.

python -m benchmarks.gpu.report
"""

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import targets
from benchmarks.measure import Row

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
PAGE = ROOT / "docs" / "reports" / "gpu.md"

INTRODUCTION = """\
# On a GPU

This page shows the correctness and speed of headwise on a GPU. `make gpu` checks and measures everything on this page
in less than nine minutes, and writes the page. It needs one GPU, torch and Triton, and no network.

**Ratios.** A ratio compares two times of the same round. For attention and layers it is the time of the other
implementation divided by that of headwise: above 1, headwise is faster. For statistics it is the time with statistics
divided by the time without. A cell shows the median over the rounds and, in brackets, the lowest and the highest ratio.

**Regimes.** A regime is one configuration that is timed: the sizes (batch, length, embed, heads), a mask, a dtype, and
"forward" or "training" (forward and backward pass). The masks have names: with "documents", several documents are
packed in each sequence; "window" is a causal window of 4,096 keys; with "heads", half of the heads have a causal window
of 1,024 keys.

**Checks.** Every result that is timed is first compared with float64. The error may be at most twice that of plain
attention in torch in the same dtype."""

TITLES = {
    targets.ATTENTION: "Attention",
    targets.LAYER: "The layer",
    targets.OBSERVING: "Statistics",
}
TARGET_HEADERS = ("target", "bound", "worst median", "spread", "regime", "regimes met", "")
ROW_HEADERS = ("regime", "compared with", "ratio", "headwise", "the other")


def load(path: Path = RESULTS) -> dict | None:
    """Return the saved results; None if there are none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def rows_by_part(results: dict | None) -> dict[str, list[Row]]:
    """Return the rows of the results of each part, by its name."""
    return {} if results is None else {part: list(map(Row.read, rows)) for part, rows in results["rows"].items()}


def document(results: dict | None) -> str:
    """Return the text of the page."""
    lines = [INTRODUCTION, "", "## Targets", ""]
    if results is None:
        lines += ["Nothing has been run on a GPU yet.", ""]
    else:
        versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
        lines += [f"{results['date']}, {results['device']}; {versions}; {results['seconds']:.0f} seconds.", ""]
    rows = rows_by_part(results)
    lines += [*table(targets.lines(rows), TARGET_HEADERS), ""]
    if results is None:
        return "\n".join(lines)
    checks = results["checks"]
    counts = f"{checks['passed']} checks passed, {len(checks['failed'])} failed"
    lines += ["## Checks", "", f"{counts}, and {len(checks['skipped'])} had nothing to check.", ""]
    lines += _named(checks["failed"])
    for part, of_part in rows.items():
        lines += [f"## {TITLES[part]}", "", *table(map(_cells, of_part), ROW_HEADERS), ""]
    if results["left_out"]:
        lines += ["## Left out", "", *_named(results["left_out"])]
    return "\n".join(lines).rstrip() + "\n"


def table(rows: Sequence[Sequence[str]] | map, headers: Sequence[str]) -> list[str]:
    """Return the lines of a table in GitHub's Markdown."""
    cells = [tuple(headers), tuple("---" for _ in headers), *rows]
    return ["| " + " | ".join(row) + " |" for row in cells]


def _cells(row: Row) -> tuple[str, ...]:
    """Return the cells of one row."""
    ratio = f"{row.ratio.median:.2f} ({row.ratio.lowest:.2f} to {row.ratio.highest:.2f})"
    figures = [f"{value / 1e6:.0f} MB" if value > 1e4 else f"{value * 1e3:.3g} ms" for value in (row.ours, row.theirs)]
    return row.regime.name, f"{row.against} {row.note}".strip(), ratio, *figures


def _named(reasons: dict[str, str]) -> list[str]:
    """Return a list with a line for each name and its reason."""
    return [*(f"- {name}: {reason}" for name, reason in reasons.items()), ""] if reasons else []


def main() -> None:
    """Write the page."""
    PAGE.write_text(document(load()), encoding="utf-8")


if __name__ == "__main__":
    main()
