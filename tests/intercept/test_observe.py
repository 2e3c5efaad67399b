"""Calls seen in tiny random models against the weights that eager attention returns."""

import pytest
import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

import headwise as hw
from headwise.attention.backends.reference import run
from headwise.intercept.hf_calls import observe

COMMON = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6}
ROTARY = COMMON | {"intermediate_size": 37, "max_position_embeddings": 64}

EXPERTS = ROTARY | {"hidden_size": 64, "intermediate_size": 64}  # their products want rows of 16 bytes


def configs() -> dict:
    """Name -> a tiny configuration; encoders, decoders, grouped heads, windows, position bias."""
    t5 = {"vocab_size": 97, "d_model": 48, "num_layers": 3, "num_heads": 6, "d_kv": 11, "d_ff": 37}
    return {
        "bert": transformers.BertConfig(**COMMON, intermediate_size=37),
        "gpt2": transformers.GPT2Config(vocab_size=97, n_embd=48, n_layer=3, n_head=6),
        "llama": transformers.LlamaConfig(**ROTARY, num_key_value_heads=2, head_dim=10),
        "mistral, window 4": transformers.MistralConfig(**ROTARY, num_key_value_heads=3, sliding_window=4),
        "gemma2, softcap": transformers.Gemma2Config(
            **ROTARY, num_key_value_heads=2, head_dim=10, attn_logit_softcapping=2.0, sliding_window=4
        ),
        "gpt-oss, sinks": transformers.GptOssConfig(
            **EXPERTS, num_key_value_heads=2, head_dim=10, num_local_experts=2, num_experts_per_tok=1, sliding_window=4
        ),
        "t5 encoder": transformers.T5Config(**t5),
    }


def tiny(name: str, implementation: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = configs()[name]
    config._attn_implementation = implementation
    model = transformers.T5EncoderModel(config) if name.startswith("t5") else transformers.AutoModel.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)  # so that heads differ by more than rounding
    return model.eval()


TOKENS = torch.randint(0, 97, (2, 13), generator=torch.Generator().manual_seed(1))
PADDED = {
    "no padding": torch.ones(2, 13, dtype=torch.long),
    "left": (torch.arange(13) >= torch.tensor([[0], [5]])).long(),
    "right": (torch.arange(13) < torch.tensor([[13], [8]])).long(),
}


@pytest.mark.parametrize("padding", PADDED)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", configs())
@torch.no_grad()
def test_the_weights_of_every_call_are_those_of_eager_attention(name, implementation, padding):
    if name in ("gemma2, softcap", "gpt-oss, sinks"):
        implementation = "eager"  # transformers has no other for these
    inputs = {"input_ids": TOKENS, "attention_mask": PADDED[padding]}
    eager = tiny(name, "eager")(**inputs, output_attentions=True).attentions
    model = tiny(name, implementation)
    calls = []
    with observe(model, calls.append):
        output = model(**inputs)
    assert torch.equal(output.last_hidden_state, model(**inputs).last_hidden_state)
    assert [call.layer for call in calls] == [0, 1, 2]
    assert all(dict(model.named_modules())[call.path] for call in calls)
    real = PADDED[padding].bool()[:, None].expand(-1, 6, -1)  # what padding attends to is nobody's business
    for call, expected in zip(calls, eager, strict=True):
        answer = run(hw_problem(call))
        torch.testing.assert_close(answer.weights[real], expected[real], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(answer.out.transpose(1, 2)[PADDED[padding].bool()], call.out[PADDED[padding].bool()])


def hw_problem(call):
    """The problem of a call, with its weights asked for."""
    stated = call.problem
    tensors = (stated.q, stated.k, stated.v)
    options = {"mask": stated.mask, "bias": stated.bias, "scale": stated.scale, "softcap": stated.softcap}
    options["sinks"] = None if stated.sinks is None else stated.sinks[:, 0]
    return type(stated).checked(*tensors, **options, return_weights=True)


def test_the_dispatch_is_put_back_also_by_an_exception_and_when_nested():
    before = AttentionInterface.get_interface
    model = tiny("bert", "sdpa")
    outer, inner = [], []
    with observe(model, outer.append):
        with observe(model, inner.append):
            model(TOKENS)
        model(TOKENS)
    assert (len(outer), len(inner)) == (6, 3)
    assert AttentionInterface.get_interface is before
    with pytest.raises(ZeroDivisionError), observe(model, lambda call: 1 / 0):
        model(TOKENS)
    assert AttentionInterface.get_interface is before


def test_another_model_is_not_observed():
    watched, other = tiny("bert", "sdpa"), tiny("gpt2", "sdpa")
    calls = []
    with observe(watched, calls.append):
        other(TOKENS)
    assert calls == []


def test_an_implementation_whose_masks_cannot_be_read_is_refused(monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, "other", sdpa_attention_forward)
    model = tiny("llama", "other")
    with (
        pytest.raises(hw.InputError, match="^model: expected attention implementation sdpa or eager, got other; call"),
        observe(model, lambda call: None),
    ):
        model(TOKENS)


def test_no_two_calls_of_a_run_are_one_layer():
    sizes = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3}
    model = transformers.BartModel(transformers.BartConfig(vocab_size=97, **sizes, **heads)).eval()
    calls = []
    with observe(model, calls.append):
        model(TOKENS)
    assert len({call.path for call in calls}) == 6  # encoder, decoder and cross attention number from 0 each
    assert len({call.layer for call in calls}) == 6
