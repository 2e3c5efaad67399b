"""Differential attention against its definition, computed independently, and against DiffLlama of transformers."""

import copy
import math

import pytest
import torch

import headwise as hw
from headwise.nn.differential import DifferentialAttention
from oracles import plain_attention, within_budget

BATCH, QUERIES, KEYS, EMBED, HEADS, KV_HEADS = 2, 5, 7, 36, 6, 3
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
OPTIONS = {
    "default": {},
    "grouped": {"num_kv_heads": KV_HEADS},
    "multi-query": {"num_kv_heads": 1},
    "widths": {"num_kv_heads": KV_HEADS, "head_dim": 11, "value_dim": 13, "out_dim": 17, "bias": False},
    "weight": {"norm_weight": True, "norm_eps": 0.01},
    "lambda_init": {"lambda_init": 0.3},
    "depth": {"depth": 4},
    "scores": {"scores": hw.Scores(scale=0.4, softcap=2.0, sinks=True, temperature=True), "backend": "reference"},
    "sinks": {"scores": hw.Scores(sinks=True), "num_kv_heads": KV_HEADS},
    "qk_norm": {"qk_norm": hw.QKNorm(over="heads"), "num_kv_heads": KV_HEADS},
}


def by_hand(layer, x, context, allowed=None, bias=None, gate=None):
    """Return the output and weights of a differential layer by their definition, computed head by head.

    The weights of a head are its first attention map minus lambda times its second.
    """

    def project(projection, tensor, norm=None):
        projected = tensor @ projection.weight.T + (0 if projection.bias is None else projection.bias)
        if norm is not None:
            projected = projected / (projected.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
        return projected

    q = project(layer.q_proj, x, getattr(layer, "q_norm", None))
    k = project(layer.k_proj, context, getattr(layer, "k_norm", None))
    v = project(layer.v_proj, context)
    d, w, group = layer.head_dim, layer.value_dim, layer.num_heads // layer.num_kv_heads
    scores = layer.scores or hw.Scores()
    q1, k1, q2, k2 = (getattr(layer, name) for name in LAMBDAS)
    lambda_value = torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + layer.lambda_init
    outputs, differences = [], []
    for head in range(layer.num_heads):
        kv_head, maps = head // group, []
        for half in range(2):
            at, of_key = half * layer.num_heads + head, half * layer.num_kv_heads + kv_head
            scale = d**-0.5 if scores.scale is None else scores.scale
            maps.append(
                plain_attention(
                    q[:, None, :, at * d : at * d + d],
                    k[:, None, :, of_key * d : of_key * d + d],
                    v[:, None, :, kv_head * w : kv_head * w + w],
                    None if allowed is None else allowed[:, head : head + 1],
                    None if bias is None else bias[:, head : head + 1],
                    scale=scale if layer.temperature is None else scale / layer.temperature[at : at + 1],
                    softcap=scores.softcap,
                    sinks=None if layer.sinks is None else layer.sinks[at : at + 1],
                ).weights[:, 0]
            )
        difference = maps[0] - lambda_value * maps[1]
        out = difference @ v[..., kv_head * w : kv_head * w + w]
        out = out / (out.pow(2).mean(-1, keepdim=True) + layer.head_norm.eps).sqrt() * (1 - layer.lambda_init)
        if layer.head_norm.weight is not None:
            out = out * layer.head_norm.weight
        outputs.append(out if gate is None else out * gate[:, head, None, None])
        differences.append(difference)
    y = torch.cat(outputs, -1) @ layer.out_proj.weight.T
    return y if layer.out_proj.bias is None else y + layer.out_proj.bias, torch.stack(differences, 1)


def layer_with(**options):
    """Return a small float64 layer with these options and random parameters."""
    layer = DifferentialAttention(EMBED, HEADS, dtype=torch.float64, **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    if layer.temperature is not None:
        torch.nn.init.uniform_(layer.temperature, 0.5, 2.0)
    return layer


def text(length=QUERIES):
    """Return a random input of this length."""
    return torch.randn(BATCH, length, EMBED, dtype=torch.float64)


@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("options", OPTIONS)
def test_output_weights_and_gradients_equal_the_definition(options, cross):
    layer, x = layer_with(**OPTIONS[options]), text().requires_grad_()
    arguments = (x, text(KEYS)) if cross else (x,)
    y, weights = layer(*arguments, return_weights=True)
    expected, expected_weights = by_hand(layer, x, arguments[-1])
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-12)
    leaves = [x, *layer.parameters()]
    upstream, of_weights = torch.randn_like(y), torch.randn_like(weights)
    ours = torch.autograd.grad((y * upstream).sum() + (weights * of_weights).sum(), leaves)
    theirs = torch.autograd.grad((expected * upstream).sum() + (expected_weights * of_weights).sum(), leaves)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-11)


