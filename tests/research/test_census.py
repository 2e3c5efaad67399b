"""The census of models: its definitions are those of the oracle, and its comparison can fail."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

import headwise as hw
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
    scores = torch.randn(2, 3, queries, keys, dtype=torch.float64)
    seen = torch.ones(queries, keys).tril(keys - queries).bool() & (torch.rand(2, 1, queries, keys) < 0.8)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)


@pytest.mark.parametrize("keys", [7, 11])
def test_the_definitions_are_those_of_the_oracle(keys):
    a, square = weights(7, keys), keys == 7
    projection = torch.randn(15, 13).double()
    out, special = torch.randn(2, 3, 7, 5), TOKENS == 3
    known = {"tokens": TOKENS, "special": special, "first": REAL.int().argmax(-1)} if square else {}
    found = compare.statistics(a, **known, counts=REAL[:, None], out=out, projection=projection)
    for sequence in range(2):
        for head in range(3):
            rows = a[sequence, head].masked_fill(~REAL[sequence, :, None], 0.0)
            told = {"tokens": TOKENS[sequence].tolist(), "special": special[sequence].tolist()} if square else {}
            first = int(REAL[sequence].int().argmax()) if square else 0
            expected = statistics_of(
                rows,
                **told,
                out=out[sequence, head].double(),
                projection=projection[5 * head : 5 * head + 5],
                first=first,
            )
            got = {name: float(value[sequence, head]) for name, value in found.items()}
            assert expected == pytest.approx({name: got[name] for name in expected}, rel=1e-12)
            assert all(got[name] != got[name] for name in got.keys() - expected.keys())


def watched(number):
    """A place whose values are all one number, and what a watch says of it."""
    place = compare.SiteStatistics("attention", False, "interface", 3)
    place.add({"entropy": torch.full((2, 3), 0.5), "self": torch.full((2, 3), 0.25)})
    spreads = {name: RunningMoments.from_values(torch.cat(parts)) for name, parts in place.values.items()}
    spreads["self"] = replace(spreads["self"], mean=spreads["self"].mean + number)
    site = SimpleNamespace(site=("attention", False), heads=3, statistics=spreads)
    return site, {("attention", False): place}


def test_what_differs_is_found():
    site, places = watched(0.0)
    assert not compare.compare([site], places).differences
    site, places = watched(2e-5)
    (found,) = compare.compare([site], places).differences
    assert (found.statistic, found.got, found.expected) == ("self", pytest.approx(0.25002), 0.25)
    site, places = watched(torch.nan)
    assert compare.compare([site], places).differences
    site, places = watched(0.0)
    site.statistics["self"] = replace(site.statistics["self"], count=torch.ones(3))
    assert [each.statistic for each in compare.compare([site], places).differences] == ["number of self"]
    site.heads = 2
    assert [each.statistic for each in compare.compare([site], places).differences] == ["heads"]
    assert compare.compare([], places).missed == ["attention"]
    assert compare.compare([site], {}).beyond == ["attention"]


def test_the_definition_of_torchs_attention():
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 4)
    mask = torch.randn(5, 9).masked_fill(torch.rand(5, 9) < 0.3, -torch.inf)
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask > 0}, {"scale": 0.3}):
        a, out = reference.definition(q, k, v, **options, enable_gqa=True)
        expected = reference.SDPA(q, k, v, **options, enable_gqa=True)
        torch.testing.assert_close(out.float(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(a.sum(-1), torch.ones(2, 6, 5).double() * (a.sum(-1) > 0))


def test_sizes_shrink_also_in_configs_inside():
    config = tiny_config("gemma3")
    assert config.text_config.hidden_size < 100
    assert set(config.text_config.layer_types) == {"sliding_attention", "full_attention"}


@pytest.mark.parametrize("model_type", ["llama", "t5", "gpt_oss"])
def test_a_model_type_is_judged(model_type):
    verdict = judge(model_type)
    assert (verdict.outcome, verdict.reason) == ("right", "")
    assert 0 < verdict.worst < compare.BUDGET
    assert verdict.routes == ["interface"]


def test_a_wrong_statistic_is_judged_wrong(monkeypatch):
    monkeypatch.setattr(RunningMoments, "value", property(lambda spread: spread.mean + 1e-4))
    verdict = judge("bert")
    assert verdict.outcome == "wrong"
    assert "where" in verdict.reason


def test_what_is_not_seen_is_judged_silent(monkeypatch):
    monkeypatch.setattr(hw.intercept.watch.Heads, "records", property(lambda heads: list(heads._records.values())[1:]))
    assert judge("bert").outcome == "silent"


def test_what_cannot_be_built_says_why():
    assert (judge("glmga").outcome, "no model class" in judge("glmga").reason) == ("not built", True)


@torch.no_grad()
def test_the_reference_is_what_the_model_returns():
    model = build("bert", "eager")
    inputs = next(attempts("bert", model, "left"))
    with reference.recorded(model) as record:
        output = model(**inputs, output_attentions=True)
    assert [call.path for call in record.calls] == [f"encoder.layer.{layer}.attention.self" for layer in range(2)]
    for call, expected in zip(record.calls, output.attentions, strict=True):
        torch.testing.assert_close(call.weights, expected)


def test_the_document_has_every_type():
    right = Verdict("bert", "right", routes=["interface"], sites=2, heads=12, worst=1e-7)
    refused = Verdict("autoformer", "refused", "model: expected attention, got <none>")
    results = {"versions": {"torch": "2"}, "seconds": 90, "verdicts": [asdict(right), asdict(refused)]}
    text = make_census.document(json.loads(json.dumps(results)))
    assert "| bert " in text
    assert "- `autoformer`: model: expected attention, got &lt;none>" in text
