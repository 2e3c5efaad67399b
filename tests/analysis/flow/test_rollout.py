"""Attention rollout, compared with whole matrices of each sequence alone."""

import math

import pytest
import torch
from eager_flow import SPECIAL, estimate, layers_of, model_of, padded, sequences

import headwise as hw
import tiny
from headwise.analysis.flow import rollout_reader

pytestmark = pytest.mark.usefixtures("as_user")

LENGTHS = (13, 7, 1, 19, 2)


def statistics(matrix, ids):
    """Return the mean over the rows of a matrix `(n, n)` of each statistic."""
    n, rows = len(ids), {"first": [], "self": [], "special": [], "distance": [], "entropy": []}
    for i in range(n):
        row = matrix[i].tolist()
        rows["first"].append(row[0])
        rows["self"].append(row[i])
        rows["special"].append(sum(share for j, share in enumerate(row) if int(ids[j]) in SPECIAL))
        rows["distance"].append(sum(share * abs(i - j) for j, share in enumerate(row)))
        rows["entropy"].append(-sum(share * math.log(share) for share in row if share > 0))
    return {name: sum(values) / n for name, values in rows.items()}


def of_sequence(layers, ids, residual):
    """Return the numbers of one sequence by (layer, head, name), and by (layer, None, name) for the rollout of a layer,
    from the definition: products of whole matrices.
    """
    found, below = {}, torch.eye(len(ids), dtype=torch.float64)
    for layer, (weights, _) in enumerate(layers):
        for head, of_head in enumerate(weights):
            rolled, direct = statistics(of_head @ below, ids), statistics(of_head, ids)
            for name in ("first", "self", "special", "distance"):
                found[layer, head, f"rolled_{name}"] = rolled[name]
                found[layer, head, f"{name}_change"] = rolled[name] - direct[name]
        mixed = residual * torch.eye(len(ids), dtype=torch.float64) + (1 - residual) * weights.mean(0)
        below = mixed @ below
        found |= {(layer, None, name): value for name, value in statistics(below, ids).items()}
    return found


def expected(model, name, rows, documents=None, residual=0.5):
    """Return the estimates of all numbers."""
    of_sequences = [of_sequence(layers_of(model, name, ids), ids, residual) for ids in rows]
    return {key: estimate([each[key] for each in of_sequences], documents) for key in of_sequences[0]}


def compare(result, wanted):
    """Compare both tables with the estimates of `expected`: all numbers, and no others."""
    found = {(row.layer, row.head, name): value for row in result.rows for name, value in row.statistics.items()}
    found |= {(row.layer, None, name): value for row in result.layers.rows for name, value in row.statistics.items()}
    assert set(found) == set(wanted)
    for key, measured in found.items():
        assert measured == pytest.approx(wanted[key], abs=1e-10, nan_ok=True), key


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_rollout_equals_products_of_whole_matrices(name, side, implementation):
    if name == "llama" and implementation == "eager":
        pytest.skip("its softmax is in float32")
    rows = sequences(*LENGTHS)
    model = model_of(name, implementation)
    batches = [padded(rows[:3], side), padded(rows[3:], side)]
    compare(hw.rollout(model, batches, special=SPECIAL), expected(model, name, rows))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_several_runs_with_some_columns_each_give_the_same(name, monkeypatch):
    rows = sequences(*LENGTHS)
    model = model_of(name)
    monkeypatch.setattr(rollout_reader, "STATE_BYTES", 4 * 8 * 5 * 19 * 4)  # 4 of 19 columns
    compare(hw.rollout(model, [padded(rows, "left")], special=SPECIAL), expected(model, name, rows))


def test_the_share_of_the_residual_connection():
    rows = sequences(5, 9)
    model = model_of("gpt2")
    result = hw.rollout(model, [padded(rows, "right")], special=SPECIAL, residual=0.25)
    compare(result, expected(model, "gpt2", rows, residual=0.25))


def test_sequences_of_one_document_are_a_cluster():
    model = model_of("llama")
    texts = hw.Texts(tiny.texts(20, 9, 5), tiny.tokenizer("decoder"), context=8, documents="cut", batch=2)
    rows = [ids.long() for batch in texts for ids in batch["input_ids"]]
    documents = texts.document_numbers()
    assert len(set(documents)) < len(rows)
    compare(hw.rollout(model, texts, special=SPECIAL), expected(model, "llama", rows, documents))
