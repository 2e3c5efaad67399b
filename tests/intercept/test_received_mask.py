"""The mask that interceptors read from an attention call, against the mask that the model passed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import headwise as hw
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Interceptor

QUERIES, KEYS = 5, 7
NUMBERS = ("entropy", "confidence", "distance", "first")
VISIBLE = torch.rand(2, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(4)) < 0.6


class Attends(nn.Module):
    def forward(self, q, k, **options):
        return F.scaled_dot_product_attention(q, k, k, **options)


class Reader(Interceptor):
    def observe(self, call):
        self.received = call.mask().block(range(QUERIES))


@pytest.mark.parametrize("hidden", [False, -torch.inf, torch.finfo(torch.float32).min, -1e9, -1e4])
def test_interceptors_read_the_mask_of_a_call(hidden):
    mask = VISIBLE if hidden is False else torch.zeros(VISIBLE.shape).masked_fill(~VISIBLE, hidden)
    model, reader = Attends(), Reader()
    with intercepted(model, reader):
        model(torch.randn(2, 3, QUERIES, 11), torch.randn(2, 3, KEYS, 11), attn_mask=mask)
    assert torch.equal(reader.received, VISIBLE)


def test_a_causal_flag_is_a_mask_that_starts_at_the_first_key():
    model, reader = Attends(), Reader()
    with intercepted(model, reader):
        model(torch.randn(2, 3, QUERIES, 11), torch.randn(2, 3, KEYS, 11), is_causal=True)
    assert torch.equal(reader.received[0, 0], torch.ones(QUERIES, KEYS, dtype=torch.bool).tril())


class Layer(nn.Module):
    """Self-attention by SDPA, or by the function of `transformers` that calls it."""

    def __init__(self, way):
        super().__init__()
        self.q, self.k, self.out_proj, self.way = nn.Linear(33, 33), nn.Linear(33, 33), nn.Linear(33, 33), way

    def forward(self, x, mask):
        q, k = (project(x).unflatten(-1, (3, 11)).transpose(1, 2) for project in (self.q, self.k))
        if self.way == "sdpa":
            out = F.scaled_dot_product_attention(q, k, k, attn_mask=mask).transpose(1, 2)
        else:
            out = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)(self, q, k, k, mask)[0]
        return self.out_proj(out.flatten(2))


class TwoLayers(nn.Module):
    """Two layers, between which the mask is overwritten."""

    def __init__(self, way):
        super().__init__()
        self.layers = nn.ModuleList([Layer(way), Layer(way)])

    def forward(self, x, mask):
        first = self.layers[0](x, mask)
        mask[..., :3] = False
        return first + self.layers[1](x, mask)


@pytest.mark.parametrize("way", ["sdpa", "transformers"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_that_the_model_overwrites_between_layers_is_another_mask(way, mode):
    torch.manual_seed(5)
    model, x = TwoLayers(way).eval(), torch.randn(2, KEYS, 33)
    with mode():
        mask = torch.ones(2, 1, KEYS, KEYS, dtype=torch.bool)
        with hw.watch(model) as heads:
            model(x, mask)
        with hw.watch(model.layers[1]) as alone:
            model.layers[1](x, mask)
    for row, expected in zip(heads.rows()[3:], alone.rows(), strict=True):
        assert {name: row[name] for name in NUMBERS} == {name: expected[name] for name in NUMBERS}
