"""Latent attention against its definition, in the expanded and the absorbed form, and against DeepSeek's models."""

import copy
import math

import pytest
import torch
from torch import nn

import headwise as hw
from headwise.nn.latent import LatentAttention
from layer_mistakes import MISTAKES_OF_EVERY_LAYER
from oracles import plain_attention, within_budget

BATCH, LENGTH, EMBED, HEADS = 2, 5, 19, 3
SIZES = {"kv_rank": 7, "head_dim": 11, "rotary_dim": 4, "value_dim": 13}
OPTIONS = {
    "default": {},
    "q_rank": {"q_rank": 5},
    "bias": {"q_rank": 5, "bias": True},
    "only an output bias": {"out_bias": True, "out_dim": 17},
    "eps": {"q_rank": 5, "norm_eps": 0.1},
    "halves": {"rotary": hw.Rotary(theta=50.0)},
    "partial rotary": {"rotary": hw.Rotary(theta=50.0, width=2)},
    "no rotary": {"rotary": None},
    "scale": {"scores": hw.Scores(scale=0.3)},
    "sinks": {"scores": hw.Scores(sinks=True, temperature=True)},
    "softcap": {"scores": hw.Scores(softcap=2.0), "backend": "reference"},
    "talking heads": {"scores": hw.Scores(talking_heads=True), "backend": "reference"},
}
FORMS = pytest.mark.parametrize("absorbed", [False, True], ids=["expanded", "absorbed"])


def layer_with(**options):
    """Return a small float64 layer with these options and random parameters."""
    layer = LatentAttention(EMBED, HEADS, dtype=torch.float64, **(SIZES | options))
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    if layer.temperature is not None:
        nn.init.uniform_(layer.temperature, 0.5, 2.0)
    return layer


def text(length=LENGTH):
    """Return a random input of this length."""
    return torch.randn(BATCH, length, EMBED, dtype=torch.float64)


