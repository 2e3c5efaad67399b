"""Peers from two libraries based on torch, x-transformers and transformers. They receive the same weights and masks as
the peers in `torch_peers.py`.
"""

import torch
from torch import Tensor, nn

from benchmarks.contestants import Contestant, LeftOutError, linear_parameters, of_torch
from benchmarks.oracle import Results
from benchmarks.regime import Data, Regime, Weights
from benchmarks.torch_peers import boolean_mask, cos_and_sin


def x_transformers(regime: Regime, data: Data) -> Contestant:
    """Return the contestant for the `Attention` of x-transformers with flash attention. That layer has no biases."""
    from x_transformers.x_transformers import Attention

    layer = Attention(
        regime.embed,
        heads=regime.heads,
        dim_head=regime.head_dim,
        kv_heads=regime.kv_heads,
        flash=True,
        causal=regime.mask == "causal",
    ).to(regime.torch_dtype)
    options = {}
    if regime.mask == "padding":
        options["mask"] = regime.real
    elif (mask := boolean_mask(regime)) is not None:
        options["attn_mask"] = mask
    parameters = linear_parameters([layer.to_q, layer.to_k, layer.to_v], layer.to_out)
    if regime.kv_heads is None:
        return of_torch(lambda x: layer(x, **options), [layer], parameters, regime, data)
    # In x-transformers, query head j uses key/value head j % kv_heads; in headwise, consecutive query heads share one.
    # The same heads in another order compute the same output.
    order = torch.arange(regime.embed).view(regime.kv_heads, -1, regime.head_dim).transpose(0, 1).flatten()
    contestant = of_torch(
        lambda x: layer(x, **options), [layer], parameters, regime, data._replace(weights=_heads(data.weights, order))
    )

    def results(returned: object) -> Results:
        named = contestant.results(returned)
        if regime.training:
            named |= _heads(Weights(named["qkv"], named["out_proj"], None, None), order.argsort()).named()
        return named

    return Contestant(contestant.run, results)


def _heads(weights: Weights, order: Tensor) -> Weights:
    """Return weights with reordered query heads. `order` is the index of the old query feature for each new one."""
    queries = len(order)
    qkv = torch.cat([weights.qkv[:queries][order], weights.qkv[queries:]])
    return weights._replace(qkv=qkv, out=weights.out[:, order])


def llama_layer(regime: Regime) -> nn.Module:
    """Return transformers' `LlamaAttention` on SDPA, without biases."""
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig

    config = LlamaConfig(
        hidden_size=regime.embed,
        num_attention_heads=regime.heads,
        num_key_value_heads=regime.kv_heads or regime.heads,
        num_hidden_layers=1,
        attn_implementation="sdpa",
    )
    return LlamaAttention(config, 0).to(regime.torch_dtype)


def llama_parameters(layer: nn.Module) -> dict[str, list[Tensor]]:
    """Return the parameters of a Llama attention layer by the oracle's names."""
    return linear_parameters([layer.q_proj, layer.k_proj, layer.v_proj], layer.o_proj)


def llama(regime: Regime, data: Data) -> Contestant:
    """Return the contestant for Llama's attention, with rotary positions and without a cache."""
    layer = llama_layer(regime)
    options = {"attention_mask": boolean_mask(regime), "is_causal": regime.mask == "causal"}
    cos_sin = cos_and_sin(regime)
    return of_torch(lambda x: layer(x, cos_sin, **options)[0], [layer], llama_parameters(layer), regime, data)


def bert(regime: Regime, data: Data) -> Contestant:
    """Return the contestant for BERT's attention on SDPA with its output projection, without the residual connection
    and the norm.
    """
    if regime.kv_heads is not None:
        raise LeftOutError("has no grouped heads")
    from transformers.models.bert.modeling_bert import BertConfig, BertSelfAttention

    config = BertConfig(
        hidden_size=regime.embed,
        num_attention_heads=regime.heads,
        attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )
    layer = BertSelfAttention(config, is_causal=regime.mask == "causal").to(regime.torch_dtype)
    dense = nn.Linear(regime.embed, regime.embed, dtype=regime.torch_dtype)
    mask = boolean_mask(regime)
    parameters = linear_parameters([layer.query, layer.key, layer.value], dense)
    return of_torch(lambda x: dense(layer(x, mask)[0]), [layer, dense], parameters, regime, data)
