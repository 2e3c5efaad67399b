"""The study of plain models: it derives heads, keys and positions of hand-written models, and it detects errors."""

import json
import math

import pytest
import torch
from torch import nn

from headwise.intercept.heads import Heads
from research.plain_models import judge as judging
from research.plain_models.__main__ import RESULTS
from research.plain_models.judge import judge
from research.plain_models.registry import Built, called
from research.plain_models.report import REPORT, document
from research.plain_models.statistics import statistics_of
from research.plain_models.truth import attention_of

BATCH, HEADS, LENGTH, DIM = 2, 3, 7, 5
WIDTH = HEADS * DIM


class SelfAttention(nn.Module):
    """Self-attention with a key of zeros in front of the tokens, if `null_keys` is 1."""

    def __init__(self, null_keys=0):
        super().__init__()
        self.num_heads, self.null_keys = HEADS, null_keys
        self.qkv, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 11)

    def weights_and_values(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        k, v = (nn.functional.pad(part, (0, 0, self.null_keys, 0)) for part in (k, v))
        return (q @ k.mT / math.sqrt(DIM)).softmax(-1), v

    def forward(self, x):
        weights, v = self.weights_and_values(x)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


@pytest.fixture(autouse=True)
def double():
    """Compute in float64, as the study does."""
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def of_model(model):
    return Built(model.eval(), (called(torch.randn(BATCH, LENGTH, WIDTH)),))


def built(null_keys=0):
    return of_model(SelfAttention(null_keys))


def judged(model):
    return judge(model, model.cases[0], budget=1e-6)


@pytest.mark.parametrize("null_keys", [0, 1])
def test_truth_has_the_heads_the_keys_and_the_positions(null_keys):
    x, model = torch.randn(BATCH, LENGTH, WIDTH), SelfAttention(null_keys)
    _, (attention,) = attention_of(model, lambda model: model(x))
    weights, values = model.weights_and_values(x)
    assert (attention.path, attention.is_scored, attention.reason) == ("", True, "")
    assert [len(sequences) for sequences in attention.heads] == [BATCH] * HEADS
    for head, sequences in enumerate(attention.heads):
        for i, sequence in enumerate(sequences):
            torch.testing.assert_close(sequence.weights, weights[i, head].detach())
            torch.testing.assert_close(sequence.values, values[i, head].detach())
            tokens = torch.arange(i * LENGTH, (i + 1) * LENGTH)
            assert torch.equal(sequence.query_tokens, tokens)
            assert torch.equal(sequence.key_tokens, torch.cat([torch.full((null_keys,), -1), tokens]))
        slice_of_head = model.out_proj.weight[:, head * DIM : (head + 1) * DIM].detach().T
        torch.testing.assert_close(attention.projection[head], slice_of_head)


def test_statistics_of_a_known_matrix():
    weights = torch.tensor([[1.0, 0, 0], [0.25, 0.75, 0], [0.5, 0, 0.5]])
    sequence = judging_sequence(weights)
    statistics = statistics_of(sequence, None, is_cross=False)
    assert statistics["distance"] == pytest.approx((0 + 0.25 + 1.0) / 3)
    assert statistics["self"] == pytest.approx((1 + 0.75 + 0.5) / 3)
    assert statistics["previous"] == pytest.approx((0.25 + 0) / 2)
    assert statistics["first"] == pytest.approx(1.75 / 3)
    assert statistics["evenness"] == pytest.approx(
        (-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) / math.log(2) + 1) / 2
    )
    assert not {"distance", "self", "previous", "next"} & statistics_of(sequence, None, is_cross=True).keys()


def judging_sequence(weights):
    """Return a sequence with these weights, whose queries are its keys."""
    from research.plain_models.truth import Sequence

    tokens, values = torch.arange(len(weights)), torch.ones(len(weights), 1)
    return Sequence(weights, torch.ones(len(weights), dtype=torch.bool), values, weights @ values, tokens, tokens)


def test_a_plain_model_is_right():
    verdict = judged(built())
    assert verdict.problems == []
    assert (verdict.outcome, verdict.sites, verdict.gates) == ("right", 1, HEADS)


class TwoLayers(nn.Module):
    """Two attention layers in one module."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = (nn.ModuleList(nn.Linear(WIDTH, width) for _ in range(2)) for width in (3 * WIDTH, WIDTH))

    def forward(self, x):
        for qkv, o in zip(self.qkv, self.o, strict=True):
            q, k, v = (part.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for part in qkv(x).chunk(3, -1))
            x = x + o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x


def test_layers_of_one_module_are_judged_one_by_one():
    verdict = judged(of_model(TwoLayers()))
    assert verdict.problems == []
    assert (verdict.outcome, verdict.sites, verdict.gates) == ("right", 2, HEADS)


def test_judge_detects_a_wrong_statistic(monkeypatch):
    rows = Heads.rows
    monkeypatch.setattr(Heads, "rows", lambda heads: [{**row, "entropy": row["entropy"] + 1e-4} for row in rows(heads)])
    verdict = judged(built())
    assert verdict.outcome == "wrong"
    assert "entropy" in verdict.problems[0]


def test_judge_detects_swapped_heads(monkeypatch):
    rows = Heads.rows
    monkeypatch.setattr(Heads, "rows", lambda heads: rows(heads)[::-1])
    assert judged(built()).outcome == "wrong"


def test_judge_detects_a_missing_statistic(monkeypatch):
    rows = Heads.rows
    monkeypatch.setattr(
        Heads, "rows", lambda heads: [{key: row[key] for key in row if key != "distance"} for row in rows(heads)]
    )
    verdict = judged(built())
    assert verdict.outcome == "silent"
    assert "distance is missing without a warning" in verdict.problems[0]


def test_judge_detects_a_partial_gate(monkeypatch):
    gate = judging.hw.gate
    monkeypatch.setattr(judging.hw, "gate", lambda model, values: gate(model, dict.fromkeys(values, 0.5)))
    verdict = judged(built())
    assert verdict.outcome == "wrong"
    assert "off by 0.50 of its effect" in verdict.problems[0]


def test_report_is_that_of_the_results():
    assert REPORT.read_text(encoding="utf-8") == document()


def test_study_covers_enough_libraries():
    verdicts = [each for each in json.loads(RESULTS.read_text(encoding="utf-8"))["verdicts"] if each["cases"]]
    assert len([each for each in verdicts if each["library"] != "hand-written"]) >= 60
    assert len({each["library"] for each in verdicts}) >= 15
