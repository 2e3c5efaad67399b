"""The verdicts, from invented results whose outcome is known."""

import ast
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from research.claims import verdicts
from research.claims.verdicts import (
    comparisons,
    definitions,
    distances,
    false_positives,
    judge,
    losses,
    removals,
    timings,
)
from research.claims.verdicts.settings import Setting

HEADS = (1, 2, 4, 8)


def cells_of(means, task="python", scheme="rotary", spread=0.002, documents=12, extra=None):
    """Return cells whose runs have these mean test losses; document d adds (d - 5.5) / 50."""
    draw, cells = np.random.default_rng(len(task)), []
    for heads, mean in means.items():
        runs = []
        for seed in range(6):
            loss = mean + spread * draw.standard_normal()
            by_document = [loss + (d - (documents - 1) / 2) / 50 for d in range(documents)]
            run = {"seed": seed, "test": loss, "validation": loss + 0.01, "training": loss - 0.1}
            runs.append(run | {"documents": by_document, **(extra(heads, seed) if extra else {})})
        about = {"task": task, "scheme": scheme, "heads": heads, "compared": list(means), "is_setting": True}
        about |= {"parameters": 10, "rate": 0.002}
        rows = [3] * documents
        search = {"0": [1.0], "1": [0.5], "2": [0.9]}
        cells.append(about | {"rows of documents": rows, "runs": runs, "complete": True, "search": search})
    return cells


def setting_of(means, **options):
    return Setting(cells_of(means, **options))


ALIKE = dict.fromkeys(HEADS, 2.0)
TURN = {1: 2.3, 2: 2.0, 4: 2.1, 8: 2.4}
TURN_OF_FEW = {1: 2.3, 4: 2.0, 8: 2.4}


def test_the_verdicts_import_nothing_of_the_library():
    files = list(Path(verdicts.__file__).parent.glob("*.py"))
    assert len(files) > 5
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    assert max(node.level for node in nodes if isinstance(node, ast.ImportFrom)) == 1
    assert not [name for name in imported if name.startswith(("headwise", "research", "torch"))]


def test_games_howell_equals_its_formula():
    draw = np.random.default_rng(0)
    groups = {heads: draw.normal(heads / 10, heads, 5 + heads) for heads in (1, 2, 4)}
    found = comparisons.games_howell(groups)
    for a, b in ((1, 2), (1, 4), (2, 4)):
        x, y = groups[a], groups[b]
        vx, vy = x.var(ddof=1) / len(x), y.var(ddof=1) / len(y)
        freedom = (vx + vy) ** 2 / (vx**2 / (len(x) - 1) + vy**2 / (len(y) - 1))
        q = abs(x.mean() - y.mean()) / np.sqrt((vx + vy) / 2)
        assert found[a, b] == found[b, a] == pytest.approx(scipy.stats.studentized_range.sf(q, 3, freedom), rel=1e-6)


def test_bootstrap_draws_seeds_and_documents():
    """Documents that add the same to both numbers of heads cancel; a difference in one document alone widens."""
    setting = setting_of(TURN, spread=0.02)
    low, high = comparisons.bootstrap(setting, 8, 2, "test")
    values = setting.values(8), setting.values(2)
    spread = np.sqrt(sum(each.var() / 6 for each in values))
    assert high - low == pytest.approx(2 * 1.96 * spread, rel=0.1)
    for run in setting.cells[8]["runs"]:
        run["documents"][0] += 12.0
    wide = comparisons.bootstrap(setting, 8, 2, "test")
    assert wide[1] - wide[0] > 1.0
    generated = cells_of(TURN)
    for cell in generated:
        cell["rows of documents"] = []
    assert comparisons.bootstrap(Setting(generated), 8, 2, "test") is None


@pytest.mark.parametrize(("means", "worse"), [(TURN, True), (ALIKE, False), ({1: 2.0, 2: 2.1, 4: 2.2, 8: 2.3}, False)])
def test_capacity_and_more(means, worse):
    settings = [setting_of(means, task=task) for task in definitions.SOURCES]
    found = losses.capacity(settings)
    assert found["outcome"] == ("held" if worse else "did not hold")
    more = losses.more(settings)
    assert more["outcome"] == ("did not hold" if means is ALIKE else "held")


def test_a_difference_below_a_hundredth_of_a_nat_does_not_count():
    means = {1: 2.0, 2: 2.0, 4: 2.0, 8: 2.008}
    row = losses.more([setting_of(means, spread=1e-5)])["settings"]["python, rotary"]
    assert row["holm"] < 1e-6
    assert row["sign"] == 0


