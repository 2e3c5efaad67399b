"""Plans of pruning, against sorted scores, and mistakes that are named."""

import dataclasses
import json
import math

import pytest
import torch

import headwise as hw
import tiny
from headwise.analysis.ablation_result import Ablation
from headwise.compression.pruning.plan_pruning import plan_pruning
from headwise.compression.pruning.pruning_plan import PruningPlan
from headwise.runs.rows import HeadRow, MeanEstimate
from removal import families


def table(scores, heads=6, kv_heads=6):
    """Return a table with these scores for the heads of some layers."""
    rows = [
        HeadRow(
            layer=index // heads,
            head=index % heads,
            kv_head=index % heads * kv_heads // heads,
            module=f"layers.{index // heads}.self_attn",
            kind="self",
            statistics={"cost": MeanEstimate(float(score), 0.1, 3, 2), "loss": MeanEstimate(-float(score), 0.1, 3, 2)},
        )
        for index, score in enumerate(scores)
    ]
    return Ablation(tuple(rows), {})


SCORES = [5, 1, 4, 2, 0, 3, 11, 7, 10, 8, 6, 9]


def test_uniform_plans_keep_the_best_heads_of_each_layer():
    plan = plan_pruning(table(SCORES), keep=0.5)
    assert [each.kept for each in plan.modules] == [(0, 2, 5), (0, 2, 5)]
    assert plan.removed == ((0, 1), (0, 3), (0, 4), (1, 1), (1, 3), (1, 4))
    assert (plan.heads, plan.kept_heads, plan.rounds, plan.scores) == (12, 6, 1, "cost of the ablation")
    reverse = plan_pruning(table(SCORES), keep=0.5, statistic="loss")
    assert [each.kept for each in reverse.modules] == [(1, 3, 4), (1, 3, 4)]


def test_free_plans_keep_the_best_heads_of_the_model_and_one_in_each_layer():
    plan = plan_pruning(table(SCORES), keep=0.5, constraint="free")
    assert [each.kept for each in plan.modules] == [(0,), (0, 1, 2, 3, 5)]  # layer 0 would be empty
    assert [each.kept for each in plan_pruning(table(SCORES), keep=0.01, constraint="free").modules] == [(0,), (0,)]


def test_each_module_of_an_encoder_decoder_keeps_a_head():
    """The attention modules of a decoder layer state one number, and are numbered by headwise."""
    model = families.model("bart")
    plan = plan_pruning(hw.MagnitudeScores(model, families.inputs("bart")), keep=0.01, constraint="free")
    assert [each.kind for each in plan.modules] == ["self"] * 3 + ["cross", "self", "cross"]
    assert [len(each.kept) for each in plan.modules] == [1] * 6
    rows = table(SCORES).heads
    same = Ablation(tuple(dataclasses.replace(row, layer=0) for row in rows), {})
    with pytest.raises(hw.InputError, match=r"^scores: expected a layer of its own for each module, got \[0, 0\]"):
        plan_pruning(same, keep=0.5)


@pytest.mark.parametrize(
    ("constraint", "kept"),
    [
        ("uniform", [(0, 2, 3, 5), (0, 2, 3, 5)]),
        ("groups", [(0, 1, 2), (0, 1, 2)]),
        ("free", [(0, 1, 2), (0, 1, 2, 3, 4, 5)]),
    ],
)
def test_heads_that_share_keys_and_values_stay_equally_many(constraint, kept):
    keep = 0.75 if constraint == "free" else 2 / 3 if constraint == "uniform" else 0.5
    plan = plan_pruning(table(SCORES, kv_heads=2), keep=keep, constraint=constraint)
    assert [each.kept for each in plan.modules] == kept
    assert [each.kept_kv_heads for each in plan.modules] == [1 if len(each) == 3 else 2 for each in kept]


