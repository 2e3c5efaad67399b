"""`watch` and `gate` keep nothing of the layers that have ended in memory while a model runs."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import headwise as hw

LENGTH, WIDTH, HEADS, LAYERS = 64, 32, 4, 6


class Attention(nn.Module):
    """Attention by a function of queries, keys and values, and a sum with its input."""

    def __init__(self, attend):
        super().__init__()
        self.attend, self.qkv, self.out_proj = attend, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.out_proj(self.attend(q, k, v).transpose(1, 2).flatten(2))


LAYER_KINDS = {
    "sdpa": lambda: Attention(F.scaled_dot_product_attention),
    "softmax": lambda: Attention(lambda q, k, v: (q @ k.mT).softmax(-1) @ v),
    "torch": lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH, batch_first=True, norm_first=True),
}
CONTEXTS = {
    "watch": hw.watch,
    "gate": lambda model: hw.gate(model, {(0, 1): 0.5}),
}


@pytest.mark.parametrize("context", ["watch", pytest.param("gate", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", LAYER_KINDS)
@torch.no_grad()
def test_nothing_of_a_layer_stays_in_memory_after_it(kind, context):
    gc.collect()
    gc.freeze()  # leaves the objects of all modules and earlier tests out of what follows
    torch.manual_seed(0)
    model = nn.Sequential(*(LAYER_KINDS[kind]() for _ in range(LAYERS))).train()
    counts = []

    def count(*_):
        gc.collect()
        tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
        counts.append(sum(each.numel() >= 2 * LENGTH * WIDTH for each in tensors))

    for layer in model:
        layer.register_forward_pre_hook(count)
    with CONTEXTS[context](model):
        model(torch.randn(2, LENGTH, WIDTH))
    assert counts[2:] == [counts[2]] * (LAYERS - 2)
