"""`qk_clip`: logits over the threshold become the threshold, all others keep their bits, by the rule of the paper."""

import math
import warnings
from copy import deepcopy

import pytest
import torch
import transformers
from torch import nn

import headwise as hw
import tiny
from monitoring.clipped_models import HEADS, MAKERS, RULES, OneLayer, arguments, latent, model, own, with_rule
from removal import families

TOLERANCES = {"deepseek v2": 1e-6}
"""Tolerances of models that compute in part in float32: the rotation of DeepSeek-V2."""


def rows_of(model, inputs):
    """Return the rows of a history of one step in which the model was called once."""
    with torch.no_grad(), warnings.catch_warnings(), hw.watch(model) as heads:
        warnings.simplefilter("ignore")
        model(**inputs)
    return [{"nonfinite_rows": 0, **row} for row in heads.rows()]


def history_of(rows, step=0):
    history = hw.History({})
    history.append(step, rows)
    return history


def logits_of(rows):
    """Return the largest logits by module and head; before a softcap, if there is one."""
    return {(row["module"], row["head"]): row.get("max_logit_uncapped", row["max_logit"]) for row in rows}


def output_of(model, inputs):
    with torch.no_grad():
        output = model(**inputs)
    return output if isinstance(output, torch.Tensor) else output.last_hidden_state


@pytest.mark.parametrize("name", MAKERS)
def test_logits_become_the_threshold_by_the_rule_of_the_paper(name):
    dense, inputs = model(name), arguments(name.partition(",")[0])
    rows = rows_of(dense, inputs)
    before, paths = logits_of(rows), list(dict.fromkeys(row["module"] for row in rows))
    for index, path in enumerate(paths):
        of_module = sorted(logit for (module, _), logit in before.items() if module == path)
        threshold = (of_module[2] + of_module[3]) / 2
        clipped = deepcopy(dense)
        heads = hw.qk_clip(clipped, history_of([row for row in rows if row["module"] == path]), threshold)
        over = {head for (module, head), logit in before.items() if module == path and logit > threshold}
        assert threshold > 0.0
        assert len(over) == 3
        assert {each.head for each in heads} == over
        for head in heads:
            assert (head.module, head.logit) == (path, before[path, head.head])
            assert head.factor == threshold / head.logit
        after = logits_of(rows_of(clipped, inputs))
        for head in range(HEADS):
            if head in over:
                assert after[path, head] == pytest.approx(threshold, rel=TOLERANCES.get(name, 1e-10), abs=0)
            else:
                assert after[path, head] == before[path, head]
        # Deeper modules receive other inputs.
        assert all(after[other, head] == before[other, head] for other in paths[:index] for head in range(HEADS))
        if name in RULES:
            factors = [threshold / before[path, head] if head in over else 1.0 for head in range(HEADS)]
            expected = output_of(with_rule(name, dense, path, torch.tensor(factors, dtype=torch.float64)), inputs)
            assert (output_of(clipped, inputs) - expected).abs().max() < TOLERANCES.get(
                name, 1e-10
            ) * expected.abs().max()


def test_the_rule_scales_parameters_of_the_layer_of_torch():
    dense, inputs = model("torch"), arguments("torch")
    rows = rows_of(dense, inputs)
    clipped = deepcopy(dense)
    [head] = hw.qk_clip(clipped, {(0, 2): logits_of(rows)["attention", 2]}, 0.5)
    scale = torch.ones(3, HEADS, 8, dtype=torch.float64)
    scale[:2, 2] = math.sqrt(head.factor)
    for name, shape in (("in_proj_weight", (-1, 1)), ("in_proj_bias", (-1,))):
        expected = getattr(dense.attention, name) * scale.reshape(shape)
        torch.testing.assert_close(getattr(clipped.attention, name), expected, rtol=1e-15, atol=0)
    torch.testing.assert_close(clipped.attention.bias_k, dense.attention.bias_k * scale[1].reshape(1, 1, -1))
    assert torch.equal(clipped.attention.bias_v, dense.attention.bias_v)


def test_layers_without_a_model_around_them_are_clipped():
    layer, x = model("own").attention, arguments("own")
    before = logits_of(rows_of(layer, x))
    hw.qk_clip(layer, history_of(rows_of(layer, x)), 0.5)
    after = logits_of(rows_of(layer, x))
    assert max(before.values()) > 0.5
    assert max(after.values()) == pytest.approx(0.5, rel=1e-10)


