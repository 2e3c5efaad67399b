"""Write docs/reports/census.md from what the last full census left in research/census/results.json.

python -m research.census.report
"""

import json
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
OUTCOMES = {
    "right": "every statistic of every head is within 1e-5 of the definition",
    "partly seen": "what was seen is right; the warning names the modules that were not",
    "refused": "`watch` raises an `InputError` that names the modules",
    "silent": "attention ran that was neither seen nor named",
    "wrong": "a statistic is not what the definition gives",
    "no attention": "no module of the model computes any",
    "not built": "no tiny random model of it, for the reason below",
}
"""In the order of the document."""
INTRODUCTION = """\
Written by `research/census/report.py` from what `make census` found.
Every model type that `transformers` knows is built
tiny, of random weights, and run under `hw.watch` with two sequences, one of them padded on the left and then on the
right where the model takes a mask: under the implementation of attention that it has by default, and under "eager".
Every statistic of every head is compared with its definition in float64, applied to the weights that eager attention
computes of the same weights and inputs, recorded without headwise. The error is absolute for shares, and relative to
1 plus the number for the rest; all runs are in float32."""
OWN = """\
These compute other weights by default than under "eager": causality, or rows without a key, are taken otherwise. Under
the default they are compared with the definition of torch's attention, in float64, from its arguments."""
MISSING = {
    "not checked": "What the heads put out passes through something else before the projection, or is not whole there.",
    "not measured": "`watch` does not find the output projection, or the product with the values.",
}
REASONS = ("partly seen", "refused", "silent", "wrong", "not built")
"""Outcomes of which the reason of each type is told."""


def _markdown(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    from tabulate import tabulate

    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def counts(verdicts: Sequence[dict]) -> str:
    """How many types have which outcome."""
    number = {name: sum(each["outcome"] == name for each in verdicts) for name in OUTCOMES}
    return _markdown(
        [(name, str(number[name]), meaning) for name, meaning in OUTCOMES.items()], ("outcome", "types", "")
    )


def reasons(verdicts: Sequence[dict]) -> list[str]:
    """Why each type that is not right is not."""
    lines = []
    for outcome in REASONS:
        found = [each for each in verdicts if each["outcome"] == outcome]
        if found:
            lines += [
                f"### {outcome.capitalize()}",
                "",
                *(f"- `{each['model_type']}`: {_plain(each)}" for each in found),
                "",
            ]
    return lines


def _plain(verdict: dict) -> str:
    """A reason as text, of which nothing is markup."""
    return " ".join(verdict["reason"].split()).replace("|", "\\|").replace("<", "&lt;")


def notes(verdicts: Sequence[dict]) -> list[str]:
    """What the comparison rests on, where it is not the rule."""
    own = _noted(verdicts, "not eager's")
    lines = []
    if own:
        lines += ["### Another implementation than eager's", "", OWN, "", ", ".join(own), ""]
    for name in ("output_norm", "written_norm"):
        for what in ("not checked", "not measured"):
            found = _noted(verdicts, f"{what}:", name)
            if found:
                lines += [f"### `{name}` {what}", "", MISSING[what], "", ", ".join(found), ""]
    return lines


def _noted(verdicts: Sequence[dict], *parts: str) -> list[str]:
    """The types with a note that has all these parts."""
    return [
        f"`{each['model_type']}`"
        for each in verdicts
        if any(all(part in note for part in parts) for note in each.get("notes", ()))
    ]


def types(verdicts: Sequence[dict]) -> str:
    """Every type that was built, by name."""
    rows = []
    for each in verdicts:
        if each["outcome"] in ("not built", "no attention"):
            continue
        worst = f"{each['worst']:.0e}" if each["sites"] else ""
        routes = ", ".join(each["routes"]).replace("multi_head_attention_forward", "multi-head")
        rows.append((each["model_type"], routes, str(each["sites"]), str(each["heads"]), each["outcome"], worst))
    return _markdown(rows, ("model type", "attention is called by", "sites", "heads", "outcome", "worst error"))


def document(results: dict) -> str:
    """The whole text."""
    verdicts = sorted(results["verdicts"], key=lambda each: each["model_type"].lower())
    packages = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    silent = [each for each in verdicts if each["outcome"] == "no attention"]
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
        ", ".join(f"`{each['model_type']}`" for each in silent),
        "",
        "## Every type",
        "",
        '"interface" is the attention interface of transformers, "sdpa" `scaled_dot_product_attention`, "multi-head"',
        '`F.multi_head_attention_forward`, "softmax" a module that writes its attention itself.',
        "",
        types(verdicts),
        "",
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    results = json.loads((ROOT / "research" / "census" / "results.json").read_text(encoding="utf-8"))
    (ROOT / "docs" / "reports" / "census.md").write_text(document(results), encoding="utf-8")


if __name__ == "__main__":
    main()
