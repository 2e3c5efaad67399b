"""The census: its definitions agree with the test oracle, and it finds every kind of defect that is put into
headwise on purpose.
"""

import functools
import itertools
import json
from dataclasses import asdict

import pytest
import torch

import headwise as hw
from headwise.intercept.call_contexts import CallContexts
from headwise.intercept.heads import Heads
from headwise.intercept.padding import RealTokens
from headwise.intercept.statistics_observer import StatisticsObserver
from headwise.statistics.registry import OF_TOKENS, STATISTICS
from oracles import statistics_of
from research.census import report, runs
from research.census.batches import LENGTH, SHORTER, padded
from research.census.compare import OF_SCORES
from research.census.definitions import Sequence, statistics
from research.census.judge import Verdict, subject_of, summary
from research.census.runs import Run
from research.dispatcher_truth.recorder import double_copy

COMPARED = STATISTICS.keys() - OF_SCORES
"""Statistics that the census compares with the truth."""

TOKENS = torch.randint(0, 5, (7,), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("first", [0, 2])
def test_definitions_agree_with_the_test_oracle(first):
    torch.manual_seed(0)
    real = torch.arange(7) >= first
    scores = torch.randn(3, 7, 7).double().masked_fill(~real | torch.ones(7, 7).triu(1).bool(), -torch.inf)
    weights, outputs = scores.softmax(-1).nan_to_num(), torch.randn(3, 7, 5).double()
    projections = list(torch.randn(3, 5, 11).double())
    got = statistics(Sequence(weights, outputs, real, real, TOKENS, 0), {3}, projections)
    for head in range(3):
        expected = statistics_of(
            weights[head].masked_fill(~real[:, None], 0.0),
            tokens=TOKENS.tolist(),
            special=(TOKENS == 3).tolist(),
            out=outputs[head],
            projection=projections[head],
            first=first,
            real=real.tolist(),
        )
        assert {name: float(value[head]) for name, value in got.items()} == pytest.approx(expected, rel=1e-12)


def test_first_keys_of_cross_attention_are_those_of_the_picture():
    """The first and the third query see the first picture, the second one sees the other."""
    visible = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 1, 1], [0, 1, 0, 0, 0]]).double()
    weights, rows, keys = visible / visible.sum(-1, keepdim=True), torch.ones(3).bool(), visible.any(0)
    got = statistics(Sequence(weights[None], None, rows, keys, None, None), set())
    assert float(got["first"]) == pytest.approx((1 / 2 + 1 / 2 + 0) / 3)


def test_neighbours_and_copies_are_of_the_same_document():
    documents = torch.block_diag(torch.ones(3, 3), torch.ones(2, 2)).double()
    weights, tokens, real = documents / documents.sum(-1, keepdim=True), torch.zeros(5).long(), torch.ones(5).bool()
    got = statistics(Sequence(weights[None], None, real, real, tokens, 0), set())
    assert float(got["previous"]) == pytest.approx((1 / 3 + 1 / 3 + 1 / 2) / 3)
    assert float(got["next"]) == pytest.approx((1 / 3 + 1 / 3 + 1 / 2) / 3)
    assert float(got["duplicate"]) == pytest.approx((1 / 3 + 2 / 3 + 1 / 2) / 3)


@pytest.fixture(scope="module")
def llama():
    return subject_of("llama")


@pytest.fixture(scope="module")
def bart():
    return subject_of("bart")


def batch_named(subject, name):
    return next(batch for batch in padded(subject.batch, subject.model) if batch.name == name)


def test_padding_is_put_where_the_name_says(bart):
    batch = batch_named(bart, "input left and decoder right")
    assert batch.real[LENGTH][-1].tolist() == [False] * SHORTER + [True] * (LENGTH - SHORTER)
    assert batch.real[11][-1].tolist() == [True] * (11 - SHORTER) + [False] * SHORTER
    assert bool(batch.real[LENGTH][0].all())


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch_has_the_truth_of_the_sequences_alone(llama, side):
    run = runs._batched(llama, llama.model, batch_named(llama, f"input {side}"))
    assert (run.outcome, run.problems, run.confirmed) == ("right", [], True)
    assert run.checked == 2 * 6 * len(COMPARED)


def test_padding_of_sounds_is_read_from_the_truth(monkeypatch):
    """The mask of the sounds leaves the last quarter of the second one out."""
    subject = subject_of("audioflamingo3_encoder")
    run = runs._batched(subject, subject.model, subject.batch)
    assert (run.outcome, run.checked) == ("right", 2 * 6 * len(COMPARED - OF_TOKENS))
    monkeypatch.setattr(CallContexts, "_real_tokens", lambda *_: RealTokens(None, None))
    assert runs._batched(subject, subject.model, subject.batch).outcome == "wrong"


