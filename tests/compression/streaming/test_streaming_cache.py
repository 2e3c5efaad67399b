"""Streaming heads with and without their cache, against eager attention with one dense mask per head."""

from copy import deepcopy

import pytest
import torch
import transformers

import headwise as hw
from compression.streaming import streaming_oracle
from compression.streaming.streaming_oracle import assert_close, decoder, expected_logits, ids

DECODERS = sorted(streaming_oracle.CONFIGS)


def in_chunks(made, streaming, tokens, sizes, cache=None, real=None):
    """Return the logits of tokens that are read in chunks of these sizes with streaming heads, and the cache."""
    cache = streaming.cache(made) if cache is None else cache
    with streaming.running(made):
        return streaming_oracle.in_chunks(made, cache, tokens, sizes, real), cache


@pytest.mark.parametrize("name", DECODERS)
def test_prefill_chunks_and_tokens_equal_dense_masks(name):
    made, streaming = decoder(name)
    tokens = ids(2, 14)
    expected = expected_logits(made, streaming, tokens)
    dense = made(tokens, use_cache=False).logits
    assert (dense - expected).abs().max() > 1e-4 * expected.abs().max()  # the heads do see less
    with streaming.running(made), torch.no_grad():
        assert_close(made(tokens, use_cache=False).logits, expected)
        assert_close(made(tokens).logits, expected)  # with a cache that the model makes
    for sizes in ([14], [1] * 14, [3, 6, 1, 1, 3]):
        assert_close(in_chunks(made, streaming, tokens, sizes)[0], expected)
    cache = transformers.DynamicCache(config=made.config)
    assert_close(in_chunks(made, streaming, tokens, [4, 1, 9], cache)[0], expected)
    assert torch.equal(made(tokens, use_cache=False).logits, dense)  # outside of the context nothing is changed


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_eager_attention_with_streaming_heads(name):
    made, streaming = decoder(name, implementation="eager")
    tokens = ids(2, 14)
    found, _ = in_chunks(made, streaming, tokens, [5, 1, 1, 7])
    # Eager attention of transformers, in the first layer of Gemma 3, computes its softmax in float32.
    assert_close(found, expected_logits(made, streaming, tokens), 1e-10 if name != "gemma3" else 1e-6)


@pytest.mark.parametrize(("window", "first"), [(1, 0), (1, 3), (4, 0), (3, 1), (30, 2), (7, 30)])
def test_any_window_and_any_number_of_first_tokens(window, first):
    made, streaming = decoder(window=window, first=first)
    tokens = ids(2, 12)
    expected = expected_logits(made, streaming, tokens)
    for sizes in ([12], [1] * 12, [5, 3, 1, 3]):
        assert_close(in_chunks(made, streaming, tokens, sizes)[0], expected)


@pytest.mark.parametrize(("name", "implementation"), [("llama", "sdpa"), ("gpt2", "eager"), ("gemma3", "sdpa")])
@pytest.mark.parametrize("sizes", [[17], [4, 1, 1, 11], [9] + [1] * 8, [5] * 3 + [2]])
def test_padding_on_the_left(name, sizes, implementation):
    made, streaming = decoder(name, window=4, first=3, implementation=implementation)
    tokens = ids(4, 17)
    real = torch.arange(17) >= torch.tensor([0, 1, 6, 12])[:, None]
    positions = (real.long().cumsum(1) - 1).clamp(min=0)
    expected = expected_logits(made, streaming, tokens, real, positions)
    assert_close(in_chunks(made, streaming, tokens, sizes, real=real)[0][real], expected[real])
    options = {"attention_mask": real.long(), "position_ids": positions}
    with streaming.running(made), torch.no_grad():
        assert_close(made(tokens, use_cache=False, **options).logits[real], expected[real])


def test_padding_on_the_right_without_a_cache():
    made, streaming = decoder()
    tokens, real = ids(3, 15), torch.arange(15) < torch.tensor([15, 11, 4])[:, None]
    with streaming.running(made), torch.no_grad():
        found = made(tokens, attention_mask=real.long(), use_cache=False).logits
    assert_close(found[real], expected_logits(made, streaming, tokens, real)[real])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("gemma3", {}),
        ("qwen3", {"num_beams": 3}),
        ("gpt_neox", {"num_beams": 2, "num_return_sequences": 2}),
    ],
)
def test_generation_equals_generation_with_dense_masks(name, options):
    made, streaming = decoder(name, window=4, first=2)
    prompts = ids(2, 11)
    real = torch.arange(11) >= torch.tensor([0, 4])[:, None]
    options = {"do_sample": False, "max_new_tokens": 7, "attention_mask": real.long()} | options
    rows = options.get("num_beams", 1)

    def real_of(length):
        return torch.cat([real, torch.ones(2, length - 11, dtype=torch.bool)], 1).repeat_interleave(rows, 0)

    with streaming_oracle.oracle(streaming, real_of):
        expected = made.generate(prompts, use_cache=False, **options)
    with streaming.running(made):
        cache = streaming.cache(made)
        assert torch.equal(made.generate(prompts, past_key_values=cache, **options), expected)
        assert torch.equal(made.generate(prompts, **options), expected)
    assert cache.layers[-1].get_seq_length() == 17
    if name == "llama":
        assert not torch.equal(made.generate(prompts, **options), expected)


