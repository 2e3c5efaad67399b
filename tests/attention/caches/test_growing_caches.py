"""Tokens and positions that the dynamic and the sliding cache return, which they store, and their memory: buffers with
spare memory, written in place where that is safe.
"""

import copy
import pickle

import pytest
import torch

import headwise as hw
from numbered_tokens import BATCH, CPU, HEAD_DIM, KV_HEADS, append, first_sequence, numbered

GROWING = {"dynamic": hw.DynamicCache, "sliding": lambda: hw.SlidingCache(5, sinks=2)}
every_growing_cache = pytest.mark.parametrize("make", GROWING.values(), ids=GROWING)


def test_a_dynamic_cache_returns_every_token():
    cache = hw.DynamicCache()
    append(cache, 0, 3)
    step = append(cache, 3, 2)
    assert first_sequence(step) == [0, 1, 2, 3, 4]
    assert step.key_positions is None
    assert step.positions.tolist() == [[3, 4]]
    cache.crop(4)
    assert first_sequence(append(cache, 9, 1)) == [0, 1, 2, 3, 9]


def test_reorder_of_a_dynamic_cache_may_change_the_batch():
    cache = hw.DynamicCache()
    append(cache, 0, 2)
    cache.reorder(torch.tensor([0, 0, 1, 1]))
    assert cache.tensors is not None
    assert cache.tensors[0][:, 0, 1, 0].tolist() == pytest.approx([1, 1, 1.01, 1.01])


def test_a_sliding_cache_stores_the_window_and_the_sinks():
    cache = hw.SlidingCache(3, sinks=2)
    # The first queries of a long call still need all tokens before them.
    assert first_sequence(append(cache, 0, 7)) == [0, 1, 2, 3, 4, 5, 6]
    step = append(cache, 7, 1)
    assert first_sequence(step) == [0, 1, 5, 6, 7]
    assert step.key_positions is not None
    assert step.key_positions.tolist() == [[0, 1, 5, 6, 7]]
    assert step.positions.tolist() == [[7]]
    step = append(cache, 8, 2)
    assert step.key_positions is not None
    assert step.key_positions.tolist() == [[0, 1, 6, 7, 8, 9]]


def test_the_mask_of_a_sliding_cache_is_a_window_with_sinks():
    assert str(hw.SlidingCache(3, sinks=2).mask) == str(hw.window(3) | hw.causal() & hw.prefix(2))


def test_dropped_tokens_use_no_memory():
    cache = hw.SlidingCache(3)
    append(cache, 0, 100)
    assert cache.tensors is not None
    stored = cache.tensors[0]
    assert stored.shape[2] == 2
    assert stored.untyped_storage().nbytes() == stored.numel() * stored.element_size()


def test_a_window_of_one_stores_nothing():
    cache = hw.SlidingCache(1)
    append(cache, 0, 4)
    assert first_sequence(append(cache, 4, 1)) == [4]


def test_crop_rejects_lengths_whose_tokens_have_been_dropped():
    cache = hw.SlidingCache(2)
    append(cache, 0, 5)
    with pytest.raises(hw.InputError, match="^length: expected 5 or more: a sliding cache has dropped .*, got 4"):
        cache.crop(4)


def test_a_window_of_zero_is_rejected():
    with pytest.raises(hw.InputError, match="^window: expected a whole number of 1 or more, got 0"):
        hw.SlidingCache(0)


def storage_tokens(tensor: torch.Tensor) -> int:
    """Return how many tokens the memory of a tensor of float32 keys has space for."""
    return tensor.untyped_storage().nbytes() // (BATCH * KV_HEADS * HEAD_DIM * 4)


def assert_same_with_and_without_gradients(make, steps):
    """Check that writing into buffers, without gradients, returns the same tokens as copying, with gradients."""
    with torch.no_grad():
        written = steps(make())
    with torch.enable_grad():
        copied = steps(make())
    assert len(written) == len(copied)
    for got, expected in zip(written, copied, strict=True):
        assert torch.equal(got, expected)


@every_growing_cache
def test_writing_into_buffers_returns_the_same_as_copying(make):
    def steps(cache):
        returned, first = [], 0
        for count in [3, *[1] * 150, 0, 2, 40, 1, 1, 400, *[1] * 9]:
            tokens, key_positions, _ = append(cache, first, count)
            returned += [tokens, torch.arange(tokens.shape[1])[None] if key_positions is None else key_positions]
            first += count
            if count == 40:
                cache.reorder([1, 0])
        return returned

    assert_same_with_and_without_gradients(make, steps)


def test_crops_between_steps_return_the_same_as_copying():
    def steps(cache):
        returned, first = [], 0
        for count, crop in ((5, 9), (3, 6), (2, 0), (4, 4), (1, 2), (70, 50), (1, 51)):
            returned.append(append(cache, first, count).tokens)
            cache.crop(crop)
            first += count
        return returned

    assert_same_with_and_without_gradients(hw.DynamicCache, steps)
    assert_same_with_and_without_gradients(lambda: hw.SlidingCache(100), steps)


@torch.no_grad()
def test_appending_tokens_rarely_moves_the_stored_ones():
    cache = hw.DynamicCache()
    append(cache, 0, 100)
    moves, before = 0, None
    for token in range(100, 1000):
        append(cache, token, 1)
        moves += cache.tensors[0].data_ptr() != before
        before = cache.tensors[0].data_ptr()
    assert moves == 6  # 64 spare tokens, then half as many again: 165, 249, 375, 564, 847, 1272
    assert cache.buffers[0].shape[2] == 1272


