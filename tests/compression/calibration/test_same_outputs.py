"""Modules that compute something else than others of their class name, found by measurement on calibration data."""

from copy import deepcopy

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

import headwise as hw
import tiny
from headwise.compression.calibration.same_outputs import outputs_of, require_same
from headwise.compression.merging.merge_kv import merge_kv
from headwise.compression.pruning.plan_pruning import plan_pruning
from headwise.compression.pruning.prune import prune
from headwise.families.registry import head_module
from removal import families

IDS = torch.randint(3, 97, (2, 13), generator=torch.Generator().manual_seed(2))
BATCH = {"input_ids": IDS}
REFUSED = (
    "^model: expected attention that returns the same without heads .*, got a relative difference of .* in {}; this"
)


class Normalising(torch.nn.Linear):
    """Output projection that normalises its input over all heads."""

    def forward(self, x):
        return super().forward(x * torch.rsqrt(x.square().mean(-1, keepdim=True)))


class Ternary(torch.nn.Linear):
    """Output projection whose weights are rounded to multiples of their mean size."""

    def forward(self, x):
        size = self.weight.abs().mean()
        return torch.nn.functional.linear(x, (self.weight / size).round().clamp(-1, 1) * size, self.bias)


class LlamaAttention(modeling_llama.LlamaAttention):
    """Attention that divides by its number of heads."""

    def forward(self, *arguments, **named):
        output, weights = super().forward(*arguments, **named)
        return output / (self.q_proj.out_features // self.head_dim), weights


def by_head_number(module, query, key, value, mask, scaling, dropout=0.0, **named):
    """Return causal attention with scores that fall with the distance, faster in heads with a small number."""
    heads, length = query.shape[1:3]
    key, value = (each.repeat_interleave(heads // each.shape[1], 1) for each in (key, value))
    distances = (torch.arange(length)[:, None] - torch.arange(length)).to(query)
    slopes = 2.0 ** (-8 / heads * torch.arange(1, heads + 1).to(query))
    scores = query @ key.mT * scaling - slopes[:, None, None] * distances
    weights = scores.masked_fill(distances < 0, -torch.inf).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


def tiled(module, query, key, value, mask, scaling, dropout=0.0, **named):
    """Return causal attention in which query head h attends with key/value head h modulo their number."""
    heads, length = query.shape[1:3]
    key, value = (each.repeat(1, heads // each.shape[1], 1, 1) for each in (key, value))
    scores = (query @ key.mT * scaling).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def changed(name):
    """Return a Llama whose second attention module, or all, compute something else."""
    model = families.model("llama")
    attention = model.layers[1].self_attn
    if name == "attention":
        attention.__class__ = LlamaAttention
    elif name in ("by_head_number", "tiled"):
        transformers.AttentionInterface.register(name, globals()[name])
        model.set_attn_implementation(name)
    else:
        attention.o_proj.__class__ = globals()[name]
    return model


@pytest.mark.parametrize("name", ["Normalising", "Ternary", "attention", "by_head_number", "tiled"])
def test_heads_that_cannot_be_removed_are_found_by_measurement(name):
    model = changed(name)
    scores = hw.MagnitudeScores(model, BATCH)
    first = "layers.0.self_attn" if name in ("by_head_number", "tiled") else "layers.1.self_attn"
    with pytest.raises(hw.InputError, match=REFUSED.format(first)):
        plan_pruning(scores, keep=0.5, constraint="groups", model=model)
    plan = plan_pruning(scores, keep=0.5, constraint="groups")
    with pytest.raises(hw.InputError, match=REFUSED.format(first)):
        prune(model, plan, calibration=[BATCH])


@pytest.mark.parametrize("shape", [(4, 16), (128, 16), (256, 16), (512, 7), (64, 2)])
def test_the_compared_tokens_are_not_all_first_ones(shape):
    """The first token of a text attends to itself alone, whatever its head's number is."""
    model = changed("by_head_number")
    batch = {"input_ids": torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(2))}
    with pytest.raises(hw.InputError, match=REFUSED.format("layers.0.self_attn")):
        plan_pruning(hw.MagnitudeScores(model, batch), keep=0.5, constraint="groups", model=model)


def from_position(start):
    """Return a function of attention that adds the number of the head to later outputs."""

    def attention(module, query, key, value, mask, scaling, dropout=0.0, **named):
        output, weights = tiled(module, query, key, value, mask, scaling)
        output[:, start:] += torch.arange(query.shape[1])[:, None].to(query)
        return output, weights

    return attention


@pytest.mark.parametrize(("start", "real"), [(15, slice(14, 16)), (1, slice(0, 2)), (14, slice(0, 16))])
def test_differences_of_one_token_in_eight_are_found_and_padding_is_not_compared(start, real):
    """With two real tokens of 16, the last one is one of sixteen vectors, but half of those that count."""
    model = families.model("gpt2")
    transformers.AttentionInterface.register("late", from_position(start))
    model.set_attn_implementation("late")
    mask = torch.zeros(4, 16, dtype=torch.long)
    mask[:, real] = 1
    ids = torch.randint(3, 97, mask.shape, generator=torch.Generator().manual_seed(2))
    scores = hw.MagnitudeScores(model, {"input_ids": ids, "attention_mask": mask})
    with pytest.raises(hw.InputError, match="^model: expected attention that returns the same without heads"):
        plan_pruning(scores, keep=0.5, model=model)


def test_outputs_that_are_no_numbers_are_not_verified():
    model = families.model("gpt2")
    with torch.no_grad():
        model.h[1].attn.c_proj.bias.fill_(torch.nan)
    with pytest.raises(hw.InputError, match=r"^calibration: expected texts with finite outputs, got none from h.1.att"):
        plan_pruning(hw.MagnitudeScores(model, BATCH), keep=0.5, model=model)


class Padded(torch.nn.Module):
    """Language model whose vocabulary is padded with tokens that are never predicted."""

    def __init__(self):
        super().__init__()
        self.model = families.model("llama", transformers.AutoModelForCausalLM)

    def forward(self, input_ids):
        logits = self.model(input_ids).logits
        logits[..., 90:] = -torch.inf
        return logits


def test_logits_of_unused_tokens_do_not_count():
    model = Padded()
    plan = plan_pruning(hw.MagnitudeScores(model, BATCH), keep=0.5, model=model)
    assert plan.kept_heads == 8
    with torch.no_grad():
        model.model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(hw.InputError, match="^calibration: expected texts with finite outputs, got none from Padded"):
        plan_pruning(hw.MagnitudeScores(model, BATCH), keep=0.5, model=model)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ["llama", "gemma2", "t5", "bert"])
def test_models_in_low_precision_and_training_mode_are_accepted(name, dtype):
    model = families.model(name).to(dtype).train()
    scores = hw.MagnitudeScores(model, families.inputs(name, dtype))
    plan = plan_pruning(scores, keep=0.5, model=model)
    assert model.training
    if dtype.itemsize >= 4:
        pruned = prune(model, plan, calibration=[families.inputs(name, dtype)])
        assert pruned.training


def test_experts_and_torch_layers_are_accepted():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(24, 4, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    batch = {"src": torch.randn(2, 13, 24)}
    plan = plan_pruning(hw.MagnitudeScores(model, batch), keep=0.5, model=model)
    prune(model, plan, calibration=[batch])

    model = tiny.with_distinct_heads(transformers.AutoModel.from_config(deepcopy(tiny.configs()["gpt-oss, sinks"])))
    plan = plan_pruning(hw.MagnitudeScores(model, BATCH), keep=0.5, model=model)
    prune(model, plan, calibration=[BATCH])


@pytest.mark.parametrize("method", ["mean", "weighted_mean", "procrustes"])
def test_tiled_key_value_heads_are_not_merged(method):
    config = transformers.LlamaConfig(**families.ROTARY, num_key_value_heads=6)
    torch.manual_seed(0)
    model = tiny.with_distinct_heads(transformers.AutoModel.from_config(config))
    merge_kv(model, num_kv_heads=2, calibration=[BATCH], method=method)
    transformers.AttentionInterface.register("tiled", tiled)
    model.set_attn_implementation("tiled")  # with as many key/value heads as query heads this is equal attention
    with pytest.raises(hw.InputError, match="the same with fewer key/value heads .* in layers.0.self_attn; this"):
        merge_kv(model, num_kv_heads=2, calibration=[BATCH], method=method)


def test_keys_with_other_rotary_positions_are_not_aligned(monkeypatch):
    def interleaved(q, k, cos, sin, **named):
        def rotated(x):
            half = x.shape[-1] // 2
            each_cos, each_sin = (each[:, None, :, :half].repeat_interleave(2, -1) for each in (cos, sin))
            turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
            return x * each_cos + turned * each_sin

        return rotated(q), rotated(k)

    model = families.model("llama")
    merge_kv(model, num_kv_heads=1, calibration=[BATCH], method="procrustes")
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", interleaved)
    with pytest.raises(hw.InputError, match="does not change if its heads are reordered and rotated, got .* layers.0"):
        merge_kv(model, num_kv_heads=1, calibration=[BATCH], method="procrustes")
    merge_kv(model, num_kv_heads=1, calibration=[BATCH], method="weighted_mean")


def test_single_tokens_and_hidden_numbers_do_not_count_as_differences():
    model = families.model("llama")
    modules = {path: head_module(model, path) for path in ("layers.0.self_attn", "layers.1.self_attn")}
    expected, used = outputs_of(model, modules, [BATCH, BATCH])
    assert used == [BATCH]
    assert list(expected) == ["layers.0.self_attn", "layers.1.self_attn", ""]
    found, _ = outputs_of(model, modules, used)
    found["layers.1.self_attn"][0][1][3] += 100.0
    expected["layers.1.self_attn"][0][1][5] = torch.nan
    require_same(model, expected, found, "is equal")
    found["layers.1.self_attn"][0][1][:14] *= 1.01
    with pytest.raises(hw.InputError, match="^model: expected attention that is equal, got a rel.* difference of 0.01"):
        require_same(model, expected, found, "is equal")
