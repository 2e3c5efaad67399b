"""Rotation of queries and keys before attention: cases that only a whole layer reaches."""

import pytest
import torch

import headwise as hw


@pytest.mark.parametrize("offsets", [[0], [0, 0, 0]], ids=["no sequence", "two empty sequences"])
@pytest.mark.parametrize("scaling", [None, hw.DynamicNTK(2.0, 8)], ids=["unscaled", "scaled by length"])
def test_packed_input_without_tokens(offsets, scaling):
    layer = hw.MultiHeadAttention(12, 3, rotary=hw.Rotary(scaling=scaling), mask=hw.causal())
    x = torch.zeros(0, 12)
    assert layer(x, offsets=offsets).shape == (0, 12)
    assert layer(x, x, offsets=offsets, context_offsets=offsets).shape == (0, 12)
