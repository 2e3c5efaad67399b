"""Attention blocks of tiny random `transformers` models, converted to our layers and back."""

import copy
import math
import re
from dataclasses import dataclass

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import prune
from transformers.models.bert.modeling_bert import BertAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

import headwise as hw
from oracles import distance, within_budget

BATCH, LENGTH = 2, 13
COMMON = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
ENCODER = COMMON | {"intermediate_size": 37}
ROTARY = ENCODER | {"num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 64}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 3}
GPT2 = {"vocab_size": 97, "n_embd": 48, "n_layer": 2, "n_head": 6}


@dataclass(frozen=True)
class Case:
    """Configuration of a tiny model, and for each layer the visible keys of a query: all, earlier ones, or a window."""

    config: transformers.PreTrainedConfig
    sees: tuple[str | int, str | int] = ("past", "past")


def rope(**parameters):
    return {"rope_parameters": {"rope_theta": 50_000.0} | parameters}


def cases() -> dict[str, Case]:
    llama, mistral, qwen2 = transformers.LlamaConfig, transformers.MistralConfig, transformers.Qwen2Config
    qwen3, gemma2, gpt_oss = transformers.Qwen3Config, transformers.Gemma2Config, transformers.GptOssConfig
    layers = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}
    experts = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 2, "num_experts_per_tok": 1}
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    return {
        "llama": Case(llama(**ROTARY)),
        "llama, biases": Case(llama(**ROTARY, attention_bias=True, attention_dropout=0.3)),
        "llama, theta": Case(llama(**ROTARY, **rope(rope_type="default"))),
        "llama, linear": Case(llama(**ROTARY, **rope(rope_type="linear", factor=3.0))),
        "llama, dynamic": Case(
            llama(**ROTARY | {"max_position_embeddings": 8}, **rope(rope_type="dynamic", factor=2.0))
        ),
        "llama, yarn": Case(llama(**ROTARY, **rope(**scaled))),
        "llama, yarn as DeepSeek's": Case(
            llama(**ROTARY, **rope(**scaled, mscale=0.7, mscale_all_dim=1.3, beta_fast=5.0, beta_slow=2.0))
        ),
        "llama, yarn with a factor": Case(llama(**ROTARY, **rope(**scaled, attention_factor=1.5, truncate=False))),
        "llama, llama3": Case(llama(**ROTARY, **rope(rope_type="llama3", factor=8.0, **bands))),
        "mistral": Case(mistral(**ROTARY, sliding_window=None)),
        "mistral, window": Case(mistral(**ROTARY, sliding_window=4), (4, 4)),
        "qwen2": Case(qwen2(**ROTARY)),
        "qwen2, window": Case(qwen2(**ROTARY, use_sliding_window=True, **layers), ("past", 4)),
        "qwen3": Case(qwen3(**ROTARY, rms_norm_eps=1e-3)),
        "qwen3, window": Case(qwen3(**ROTARY, use_sliding_window=True, **layers), ("past", 4)),
        "gemma2": Case(
            gemma2(**ROTARY, attn_logit_softcapping=2.0, query_pre_attn_scalar=7, sliding_window=4), (4, "past")
        ),
        "gpt-oss": Case(gpt_oss(**ROTARY | experts, **layers), ("past", 4)),
        "olmo2": Case(transformers.Olmo2Config(**ROTARY)),
        "phi": Case(transformers.PhiConfig(**ROTARY, **rope(rope_type="default", partial_rotary_factor=0.4))),
        "phi, norms": Case(transformers.PhiConfig(**ROTARY | {"head_dim": 8}, qk_layernorm=True, layer_norm_eps=1e-3)),
        "bert": Case(transformers.BertConfig(**ENCODER, attention_probs_dropout_prob=0.2), ("all", "all")),
        "bert, decoder": Case(transformers.BertConfig(**ENCODER, is_decoder=True)),
        "roberta": Case(transformers.RobertaConfig(**ENCODER), ("all", "all")),
        "xlm-roberta": Case(transformers.XLMRobertaConfig(**ENCODER), ("all", "all")),
        "camembert": Case(transformers.CamembertConfig(**ENCODER), ("all", "all")),
        "electra": Case(transformers.ElectraConfig(**ENCODER, embedding_size=48), ("all", "all")),
        "eurobert": Case(transformers.EuroBertConfig(**ROTARY, **SPECIAL), ("all", "all")),
        "gpt2": Case(transformers.GPT2Config(**GPT2, attn_pdrop=0.4)),
        "gpt2, inverse layer": Case(transformers.GPT2Config(**GPT2, scale_attn_by_inverse_layer_idx=True)),
        "gpt2, no scale": Case(transformers.GPT2Config(**GPT2, scale_attn_weights=False)),
    }