def rotated(rotary, x):
    """Return x with rotary embedding at positions 0, 1, 2, ..., computed pair by pair of features."""
    if rotary is None:
        return x
    width = rotary.width or x.shape[-1]
    columns = list(x.unbind(-1))
    for pair in range(width // 2):
        a, b = (2 * pair, 2 * pair + 1) if rotary.interleaved else (pair, pair + width // 2)
        angle = torch.arange(x.shape[-2], dtype=x.dtype) * rotary.theta ** (-2 * pair / width)
        first, second = columns[a], columns[b]
        columns[a] = first * angle.cos() - second * angle.sin()
        columns[b] = first * angle.sin() + second * angle.cos()
    return torch.stack(columns, -1)


def by_hand(layer, x, allowed=None, bias=None, gate=None):
    """Return the output and weights of a latent layer by their definition, with keys and values of every head."""

    def linear(module, tensor):
        return tensor @ module.weight.T + (0 if module.bias is None else module.bias)

    def rms(norm, tensor):
        return tensor / (tensor.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight

    d, r, w, rank = layer.head_dim, layer.rotary_dim, layer.value_dim, layer.kv_rank
    if layer.q_rank is None:
        queries = linear(layer.q_proj, x)
    else:
        queries = linear(layer.q_up, rms(layer.q_norm, linear(layer.q_down, x)))
    down = linear(layer.kv_down, x)
    expanded, shared_key = (
        linear(layer.kv_up, rms(layer.kv_norm, down[..., :rank])),
        rotated(layer.rotary, down[..., rank:]),
    )
    q, k, v = [], [], []
    for head in range(layer.num_heads):
        query, pair = queries[..., head * (d + r) :][..., : d + r], expanded[..., head * (d + w) :][..., : d + w]
        q.append(torch.cat([query[..., :d], rotated(layer.rotary, query[..., d:])], -1))
        k.append(torch.cat([pair[..., :d], shared_key], -1))
        v.append(pair[..., d:])
    q, k, v = (torch.stack(of_heads, 1) for of_heads in (q, k, v))
    scores = layer.scores or hw.Scores()
    scale = (d + r) ** -0.5 if scores.scale is None else scores.scale
    if layer.temperature is not None:
        scale = scale / layer.temperature
    talking = (layer.talking_before, layer.talking_after) if scores.talking_heads else None
    weights = plain_attention(q, k, v, allowed, bias, scale, scores.softcap, layer.sinks, talking).weights
    out = weights @ v if gate is None else weights @ v * gate[:, :, None, None]
    return linear(layer.out_proj, torch.cat(out.unbind(1), -1)), weights


@FORMS
@pytest.mark.parametrize("options", OPTIONS)
def test_output_weights_and_gradients_equal_the_definition(options, absorbed):
    layer, x = layer_with(**OPTIONS[options]), text().requires_grad_()
    y, weights = layer(x, absorbed=absorbed, return_weights=True)
    expected, expected_weights = by_hand(layer, x)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-12)
    leaves = [x, *layer.parameters()]
    upstream, of_weights = torch.randn_like(y), torch.randn_like(weights)
    ours = torch.autograd.grad((y * upstream).sum() + (weights * of_weights).sum(), leaves)
    theirs = torch.autograd.grad((expected * upstream).sum() + (expected_weights * of_weights).sum(), leaves)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-11)


@FORMS
def test_masks_biases_and_gates_equal_the_definition(absorbed):
    layer, x = layer_with(mask=hw.causal()), text()
    allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    allowed = allowed & (torch.arange(LENGTH) < torch.tensor([3, 5])[:, None, None, None])
    allowed = allowed.expand(BATCH, HEADS, LENGTH, LENGTH)
    bias = torch.randn(BATCH, HEADS, LENGTH, LENGTH, dtype=torch.float64)
    gate = torch.rand(BATCH, HEADS, dtype=torch.float64)
    expected, expected_weights = by_hand(layer, x, allowed, bias, gate)
    options = {"mask": hw.padding([3, 5]), "bias": bias, "gate": gate, "absorbed": absorbed}
    y, weights = layer(x, return_weights=True, **options)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-12)


@FORMS
def test_only_differences_of_positions_matter_and_the_batch_axis_is_optional(absorbed):
    layer, x = layer_with(mask=hw.causal()), text()
    later = torch.arange(LENGTH) + 100
    torch.testing.assert_close(layer(x, positions=later, absorbed=absorbed), layer(x), rtol=0, atol=1e-12)
    spread = layer(x, positions=later * 3, absorbed=absorbed)
    assert not torch.allclose(spread, layer(x))
    alone = layer(x[0], positions=later * 3, absorbed=absorbed)
    torch.testing.assert_close(alone, spread[0], rtol=0, atol=1e-12)
    y, weights = layer(x[0], absorbed=absorbed, return_weights=True)
    assert (y.shape, weights.shape) == ((LENGTH, EMBED), (HEADS, LENGTH, LENGTH))


@pytest.mark.parametrize("shape", [(2, 0, EMBED), (0, 5, EMBED), (0, EMBED)], ids=str)
@FORMS
def test_empty_inputs_have_empty_outputs(absorbed, shape):
    assert layer_with()(torch.zeros(shape, dtype=torch.float64), absorbed=absorbed).shape == shape


# -- caches ---------------------------------------------------------------------------------------------------

CACHES = {
    "dynamic": (lambda layer: hw.DynamicCache(), hw.causal()),
    "static": (lambda layer: layer.static_cache(BATCH, 13), hw.causal()),
    "sliding": (lambda layer: hw.SlidingCache(3, sinks=1), hw.window(3) | hw.causal() & hw.prefix(1)),
}