def stored(cache):
    """Return all tensors of keys and values in a cache."""
    names = ("keys", "values", "window_keys", "window_values")
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in names]
    return [tensor for tensor in tensors if tensor is not None]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("sizes", [[7], [8], [6, 7], [9, 1, 1]])
def test_stated_bytes_are_those_of_the_tensors(name, sizes):
    made, streaming = decoder(name)
    tokens = ids(3, sum(sizes))
    _, cache = in_chunks(made, streaming, tokens, sizes)
    dense = transformers.DynamicCache(config=made.config)
    made(tokens, past_key_values=dense)
    sizes = streaming.cache_bytes(tokens.shape[1], batch=3)
    assert sizes.dense == sum(tensor.nbytes for tensor in stored(dense))
    assert sizes.streaming == sum(tensor.nbytes for tensor in stored(cache))
    assert sizes.saved == 1 - sizes.streaming / sizes.dense
    for layer in cache.layers:
        if hasattr(layer, "window_keys"):  # freed, not only hidden behind a view
            tensors = stored(type("Cache", (), {"layers": [layer]}))
            assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == layer.nbytes


def test_a_copied_cache_continues_alone():
    made, streaming = decoder()
    tokens, others = ids(2, 19), ids(2, 19, seed=5)
    others[:, :12] = tokens[:, :12]
    _, cache = in_chunks(made, streaming, tokens, [12])
    copied = deepcopy(cache)
    with streaming.running(made), torch.no_grad():
        found = made(tokens[:, 12:], past_key_values=cache).logits
        of_others = made(others[:, 12:], past_key_values=copied).logits
    assert_close(found, expected_logits(made, streaming, tokens)[:, 12:])
    assert_close(of_others, expected_logits(made, streaming, others)[:, 12:])


def test_sequences_are_selected_and_repeated_and_a_cache_is_reset():
    made, streaming = decoder()
    tokens = ids(3, 14)
    _, cache = in_chunks(made, streaming, tokens, [11])
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    chosen = tokens[[2, 2, 0, 0]]
    with streaming.running(made), torch.no_grad():
        found = made(chosen[:, 11:], past_key_values=cache).logits
    assert_close(found, expected_logits(made, streaming, chosen)[:, 11:])
    cache.reset()
    assert_close(in_chunks(made, streaming, tokens, [14], cache)[0], expected_logits(made, streaming, tokens))


def test_what_the_cache_refuses():
    made, streaming = decoder()
    tokens = ids(2, 12)
    with pytest.raises(hw.InputError, match=r"past_key_values: expected a model that runs with these streaming heads"):
        made(tokens, past_key_values=streaming.cache(made))
    _, other = decoder(window=6)
    with other.running(made), pytest.raises(hw.InputError, match="a model that runs with these streaming heads"):
        made(tokens, past_key_values=streaming.cache(made))
    right = torch.arange(12) < torch.tensor([12, 7])[:, None]
    with streaming.running(made):
        with pytest.raises(hw.InputError, match="no padding on the right, got some; pad on the left"):
            made(tokens, attention_mask=right.long(), past_key_values=streaming.cache(made))
        between = torch.ones_like(tokens)
        between[0, 3] = 0
        with pytest.raises(hw.InputError, match="got padding between tokens"):
            made(tokens, attention_mask=between, use_cache=False)
        cache = streaming.cache(made)
        made(tokens, past_key_values=cache)
        mask = torch.ones(2, 14, dtype=torch.long)
        mask[0, :2] = 0
        with pytest.raises(hw.InputError, match="the same padding in each call"):
            made(tokens[:, :2], attention_mask=mask, past_key_values=cache)
        with pytest.raises(hw.InputError, match="a cache that is not cropped"):
            cache.crop(-1)
        with pytest.raises(hw.InputError, match="got another mask"):
            made(tokens, attention_mask=torch.ones(2, 1, 12, 12, dtype=torch.bool), use_cache=False)
        with pytest.raises(hw.InputError, match="whose heads are not restricted yet"), streaming.running(made):
            pass


def test_other_attention_functions_are_refused():
    made, streaming = decoder()
    transformers.AttentionInterface.register("of_another_library", lambda *arguments, **options: None)
    made.set_attn_implementation("of_another_library")
    expected = "implementation sdpa or eager, got of_another_library"
    with streaming.running(made), pytest.raises(hw.InputError, match=expected):
        made(ids(1, 9))


@pytest.mark.parametrize("outside", [True, False])
def test_watch_and_gate_are_refused_together_with_streaming_heads(outside):
    made, streaming = decoder()
    contexts = [lambda: hw.watch(made), lambda: streaming.running(made)]
    enter_first, enter_second = contexts if outside else contexts[::-1]
    with (
        pytest.raises(hw.InputError, match=r"without hw\.watch or hw\.gate|another library replaced"),
        enter_first(),
        enter_second(),
    ):
        made(ids(1, 9))
    assert made(ids(1, 9)).logits.isfinite().all()


def test_a_module_that_changes_cached_keys_is_refused(monkeypatch):
    made, streaming = decoder()
    update = transformers.DynamicCache.update

    def changing(self, *args, **kwargs):
        keys, values = update(self, *args, **kwargs)
        return keys * 1.0, values * 1.0

    monkeypatch.setattr(transformers.DynamicCache, "update", changing)
    with (
        streaming.running(made),
        pytest.raises(hw.InputError, match="attention to the keys and values of the cache, unchanged"),
    ):
        made(ids(1, 9), past_key_values=streaming.cache(made))
