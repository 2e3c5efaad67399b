"""Attention weights of models of transformers in float64, with the whole matrix kept, for tests."""

import math
from contextlib import contextmanager

import torch
import torch.nn.functional as F


@contextmanager
def kept_weights():
    """Yield a list of the attention weights `(batch, heads, queries, keys)` of each attention call, in their order.

    Models must run with the attention implementation "sdpa". The weights are computed from its arguments.
    """
    original, kept = F.scaled_dot_product_attention, []

    def computed(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if enable_gqa or key.shape[1] != query.shape[1]:
            key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
        scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        weights = scores.softmax(-1)
        kept.append(weights.detach())
        return weights.nan_to_num(0.0) @ value

    F.scaled_dot_product_attention = computed
    try:
        yield kept
    finally:
        F.scaled_dot_product_attention = original


@torch.no_grad()
def weights_of(model, ids, **arguments):
    """Return the attention weights of each layer of a model, `(layers, batch, heads, queries, keys)`."""
    with kept_weights() as kept:
        model(ids, **arguments)
    return torch.stack(kept)
