"""What heads cost when a decoder writes: tokens a second, and the cache they leave."""

import statistics
import time

import torch
from torch import nn

from headwise.data.batches import device_of, evaluation_mode
from headwise.nn.multihead import MultiHeadAttention
from headwise.studies.model import Transformer

WRITTEN = 48
"""Tokens that are written one by one, and timed."""


def decoding(model: Transformer, context: int) -> float:
    """Tokens a second that a model writes after a context, alone in its batch: 1 / the median time of a step."""
    device = device_of(model)
    ids = torch.arange(context, device=device)[None] % model.shape.vocabulary
    caches, seconds = model.caches(), []
    with evaluation_mode(model), torch.no_grad():
        model(ids, caches=caches)
        for _ in range(WRITTEN):
            start = time.perf_counter()
            logits = model(ids[:, -1:], caches=caches)
            logits[0, -1, 0].item()  # waits for the device
            seconds.append(time.perf_counter() - start)
    return 1 / statistics.median(seconds)


def cache_bytes(model: nn.Module) -> float:
    """Bytes that all layers keep of a token: its keys and values."""
    layers = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    size = next(model.parameters()).element_size()
    return float(sum(size * layer.num_kv_heads * (layer.head_dim + layer.value_dim) for layer in layers))
