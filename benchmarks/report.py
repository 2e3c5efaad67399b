"""Write docs/reports/benchmarks.md from the results of the last full run, in benchmarks/results/.

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
    "attention": "Attention alone",
    "layer": "The whole layer",
    "windows": "Windows",
    "padding": "Padded batches",
    "grouped": "Grouped heads",
    "decoding": "Decoding",
    "memory": "Memory of attention alone",
    "layer_memory": "Memory of the whole layer",
    "watching": "Watching a model",
    "accelerating": "Accelerating a model",
    "models": "Accelerated encoders against other runtimes",
    "accelerated_steps": "Training and generating under acceleration",
    "ablating": "Removing heads, one at a time",
    "pruned_attention": "Attention with half of the heads",
    "monitoring": "Monitoring a training",
    "calls": "Short calls",
}
"""Title of the section of each script, in the order of the document."""
INTRODUCTION = """\
Speed and memory of headwise compared with other implementations. This report is written by `benchmarks/report.py` from
the results of `make bench`.

**Ratios.** Each ratio is the time (or memory) of the other implementation divided by that of headwise, both measured in
the same round. Above 1, headwise is better. A cell shows the median over all rounds and, in brackets, the lowest and
the highest ratio. Six kinds of ratio are headwise divided by the other: shares of a rate, growth, extra memory, a
watched forward pass relative to a plain one, a monitored step of training relative to a plain one, and attention with
half of the heads relative to all of them. Figures of short calls are not ratios: they are the microseconds that
headwise adds to the other.

**Regimes.** A regime is (batch, length, embed, heads), a mask, a dtype, and forward or training. The docstring of each
script states the rest.

**Checks.** Everything that is timed is first compared with the definition in float64, gradients included."""


def load(folder: Path) -> list[dict]:
    """Return the saved results of each script, in the order of the document. Those of the GPU have their own page."""
    paths = [path for path in folder.glob("*.json") if path.stem in TITLES]
    results = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return sorted(results, key=lambda result: list(TITLES).index(result["benchmark"]))


def _markdown(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    """Return a table in GitHub's Markdown."""
    from tabulate import tabulate

    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def environment(results: dict) -> str:
    """Return date, machine, rounds and versions of a run as text, and state if the run left out regimes or peers."""
    machine, versions = results["machine"], results["versions"]
    device = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores, {machine['capability']}"
    if "native" in machine:
        device += f", native kernels: {machine['native']}"
    part = "" if results.get("only") == "" and not results["quick"] else " Some regimes only."
    if results.get("peers", "all") != "all":
        part += f" Only the peers of `--peers {results['peers']}`."
    rounds = f"{results['rounds']} rounds"
    if results.get("long_rounds", results["rounds"]) != results["rounds"]:
        rounds += f", {results['long_rounds']} where a round takes seconds"
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{results['date']}, {device}, {machine['threads']} threads, {rounds}; {packages}.{part}"


def _units(row: Row, benchmark: str) -> tuple[str, str]:
    """Return the two measurements of a row, of headwise and of the other, as text with their unit."""
    if benchmark in ("memory", "layer_memory") or row.against in MEMORY:
        return tuple(f"{size / 1e6:.1f} MB" for size in (row.ours, row.theirs))
    if row.against == "GEMM rate":
        return tuple(f"{rate / 1e9:.1f} GFLOP/s" for rate in (row.ours, row.theirs))
    return tuple(
        f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms" for seconds in (row.ours, row.theirs)
    )


def section(results: dict) -> list[str]:
    """Return the lines of the report's section for one script: a table with every row, and the peers that were left
    out.
    """
    name = results["benchmark"]
    lines = [f"## {TITLES[name]}", "", f"`benchmarks/{name}.py`: {environment(results)}", ""]
    rows = []
    for row in map(Row.read, results["rows"]):
        ratio = f"{row.ratio.median:.2f} ({row.ratio.lowest:.2f} to {row.ratio.highest:.2f})"
        rows.append((row.regime.name, f"{row.against} {row.note}".strip(), ratio, *_units(row, name)))
    lines += [_markdown(rows, ("regime", "compared with", "ratio", "headwise", "the other")), ""]
    if results["left_out"]:
        lines += ["Left out:", "", *(f"- {what}: {reason}" for what, reason in results["left_out"].items()), ""]
    return lines


def document(results: Sequence[dict]) -> str:
    """Return the text of the whole report, from the results of all scripts."""
    lines = [
        "# Benchmarks",
        "",
        INTRODUCTION,
        "",
        "## Targets",
        "",
        "Each target covers one or more regimes. The table shows the worst median among them, the regime in which it",
        "was measured, and the number of regimes that meet the target.",
        "",
        _markdown(table(results), HEADERS),
        "",
    ]
    for result in results:
        lines += section(result)
    lines += ["## On a GPU", "", "[The page about GPUs](gpu.md) has the benchmarks that `make gpu` runs.", ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Write docs/reports/benchmarks.md."""
    require("tabulate")
    text = document(load(ROOT / "benchmarks" / "results"))
    (ROOT / "docs" / "reports" / "benchmarks.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
