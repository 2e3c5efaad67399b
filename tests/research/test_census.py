"""The census of models: its definitions agree with the test oracle, its comparison detects errors, and its verdicts
name the reason.
"""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

import headwise as hw
from headwise.intercept import call_contexts
from headwise.intercept.interceptor import SiteKey
from headwise.statistics.moments import RunningMoments
from oracles import statistics_of
from research.census import compare, reference
from research.census import report as make_census
from research.census.builder import build, tiny_config
from research.census.inputs import attempts
from research.census.judge import Verdict, judge

TOKENS = torch.randint(0, 5, (2, 7), generator=torch.Generator().manual_seed(3))
REAL = torch.arange(7) >= torch.tensor([[0], [2]])


def weights(queries, keys):
    """Return random causal attention weights of two sequences and three heads, with some keys hidden, in float64."""
    scores = torch.randn(2, 3, queries, keys, dtype=torch.float64)
    seen = torch.ones(queries, keys).tril(keys - queries).bool() & (torch.rand(2, 1, queries, keys) < 0.8)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)


@pytest.mark.parametrize("keys", [7, 11])
def test_definitions_agree_with_the_test_oracle(keys):
    a, square = weights(7, keys), keys == 7
    projection = torch.randn(15, 13).double()
    out, special = torch.randn(2, 3, 7, 5), TOKENS == 3
    token_options_of_batch = {"tokens": TOKENS, "special": special, "first": REAL.int().argmax(-1)} if square else {}
    batch_statistics = compare.statistics(
        a, **token_options_of_batch, counts=REAL[:, None], out=out, projection=projection
    )
    for sequence in range(2):
        for head in range(3):
            rows = a[sequence, head].masked_fill(~REAL[sequence, :, None], 0.0)
            token_options = (
                {"tokens": TOKENS[sequence].tolist(), "special": special[sequence].tolist()} if square else {}
            )
            first = int(REAL[sequence].int().argmax()) if square else 0
            expected = statistics_of(
                rows,
                **token_options,
                out=out[sequence, head].double(),
                projection=projection[5 * head : 5 * head + 5],
                first=first,
            )
            measured = {name: float(value[sequence, head]) for name, value in batch_statistics.items()}
            assert expected == pytest.approx({name: measured[name] for name in expected}, rel=1e-12)
            assert all(measured[name] != measured[name] for name in measured.keys() - expected.keys())


def watched(number):
    """Return a site's watched record, whose statistic "self" is off by `number`, and the reference statistics by
    site.
    """
    reference_site = compare.SiteStatistics("attention", False, "interface", 3)
    reference_site.add({"entropy": torch.full((2, 3), 0.5), "self": torch.full((2, 3), 0.25)})
    moments = {name: RunningMoments.from_values(torch.cat(parts)) for name, parts in reference_site.values.items()}
    moments["self"] = replace(moments["self"], mean=moments["self"].mean + number)
    record = SimpleNamespace(site=SiteKey("attention", cross=False), heads=3, statistics=moments)
    return record, {("attention", False): reference_site}


def test_comparison_reports_every_kind_of_difference():
    record, reference_sites = watched(0.0)
    assert not compare.compare([record], reference_sites).differences
    record, reference_sites = watched(2e-5)
    (found,) = compare.compare([record], reference_sites).differences
    assert (found.statistic, found.got, found.expected) == ("self", pytest.approx(0.25002), 0.25)
    record, reference_sites = watched(torch.nan)
    assert compare.compare([record], reference_sites).differences
    record, reference_sites = watched(0.0)
    record.statistics["self"] = replace(record.statistics["self"], count=torch.ones(3))
    assert [difference.statistic for difference in compare.compare([record], reference_sites).differences] == [
        "number of self"
    ]
    record.heads = 2
    assert [difference.statistic for difference in compare.compare([record], reference_sites).differences] == ["heads"]
    assert compare.compare([], reference_sites).missed == ["attention"]
    assert compare.compare([record], {}).beyond == ["attention"]