@pytest.mark.parametrize("rounds", [None, 1, 2, 5])
def test_a_function_scores_the_heads_that_remain(rounds):
    asked = []

    def score(gates):
        asked.append(dict(gates))
        removed_in_0 = sum(layer == 0 for layer, _ in gates)
        return table([value + 100 * removed_in_0 * (index < 6) for index, value in enumerate(SCORES)])

    plan = plan_pruning(score, keep=0.5, constraint="free", rounds=rounds)
    assert asked[0] == {}
    assert all(set(gates.values()) == {0.0} for gates in asked[1:])
    expected = 6 if rounds is None else rounds
    assert (plan.rounds, len(asked)) == (expected, expected)
    counts = [len(gates) for gates in asked]
    assert counts == [round(6 * number / expected + 1e-9) for number in range(expected)]
    in_layer_0 = sum(layer == 0 for layer, _ in plan.removed)
    assert in_layer_0 == {1: 5, 2: 3, 5: 1, 6: 1}[expected]


def test_plans_are_saved(tmp_path):
    model, tokenizer = tiny.model("decoder"), tiny.tokenizer("decoder")
    scores = hw.LeastSquaresScores(model, [dict(tokenizer(tiny.texts(30)[0], return_tensors="pt"))] * 2)
    plan = plan_pruning(scores, keep=0.5, constraint="groups", model=model)
    assert plan.loader == "transformers"
    plan.save(tmp_path / "plan.json")
    assert PruningPlan.load(tmp_path / "plan.json") == plan
    assert repr(plan) == "PruningPlan(6 of 12 heads remain, groups)"
    assert "plain transformers loads the pruned model" in str(plan)
    assert list(plan.table()["kept_kv_heads"]) == [1, 1]
    mixed = dataclasses.replace(plan_pruning(scores, keep=0.5, constraint="groups"), loader="headwise")
    assert "only headwise.load loads the pruned model" in str(mixed)
    for text in ("", "{}", '{"format": 2}', '{"format": 1, "modules": [{}]}'):
        (tmp_path / "plan.json").write_text(text)
        with pytest.raises(hw.InputError, match="^plan: expected JSON of a plan, got "):
            PruningPlan.load(tmp_path / "plan.json")
    with pytest.raises(hw.InputError, match="^plan: expected a file with a plan, got "):
        PruningPlan.load(tmp_path)


def test_a_plan_for_bert_needs_headwise():
    model = tiny.model("encoder")
    scores = hw.MagnitudeScores(model, dict(tiny.tokenizer("encoder")("w5 w6", return_tensors="pt")))
    assert plan_pruning(scores, keep=0.5, model=model).loader == "headwise"


