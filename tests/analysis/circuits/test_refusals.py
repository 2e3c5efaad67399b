"""Models of transformers whose circuits do not follow from their weights, or only in part, are refused by name."""

import re
import warnings

import pytest
import torch
import transformers
from blocks import close
from dense import GROUPED, model_of
from torch import nn

import headwise as hw

pytestmark = pytest.mark.usefixtures("as_user")


def test_encoders_with_norms_after_sums_have_matrices_alone():
    circuits = hw.circuits(model_of("bert"))
    assert not circuits.has_linear_stream
    reason = re.escape("heads of bert.encoder.layer.0.attention.self whose outputs reach later modules through a norm")
    with pytest.raises(hw.InputError, match=f"^model: .* scores of the name 'copying', got {reason}"):
        circuits.scores("copying")
    with pytest.raises(hw.InputError, match=f"^model: .* composition scores of the name 'q', got {reason}"):
        circuits.composition()


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_norms_of_queries_and_keys_are_named(kind):
    circuits = hw.circuits(model_of(kind))
    named = r"the norm model\.layers\.0\.self_attn\.q_norm of queries or keys"
    with pytest.raises(hw.InputError, match=f"got {named}; use OV"):
        circuits.qk(0, 0)
    with pytest.raises(hw.InputError, match=f"^model: .* scores of the name 'matching', got {named}"):
        circuits.scores("copying", "matching")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert circuits.composition().statistics == ("v",)
    assert [re.sub(" the model has.*", "", str(each.message)) for each in caught] == [
        "the composition scores q, k are left out:"
    ]


def test_rotations_that_depend_on_the_length_of_the_text_are_refused():
    config = transformers.LlamaConfig(
        **GROUPED, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    )
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    circuits = hw.circuits(model.double().eval())
    with pytest.raises(hw.InputError, match="got the rotation in model.layers.0.self_attn, which depends on"):
        circuits.qk(0, 0, 3)
    assert circuits.scores("copying").statistics == ("copying",)


class Doubled(nn.Linear):
    """Linear layer whose weight is not what it multiplies by."""

    def forward(self, x):
        return 2.0 * super().forward(x)


def doubled(linear):
    """Return such a layer with the weight of a linear layer."""
    layer = Doubled(linear.in_features, linear.out_features, linear.bias is not None).to(linear.weight.dtype)
    layer.load_state_dict(linear.state_dict())
    return layer


@pytest.mark.parametrize("name", ["v_proj", "o_proj"])
def test_projections_that_compute_something_else_are_refused(name):
    model = model_of("llama")
    attention = model.model.layers[1].self_attn
    setattr(attention, name, doubled(getattr(attention, name)))
    with pytest.raises(hw.InputError, match=r"layers\.1\.self_attn"):
        hw.circuits(model)


def test_a_factor_of_the_scores_is_measured():
    model = model_of("llama")
    plain = hw.circuits(model).qk(1, 3).matrix()
    attention = model.model.layers[1].self_attn
    for parameter in (attention.q_proj.bias, attention.k_proj.bias):
        nn.init.zeros_(parameter)
    attention.q_proj = doubled(attention.q_proj)
    assert close(hw.circuits(model).qk(1, 3).matrix(), 2 * plain)


def test_the_embeddings_are_those_that_the_model_computes():
    model = model_of("llama")
    expected = hw.circuits(model).scores("copying", "matching")
    model.lm_head = doubled(model.lm_head)
    scores = hw.circuits(model).scores("copying", "matching")
    for row, other in zip(scores.rows, expected.rows, strict=True):
        assert row.statistics["copying"].value == pytest.approx(other.statistics["copying"].value, abs=1e-10)


