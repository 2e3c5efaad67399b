"""Tensors without elements in attention, such as an empty memory, an empty batch or a selection of no head."""

import pytest
import torch
import torch.nn.functional as F
from test_watch import require_statistics
from torch import nn

import headwise as hw


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def softmax(q, k, v):
    return torch.softmax(q @ k.mT * 5**-0.5, -1) @ v


def einsum(q, k, v):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * 5**-0.5
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


EMPTY = {
    "queries": lambda attend, q, k, v: torch.cat([attend(q[:, :, :0], k, v), attend(q, k, v)], 2),
    "keys": lambda attend, q, k, v: attend(q, k, v) + attend(q, k[:, :, :0], v[:, :, :0]),
    "sequences": lambda attend, q, k, v: torch.cat([attend(q[:0], k[:0], v[:0]), attend(q, k, v)]),
    "memory": lambda attend, q, k, v: attend(q, torch.cat([k[:, :, :0], k], 2), torch.cat([v[:, :, :0], v], 2)),
    "rest of the output": lambda attend, q, k, v: torch.cat([*attend(q, k, v).split([7, 0], 2)], 2),
    "heads of the output": lambda attend, q, k, v: torch.cat([(out := attend(q, k, v))[:, :0], out], 1),
}


class Attention(nn.Module):
    num_heads = 3

    def __init__(self, attend, empty):
        super().__init__()
        self.qkv, self.out_proj, self.attend, self.empty = nn.Linear(15, 45), nn.Linear(15, 15), attend, empty

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (3, 5)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        weights = (q @ k.mT * 5**-0.5).exp()  # a softmax would be one more, without a product
        self.weights = weights / weights.sum(-1, keepdim=True)
        return self.out_proj(self.empty(self.attend, q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("attend", [sdpa, softmax, einsum])
@pytest.mark.parametrize("part", EMPTY)
@torch.no_grad()
def test_tensors_without_elements_change_nothing(attend, part):
    torch.manual_seed(0)
    model, x = nn.Sequential(Attention(attend, EMPTY[part])), torch.randn(2, 7, 15)
    plain = model(x)
    with hw.watch(model) as heads:
        assert torch.equal(model(x), plain)
    require_statistics(heads, [model[0].weights])
    with hw.gate(model, {("0", 1): 0.0}):
        gated = model(x)
    model[0].out_proj.weight[:, 5:10] = 0.0
    torch.testing.assert_close(gated, model(x))


@pytest.mark.parametrize("attend", [sdpa, softmax, einsum])
@torch.no_grad()
def test_an_empty_batch_counts_as_no_sequence(attend):
    torch.manual_seed(0)
    model, x = nn.Sequential(Attention(attend, lambda attend, *qkv: attend(*qkv))), torch.randn(2, 7, 15)
    with hw.watch(model) as heads, hw.gate(model, {("0", 1): 1.0}):
        assert model(x[:0]).shape == (0, 7, 15)
        assert model(x[:, :0]).shape == (2, 0, 15)
        model(x)
    require_statistics(heads, [model[0].weights])
    (record,) = heads.records
    assert record.statistics["entropy"].count.tolist() == [2, 2, 2]
