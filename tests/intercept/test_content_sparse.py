"""Masks that depend on the scores: keys that no query selected are no padding. Expected statistics are computed from
the weights of each sequence alone.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import headwise as hw
from sequences_alone import WIDTH, Attention, mean_statistics, require_statistics

pytestmark = pytest.mark.usefixtures("no_grad")

LENGTH, SELECTED = 13, 3
RIGHT = torch.arange(LENGTH) < torch.tensor([[LENGTH], [11]])
GLOBAL = torch.eye(LENGTH).bool() | (torch.arange(LENGTH) == 4) | (torch.arange(LENGTH) == 4)[:, None]
PATTERNS = {  # masks by position alone
    "all": torch.ones(LENGTH, LENGTH).bool(),
    "causal": torch.ones(LENGTH, LENGTH).tril().bool(),
    "window": torch.ones(LENGTH, LENGTH).tril(2).triu(-2).bool(),
    "global token": GLOBAL,
}


class Sparse(nn.Module):
    """Attention of each query to the keys with the largest scores, in each head or in the mean over the heads."""

    def __init__(self, per_head, fused):
        super().__init__()
        self.attention, self.per_head, self.fused = Attention(), per_head, fused
        nn.init.normal_(self.attention.q.bias, std=9)  # many queries select the same keys

    def weights(self, x, visible):
        """Return queries, values and the mask of the selected keys."""
        q, k, v = self.attention.split(x, x)
        scores = (q @ k.mT * 7**-0.5).masked_fill(~visible, -torch.inf)
        index = scores if self.per_head else scores.mean(1, keepdim=True)
        selected = (index >= index.topk(SELECTED).values[..., -1:]) & visible
        return q, k, v, scores, selected

    def forward(self, x, padding_mask=None, attention_mask=None):
        mask = padding_mask if attention_mask is None else attention_mask
        visible = torch.ones(1, 1, 1, x.shape[1]).bool() if mask is None else mask.bool()[:, None, None]
        q, k, v, scores, selected = self.weights(x, visible)
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v, selected)
        else:
            out = scores.masked_fill(~selected, -torch.inf).softmax(-1) @ v
        return self.attention.out(out.transpose(1, 2).flatten(2))

    @torch.no_grad()
    def alone(self, x):
        """Return the weights of one sequence, and the mask of the selected keys."""
        *_, scores, selected = self.weights(x[None], torch.ones(1, 1, 1, len(x)).bool())
        return scores.masked_fill(~selected, -torch.inf).softmax(-1)[0]


def model_and_input(per_head, fused):
    torch.manual_seed(2)
    model, x = Sparse(per_head, fused).double(), torch.randn(2, LENGTH, WIDTH).double()
    of_sequences = [model.alone(each[is_real]) for each, is_real in zip(x, RIGHT, strict=True)]
    assert any(bool((weights == 0).flatten(0, 1).all(0).any()) for weights in of_sequences)  # no query selects some
    return model, x


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("per_head", [True, False])
def test_tokens_whose_keys_no_query_selects_count(per_head, fused):
    model, x = model_and_input(per_head, fused)
    with hw.watch(model) as heads:
        model(x)
    require_statistics(heads.rows(), mean_statistics([model.alone(each) for each in x]))


@pytest.mark.parametrize("name", ["padding_mask", "attention_mask"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("per_head", [True, False])
def test_padding_among_unselected_keys_is_that_of_the_argument(per_head, fused, name):
    model, x = model_and_input(per_head, fused)
    with hw.watch(model) as heads:
        model(x, **{name: RIGHT})
    alone = [model.alone(each[is_real]) for each, is_real in zip(x, RIGHT, strict=True)]
    require_statistics(heads.rows(), mean_statistics(alone))


def test_padding_that_contradicts_a_content_sparse_mask_is_named():
    model, x = model_and_input(False, True)
    model.forward, forward = lambda x, attention_mask: forward(x), model.forward
    with pytest.warns(UserWarning, match="a mask shows padding, but it could not be established"), hw.watch(model):
        model(x, attention_mask=RIGHT)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_padding_of_a_mask_by_position_is_found_without_an_argument(pattern):
    torch.manual_seed(2)
    model, x, visible = Attention(), torch.randn(2, LENGTH, WIDTH), PATTERNS[pattern]
    with hw.watch(model) as heads:
        model(x, None, visible & RIGHT[:, None, None])
    model, weights = model.double(), []
    for each, is_real in zip(x.double(), RIGHT, strict=True):
        q, k, _ = model.split(each[None, is_real], each[None, is_real])
        hidden = ~visible[: int(is_real.sum()), : int(is_real.sum())]
        weights.append((q @ k.mT * 7**-0.5)[0].masked_fill(hidden, -torch.inf).softmax(-1))
    require_statistics(heads.rows(), mean_statistics(weights))


class ByMask(nn.Module):
    """Attention of two heads with the mask that it receives; the padding mask is not used."""

    def __init__(self, fused):
        super().__init__()
        self.qkv, self.out_proj, self.fused = nn.Linear(WIDTH, 30), nn.Linear(10, WIDTH), fused

    def forward(self, x, mask, padding_mask=None):
        q, k, v = (part.unflatten(-1, (2, 5)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        self.weights = (q @ k.mT * 5**-0.5).masked_fill(~mask, -torch.inf).softmax(-1)
        out = F.scaled_dot_product_attention(q, k, v, mask) if self.fused else self.weights @ v
        return self.out_proj(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("fused", [True, False], ids=["sdpa", "softmax"])
def test_layers_with_equal_masks_have_the_padding_of_their_own_arguments(fused):
    torch.manual_seed(0)
    model = nn.ModuleList([ByMask(fused), ByMask(fused)])
    x, real = torch.randn(2, LENGTH, WIDTH), RIGHT
    mask = (torch.rand(2, 1, LENGTH, LENGTH) < 0.5) & real[:, None, None]
    mask[..., 0] = True
    model.forward = lambda x: model[1](model[0](x, mask), mask, padding_mask=real)
    with hw.watch(model) as heads:
        model(x)
    of_rows = torch.special.entr(model[0].weights).sum(-1), torch.special.entr(model[1].weights).sum(-1)
    expected = of_rows[0].mean((0, 2)), torch.stack([of_rows[1][i][:, real[i]].mean(-1) for i in range(2)]).mean(0)
    got = [row["entropy"] for row in heads.rows()]
    assert got == pytest.approx(torch.cat(expected).tolist(), rel=1e-5)
