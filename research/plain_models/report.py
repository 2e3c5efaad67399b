"""Write docs/reports/plain_models.md from research/plain_models/results.json.

python -m research.plain_models.report
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from research.markdown import markdown_table
from research.plain_models.__main__ import RESULTS, outcome_of

REPORT = Path(__file__).parent.parent.parent / "docs" / "reports" / "plain_models.md"
MEANINGS = {
    "right": "every statistic of every head and every gate is right",
    "partly": "what is reported is right; a warning names the other modules",
    "refused": "`watch` raises an `InputError` that names the modules",
    "no attention": "no softmax of torch in the model averages values; `watch` raises an `InputError`",
    "not verified": "`watch` reports heads that the study could not derive",
    "silent": "attention or a statistic is missing without a warning",
    "wrong": "a statistic or a gate is wrong, or the model fails",
    "failed": "the study could not build or judge the model",
}
"""Meaning of each outcome, in the order of the report."""
INTRODUCTION = """\
# Plain PyTorch models

`hw.watch` computes statistics of attention heads, and `hw.gate` multiplies the outputs of heads by factors, the gates.
This report shows for which PyTorch models outside of the library `transformers` both are right. It is written by
`research/plain_models/report.py` from the results of `make plain-models`.

Every model is built with tiny sizes and random weights, and runs in float64 where it can. The study derives the right
attention weights and heads independently of headwise, from the operators that torch's dispatcher runs. It replaces the
result of a softmax by marked numbers, and follows these to the product with the values and then to the output
projection. It does not use the names or attributes of modules. It defines a head as a set of columns of the output
projection. Padded batches and caches are compared with each sequence alone, without padding and without a cache. Up to
three heads of each model are gated to 0, and the output is compared with that of the model in which the columns of
these heads are set to zero in the input of the output projection. Each call is watched three times in the same process,
and must have the same results each time. Two calls make a plan of the model's attention, if `watch` can make one, and
the third call follows it.

A model has the worst outcome of its calls. "Left out" lists statistics that a warning names as left out."""


def document() -> str:
    """Return the text of the report."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    verdicts = results["verdicts"]
    counts = Counter(map(outcome_of, verdicts))
    libraries = {verdict["library"] for verdict in verdicts if outcome_of(verdict) != "failed"} - {"hand-written"}
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    following = sum(any(case["followed"] for case in verdict["cases"]) for verdict in verdicts)
    summary = [(name, counts[name], meaning) for name, meaning in MEANINGS.items()]
    lines = [
        *(INTRODUCTION, ""),
        *(f"{versions}, {results['processor']}; {len(verdicts)} models of {len(libraries)} libraries.", ""),
        *markdown_table(("outcome", "models", "meaning"), summary),
        *(f"{following} models follow a plan.", ""),
        *("## Models", ""),
        *markdown_table(("library: model", "field", "calls", "outcome", "gates", "left out"), [*map(_row, verdicts)]),
        *("## Reasons", ""),
        *(line for verdict in verdicts for line in _reasons(verdict)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _row(verdict: dict[str, Any]) -> tuple[object, ...]:
    """Return the cells of one model."""
    calls = ", ".join(case["case"] for case in verdict["cases"])
    left_out = sorted({name for case in verdict["cases"] for name in case["left_out"]})
    gates = sum(case["gates"] for case in verdict["cases"])
    return verdict["name"], verdict["category"], calls, outcome_of(verdict), gates, ", ".join(left_out)


def _reasons(verdict: dict[str, Any]) -> list[str]:
    """Return the lines of the first problem and the first reason of each call of a model."""
    reasons = [verdict["failure"]] if verdict.get("failure") else []
    for case in verdict["cases"]:
        reasons += [f"{case['case']}: {_plain(text)}" for text in (*case["problems"][:1], *case["reasons"][:1])]
    return [f"- {verdict['name']}; {reason}" for reason in reasons]


def _plain(text: str) -> str:
    """Return text as one line of at most 200 characters, with markup escaped."""
    line = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return line if len(line) <= 200 else f"{line[:197]}..."


if __name__ == "__main__":
    REPORT.write_text(document(), encoding="utf-8")