def test_layers_of_one_module_are_divided():
    subject = subject_of("lilt")
    run = runs._batched(subject, subject.model, subject.batch)
    assert (run.problems, run.unverified, run.checked) == ([], [], 2 * 2 * 6 * len(COMPARED - {"written_norm"}))
    assert runs._gates(subject).outcome == "right"


def test_tokens_of_several_codes_are_padded():
    subject = subject_of("dia_decoder")
    batch = batch_named(subject, "input right")
    assert batch.real[LENGTH][-1].tolist() == [True] * (LENGTH - SHORTER) + [False] * SHORTER
    assert not batch.tokens


def test_models_that_amplify_rounding_are_skipped(monkeypatch, llama):
    broken_statistic(monkeypatch)
    call, numbers = runs.call, itertools.count()

    def noisy(model, batch):
        output = call(model, batch)
        output.last_hidden_state += next(numbers)
        return output

    monkeypatch.setattr(runs, "call", noisy)
    assert runs._batched(llama, llama.model, llama.batch).outcome == "skipped"


def broken_statistic(monkeypatch):
    rows = Heads.rows
    monkeypatch.setattr(
        Heads, "rows", lambda heads: [row | {"confidence": row["confidence"] + 1e-5} for row in rows(heads)]
    )


def hidden_module(monkeypatch):
    monkeypatch.setattr(Heads, "records", property(lambda heads: list(heads._records.values())[1:]))


def swapped_heads(monkeypatch):
    rows = Heads.rows
    monkeypatch.setattr(Heads, "rows", lambda heads: [row | {"head": 5 - row["head"]} for row in rows(heads)])


@pytest.mark.parametrize(
    ("break_it", "outcome", "problem"),
    [
        (broken_statistic, "wrong", "confidence"),
        (hidden_module, "silent", "not reported and not named: layers.0.self_attn"),
        (swapped_heads, "wrong", "head 0: confidence"),
    ],
)
def test_defects_are_found(monkeypatch, llama, break_it, outcome, problem):
    break_it(monkeypatch)
    run = runs._batched(llama, llama.model, llama.batch)
    assert run.outcome == outcome
    assert problem in run.problems[0]


def test_ignored_padding_is_found(monkeypatch, llama):
    repeated = runs.repeated
    monkeypatch.setattr(
        runs, "repeated", lambda model, run, special: repeated(model, lambda: runs.call(model, llama.batch))
    )
    run = runs._batched(llama, llama.model, batch_named(llama, "input right"))
    assert run.outcome == "wrong"


def test_gate_of_another_head_is_found(monkeypatch, llama):
    gate = hw.gate
    assert runs._gates(llama).outcome == "right"

    def next_head(model, values):
        return gate(model, {(layer, (head + 1) % 6): factor for (layer, head), factor in values.items()})

    monkeypatch.setattr(hw, "gate", next_head)
    run = runs._gates(llama)
    assert run.outcome == "wrong"
    assert "differs" in run.problems[0]


def test_drawn_random_numbers_are_found(monkeypatch, llama):
    assert runs._training(llama).outcome == "right"
    monkeypatch.setattr(StatisticsObserver, "on_model_call", lambda *_: torch.rand(1))
    assert runs._training(llama).problems == ["the training step changes under watch: the random stream differs"]


def test_patch_that_stays_is_found(monkeypatch):
    subject = subject_of("vit")
    subject.record.calls.clear()

    def leaving(*_):
        torch.nn.functional.softmax = functools.partial(softmax)
        return Run("", "right")

    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(runs, "_batched", leaving)
    try:
        assert list(runs.all_runs(subject))[-1].problems == ["changed: softmax"]
    finally:
        torch.nn.functional.softmax = softmax


def test_the_worst_run_decides():
    right, refused = Run("unpadded", "right", checked=3), Run("training", "refused", ["no"])
    assert summary([right, refused]) == ("partly", "training: no")
    assert summary([right, Run("bfloat16", "wrong", ["first"])]) == ("wrong", "bfloat16: first")
    assert summary([right, Run("restored", "right")]) == ("right", "")


def test_report_lists_every_type_and_run():
    runs_of_bert = [Run("unpadded", "right", checked=7), Run("input left", "wrong", ["a <b>"], confirmed=True)]
    bert = Verdict("bert", "wrong", "input left: a <b>", "BertModel", "float64", 2, runs_of_bert, 1.0)
    results = {"versions": {"torch": "2"}, "processor": "CPU", "seconds": 1, "verdicts": [asdict(bert)]}
    text = report.document(json.loads(json.dumps(results)))
    assert "| bert | BertModel | wrong | 2 | 7 | 1 of 2 |" in text
    assert "- `bert`: input left: a &lt;b>" in text


def test_models_are_copied_in_float64(llama):
    copied = double_copy(llama.model)
    assert copied is not llama.model
    assert next(copied.parameters()).dtype == torch.float64