def test_reference_definition_agrees_with_torch_attention():
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 4)
    mask = torch.randn(5, 9).masked_fill(torch.rand(5, 9) < 0.3, -torch.inf)
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask > 0}, {"scale": 0.3}):
        a, out = reference.definition(q, k, v, **options, enable_gqa=True)
        expected = reference.SDPA(q, k, v, **options, enable_gqa=True)
        torch.testing.assert_close(out.float(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(a.sum(-1), torch.ones(2, 6, 5).double() * (a.sum(-1) > 0))


def test_nested_configs_are_shrunk():
    config = tiny_config("gemma3")
    assert config.text_config.hidden_size < 100
    assert set(config.text_config.layer_types) == {"sliding_attention", "full_attention"}


@pytest.mark.parametrize("model_type", ["llama", "t5", "gpt_oss"])
def test_supported_model_types_are_right(model_type):
    verdict = judge(model_type)
    assert (verdict.outcome, verdict.reason) == ("right", "")
    assert 0 < verdict.worst < compare.BUDGET
    assert verdict.routes == ["interface"]


def test_wrong_statistic_gives_the_outcome_wrong(monkeypatch):
    monkeypatch.setattr(RunningMoments, "value", property(lambda spread: spread.mean + 1e-4))
    verdict = judge("bert")
    assert verdict.outcome == "wrong"
    assert "where" in verdict.reason


def test_unobserved_module_without_warning_gives_the_outcome_silent(monkeypatch):
    monkeypatch.setattr(hw.intercept.watch.Heads, "records", property(lambda heads: list(heads._records.values())[1:]))
    assert judge("bert").outcome == "silent"


def test_copies_in_padding_do_not_count():
    a, tokens, real = torch.full((1, 1, 3, 3), 1 / 3), torch.tensor([[5, 5, 5]]), torch.tensor([[False, True, True]])
    measured = compare.statistics(a, tokens=tokens, real=real, counts=real[:, None])
    assert (measured["duplicate"].item(), measured["induction"].item()) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert "distance" in measured


def test_cross_attention_has_no_positions():
    weights = torch.tensor([[0.0, 0.25, 0.75], [0.0, 0.5, 0.5]])[None, None]
    tokens, padding = torch.tensor([[3, 4, 7]]), torch.tensor([[True, False]])
    call = reference.Weights("attention", "interface", True, weights, padding=padding, key_tokens=tokens)
    means = compare.truth([call], [7])["attention", True].means()
    assert not means.keys() & set(compare.OF_POSITIONS)
    assert (means["first"][0].item(), means["special"][0].item()) == (0.25, 0.75)  # the second query is padding


def test_statistics_of_positions_in_cross_attention_give_the_outcome_wrong(monkeypatch):
    monkeypatch.setattr(call_contexts, "OF_COMMON_POSITIONS", frozenset())
    verdict = judge("t5")
    assert verdict.outcome == "wrong"
    assert "not checked: distance" in verdict.reason


def test_model_type_without_a_class_is_not_built_and_the_reason_is_stated():
    assert (judge("glmga").outcome, "no model class" in judge("glmga").reason) == ("not built", True)


@torch.no_grad()
def test_recorded_weights_are_those_the_model_returns():
    model = build("bert", "eager")
    inputs = next(attempts("bert", model, "left"))
    with reference.recorded(model) as record:
        output = model(**inputs, output_attentions=True)
    assert [call.path for call in record.calls] == [f"encoder.layer.{layer}.attention.self" for layer in range(2)]
    for call, expected in zip(record.calls, output.attentions, strict=True):
        torch.testing.assert_close(call.weights, expected)


def test_report_lists_every_type():
    right = Verdict("bert", "right", routes=["interface"], sites=2, heads=12, worst=1e-7)
    refused = Verdict("autoformer", "refused", "model: expected attention, got <none>")
    results = {"versions": {"torch": "2"}, "seconds": 90, "verdicts": [asdict(right), asdict(refused)]}
    text = make_census.document(json.loads(json.dumps(results)))
    assert "| bert " in text
    assert "- `autoformer`: model: expected attention, got &lt;none>" in text