def test_a_negative_bias_leaves_logits_at_the_threshold_or_below():
    torch.manual_seed(2)
    biased, x = own(position_bias=hw.ALiBi()), {"x": 3 * torch.randn(2, 11, 48, dtype=torch.float64)}
    before = logits_of(rows_of(biased, x))
    heads = hw.qk_clip(biased, history_of(rows_of(biased, x)), 1.0)
    after = logits_of(rows_of(biased, x))
    assert len(heads) > 2
    for key, logit in after.items():
        assert logit <= 1.0 + 1e-12 if before[key] > 1.0 else logit == before[key]
    assert min(after[key] for key in before if before[key] > 1.0) < 1.0 - 1e-3


# -- in a training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama, grouped", "llama", "gemma2, softcap", "deepseek v3"])
def test_a_monitor_has_the_logits(name):
    trained, inputs = model(name).train(), arguments(name.partition(",")[0])
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.0)
    with warnings.catch_warnings(), hw.monitor(trained, statistics=["max_logit"], every=2) as monitor:
        warnings.simplefilter("ignore")
        trained(**inputs).last_hidden_state.square().mean().backward()
        optimizer.step()
        monitor.step()
        before = logits_of(monitor.history.rows(0))
        path = monitor.history.rows(0)[0]["module"]
        threshold = 0.9 * sorted(logit for (module, _), logit in before.items() if module == path)[HEADS // 2]
        state = deepcopy(optimizer.state_dict())
        seed = torch.get_rng_state()
        clipped = hw.qk_clip(trained, monitor, threshold)
        assert torch.equal(torch.get_rng_state(), seed)
        torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)
        assert all(parameter.requires_grad for parameter in trained.parameters())
        # The same logits are not used a second time: the weights are others now.
        assert hw.qk_clip(trained, monitor, threshold) == []
        monitor.step()
        assert hw.qk_clip(trained, monitor.history, threshold) == []
        trained(**inputs)
        monitor.step()
        after = logits_of(monitor.history.rows(2))
    over = {each.head for each in clipped if each.module == path}
    assert over == {head for head in range(HEADS) if before[path, head] > threshold}
    for head in range(HEADS):
        expected = threshold if head in over else before[path, head]
        assert after[path, head] == pytest.approx(expected, rel=1e-10, abs=0)


def test_clipping_while_the_next_step_is_observed_adds_no_statistics():
    trained, inputs = model("llama").train(), arguments("llama")
    with warnings.catch_warnings(), hw.monitor(trained, statistics=["max_logit"], every=1) as monitor:
        warnings.simplefilter("ignore")
        for _ in range(3):
            trained(**inputs)
            monitor.step()
            hw.qk_clip(trained, monitor, 1.0)
    last = monitor.history.rows(2)
    assert {row["sequences"] for row in last} == {2}
    assert len(last) == 2 * HEADS


def test_a_resumed_training_uses_the_logits_of_its_own_steps(tmp_path):
    """The run folder has later steps, of weights that are not those of the checkpoint."""
    trained, inputs = model("llama").train(), arguments("llama")
    with hw.monitor(trained, statistics=["max_logit"], every=2, out=tmp_path) as monitor:
        for _ in range(5):
            trained(**inputs)
            monitor.step()
    with torch.no_grad():
        for layer in trained.layers:
            layer.self_attn.q_proj.weight *= 3.0
            layer.self_attn.q_proj.bias *= 3.0
    with hw.monitor(trained, statistics=["max_logit"], every=2, out=tmp_path, start=1) as monitor:
        monitor.step()  # step 1 is not observed
        assert hw.qk_clip(trained, monitor, 1.0) == []
        trained(**inputs)
        monitor.step()
        logits = logits_of(monitor.history.rows(2))
        threshold = sorted(logits.values())[4]
        clipped = hw.qk_clip(trained, monitor, threshold)
        assert {(each.module, each.head): each.logit for each in clipped} == {
            head: logit for head, logit in logits.items() if logit > threshold
        }


def test_hooks_of_projections_are_not_called():
    hooked, calls = model("llama"), []
    hooked.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: calls.append(1))
    assert hw.qk_clip(hooked, {(0, 1): 3.0}, 1.0)
    assert calls == []


