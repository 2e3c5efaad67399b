"""Write docs/reports/claims.md and its pictures from research/claims/results/.

python -m research.claims.report [--results FOLDER]
"""

import argparse
import textwrap
from itertools import chain
from pathlib import Path

from research.claims import report_pictures
from research.claims.report_tables import (
    distances,
    good,
    loss_table,
    machine,
    ranks,
    relations,
    small,
    timing,
    turns,
    without,
)
from research.claims.report_text import BACKGROUND, INTRODUCTION, METHOD, RULES, TITLES
from research.claims.result_files import FEW_DATA, MAIN, Results
from research.claims.verdicts import Verdict, capacity, different, eight, parallel, regularises, robust, turning
from research.markdown import markdown_table

ROOT = Path(__file__).parent.parent.parent
PICTURES = ROOT / "docs" / "pictures"

SECTIONS = {
    "different": (
        distances,
        lambda results: different([*results.layers, *chain(*results.layers_by_real_model.values())]),
    ),
    "capacity": (
        lambda results: [*loss_table(results.settings), *relations(results), *ranks(results)],
        lambda results: capacity(results.settings),
    ),
    "parallel": (timing, lambda results: parallel(results.clock)),
    "regularises": (small, lambda results: regularises(results.studies[FEW_DATA])),
    "robust": (without, lambda results: robust(results.studies[MAIN])),
    "more": (turns, lambda results: turning(results.settings)),
    "eight": (good, lambda results: eight(results.settings)),
}


def wrap(paragraph: str) -> str:
    """Return a paragraph in lines of at most 120 characters, without breaks at hyphens."""
    return textwrap.fill(paragraph, 120, break_on_hyphens=False)


def document(results: Results) -> str:
    """Return the text of the report, with wrapped paragraphs."""
    verdicts: dict[str, Verdict] = {name: verdict(results) for name, (_, verdict) in SECTIONS.items()}
    rows = [(TITLES[name], verdict.outcome, verdict.figure) for name, verdict in verdicts.items()]
    lines = [
        "# Claims",
        "",
        INTRODUCTION,
        "",
        *markdown_table(("claim", "verdict", "decisive figure"), rows),
        *METHOD,
        "",
    ]
    for name, (section, _) in SECTIONS.items():
        sentence = verdicts[name].sentence
        lines += [
            f"## {TITLES[name]}",
            "",
            BACKGROUND[name],
            "",
            f'Rule for the claim "{TITLES[name]}": {RULES[name]}',
            "",
            *section(results),
        ]
        lines += [f"**{sentence[0].upper()}{sentence[1:]}.**", ""]
    lines += machine(results)
    wrapped = (line if line.startswith(("|", "#", "!")) else wrap(line) for line in lines)
    return "\n".join(wrapped).rstrip() + "\n"


def draw(results: Results) -> None:
    """Draw all pictures of the report."""
    paths = {name: PICTURES / f"claims-{name}.png" for name in ("losses", "distances", "times", "relations")}
    report_pictures.losses(results.settings, paths["losses"])
    report_pictures.heads_apart(results.layers, results.layers_by_real_model, paths["distances"])
    report_pictures.times(results.clock, paths["times"])
    of_relations = [study for name, study in results.studies.items() if name.startswith("relations")]
    report_pictures.slots(of_relations, paths["relations"])
    report_pictures.gap(results.studies[FEW_DATA], PICTURES / "claims-gap.png")
    report_pictures.removed(results.studies[MAIN], PICTURES / "claims-removed.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--results", type=Path, default=ROOT / "research" / "claims" / "results", help="folder of results"
    )
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "reports" / "claims.md", help="file to write")
    options = parser.parse_args()
    results = Results.load(options.results)
    options.to.write_text(document(results), encoding="utf-8")
    draw(results)


if __name__ == "__main__":
    main()
