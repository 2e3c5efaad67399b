"""Weights of tokens by derivatives of the output, against traces of matrices, and fits with weights."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from headwise.compression.calibration.derivatives import token_weights
from headwise.compression.calibration.least_squares_fits import OutputMoments

WIDE = 4_000
"""Features of outputs: so many that one random direction has the norm of the mean of all, but for a few percent."""


class Reading(nn.Module):
    """Model in which all tokens read the first one, and each has a scale of its own."""

    def __init__(self, is_causal_model=False):
        super().__init__()
        torch.manual_seed(0)
        self.projection, self.factors = nn.Linear(5, WIDE), torch.randn(WIDE) / 3
        self.scales, self.returns_logits = torch.tensor([1.0, 2.0, 3.0, 0.0]), is_causal_model

    def forward(self, x, attention_mask=None):
        y = self.projection(x) * self.scales[:, None]
        y = y + y[:, :1] * torch.tensor([0.0, 1.0, 1.0, 1.0])[:, None]
        return SimpleNamespace(logits=y * self.factors) if self.returns_logits else y * self.factors


X = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])


def test_a_weight_is_the_squared_derivative_of_all_that_the_token_changes():
    model = Reading()
    (weights,) = token_weights(model, ["projection"], [{"x": X, "attention_mask": MASK}])["projection"]
    trace = float(model.factors.square().sum())
    assert [len(each) for each in weights] == [4, 3]
    # The first token is read by itself and all others; the last token of the second text is padding.
    for own, expected in zip(weights, ([4, 4, 9, 0], [3, 4, 9]), strict=True):
        torch.testing.assert_close((own / trace).float(), torch.tensor(expected).float(), rtol=0.1, atol=1e-9)


def test_for_logits_the_derivative_is_that_of_the_divergence():
    model = Reading(is_causal_model=True)
    with torch.no_grad():
        p = model(X).logits.softmax(-1)
    (weights,) = token_weights(model, ["projection"], [{"x": X}])["projection"]
    squares = model.factors.square()
    traces = p @ squares - p.square() @ squares  # tr(W^T (diag p - p p^T) W) with W = diag(factors)
    expected = traces * model.scales.square()
    expected[:, 0] = traces.sum(1)
    torch.testing.assert_close(torch.stack(weights).float(), expected, rtol=0.1, atol=1e-9)


def test_a_model_without_derivatives_has_equal_weights_and_is_named():
    class Closed(Reading):
        @torch.no_grad()
        def forward(self, x):
            return super().forward(x)

    with pytest.warns(UserWarning, match="the same weight in scores and fits, because the output of Closed has no"):
        assert token_weights(Closed(), ["projection"], [{"x": X}]) == {"projection": None}


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_fit_with_weights_is_that_of_the_solver(has_bias):
    generator = torch.Generator().manual_seed(0)
    x, y, dense = (torch.randn(*shape, generator=generator).double() for shape in ((50, 6), (50, 3), (3, 6)))
    weights = torch.rand(50, generator=generator).double()
    kept, root = torch.tensor([0, 2, 5]), weights.sqrt()[:, None]
    moments = OutputMoments.of(x[:20], y[:20], weights[:20]) + OutputMoments.of(x[20:], y[20:], weights[20:])
    weight, bias, _ = next(moments.fits(dense, kept, has_bias, [1e-12]))
    columns = torch.cat([x[:, kept], torch.full((50, 1), float(has_bias)).double()], 1)[:, : 3 + has_bias]
    expected = torch.linalg.lstsq(root * columns, root * y).solution.mT
    torch.testing.assert_close(weight, expected[:, :3], rtol=1e-9, atol=1e-9)
    error = (weights[:, None] * (y - x[:, kept] @ weight.mT - bias) ** 2).sum()
    assert moments.error(weight, bias, kept) == pytest.approx(float(error), rel=1e-9)
    assert moments.tokens == 50