def test_no_head_is_scaled_at_the_threshold():
    dense = model("llama")
    weights = deepcopy(dense.state_dict())
    assert hw.qk_clip(dense, {(0, 1): 100.0, (1, 5): -7.0}) == []
    assert all(torch.equal(value, weights[name]) for name, value in dense.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_rounds_the_weights(dtype):
    rounded = model("llama, grouped").to(dtype)
    before = rounded.layers[1].self_attn.q_proj.weight.detach().clone()
    hw.qk_clip(rounded, {(1, 3): 300.0})
    weight = rounded.layers[1].self_attn.q_proj.weight
    assert torch.equal(weight[30:40], (before[30:40] * (1 / 3)))
    assert torch.equal(weight[:30], before[:30])
    assert torch.equal(weight[40:], before[40:])


def test_numbers_may_be_tensors():
    [head] = hw.qk_clip(model("llama"), {(1, 2): torch.tensor(200.0)}, torch.tensor(50.0))
    assert head == hw.ClippedHead(1, 2, "layers.1.self_attn", 200.0, 0.25)


def test_compiled_models_are_clipped():
    dense = model("llama")
    assert hw.qk_clip(torch.compile(dense), {(1, 2): 200.0})
    expected = model("llama")
    hw.qk_clip(expected, {(1, 2): 200.0})
    assert torch.equal(dense.layers[1].self_attn.q_proj.weight, expected.layers[1].self_attn.q_proj.weight)


# -- refused by name ---------------------------------------------------------------------------------------------------


def refuses(model, match, logits=None, threshold=1.0):
    """Assert that nothing is scaled, with an error."""
    weights = {name: value.clone() for name, value in model.state_dict().items() if not value.is_meta}
    with pytest.raises(hw.InputError, match=match):
        hw.qk_clip(model, {(0, 1): 3.0} if logits is None else logits, threshold)
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in weights.items())


def norms():
    sizes = families.ROTARY | {"pad_token_id": 0}
    olmo2 = transformers.Olmo2Config(**sizes)
    phi = transformers.PhiConfig(**families.ROTARY, qk_layernorm=True)
    yield from ((name, families.CONFIGS[name], "q_norm") for name in ("qwen3", "gemma3"))
    yield from (("olmo2", olmo2, "q_norm"), ("phi", phi, "q_layernorm"))


@pytest.mark.parametrize(("name", "config", "norm"), list(norms()))
def test_norms_of_queries_and_keys(name, config, norm):
    match = rf"^model: expected attention modules whose logits scale .* the norm {norm}, .* in layers.0.self_attn$"
    refuses(transformers.AutoModel.from_config(deepcopy(config)), match)


OWN = {
    "q_norm": lambda: own(qk_norm=hw.QKNorm("layer")),
    "norm q_norm": lambda: own(qk_norm=hw.QKNorm(over="heads")),
    "talking heads": lambda: own(scores=hw.Scores(talking_heads=True)),
    "talking heads,": lambda: latent(scores=hw.Scores(talking_heads=True)),
    "a position bias": lambda: own(position_bias=hw.RelativeBias(HEADS)),
    "two maps of each head": lambda: OneLayer(hw.DifferentialAttention(48, HEADS, head_dim=8)),
}


@pytest.mark.parametrize("reason", OWN)
def test_options_of_layers(reason):
    refuses(OWN[reason](), rf"^model: expected attention modules whose logits scale .* {reason}.* in attention$")


def test_position_biases_of_t5():
    t5 = families.model("t5")
    rows = rows_of(t5, families.inputs("t5"))
    refuses(
        t5, r"a position bias, which may be positive .* in encoder.block.0.layer.0.SelfAttention$", history_of(rows)
    )


def test_unknown_families():
    config = transformers.OPTConfig(
        vocab_size=97, hidden_size=48, num_hidden_layers=1, num_attention_heads=6, ffn_dim=37, word_embed_proj_dim=48
    )
    opt = transformers.AutoModel.from_config(config)
    refuses(opt, "got OPTAttention in decoder.layers.0.self_attn, whose class is unknown; pass the monitor, or inputs=")
    ids = torch.arange(14).view(2, 7)
    logits = {(row["layer"], row["head"]): row["max_logit"] for row in rows_of(opt, {"input_ids": ids})}
    assert len(hw.qk_clip(opt, logits, 1e-9, inputs={"input_ids": ids})) == 6
    assert max(row["max_logit"] for row in rows_of(opt, {"input_ids": ids})) < 1e-6


