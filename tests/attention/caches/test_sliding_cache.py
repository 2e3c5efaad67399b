"""Tokens and positions that a sliding cache returns, and which of them it stores."""

import pytest

import headwise as hw
from numbered_tokens import append, first_sequence


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


def test_its_mask_is_a_window_with_sinks():
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
