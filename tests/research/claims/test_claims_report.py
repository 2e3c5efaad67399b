"""The report of the claims, written from invented results."""

import math
import re

import pytest
from claims_examples import HEADS, HELD, NOT, UNDECIDED, regime_of

from research.claims import report as make_claims
from research.claims.report_text import TITLES
from research.claims.result_files import FEW_DATA, MAIN, RANKED, Results
from research.claims.study_results import Study


def saved_study(name, **more):
    """Return a study as it is saved, with every measure that the report uses, for three seeds."""
    runs = {}
    for heads in HEADS:
        runs[str(heads)] = [
            {
                "seed": seed,
                "rate": 1e-3,
                "loss": 2.0 + seed / 100 - math.log2(heads) / 10,
                "train_loss": 1.5,
                "ranks": {"rank": 4.0, "of the scores": 2.0, "of the weights": 3.0},
                "distance": {kind: {"0": 0.25 * seed} for kind in ("trained", "untrained", "as sharp")},
                "removed": {
                    "heads": 2 * heads,
                    "whole": 2.0,
                    "least": {str(heads): 2.5, str(2 * heads): 4.0},
                    "random": {str(heads): [2.5, 3.5]},
                },
            }
            for seed in (1, 2, 3)
        ]
    saved = {"data": name, "task": "next byte", "width": 64, "depth": 2, "margin": 0.05, "is_setting": True}
    saved |= {"steps": 12, "trials": 1, "parameters": {"1": 1000.0}, "held out": 64, "runs": runs}
    return saved | {"training": {"batches": 4, "tokens a batch": 512}} | more


@pytest.fixture
def results():
    """Results of all studies, of one real model and of timings."""
    studies = {name: saved_study(name) for name in (MAIN, FEW_DATA, *RANKED)}
    studies["relations-places"] = saved_study("generated", task="several relations, by place", is_setting=False)
    for heads, runs in studies["relations-places"]["runs"].items():
        for run in runs:
            run |= {"accuracy": [1.0, 0.5, 0.25, 0.125], "weights": [[0.25] * 4] * int(heads)}
    kinds = {"untrained": [[{"0": 0.5}, {"0": 0.25}]] * 2, "as sharp": [[{"0": 0.5}, {"0": 0.25}]] * 2}
    real = {"m": {"title": "a model", "sequences": 2, "tokens": 7, "trained": [{"0": 0.5}, {"0": 0.75}], **kinds}}
    metadata = {"date": "2001-02-03", "cpu": "a cpu", "cores": 2, "gpu": None, "processes": 2, "threads": 1}
    metadata |= {"size": "tiny", "versions": {"torch": "1.2.3"}}
    made = {name: Study(name, saved) for name, saved in studies.items()}
    return Results(made, real, [regime_of([1.0] * 6)], dict.fromkeys((MAIN, "clock"), metadata))


def test_report_has_every_claim_its_verdict_and_complete_tables(results):
    text = make_claims.document(results)
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [*TITLES.values(), "How it was measured"]
    wanted = {"capacity": HELD, "parallel": HELD, "regularises": HELD, "more": NOT, "eight": HELD, "robust": UNDECIDED}
    for name, outcome in wanted.items():
        assert f"| {TITLES[name]} | {outcome} | " in text
        section = text.split(f"## {TITLES[name]}\n")[1].split("\n## ")[0]
        assert re.search(rf"\n\*\*{outcome.capitalize()}: [^*]*\.\*\*\n", section), name
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert all(len(line) <= 120 for line in text.splitlines() if line[:1] not in {"|", "!"})
    assert "| 1.920 ± 0.006 |" in text  # two heads: 2.01, 2.02 and 2.03, less 0.1; 0.01 / sqrt(3)
    assert not re.search(r"\bnan\b|\binf\b", text)
