"""Write docs/reports/benchmarks.md from what the last full run of the benchmarks left in benchmarks/results/.

python -m benchmarks.report
"""

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command_line import require
from benchmarks.measure import Row
from benchmarks.targets import HEADERS, table
from benchmarks.watching import MEMORY

ROOT = Path(__file__).parent.parent
TITLES = {
    "layer": "The whole layer",
    "windows": "Windows",
    "padding": "Padded batches",
    "grouped": "Grouped heads",
    "decoding": "Decoding",
    "memory": "Memory",
    "watching": "Watching a model",
    "ablating": "Removing heads, one at a time",
    "gpu": "On a GPU",
}
"""In the order of the document."""
INTRODUCTION = """\
Written by `benchmarks/report.py` from what `make bench` measured. Each ratio is of a pair taken in the same round,
theirs over ours, so above 1 ours is faster: the median over the rounds, and in brackets the lowest and the highest.
Shares of a rate, growth, extra memory over sizes or a limit, and a watched forward over a plain one are ours over the
other. Everything that is timed was first compared with the definition in float64, gradients too. A regime is (batch,
length, embed, heads), its mask, its dtype, and what is done; the scripts say the rest."""


def load(folder: Path) -> list[dict]:
    """What each script found last."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    return sorted(found, key=lambda each: list(TITLES).index(each["benchmark"]))


def _markdown(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    from tabulate import tabulate

    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def where(results: dict) -> str:
    """On what, with what, and when; and whether it is a part."""
    machine, versions = results["machine"], results["versions"]
    device = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores, {machine['capability']}"
    part = "" if results.get("only") == "" and not results["quick"] else " A part of the regimes, not all."
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{results['date']}, {device}, {machine['threads']} threads, {results['rounds']} rounds; {packages}.{part}"


def _units(row: Row, benchmark: str) -> tuple[str, str]:
    """Ours and theirs as they are measured."""
    if benchmark == "memory" or row.against in MEMORY:
        return tuple(f"{each / 1e6:.1f} MB" for each in (row.ours, row.theirs))
    if row.against == "GEMM rate":
        return tuple(f"{each / 1e9:.1f} GFLOP/s" for each in (row.ours, row.theirs))
    return tuple(f"{each:.3g} s" if each >= 1 else f"{each * 1e3:.3g} ms" for each in (row.ours, row.theirs))


def section(results: dict) -> list[str]:
    """Every figure of a script, and what was left out."""
    name = results["benchmark"]
    lines = [f"## {TITLES[name]}", "", f"`benchmarks/{name}.py`: {where(results)}", ""]
    rows = []
    for row in map(Row.read, results["rows"]):
        ratio = f"{row.ratio.median:.2f} ({row.ratio.lowest:.2f} to {row.ratio.highest:.2f})"
        rows.append((row.regime.name, f"{row.against} {row.note}".strip(), ratio, *_units(row, name)))
    lines += [_markdown(rows, ("regime", "against", "ratio", "ours", "the other")), ""]
    if results["left_out"]:
        lines += ["Left out:", "", *(f"- {who}: {why}" for who, why in results["left_out"].items()), ""]
    return lines


def document(results: Sequence[dict]) -> str:
    """The whole text."""
    lines = [
        "# Benchmarks",
        "",
        INTRODUCTION,
        "",
        "## Claims",
        "",
        "The worst median of all regimes that a claim covers, where that is, and in how many of them it holds.",
        "",
        _markdown(table(results), HEADERS),
        "",
    ]
    for each in results:
        lines += section(each)
    if "gpu" not in {each["benchmark"] for each in results}:
        lines += [
            f"## {TITLES['gpu']}",
            "",
            "Nothing has run on a GPU yet; `python -m benchmarks.gpu` is what would.",
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    require("tabulate")
    text = document(load(ROOT / "benchmarks" / "results"))
    (ROOT / "docs" / "reports" / "benchmarks.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