@pytest.mark.parametrize("way", ["eager", "autocast"])
def test_circuits_do_not_depend_on_the_way_in_which_attention_is_computed(way):
    model = model_of("llama")
    expected = hw.circuits(model)
    if way == "eager":
        model.set_attn_implementation("eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        circuits = hw.circuits(model)
    assert torch.equal(circuits.qk(2, 5).matrix(), expected.qk(2, 5).matrix())
    assert circuits.scores().rows[7].statistics == {
        name: pytest.approx(value, nan_ok=True) for name, value in expected.scores().rows[7].statistics.items()
    }


def test_a_hook_is_named():
    model = model_of("gpt2")
    handle = model.transformer.h[1].mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(hw.InputError, match=r"got a hook of transformer\.h\.1\.mlp; remove the hook"):
        hw.circuits(model)
    handle.remove()
    hw.circuits(model)


@pytest.mark.parametrize(
    ("name", "context"),
    [
        ("watch", hw.watch),
        ("gate", lambda model: hw.gate(model, {(0, 1): 0.5})),
        ("record_outputs", hw.record_outputs),
        ("accelerate", hw.accelerate),
    ],
)
def test_contexts_of_headwise_are_named(name, context):
    model = model_of("llama")
    remedy = rf"got one that is within hw\.{name}; leave the context of hw\.{name} first"
    with context(model):
        with pytest.raises(hw.InputError, match=f"^model: expected a model outside of all contexts of .*, {remedy}"):
            hw.circuits(model)
        model(torch.arange(7)[None])
    hw.circuits(model)


def test_the_innermost_context_and_analyses_are_named():
    model, texts = model_of("llama"), [{"input_ids": torch.arange(7)[None]}]
    with (
        hw.accelerate(model),
        hw.gate(model, {(0, 1): 0.5}),
        hw.watch(model),
        pytest.raises(hw.InputError, match=r"got one that is within hw\.watch;"),
    ):
        hw.circuits(model)
    with pytest.raises(hw.InputError, match="leave the context of an analysis of headwise first"):
        hw.ablate(model, texts, lambda model, batch: hw.circuits(model))


def test_hooks_that_transformers_leaves_are_no_obstacle():
    model = model_of("llama")
    model(torch.arange(5)[None], output_hidden_states=True, output_attentions=False)
    hw.circuits(model)


def replace_method(model):
    model.lm_head.forward = lambda x: x


def parametrize(model):
    nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)


def quantise(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().to(torch.float8_e4m3fn))


def adapt(model):
    model.model.layers[2].self_attn.v_proj.lora_a = nn.Linear(48, 2).double()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (replace_method, "with the forward method of their class, got another one of lm_head"),
        (parametrize, r"got a parametrization of model\.layers\.0\.mlp\.up_proj"),
        (quantise, r"got lm_head\.weight of float8_e4m3fn on cpu; load the weights, without"),
        (adapt, r"v_proj with lora_a"),
    ],
)
def test_changes_of_modules_and_weights_are_named(change, sentence):
    model = model_of("llama")
    change(model)
    with pytest.raises(hw.InputError, match=sentence):
        hw.circuits(model)


def test_other_families_and_cross_attention_are_named():
    sizes = {"vocab_size": 97, "d_model": 48, "num_layers": 2, "num_heads": 6, "d_kv": 8, "d_ff": 37}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).eval()
    batch = {"input_ids": torch.arange(7)[None], "decoder_input_ids": torch.arange(7)[None]}
    with pytest.raises(hw.InputError, match=r"expected self-attention, got cross-attention in decoder\.block\.0"):
        hw.circuits(model, batch)
    sizes = {"vocab_size": 97, "n_embd": 48, "n_layer": 2, "n_head": 6, "rotary_dim": 4}
    model = transformers.GPTJForCausalLM(transformers.GPTJConfig(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    with pytest.raises(hw.InputError, match="expected attention modules of .*, got GPTJAttention in"):
        hw.circuits(model)


def test_arguments_are_checked():
    circuits = hw.circuits(model_of("llama"))
    for call, text in {
        lambda: circuits.ov(0, 6): r"^head: expected a \(layer, head\) of the model, got \(0, 6\)",
        lambda: circuits.qk(0, 0, -1): r"^distance: expected a whole number of 0 or more, got -1",
        lambda: circuits.scores("copy"): r"^names: expected some of copying, matching, .*, got 'copy'",
        lambda: circuits.composition("o"): r"^kinds: expected some of q, k, v, got 'o'",
        lambda: circuits.scores(distance=1.5): r"^distance: expected a whole number of 0 or more, got 1.5",
        lambda: hw.circuits("llama"): r"^model: ",
        lambda: circuits.qk(0, 0, 10**20): r"^distance: expected a whole number from 0 to \d+, got 1000",
        lambda: circuits.why_not("copies"): r"^score: expected one of copying, matching, .*, q, k, v, got 'copies'",
        lambda: circuits.composition("v").largest("v", -1): r"^top: expected a whole number of 1 or more, got -1",
        lambda: circuits.composition("v").pair(0, 1): r"^pair: expected two heads \(layer, head\), got 0",
        lambda: hw.circuits(model_of("llama"), [1, 2]): r"^batch: expected a batch: a tensor, or .*, got list; tok",
    }.items():
        with pytest.raises(hw.InputError, match=text):
            call()
