"""The report of the claims, written from the results of a run that takes seconds."""

import json
import math
import re

import pytest

from research.claims import report, report_verdicts
from research.claims.corpora import Corpus
from research.claims.estimates import mean_and_error, shown
from research.claims.report_text import TITLES
from research.claims.result_files import Results, write_json
from research.claims.tasks import Cell, all_tasks, tiny
from research.claims.trainings import measure_cell
from research.claims.verdicts.judge import judge

TASKS = ("relations", "python", "python-few")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder of results of tiny trainings, with verdicts and an invented published model."""
    out = tmp_path_factory.mktemp("claims")
    for task in (tiny(task) for task in all_tasks() if task.name in TASKS):
        for heads in task.heads:
            measure_cell(Cell(task, task.schemes[-1], heads), out)
    corpus = Corpus({f"d{number:02}": [chr(97 + number % 26) * 60] for number in range(40)})
    write_json(out / "corpora.json", {"python": corpus.description()})
    layers = {"0": 0.3, "1": 0.4}
    published = {
        "title": "A model",
        "trained": [layers, {"0": 0.31, "1": 0.42}],
        "untrained": [[layers] * 2],
        "as sharp": [[{"0": 0.5, "1": 0.6}] * 2],
        "entropy": {"trained": [1.0, 1.0], "as sharp": [[1.0, 1.0]]},
    }
    write_json(out / "published.json", {"measured": {"a": published}})
    seconds = {
        f"{what} {kind} {n}": [1.0, 1.1, 1.3]
        for what in ("forward", "training")
        for kind in ("fused", "list")
        for n in (1, 2)
    }
    timings = [{"device": "cpu", "batch": 1, "length": 8, "width": 16, "seconds": seconds}]
    write_json(out / "timings.json", {"about": {"threads": 2}, "measured": timings})
    (out / "verdicts.json").write_text(json.dumps(judge(out)))
    shares = {"0.01": {"in some setting": 0.24, "another verdict": 0.13}}
    simulated = {"runs": 40, "settings": 3, "claims": {"capacity": shares, "more": shares}}
    (out / "false_positives.json").write_text(json.dumps(simulated))
    return out


@pytest.mark.filterwarnings("ignore")
def test_report_states_every_claim_with_its_verdict(folder):
    results = Results.load(folder)
    text = report.document(results)
    for name, title in TITLES.items():
        outcome = results.verdicts[name]["outcome"]
        assert f"## {title}" in text
        assert re.search(rf"\| {re.escape(title)} \| {outcome} \|", text)
    opening = text.split("\n\n")[1]
    assert [line[0] for line in re.findall(r"^\d\.", opening, re.M)] == list("12345")
    assert "on 2 CPU threads" in text
    assert not re.search(r"\bnan\b", text)
    for line in text.splitlines():
        assert line.startswith(("|", "!")) or len(line) <= 120


@pytest.mark.filterwarnings("ignore")
def test_report_names_what_is_missing_and_quotes_the_deviations(folder):
    text = report.document(Results.load(folder))
    assert '"More heads, more capacity" is not decided' in text
    assert re.search(r"Settings that are not measured, or not completely: [^.]*bible,\s+none", text)
    assert "## Deviations from the rules" in text
    assert report_verdicts.deviations("a\n\n## Deviations\n\nOne.\n")[2] == "One."


@pytest.mark.filterwarnings("ignore")
def test_report_shows_infinite_losses(folder, tmp_path):
    results = Results.load(folder)
    (run, *_) = results.settings["python-few", "spread"][32]["runs"]
    was, run["test"] = run["test"], None
    try:
        assert re.search(r"\| infinite \| infinite \|", report.document(results))
        report.draw(results, tmp_path)
    finally:
        run["test"] = was


def test_infinite_values_have_a_mean_without_an_error():
    mean, error = mean_and_error([1.0, math.inf])
    assert (mean, math.isnan(error), shown([1.0, math.inf])) == (math.inf, True, "infinite")


def test_devices_are_named_with_their_threads():
    counts = {"counts": {"free": 1, "not free": 2, "open": 0}, "cases": [0, 0, 0], "threads": 1, "gpu": "H100"}
    opening = "on 1 CPU thread, several heads take no extra time compared with one head in 1 of 3 cases"
    assert report_verdicts._device("cpu", counts).startswith(opening)
    assert report_verdicts._device("cuda", counts).startswith("on H100, ")


def test_report_draws_its_pictures(folder, tmp_path):
    results = Results.load(folder)
    report.draw(results, tmp_path)
    named = set(re.findall(r"pictures/(claims-\w+\.png)", report.document(results)))
    assert {path.name for path in tmp_path.glob("*.png")} == named - {"claims-removed.png"}  # tiny models lose nothing