@pytest.mark.parametrize("absorbed", [False, True, None], ids=str)
@pytest.mark.parametrize("pieces", [[1] * 11, [5, 3, 1, 1, 1]], ids=["token by token", "in pieces"])
@pytest.mark.parametrize("kind", CACHES)
def test_cached_decoding_equals_one_forward_pass(kind, pieces, absorbed):
    make, mask = CACHES[kind]
    layer, x = layer_with(q_rank=5, mask=mask), text(11)
    with torch.no_grad():
        cache = make(layer)
        y = torch.cat([layer(part, cache=cache, absorbed=absorbed) for part in x.split(pieces, dim=1)], dim=1)
        torch.testing.assert_close(y, layer(x), rtol=0, atol=1e-12)
    assert [tensor.shape[:2] + tensor.shape[3:] for tensor in cache.tensors] == [(BATCH, 1, 4 + 7)]


@FORMS
def test_prompts_of_different_lengths_share_a_static_cache(absorbed):
    layer, x, more = layer_with(mask=hw.causal()), text(), text(2)
    cache = layer.static_cache(BATCH, 8)
    with torch.no_grad():
        layer(x, cache=cache, lengths=[3, 5], absorbed=absorbed)
        y = layer(more, cache=cache, absorbed=absorbed)
        for sequence, length in enumerate([3, 5]):
            complete = torch.cat([x[sequence, :length], more[sequence]])
            torch.testing.assert_close(y[sequence], layer(complete)[-2:], rtol=0, atol=1e-12)


@FORMS
def test_cached_keys_are_rotated_again_when_angles_depend_on_the_length(absorbed):
    layer, x = layer_with(mask=hw.causal(), rotary=hw.Rotary(scaling=hw.DynamicNTK(2.0, 3))), text(7)
    cache = hw.DynamicCache()
    last = [layer(token, cache=cache, absorbed=absorbed) for token in x.split(1, dim=1)][-1]
    torch.testing.assert_close(last, layer(x)[:, -1:], rtol=0, atol=1e-12)


@FORMS
def test_gradients_go_through_a_dynamic_cache(absorbed):
    layer, x, upstream = layer_with(mask=hw.causal()), text(), text()
    cache, parameters = hw.DynamicCache(), list(layer.parameters())
    y = torch.cat([layer(part, cache=cache, absorbed=absorbed) for part in x.split([2, 3], dim=1)], dim=1)
    ours = torch.autograd.grad((y * upstream).sum(), parameters)
    torch.testing.assert_close(
        ours, torch.autograd.grad((layer(x) * upstream).sum(), parameters), rtol=1e-12, atol=1e-11
    )


def test_the_cheaper_form_is_the_default():
    layer = LatentAttention(64, 2, kv_rank=32, head_dim=16, rotary_dim=8)
    assert not layer._is_absorbed(None, queries=100, keys=100)
    assert layer._is_absorbed(None, queries=1, keys=100)
    wide = LatentAttention(64, 2, kv_rank=8, head_dim=16, rotary_dim=8)
    assert wide._is_absorbed(None, queries=100, keys=100)


def test_decoding_uses_the_absorbed_form_by_default():
    layer, x, cache = layer_with(mask=hw.causal()), text(1), hw.DynamicCache()
    layer(text(11), cache=cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(layer), "_attend_expanded", None)
        layer(x, cache=cache)
        with pytest.raises(TypeError, match="not callable"):
            layer(x, cache=cache, absorbed=False)


# -- replaced and changed up-projections ----------------------------------------------------------------------


