"""Attention calls of tiny random models as an interceptor sees them, against the weights of eager attention."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

import headwise as hw
from headwise.attention import attend
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, Interceptor, Observation
from tiny import FAMILIES, PADDED, TOKENS, family


class Collector(Interceptor):
    """Interceptor that collects the whole weights of every call, with both outputs that a check compares."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.weights: list[torch.Tensor] = []
        self.products: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []

    def observe(self, call):
        grid = call.grid
        weights = torch.zeros(grid.batch, grid.heads, grid.queries, grid.keys)
        rows, products, outputs = [], [], []

        def observer(row_block):
            part = slice(row_block.rows.start, row_block.rows.stop)
            where = (*row_block.sequences_and_heads, part)
            weights[where][..., row_block.visibility.key_indices] = row_block.weights.float()

        def check(row_block, out):
            rows.append(row_block.rows)
            products.append(row_block.tile.by_head(row_block.out))
            outputs.append(out)

        def on_end():
            self.calls.append(call)
            self.weights.append(weights)
            if rows:  # no check where the output is the product of the weights by construction
                assert [index for block in rows for index in block] == list(range(grid.queries))
                self.products.append(torch.cat(products, 2))
                self.outputs.append(torch.cat(outputs, 2))

        return Observation(observer, CallContext(), on_end, check)


@pytest.mark.parametrize("padding", PADDED)
@pytest.mark.parametrize(("name", "implementation"), FAMILIES)
@torch.no_grad()
def test_the_weights_of_every_call_are_those_of_eager_attention(name, implementation, padding):
    inputs = {"input_ids": TOKENS, "attention_mask": PADDED[padding]}
    eager = family(name, "eager")(**inputs, output_attentions=True).attentions
    model, collector = family(name, implementation), Collector()
    with intercepted(model, collector):
        output = model(**inputs)
    assert torch.equal(output.last_hidden_state, model(**inputs).last_hidden_state)
    assert len(collector.calls) == len(collector.products) == len(eager) == 3
    assert [call.layer for call in collector.calls] in ([0, 1, 2], [None, None, None])
    assert all(dict(model.named_modules())[call.site.path] for call in collector.calls)
    is_real = PADDED[padding].bool()
    rows = is_real[:, None].expand(-1, 6, -1)  # the weights of padding are of no interest
    for weights, product, out, expected in zip(
        collector.weights, collector.products, collector.outputs, eager, strict=True
    ):
        # The rounding of a score of 100 in float32 changes its weight by 6e-6 of it.
        torch.testing.assert_close(weights[rows], expected[rows], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(product.transpose(1, 2)[is_real], out.transpose(1, 2)[is_real], rtol=1e-4, atol=1e-5)


class PlainAttention(nn.Module):
    """Attention of 3 heads that computes its own softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.num_heads = nn.Linear(24, 72), 3

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        self.weights = (q @ k.mT / 8**0.5).softmax(-1)
        return (self.weights @ v).transpose(1, 2).flatten(2)


@torch.no_grad()
def test_weights_of_a_softmax_need_no_check():
    model, collector, x = nn.Sequential(PlainAttention()), Collector(), torch.randn(2, 13, 24)
    plain = model(x)
    with intercepted(model, collector):
        assert torch.equal(model(x), plain)
    torch.testing.assert_close(collector.weights, [model[0].weights])
    assert collector.outputs == []


@torch.no_grad()
def test_a_check_leaves_the_output_of_our_layer_unchanged():
    layer, x = hw.MultiHeadAttention(24, 6, num_kv_heads=2, mask=hw.causal()), torch.randn(2, 13, 24)
    model, collector = nn.Sequential(layer), Collector()
    plain, weights = layer(x, return_weights=True)
    with intercepted(model, collector):
        assert torch.equal(model(x), layer(x))
    torch.testing.assert_close(collector.weights[0], weights)
    torch.testing.assert_close(collector.products, collector.outputs)
    torch.testing.assert_close(model(x), plain)


def test_an_error_of_a_check_reaches_the_caller_and_everything_is_restored():
    def everything_replaced():
        return AttentionInterface.get_interface, F.scaled_dot_product_attention, F.softmax, attend.interception_hook

    before, model = everything_replaced(), family("bert", "sdpa")

    class Failing(Interceptor):
        def observe(self, call):
            return Observation(lambda row_block: None, CallContext(), lambda: None, lambda row_block, out: 1 / 0)

    with intercepted(model, Failing()):
        assert not set(everything_replaced()) & set(before)
        with pytest.raises(ZeroDivisionError):
            model(TOKENS)
    assert everything_replaced() == before
    outer, inner = Collector(), Collector()
    with torch.no_grad(), intercepted(model, outer):
        with intercepted(model, inner):
            model(TOKENS)
        model(TOKENS)
    assert (len(outer.calls), len(inner.calls)) == (6, 3)
    torch.testing.assert_close(outer.weights[:3], inner.weights)
    assert everything_replaced() == before


def test_an_implementation_whose_masks_cannot_be_read_is_refused(monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, "other", sdpa_attention_forward)
    model = family("llama", "other")
    with (
        pytest.raises(hw.InputError, match="^model: expected attention implementation sdpa or eager, got other; call"),
        intercepted(model, Collector()),
    ):
        model(TOKENS)
