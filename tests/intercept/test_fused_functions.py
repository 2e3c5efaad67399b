"""Fused attention whose weights cannot be read is named, also next to attention that is observed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import headwise as hw


@torch.library.custom_op("headwise_tests::mixed_attention", mutates_args=())
def custom_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of another library, as a custom operator."""
    return (q @ k.mT).softmax(-1) @ v


FUNCTIONS = {
    "flex_attention": flex_attention,
    "an operator of torch": lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0],
    "an overload": lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v)[0],
    "a custom operator": custom_attention,
}


class Mixer(nn.Module):
    """Two heads' mixing of tokens by SDPA, and by another function."""

    def __init__(self, function):
        super().__init__()
        self.qkv, self.function = nn.Linear(16, 48), function

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return (F.scaled_dot_product_attention(q, k, v) + self.function(q, k, v)).transpose(1, 2).flatten(2)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", FUNCTIONS)
@torch.no_grad()
def test_a_module_with_one_seen_and_one_fused_call_is_named_and_not_reported(name):
    model = nn.Sequential(Mixer(FUNCTIONS[name]), Mixer(lambda q, k, v: v))
    sentence = r"attention of these modules by \w*attention\w* cannot be read; .*: 0$"
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
