"""Write docs/reports/findings.md and its pictures from research/findings/results/.

python -m research.findings.report
"""

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

from research.findings import report_before, report_minilm, report_pictures, report_smollm2
from research.markdown import markdown_table

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "research" / "findings" / "results"

INTRODUCTION = """\
This report measures how important each attention head of two real models is: SmolLM2-135M-Instruct and
all-MiniLM-L6-v2. `research/findings/report.py` writes it from the results of `make findings`. The rules of the
measurement and of every test were written first: `research/findings/rules.md` has them, with their date. Every number
is a mean with a standard error that is clustered by document, on the same data for all heads. Differences are computed
for each document. The documents are topics of Python's language reference, drawn with a seed. The
conclusions hold for these two models on these documents. Head 6 of layer 18 is written 18.6; both numbers start at 0.
Unless stated otherwise, a head is removed by multiplying its output, before the output projection, by 0."""

ERRORS = """\
`research/findings/check_errors.py` checks the statistics of this report, and imports nothing of headwise. It reads the
saved effects on all documents. From these effects it computes means, medians, trimmed means, outliers, p-values and
q-values again. All agree with those of headwise. For a bootstrap, it also draws documents with replacement, 4,000
times. The table shows the standard errors of headwise, divided by those of this bootstrap."""


def section_of_errors(found: dict[str, Any]) -> list[str]:
    """Write the comparison of standard errors with the bootstrap."""
    rows = [
        (name, column, entry["documents"], f"{median:.3f}", f"{least:.3f} to {most:.3f}")
        for name, entry in found.items()
        for column, (least, median, most) in entry["ratios"].items()
    ]
    assert not any(entry["differs"] for entry in found.values())
    ratio = found["smollm2/profile"]["clustered over independent"]
    sequences, documents = (found["smollm2/profile"][name] for name in ("sequences", "documents"))
    return [
        "## Check of the standard errors",
        "",
        ERRORS,
        "",
        *markdown_table(("results", "statistic", "documents", "median ratio", "range of the ratios"), rows),
        f"The entropies of the heads of SmolLM2 are means over {sequences} sequences of {documents} documents. The "
        f"standard errors of these means, clustered by document, are {ratio:.2f} times those that treat all "
        "sequences as independent (median over heads).",
        "",
    ]


def wrap(paragraph: str) -> str:
    """Return a paragraph in lines of at most 120 characters, without breaks at hyphens."""
    return textwrap.fill(paragraph, 120, break_on_hyphens=False)


def document(results: Path = RESULTS) -> str:
    """Return the text of the report, with wrapped paragraphs."""
    errors = json.loads((results / "errors.json").read_text())
    lines = ["# Findings", "", INTRODUCTION, "", *report_before.section(results, errors)]
    lines += [*report_smollm2.section(results / "smollm2"), *report_minilm.section(results / "minilm")]
    lines += [*report_minilm.similarity(results), *section_of_errors(errors)]
    wrapped = (line if line.startswith(("|", "#", "!")) else wrap(line) for line in lines)
    return "\n".join(wrapped).rstrip() + "\n"


def main() -> None:
    """Write the report and its pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results")
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "reports" / "findings.md", help="file to write")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs" / "pictures", help="folder of the pictures")
    options = parser.parse_args()
    options.to.write_text(document(options.results), encoding="utf-8")
    report_pictures.draw(options.results / "smollm2", options.pictures)


if __name__ == "__main__":
    main()
