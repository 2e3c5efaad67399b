"""Attention rollout, compared with whole matrices of each sequence alone."""

import math

import numpy as np
import pytest
import torch
import transformers

import headwise as hw
import tiny
from headwise.analysis.flow import rollout, token_rollout
from jackknife import jackknife
from token_sequences import padded, sequences
from whole_matrices import (
    LENGTHS,
    SPECIAL,
    batches_of,
    cut_texts,
    layers_of,
    model_of,
    numbers_of,
    require_numbers,
)

pytestmark = pytest.mark.usefixtures("as_user")


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
    for layer, (weights, *_) in enumerate(layers):
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
    return {key: jackknife([each[key] for each in of_sequences], documents) for key in of_sequences[0]}


def compare(result, wanted):
    """Compare both tables with the estimates of `expected`: all numbers, and no others."""
    of_layers = {(row.layer, None, name): value for row in result.layers.rows for name, value in row.statistics.items()}
    require_numbers(numbers_of(result) | of_layers, wanted)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_rollout_equals_products_of_whole_matrices(name, side, implementation):
    if name == "llama" and implementation == "eager":
        pytest.skip("its softmax is in float32")
    model, rows = model_of(name, implementation), sequences(*LENGTHS)
    compare(hw.rollout(model, batches_of(rows, side), special=SPECIAL), expected(model, name, rows))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_several_runs_with_some_columns_each_give_the_same(name, monkeypatch):
    rows = sequences(*LENGTHS)
    model = model_of(name)
    monkeypatch.setattr(rollout, "STATE_BYTES", 4 * 8 * 5 * 19 * 4)  # 4 of 19 columns
    compare(hw.rollout(model, [padded(rows, "left")], special=SPECIAL), expected(model, name, rows))


def test_the_share_of_the_residual_connection():
    rows = sequences(5, 9)
    model = model_of("gpt2")
    result = hw.rollout(model, [padded(rows, "right")], special=SPECIAL, residual=0.25)
    compare(result, expected(model, "gpt2", rows, residual=0.25))


def test_sequences_of_one_document_are_a_cluster():
    model, (texts, rows, documents) = model_of("llama"), cut_texts()
    compare(hw.rollout(model, texts, special=SPECIAL), expected(model, "llama", rows, documents))


@pytest.mark.parametrize(
    ("name", "layer", "kept"), [("llama", None, 2**26), ("gpt2", None, 0), ("bert", None, 2**26), ("llama", 0, 2**26)]
)
def test_rollout_of_tokens_is_a_row_of_the_product(name, layer, kept, monkeypatch):
    monkeypatch.setattr(token_rollout, "KEPT_BYTES", kept)
    model = model_of(name)
    text, tokenizer = tiny.texts(17)[0], tiny.tokenizer("encoder" if name == "bert" else "decoder")
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
    layers = layers_of(model, name, ids)[: 1 if layer == 0 else None]
    share, options = (0.5, {}) if layer == 0 else (0.25, {"residual": 0.25})  # 0.5 is the default
    below, products = torch.eye(len(ids), dtype=torch.float64), []
    for weights, *_ in layers[::-1]:  # from the top: the product of all layers above an input
        below = below @ (share * torch.eye(len(ids), dtype=torch.float64) + (1 - share) * weights.mean(0))
        products.append(below)
    result = hw.token_rollout(model, tokenizer, text, queries=(3, -1), layer=layer, **options)
    assert result.queries == (3, len(ids) - 1)
    assert torch.allclose(result.weights, products[-1][[3, -1]], rtol=0, atol=1e-10)
    for found, product in zip(result.by_layer, products[::-1], strict=True):
        assert torch.allclose(found, product[[3, -1]], rtol=0, atol=1e-10)
    table = result.table()
    assert table["weight"].tolist() == result.weights.flatten().tolist()
    assert table["token_text"].tolist()[: len(ids)] == list(result.tokens)
    assert result.plot().get_title() == "attention rollout"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queries": (5,)}, "queries: expected indices of 5 tokens, got 5"),
        ({"queries": (1.0,)}, "queries: expected indices of 5 tokens, got 1.0"),
        ({"queries": ()}, "queries: expected indices of 5 tokens, got none"),
        ({"tokenizer": None}, "tokenizer: expected a transformers tokenizer, got NoneType"),
        ({"layer": 2}, "layer: expected a number below 2, got 2"),
        ({"residual": 1.0}, "residual: expected a share of at least 0 and below 1, got 1"),
    ],
)
def test_mistakes_in_the_arguments_of_token_rollout(options, message):
    arguments = {"model": model_of("llama"), "tokenizer": tiny.tokenizer("decoder"), "text": tiny.texts(5)[0]}
    with pytest.raises(hw.InputError, match=f"^{message}"):
        hw.token_rollout(**arguments | options)


def test_queries_may_be_integers_of_any_type():
    model, tokenizer, text = model_of("llama"), tiny.tokenizer("decoder"), tiny.texts(5)[0]
    expected = hw.token_rollout(model, tokenizer, text, queries=[1, 4])
    for queries in (torch.tensor([1, -1]), np.array([1, 4]), iter((1, 4))):
        found = hw.token_rollout(model, tokenizer, text, queries=queries)
        assert found.queries == (1, 4)
        assert torch.equal(found.weights, expected.weights)


