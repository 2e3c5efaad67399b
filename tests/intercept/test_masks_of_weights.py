"""Keys that a mask hides by finite numbers or after the softmax, against the definitions on float64 weights."""

import math

import pytest
import torch
from torch import nn

import headwise as hw
from oracles import statistics_of

pytestmark = pytest.mark.usefixtures("no_grad")

HEADS, WIDTH = 3, 21
LENGTHS = (11, 7)
REAL = torch.arange(11) < torch.tensor(LENGTHS)[:, None]


class Attention(nn.Module):
    """Self-attention in plain PyTorch, whose masks are added to the scores or multiplied with the weights."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def weights(self, x, added):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT * 7**-0.5
        return (scores if added is None else scores + added.to(scores.dtype)).softmax(-1), v

    def forward(self, x, added=None, factors=None):
        weights, v = self.weights(x, added)
        weights = weights if factors is None else weights * factors
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def made(dtype=torch.float32):
    torch.manual_seed(3)
    model = Attention().to(dtype)
    nn.init.normal_(model.qkv.weight, std=0.4)
    return model, torch.randn(2, 11, WIDTH).to(dtype)


def statistics_of_each_alone(model, x):
    """Return the statistics of each head: the mean over the sequences, each alone without padding, in float64."""
    double, rows = Attention().double(), []
    double.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    with torch.no_grad():
        alone = [double.weights(x[i : i + 1, :length].double(), None)[0][0] for i, length in enumerate(LENGTHS)]
    for head in range(HEADS):
        found = [statistics_of(weights[head]) for weights in alone]
        rows.append({name: sum(each[name] for each in found) / 2 for name in found[0]})
    return rows


def require_statistics(rows, expected, tolerance=1e-4):
    assert len(rows) == len(expected)
    for row, values in zip(rows, expected, strict=True):
        for name, value in values.items():
            assert row[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("hidden", [-1e4, -1e9, "smallest"])
def test_finite_numbers_hide_padding(hidden, dtype):
    model, x = made(dtype)
    number = torch.finfo(dtype).min if hidden == "smallest" else hidden
    added = torch.zeros(2, 1, 1, 11, dtype=dtype).masked_fill(~REAL[:, None, None], number)
    with hw.watch(model) as heads:
        model(x, added)
    tolerance = 0.03 if dtype is torch.bfloat16 else 1e-4
    require_statistics(heads.rows(), statistics_of_each_alone(model, x), tolerance)


def test_a_sequence_whose_rows_are_all_hidden_does_not_count():
    """The causal mask and the mask of padding on the left are added, so that the first rows hide every key."""
    model, x = made()
    real = REAL.flip(1)
    added = torch.zeros(2, 1, 11, 11).masked_fill(~torch.ones(11, 11).tril().bool(), -1e4)
    added = added + torch.zeros(2, 1, 1, 11).masked_fill(~real[:, None, None], -1e4)
    with hw.watch(model) as heads:
        model(x, added)
    with hw.watch(model) as alone:
        for i, length in enumerate(LENGTHS):
            model(x[i : i + 1, 11 - length :], added[:1, :, :length, :length])
    for row, other in zip(heads.rows(), alone.rows(), strict=True):
        assert row.pop("module") == other.pop("module")
        assert row.pop("kind") == other.pop("kind")
        assert row == pytest.approx(other, rel=1e-4, abs=1e-5)


def test_a_bias_that_grows_with_the_distance_hides_nothing():
    model, x = made()
    at = torch.arange(11)
    bias = -900.0 * (at[:, None] - at).abs()
    with hw.watch(model) as heads:
        model(x, bias)
    row = heads.rows()[0]
    assert row["evenness"] == pytest.approx(row["entropy"] / math.log(11), abs=1e-6)


def test_a_mask_that_multiplies_the_weights_hides_keys():
    model, x = made()
    with hw.watch(model) as heads:
        model(x, None, REAL[:, None, None].float())
    weights = model.weights(x, None)[0] * REAL[:, None, None]
    for head, row in enumerate(heads.rows()):
        found = [statistics_of(weights[i, head, :length, :length]) for i, length in enumerate(LENGTHS)]
        assert row["confidence"] == pytest.approx(sum(each["confidence"] for each in found) / 2, rel=1e-4)
        assert row["self"] == pytest.approx(sum(each["self"] for each in found) / 2, rel=1e-4)
        assert row["received"] == pytest.approx(sum(each["received"] for each in found) / 2, rel=1e-4)


class Flattened(Attention):
    """The same, with zeros in place of hidden weights, whose sequences and heads are merged by `view`."""

    def forward(self, x, real):
        weights, v = self.weights(x, None)
        hidden = ~(real[:, None, :, None] & real[:, None, None])
        weights = weights.masked_fill(hidden, 0.0).view(-1, 11, 11)
        heads = torch.bmm(weights, v.reshape(-1, 11, 7)).view(2, HEADS, 11, 7)
        return self.out(heads.transpose(1, 2).flatten(2))


def test_weights_that_are_filled_with_zeros_may_be_viewed():
    torch.manual_seed(3)
    model, x = Flattened(), torch.randn(2, 11, WIDTH)
    with hw.watch(model) as heads:
        model(x, REAL)
    weights = model.weights(x, None)[0]
    for head, row in enumerate(heads.rows()):
        found = [weights[i, head, :length, :length].amax(-1).mean() for i, length in enumerate(LENGTHS)]
        assert row["confidence"] == pytest.approx(float(sum(found)) / 2, rel=1e-4)


def test_a_weight_that_underflows_is_visible():
    """In float16, some weights are 0 although no mask hides their keys."""
    model, x = made()
    bias = torch.zeros(11, 11).masked_fill(torch.arange(11) % 3 == 2, -30.0)
    weights = model.weights(x, bias)[0]
    with hw.watch(model) as heads:
        model.half()(x.half(), bias.half())
    entropy = -torch.special.xlogy(weights, weights).sum(-1).mean((0, 2))
    assert [row["evenness"] for row in heads.rows()] == pytest.approx((entropy / math.log(11)).tolist(), abs=5e-3)