def test_the_verdict_names_schemes_and_sources():
    settings = [setting_of(TURN, task="python"), setting_of(ALIKE, task="bible")]
    settings += [setting_of(ALIKE, task=task, scheme="spread") for task in ("python", "bible")]
    settings += [setting_of(TURN, task="masked", scheme="spread")]
    found = losses.more(settings)
    assert found["outcome"] == "depends"
    assert found["schemes"]["rotary"] == {"true in": ["python"], "false in": ["bible"], "outcome": "depends"}
    assert found["schemes"]["spread"]["outcome"] == "did not hold"
    assert found["further"]["masked, spread"]["sign"] == 1
    (between,) = [row for row in found["between schemes"] if row["task"] == "python"]
    assert between["difference"] == pytest.approx(0.4, abs=0.01)


def removed(shares):
    """Return what measures of removed heads a run has, for a share of half of the heads by number of heads."""
    return lambda heads, seed: {
        "removed": {
            "whole": 2.0,
            "all": 3.0,
            "least": 2.1 + 0.001 * seed,
            "half": [2.0 + shares[heads] + 0.003 * seed, 2.0 + shares[heads] - 0.002 * seed],
        }
    }


@pytest.mark.parametrize(
    ("shares", "outcome", "shape"),
    [
        ({1: 0.6, 2: 0.5, 4: 0.4, 8: 0.3}, "held", "falls"),
        ({1: 0.5, 2: 0.6, 4: 0.7, 8: 0.4}, "did not hold", "rises and falls"),
        ({1: 0.5, 2: 0.5, 4: 0.5, 8: 0.5}, "did not hold", "flat"),
        ({1: 0.5, 2: 0.6, 4: 0.7, 8: 0.8}, "did not hold", "rises"),
    ],
)
def test_robust_fits_no_line(shares, outcome, shape):
    settings = [setting_of(ALIKE, task=task, extra=removed(shares)) for task in definitions.ROBUST]
    found = removals.robust(settings)
    assert found["outcome"] == outcome
    assert {row["half shape"] for row in found["settings"].values()} == {shape}
    assert found["settings"]["python, rotary"]["half"][2][0] == pytest.approx(shares[2], abs=0.002)


@pytest.mark.parametrize(
    ("gaps", "test_losses", "holds"),
    [
        ({1: 0.5, 2: 0.4, 4: 0.4, 8: 0.4}, ALIKE, True),
        ({1: 0.5, 2: 0.4, 4: 0.4, 8: 0.4}, {1: 2.0, 2: 2.2, 4: 2.2, 8: 2.2}, False),
        ({1: 0.5, 2: 0.6, 4: 0.6, 8: 0.6}, ALIKE, False),
    ],
)
def test_regularises_demands_a_smaller_gap_without_a_larger_loss(gaps, test_losses, holds):
    settings = []
    for task in definitions.FEW:
        cells = cells_of(test_losses, task=task)
        for cell in cells:
            for run in cell["runs"]:
                run["training"] = run["test"] - gaps[cell["heads"]]
        settings.append(Setting(cells))
    assert losses.regularises(settings)["outcome"] == ("held" if holds else "did not hold")


def test_eight_is_good_bad_or_open():
    means = {1: 2.5, 2: 2.0, 4: 2.05, 8: 2.002}
    rows = losses.eight([setting_of(means)])["settings"]["python, rotary"]
    assert rows["best"] == 2
    assert {heads: row["grade"] for heads, row in rows["heads"].items()} == {1: "bad", 2: "good", 4: "bad", 8: "good"}
    wide = losses.eight([setting_of(means, spread=0.3)])["settings"]["python, rotary"]
    assert "open" in {row["grade"] for row in wide["heads"].values()}


def measured_distances(trained, sharp, missed=0.0):
    return lambda heads, seed: {
        "distance": {
            "trained": {"0": trained + 0.001 * seed, "1": trained},
            "as sharp": {"0": sharp, "1": sharp + 0.002 * seed},
        },
        "entropy": {"trained": [1.0, 1.0], "as sharp": [1.0, 1.0 + missed]},
    }


