"""The layer against attention of transformers with position biases: T5's learned bias and BLOOM's ALiBi.

Families whose blocks `from_transformers` converts, such as Llama, are tested in tests/convert.
"""

import copy

import pytest
import torch

import headwise as hw
from oracles import within_budget

HEADS, EMBED, HEAD_DIM, BATCH, LENGTH = 6, 30, 7, 3, 19


def with_weights(layer, **maps):
    """Copy a weight and a bias (or None) into each named projection of the layer, and return the layer."""
    with torch.no_grad():
        for name, (weight, bias) in maps.items():
            projection = getattr(layer, name)
            projection.weight.copy_(weight)
            if projection.bias is not None:
                projection.bias.copy_(bias)
    return layer


@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
def test_relative_bias_computes_t5_attention(decoder):
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(
        d_model=EMBED,
        d_kv=HEAD_DIM,
        num_heads=HEADS,
        relative_attention_num_buckets=12,
        relative_attention_max_distance=10,
        dropout_rate=0.0,
        is_decoder=decoder,
    )
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    torch.nn.init.normal_(theirs.relative_attention_bias.weight)
    bias = hw.RelativeBias(HEADS, 12, 10, bidirectional=not decoder)
    bias.load_state_dict(theirs.relative_attention_bias.state_dict())
    layer = hw.MultiHeadAttention(
        EMBED,
        HEADS,
        head_dim=HEAD_DIM,
        bias=False,
        position_bias=bias,
        scores=hw.Scores(scale=1.0),
        mask=hw.causal() if decoder else None,
    )
    with_weights(
        layer,
        q_proj=(theirs.q.weight, None),
        k_proj=(theirs.k.weight, None),
        v_proj=(theirs.v.weight, None),
        out_proj=(theirs.o.weight, None),
    )
    x = torch.randn(BATCH, LENGTH, EMBED)
    added_mask = torch.zeros(LENGTH, LENGTH)
    if decoder:
        added_mask = torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1)
    expected, _, *weights = theirs(x, mask=added_mask.expand(BATCH, 1, -1, -1), output_attentions=True)
    y, ours = layer(x, return_weights=True)
    exact, exact_weights = copy.deepcopy(layer).double()(x.double(), return_weights=True)
    within_budget(y, expected, exact)
    within_budget(ours, weights[0], exact_weights)
    torch.testing.assert_close(
        torch.autograd.grad(y.square().sum(), bias.weight)[0],
        torch.autograd.grad(expected.square().sum(), theirs.relative_attention_bias.weight)[0],
        rtol=1e-4,
        atol=1e-4,
    )


def test_alibi_computes_bloom_attention():
    from transformers import BloomConfig
    from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor

    config = BloomConfig(hidden_size=HEADS * HEAD_DIM, n_head=HEADS, hidden_dropout=0.0, attention_dropout=0.0)
    theirs = BloomAttention(config, layer_idx=0).eval()
    torch.nn.init.normal_(theirs.query_key_value.bias)
    width = HEADS * HEAD_DIM
    layer = hw.MultiHeadAttention(width, HEADS, position_bias=hw.ALiBi(), mask=hw.causal())
    # Rows of their fused weight are ordered by head, then by query, key and value.
    weight = theirs.query_key_value.weight.view(HEADS, 3, HEAD_DIM, width)
    bias = theirs.query_key_value.bias.view(HEADS, 3, HEAD_DIM)
    parts = {
        name: (weight[:, index].reshape(width, width), bias[:, index].flatten())
        for index, name in enumerate(("q_proj", "k_proj", "v_proj"))
    }
    with_weights(layer, **parts, out_proj=(theirs.dense.weight, theirs.dense.bias))
    x = torch.randn(BATCH, LENGTH, width)
    is_token = torch.ones(BATCH, LENGTH)
    is_token[1, 11:] = 0  # padding on the right
    alibi = build_alibi_tensor(is_token, HEADS, torch.float32)
    added_mask = torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1).expand(BATCH, 1, -1, -1)
    added_mask = added_mask.masked_fill(is_token[:, None, None, :] == 0, torch.finfo(torch.float32).min)
    expected, _ = theirs(x, torch.zeros_like(x), alibi, added_mask)
    y = layer(x, mask=hw.padding([LENGTH, 11, LENGTH]))
    exact = copy.deepcopy(layer).double()(x.double(), mask=hw.padding([LENGTH, 11, LENGTH]))
    within_budget(*(output[is_token.bool()] for output in (y, expected, exact)))
