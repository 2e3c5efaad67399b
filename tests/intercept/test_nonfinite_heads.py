"""NaN and infinity in watched models: named by module, and never left out of a mean."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import headwise as hw
import tiny

HEADS = 3
NOT_FINITE = "attention weights or head outputs are NaN or infinite, so statistics of their heads are NaN"


class Attention(nn.Module):
    """Attention by the function "sdpa", or by "softmax"; `hidden` is True at keys that a query may not attend to."""

    def __init__(self, way):
        super().__init__()
        self.way, self.num_heads = way, HEADS
        self.qkv, self.out_proj = nn.Linear(15, 45), nn.Linear(15, 15)

    def forward(self, x, hidden=None):
        q, k, v = (part.unflatten(-1, (HEADS, 5)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.way == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v, None if hidden is None else ~hidden)
        else:
            scores = q @ k.mT * 5**-0.5
            scores = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
            out = torch.softmax(scores, -1) @ v
        return self.out_proj(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.layers = nn.ModuleList([Attention(way) for _ in range(2)])

    def forward(self, x, hidden=None):
        for layer in self.layers:
            x = layer(x, hidden)
        return x


def new(way):
    torch.manual_seed(0)
    return Model(way).double().eval()


def statistics(model, *inputs, expected=None):
    """Return the rows of a watched run of each input, and check the warning."""
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        with hw.watch(model) as heads:
            for given in inputs:
                model(*given) if isinstance(given, tuple) else model(given)
    assert [str(each.message) for each in caught] == ([f"{NOT_FINITE}: {expected}"] if expected else [])
    return heads.rows()


def numbers(row):
    return {name: value for name, value in row.items() if isinstance(value, float)}


@pytest.mark.parametrize("way", ["sdpa", "softmax"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_heads_that_are_not_finite_are_named_with_their_rows(way, bad):
    model, x = new(way), torch.randn(2, 7, 15, dtype=torch.float64)
    whole = statistics(model, x)
    with torch.no_grad():
        model.layers[1].qkv.weight[5 + 2] = bad  # the queries of head 1
    rows = statistics(model, x, expected="layers.1 (14 rows)")
    for row, before in zip(rows, whole, strict=True):
        if (row["layer"], row["head"]) == (1, 1):
            assert all(map(math.isnan, numbers(row).values()))
        else:
            assert numbers(row) == pytest.approx(numbers(before))


@pytest.mark.parametrize("way", ["sdpa", "softmax"])
def test_a_sequence_that_is_not_finite_is_not_left_out_of_the_mean(way):
    model, x = new(way), torch.randn(2, 7, 15, dtype=torch.float64)
    x[1, 4] = math.nan
    rows = statistics(model, x, expected="layers.0 (21 rows), layers.1 (21 rows)")
    assert all(math.isnan(value) for row in rows for value in numbers(row).values())
    rows = statistics(model, x[:1], x[1:], expected="layers.0 (21 rows), layers.1 (21 rows)")
    assert all(math.isnan(value) for row in rows for value in numbers(row).values())


@pytest.mark.parametrize("way", ["sdpa", "softmax"])
def test_outputs_that_are_not_finite_are_named(way):
    model, x = new(way), torch.randn(2, 7, 15, dtype=torch.float64)
    with torch.no_grad():
        model.layers[1].qkv.bias[30 + 5] = math.inf  # a value of head 1
    rows = statistics(model, x, expected="layers.1 (14 rows)")
    assert math.isnan(rows[HEADS + 1]["output_norm"])
    assert math.isfinite(rows[HEADS + 1]["entropy"])
    assert math.isfinite(rows[HEADS]["output_norm"])


@pytest.mark.parametrize("way", ["sdpa", "softmax"])
def test_undefined_statistics_are_left_out_of_the_mean(way):
    model = new(way)
    short, long = torch.randn(2, 1, 15, dtype=torch.float64), torch.randn(2, 7, 15, dtype=torch.float64)
    assert all(math.isnan(row["previous"]) for row in statistics(model, short))
    for row, alone in zip(statistics(model, short, long), statistics(model, long), strict=True):
        assert row["previous"] == pytest.approx(alone["previous"])
        assert row["evenness"] == pytest.approx(alone["evenness"])


@pytest.mark.parametrize("way", ["sdpa", "softmax"])
def test_rows_without_visible_keys_are_not_a_defect(way):
    model, x = new(way), torch.randn(1, 7, 15, dtype=torch.float64)
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    hidden[:, :2] = True  # left padding: the first two rows see nothing
    model.layers = model.layers[:1]
    rows = statistics(model, (x, hidden[None, None]))
    assert all(math.isfinite(row["entropy"]) for row in rows)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_models_of_transformers_with_nan_weights_are_named(implementation):
    model = tiny.family("bert", implementation)
    with torch.no_grad():
        model.encoder.layer[1].attention.self.query.weight[9] = math.nan  # head 1
    first, second = (f"encoder.layer.{layer}.attention.self" for layer in (1, 2))
    expected = rf"{NOT_FINITE}: {first} \(26 rows\), {second} \(156 rows\)$"
    with pytest.warns(UserWarning, match=expected), hw.watch(model) as heads:
        model(tiny.TOKENS)
    assert [math.isnan(row["first"]) for row in heads.rows()] == [False] * 7 + [True] + [False] * 4 + [True] * 6


class Masked(Attention):
    """Attention in which a factor of 0 turns off the second head."""

    def forward(self, x, hidden=None):
        q, k, v = (part.unflatten(-1, (HEADS, 5)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        weights = torch.softmax(q @ k.mT * 5**-0.5, -1) * torch.tensor([1.0, 0.0, 1.0]).view(1, HEADS, 1, 1)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


def test_heads_without_rows_are_named():
    model, match = nn.Sequential(Masked("softmax")), r"statistics of these heads are NaN: 0 \(heads 1\)"
    with torch.no_grad(), pytest.warns(UserWarning, match=match), hw.watch(model) as heads:
        model(torch.randn(2, 7, 15))
    assert [math.isnan(row["entropy"]) for row in heads.rows()] == [False, True, False]