@pytest.mark.parametrize(("trained", "sharp", "outcome"), [(0.6, 0.5, "held"), (0.5, 0.6, "did not hold")])
def test_different_is_decided_by_the_equally_sharp_control(trained, sharp, outcome):
    settings = [setting_of(ALIKE, task=task, extra=measured_distances(trained, sharp)) for task in ("python", "bible")]
    found = distances.different(settings, {})
    assert found["outcome"] == outcome
    per_model = [trained - sharp + 0.0005 * seed - 0.001 * seed for seed in range(6)]
    effect = found["effects"]["bible, rotary"]
    assert effect["mean"] == pytest.approx(np.mean(per_model))
    assert effect["error"] == pytest.approx(np.std(per_model, ddof=1) / np.sqrt(6))
    assert found["mixed model"]["mean"] == pytest.approx(np.mean(per_model), rel=1e-3)


def test_layers_whose_control_misses_the_entropy_are_left_out():
    settings = [setting_of(ALIKE, extra=measured_distances(0.6, 0.5, missed=0.2))]
    found = distances.different(settings, {})
    assert found["layers left out"] == 6
    assert found["effects"]["python, rotary"]["mean"] == pytest.approx(0.1 + 0.0025)


def test_published_models_are_judged_by_document():
    draw = np.random.default_rng(0)
    table = 0.4 + 0.05 * draw.standard_normal((9, 3))
    published = {
        "m": {
            "title": "M",
            "trained": [dict(enumerate(row)) for row in table],
            "as sharp": [[dict.fromkeys(range(3), 0.5)] * 9] * 2,
            "entropy": {"trained": [1.0] * 3, "as sharp": [[1.0, 1.01, 2.0]] * 2},
        }
    }
    found = distances.different([], published)
    values = table[:, :2].mean(1) - 0.5
    assert found["effects"]["M"]["p"] == pytest.approx(scipy.stats.ttest_1samp(values, 0).pvalue)
    assert found["outcome"] == "did not hold"
    assert found["layers left out"] == 1


def test_times_are_judged_by_device():
    seconds = {"forward fused 1": [1.0, 1.0, 1.0], "forward fused 2": [1.0, 1.05, 1.02], "forward list 1": [1.0] * 3}
    seconds |= {"forward fused 4": [1.3, 1.4, 1.2], "forward fused 8": [1.0, 1.09, 1.4]}
    regime = {"device": "cpu", "batch": 1, "length": 2, "seconds": seconds}
    found = timings.parallel({"about": {"threads": 2}, "measured": [regime]})
    assert [case["verdict"] for case in found["devices"]["cpu"]["cases"]] == ["free", "not free", "open"]
    assert found["outcome"] == "depends"
    assert timings.parallel(None)["outcome"] == "not measured"


def saved(folder, cells):
    """Write files of cells into a folder."""
    (folder / "cells").mkdir(exist_ok=True)
    for cell in cells:
        name = f"{cell['task']}-{cell['scheme']}-{cell['heads']}.json"
        (folder / "cells" / name).write_text(json.dumps(cell))
    return folder


def every_cell(means=TURN_OF_FEW, without=()):
    """Return the cells of all settings that are expected, but for those that are named."""

    def both(heads, seed):
        return removed(dict.fromkeys(HEADS, 0.5))(heads, seed) | measured_distances(0.6, 0.5)(heads, seed)

    return [
        cell
        for task, schemes in definitions.EXPECTED.items()
        for scheme in schemes
        if f"{task}, {scheme}" not in without
        for cell in cells_of(means, task=task, scheme=scheme, extra=both)
    ]


def test_incomplete_settings_and_rates_at_an_edge_are_named(tmp_path):
    cells = every_cell(without=("bible, spread",))
    next(cell for cell in cells if cell["task"] == "bible")["complete"] = False
    cells[0] |= {"search": {"0": [1.0], "1": [2.0]}, "rate": 0.001}
    found = judge.judge(saved(tmp_path, cells))
    assert found["incomplete settings"] == ["bible, none", "bible, spread", "minilm", "smollm2"]
    assert found["rates at an edge"] == ["python-none-1"]
    assert found["rates"] == len(cells) - 1


def test_a_verdict_that_a_missing_setting_could_change_is_not_given(tmp_path):
    whole = judge.judge(saved(tmp_path, every_cell()))
    assert whole["more"]["outcome"] == "held"
    assert whole["different"]["outcome"] == "not measured"  # without published models
    for path in (tmp_path / "cells").glob("lookup-spread-*"):
        path.unlink()
    found = judge.judge(tmp_path)
    assert found["more"]["outcome"] == found["capacity"]["outcome"] == "not measured"
    assert found["more"]["schemes"]["spread"]["missing"] == ["lookup"]
    assert found["more"]["schemes"]["rotary"]["outcome"] == "held"
    assert found["robust"]["outcome"] == found["regularises"]["outcome"] == "did not hold"


