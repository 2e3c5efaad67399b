"""The trainings of tiny decoders, their resumption, and the page that is written from them."""

import itertools
import json
import math
import shutil

import pytest
import torch

from research.formation import __main__ as script
from research.formation import report, report_formation
from research.formation.changes import changes, gain_of
from research.formation.decoder import Shape
from research.formation.growth import GrowthPlan
from research.formation.text import Text, held_out_rows, rows, with_quotes, with_repeats
from research.formation.training import Plan

VOCABULARY, LENGTH = 40, 16
SHAPE, PLAN = Shape(VOCABULARY, width=12, heads=2), Plan(every=2, batch=3)
GROWTH = GrowthPlan(steps=6, batch=2, length=11, width=12, heads=2)


def tiny_text():
    """Return random rows."""
    generator = torch.Generator().manual_seed(0)
    return Text(*(torch.randint(VOCABULARY, (number, LENGTH), generator=generator) for number in (13, 7)))


def measure(folder):
    """Measure all trainings with tiny sizes."""
    script.formation(folder, tiny_text, SHAPE, PLAN)
    script.growth(folder, tiny_text, VOCABULARY, GROWTH)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A folder of results of short trainings."""
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "TRAININGS", {"repeats": (2, 10), "quotes": (1, 10), "plain": (1, 10)})
        patch.setattr(script, "GROWTH_SEEDS", 1)
        measure(folder)
        yield folder


def test_rows_are_cut_from_documents():
    assert rows([[1, 2, 3, 4, 5], [6], [7, 8]], 2).tolist() == [[1, 2], [3, 4], [7, 8]]


@pytest.mark.parametrize("copied", [with_repeats, with_quotes])
def test_copied_tokens_follow_an_earlier_copy(copied):
    ids = torch.arange(20 * LENGTH).view(20, LENGTH)
    changed, is_copied = copied(ids, torch.Generator().manual_seed(0))
    for row, mask in zip(changed.tolist(), is_copied.tolist(), strict=True):
        for place, token in enumerate(row):
            pairs = list(itertools.pairwise(row[:place]))
            assert mask[place] == (place > 0 and (row[place - 1], token) in pairs)
    assert is_copied.any(1).all()
    assert torch.equal(ids, torch.arange(20 * LENGTH).view(20, LENGTH))


def test_unchanged_rows_are_measured_on_repeats():
    text = tiny_text()
    plain, repeats, quotes = (held_out_rows(text, kind) for kind in ("plain", "repeats", "quotes"))
    assert torch.equal(plain[0], repeats[0])
    assert not torch.equal(plain[0], quotes[0])


def test_a_training_measures_every_head(results):
    result = json.loads((results / "repeats-1.json").read_text())
    assert result["steps"] == [0, 2, 4, 6, 8, 10]
    heads = ["0.0", "0.1", "1.0", "1.1"]
    assert list(result["induction"]) == list(result["costs"]) == heads
    for curves in result["monitor"].values():
        assert list(curves) == heads
        assert {len(curve) for curve in curves.values()} == {6}
    assert result["loss"]["new"][0] == pytest.approx(math.log(VOCABULARY), rel=0.5)


def test_a_stopped_run_resumes_to_the_same_numbers(results):
    kept, lost = results / "repeats-0.json", results / "repeats-1.json"
    times, before = kept.stat().st_mtime_ns, json.loads(lost.read_text())
    lost.unlink()
    measure(results)
    after = json.loads(lost.read_text())
    assert kept.stat().st_mtime_ns == times
    for name in ("loss", "induction", "monitor", "costs"):
        assert after[name] == before[name]


def test_both_trainings_with_growing_logits_start_alike(results):
    growing, clipped = (json.loads((results / f"{kind}-0.json").read_text()) for kind in ("growing", "clipped"))
    assert growing["loss"][0] == clipped["loss"][0]
    assert growing["max_logit"][0] == clipped["max_logit"][0]
    assert growing["clips"] == 0
    assert len(growing["loss"]) == len(growing["max_logit"]) == GROWTH.steps


def saved(induction, copied):
    """Return a result in which a head of the second layer has these scores, with this loss on copied tokens."""
    steps = list(range(0, 20 * len(induction), 20))
    flat = [0.01] * len(steps)
    return {
        "seed": 3,
        "steps": steps,
        "loss": {"new": [4.0] * len(steps), "copied": copied},
        "induction": {"0.0": flat, "0.1": flat, "1.0": induction},
        "monitor": {"previous": {"0.0": induction, "0.1": flat, "1.0": flat}},
        "costs": {"0.0": 2.0, "0.1": 0.25, "1.0": 1.0},
    }


def test_changes_are_those_of_known_curves():
    induction = [0.0 if step < 15 else 0.8 for step in range(30)]
    copied = [4.0 if step < 10 else 1.0 for step in range(30)]
    change = changes(saved(induction, copied))
    assert (change.head, change.previous_head, change.cost, change.is_formed) == ("1.0", "0.0", 1.0, True)
    assert change.score == pytest.approx(0.8)
    assert change.score_half == pytest.approx(290, abs=0.2)
    assert change.previous_half == pytest.approx(290, abs=0.2)
    assert change.gain_half == pytest.approx(190)
    assert 150 <= change.loss_steepest <= 250
    assert gain_of({"new": [4.0], "copied": [1.0]}) == [3.0]


def test_without_an_induction_head_no_step_is_in_the_table():
    change = changes(saved([0.05] * 30, [4.0] * 30))
    assert not change.is_formed
    assert report_formation.table_of_steps([change])[2] == "| 3 | 0.05 | none | none | none | none | none | none |"


def test_the_page_has_the_numbers_of_the_results(results, tmp_path, monkeypatch):
    results = shutil.copytree(results, tmp_path / "results")
    for seed in (0, 1):
        path = results / f"repeats-{seed}.json"
        result = json.loads(path.read_text())
        induction = [0.0 if step < 15 else 0.8 for step in range(30)]
        copied = [4.0 if step < 10 + seed else 1.0 for step in range(30)]
        path.write_text(json.dumps(result | saved(induction, copied) | {"seed": seed}))
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    monkeypatch.setattr(
        "sys.argv", ["", "--results", str(results), "--to", str(tmp_path / "p.md"), "--pictures", str(pictures)]
    )
    report.main()
    page = (tmp_path / "p.md").read_text()
    assert "| 0 | 0.80 | 290 | 190 | 290 |" in page
    assert "| 1 | 0.80 | 290 | 210 | 290 |" in page
    assert "formed in 2 of 2 seeds" in page
    assert "form in 0 of 1 seeds" in page
    assert "2.00 to 2.00 nats without the previous-token head" in " ".join(page.split())
    names = {path.name for path in pictures.iterdir()}
    assert names == {f"formation{name}.png" for name in ("", "-seeds", "-quotes", "-logits")}
    assert all(f"pictures/{name}" in page for name in names)
    assert all(len(line) <= 120 or line.startswith("|") for line in page.splitlines())


def test_the_page_in_docs_is_that_of_the_saved_results():
    assert (report.ROOT / "docs" / "formation.md").read_text(encoding="utf-8") == report.page(report.RESULTS)
