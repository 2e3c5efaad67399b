"""Norm-weighted attention, compared with whole matrices of each sequence alone."""

import math

import pytest
from eager_flow import SPECIAL, estimate, layers_of, mean_of, model_of, padded, row_statistics, sequences

import headwise as hw
import tiny

pytestmark = pytest.mark.usefixtures("as_user")

LENGTHS = (13, 7, 1, 19, 2)


def of_sequence(weights, vectors, ids, *, causal):
    """Return the columns of one head for one sequence, by definition: norms |A_ij f(x_j)| of all pairs."""
    n = len(ids)
    norms = (weights[:, :, None] * vectors[None]).norm(dim=-1)
    normed = norms / norms.sum(-1, keepdim=True)
    of_weights, of_norms = (row_statistics(each, ids, causal=causal) for each in (weights, normed))
    columns = {}
    for name in of_norms:
        columns[f"norm_{name}"] = mean_of(of_norms[name])
        columns[f"{name}_change"] = mean_of([b - a for a, b in zip(of_weights[name], of_norms[name], strict=True)])
    moved, preference = [], []
    for i in range(n):
        visible = range(i + 1) if causal else range(n)
        if len(visible) > 1:
            lengths = vectors.norm(dim=-1).tolist()
            moved.append(sum(abs(float(normed[i, j] - weights[i, j])) for j in visible) / 2)
            attended = sum(float(weights[i, j]) * lengths[j] for j in visible)
            preference.append(math.log(attended * len(visible) / sum(lengths[j] for j in visible)))
    return columns | {"moved": mean_of(moved), "norm_preference": mean_of(preference)}


def expected(model, name, rows, documents=None):
    """Return the estimates of each column by (layer, head, column)."""
    layers = [layers_of(model, name, ids) for ids in rows]
    found = {}
    for layer in range(len(layers[0])):
        for head in range(len(layers[0][layer][0])):
            columns = [
                of_sequence(of[layer][0][head], of[layer][1][head], ids, causal=name != "bert")
                for of, ids in zip(layers, rows, strict=True)
            ]
            for column in columns[0]:
                found[layer, head, column] = estimate([each[column] for each in columns], documents)
    return found


def compare(table, wanted):
    """Compare a table with the estimates of `expected`: all numbers, and no others."""
    assert {(row.layer, row.head, name) for row in table.rows for name in row.statistics} == set(wanted)
    for row in table.rows:
        for name, measured in row.statistics.items():
            assert measured == pytest.approx(wanted[row.layer, row.head, name], abs=1e-10, nan_ok=True), name


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_norms_equal_those_of_whole_matrices(name, side, implementation):
    if name == "llama" and implementation == "eager":
        pytest.skip("its softmax is in float32")
    rows = sequences(*LENGTHS)
    batches = [padded(rows[:3], side), padded(rows[3:], side)]
    model = model_of(name, implementation)
    compare(hw.norm_weighted(model, batches, special=SPECIAL), expected(model, name, rows))


def test_sequences_of_one_document_are_a_cluster():
    model = model_of("llama")
    texts = hw.Texts(tiny.texts(20, 9, 5), tiny.tokenizer("decoder"), context=8, documents="cut", batch=2)
    rows = [ids.long() for batch in texts for ids in batch["input_ids"]]
    documents = texts.document_numbers()
    assert len(set(documents)) < len(rows)
    compare(hw.norm_weighted(model, texts, special=SPECIAL), expected(model, "llama", rows, documents))
