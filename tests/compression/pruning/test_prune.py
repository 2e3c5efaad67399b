"""Pruning with and without reconstruction, against gates of 0 and heads that other heads can replace."""

import dataclasses
from copy import deepcopy

import pytest
import torch
import transformers

import headwise as hw
import tiny
from headwise.compression.calibration import least_squares_fits, reconstruction
from headwise.compression.calibration.reconstruction import LayerRuns
from headwise.compression.pruning.plan_pruning import plan_pruning
from headwise.compression.pruning.prune import prune
from removal import families


def batches(name, count=4):
    """Return several batches of a family's model, which differ."""
    made = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        batch = families.inputs(name)
        for key, value in batch.items():
            if value.is_floating_point():
                batch[key] = torch.randn(value.shape, generator=generator, dtype=value.dtype)
            else:
                batch[key] = torch.randint(3, 97, value.shape, generator=generator)
        made.append(batch)
    return made


def planned(model, name, keep=0.5, **options):
    """Return a plan by magnitude."""
    return plan_pruning(hw.MagnitudeScores(model, batches(name)[0]), keep=keep, **options)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "bart"])
def test_without_calibration_the_removed_heads_are_zero(name):
    model = families.model(name)
    plan = planned(model, name)
    pruned = prune(model, plan)
    families.assert_gated(pruned, model, dict.fromkeys(plan.removed, 0.0), batches(name)[0])


def with_repeated_head(model, name):
    """Make head 1 of each attention module a copy of head 0, except for its part of the output projection."""
    from headwise.families.registry import head_module

    plan = planned(model, name)
    with torch.no_grad():
        for each in plan.modules:
            module = head_module(model, each.module)
            for blocks in module.blocks:
                if blocks.part != "output":
                    heads = blocks.view(model.get_parameter(blocks.parameter))
                    heads[1].copy_(heads[0])
    kept = tuple(
        dataclasses.replace(each, kept=tuple(head for head in range(each.num_heads) if head != 1))
        for each in plan.modules
    )
    return dataclasses.replace(plan, modules=kept, identity=None)


@pytest.mark.parametrize(
    "name",
    ["bert", "gpt2", "t5", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_neox", "bart", "vit"))],
)
def test_reconstruction_replaces_a_head_that_another_one_repeats(name, monkeypatch):
    monkeypatch.setattr(least_squares_fits, "DAMPINGS", (1e-10,))
    model = families.model(name)
    plan = with_repeated_head(model, name)
    data = batches(name, 12)
    fitted = prune(model, plan, calibration=data)
    expected, without, found = (families.output(each, data[0]) for each in (model, prune(model, plan), fitted))
    assert (without - expected).abs().max() > 0.05 * expected.abs().max()
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()


@pytest.fixture
def equal_weights(monkeypatch):
    """Weight all tokens equally."""
    monkeypatch.setattr(reconstruction, "token_weights", lambda model, paths, batches: dict.fromkeys(paths))


@pytest.mark.usefixtures("equal_weights")
def test_later_layers_are_fitted_to_the_inputs_of_the_pruned_model(monkeypatch):
    monkeypatch.setattr(least_squares_fits, "DAMPINGS", (1e-10,))
    name, data = "llama", batches("llama", 40)
    model = families.model(name)
    plan = planned(model, name)
    pruned = prune(model, plan, calibration=data)
    last, outputs = "layers.1.self_attn.o_proj", {"dense": [], "pruned": []}
    hooks = [
        each.get_submodule(last).register_forward_hook(
            lambda module, arguments, output, key=key: outputs[key].append((arguments[0], output))
        )
        for key, each in (("dense", model), ("pruned", pruned))
    ]
    with torch.no_grad():
        for batch in data:
            model(**batch)
            pruned(**batch)
    for hook in hooks:
        hook.remove()
    x = torch.cat([arguments.flatten(0, 1) for arguments, _ in outputs["pruned"]])
    targets = torch.cat([output.flatten(0, 1) for _, output in outputs["dense"]])
    found = torch.cat([output.flatten(0, 1) for _, output in outputs["pruned"]])
    with_bias = torch.cat([x, torch.ones(len(x), 1)], 1)
    best = with_bias @ torch.linalg.lstsq(with_bias, targets).solution
    error, least = ((each - targets).square().mean() for each in (found, best))
    zeroed = prune(model, plan).get_submodule(last)
    assert error == pytest.approx(float(least), rel=1e-6)
    assert error < 0.9 * (zeroed(x) - targets).square().mean()


@pytest.mark.parametrize("name", ["llama", "t5", "whisper"])
def test_stored_layer_outputs_change_nothing(name, monkeypatch):
    model = families.model(name)
    plan, data = planned(model, name), batches(name)
    reused = prune(model, plan, calibration=data)
    monkeypatch.setattr(LayerRuns, "_is_chain_on", lambda self, index: False)
    for parameter, other in zip(reused.parameters(), prune(model, plan, calibration=data).parameters(), strict=True):
        assert torch.equal(parameter, other)


@pytest.mark.usefixtures("equal_weights")  # these depend on the batches, whose directions are drawn at random
def test_padding_does_not_count():
    model, tokenizer = tiny.model("decoder"), tiny.tokenizer("decoder")
    texts = tiny.texts(30, 12)
    padded = [dict(tokenizer(texts, return_tensors="pt", padding=True))]
    alone = [dict(tokenizer(text, return_tensors="pt")) for text in texts]
    plan = plan_pruning(hw.LeastSquaresScores(model, alone), keep=0.5, constraint="groups")
    pruned = [prune(model, plan, calibration=each) for each in (padded, alone)]
    weights = [each.layers[1].self_attn.o_proj.weight for each in pruned]
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-4)


