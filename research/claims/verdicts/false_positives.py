"""Count how often claims 2 and 6 are found where they are false.

python -m research.claims.verdicts.false_positives [FOLDER]    writes FOLDER/false_positives.json

Results are drawn anew in which all numbers of heads have the same expected loss, with the spread over seeds and
documents of the measured ones. All models of a number of heads share a learning rate, which was chosen with two seeds.
This choice moves the losses of these models together, which no error over seeds contains. Its size is not known, so
that several are tried.
"""

import json
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from .cells import RESULTS, cells_of
from .definitions import NOT, SOURCES
from .losses import capacity, more
from .settings import Setting, complete_settings

RUNS, SEED = 100, 0
CHOICES = (0.0, 0.01, 0.02)
"""Standard deviations, in nats, of what the choice of the learning rate adds to the losses of a number of heads."""


def without_effect(setting: Setting, choice: float, draw: np.random.Generator) -> Setting:
    """Return a setting in which all numbers of heads have the same expected loss.

    The losses of its seeds are normal with the measured variance. Those of documents, and the validation loss, are as
    far from them as those of a measured seed, drawn at random.
    """
    cells: list[Any] = deepcopy([setting.cells[heads] for heads in setting.heads])
    mean = np.mean([setting.values(heads).mean() for heads in setting.heads])
    for cell in cells:
        measured, validation = (setting.values(cell["heads"], what) for what in ("test", "validation"))
        moved = mean + choice * draw.standard_normal()
        shift = np.mean(validation - measured)
        for run in cell["runs"]:
            source = setting.cells[cell["heads"]]["runs"][draw.integers(len(measured))]
            run["test"] = moved + measured.std(ddof=1) * draw.standard_normal()
            run["validation"] = run["test"] + shift + draw.choice(validation - measured - shift)
            if cell["rows of documents"]:
                run["documents"] = [loss - source["test"] + run["test"] for loss in source["documents"]]
    return Setting(cells)


def shares(settings: Sequence[Setting]) -> dict[str, Any]:
    """Return, by the name of a claim and the size of the choice, in which share of the runs the claim is found true in
    some setting, and in which the verdict is other than "did not hold".
    """
    found: dict[str, Any] = {}
    for name, claim in (("capacity", capacity), ("more", more)):
        for choice in CHOICES:
            draw = np.random.default_rng(SEED)
            verdicts = [claim([without_effect(each, choice, draw) for each in settings]) for _ in range(RUNS)]
            somewhere = [any(row["sign"] > 0 for row in verdict["settings"].values()) for verdict in verdicts]
            other = [verdict["outcome"] != NOT for verdict in verdicts]
            found.setdefault(name, {})[str(choice)] = {
                "in some setting": float(np.mean(somewhere)),
                "another verdict": float(np.mean(other)),
            }
    return {"runs": RUNS, "settings": len(settings), "claims": found}


def main() -> None:
    """Write the shares of a folder of results."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    settings = [each for each in complete_settings(cells_of(folder))[0] if each.task in SOURCES and len(each.heads) > 1]
    found = json.dumps(shares(settings), indent=1, allow_nan=False)
    (folder / "false_positives.json").write_text(found + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