def test_a_missing_setting_cannot_change_that_a_claim_depends():
    settings = [Setting(cells_of(means, task=task)) for task, means in (("python", ALIKE), ("bible", TURN))]
    found = judge.withheld(losses.more(settings), ["lookup, rotary"], definitions.SOURCES)
    assert found["schemes"]["rotary"]["outcome"] == found["outcome"] == "depends"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda cell: cell["runs"][2].pop("validation"), "python-rotary-2.json: KeyError"),
        (lambda cell: cell["runs"][2].update(seed=1), "repeat"),
        (lambda cell: cell["runs"][0].update(test=float("nan")), "not finite"),
        (lambda cell: cell["runs"][0]["documents"].pop(), "11 documents of 12"),
        (lambda cell: cell["runs"][0].update(test=2.5), "not the mean of its documents"),
        (lambda cell: cell.update(rate=0.004), "not the best of those tried"),
        (lambda cell: cell["search"].pop("1"), "gaps"),
        (lambda cell: cell["search"]["2"].append(1.0), "different numbers of seeds"),
        (lambda cell: cell["runs"].pop(), "differ in their seeds"),
        (lambda cell: cell.update(parameters=11), "differ in parameters"),
        (lambda cell: cell["runs"][0].pop("removed"), "removed"),
    ],
)
def test_malformed_cells_are_refused_by_name(tmp_path, change, message):
    cells = cells_of(TURN, extra=removed(dict.fromkeys(HEADS, 0.5)))
    change(cells[1])
    with pytest.raises(ValueError, match=message):
        judge.judge(saved(tmp_path, cells))


def test_false_positives_are_those_of_the_choice_of_the_rate(monkeypatch):
    monkeypatch.setattr(false_positives, "RUNS", 8)
    monkeypatch.setattr(false_positives, "CHOICES", (0.0, 0.5))
    settings = [setting_of(TURN_OF_FEW, task=task) for task in definitions.SOURCES]
    found = false_positives.shares(settings)["claims"]
    assert found["more"]["0.0"] == found["capacity"]["0.0"] == {"in some setting": 0.0, "another verdict": 0.0}
    assert found["more"]["0.5"]["in some setting"] > 0.5 < found["capacity"]["0.5"]["another verdict"]


def test_generated_data_have_false_positives_without_documents():
    cells = cells_of(TURN_OF_FEW, task="lookup", spread=0.1)
    for cell in cells:
        cell["rows of documents"] = []
        for run in cell["runs"]:
            del run["documents"]
    drawn = false_positives.without_effect(Setting(cells), 0.0, np.random.default_rng(0))
    assert drawn.documents(drawn.best, "test") is None
    assert np.isfinite(drawn.values(drawn.best)).all()


def test_results_without_effect_have_the_measured_spread():
    setting = setting_of(TURN_OF_FEW, spread=0.1)
    drawn = [false_positives.without_effect(setting, 0.0, np.random.default_rng(n)) for n in range(200)]
    for heads in TURN_OF_FEW:
        values = np.concatenate([each.values(heads) for each in drawn])
        assert values.mean() == pytest.approx(np.mean([setting.values(h).mean() for h in TURN_OF_FEW]), abs=0.02)
        assert values.std() == pytest.approx(setting.values(heads).std(ddof=1), rel=0.1)
        means = drawn[0].documents(heads, "test").mean(1)
        assert means == pytest.approx(drawn[0].values(heads), rel=1e-9)


def test_illustrations_are_not_judged(tmp_path):
    saved(tmp_path, cells_of(TURN, task="relations-places"))
    verdicts = judge.judge(tmp_path)
    assert "relations-places, rotary" not in verdicts["fewer seeds"] + verdicts["incomplete settings"]


def test_a_file_of_another_cell_is_refused(tmp_path):
    saved(tmp_path, cells_of(TURN, task="lookup"))
    (tmp_path / "cells" / "lookup-rotary-2.json").rename(tmp_path / "cells" / "lookup-rotary-4.json")
    with pytest.raises(ValueError, match=r"lookup-rotary-4.json.*not those of its name"):
        judge.judge(tmp_path)


def diverging(heads, task="python"):
    """Return a setting of which a training with a number of heads diverged."""
    cells = cells_of(TURN, task=task, extra=removed(dict.fromkeys(HEADS, 0.5)))
    cells[HEADS.index(heads)]["runs"][2]["validation"] = None
    return Setting(cells)