def test_masks_biases_and_gates_equal_the_definition():
    layer, x = layer_with(num_kv_heads=KV_HEADS, mask=hw.causal()), text()
    causal = torch.ones(QUERIES, QUERIES, dtype=torch.bool).tril()
    allowed = causal & (torch.arange(QUERIES) < torch.tensor([3, 5])[:, None, None, None])
    allowed = allowed.expand(BATCH, HEADS, QUERIES, QUERIES)
    bias = torch.randn(BATCH, HEADS, QUERIES, QUERIES, dtype=torch.float64)
    gate = torch.rand(BATCH, HEADS, dtype=torch.float64)
    expected, expected_weights = by_hand(layer, x, x, allowed, bias, gate)
    y, weights = layer(x, mask=hw.padding([3, 5]), bias=bias, gate=gate, return_weights=True)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-12)


def test_a_gate_is_not_undone_by_the_norm():
    layer, x = layer_with(bias=False), text()
    gate = torch.full((HEADS,), 0.5, dtype=torch.float64)
    torch.testing.assert_close(layer(x, gate=gate), layer(x) / 2, rtol=0, atol=1e-12)


def test_a_query_without_visible_keys_has_output_0():
    layer, x = layer_with(out_bias=False), text().requires_grad_()
    y, weights = layer(x, mask=torch.zeros(QUERIES, QUERIES, dtype=torch.bool), return_weights=True)
    assert not y.any()
    assert not weights.any()
    y.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_alibi_output_gate_and_fused_projection_equal_their_plain_forms():
    """ALiBi equals its values as a bias, the output gate its values as `gate`, and one projection three."""
    x = text()
    layer = layer_with(position_bias=hw.ALiBi(), mask=hw.causal())
    plain = copy.deepcopy(layer)
    plain.position_bias = None
    distance = (torch.arange(QUERIES) - torch.arange(QUERIES)[:, None]).abs()
    alibi = layer.position_bias.values(HEADS, torch.arange(QUERIES)[None], torch.arange(QUERIES)[None], torch.float64)
    assert alibi.shape == (1, HEADS, *distance.shape)
    torch.testing.assert_close(layer(x), plain(x, bias=alibi), rtol=0, atol=1e-12)

    layer = layer_with(output_gate="head", out_bias=False)
    plain = copy.deepcopy(layer)
    plain.output_gate = None
    gate = torch.sigmoid(layer.gate_proj(x)).transpose(1, 2)
    torch.testing.assert_close(layer(x), plain(x, gate=gate), rtol=0, atol=1e-12)

    layer, fused = layer_with(num_kv_heads=KV_HEADS), layer_with(num_kv_heads=KV_HEADS, fused_qkv=True)
    weights = layer.state_dict()
    for kind in ("weight", "bias"):
        weights[f"qkv_proj.{kind}"] = torch.cat([weights.pop(f"{name}_proj.{kind}") for name in "qkv"])
    fused.load_state_dict(weights, strict=True)
    torch.testing.assert_close(fused(x), layer(x), rtol=0, atol=1e-12)


def test_packed_sequences_equal_a_call_for_each_sequence():
    layer = layer_with(num_kv_heads=KV_HEADS, rotary=hw.Rotary(), mask=hw.causal(), head_dim=4)
    x, offsets = torch.randn(11, EMBED, dtype=torch.float64), [0, 3, 3, 11]
    gate = torch.rand(3, HEADS, dtype=torch.float64)
    separate = [layer(x[a:b][None], gate=g[None])[0] for a, b, g in zip(offsets, offsets[1:], gate, strict=False)]
    torch.testing.assert_close(layer(x, offsets=offsets, gate=gate), torch.cat(separate), rtol=0, atol=1e-12)


