"""Scores far below others are scores of visible keys, unless a function may have added a mask."""

import pytest
import torch
from torch import nn

import headwise as hw

HIDDEN = torch.ones(7, 7).triu(1).bool()


class Attention(nn.Module):
    """Attention of 3 heads whose scores differ by many thousands, and are then masked."""

    def __init__(self, mask):
        super().__init__()
        self.qkv, self.out_proj = nn.Linear(15, 45), nn.Linear(15, 15)
        self.mask = mask

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (3, 5)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT * 1e5
        self.plain = scores.clone()
        self.weights = self.mask(scores).softmax(-1)
        return self.out_proj((self.weights @ v).transpose(1, 2).flatten(2))


def received(weights, visible):
    """Return the mean over sequences of the largest mean weight of a key, by head, counting keys as documented."""
    seen = visible.sum(0)
    means = (weights * visible).sum(2) / seen
    return means[..., 2 * seen >= seen.max()].amax(-1).mean(0).tolist()


@pytest.mark.parametrize("mask", [lambda scores: scores, lambda scores: (scores / 2).view(2, 3, 7, 7).float()])
def test_low_scores_without_a_mask_are_visible(mask):
    torch.manual_seed(0)
    model = Attention(mask)
    with torch.no_grad(), hw.watch(model) as heads:
        model(torch.randn(2, 7, 15))
    assert (model.plain.amax(-1) - model.plain.amin(-1)).min() > 1e4
    wanted = received(model.weights, ~torch.zeros(7, 7).bool())
    assert [row["received"] for row in heads.rows()] == pytest.approx(wanted, rel=1e-5)
    assert all(0 <= row["evenness"] < 0.1 for row in heads.rows())


def filled_in_place(scores):
    scores.masked_fill_(HIDDEN, -1e9)
    return scores * 1.0


def assigned(scores):
    scores[..., HIDDEN] = -1e9
    return scores


def assigned_to_a_view(scores):
    for row in range(6):
        scores[:, :, row, row + 1 :] = -1e9
    return scores / 1.0


def added(scores):
    return scores + torch.zeros(7, 7).masked_fill(HIDDEN, -1e9)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("mask", [filled_in_place, assigned, assigned_to_a_view, added])
def test_masks_of_large_numbers_hide_keys(mask, inference):
    torch.manual_seed(0)
    model = Attention(lambda scores: mask(scores / 1e5))
    with torch.inference_mode(inference), torch.no_grad(), hw.watch(model) as heads:
        model(torch.randn(2, 7, 15))
    weights = model.weights[:, :, 1:].double()
    entropy = -(weights * weights.clamp(min=1e-300).log()).sum(-1)
    evenness = (entropy / torch.arange(2.0, 8.0).log()).mean((0, 2)).tolist()
    assert [row["evenness"] for row in heads.rows()] == pytest.approx(evenness, rel=1e-4)


def test_positions_of_a_mask_that_others_than_the_own_queries_have_are_unknown():
    class Shifted(Attention):
        """The last four queries see the keys that the first four tokens would see."""

        def forward(self, x):
            q, k, v = (part.unflatten(-1, (3, 5)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            out = nn.functional.scaled_dot_product_attention(q[:, :, 3:], k, v, is_causal=True)
            return self.out_proj(out.transpose(1, 2).flatten(2))

    match = "positions of queries among the keys could not be established"
    model = Shifted(None)
    with torch.no_grad(), pytest.warns(UserWarning, match=match), hw.watch(model) as heads:
        model(torch.randn(2, 7, 15))
    assert not any("distance" in row for row in heads.rows())
