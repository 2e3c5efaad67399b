"""Models that compute their own softmax, against the weights that they return."""

import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from test_watch import require_statistics
from torch import nn

import headwise as hw
from headwise.intercept.trace.refusals import WEIGHTS_NOT_FOLLOWED
from tiny import PADDED, TOKENS

GPT = {"vocab_size": 97, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64}
BERT = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 37}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
FAMILIES = {
    "gptj": (transformers.GPTJModel, transformers.GPTJConfig(**GPT, rotary_dim=4)),
    "bloom": (transformers.BloomModel, transformers.BloomConfig(vocab_size=97, hidden_size=48, n_layer=2, n_head=6)),
    "mpt": (transformers.MptModel, transformers.MptConfig(vocab_size=97, d_model=48, n_layers=2, n_heads=6)),
    "deberta": (transformers.DebertaModel, transformers.DebertaConfig(**BERT, **RELATIVE)),
    "deberta-v2": (transformers.DebertaV2Model, transformers.DebertaV2Config(**BERT, **RELATIVE)),
    "mpnet": (transformers.MPNetModel, transformers.MPNetConfig(**BERT)),
}


@pytest.mark.parametrize("padding", PADDED)
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_statistics_of_a_model_with_its_own_softmax(name, padding):
    torch.manual_seed(0)
    kind, config = FAMILIES[name]
    model = kind(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    inputs = {"input_ids": TOKENS, "attention_mask": PADDED[padding]}
    plain = model(**inputs, output_attentions=True)
    with hw.watch(model) as heads:
        watched = model(**inputs)
    assert torch.equal(watched.last_hidden_state, plain.last_hidden_state)
    real = PADDED[padding].bool()
    weights = [each * real[:, None, :, None] for each in plain.attentions]
    require_statistics(heads, weights, real, TOKENS)
    assert all(row["output_norm"] > 0 for row in heads.rows())


class Attention(nn.Module):
    """Attention of 3 heads of 8 features, with softmax and product written in one of several ways."""

    def __init__(self, way: str):
        super().__init__()
        self.qkv, self.way, self.num_heads, self.softmax = nn.Linear(24, 72), way, 3, nn.Softmax(dim=-1)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(8)
        if self.way == "one axis of batch and heads":
            weights = F.softmax(scores.flatten(0, 1), dim=-1)
            out = torch.bmm(F.dropout(weights, 0.1, training=False), v.flatten(0, 1)).unflatten(0, (-1, 3))
        elif self.way == "einsum":
            weights = scores.softmax(-1).to(x.dtype)
            out = torch.einsum("bhij,bhjd->ibhd", weights, v).permute(1, 2, 0, 3)
        elif self.way == "a module":
            weights = self.softmax(scores)
            out = weights @ v
        elif self.way == "a product and a sum":
            weights = torch.softmax(scores, -1)
            out = (weights[..., None] * v[:, :, None]).sum(-2)
        else:  # points: no product over keys
            weights = torch.softmax(scores, -1)
            out = (weights[..., None] * v[:, :, None]).mean(-2)
        self.weights, self.out = weights.view(scores.shape), out
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("way", ["one axis of batch and heads", "einsum", "a module", "a product and a sum"])
def test_softmax_and_product_are_followed_however_they_are_written(way):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(24, 24), Attention(way)), torch.randn(2, 7, 24)
    with hw.watch(model) as heads:
        y = model(x)
    y.sum().backward()
    assert model[0].weight.grad.abs().max() > 0
    attention = model[1]
    require_statistics(heads, [attention.weights.detach()])
    norms = attention.out.norm(dim=-1).mean(-1).mean(0)
    assert [row["output_norm"] for row in heads.rows()] == pytest.approx(norms.tolist(), rel=1e-5)


def test_a_softmax_without_a_product_is_named():
    model = nn.Sequential(Attention("points"))
    sentence = r"model: expected attention in a way that can be seen, got none in 0"
    with pytest.raises(hw.InputError, match=sentence), hw.watch(model):
        model(torch.randn(2, 7, 24))


def test_torchs_layer_that_returns_weights_is_watched():
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(24, 3, batch_first=True).eval(), torch.randn(2, 7, 24)
    padding = torch.arange(7) >= torch.tensor([[7], [4]])
    plain, weights = layer(x, x, x, key_padding_mask=padding, average_attn_weights=False)
    with hw.watch(layer) as heads:
        out, again = layer(x, x, x, key_padding_mask=padding, average_attn_weights=False)
    assert torch.equal(out, plain)
    assert torch.equal(again, weights)
    require_statistics(heads, [weights.detach()], ~padding)
    assert "output_norm" in heads.rows()[0]
    assert F.softmax.__module__ == "torch.nn.functional"
    assert torch.bmm is torch._C._VariableFunctions.bmm


class Both(nn.Module):
    """Two directions whose softmaxes come before either product, one with a list for its operands, one filled."""

    def forward(self, x, y, hidden):
        scores = x @ y.mT
        there = scores.softmax(-1).masked_fill(hidden, 0.0)
        back = scores.mT.softmax(-1)
        self.weights = there, back
        return torch.einsum("bhij,bhjd->bhid", [there, y]), back @ x


class BothAttention(Both):
    num_heads = 3


def test_two_pending_softmaxes_keep_their_own_products():
    torch.manual_seed(0)
    model, x, y = BothAttention(), torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    with hw.watch(model) as heads:
        model(x, y, torch.rand(2, 3, 5, 5) < 0.2)
    assert [record.site.label for record in heads.records] == ["", "[1]"]
    for record, weights in zip(heads.records, model.weights, strict=True):
        entropy = torch.special.entr(weights).sum(-1).mean(-1)
        assert record.statistics["entropy"].count.tolist() == [2, 2, 2]
        torch.testing.assert_close(record.statistics["entropy"].value.float(), entropy.mean(0), rtol=1e-5, atol=1e-6)


def test_an_unreadable_softmax_is_named_next_to_a_readable_one():
    class Attention(nn.Module):
        num_heads = 3

        def forward(self, x):
            points = ((x @ x.mT).softmax(-1)[..., None] * x[:, :, None]).mean(-2)  # not a product of matrices
            return points + (x @ x.mT).softmax(-1) @ x

    model = nn.Sequential()
    model.add_module("attn", Attention())
    sentence = f"^{WEIGHTS_NOT_FOLLOWED}: attn$"
    with pytest.warns(UserWarning, match=sentence), hw.watch(model) as heads:
        model(torch.randn(2, 3, 5, 8))
    assert len(heads.rows()) == 3
