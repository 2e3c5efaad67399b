"""Tokens and positions that a dynamic cache returns."""

import pytest
import torch

import headwise as hw
from numbered_tokens import append, first_sequence


def test_a_dynamic_cache_returns_every_token():
    cache = hw.DynamicCache()
    append(cache, 0, 3)
    step = append(cache, 3, 2)
    assert first_sequence(step) == [0, 1, 2, 3, 4]
    assert step.key_positions is None
    assert step.positions.tolist() == [[3, 4]]
    cache.crop(4)
    assert first_sequence(append(cache, 9, 1)) == [0, 1, 2, 3, 9]


def test_reorder_may_change_the_batch():
    cache = hw.DynamicCache()
    append(cache, 0, 2)
    cache.reorder(torch.tensor([0, 0, 1, 1]))
    assert cache.tensors is not None
    assert cache.tensors[0][:, 0, 1, 0].tolist() == pytest.approx([1, 1, 1.01, 1.01])