@torch.no_grad()
def test_memory_of_a_sliding_cache_is_bounded():
    cache = hw.SlidingCache(100, sinks=3)
    largest = 0
    for token in range(1000):
        append(cache, token, 1)
        largest = max(largest, storage_tokens(cache.tensors[0]))
    assert largest <= 1.5 * 103 + 64


@every_growing_cache
@torch.no_grad()
def test_copies_share_no_memory(make):
    for duplicate in (copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))):
        cache = make()
        append(cache, 0, 3)
        append(cache, 3, 1)
        other = duplicate(cache)
        append(cache, 4, 1)
        assert first_sequence(append(other, 7, 1)) == [0, 1, 2, 3, 7]
        assert first_sequence(append(cache, 5, 1)) == [0, 1, 2, 3, 4, 5]
        if isinstance(cache, hw.DynamicCache):
            cache.crop(2)
        else:
            cache.reset()
        append(cache, 8, 2)
        assert first_sequence(append(other, 9, 1)) == [0, 1, 2, 3, 7, 9]
        assert duplicate(make()).token_count == 0


@torch.no_grad()
def test_a_copy_has_no_spare_memory():
    cache = hw.DynamicCache()
    append(cache, 0, 1000)
    append(cache, 1000, 1)
    for tensor in copy.copy(cache).tensors:
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_tensors_of_a_pending_gradient_are_never_overwritten():
    """One step with gradients, after steps without, and then a crop and new tokens in place of its tokens."""
    cache = hw.DynamicCache()
    with torch.no_grad():
        append(cache, 0, 2)
        append(cache, 2, 1)
    keys, values = (tensor.clone().requires_grad_() for tensor in numbered(3, 2))
    update = cache.prepare_update((keys, values), cache.next_positions(BATCH, 2, None, CPU))
    cache.commit(update)
    y = (update.tensors[0].exp() ** 2).sum() + (update.tensors[1] ** 2).sum()
    with torch.no_grad():
        cache.crop(3)
        assert first_sequence(append(cache, 7, 1)) == [0, 1, 2, 7]
        assert first_sequence(append(cache, 8, 1)) == [0, 1, 2, 7, 8]
    gradients = torch.autograd.grad(y, (keys, values))
    torch.testing.assert_close(gradients[0], 2 * keys.detach().exp() ** 2)
    torch.testing.assert_close(gradients[1], 2 * values.detach())


@torch.no_grad()
def test_tensors_of_the_first_call_are_never_overwritten():
    cache = hw.DynamicCache()
    passed = tuple(tensor.clone() for tensor in numbered(0, 4))
    cache.commit(cache.prepare_update(passed, cache.next_positions(BATCH, 4, None, CPU)))
    cache.crop(1)
    append(cache, 9, 2)
    assert all(torch.equal(now, before) for now, before in zip(passed, numbered(0, 4), strict=True))


def test_buffers_of_inference_mode_are_only_written_in_it():
    cache = hw.DynamicCache()
    with torch.inference_mode():
        append(cache, 0, 2)
        append(cache, 2, 1)
    with torch.no_grad():
        append(cache, 3, 1)
        assert first_sequence(append(cache, 4, 1)) == [0, 1, 2, 3, 4]
    with torch.inference_mode():
        assert first_sequence(append(cache, 5, 1)) == [0, 1, 2, 3, 4, 5]
    assert first_sequence(append(cache, 6, 1)) == [0, 1, 2, 3, 4, 5, 6]


@torch.no_grad()
def test_nothing_is_written_in_place_under_vmap():
    cache = hw.DynamicCache()
    append(cache, 0, 2)
    append(cache, 2, 1)
    cache.tensors, cache.buffers = (cache.tensors[0],) * 2, (cache.buffers[0],) * 2

    def tensors_with(key):
        return cache.prepare_update((key, key), torch.tensor([[3]])).tensors[0]

    keys = torch.stack([numbered(first, 1)[0] for first in (5, 7)])
    assert torch.vmap(tensors_with)(keys)[:, 0, 0, :, 0].tolist() == [[0, 1, 2, 5], [0, 1, 2, 7]]


@pytest.mark.parametrize("make", [hw.DynamicCache, lambda: hw.SlidingCache(2)], ids=["dynamic", "sliding"])
def test_calls_that_do_not_fit_are_rejected(make):
    cache = make()
    append(cache, 0, 5)
    with pytest.raises(hw.InputError, match="^x: expected the batch of 2 that the cache holds, got a batch of 4"):
        cache.prepare_update(tuple(tensor.repeat(2, 1, 1, 1) for tensor in numbered(5, 1)), torch.tensor([[5]]))
    with pytest.raises(hw.InputError, match="^lengths: expected a StaticCache, .*, got .*Cache"):
        cache.next_positions(BATCH, 1, [1, 1], CPU)
    with pytest.raises(hw.InputError, match="^length: expected a whole number of 0 or more, got -1"):
        cache.crop(-1)


@pytest.mark.usefixtures("as_user")
def test_tensors_of_another_layer_are_rejected():
    cache = hw.DynamicCache()
    append(cache, 0, 1)
    other_widths = tuple(torch.zeros(BATCH, KV_HEADS, 1, HEAD_DIM) for _ in range(2))
    with pytest.raises(hw.InputError, match=r"^cache: expected heads, .*\(3, 5, .*; a cache belongs to one"):
        cache.prepare_update(other_widths, torch.tensor([[1]]))
    other_device = tuple(tensor.to("meta") for tensor in numbered(0, 1))
    with pytest.raises(hw.InputError, match="^cache: expected tensors on meta like the layer, got cpu"):
        cache.prepare_update(other_device, torch.tensor([[1]]))