CASES = cases()
KINDS = ("self_attn", "attention", "attn")
"""Names of the attention blocks in their models."""


def tiny(name, implementation="eager"):
    """Return the model of a case, its blocks, and the mask `(queries, keys)` of each, True where a query attends."""
    case = CASES[name]
    case.config._attn_implementation = implementation
    model = transformers.AutoModel.from_config(case.config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    blocks = [module for path, module in model.named_modules() if path.split(".")[-1] in KINDS]
    assert len(blocks) == 2
    back = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    seen = [
        torch.ones_like(back) > 0 if what == "all" else (back >= 0) & (back < (99 if what == "past" else what))
        for what in case.sees
    ]
    return model, blocks, seen


def run(model, block, x, allowed, angles=None):
    """Return the output of a block for x; by default with the rotary angles of the model."""
    added = torch.zeros(allowed.shape, dtype=x.dtype).masked_fill(~allowed, -torch.inf)[None, None]
    if hasattr(model, "rotary_emb"):
        if angles is None:
            angles = model.rotary_emb(x, torch.arange(LENGTH)[None])
        return block(x, position_embeddings=angles, attention_mask=added)[0]
    return block(x, attention_mask=added)[0]


def around(block, layer, x):
    """Return the output of the layer for x, followed by the parts of the block that are not in the layer."""
    y = layer(x)
    return block.output.LayerNorm(y + x) if hasattr(block, "output") else y


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_the_layer_computes_what_the_block_does(name):
    model, blocks, seen = tiny(name)
    x = torch.randn(BATCH, LENGTH, model.config.hidden_size)
    for block, allowed in zip(blocks, seen, strict=True):
        layer = hw.from_transformers(block)
        expected = run(model, block, x, allowed)
        exact = around(copy.deepcopy(block).double(), copy.deepcopy(layer).double(), x.double())
        within_budget(around(block, layer, x), expected, exact)
        for other in (torch.ones_like(allowed), torch.ones_like(allowed).tril()):  # it matters what is seen
            assert torch.equal(other, allowed) or distance(run(model, block, x, other), expected) > 1e-3


EXACT = ("llama, biases", "mistral, window", "qwen2", "bert", "bert, decoder", "gpt2", "gpt2, inverse layer")
"""Families that compute in float64 for float64 inputs under SDPA; the others use float32 in norms and softmax."""


@pytest.mark.parametrize("name", EXACT)
@torch.no_grad()
def test_layer_and_block_agree_to_rounding_in_float64(name):
    model, blocks, seen = tiny(name, "sdpa")
    model = model.double()
    angles = torch.arange(LENGTH).double()[:, None] * 10_000.0 ** -(torch.arange(0, 10, 2).double() / 10)
    angles = torch.cat([angles, angles], dim=1)[None]
    x = torch.randn(BATCH, LENGTH, model.config.hidden_size, dtype=torch.float64)
    for block, allowed in zip(blocks, seen, strict=True):
        expected = run(model, block, x, allowed, angles=(angles.cos(), angles.sin()))
        torch.testing.assert_close(around(block, hw.from_transformers(block), x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_round_trip_keeps_the_bits(name):
    for block in tiny(name)[1]:
        layer, other = hw.from_transformers(block), copy.deepcopy(block)
        outside = {each for each, _ in block.named_parameters() if "LayerNorm" in each}
        for each, parameter in other.named_parameters():
            if each not in outside:
                nn.init.zeros_(parameter)
        assert hw.to_transformers(layer, other) is None
        for each, parameter in block.named_parameters():
            assert torch.equal(other.get_parameter(each), parameter), each

        for parameter in layer.parameters():
            nn.init.normal_(parameter)
        hw.to_transformers(layer, other)
        again = hw.from_transformers(other)
        assert again.state_dict().keys() == layer.state_dict().keys()
        for each, value in layer.state_dict().items():
            assert torch.equal(again.state_dict()[each], value), each
            assert value.data_ptr() != again.state_dict()[each].data_ptr()


@torch.no_grad()
def test_a_block_for_cross_attention_becomes_a_layer_that_takes_a_context():
    config = transformers.BertConfig(**ENCODER, attn_implementation="eager")
    block = BertAttention(config, is_cross_attention=True).double().eval()
    x, context = torch.randn(2, 5, 48, dtype=torch.float64), torch.randn(2, 7, 48, dtype=torch.float64)
    expected = block(x, encoder_hidden_states=context)[0]
    layer = hw.from_transformers(block)
    torch.testing.assert_close(block.output.LayerNorm(layer(x, context) + x), expected, rtol=0, atol=1e-12)


def test_options_of_the_block_are_converted():
    assert hw.from_transformers(tiny("llama, biases")[1][0]).dropout == 0.3
    assert hw.from_transformers(tiny("bert")[1][0]).dropout == 0.2
    assert hw.from_transformers(tiny("gpt2")[1][0]).dropout == 0.4
    layer = hw.from_transformers(tiny("llama")[1][0].train())
    assert layer.training
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.rotary) == (6, 2, 10, hw.Rotary())
    assert (layer.scores, layer.qk_norm, layer.out_proj.bias) == (None, None, None)
    assert hw.from_transformers(tiny("gpt-oss")[1][0].to(torch.bfloat16)).sinks.dtype == torch.bfloat16


ROTATIONS = {
    "llama, theta": hw.Rotary(theta=50_000.0),
    "llama, linear": hw.Rotary(theta=50_000.0, scaling=hw.LinearScaling(3.0)),
    "llama, dynamic": hw.Rotary(theta=50_000.0, scaling=hw.DynamicNTK(2.0, 8)),
    "llama, yarn": hw.Rotary(theta=50_000.0, scaling=hw.YaRN(4.0, 16)),
    "llama, yarn with a factor": hw.Rotary(
        theta=50_000.0, scaling=hw.YaRN(4.0, 16, attention_factor=1.5, truncate=False)
    ),
    "llama, yarn as DeepSeek's": hw.Rotary(
        theta=50_000.0,
        scaling=hw.YaRN(
            4.0,
            16,
            fast=5.0,
            slow=2.0,
            attention_factor=(0.07 * math.log(4.0) + 1) / (0.13 * math.log(4.0) + 1),
        ),
    ),
    "llama, llama3": hw.Rotary(theta=50_000.0, scaling=hw.Llama3(8.0, 16, low=1.0, high=4.0)),
    "phi": hw.Rotary(theta=50_000.0, width=4),
}


@pytest.mark.parametrize("name", ROTATIONS)
def test_the_layer_rotates_as_the_configuration_says(name):
    assert hw.from_transformers(tiny(name)[1][0]).rotary == ROTATIONS[name]


class Adapter(nn.Module):
    """Linear map plus a low-rank one, like an adapter."""

    def __init__(self, base):
        super().__init__()
        self.base, self.low = base, nn.Linear(base.in_features, 2)


def block_with(name, **changes):
    block = tiny(name)[1][0]
    for path, value in changes.items():
        setattr(block, path, value)
    return block


def without(block, name):
    delattr(block, name)
    return block


def pruned(block):
    prune.identity(block.q_proj, "weight")
    return block


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("block", "message"),
    [
        (lambda: nn.Linear(2, 2), "block: expected an attention block .*, one of LlamaAttention, .*, got Linear"),
        (lambda: tiny("bert")[1][0].self, "block: expected an attention block .*, BertAttention, .*, got BertSelfAtte"),
        (lambda: without(tiny("llama")[1][0], "k_proj"), "block: expected a LlamaAttention .*, got one without k_proj"),
        (lambda: block_with("llama", is_causal=False), "block: expected one that is causal, got is_causal False"),
        (lambda: block_with("eurobert", is_causal=True), "block: expected one that is not causal, got is_causal True"),
        (
            lambda: block_with("llama", q_proj=Adapter(nn.Linear(48, 60))),
            "block: expected a plain Linear for q_proj, got Adapter with base.weight, .*; merge adapters and remove",
        ),
        (
            lambda: block_with("llama", k_proj=nn.Linear(48, 20)),
            "block: expected biases of query, key and value, all three or none, got a difference in k_proj.bias",
        ),
        (
            lambda: block_with("llama, biases", v_proj=nn.Linear(48, 20, bias=False)),
            "block: expected biases of query, key and value, all three or none, got a difference in v_proj.bias",
        ),
        (
            lambda: block_with("phi, norms", q_layernorm=nn.ModuleList([nn.LayerNorm(8) for _ in range(6)])),
            "block: expected norms of queries and keys with one weight each, got ModuleList",
        ),
        (lambda: pruned(tiny("llama")[1][0]), "block: expected a plain Linear for q_proj, got Linear with weight_orig"),
        (
            lambda: block_with("llama", k_proj=nn.Linear(48, 20, bias=False).double()),
            "block: expected torch.float32 on cpu throughout, got torch.float64 on cpu as k_proj.weight",
        ),
        (
            lambda: (
                transformers.AutoModel.from_config(
                    transformers.LlamaConfig(
                        **ROTARY,
                        **rope(rope_type="longrope", short_factor=[1.0] * 5, long_factor=[2.0] * 5, factor=2.0),
                    )
                )
                .layers[0]
                .self_attn
            ),
            "block: expected a rope_type of default, linear, dynamic, yarn, llama3, got 'longrope'",
        ),
        (
            lambda: (
                transformers.AutoModel.from_config(
                    transformers.LlamaConfig(**ROTARY, **rope(rope_type="default", partial_rotary_factor=0.5))
                )
                .layers[0]
                .self_attn
            ),
            "block: expected rotation of all features of a head, got partial_rotary_factor 0.5",
        ),
        (
            lambda: GPT2Attention(transformers.GPT2Config(**GPT2), is_cross_attention=True, layer_idx=0),
            "block: expected causal self-attention, got cross attention",
        ),
    ],
)
def test_unsupported_blocks_are_refused(block, message):
    block = block()
    with pytest.raises(hw.InputError, match="^" + message):
        hw.from_transformers(block)


def ours(**changes):
    """Return a layer with the options of the tiny Llama, except for the changes."""
    options = {"num_kv_heads": 2, "head_dim": 10, "bias": False, "rotary": hw.Rotary(), "mask": hw.causal()}
    return hw.MultiHeadAttention(48, 6, **options | changes)


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: ours(num_kv_heads=3), "layer: expected num_kv_heads 2 as the LlamaAttention has, got 3"),
        (lambda: ours(head_dim=20), "layer: expected head_dim 10 as the LlamaAttention has, got 20"),
        (lambda: ours(rotary=hw.Rotary(theta=7.0)), "layer: expected rotary .* has, got Rotary(theta=7.0"),
        (lambda: ours(mask=None), "layer: expected mask causal() as the LlamaAttention has, got None"),
        (lambda: ours(scores=hw.Scores(softcap=3.0)), "layer: expected scores Scores(.* has, got .*softcap=3.0"),
        (lambda: ours(qk_norm=hw.QKNorm()), "layer: expected qk_norm None as the LlamaAttention has, got QKNorm("),
        (lambda: ours(fused_qkv=True), "layer: expected fused_qkv False as .*, got True; separate_projections(layer)"),
        (
            lambda: ours(bias=True, out_bias=False),
            "layer: expected k_proj.bias of none, as the LlamaAttention has, got shape (20,) in torch.float32",
        ),
        (lambda: ours().double(), "layer: expected k_proj.weight of shape (20, 48) in torch.float32, as .* has, got"),
        (lambda: hw.DifferentialAttention(48, 6), "layer: expected a MultiHeadAttention, not of a derived class, got"),
        (lambda: nn.Linear(2, 2), "layer: expected a MultiHeadAttention, not of a derived class, got Linear"),
    ],
)
def test_a_layer_that_does_not_fit_leaves_the_block_unchanged(layer, message):
    block = tiny("llama")[1][0]
    before = copy.deepcopy(block.state_dict())
    with pytest.raises(hw.InputError, match="^" + re.escape(message).replace(r"\.\*", ".*")):
        hw.to_transformers(layer(), block)
    for name, value in block.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.usefixtures("as_user")
def test_equivalent_options_are_accepted():
    layer, block = ours(scores=hw.Scores(scale=10**-0.5), rotary=hw.Rotary(theta=10_000)), tiny("llama")[1][0]
    hw.to_transformers(layer, block)
    assert torch.equal(block.q_proj.weight, layer.q_proj.weight)


def test_a_layer_for_gpt2_must_be_fused():
    layer = hw.separate_projections(hw.from_transformers(tiny("gpt2")[1][0]))
    with pytest.raises(hw.InputError, match=r"fused_qkv True .*, got False; fuse_projections\(layer\) gives such a"):
        hw.to_transformers(layer, tiny("gpt2")[1][0])