@pytest.mark.usefixtures("as_user")
def test_mistakes_are_named():
    model, tokenizer = tiny.model("decoder"), tiny.tokenizer("decoder")
    least_squares = hw.LeastSquaresScores(model, [dict(tokenizer("w5 w6 w7", return_tensors="pt"))] * 2)
    for scores, options, message in (
        (table(SCORES), {"keep": 0}, "^keep: expected a finite number above 0, got 0"),
        (table(SCORES), {"keep": 1.5}, "^keep: expected a share above 0 and at most 1, got 1.5"),
        (table(SCORES), {"keep": math.nan}, "^keep: expected a finite number above 0"),
        (table(SCORES), {"keep": 0.5, "constraint": "even"}, "^constraint: expected one of uniform, groups, free, got"),
        (table(SCORES), {"keep": 0.5, "rounds": 3}, "^rounds: expected 1 for a table, .* got 3; pass a function"),
        (table(SCORES), {"keep": 0.5, "statistic": "entropy"}, "^statistic: expected one of cost, loss, got 'entropy'"),
        (table([*SCORES[:-1], math.nan]), {"keep": 0.5}, "^scores: expected a number for each head, got NaN for 1.5"),
        (least_squares, {"keep": 0.5, "constraint": "free"}, "^constraint: expected uniform or groups for these score"),
        (least_squares, {"keep": 0.5, "statistic": "cost"}, "^statistic: expected None for scores that are no table"),
        ("magnitude", {"keep": 0.5}, "^scores: expected a table of heads, .* got str"),
        (lambda gates: 3, {"keep": 0.5}, "^scores: expected a table of heads, .* got int"),
    ):
        with pytest.raises(hw.InputError, match=message):
            plan_pruning(scores, **options)


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("kept",), [0, 0, 1], r"distinct, ascending heads from 0 to 5, at least one, for layers.0.* got \[0, 0, 1\]"),
        (("kept",), [2, 1], r"distinct, ascending heads .* got \[2, 1\]"),
        (("kept",), [0.0, 1.5], "distinct, ascending heads"),
        (("kept",), "012", "JSON of a plan"),
        (("kept",), [0, 1], r"numbers of heads that the constraint uniform allows, got \[2, 3\]"),
        (("layer",), 1, r"a layer of its own for each module, got \[1, 1\]"),
        (("unknown",), 1, "JSON of a plan"),
        ("unknown", 1, "JSON of a plan"),
        (("kept",), [False, True], "distinct, ascending heads"),
        (("kept",), [], "distinct, ascending heads"),
        (("kept",), [-1], "distinct, ascending heads"),
        (("kept",), [6], "distinct, ascending heads"),
        (("num_heads",), 6.0, "whole numbers that fit each other for layers.0.self_attn, got layer 0 with 6.0 heads"),
        (("num_kv_heads",), 4, "whole numbers that fit each other"),
        (("layer",), "0", "whole numbers that fit each other"),
        (("module",), 3, "a path and a kind of attention, got 3, 'self'"),
        (("kind",), "other", "a path and a kind of attention"),
        (("module",), "layers.1.self_attn", r"each module once, got \['layers.1.self_attn', 'layers.1"),
        ((), [], r"at least one attention module, got \(\)"),
        ("keep", "x", "a share keep above 0 and at most 1, got 'x'"),
        ("keep", True, "a share keep"),
        ("rounds", -1, "a whole number of rounds, got -1"),
        ("constraint", "even", "a constraint of uniform, groups, free, got 'even'"),
        ("scores", None, "the name of the scores, got None"),
        ("loader", "torch", "a loader of transformers, headwise, none, or null, got 'torch'"),
        ("identity", ["x", 1, 2], "an identity of the model, or null"),
    ],
)
def test_edited_plans_are_checked(place, value, message):
    content = json.loads(plan_pruning(table(SCORES), keep=0.5).to_json())
    if place == ():
        content["modules"] = value
    elif isinstance(place, tuple):
        content["modules"][0][place[0]] = value
    else:
        content[place] = value
    with pytest.raises(hw.InputError, match=f"^plan: expected {message}"):
        PruningPlan.from_json(json.dumps(content))


def test_plans_without_a_value_or_with_two_are_no_plans():
    text = plan_pruning(table(SCORES), keep=0.5).to_json()
    for other in (text.replace('"loader": null,', ""), text.replace('"rounds": 1,', '"rounds": 1, "rounds": 2,')):
        assert other != text
        with pytest.raises(hw.InputError, match="^plan: expected JSON of a plan"):
            PruningPlan.from_json(other)


def test_the_statement_of_the_loader_is_derived_again():
    model = tiny.model("decoder")
    scores = hw.MagnitudeScores(model, dict(tiny.tokenizer("decoder")("w5 w6", return_tensors="pt")))
    plan = plan_pruning(scores, keep=0.5, model=model)
    part = dataclasses.replace(plan, modules=plan.modules[:1])
    with pytest.raises(hw.InputError, match="^plan: expected the loader 'headwise' for these heads, got 'trans"):
        hw.prune(model, part)
    pruned = hw.prune(model, dataclasses.replace(part, loader=None))
    assert pruned.config.headwise_kept_heads == {"layers.0.self_attn": list(plan.modules[0].kept)}
    plain = torch.nn.Sequential(hw.MultiHeadAttention(48, 6))
    plan = plan_pruning(hw.MagnitudeScores(plain, torch.randn(2, 9, 48)), keep=0.5, model=plain)
    assert plan.loader == "none"
    assert "the pruned model is not of transformers, and no loader knows it" in str(plan)
    hw.prune(plain, plan)
