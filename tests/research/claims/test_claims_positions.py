"""Position schemes of the trained models."""

import itertools

import pytest
import torch

import headwise as hw
from headwise.studies.model import ModelShape
from headwise.studies.training import build_seeded
from research.claims.positions import SCHEMES, PositionedTransformer, SpreadRotary


def model_of(scheme, heads=4, width=16, *, causal=True):
    shape = ModelShape(13, width, 2, 6000, causal=causal)
    return PositionedTransformer(shape, hw.Setting(heads, width // heads, heads), scheme, 9).double().eval()


def test_spread_frequencies_are_those_of_one_wide_head():
    """The angle of each pair is read off a rotated unit vector; all heads together have the angles of one head."""
    one = hw.Rotary().rotate(torch.ones(1, 1, 1, 16, dtype=torch.float64), torch.tensor([[1]]))
    expected = torch.atan2(one[..., 8:] - one[..., :8], one[..., 8:] + one[..., :8]).flatten().sort().values
    for heads in (1, 2, 4, 8):
        x = torch.ones(1, heads, 1, 16 // heads, dtype=torch.float64)
        first, second = SpreadRotary().rotate(x, torch.tensor([[1]])).chunk(2, dim=-1)
        angles = torch.atan2(second - first, second + first).flatten()
        torch.testing.assert_close(angles.sort().values, expected, rtol=0, atol=1e-6)


def test_spread_scores_depend_on_the_distance_alone():
    q, k = (torch.randn(1, 4, 1, 6, dtype=torch.float64) for _ in range(2))
    scores = [
        (SpreadRotary().rotate(q, torch.tensor([[5 + start]])) * SpreadRotary().rotate(k, torch.tensor([[start]]))).sum(
            -1
        )
        for start in (0, 3, 40)
    ]
    for other in scores[1:]:
        torch.testing.assert_close(other, scores[0], rtol=0, atol=1e-5)


def test_with_one_head_spread_and_rotary_are_the_same():
    ids = torch.randint(13, (2, 9))
    rotary, spread = (build_seeded(lambda s=scheme: model_of(s, 1), 3) for scheme in ("rotary", "spread"))
    torch.testing.assert_close(rotary(ids), spread(ids), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("scheme", "knows"), zip(SCHEMES, (False, True, True, True), strict=True))
def test_schemes_know_the_order_of_tokens(scheme, knows):
    """Without positions, an encoder gives the last of permuted tokens the same output."""
    model = build_seeded(lambda: model_of(scheme, causal=False), 3)
    for name, parameter in model.named_parameters():
        if "proj" in name or "embed" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    ids = torch.arange(6)[None]
    permuted = torch.tensor([[3, 1, 4, 0, 2, 5]])
    change = (model(ids)[0, -1] - model(permuted)[0, -1]).abs().max().item()
    assert (change > 1e-3) == knows


def test_schemes_have_equal_parameters_except_learned_positions():
    numbers = {scheme: sum(each.numel() for each in model_of(scheme).parameters()) for scheme in SCHEMES}
    assert numbers.pop("learned") - 9 * 16 == numbers["none"]
    assert len(set(numbers.values())) == 1
    for one, other in itertools.pairwise((1, 2, 4, 8)):
        assert len({sum(p.numel() for p in model_of("spread", heads).parameters()) for heads in (one, other)}) == 1
