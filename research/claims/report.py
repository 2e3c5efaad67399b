"""Write docs/reports/claims.md and its pictures from what `python -m research.claims` left in research/claims/results/.

python -m research.claims.report [--results FOLDER]
"""

import argparse
import textwrap
from itertools import chain
from pathlib import Path

from research.claims import pictures
from research.claims.claims_text import BEGINNING, INTRODUCTION, RULES, TITLES
from research.claims.found import FEW_DATA, MAIN, Results, markdown
from research.claims.sections import (
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
from research.claims.verdicts import Verdict, capacity, different, eight, parallel, regularises, robust, turning

ROOT = Path(__file__).parent.parent.parent
PICTURES = ROOT / "docs" / "pictures"

SECTIONS = {
    "different": (distances, lambda results: different([*results.layers, *chain(*results.of_real.values())])),
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


def document(results: Results) -> str:
    """The whole text, its paragraphs wrapped."""
    verdicts: dict[str, Verdict] = {name: verdict(results) for name, (_, verdict) in SECTIONS.items()}
    rows = [(TITLES[name], verdict.outcome, verdict.figure) for name, verdict in verdicts.items()]
    lines = ["# Claims", "", INTRODUCTION, "", *markdown(("claim", "verdict", "the figure"), rows)]
    for name, (section, _) in SECTIONS.items():
        sentence = verdicts[name].sentence
        lines += [f"## {TITLES[name]}", "", BEGINNING[name], "", f"The rule: {RULES[name]}", "", *section(results)]
        lines += [f"**{sentence[0].upper()}{sentence[1:]}.**", ""]
    lines += machine(results)
    wrapped = (line if line.startswith(("|", "#", "!")) else textwrap.fill(line, 120) for line in lines)
    return "\n".join(wrapped).rstrip() + "\n"


def draw(results: Results) -> None:
    """The pictures."""
    paths = {name: PICTURES / f"claims-{name}.png" for name in ("losses", "distances", "times", "relations")}
    pictures.losses(results.settings, paths["losses"])
    pictures.heads_apart(results.layers, results.of_real, paths["distances"])
    pictures.times(results.clock, paths["times"])
    of_relations = [study for name, study in results.studies.items() if name.startswith("relations")]
    pictures.slots(of_relations, paths["relations"])
    pictures.gap(results.studies[FEW_DATA], PICTURES / "claims-gap.png")
    pictures.removed(results.studies[MAIN], PICTURES / "claims-removed.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "research" / "claims" / "results")
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "reports" / "claims.md", help="where the text goes")
    given = parser.parse_args()
    results = Results.load(given.results)
    given.to.write_text(document(results), encoding="utf-8")
    draw(results)


if __name__ == "__main__":
    main()
