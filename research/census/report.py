"""Write docs/reports/census.md from the results of the census."""

import json
from collections import Counter

from research.census.__main__ import RESULTS

REPORT = RESULTS.parents[2] / "docs" / "reports" / "census.md"

SAMPLE = 790
"""Results with fewer model types are called a sample."""

MEANINGS = {
    "right": "all runs agree with the truth",
    "partly": "what is reported agrees; a warning or an error names the rest",
    "refused": "`watch` raises an `InputError` that names the modules",
    "silent": "a module attended, and was neither reported nor named",
    "wrong": "a statistic, a number of heads, a gate or a training step differs from the truth",
    "crash": "another error than `InputError` is raised in headwise",
    "unverified": "the census could not derive the heads of what is reported",
    "no attention": "no module of the model computes attention",
    "not built": "a tiny random model could not be built or run; the reason is below",
}
"""Meaning of each outcome of a model type."""

INTRODUCTION = """# Census of models

This report compares `hw.watch` and `hw.gate` with attention that was recorded without them. It is written by
`research/census/report.py` from the results of `make census`.

**The truth.** Every model type of `transformers` is built with tiny sizes and random weights, in float64. Every softmax
is recorded at torch's dispatcher, with the math backend for fused attention. The elements of its result are followed to
the product with values, and from there to the output projection. A head is a block of columns of this projection's
input. Names of modules and arguments play no role. The statistics are computed from whole matrices, for the tokens that
the census knows to be real. Of other inputs, such as sounds and images, tokens are padding if self-attention hides
their keys from all queries. Each sequence also runs alone, without padding. Where a model gives a sequence the same
weights alone and in a padded batch, both truths must agree.

**The runs.** Two sequences without padding; with padding on the left and on the right, also of the decoder's input, and
of both; the same with eager attention; the shorter sequence alone; a text in five pieces with a growing and with a
static cache; greedy generation from left-padded prompts with both caches; a training step with dropout, whose outputs,
gradients and random numbers must be those of a step without `watch`; float32 and bfloat16, where the error may be twice
that of the plain model; and gates of two heads, compared with a model in which these heads' columns of the output
projection are zero. Each run is made three times in the same process, and must have the same results each time. If
`watch` can make a plan of the model's attention, the later calls follow it.
"""


def document(results: dict) -> str:
    """Return the report as Markdown."""
    verdicts, versions = results["verdicts"], results["versions"]
    counts = Counter(verdict["outcome"] for verdict in verdicts)
    lines = [INTRODUCTION]
    names = ", ".join(f"{name} {version}" for name, version in versions.items())
    minutes = f"{results['seconds'] / 120:.0f} minutes on two cores of {results['processor']}"
    lines += [f"{names}; {len(verdicts)} model types in {minutes}.\n"]
    if len(verdicts) < SAMPLE:
        lines += ["These model types are a sample. `make census` runs all types.\n"]
    lines += ["| outcome | types | |", "| --- | --- | --- |"]
    lines += [f"| {outcome} | {counts[outcome]} | {meaning} |" for outcome, meaning in MEANINGS.items()]
    following = sum(any(run["followed"] for run in verdict.get("runs", ())) for verdict in verdicts)
    lines += ["", f"{following} model types follow a plan in at least one of their runs."]
    lines += ["", "## Runs", "", *_runs(verdicts), "", "## Reasons", ""]
    for outcome in ("wrong", "crash", "silent", "refused", "partly", "unverified", "not built"):
        of_outcome = [verdict for verdict in verdicts if verdict["outcome"] == outcome]
        if of_outcome:
            lines += [f"### {outcome.capitalize()}", ""]
            lines += [f"- `{verdict['model_type']}`: {_plain(verdict['reason'])}" for verdict in of_outcome] + [""]
    lines += ["## All model types", "", "| model type | class | outcome | modules | values | right runs |"]
    lines += ["| --- | --- | --- | --- | --- | --- |", *map(_row, verdicts)]
    return "\n".join(lines) + "\n"


def _runs(verdicts: list[dict]) -> list[str]:
    """Return a table of the outcomes of each kind of run."""
    counts: dict[str, Counter] = {}
    for verdict in verdicts:
        for run in verdict.get("runs", ()):  # none if the time was over
            counts.setdefault(run["name"], Counter())[run["outcome"]] += 1
            counts[run["name"]]["values"] += run["checked"]
            counts[run["name"]]["confirmed"] += bool(run["confirmed"])
            counts[run["name"]]["followed"] += bool(run["followed"])
    outcomes = ("right", "partly", "refused", "wrong", "crash", "silent", "unverified", "no attention", "skipped")
    head = ("run", *outcomes, "values that agree", "confirmed by sequences alone", "with a plan")
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for name, count in counts.items():
        numbers = [count[outcome] for outcome in (*outcomes, "values", "confirmed", "followed")]
        lines.append(f"| {name} | {' | '.join(f'{number:,}' for number in numbers)} |")
    return [*lines, "", "A run is skipped if the model cannot do it, or computes something else in it on its own."]


def _row(verdict: dict) -> str:
    runs = [run for run in verdict.get("runs", ()) if run["outcome"] not in ("skipped", "unverified", "no attention")]
    right = sum(run["outcome"] == "right" for run in runs)
    values = sum(run["checked"] for run in runs)
    cells = (verdict["model_type"], verdict.get("model", ""), verdict["outcome"], verdict.get("modules", 0), values)
    return f"| {' | '.join(map(str, cells))} | {right} of {len(runs)} |"


def _plain(text: str) -> str:
    """Return a text that Markdown does not interpret, in one line."""
    return " ".join(text.split()).replace("<", "&lt;").replace("|", "\\|")[:300]


if __name__ == "__main__":
    REPORT.write_text(document(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")
