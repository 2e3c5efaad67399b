"""Accelerated models of `transformers`, torch and headwise; with `watch` and `gate`."""

import contextlib

import pytest
import torch
import transformers
from test_accelerate import BATCH, HEADS, LENGTH, WIDTH, attention, reason_of, require_same
from torch import nn

import headwise as hw
from headwise.attention.backends.native import library
from headwise.intercept.accelerated_sdpa import OBSERVED, OWN_BACKEND
from oracles import distance
from tiny import PADDED, TOKENS, configs, family, with_distinct_heads

pytestmark = [
    pytest.mark.skipif(library.why_not_loaded() is not None, reason=str(library.why_not_loaded())),
    pytest.mark.usefixtures("kernels_count_as_faster"),
]


@pytest.mark.parametrize("padding", PADDED)
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "mistral, window 4"])
def test_models_of_transformers(name, padding):
    model = family(name, "sdpa")
    inputs = {"input_ids": TOKENS, "attention_mask": PADDED[padding]}
    with torch.no_grad():
        plain = model(**inputs).last_hidden_state
        with hw.accelerate(model) as acceleration:
            ours = model(**inputs).last_hidden_state
        exact = model.double()(**inputs).last_hidden_state
    assert [module.accelerated for module in acceleration.modules] == [1, 1, 1], str(acceleration)
    assert distance(ours, exact) <= 2 * distance(plain, exact)


def test_eager_models_are_named():
    model = family("llama", "sdpa")
    model.set_attn_implementation("eager")
    with hw.accelerate(model) as acceleration:
        model(TOKENS)
    assert [module.accelerated for module in acceleration.modules] == [0, 0, 0]
    assert "does not call torch.nn.functional.scaled_dot_product_attention" in str(acceleration)


def test_generation():
    torch.manual_seed(0)
    model = with_distinct_heads(transformers.LlamaForCausalLM(configs()["llama"]))
    inputs = {"input_ids": TOKENS, "attention_mask": PADDED["left"], "max_new_tokens": 5, "do_sample": False}
    for cache in ("dynamic", "static"):
        expected = model.generate(**inputs, cache_implementation=cache)
        with hw.accelerate(model) as acceleration:
            assert torch.equal(model.generate(**inputs, cache_implementation=cache), expected)
        assert all(module.accelerated == 5 for module in acceleration.modules), str(acceleration)


@pytest.mark.parametrize("norm_first", [True, False])
def test_torchs_layers(norm_first):
    layer = nn.TransformerEncoderLayer(44, 4, 37, 0.0, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(BATCH, LENGTH, 44)
    require_same(model, x, accelerated=2)
    with torch.no_grad():
        for options in ({}, {"mask": torch.ones(LENGTH, LENGTH).triu(1).bool()}):
            fast = model.eval()(x, **options)
            with hw.accelerate(model) as acceleration:
                torch.testing.assert_close(model(x, **options), fast)
            counts = [module.accelerated for module in acceleration.modules]
            assert counts == ([0, 0] if options else [1, 1]), str(acceleration)
            assert ("whole layer" in str(acceleration)) == bool(options)


def test_torchs_attention():
    model, x = nn.MultiheadAttention(44, 4, batch_first=True).eval(), torch.randn(BATCH, LENGTH, 44)
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[0, :] = True
    calls = [
        ({"need_weights": False}, 1),
        ({"need_weights": True}, 0),
        ({"need_weights": False, "key_padding_mask": padding}, 0),  # NaN on torch's fast path
    ]
    for options, accelerated in calls:
        with torch.no_grad():
            expected = model(x, x, x, **options)[0]
            with hw.accelerate(model) as acceleration:
                out = model(x, x, value=x, **options)[0]
        torch.testing.assert_close(out, expected, equal_nan=True)
        assert acceleration.modules[0].accelerated == accelerated
    with hw.accelerate(model) as acceleration:
        assert model(x, x, x, need_weights=False, key_padding_mask=padding)[0].isfinite().all()  # with a gradient: 0
    assert acceleration.modules[0].accelerated == 1


def test_layers_of_headwise_choose_their_own_backend():
    layer, x = hw.MultiHeadAttention(WIDTH, HEADS, backend="fused"), torch.randn(BATCH, LENGTH, WIDTH)
    assert reason_of(layer, x) == OWN_BACKEND


@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("name", ["llama", "plain"])
def test_watch_and_gate_in_both_orders(name, is_inside):
    model, x = attention() if name == "plain" else (family("llama", "sdpa"), TOKENS)

    def run(*contexts):
        with torch.no_grad(), contextlib.ExitStack() as stack:
            entered = [stack.enter_context(context) for context in contexts]
            out = model(x)
            return (out if name == "plain" else out.last_hidden_state), entered

    expected, _ = run(hw.gate(model, {0: 0.5}))
    with torch.no_grad(), hw.gate(model, {0: 0.5}), hw.watch(model) as reference:
        model(x)
    contexts = [hw.gate(model, {0: 0.5}), hw.watch(model), hw.accelerate(model)]
    out, entered = run(*contexts[::-1] if is_inside else contexts)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    heads = next(each for each in entered if hasattr(each, "rows"))
    for row, right in zip(heads.rows(), reference.rows(), strict=True):
        for column, value in right.items():
            assert row[column] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-4, nan_ok=True))
    acceleration = next(each for each in entered if isinstance(each, hw.Acceleration))
    if name == "plain":
        assert acceleration.modules[0].accelerated == 1
    else:
        assert acceleration.modules[0].unchanged == {OBSERVED: 1}
