"""Captured rows, columns, largest weights and pictures of weights against the full weight matrix."""

import pytest
import torch
from test_statistics import BATCH, HEADS, KEYS, MASKS, QUERIES, exact, problem, small_blocks  # noqa: F401

import headwise as hw
from headwise.statistics.attend_observed import attend_observed
from headwise.statistics.weight_capture import CapturedWeights

CAPTURE = hw.WeightCapture(rows=(0, -1, 11), columns=(3, -2), top=6, picture=5)


def pooled(weights, sides):
    """Return the mean weight in every cell of a grid, computed cell by cell."""
    queries, keys = (torch.arange(n) * side // n for n, side in zip(weights.shape[2:], sides, strict=True))
    cells = [
        [weights[:, :, queries == i][..., keys == j].mean((-1, -2)) for j in range(sides[1])] for i in range(sides[0])
    ]
    return torch.stack([torch.stack(row, -1) for row in cells], -2)


@pytest.mark.parametrize("mask", MASKS)
def test_captured_weights_equal_the_weight_matrix(mask):
    attention_problem = problem(MASKS[mask])
    captured = CapturedWeights(CAPTURE, attention_problem.grid)
    attend_observed(attention_problem, captured.add)
    weights = exact(attention_problem).weights.float()
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(captured.rows, weights[:, :, [0, QUERIES - 1, 11]], **close)
    torch.testing.assert_close(captured.columns, weights[..., [3, KEYS - 2]], **close)
    torch.testing.assert_close(captured.picture, pooled(weights, (5, 5)), **close)
    best = weights.topk(6)
    torch.testing.assert_close(captured.top_weights, best.values, **close)
    found = weights.gather(-1, captured.top_keys.clamp(min=0)).masked_fill(captured.top_keys < 0, 0.0)
    torch.testing.assert_close(found, best.values, **close)
    assert ((captured.top_keys < 0) == (best.values == 0)).all()


def test_only_chosen_weights_are_captured():
    attention_problem = problem()
    captured = CapturedWeights(hw.WeightCapture(top=100), attention_problem.grid)
    assert captured.top_keys.shape == (BATCH, HEADS, QUERIES, KEYS)
    assert captured.rows is captured.columns is captured.picture is None


WRONG = {
    "rows: expected a sequence of whole numbers, got 3": {"rows": 3},
    r"columns: expected a sequence of whole numbers, got \[1.5\]": {"columns": [1.5]},
    "top: expected a whole number of 0 or more, got -1": {"top": -1},
    "picture: expected a side of 128 or less, got 129": {"picture": 129},
}


@pytest.mark.parametrize("sentence", WRONG)
def test_unusable_options_of_a_capture_are_refused(sentence):
    with pytest.raises(hw.InputError, match=sentence):
        hw.WeightCapture(**WRONG[sentence])


def test_a_row_outside_the_call_is_refused():
    with pytest.raises(hw.InputError, match=f"rows: expected numbers from -{QUERIES} to {QUERIES - 1}, got 40"):
        CapturedWeights(hw.WeightCapture(rows=[40]), problem().grid)


def test_watch_captures_weights():
    torch.manual_seed(0)
    layer, x = hw.MultiHeadAttention(24, num_heads=3, mask=hw.causal()), torch.randn(2, 7, 24)
    _, weights = layer(x, return_weights=True)
    with hw.watch(torch.nn.Sequential(layer), detail=hw.WeightCapture(columns=[0])) as heads:
        layer(x)
    torch.testing.assert_close(heads.details["0"].columns, weights[..., [0]], rtol=1e-5, atol=1e-6)
    with (
        pytest.raises(hw.InputError, match="detail: expected a headwise.WeightCapture or None, got dict"),
        hw.watch(layer, detail={}),
    ):
        pass
