"""Behaviour that all caches share; the output of a layer with a cache is tested in tests/nn/test_decoding.py."""

import pytest
import torch

import headwise as hw
from numbered_tokens import BATCH, CPU, append, first_sequence, numbered, static_cache

CACHES = {
    "dynamic": hw.DynamicCache,
    "sliding": lambda: hw.SlidingCache(90, sinks=2),
    "static": lambda: static_cache(capacity=90),
}
every_cache = pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)


@every_cache
def test_reorder_and_crop(make):
    cache = make()
    append(cache, 0, 3)
    cache.reorder(torch.tensor([1, 1]))
    cache.crop(2)
    step = append(cache, 5, 1)
    torch.testing.assert_close(step.tokens[:, :3], torch.tensor([[0.01, 1.01, 5.0], [0.01, 1.01, 5.01]]))
    assert step.positions[0].tolist() == [2]


@every_cache
def test_reset_empties_a_cache(make):
    cache = make()
    append(cache, 0, 3)
    cache.reset()
    step = append(cache, 7, 1)
    assert first_sequence(step) == [7]
    assert step.positions[0].tolist() == [0]


@every_cache
@torch.no_grad()
def test_an_update_that_is_never_committed_changes_nothing(make):
    """A forward pass that fails after `prepare_update` can be repeated, also with other tokens or more of them."""
    cache = make()
    append(cache, 0, 3)
    append(cache, 3, 1)
    for count in (70, 1, 5):
        cache.prepare_update(numbered(50, count), cache.next_positions(BATCH, count, None, CPU))
    step = append(cache, 4, 2)
    assert first_sequence(step) == [0, 1, 2, 3, 4, 5]
    assert step.positions[0].tolist() == [4, 5]


@torch.no_grad()
def test_an_uncommitted_update_of_a_full_sliding_cache_changes_nothing():
    cache = hw.SlidingCache(3, sinks=2)
    for number in range(20):
        for count in (1, 9):
            cache.prepare_update(numbered(50, count), cache.next_positions(BATCH, count, None, CPU))
        step = append(cache, number, 1)
        assert first_sequence(step) == [token for token in range(number + 1) if token < 2 or token > number - 3]


@torch.no_grad()
def test_an_uncommitted_update_with_lengths_changes_nothing():
    cache = static_cache()
    append(cache, 0, 2, lengths=[2, 1])
    cache.prepare_update(numbered(50, 3), cache.next_positions(BATCH, 3, [1, 3], CPU))
    step = append(cache, 2, 1)
    torch.testing.assert_close(step.tokens, torch.tensor([[0.0, 1, 2], [0.01, 2.01, 0.0]]))
    assert step.key_positions is not None
    assert step.key_positions.tolist() == [[0, 1, 2], [0, 1, -1]]


def test_repr_shows_options_and_number_of_tokens():
    caches = hw.DynamicCache(), hw.SlidingCache(3, sinks=1), static_cache()
    for cache in caches:
        append(cache, 0, 4)
    assert [repr(cache) for cache in caches] == [
        "DynamicCache(4 tokens)",
        "SlidingCache(window=3, sinks=1, 4 tokens seen)",
        "StaticCache(capacity=6, lengths=[4, 4])",
    ]


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("cache", [hw.DynamicCache(), static_cache()], ids=["dynamic", "static"])
def test_reorder_rejects_an_unusable_index(cache):
    append(cache, 0, 1)
    with pytest.raises(hw.InputError, match="^index: expected whole numbers, one .*, got torch.bool"):
        cache.reorder(torch.tensor([True, False]))
    with pytest.raises(hw.InputError, match=r"^index: expected numbers from 0 to 1, the sequences, got \[0, 2\]"):
        cache.reorder([0, 2])
