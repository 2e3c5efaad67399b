"""Softmaxes that do not average values over keys, or whose heads cannot be established: named, and never reported."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import headwise as hw
from headwise.intercept.trace.refusals import (
    HEADS_CONTRADICT,
    HEADS_NOT_FOLLOWED,
    HEADS_SEPARATE,
    NOT_AVERAGES,
    NOT_OVER_KEYS,
    WEIGHTS_NOT_FOLLOWED,
)

HEADS, VALUE_DIM, LENGTH = 3, 5, 11
WIDTH = HEADS * VALUE_DIM


class Mixer(nn.Module):
    """Projections around a computation of `(batch, heads, length, features)` tensors."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, VALUE_DIM)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out_proj(self.mixed(q, k, v))


class LinearAttention(Mixer):
    def mixed(self, q, k, v):
        return (q.softmax(-1) @ (k.softmax(-2).mT @ v)).transpose(1, 2).flatten(2)


class ChannelAttention(Mixer):
    def mixed(self, q, k, v):
        return ((q.mT @ k).softmax(-1) @ v.mT).permute(0, 3, 1, 2).flatten(2)


class AttentionOfHeads(Mixer):
    def mixed(self, q, k, v):
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return ((q @ k.mT).softmax(-1) @ v).flatten(2)


class SDPAOfHeads(Mixer):
    def mixed(self, q, k, v):
        return F.scaled_dot_product_attention(*(tensor.transpose(1, 2) for tensor in (q, k, v))).flatten(2)


class SlotAttention(Mixer):
    def mixed(self, q, k, v):
        weights = (q @ k.mT).softmax(-2)
        return (weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2)


class SignedAttention(Mixer):
    def mixed(self, q, k, v):
        scores = q @ k.mT
        return ((scores.abs().softmax(-1) * scores.sign()) @ v).transpose(1, 2).flatten(2)


class DifferenceOfWeightsAttention(Mixer):
    def mixed(self, q, k, v):
        return (((q @ k.mT).softmax(-1) - 0.3 * (k @ q.mT).softmax(-1)) @ v).transpose(1, 2).flatten(2)


class HeadsOneByOne(Mixer):
    def mixed(self, q, k, v):
        heads = [(q[:, head] @ k[:, head].mT).softmax(-1) @ v[:, head] for head in range(HEADS)]
        return torch.cat(heads, -1)


class StackedHeads(Mixer):
    def mixed(self, q, k, v):
        heads = [(q[:, head] @ k[:, head].mT).softmax(-1) @ v[:, head] for head in range(HEADS)]
        return torch.stack(heads, 2).flatten(2)


class HeadsInABuffer(Mixer):
    def mixed(self, q, k, v):
        out = torch.zeros_like(q)
        for head in range(HEADS):
            out[:, head] = F.scaled_dot_product_attention(q[:, head], k[:, head], v[:, head])
        return out.transpose(1, 2).flatten(2)


class HeadsByPosition(Mixer):
    def mixed(self, q, k, v):
        return ((q @ k.mT).softmax(-1) @ v).reshape(len(q), -1, WIDTH)


class AnotherNumberOfHeads(Mixer):
    num_heads = 7

    def mixed(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


REASONS = {
    LinearAttention: NOT_OVER_KEYS,
    ChannelAttention: NOT_OVER_KEYS,
    AttentionOfHeads: NOT_OVER_KEYS,
    SDPAOfHeads: NOT_OVER_KEYS,
    SlotAttention: WEIGHTS_NOT_FOLLOWED,
    SignedAttention: NOT_AVERAGES,
    DifferenceOfWeightsAttention: WEIGHTS_NOT_FOLLOWED,
    HeadsOneByOne: re.escape(HEADS_SEPARATE),
    StackedHeads: re.escape(HEADS_SEPARATE),
    HeadsInABuffer: re.escape(HEADS_SEPARATE),
    HeadsByPosition: HEADS_NOT_FOLLOWED,
    AnotherNumberOfHeads: HEADS_CONTRADICT,
}


class Seen(Mixer):
    def mixed(self, q, k, v):
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)


@torch.no_grad()
@pytest.mark.parametrize("kind", REASONS)
def test_a_module_is_named_in_place_of_a_wrong_report(kind):
    torch.manual_seed(0)
    model, x = nn.Sequential(Seen(), kind(), kind()), torch.randn(2, LENGTH, WIDTH)
    plain = model(x)
    with pytest.warns(UserWarning, match=f"^{REASONS[kind]}: 1, 2$"), hw.watch(model) as heads:
        assert torch.equal(model(x), plain)
    assert {row["module"] for row in heads.rows()} == {"0"}
    with pytest.raises(hw.InputError, match="^(values|model): expected"), hw.gate(model, {("1", 0): 0.0}):
        model(x)


class Router(nn.Module):
    """Experts that are averaged, by weights of a linear map of each token."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 7), nn.Linear(WIDTH, 7 * WIDTH)

    def forward(self, x):
        return torch.einsum("bne,bned->bnd", self.gate(x).softmax(-1), self.experts(x).unflatten(-1, (7, WIDTH)))


@torch.no_grad()
def test_routers_are_neither_reported_nor_named(recwarn):
    model = nn.Sequential(Seen(), Router(), Seen())
    with hw.watch(model) as heads:
        model(torch.randn(2, LENGTH, WIDTH))
    assert {row["module"] for row in heads.rows()} == {"0", "2"}
    assert not [warning for warning in recwarn if warning.category is UserWarning]
