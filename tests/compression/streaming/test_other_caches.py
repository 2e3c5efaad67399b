"""Streaming heads with the caches of `transformers`, in compiled models, and after interrupted calls."""

from copy import deepcopy

import pytest
import torch
import transformers

import headwise as hw
from compression.streaming import streaming_oracle
from compression.streaming.streaming_oracle import assert_close, expected_logits, ids, in_chunks
from headwise.compression.streaming.streaming_attention import PositionReader, TokenPositions
from headwise.intercept.adapters.transformers_attention import without_compiled_code

PATTERN = [(0, 5), (), (1,)]
SIZE = 23


def decoder(name="llama", implementation="sdpa"):
    return streaming_oracle.decoder(name, 4, 2, implementation, PATTERN)


@pytest.mark.parametrize(("name", "implementation"), [("llama", "sdpa"), ("llama", "eager"), ("gemma3", "sdpa")])
@pytest.mark.parametrize("sizes", [[1] * 14, [14], [1, 5, 1, 1, 6], [9, 4, 1]])
def test_a_static_cache(name, implementation, sizes):
    made, streaming = decoder(name, implementation)
    tokens = ids(2, 14)
    with streaming.running(made):
        found = in_chunks(made, transformers.StaticCache(config=made.config, max_cache_len=SIZE), tokens, sizes)
    # Eager attention of transformers, in the layer without streaming heads, computes its softmax in float32.
    assert_close(found, expected_logits(made, streaming, tokens), 1e-6 if implementation == "eager" else 1e-10)


@pytest.mark.parametrize("sizes", [[14], [4, 1, 1, 8], [9] + [1] * 5])
def test_a_static_cache_with_padding_on_the_left(sizes):
    made, streaming = decoder()
    tokens, real = ids(3, 14), torch.arange(14) >= torch.tensor([0, 3, 8])[:, None]
    positions = (real.long().cumsum(1) - 1).clamp(min=0)
    with streaming.running(made):
        cache = transformers.StaticCache(config=made.config, max_cache_len=SIZE)
        found = in_chunks(made, cache, tokens, sizes, real)
    assert_close(found[real], expected_logits(made, streaming, tokens, real, positions)[real])


@pytest.mark.parametrize("prompt", [1, 9])
@pytest.mark.parametrize("rows", [1, 2])
def test_generation_with_a_static_cache(prompt, rows):
    made, streaming = decoder()
    tokens, options = ids(rows, prompt), {"do_sample": False, "max_new_tokens": 11}
    real = torch.ones(rows, prompt + 11, dtype=torch.bool)
    with streaming_oracle.oracle(streaming, lambda length: real[:, :length]):
        expected = made.generate(tokens, use_cache=False, **options)
    with streaming.running(made):
        assert torch.equal(made.generate(tokens, cache_implementation="static", **options), expected)
    assert not torch.equal(made.generate(tokens, cache_implementation="static", **options), expected)


def test_padding_on_the_right_is_refused_with_any_cache():
    made, streaming = decoder()
    tokens, real = ids(2, 11), torch.ones(2, 11, dtype=torch.bool)
    real[1, -1] = False
    with streaming.running(made):
        cache = transformers.DynamicCache(config=made.config)
        with pytest.raises(hw.InputError, match="padding on the right with a cache"):
            in_chunks(made, cache, tokens, [6, 5], real)
        real[0, -1] = False
        with pytest.raises(hw.InputError, match="no padding on the right, got some"):
            in_chunks(made, streaming.cache(made), tokens, [10, 1], real)


def test_a_mask_that_changes_in_place_is_read_again():
    made, streaming = decoder()
    tokens, real = ids(2, 12), torch.ones(2, 12, dtype=torch.bool)
    causal = torch.ones(12, 12, dtype=torch.bool).tril()
    mask = causal.expand(2, 1, 12, 12).clone()
    with streaming.running(made), torch.no_grad():
        made(tokens, attention_mask=mask, use_cache=False)
        real[:, :3] = False
        mask &= real[:, None, None]
        found = made(tokens, attention_mask=mask, use_cache=False).logits
    assert_close(found[:, 3:], expected_logits(made, streaming, tokens, real)[:, 3:])


def compiled_by_function(made):
    return torch.compile(made, backend="eager")


def compiled_in_place(made):
    made.compile(backend="eager")
    return made


