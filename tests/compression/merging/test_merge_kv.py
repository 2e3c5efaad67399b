"""Merging of key/value heads, against attention computed from the dense weights, and against heads that are equal."""

import functools
from copy import deepcopy

import pytest
import torch
import transformers

import headwise as hw
import tiny
from headwise.compression.calibration import least_squares_fits, reconstruction
from headwise.compression.merging.kv_alignment import Freedom, align, key_freedom, similar_groups, value_freedom
from headwise.compression.merging.merge_kv import mergeable_modules
from headwise.removal.head_changes import average_heads, multiply_features, reorder_heads
from headwise.removal.remove_heads import RECORD
from removal import families

CONFIGS = {
    name: deepcopy(config)
    for name, config in families.CONFIGS.items()
    if name in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi", "phi3")
}
CONFIGS["phi, grouped"] = transformers.PhiConfig(**families.ROTARY, num_key_value_heads=3)
CONFIGS["phi, norm"] = transformers.PhiConfig(**families.ROTARY, num_key_value_heads=3, qk_layernorm=True)
CONFIGS["phi3, half rotary"] = transformers.Phi3Config(
    **families.ROTARY, num_key_value_heads=2, pad_token_id=0, **families.SPECIAL,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
)  # fmt: skip
CONFIGS["gpt-oss"] = tiny.configs()["gpt-oss, sinks"]

LAYERS = {
    "plain": {},
    "interleaved, partial": {"rotary": hw.Rotary(width=4, interleaved=True), "fused_qkv": True},
    "half-split, partial, scaled": {"rotary": hw.Rotary(width=6, scaling=hw.LinearScaling(2.0)), "bias": False},
    "RMS norm": {"rotary": hw.Rotary(width=4), "qk_norm": hw.QKNorm("rms")},
    "RMS norm, no rotary": {"qk_norm": hw.QKNorm("rms")},
    "layer norm": {"rotary": hw.Rotary(), "qk_norm": hw.QKNorm("layer")},
    "element gate": {"output_gate": "element"},
    "head gate": {"output_gate": "head", "scores": hw.Scores(sinks=True, temperature=True), "value_dim": 5},
}


def random_(model):
    """Return the model in float64 with parameters that differ from each other, those of norms and biases included."""
    generator = torch.Generator().manual_seed(3)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.3 * noise if parameter.ndim > 1 else 1 + 0.3 * noise)
    return model


def family(name, auto=transformers.AutoModel):
    config = deepcopy(CONFIGS[name])
    config._attn_implementation = config._experts_implementation = "eager"
    return random_(auto.from_config(config))


def layer(name, kv_heads=4):
    options = {"num_kv_heads": kv_heads, "head_dim": 8, "mask": hw.causal()} | LAYERS[name]
    return random_(hw.MultiHeadAttention(24, 8, **options))


def batches(count=4):
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 97, (count, 2, 13), generator=generator)
    return [{"input_ids": each, "use_cache": False} for each in ids]


def xs(count=6):
    generator = torch.Generator().manual_seed(7)
    return [{"x": torch.randn(2, 13, 24, generator=generator, dtype=torch.float64)} for _ in range(count)]


def largest_change(model, changed, data):
    """Return the largest change of a module's output that a change of parameters makes, for the inputs that each
    attention module of the model has; relative to the output. So rounding of later layers to float32 does not count.
    """
    changes = []

    def compare(path):
        def hook(module, arguments, named, output):
            own = changed.get_submodule(path)(*arguments, **named)
            (output, own) = (each[0] if isinstance(each, tuple) else each for each in (output, own))
            changes.append(float((own - output).abs().max() / output.abs().max()))

        return hook

    paths = mergeable_modules(model, 1)
    hooks = [model.get_submodule(path).register_forward_hook(compare(path), with_kwargs=True) for path in paths]
    with torch.no_grad():
        model(**data)
    for hook in hooks:
        hook.remove()
    assert len(changes) == len(paths)
    return max(changes)


@functools.cache
def model_and_data(name):
    """Return a model, which tests copy before they change it, and the arguments of one call."""
    return (family(name), batches()[0]) if name in CONFIGS else (layer(name), xs()[0])


def random_matrices(model, module, generator):
    """Return matrices by which the keys, and the values, of each head may be multiplied."""
    matrices = []
    for freedom in (key_freedom(model, module), value_freedom(model, module)):
        shape = (module.num_kv_heads, freedom.width, freedom.width)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        matrices.append(torch.stack([freedom.nearest(each) for each in noise]))
    return matrices