@pytest.mark.parametrize(
    ("judge", "needed", "task"),
    [
        (losses.capacity, 1, "python"),
        (losses.more, 8, "python"),
        (losses.eight, 8, "python"),
        (removals.robust, 1, "python"),
        (removals.robust, 8, "python"),
        (losses.regularises, 1, "python-few"),
    ],
)
def test_no_other_number_of_heads_takes_the_place_of_one_that_diverged(judge, needed, task):
    found = judge([diverging(needed, task)])
    assert found["not compared"] == [f"{task}, rotary"]
    assert found["schemes"] == {}
    assert judge([diverging(4, task)])["not compared"] == []


def test_equal_losses_do_not_differ_and_constant_losses_may():
    groups = {1: np.full(6, 2.0), 2: np.full(6, 2.0), 4: np.full(6, 2.5), 8: np.linspace(2, 3, 6)}
    found = comparisons.games_howell(groups)
    assert (found[1, 2], found[1, 4]) == (1.0, 0.0)
    assert found[4, 8] > 0.5


def test_the_shares_are_corrected_over_settings_for_each_pair():
    """With a correction over all pairs of all settings, a p-value of this size would be lost."""
    noise = np.linspace(-0.02, 0.02, 6)

    def of_run(heads, seed):
        share = {1: 0.5, 2: 0.5, 4: 0.5, 8: 0.465}[heads] + noise[seed]
        return {"removed": {"whole": 2.0, "all": 3.0, "least": 2.5, "half": [2.0 + share]}}

    settings = [setting_of(ALIKE, task=task, extra=of_run) for task in definitions.ROBUST]
    shares = {heads: removals._shares(settings[0], heads, "half") for heads in HEADS}
    p = comparisons.games_howell(shares)[1, 8]
    assert 0.05 / (2 * 5 * 2) < p < 0.025  # two settings, each with five pairs of two kinds
    assert all(row["half true"] for row in removals.robust(settings)["settings"].values())


def test_a_setting_without_control_is_named_and_not_counted():
    settings = [setting_of(ALIKE, task="python", extra=measured_distances(0.6, 0.5))]

    def missed(heads, seed):
        return {**measured_distances(0.6, 0.5)(heads, seed), "entropy": {"trained": [1, 1], "as sharp": [2, 2]}}

    found = distances.different([*settings, setting_of(ALIKE, task="bible", extra=missed)], {})
    assert found["not compared"] == ["bible, rotary"]
    assert (found["farther"], found["of"], found["layers left out"]) == (1, 1, 12)


def test_further_tasks_can_be_left_out_of_the_distances():
    settings = [setting_of(ALIKE, task=task, extra=measured_distances(0.6, 0.5)) for task in definitions.ROBUST]
    settings.append(setting_of(ALIKE, task="masked", extra=measured_distances(0.5, 0.6)))
    found = distances.different(settings, {})
    assert found["outcome"] == "depends"
    assert found["without further tasks"] == {"outcome": "held", "farther": 2, "closer": 0, "of": 2}


def test_the_mixed_model_equals_a_nested_analysis_of_variance():
    draw = np.random.default_rng(1)
    effect = 0.1 + 0.1 * draw.standard_normal((8, 1, 1)) + 0.05 * draw.standard_normal((8, 6, 1))
    table = effect + 0.03 * draw.standard_normal((8, 6, 2))
    rows = [(f"{s}", f"{s},{m}", layer, table[s, m, layer]) for s, m, layer in np.ndindex(table.shape)]
    found = distances._mixed_effect(pd.DataFrame(rows, columns=["setting", "model", "layer", "difference"]))
    of_settings, of_models = table.mean((1, 2)), table.mean(2)
    between_settings = 12 * of_settings.var(ddof=1)
    between_models = 2 * ((of_models - of_settings[:, None]) ** 2).sum() / (8 * 5)
    assert found["mean"] == pytest.approx(table.mean(), rel=1e-6)
    assert found["error"] == pytest.approx(np.sqrt(between_settings / table.size), rel=1e-4)
    assert found["variance of settings"] == pytest.approx((between_settings - between_models) / 12, rel=1e-4)


def test_a_penalty_of_the_best_number_is_exactly_0():
    falling = {1: 2.3, 2: 2.2, 4: 2.1, 8: 2.0}
    (row,) = losses.more([setting_of(falling), setting_of(falling, scheme="spread")])["between schemes"]
    assert row["difference"] == row["error"] == 0.0


def test_a_diverged_training_takes_its_number_of_heads_out():
    cells = cells_of(TURN)
    cells[1]["runs"][2]["test"] = None
    setting = Setting(cells)
    assert setting.diverged == [2]
    assert setting.best == 4