class SmallAttention(nn.Module):
    """Attention whose projections may compute more than queries and keys."""

    def __init__(self, use):
        super().__init__()
        self.use = use
        self.q, self.k, self.v, self.o = (nn.Linear(48, 48) for _ in range(4))

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        v = {"keys are values": k}.get(self.use, self.v(k if self.use == "values of keys" else x))
        q_heads, k_heads, v_heads = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (q, k, v))
        if self.use == "softmax":
            heads = (q_heads @ k_heads.mT).softmax(-1) @ v_heads
        else:
            heads = nn.functional.scaled_dot_product_attention(q_heads, key=k_heads, value=v_heads)
        y = heads.transpose(1, 2).flatten(2)
        return self.o(y * q.sigmoid() if self.use == "a gate" else y + k if self.use == "keys are added" else y)


@pytest.mark.parametrize("use", ["keys are values", "values of keys", "a gate", "keys are added"])
def test_projections_that_compute_more_than_logits(use):
    dense, x = OneLayer(SmallAttention(use)), torch.randn(2, 7, 48)
    match = r"a projection of head 0 that changes more than logits, such as values or a gate, in attention$"
    before = [value.clone() for value in dense.parameters()]
    with pytest.raises(hw.InputError, match=match):
        hw.qk_clip(dense, {(0, 0): 400.0}, 100.0, inputs=x)
    assert all(map(torch.equal, before, dense.parameters()))


@pytest.mark.parametrize("use", ["softmax", "fused"])
def test_projections_of_a_module_of_an_unknown_class(use):
    dense, x = OneLayer(SmallAttention(use)), torch.randn(2, 7, 48)
    values = dense.attention.v.weight.clone()
    assert len(hw.qk_clip(dense, {(0, 0): 400.0}, 100.0, inputs=x)) == 1
    assert torch.equal(dense.attention.v.weight, values)
    dense.attention.__class__ = type("Small", (SmallAttention,), {})
    match = r"^logits: expected layers with one attention module each, got layer 0 for no module, .*; pass the monitor"
    with pytest.raises(hw.InputError, match=match):
        hw.qk_clip(dense, {(0, 0): 400.0}, 100.0, inputs=x)


def test_classes_with_a_known_name():
    class LlamaAttention(transformers.models.llama.modeling_llama.LlamaAttention):
        pass

    other = model("llama")
    other.layers[0].self_attn.__class__ = LlamaAttention
    refuses(other, r"^model: expected attention modules of known families, got LlamaAttention in layers.0.self_attn, ")


def test_shared_parameters():
    tied = model("llama")
    tied.layers[1].self_attn.k_proj = tied.layers[0].self_attn.k_proj
    match = r"alone, got layers.0.self_attn.k_proj.weight, which is layers.1.self_attn.k_proj.weight too$"
    refuses(tied, match)
    tied = model("llama")
    tied.layers[0].self_attn.k_proj.weight = tied.layers[0].self_attn.q_proj.weight
    refuses(tied, r"got layers.0.self_attn.q_proj.weight, which is layers.0.self_attn.k_proj.weight too$")
    views = model("llama")
    weight = views.layers[0].self_attn.q_proj.weight
    views.layers[1].self_attn.q_proj.weight = nn.Parameter(weight.detach())
    refuses(views, r"got layers.0.self_attn.q_proj.weight, which is layers.1.self_attn.q_proj.weight too$")
    repeated = model("llama")
    repeated.layers[1] = repeated.layers[0]
    refuses(repeated, r"got layers.0.self_attn.q_proj.weight, which is layers.1.self_attn.q_proj.weight too$")


def test_projections_that_do_more():
    class Unit(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, nn.functional.normalize(self.weight, dim=1))

    changed = model("llama")
    changed.layers[0].self_attn.q_proj.__class__ = Unit
    match = "^model: expected projections whose output scales .* got layers.0.self_attn.q_proj of the class Unit"
    refuses(changed, match)
    changed = model("llama")
    nn.utils.parametrizations.weight_norm(changed.layers[0].self_attn.q_proj)
    refuses(changed, "^model: expected projections with plain weights, got layers.0.self_attn.q_proj without")
    changed = model("own").attention
    changed.q_proj.adapter = nn.Linear(2, 2)
    refuses(changed, "^model: expected projections without further parameters, got q_proj with adapter")
    changed = model("latent")
    changed.attention.kv_up = nn.Sequential(changed.attention.kv_up)
    refuses(changed, "^model: expected projections with plain weights, got attention.kv_up without a parameter weight")


