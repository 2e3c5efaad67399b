"""Write docs/reports/claims.md and its pictures from research/claims/results/.

python -m research.claims.report [--results FOLDER]
"""

import argparse
import textwrap
from collections.abc import Callable
from pathlib import Path

from research.claims import report_pictures
from research.claims.report_setup import corpora, false_positives, machine
from research.claims.report_tables import (
    compared,
    distances,
    few,
    grades,
    loss_table,
    penalties,
    ranks,
    relations,
    removed,
    schemes_of,
    timing,
)
from research.claims.report_text import BACKGROUND, INTRODUCTION, METHOD, TITLES
from research.claims.report_verdicts import deviations, figures, five_sentences, objections, sentence
from research.claims.result_files import Results
from research.markdown import markdown_table

ROOT = Path(__file__).parent.parent.parent
RULES = Path(__file__).parent / "rules.md"
PICTURES = ROOT / "docs" / "pictures"

SECTIONS: dict[str, Callable[[Results], list[str]]] = {
    "different": distances,
    "capacity": lambda results: [
        *loss_table(results),
        *compared(results, "capacity"),
        *relations(results),
        *ranks(results),
    ],
    "parallel": timing,
    "regularises": few,
    "robust": removed,
    "more": lambda results: [
        *compared(results, "more"),
        *penalties(results),
        "![Test loss against heads](../pictures/claims-losses.png)",
        "",
    ],
    "eight": grades,
}


def wrap(paragraph: str) -> str:
    """Return a paragraph in lines of at most 120 characters, without breaks at hyphens."""
    return textwrap.fill(paragraph, 120, break_on_hyphens=False)


def document(results: Results) -> str:
    """Return the text of the report, with wrapped paragraphs."""
    decisive = figures(results)
    rows = [
        (text, results.verdicts[name]["outcome"], "; ".join(schemes_of(results.verdicts[name])), decisive[name])
        for name, text in TITLES.items()
    ]
    lines = ["# Claims", "", *five_sentences(results), "", INTRODUCTION, ""]
    lines += markdown_table(("claim", "verdict", "by position scheme", "decisive figure"), rows)
    lines += [*METHOD, "", false_positives(results), "", "**Texts.**", "", *corpora(results)]
    lines += ["## What a review objected to", "", *objections(results)]
    for name, section in SECTIONS.items():
        lines += [f"## {TITLES[name]}", "", BACKGROUND[name], "", *section(results), sentence(results, name), ""]
    lines += [*deviations(RULES.read_text(encoding="utf-8")), *machine(results)]
    wrapped = (line if line.startswith(("|", "#", "!")) else wrap(line) for line in lines)
    return "\n".join(wrapped).rstrip() + "\n"


def draw(results: Results, folder: Path) -> None:
    """Draw all pictures of the report."""
    paths = {
        name: folder / f"claims-{name}.png" for name in ("losses", "distances", "times", "relations", "gap", "removed")
    }
    settings = ("python", "bible", "lookup", "relations", "masked", "bible-large")
    report_pictures.by_task(results, "test", settings, "test loss, nats", paths["losses"])
    report_pictures.by_task(results, "gap", ("python-few", "bible-few"), "gap, nats", paths["gap"])
    report_pictures.heads_apart(results, paths["distances"])
    report_pictures.slots(results, paths["relations"])
    if results.verdicts["robust"]["settings"]:
        report_pictures.shares(results, paths["removed"])
    if results.timings is not None:
        report_pictures.times(results.timings["measured"], paths["times"])


def main() -> None:
    """Write the report and draw its pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--results", type=Path, default=ROOT / "research" / "claims" / "results", help="folder of results"
    )
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "reports" / "claims.md", help="file to write")
    parser.add_argument("--pictures", type=Path, default=PICTURES, help="folder of the pictures")
    options = parser.parse_args()
    results = Results.load(options.results)
    options.to.write_text(document(results), encoding="utf-8")
    draw(results, options.pictures)


if __name__ == "__main__":
    main()
