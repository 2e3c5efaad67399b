"""Fused attention whose weights cannot be read is named, also next to attention that is observed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import headwise as hw


@torch.library.custom_op("headwise_tests::mixed_attention", mutates_args=())
def custom_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of another library, as a custom operator."""
    return (q @ k.mT).softmax(-1) @ v


@torch.library.custom_op("headwise_flash_tests::fwd", mutates_args=())
def operator_of_a_library(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of another library, whose name alone shows that it is attention."""
    return (q @ k.mT).softmax(-1) @ v


class WithGradients(torch.autograd.Function):
    """The same with a gradient, as libraries define it around their operators."""

    @staticmethod
    def forward(ctx, q, k, v):
        return custom_attention(q, k, v)


FUNCTIONS = {
    "an operator of torch": torch.ops.headwise_tests.mixed_attention,
    "an overload": torch.ops.headwise_tests.mixed_attention.default,
    "a custom operator": custom_attention,
    "an operator of a library": operator_of_a_library,
    "an overload of a library": torch.ops.headwise_flash_tests.fwd.default,
    "an operator in a function with gradients": WithGradients.apply,
}


class Mixer(nn.Module):
    """Two heads' mixing of tokens by SDPA, and by another function."""

    def __init__(self, function):
        super().__init__()
        self.qkv, self.function = nn.Linear(16, 48), function

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return (F.scaled_dot_product_attention(q, k, v) + self.function(q, k, v)).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("name", FUNCTIONS)
@torch.no_grad()
def test_a_module_with_one_seen_and_one_fused_call_is_named_and_not_reported(name):
    model = nn.Sequential(Mixer(FUNCTIONS[name]), Mixer(lambda q, k, v: v))
    sentence = r"attention of these modules by (\w*attention\w*|headwise_flash_tests.fwd) cannot be read; .*: 0$"
    with pytest.warns(UserWarning, match=sentence), hw.watch(model) as heads:
        model(torch.randn(3, 16, 16))
    assert {row["module"] for row in heads.rows()} == {"1"}


@torch.no_grad()
def test_functions_that_only_prepare_attention_are_not_named():
    def attention_mask(q, k, v):
        return torch.zeros_like(v)

    model = nn.Sequential(Mixer(attention_mask))
    with hw.watch(model) as heads:
        model(torch.randn(3, 16, 16))
    assert len(heads.rows()) == 2
