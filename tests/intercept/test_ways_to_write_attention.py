"""Softmax attention written with many functions, against weights and outputs that the module stores itself."""

import pytest
import torch
import torch.nn.functional as F
from self_attention import DIM, HEADS, WIDTH, merge, require_gate, split
from test_watch import require_statistics
from torch import nn

import headwise as hw

pytestmark = pytest.mark.usefixtures("no_grad")

LENGTH = 11


def product(q, k, v):
    """Return the output `(batch, length, heads, features)` of attention without a scale."""
    return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2)


def by_position(q, k, v):
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return torch.einsum("bqhk,bkhd->bqhd", torch.einsum("bqhd,bkhd->bqhk", q, k).softmax(-1), v).flatten(2)


def weights_on_the_right(q, k, v):
    return (v.mT @ torch.special.softmax(k @ q.mT, dim=-2)).permute(0, 3, 1, 2).reshape(2, LENGTH, WIDTH)


def rows_of_all_heads(q, k, v):
    rows = q.reshape(2, HEADS * LENGTH, DIM)  # keys and values are shared
    return (torch.bmm(rows, k[:, 0].mT).softmax(-1) @ v[:, 0]).view(2, HEADS, LENGTH, -1).transpose(1, 2).flatten(2)


def heads_as_rows_of_an_einsum(q, k, v):
    weights = torch.einsum("bhqd,bkd->bhqk", q, k[:, 0]).softmax(-1)
    return torch.einsum("bhqk,bkd->bqhd", weights, v[:, 0]).flatten(2)


def cast_and_masked(q, k, v):
    weights = (q @ k.mT).double().softmax(-1).to(q.dtype)
    weights = torch.where(torch.ones(LENGTH, LENGTH).bool(), weights, 0.0).nan_to_num() * torch.ones(LENGTH, LENGTH)
    return (F.dropout(weights, 0.0) @ v).movedim(1, 2).contiguous().view(2, LENGTH, -1)


def elementwise_before_the_merge(q, k, v):
    return (product(q, k, v) * 1.0).clone().flatten(2) + 0.0


def baddbmm(q, k, v):
    scores = torch.baddbmm(torch.zeros(1), q.flatten(0, 1), k.flatten(0, 1).mT)
    return (
        torch.bmm(scores.view(2, HEADS, LENGTH, -1).softmax(dim=3).flatten(0, 1), v.flatten(0, 1))
        .unflatten(0, (2, HEADS))
        .transpose(1, 2)
        .flatten(2)
    )


def scores_by_mean(q, k, v):
    return merge(((q[:, :, :, None] * k[:, :, None]).mean(-1) * DIM).softmax(-1) @ v)


WAYS = [by_position, weights_on_the_right, cast_and_masked, elementwise_before_the_merge, baddbmm, scores_by_mean]
SHARED = [rows_of_all_heads, heads_as_rows_of_an_einsum]


class Attention(nn.Module):
    def __init__(self, way, projection="linear"):
        super().__init__()
        self.qkv, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.way, self.projection = way, projection

    def forward(self, x):
        q, k, v = map(split, self.qkv(x).chunk(3, -1))
        one = slice(1) if self.way in SHARED else slice(None)
        with torch._C.DisableTorchFunction():  # otherwise it would be attention that is not used
            weights = torch.einsum("bhqd,bhkd->bhqk", q, k[:, one].expand_as(k)).exp()
            self.weights = weights / weights.sum(-1, keepdim=True)
            self.outputs = torch.einsum("bhqk,bhkd->bhqd", self.weights, v[:, one].expand_as(v))
        out, weight = self.way(q, k, v), self.out_proj.weight
        if self.projection == "einsum":
            return torch.einsum("bqhd,ohd->bqo", out.unflatten(-1, (HEADS, -1)), weight.unflatten(1, (HEADS, -1)))
        if self.projection == "convolution":
            return F.conv1d(out.mT, weight[:, :, None], self.out_proj.bias).mT
        if self.projection == "addmm":
            return torch.addmm(self.out_proj.bias, out.reshape(-1, WIDTH), weight.t()).view(x.shape)
        return out @ weight.t() if self.projection == "matmul" else self.out_proj(out)


def require_right(attention):
    torch.manual_seed(0)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.4)
    model, x = nn.Sequential(attention), torch.randn(2, LENGTH, WIDTH)
    plain = model(x)
    with hw.watch(model) as heads:
        assert torch.equal(model(x), plain)
    require_statistics(heads, [attention.weights])
    norms = attention.outputs.norm(dim=-1).mean(-1).mean(0)
    assert [row["output_norm"] for row in heads.rows()] == pytest.approx(norms.tolist(), rel=1e-5)
    require_gate(model, x)


@pytest.mark.parametrize("way", [*WAYS, *SHARED])
def test_softmax_and_product_are_found_however_they_are_written(way):
    require_right(Attention(way).eval())


@pytest.mark.filterwarnings("ignore:the output projection was not seen")  # it is a function
@pytest.mark.parametrize("projection", ["einsum", "convolution", "addmm", "matmul"])
def test_any_linear_map_is_an_output_projection(projection):
    require_right(Attention(by_position, projection))


class TwoProducts(Attention):
    """Weights that multiply values and a function of the keys, added before or after the projection."""

    def forward(self, x):
        q, k, v = map(split, self.qkv(x).chunk(3, -1))
        weights = (q @ k.mT).softmax(-1)
        first, second = weights @ v, weights @ k.sin()
        if self.way == "before":
            return self.out_proj(merge(first + second))
        return self.out_proj(merge(first)) + self.out_proj(merge(second))


@pytest.mark.parametrize("way", ["before", "after"])
def test_weights_used_in_two_products_are_observed_once_and_gated_in_both(way):
    model, x = nn.Sequential(TwoProducts(way)), torch.randn(2, LENGTH, WIDTH)
    left_out = "^weights of these modules are multiplied with several tensors, so norms of outputs are left out: 0$"
    with pytest.warns(UserWarning, match=left_out), hw.watch(model) as heads:
        model(x)
    (record,) = heads.records
    assert record.statistics["entropy"].count.tolist() == [2, 2, 2]
    assert "output_norm" not in record.statistics
    require_gate(model, x)
