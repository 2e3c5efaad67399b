"""Costs of decoding: tokens per second, and the size of the key/value cache."""

import statistics
import time

import torch
from torch import nn

from headwise.data.batches import device_of, evaluation_mode
from headwise.nn.multihead import MultiHeadAttention
from headwise.studies.model import Transformer

DECODED_TOKENS = 48
"""Number of tokens that are decoded and timed."""


def decode_speed(model: Transformer, context: int) -> float:
    """Return the decoding speed of a model in tokens per second: 1 / the median time of 48 steps. Each step processes
    one token at batch size 1, with a key/value cache that contains `context` tokens before the first step.
    """
    device = device_of(model)
    ids = torch.arange(context, device=device)[None] % model.shape.vocabulary
    caches, seconds = model.caches(), []
    with evaluation_mode(model), torch.no_grad():
        model(ids, caches=caches)
        for _ in range(DECODED_TOKENS):
            start = time.perf_counter()
            logits = model(ids[:, -1:], caches=caches)
            logits[0, -1, 0].item()  # waits for the device
            seconds.append(time.perf_counter() - start)
    return 1 / statistics.median(seconds)


def cache_bytes_per_token(model: nn.Module) -> float:
    """Return the number of bytes that one token takes in the key/value caches of all attention layers together, in the
    data type of the model's parameters.
    """
    layers = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    size = next(model.parameters()).element_size()
    return float(sum(size * layer.num_kv_heads * (layer.head_dim + layer.value_dim) for layer in layers))