class LoRA(nn.Module):
    """Linear map plus a low-rank update; `weight` is that of the linear map without the update."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)

    @property
    def weight(self):  # like PEFT: the weight without the update
        return self.base.weight

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Doubled(nn.Module):
    """Parametrization that doubles a weight."""

    def forward(self, weight):
        return 2 * weight


def with_lora(layer):
    """Add a low-rank update to the up-projection."""
    layer.kv_up = LoRA(layer.kv_up)


def with_parametrization(layer):
    """Double the weight of the up-projection with a parametrization."""
    nn.utils.parametrize.register_parametrization(layer.kv_up, "weight", Doubled())


def with_hook(layer):
    """Triple the output of the up-projection with a forward hook."""
    layer.kv_up.register_forward_hook(lambda module, inputs, output: 3 * output)


def with_forward(layer):
    """Replace the forward method of the up-projection by one with the negative output."""
    plain = layer.kv_up.forward
    layer.kv_up.forward = lambda x: -plain(x)


@pytest.mark.parametrize("change", [with_lora, with_parametrization, with_hook, with_forward])
def test_changes_of_the_up_projection_act_in_the_absorbed_form(change):
    layer, x = layer_with(mask=hw.causal()), text()
    before = layer(x, absorbed=True)
    change(layer)
    y = layer(x, absorbed=True)
    assert not torch.allclose(y, before)
    torch.testing.assert_close(y, layer(x, absorbed=False), rtol=0, atol=1e-12)
    parameters = list(layer.parameters())
    ours = torch.autograd.grad(y.square().sum(), parameters)
    theirs = torch.autograd.grad(layer(x, absorbed=False).square().sum(), parameters)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("wrap", [lambda linear: linear, nn.Sequential], ids=["linear", "inner module"])
def test_an_up_projection_with_a_bias_is_never_absorbed(wrap):
    layer, x = layer_with(mask=hw.causal()), text()
    layer.kv_up = nn.Linear(7, HEADS * 24, dtype=torch.float64)
    nn.init.ones_(layer.kv_up.bias)
    expected, _ = by_hand(layer, x, torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(2, HEADS, 5, 5))
    layer.kv_up = wrap(layer.kv_up)
    cache = hw.DynamicCache()
    y = torch.cat([layer(token, cache=cache) for token in x.split(1, dim=1)], dim=1)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    with pytest.raises(hw.InputError, match="^absorbed: expected False, since kv_up has a bias, got True"):
        layer(x, absorbed=True)


# -- the module -----------------------------------------------------------------------------------------------


def test_initial_weights_are_glorot():
    layer = LatentAttention(300, 4, kv_rank=60, head_dim=20, rotary_dim=10)
    for weight, width in ((layer.kv_down.weight[:60], 60), (layer.kv_down.weight[60:], 10)):
        bound = (6 / (300 + width)) ** 0.5
        assert bound * 0.99 < weight.max() <= bound


def test_repr_shows_sizes_rotary_and_mask():
    text = repr(layer_with(q_rank=5, mask=hw.causal()))
    assert "num_heads=3, kv_rank=7, q_rank=5, head_dim=11, rotary_dim=4, value_dim=13, rotary=Rotary(" in text
    assert "mask=causal()" in text


# -- DeepSeek ----------------------------------------------------------------------------------------------------

YARN = {
    "rope_type": "yarn",
    "rope_theta": 900.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
NAMES = {
    "q_a_proj": "q_down",
    "q_a_layernorm": "q_norm",
    "q_b_proj": "q_up",
    "kv_a_proj_with_mqa": "kv_down",
    "kv_a_layernorm": "kv_norm",
    "kv_b_proj": "kv_up",
    "o_proj": "out_proj",
}


@FORMS
@pytest.mark.parametrize("rope", ["default", "yarn"])
@pytest.mark.parametrize("q_rank", [None, 10])
@pytest.mark.parametrize("family", ["V2", "V3", "V3, halves"])
def test_output_equals_deepseek_of_transformers(family, q_rank, rope, absorbed):
    if family == "V2":
        from transformers import DeepseekV2Config as Config
        from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention as Attention
        from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2RotaryEmbedding as Embedding
    else:
        from transformers import DeepseekV3Config as Config
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention as Attention
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding as Embedding
    config = Config(
        hidden_size=39,
        num_attention_heads=3,
        num_key_value_heads=3,
        q_lora_rank=q_rank,
        kv_lora_rank=14,
        qk_nope_head_dim=10,
        qk_rope_head_dim=6,
        v_head_dim=13,
        max_position_embeddings=64,
        rope_parameters=YARN if rope == "yarn" else {"rope_type": "default", "rope_theta": 900.0},
        attn_implementation="eager",
        **({"rope_interleave": False} if family == "V3, halves" else {}),
    )
    model = Attention(config, layer_idx=0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)

    scaling, scale = None, 16**-0.5
    if rope == "yarn":
        mscale, of_all = (0.1 * YARN[name] * math.log(4.0) + 1 for name in ("mscale", "mscale_all_dim"))
        scaling = hw.YaRN(4.0, 16, fast=4.0, slow=1.0, attention_factor=mscale / of_all)
        scale *= of_all**2
    ours = LatentAttention(
        39,
        3,
        kv_rank=14,
        q_rank=q_rank,
        head_dim=10,
        rotary_dim=6,
        value_dim=13,
        rotary=hw.Rotary(theta=900.0, interleaved=family != "V3, halves", scaling=scaling),
        scores=hw.Scores(scale=scale),
        mask=hw.causal(),
    )
    renamed = {}
    for name, value in model.state_dict().items():
        module, kind = name.split(".")
        renamed[f"{NAMES.get(module, module)}.{kind}"] = value
    ours.load_state_dict(renamed, strict=True)

    x, positions = torch.randn(2, 23, 39), torch.arange(23)[None]
    embeddings = Embedding(config)(x, positions)
    forbidden = torch.full((23, 23), -torch.inf).triu(1)[None, None]
    expected, _ = model(hidden_states=x, position_embeddings=embeddings, attention_mask=forbidden)
    within_budget(ours(x, absorbed=absorbed), expected, copy.deepcopy(ours).double()(x.double(), absorbed=absorbed))


# -- mistakes ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_rank": 2.5}, "kv_rank: expected a whole number of 1 or more, got 2.5"),
        ({"q_rank": 0}, "q_rank: expected a whole number of 1 or more, got 0"),
        ({"rotary_dim": 3}, "rotary_dim: expected an even number, since Rotary rotates pairs of features, got 3"),
        ({"rotary": hw.Rotary(width=6)}, r"Rotary\(width\): expected at most the rotary_dim, 4, got 6"),
        *MISTAKES_OF_EVERY_LAYER,
        ({"norm_eps": -1.0}, "norm_eps: expected a finite number above 0, got -1.0"),
    ],
)
def test_unusable_layer_options_are_refused(arguments, message):
    with pytest.raises(hw.InputError, match="^" + message):
        LatentAttention(**({"embed_dim": EMBED, "num_heads": HEADS} | SIZES | arguments))


X = torch.zeros(2, 5, EMBED, dtype=torch.float64)


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("x", "arguments", "message"),
    [
        (X[..., :18], {}, r"x: expected width 19 on the last axis, got \(2, 5, 18\)"),
        (X.float(), {}, "x: expected torch.float64 like the layer, got torch.float32; cast one to the other"),
        (X, {"return_weights": "no"}, "return_weights: expected True or False, got 'no'"),
        (X, {"absorbed": 1}, "absorbed: expected True, False or None, got 1"),
        (X, {"cache": {}}, r"cache: expected a headwise Cache, such as DynamicCache\(\), got dict"),
        (X, {"lengths": [1, 2]}, "lengths: expected a StaticCache with them, got none"),
        (X, {"positions": torch.arange(4)}, r"positions: expected shape \(5,\) or \(2, 5\), got \(1, 4\)"),
        (X, {"gate": torch.ones(4)}, r"gate: expected a shape of .* = \(3,\), \(2, 3\), \(2, 3, 5\), got \(4,\)"),
    ],
)
def test_unusable_arguments_are_refused(x, arguments, message):
    with pytest.raises(hw.InputError, match="^" + message):
        layer_with()(x, **arguments)