class Layer(torch.nn.Module):
    """Attention of a kind that does or does not fit a product over layers."""

    def __init__(self, kind, number):
        super().__init__()
        self.kind = kind
        self.q, self.k, self.v, self.out_proj = (torch.nn.Linear(21, 21) for _ in range(4))
        if number is not None:
            self.layer_idx = number

    def forward(self, x):
        memory = torch.nn.functional.avg_pool1d(x.mT, 2).mT if self.kind == "pooled" else x
        q, k, v = (
            each(of).unflatten(-1, (3, 7)).transpose(1, 2)
            for each, of in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        for _ in range(2 if self.kind == "twice" else 1):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out_proj(out.transpose(1, 2).flatten(2))
        return x[:, ::2] if self.kind == "shortens" else x


class UnseenAttention(torch.nn.Module):
    """Attention by a function that is not intercepted: distances instead of products."""

    def forward(self, x):
        return x + torch.cdist(x, x).neg().exp() @ x


class Memory(torch.nn.Module):
    """A layer of self-attention and one of cross-attention to a stored sequence."""

    def __init__(self):
        super().__init__()
        self.own, self.cross = (torch.nn.MultiheadAttention(21, 3, batch_first=True) for _ in range(2))
        self.memory = torch.nn.Parameter(torch.randn(1, 10, 21))

    def forward(self, x):
        x = x + self.own(x, x, x)[0]
        memory = self.memory.expand(len(x), -1, -1)
        return x + self.cross(x, memory, memory)[0]


def model_with(*kinds, numbers=None):
    """Return layers of these kinds one after the other."""
    torch.manual_seed(0)
    numbers = [None] * len(kinds) if numbers is None else numbers
    layers = [UnseenAttention() if kind == "unseen" else Layer(kind, n) for kind, n in zip(kinds, numbers, strict=True)]
    return torch.nn.Sequential(*layers)


REFUSED = {
    "cross-attention": (Memory, "self-attention in every layer, got cross-attention in cross"),
    "twice": (lambda: model_with("plain", "twice"), "modules that attend once in a run, got several calls of 1"),
    "pooled keys": (
        lambda: model_with("plain", "pooled"),
        "self-attention over 2 x 10 tokens in every layer, got 2 x 10 queries and 5 keys in 1",
    ),
    "fewer tokens": (
        lambda: model_with("shortens", "plain"),
        "self-attention over 2 x 10 tokens in every layer, got 2 x 5 queries and 5 keys in 1",
    ),
    "two modules in a layer": (
        lambda: model_with("plain", "plain", numbers=(0, 0)),
        "one attention module in each layer, got 0 and 1 in layer 0",
    ),
    "a layer without attention": (
        lambda: model_with("plain", "plain", numbers=(0, 2)),
        "attention in every layer, got none in layer 1",
    ),
    "another order": (
        lambda: model_with("plain", "plain", numbers=(1, 0)),
        "layers that run in their order, got the order 1, 0",
    ),
    "unseen": (
        lambda: model_with("plain", "unseen"),
        "attention that can be read in every layer, got 1 .attention of these modules was not seen.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_do_not_fit_are_refused_by_name(name):
    make, message = REFUSED[name]
    with pytest.raises(hw.InputError, match=f"^model: expected {message}"):
        hw.rollout(make(), [torch.randn(2, 10, 21)])


def test_learned_sinks_are_refused_by_name():
    model = tiny.family("gpt-oss, sinks", "eager")
    with pytest.raises(hw.InputError, match="^model: expected attention weights with the sum 1, got a sum that differ"):
        hw.rollout(model, [{"input_ids": sequences(7)[0][None]}])


def test_encoder_decoders_are_reduced_to_their_encoder_for_texts_and_refused_otherwise():
    sizes = {"vocab_size": 97, "d_model": 48, "num_layers": 2, "num_heads": 6, "d_kv": 11, "d_ff": 37}
    model = tiny.with_distinct_heads(transformers.T5Model(transformers.T5Config(**sizes)))
    texts = hw.Texts(tiny.texts(9, 5), tiny.tokenizer("encoder"))
    assert {row.module.split(".")[0] for row in hw.rollout(model, texts).rows} == {"block"}
    ids = sequences(9)[0][None]
    with pytest.raises(hw.InputError, match="^model: expected .*decoder.block.0"):
        hw.rollout(model, [{"input_ids": ids, "decoder_input_ids": ids[:, :4]}])


def test_tables_have_columns_and_are_drawn():
    model = model_of("llama")
    texts = hw.Texts(tiny.texts(20, 9, 30), tiny.tokenizer("decoder"))
    result = hw.rollout(model, texts)
    assert list(result.layers.table())[:2] == ["layer", "module"]
    columns = set(result.table())
    assert {"rolled_first", "first_change", "first_change_q"} <= columns
    assert "rolled_first_p" not in columns
    axes = result.layers.plot()
    assert axes.get_legend_handles_labels()[1] == ["first", "self", "special"]
    assert list(axes.lines[0].get_ydata()) == [row.statistics["first"].value for row in result.layers.rows]
    result.plot("first_change")
    with pytest.raises(hw.InputError, match="^statistic: expected "):
        result.layers.plot(["no such"])