def test_a_pruned_model_is_saved_and_generates(tmp_path):
    model, tokenizer = tiny.model("decoder", top="ForCausalLM"), tiny.tokenizer("decoder")
    data = [dict(tokenizer(text, return_tensors="pt")) for text in tiny.texts(30, 20)]
    plan = plan_pruning(hw.LeastSquaresScores(model, data), keep=0.5, constraint="groups", model=model)
    pruned = prune(model, plan, calibration=data)
    pruned.save_pretrained(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    found, expected = (
        each.generate(data[0]["input_ids"], max_new_tokens=5, do_sample=False, pad_token_id=0)
        for each in (loaded, pruned)
    )
    assert torch.equal(found, expected)
    with hw.watch(pruned) as heads, torch.no_grad():
        pruned(**data[0])
    assert len(heads.table()) == 6


@pytest.mark.usefixtures("as_user")
def test_mistakes_are_named():
    model = families.model("llama")
    plan = planned(model, "llama")
    first, *others = plan.modules
    for changed, options, message in (
        (3, {}, "^plan: expected a PruningPlan of hw.plan_pruning, got int"),
        (
            dataclasses.replace(plan, modules=(dataclasses.replace(first, module="layers.9.self_attn"), *others)),
            {},
            "^plan: expected a plan for this model, got one with a module layers.9.self_attn",
        ),
        (
            dataclasses.replace(plan, modules=(dataclasses.replace(first, num_heads=12, kept=(0, 1, 6, 7)), *others)),
            {},
            "^plan: expected 6 heads and 2 key/value heads in layers.0.self_attn, got 12 heads and 2 key/value heads",
        ),
        (
            dataclasses.replace(plan, modules=(dataclasses.replace(first, kept=(0, 1, 3)), *others)),
            {},
            "^plan: expected numbers of heads that the constraint uniform allows, got [3, 4]".replace("[", r"\["),
        ),
        (plan, {"calibration": []}, "^calibration: expected at least one batch, got none"),
    ):
        with pytest.raises(hw.InputError, match=message):
            prune(model, changed, **options)
    other = families.model("llama")
    with torch.no_grad():
        other.layers[0].mlp.up_proj.weight.mul_(1.1)
    with pytest.raises(hw.InputError, match="^plan: expected a plan for this model, got one for a model with other we"):
        prune(other, plan)


def test_shared_and_quantised_output_projections_are_refused():
    model = families.model("llama")
    plan = planned(model, "llama")
    first, second = (layer.self_attn.o_proj for layer in model.layers)
    kept, second.weight = second.weight, first.weight
    with pytest.raises(hw.InputError, match="a separate parameter for each projection"):
        prune(model, dataclasses.replace(plan, identity=None), calibration=batches("llama"))
    second.weight = torch.nn.Parameter(kept.detach().to(torch.int8), requires_grad=False)
    with pytest.raises(hw.InputError, match="weights in floating point, got torch.int8"):
        prune(model, dataclasses.replace(plan, identity=None), calibration=batches("llama"))


def test_scores_of_another_model_are_refused():
    other = families.model("llama")
    with torch.no_grad():
        other.layers[0].self_attn.o_proj.weight.mul_(2)
    scores = hw.MagnitudeScores(families.model("llama"), batches("llama")[0])
    with pytest.raises(hw.InputError, match="expected the model of the scores"):
        plan_pruning(scores, keep=0.5, model=other)


def test_padded_sources_need_a_mask_of_the_targets():
    batch = batches("t5")[0]
    batch["attention_mask"] = torch.ones_like(batch["input_ids"]).index_fill(1, torch.tensor(12), 0)
    with pytest.raises(hw.InputError, match="with an attention_mask that hides padding, got none"):
        hw.LeastSquaresScores(families.model("t5"), [batch])
    batch["decoder_attention_mask"] = torch.ones_like(batch["decoder_input_ids"])
    hw.LeastSquaresScores(families.model("t5"), [batch])


def test_recorded_heads_are_not_pruned_again():
    model = families.model("bert")
    smaller = prune(model, planned(model, "bert"))
    scores = hw.MagnitudeScores(smaller, batches("bert")[0])
    with pytest.raises(hw.InputError, match="removed heads that its configuration records"):
        plan_pruning(scores, keep=0.7, model=smaller)
    with pytest.raises(hw.InputError, match="prune the dense model by one plan"):
        prune(smaller, plan_pruning(scores, keep=0.7))


def test_a_fit_to_nan_or_to_padding_alone_is_refused():
    model = families.model("llama")
    plan = dataclasses.replace(planned(model, "llama"), identity=None)
    padding = [{**batch, "attention_mask": torch.zeros_like(batch["input_ids"])} for batch in batches("llama")]
    for act in (lambda: prune(model, plan, calibration=padding), lambda: hw.LeastSquaresScores(model, padding)):
        with pytest.raises(hw.InputError, match="^calibration: .* finite numbers, got padding alone"):
            act()
    with torch.no_grad():
        model.layers[0].self_attn.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(hw.InputError, match="finite numbers, got NaN or infinity"):
        prune(model, plan, calibration=batches("llama"))


def test_modules_are_fitted_in_the_order_of_the_run():
    model = families.model("llama")
    plan = planned(model, "llama")
    turned = dataclasses.replace(plan, modules=plan.modules[::-1])
    pruned, expected = (prune(model, each, calibration=batches("llama")) for each in (turned, plan))
    assert all(map(torch.equal, pruned.parameters(), expected.parameters()))


def test_heads_that_transformers_finds_inconsistent_are_refused():
    long = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
    long |= {"short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0]}
    config = deepcopy(families.CONFIGS["phi3"])
    config = type(config).from_dict(config.to_dict() | {"rope_parameters": long})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    scores = hw.MagnitudeScores(model, batches("phi3")[0])
    with pytest.raises(hw.InputError, match="expected a model whose configuration can state fewer heads, got a Phi3"):
        plan_pruning(scores, keep=0.5, model=model)
    with pytest.raises(hw.InputError, match="expected a model whose configuration can state fewer heads"):
        prune(model, plan_pruning(scores, keep=0.5))


def test_copies_of_the_configuration_state_the_remaining_heads():
    model = families.model("phi3")
    for layer in model.layers:
        layer.self_attn.config = deepcopy(model.config)
    plan = plan_pruning(hw.MagnitudeScores(model, batches("phi3")[0]), keep=0.5, model=model)
    pruned = prune(model, plan)
    assert plan.loader == "transformers"
    assert [layer.self_attn.config.num_attention_heads for layer in pruned.layers] == [4, 4]
    families.assert_gated(pruned, model, dict.fromkeys(plan.removed, 0.0), batches("phi3")[0])
    assert model.layers[0].self_attn.config.num_attention_heads == 6
