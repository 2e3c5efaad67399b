"""The study of plain models: it derives heads, keys and positions of hand-written models, and it detects errors."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from headwise.intercept.heads import Heads
from research.plain_models import judge as judging
from research.plain_models.__main__ import RESULTS
from research.plain_models.continuations import has_other_keys, joined
from research.plain_models.judge import judge
from research.plain_models.registry import Built, Case, called
from research.plain_models.report import REPORT, document
from research.plain_models.statistics import positions_of_queries, statistics_of
from research.plain_models.truth import Attention, Sequence, attention_of

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
    tokens, values = torch.arange(len(weights)), torch.ones(len(weights), 1)
    counted = torch.ones(len(weights), dtype=torch.bool)
    return Sequence(weights, weights > 0, counted, values, weights @ values, tokens, tokens)


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


class WithTable(SelfAttention):
    """Self-attention that fills a table in its first call."""

    table = None

    def forward(self, x):
        if self.table is None or len(self.table) != x.shape[1]:
            self.table = torch.randn(x.shape[1], 11) @ torch.randn(11, WIDTH)
        return super().forward(x + self.table)


def test_truth_is_that_of_a_model_that_fills_a_table_in_its_first_call():
    x = torch.randn(BATCH, LENGTH, WIDTH)
    _, (attention,) = attention_of(WithTable(), lambda model: model(x))
    assert (attention.path, attention.reason, len(attention.heads)) == ("", "", HEADS)


class InWindows(SelfAttention):
    """Self-attention between every second token, whose projection of the queries, keys and values sees the tokens in
    windows, and whose output projection sees them in their own order.
    """

    def forward(self, x):
        windows = x.unflatten(1, (LENGTH, 2)).transpose(1, 2).flatten(0, 1)
        weights, v = self.weights_and_values(windows)
        out = (weights @ v).transpose(1, 2).flatten(2).unflatten(0, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return self.out_proj(out)


def test_truth_has_positions_of_tokens_that_return_to_another_order_before_the_output_projection():
    x = torch.randn(BATCH, 2 * LENGTH, WIDTH)
    _, (attention,) = attention_of(InWindows(), lambda model: model(x))
    for sequences in attention.heads:
        assert len(sequences) == 2 * BATCH
        for sequence in sequences:
            assert torch.equal(positions_of_queries(sequence), torch.arange(LENGTH))


def test_truth_counts_keys_as_visible_whose_weights_are_zero_in_float32_alone():
    x, hidden = torch.randn(BATCH, LENGTH, WIDTH), torch.tensor([-120.0, -torch.inf])

    class Masked(SelfAttention):
        def forward(self, x):
            q, k, v = (part.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            scores = (q @ k.mT).float() + torch.cat([torch.zeros(LENGTH - 2), hidden]).float()
            return self.out_proj((scores.softmax(-1).double() @ v).transpose(1, 2).flatten(2))

    _, (attention,) = attention_of(Masked(), lambda model: model(x))
    for sequence in (each for sequences in attention.heads for each in sequences):
        assert bool((sequence.weights[:, -2:] == 0).all())
        assert bool(sequence.visible[:, :-1].all())
        assert not bool(sequence.visible[:, -1].any())


def attention_to(number, values, keys, rows):
    """Return attention with one head and one sequence, whose last rows see all `keys` of `values` equally."""
    tokens = torch.arange(len(keys)) - (len(keys) - rows)
    counted, visible = torch.ones(rows, dtype=torch.bool), torch.ones(rows, len(keys), dtype=torch.bool)
    out = torch.zeros(rows, 1)
    sequence = Sequence(visible / len(keys), visible, counted, values[keys], out, tokens, tokens[-rows:])
    return Attention(number, "", [[sequence]], [], None, True)


def test_calls_that_attend_to_values_of_the_call_before_are_one_sequence():
    values = torch.randn(7, 5)
    values[4] = values[2]  # two tokens may be equal
    calls = [
        attention_to(1, values, [0, 1, 2], 3),
        attention_to(2, values, [1, 2, 3, 4], 2),
        attention_to(3, values, [3, 4, 5, 6], 2),
    ]
    (whole,) = joined(calls)
    (sequence,) = whole.heads[0]
    assert torch.equal(sequence.values, values)
    assert torch.equal(positions_of_queries(sequence), torch.arange(7))
    expected = torch.tensor([[1, 1, 1, 0, 0, 0, 0]] * 3 + [[0, 1, 1, 1, 1, 0, 0]] * 2 + [[0, 0, 0, 1, 1, 1, 1]] * 2)
    assert torch.equal(sequence.visible.int(), expected.int())
    assert len(joined([calls[0], calls[2]])) == 2
    assert len(joined([calls[0], replace(calls[1], number=0)])) == 2  # of another run


def test_keys_of_other_tensors_are_those_that_differ_between_sequences():
    learned, values = torch.randn(1, 5), torch.randn(2, 6, 5)
    for first, expected in ((learned.expand(2, 1, 5), False), (torch.randn(2, 1, 5), True)):
        sequences = [attention_to(1, torch.cat([first[i], values[i]]), list(range(7)), 6).heads[0][0] for i in range(2)]
        assert has_other_keys(Attention(1, "", [sequences], [], None, True), []) is expected


def test_sequences_with_other_softmaxes_when_they_run_alone_are_not_verified():
    model, x = TwoLayers().eval(), torch.randn(BATCH, LENGTH, WIDTH)
    case = Case("padding", lambda model: model(x), (lambda model: model(x), lambda model: SelfAttention()(x)))
    verdict = judge(Built(model, (case,)), case, budget=1e-6)
    assert verdict.outcome == "not verified"
    assert "other softmaxes" in verdict.problems[0]


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
