"""Write docs/reports/census.md from research/census/results.json.

python -m research.census.report
"""

import json
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
OUTCOMES = {
    "right": "every statistic of every head is within 1e-5 of the definition",
    "partly seen": "the observed heads are right; a warning names the modules that were not observed",
    "refused": "`watch` raises an `InputError` that names the modules",
    "silent": "attention ran that was neither observed nor named",
    "wrong": "a statistic differs from the definition",
    "no attention": "no module of the model computes attention",
    "not built": "a tiny random model could not be built; the reason is below",
}
"""Meaning of each outcome, in the order of the document."""
INTRODUCTION = """\
This report shows for which model types of `transformers` the statistics of `hw.watch` are right. It is written by
`research/census/report.py` from the results of `make census`.

Every model type is built with tiny sizes and random weights. It runs under `hw.watch` with two sequences. If the model
accepts a mask, one sequence is padded, first on the left and then on the right. Each model runs with its default
attention implementation and with "eager". Every statistic of every head is compared with its definition in float64,
computed from the attention weights of eager attention, which are recorded without headwise. All runs are in float32.
The error is absolute for shares, and relative to 1 plus the number for other statistics."""
OTHER_WEIGHTS = """\
The default implementation of these types computes other weights than "eager", because it treats causality or rows
without a key differently. Under the default they are compared with the definition of torch's attention in float64,
computed from its arguments."""
MISSING = {
    "not checked": "The head outputs pass through another module before the output projection, or are split there.",
    "not measured": "`watch` does not find the output projection, or the product with the values.",
}
REASONS = ("partly seen", "refused", "silent", "wrong", "not built")
"""Outcomes for which the report states the reason of each model type."""


def _markdown(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    """Return a table in GitHub's Markdown."""
    from tabulate import tabulate

    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def counts(verdicts: Sequence[dict]) -> str:
    """Return the table of the number of model types with each outcome."""
    number = {name: sum(verdict["outcome"] == name for verdict in verdicts) for name in OUTCOMES}
    return _markdown(
        [(name, str(number[name]), meaning) for name, meaning in OUTCOMES.items()], ("outcome", "types", "")
    )


def reasons(verdicts: Sequence[dict]) -> list[str]:
    """Return the lines that state the reason of each type in `REASONS`, one section for each outcome."""
    lines = []
    for outcome in REASONS:
        of_outcome = [verdict for verdict in verdicts if verdict["outcome"] == outcome]
        if of_outcome:
            lines += [
                f"### {outcome.capitalize()}",
                "",
                *(f"- `{verdict['model_type']}`: {_plain(verdict)}" for verdict in of_outcome),
                "",
            ]
    return lines


def _plain(verdict: dict) -> str:
    """Return the reason of a verdict as one line of text, with markup escaped."""
    return " ".join(verdict["reason"].split()).replace("|", "\\|").replace("<", "&lt;")


def notes(verdicts: Sequence[dict]) -> list[str]:
    """Return the lines that list model types whose weights are not those of eager attention, and those in which a
    statistic of head outputs was not checked or not measured.
    """
    other_weights = _noted(verdicts, "not eager's")
    lines = []
    if other_weights:
        lines += ["### Other weights than eager attention", "", OTHER_WEIGHTS, "", ", ".join(other_weights), ""]
    for name in ("output_norm", "written_norm"):
        for what in ("not checked", "not measured"):
            model_types = _noted(verdicts, f"{what}:", name)
            if model_types:
                lines += [f"### `{name}` {what}", "", MISSING[what], "", ", ".join(model_types), ""]
    return lines


def _noted(verdicts: Sequence[dict], *parts: str) -> list[str]:
    """Return the model types that have a note containing all these parts, in Markdown."""
    return [
        f"`{each['model_type']}`"
        for each in verdicts
        if any(all(part in note for part in parts) for note in each.get("notes", ()))
    ]


def types(verdicts: Sequence[dict]) -> str:
    """Return the table of every model type that was built and has attention."""
    rows = []
    for each in verdicts:
        if each["outcome"] in ("not built", "no attention"):
            continue
        worst = f"{each['worst']:.0e}" if each["sites"] else ""
        routes = ", ".join(each["routes"]).replace("multi_head_attention_forward", "multi-head")
        rows.append((each["model_type"], routes, str(each["sites"]), str(each["heads"]), each["outcome"], worst))
    return _markdown(rows, ("model type", "attention is computed by", "sites", "heads", "outcome", "worst error"))


def document(results: dict) -> str:
    """Return the text of docs/reports/census.md from the results of a census."""
    verdicts = sorted(results["verdicts"], key=lambda verdict: verdict["model_type"].lower())
    packages = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    without_attention = [verdict for verdict in verdicts if verdict["outcome"] == "no attention"]
    lines = [
        "# Census of models",
        "",
        INTRODUCTION,
        "",
        f"{packages}; {len(verdicts)} model types in {results['seconds'] / 60:.0f} minutes.",
        "",
        counts(verdicts),
        "",
        "## Reasons",
        "",
        *reasons(verdicts),
        *notes(verdicts),
        "### No attention",
        "",
        ", ".join(f"`{each['model_type']}`" for each in without_attention),
        "",
        "## Every type",
        "",
        "The second column names how the model computes attention: the attention interface of transformers",
        '("interface"), `scaled_dot_product_attention` ("sdpa"), `F.multi_head_attention_forward` ("multi-head"), or',
        'its own code around a softmax ("softmax").',
        "",
        types(verdicts),
        "",
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Write docs/reports/census.md."""
    results = json.loads((ROOT / "research" / "census" / "results.json").read_text(encoding="utf-8"))
    (ROOT / "docs" / "reports" / "census.md").write_text(document(results), encoding="utf-8")


if __name__ == "__main__":
    main()