@pytest.mark.parametrize("compiled_by", [pytest.param(compiled_by_function, marks=pytest.mark.slow), compiled_in_place])
@torch.no_grad()
def test_a_model_that_was_compiled_before(compiled_by):
    made, streaming = decoder()
    tokens = ids(1, 14)
    expected = expected_logits(made, streaming, tokens)
    compiled = compiled_by(made)
    dense = compiled(tokens, use_cache=False).logits
    with streaming.running(made):
        assert_close(compiled(tokens, use_cache=False).logits, expected)
    assert torch.equal(compiled(tokens, use_cache=False).logits, dense)
    torch._dynamo.reset()


def test_code_that_is_compiled_cannot_restrict_heads():
    def in_context(tokens):
        with without_compiled_code():
            return tokens + 1

    with pytest.raises(hw.InputError, match=r"a call outside of code that torch\.compile compiles, got one inside"):
        torch.compile(in_context, backend="eager")(ids(1, 14))
    torch._dynamo.reset()


def test_a_model_with_a_compiled_forward():
    made = streaming_oracle.model("llama")
    dataset = [{"input_ids": ids(2, 15, seed)} for seed in range(2)]
    expected = hw.localize(made, dataset, 0.2, window=4, first=2)
    with torch.no_grad(), expected.running(made):
        logits = made(ids(2, 15)).logits
    made.forward = torch.compile(made.forward, backend="eager")
    with torch.no_grad():
        made(ids(2, 15))
    assert hw.localize(made, dataset, 0.2, window=4, first=2) == expected
    with torch.no_grad(), expected.running(made):
        assert torch.equal(made(ids(2, 15)).logits, logits)
    torch._dynamo.reset()


def fail(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("pattern", [PATTERN, [(), (), (0, 1)], [(0,), (), ()], [(0, 1), (0, 1), (0, 1)]])
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("new", [1, 3])
@torch.no_grad()
def test_a_cache_is_refused_after_an_interrupted_call(pattern, layer, new):
    made, streaming = streaming_oracle.decoder("llama", 4, 2, pattern=pattern)
    tokens, cache = ids(1, 14), streaming.cache(made)
    expected, more = expected_logits(made, streaming, tokens), tokens[:, 6 : 6 + new]
    with streaming.running(made):
        made(tokens[:, :6], past_key_values=cache)
        earlier = deepcopy(cache)
        # The MLP of a layer runs after its attention. After the last layer's attention the cache is complete.
        site = made.model.layers[layer].mlp if layer < 2 else made.model.layers[2].input_layernorm
        hook = site.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            made(more, past_key_values=cache)
        hook.remove()
        for incomplete in (cache, deepcopy(cache)):
            for _ in range(2):
                with pytest.raises(hw.InputError, match="was not interrupted or refused, got an incomplete one; use a"):
                    made(more, past_key_values=incomplete)
        assert_close(made(more, past_key_values=earlier).logits, expected[:, 6 : 6 + new])
        cache.reset()
        assert_close(made(tokens, past_key_values=cache).logits, expected)


@torch.no_grad()
def test_a_cache_is_refused_after_a_refused_call():
    made, streaming = streaming_oracle.decoder("llama", 4, 2, pattern=[(0, 1)] * 3)
    tokens, mask = ids(1, 9), torch.ones(1, 9, dtype=torch.long)
    mask[0, 3] = 0
    expected = expected_logits(made, streaming, tokens)
    with streaming.running(made):
        cache = streaming.cache(made)
        made(tokens[:, :6], past_key_values=cache)
        with pytest.raises(hw.InputError, match="padding between tokens"):
            made(tokens[:, 6:], attention_mask=mask, past_key_values=cache)
        with pytest.raises(hw.InputError, match="got an incomplete one; use a new one"):
            made(tokens[:, 6:], past_key_values=cache)
        # The refused call has no effect on calls without the cache.
        assert_close(made(tokens, use_cache=False).logits, expected)


@torch.no_grad()
def test_a_cache_is_refused_if_the_last_attention_was_interrupted(monkeypatch):
    made, streaming = streaming_oracle.decoder("llama", 4, 2, pattern=[(0, 1)] * 3)
    tokens, cache = ids(1, 9), streaming.cache(made)
    seven = TokenPositions(7, None)
    with streaming.running(made):
        made(tokens[:, :6], past_key_values=cache)
        with monkeypatch.context() as patch:
            patch.setattr(PositionReader, "read", lambda reader, path, *_: fail() if ".2." in path else seven)
            with pytest.raises(KeyboardInterrupt):
                made(tokens[:, 6:7], past_key_values=cache)
        with pytest.raises(hw.InputError, match="got an incomplete one; use a new one"):
            made(tokens[:, 6:7], past_key_values=cache)