@pytest.mark.parametrize("name", [*CONFIGS, *LAYERS])
def test_alignment_and_order_of_heads_leave_the_output_unchanged(name):
    model, data = model_and_data(name)
    generator, turned, ordered = torch.Generator().manual_seed(1), deepcopy(model), deepcopy(model)
    is_turned = []
    for module in mergeable_modules(model, 1).values():
        matrices = random_matrices(model, module, generator)
        for each in matrices:
            eye = torch.eye(each.shape[-1], dtype=torch.float64)
            is_turned.append(not torch.equal(each, eye.expand_as(each)))
            assert torch.allclose(each @ each.mT, eye, atol=1e-13, rtol=0)
        multiply_features(turned, module, *matrices)
        reorder_heads(ordered, module, torch.randperm(module.num_kv_heads, generator=generator).roll(1).tolist())
    expected = {"layer norm": [False, True], "phi, norm": [False, True], "element gate": [True, False]}
    assert is_turned[:2] == expected.get(name, [True, True])
    assert largest_change(model, turned, data) <= 1e-12
    assert largest_change(model, ordered, data) <= 1e-12
    different = [not torch.equal(a, b) for a, b in zip(model.parameters(), turned.parameters(), strict=True)]
    assert any(different)


def rotated(x, positions, theta=10_000.0):
    """Return half-split rotary positions of x (heads, tokens, width), in complex numbers."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half).double() / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


@pytest.mark.parametrize("method", ["mean", "weighted_mean"])
@pytest.mark.parametrize("count", [1, 2])
def test_merged_attention_equals_attention_computed_from_the_dense_weights(method, count):
    dense = random_(hw.MultiHeadAttention(24, 8, num_kv_heads=4, head_dim=6, rotary=hw.Rotary()))
    data = xs(3)
    merged = hw.merge_kv(dense, num_kv_heads=count, method=method, calibration=data, reconstruct=False)
    x = data[0]["x"][0]
    q, k, v = (
        torch.stack([x @ w.T + b for w, b in zip(p.weight.split(6), p.bias.split(6), strict=True)])
        for p in (dense.q_proj, dense.k_proj, dense.v_proj)
    )
    if method == "mean":
        of_keys = of_values = torch.ones(4).double()
    else:
        queries = torch.cat([each["x"].flatten(0, 1) for each in data]) @ dense.q_proj.weight.T + dense.q_proj.bias
        of_keys = queries.square().sum(0).reshape(4, -1).sum(1)
        of_values = dense.out_proj.weight.square().sum(0).reshape(4, -1).sum(1)
    heads = []
    for head in range(8):
        group = [kv for kv in range(4) if kv // (4 // count) == head // (8 // count)]
        key, value = (
            sum(share[kv] * part[kv] for kv in group) / sum(share[kv] for kv in group)
            for share, part in ((of_keys, k), (of_values, v))
        )
        positions = torch.arange(13).double()
        scores = rotated(q[head], positions) @ rotated(key, positions).T / 6**0.5
        heads.append(scores.softmax(-1) @ value)
    expected = torch.cat(heads, 1) @ dense.out_proj.weight.T + dense.out_proj.bias
    with torch.no_grad():
        assert (merged(x) - expected).abs().max() <= 1e-10


REPRESENTATIVES = ("llama", "qwen3", "phi, grouped", "phi3, half rotary")
"""Models whose keys may be rotated in different ways, and whose projections are separate or fused."""


def representatives_and_slow(names):
    """Return parameters for the names of configurations, of which the representatives run by default."""
    return [name if name in REPRESENTATIVES else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", [*representatives_and_slow(CONFIGS), *LAYERS])
@pytest.mark.parametrize("grouping", [pytest.param("adjacent", marks=pytest.mark.slow), "similarity"])
def test_heads_that_are_equal_up_to_a_rotation_are_merged_exactly(name, grouping):
    model, data = model_and_data(name)
    present = next(iter(mergeable_modules(model, 1).values())).num_kv_heads
    groups = 2 if present % 2 == 0 and present > 2 else 1
    equal, generator = deepcopy(model), torch.Generator().manual_seed(1)
    first = torch.zeros(groups, present // groups).double()
    first[:, 0] = 1.0
    for module in mergeable_modules(model, 1).values():
        average_heads(equal, module, first, first)  # the heads of each group become equal
        multiply_features(equal, module, *random_matrices(model, module, generator))
        if grouping == "similarity":
            reorder_heads(equal, module, [*range(0, present, 2), *range(1, present, 2)])
    calibration = xs() if isinstance(model, hw.MultiHeadAttention) else batches()
    options = {"num_kv_heads": groups, "calibration": calibration, "reconstruct": False, "grouping": grouping}
    merged = hw.merge_kv(equal, method="procrustes", **options)
    with torch.no_grad():
        expected, found = (each(**data) for each in (equal, merged))
        mean = hw.merge_kv(equal, method="mean", **options)(**data)
    expected, found, mean = (each if isinstance(each, torch.Tensor) else each[0] for each in (expected, found, mean))
    assert (mean - expected).abs().max() > 1e-3 * expected.abs().max()
    tolerance = 1e-5 if name in CONFIGS else 1e-9
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("name", representatives_and_slow(name for name in CONFIGS if name != "gpt-oss"))
def test_plain_transformers_loads_a_merged_model(name, tmp_path):
    model = family(name, transformers.AutoModelForCausalLM).float()
    count = 1 if model.config.num_key_value_heads % 2 else model.config.num_key_value_heads // 2
    merged = hw.merge_kv(model, num_kv_heads=count, calibration=batches(), method="procrustes", grouping="similarity")
    merged.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        assert torch.equal(loaded(**batches()[0]).logits, merged(**batches()[0]).logits)
    assert loaded.config.num_key_value_heads == count
    assert not hasattr(loaded.config, RECORD)
    assert model.config.num_key_value_heads != count


@pytest.mark.parametrize("name", LAYERS)
def test_a_merged_layer_equals_a_new_one_with_its_weights(name):
    merged = hw.merge_kv(layer(name), num_kv_heads=2, calibration=xs(), method="procrustes", grouping="similarity")
    new = layer(name, kv_heads=2)
    new.load_state_dict(merged.state_dict())
    with torch.no_grad():
        assert torch.equal(new(**xs()[0]), merged(**xs()[0]))
    assert repr(new) == repr(merged)
    assert new.qkv_widths == merged.qkv_widths


@pytest.mark.parametrize("method", ["mean", pytest.param("weighted_mean", marks=pytest.mark.slow), "procrustes"])
@pytest.mark.parametrize("name", ["llama", pytest.param("phi", marks=pytest.mark.slow)])
def test_least_squares_brings_each_module_closer_to_the_dense_one(name, method):
    model, data = family(name), batches(12)
    options = {"num_kv_heads": 1, "calibration": data, "method": method}
    without, fitted = (hw.merge_kv(model, reconstruct=each, **options) for each in (False, True))
    for path in mergeable_modules(model, 1):
        output = path + (".dense" if name == "phi" else ".o_proj")
        (_, targets), (x, found) = (calls(each, output, data) for each in (model, fitted))
        with torch.no_grad():
            unfitted = without.get_submodule(output)(x)
        assert (found - targets).square().mean() < 0.95 * (unfitted - targets).square().mean()


def test_the_fit_is_the_least_squares_solution_for_the_merged_inputs(monkeypatch):
    monkeypatch.setattr(least_squares_fits, "DAMPINGS", (1e-11,))
    monkeypatch.setattr(reconstruction, "token_weights", lambda model, paths, batches: dict.fromkeys(paths))  # equal
    model, data = family("llama"), batches(30)
    merged = hw.merge_kv(model, num_kv_heads=1, calibration=data, method="procrustes")
    (_, targets), (x, found) = (calls(each, "layers.1.self_attn.o_proj", data) for each in (model, merged))
    x = torch.cat([x, torch.ones(len(x), 1).double()], 1)
    best = x @ torch.linalg.lstsq(x, targets).solution
    error, least = ((each - targets).square().mean() for each in (found, best))
    assert error == pytest.approx(float(least), rel=1e-4)


def calls(model, path, data):
    """Return inputs and outputs of a projection on batches, `(tokens, width)`."""
    recorded = []
    hook = model.get_submodule(path).register_forward_hook(lambda _, x, y: recorded.append((x[0], y)))
    with torch.no_grad():
        for batch in data:
            model(**batch)
    hook.remove()
    return [torch.cat([each.flatten(0, -2) for each in side]) for side in zip(*recorded, strict=True)]


def test_alignment_is_never_worse_than_none():
    generator = torch.Generator().manual_seed(2)
    for freedom in (
        Freedom(6, ((0, 3), (1, 4)), (2, 5)),
        Freedom(6, block=tuple(range(6))),
        Freedom(6, ((0, 1),), (2, 3), signs=True),
    ):
        x = torch.randn(100, 4, 6, generator=generator, dtype=torch.float64)
        products = torch.einsum("nia,njb->ijab", x, x)
        aligned = torch.einsum("jab,njb->nja", align(products, freedom), x)
        errors = [(each - each.mean(1, keepdim=True)).square().sum() for each in (aligned, x)]
        assert errors[0] <= errors[1]
        for _ in range(20):
            random = torch.stack([freedom.nearest(torch.randn(6, 6, generator=generator).double()) for _ in range(4)])
            other = torch.einsum("jab,njb->nja", random, x)
            assert errors[0] <= (other - other.mean(1, keepdim=True)).square().sum()


def test_similar_heads_come_into_one_group():
    gains = torch.rand(8, 8, generator=torch.Generator().manual_seed(4))
    gains = gains + gains.T
    planted = [[0, 5, 6, 7], [1, 2, 3, 4]]
    for group in planted:
        gains[torch.tensor(group)[:, None], torch.tensor(group)] += 2
    assert similar_groups(gains, 2) == planted
    assert similar_groups(torch.ones(6, 6), 3) == [[0, 1], [2, 3], [4, 5]]


def test_a_trained_study_model_is_merged():
    from headwise.studies.model import ModelShape, Transformer
    from headwise.studies.space import Setting

    shape = ModelShape(vocabulary=97, embed_dim=32, layers=2, parameters=40_000)
    model = random_(Transformer(shape, Setting(4, 8, 4)))
    data = [{"input_ids": batch["input_ids"]} for batch in batches()]
    merged = hw.merge_kv(model, num_kv_heads=2, calibration=data, method="procrustes")
    assert [each.self_attn.num_kv_heads for each in merged.layers] == [2, 2]
    with torch.no_grad():
        assert merged(**data[0]).isfinite().all()


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama", {"num_kv_heads": 2}, "num_kv_heads: expected a number below 2 that divides it, the key/value heads"),
        ("phi", {"num_kv_heads": 4}, "num_kv_heads: expected a number below 6 that divides it, .*, got 4"),
        ("llama", {"num_kv_heads": 0}, "num_kv_heads: expected a whole number"),
        ("llama", {"num_kv_heads": 1, "method": "median"}, "method: expected 'mean', .*, got 'median'"),
        ("llama", {"num_kv_heads": 1, "grouping": "any"}, "grouping: expected 'adjacent' or 'similarity', got 'any'"),
        ("llama", {"num_kv_heads": 1, "method": "procrustes"}, "calibration: .* for method='procrustes', got None"),
        ("llama", {"num_kv_heads": 1, "grouping": "similarity"}, "calibration: .* for grouping='similarity', got None"),
        ("llama", {"num_kv_heads": 1, "reconstruct": True}, "calibration: .* for reconstruct=True, got None"),
        ("llama", {"num_kv_heads": 1, "calibration": []}, "calibration: expected at least one batch, got none"),
        ("bert", {"num_kv_heads": 1}, "model: expected attention modules of MultiHeadAttention, .*, got BertSelfAtt"),
        ("gpt2", {"num_kv_heads": 1}, "model: .*, got GPT2Attention with no number of key/value heads in its config"),
        ("t5", {"num_kv_heads": 1}, "model: expected attention modules of .*, got T5"),
    ],
)
def test_mistakes_are_named(name, options, message):
    with pytest.raises(hw.InputError, match=f"^{message}"):
        hw.merge_kv(families.model(name), **options)


def test_models_that_cannot_be_merged_are_named():
    pruned = families.model("llama")
    setattr(pruned.config, RECORD, {"layers.0.self_attn": [0]})
    with pytest.raises(hw.InputError, match="^model: expected a model whose configuration states its heads, got a rec"):
        hw.merge_kv(pruned, num_kv_heads=1)
    shared = families.model("llama")
    shared.layers[1].self_attn.k_proj.weight = shared.layers[0].self_attn.k_proj.weight
    with pytest.raises(hw.InputError, match="^model: expected a separate parameter for each projection, got one for"):
        hw.merge_kv(shared, num_kv_heads=1)