def test_adapters_are_named():
    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.further = base, nn.Linear(48, 48, dtype=torch.float64)

        def forward(self, x):
            return self.base(x) + self.further(x)

    changed = model("llama")
    changed.layers[0].self_attn.q_proj = Adapter(changed.layers[0].self_attn.q_proj)
    refuses(changed, "got layers.0.self_attn, where 'Adapter' object has no attribute 'weight'$")


def test_weights_without_values():
    match = "^model: expected weights that can be multiplied by a factor, got layers.0.self_attn.q_proj.weight, "
    refuses(model("llama").to("meta"), match + "a parameter of float64 on meta$")
    quantised = model("llama")
    quantised.layers[0].self_attn.q_proj.weight = nn.Parameter(torch.ones(48, 48, dtype=torch.int8), False)
    refuses(quantised, match + "a parameter of int8 on cpu$")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite(value):
    dense = model("llama")
    refuses(dense, rf"^logits: expected finite numbers, got {value} for layer 1, head 4$", {(1, 4): value, (0, 0): 9.0})
    rows = rows_of(dense, arguments("llama"))
    rows[7]["max_logit"] = value
    refuses(dense, rf"got {value} for head 1 of layers.1.self_attn, with 0 query rows that are not", history_of(rows))


def test_rows_that_are_not_finite():
    dense = model("llama")
    rows = [row | {"nonfinite_rows": 3} for row in rows_of(dense, arguments("llama"))]
    refuses(dense, "for head 0 of layers.0.self_attn, with 3 query rows that are not finite$", history_of(rows))


@pytest.mark.parametrize("threshold", [0.0, -1.0, math.nan, math.inf, "100", None])
def test_thresholds(threshold):
    refuses(model("llama"), "^threshold: expected a finite number above 0, got ", threshold=threshold)


def test_logits_of_other_kinds():
    dense = model("llama")
    match = r"^logits: expected a Monitor, a History, or a mapping from \(layer, head\) to a logit, got list$"
    refuses(dense, match, [3.0])
    for key in (0, (0,), (0, True), (0, -1), ("layers.0.self_attn", 0)):
        refuses(dense, r"^logits: expected keys \(layer, head\), got ", {key: 3.0})
    refuses(
        dense, r"^logits: expected those of heads 0 to 5 of layers.1.self_attn, got \[0, 6\]$", {(1, 6): 3.0, (1, 0): 1}
    )
    refuses(dense, r"^layer: expected one of layers 0 to 1, got 2; ", {(2, 0): 3.0})
    refuses(dense, r"^logits: expected a history with an observed step, got none; call monitor.step", hw.History({}))
    with pytest.raises(hw.InputError, match="^model: expected a torch module, got str$"):
        hw.qk_clip("model", {})


def test_layer_numbers_of_several_modules():
    match = r"^logits: expected layers with one attention module each, got layer 0 for encoder.layers.0.self_attn, "
    refuses(families.model("bart"), match)


def test_histories_that_do_not_fit():
    dense = model("llama")
    rows = rows_of(dense, arguments("llama"))
    match = "^logits: expected max_logit of every head, got none of head 0 of layers.0.self_attn; observe max_logit; "
    refuses(dense, match, history_of([{name: row[name] for name in row if name != "max_logit"} for row in rows]))
    refuses(
        dense, r"^logits: expected those of heads 0 to 5 of layers.1.self_attn, got \[0, 1\]$", history_of(rows[:8])
    )
    match = r"^logits: expected logits of attention modules of this model, got those of blocks\[1\]$"
    refuses(dense, match, history_of([row | {"module": "blocks[1]"} for row in rows]))
    capped = tiny.family("gemma2, softcap", "eager")
    rows = rows_of(capped, {"input_ids": tiny.TOKENS})
    match = "^logits: expected max_logit_uncapped of every head, got none of head 0 of layers.0.self_attn; "
    refuses(capped, match, history_of([row | {"max_logit_uncapped": None} for row in rows]))