def test_lambda_init_comes_from_the_argument_or_the_depth():
    assert layer_with().lambda_init == 0.8
    assert layer_with(depth=0).lambda_init == pytest.approx(0.2)
    assert layer_with(depth=4).lambda_init == 0.8 - 0.6 * math.exp(-1.2)
    layer = layer_with(lambda_init=0.25)
    for name in LAMBDAS:
        torch.nn.init.zeros_(getattr(layer, name))
    assert layer.lambda_value().item() == 0.25


def test_initial_lambdas_have_standard_deviation_0_1_and_one_axis():
    layer = DifferentialAttention(4000, 2)
    assert layer.head_dim == 1000
    assert layer.value_dim == 2000
    for name in LAMBDAS:
        assert getattr(layer, name).std().item() == pytest.approx(0.1, rel=0.1)
    assert all(parameter.ndim >= 1 for parameter in layer.parameters())


@pytest.mark.parametrize("kv_heads", [2, 4, 8])
def test_output_equals_diffllama_of_transformers(kv_heads):
    from transformers import DiffLlamaConfig
    from transformers.models.diffllama import modeling_diffllama as theirs

    config = DiffLlamaConfig(
        hidden_size=40,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        head_dim=6,
        attention_bias=True,
        rms_norm_eps=1e-4,
        lambda_std_dev=0.5,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        attn_implementation="eager",
    )
    model = theirs.DiffLlamaAttention(config, layer_idx=3)
    ours = DifferentialAttention(
        40,
        4,
        num_kv_heads=kv_heads // 2,
        head_dim=6,
        depth=3,
        norm_eps=1e-4,
        rotary=hw.Rotary(theta=500.0),
        mask=hw.causal(),
    )
    weights = {name.replace("o_proj", "out_proj"): value for name, value in model.state_dict().items()}
    for name in ("v_proj.weight", "v_proj.bias"):  # rows (half, kv_head, feature)
        weights[name] = weights[name].unflatten(0, (2, kv_heads // 2, 6)).transpose(0, 1).flatten(0, 2)
    ours.load_state_dict(weights, strict=True)

    x, positions = torch.randn(2, 7, 40), torch.arange(7)[None]
    embeddings = theirs.DiffLlamaRotaryEmbedding(config)(x, positions)
    forbidden = torch.full((7, 7), -torch.inf).triu(1)[None, None]
    expected, _ = model(x, embeddings, forbidden)
    within_budget(ours(x), expected, copy.deepcopy(ours).double()(x.double()))


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lambda_init": 1.0}, "lambda_init: expected a number of 0 or more and less than 1, got 1.0"),
        ({"lambda_init": -0.1}, "lambda_init: expected a number of 0 or more and less than 1, got -0.1"),
        ({"lambda_init": "a"}, "lambda_init: expected a finite number, got 'a'"),
        ({"lambda_init": 0.5, "depth": 3}, "lambda_init: expected one of lambda_init and depth, got both"),
        ({"depth": -1}, "depth: expected a whole number of 0 or more, got -1"),
        ({"norm_weight": "no"}, "norm_weight: expected True or False, got 'no'"),
        ({"norm_eps": 0.0}, "norm_eps: expected a finite number above 0, got 0.0"),
        ({"num_heads": 5}, "num_heads: expected a number that divides embed_dim 36 / 2 = 18, got 5; or give head_dim"),
        ({"num_heads": 0}, "num_heads: expected a whole number of 1 or more, got 0"),
        (
            {"scores": hw.Scores(talking_heads=True)},
            "scores: expected no talking heads, since the two maps .* computed separately, got talking_heads=True",
        ),
    ],
)
def test_unusable_layer_options_are_refused(arguments, message):
    with pytest.raises(hw.InputError, match="^" + message):
        DifferentialAttention(**({"embed_dim": EMBED, "num_heads": HEADS} | arguments))


@pytest.mark.usefixtures("as_user")
def test_a_gate_for_another_number_of_heads_is_refused():
    with pytest.raises(
        hw.InputError, match=r"^gate: expected a shape of .* = \(6,\), \(2, 6\), \(2, 6, 5\), got \(12,"
    ):
        layer_with()(text(), gate=torch.ones(12, dtype=torch.float64))


def test_repr_shows_sizes_mask_and_lambda_init():
    assert "num_heads=6, head_dim=3, value_dim=6, mask=causal(), lambda_init=0.8" in repr(layer_with(mask=hw.causal()))
