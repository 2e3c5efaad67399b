"""Models of `transformers` in which every attention block is replaced by our layer with the same weights."""

from collections.abc import Callable

import torch
from torch import nn

import headwise as hw


class OurAttention(nn.Module):
    """Module with the signature of `LlamaAttention` that calls our layer with our cache.

    The angles and the mask of the model are ignored, because the layer computes its own. A cache of the model gets
    placeholder keys, so that `generate` can count the tokens.
    """

    def __init__(self, layer: hw.MultiHeadAttention, layer_idx: int):
        super().__init__()
        self.layer = layer
        self.layer_idx = layer_idx
        self.cache = None

    def forward(
        self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs
    ) -> tuple[torch.Tensor, None]:
        if past_key_values is not None:
            count = hidden_states.new_zeros(hidden_states.shape[0], 1, hidden_states.shape[1], 1)
            past_key_values.update(count, count, self.layer_idx)
        return self.layer(hidden_states, cache=self.cache), None


def swap_attention(model: nn.Module) -> list[OurAttention]:
    """Replace every `self_attn` of a decoder by our layer; return the new modules in the order of the layers."""
    swapped = []
    for decoder_layer in model.model.layers:
        block = decoder_layer.self_attn
        decoder_layer.self_attn = OurAttention(hw.from_transformers(block), block.layer_idx)
        swapped.append(decoder_layer.self_attn)
    return swapped


def give_caches(swapped: list[OurAttention], make: Callable[[hw.MultiHeadAttention], object] | None) -> None:
    """Give each layer a new, empty cache, or none."""
    for attention in swapped:
        attention.cache = None if make is None else make(attention.layer)


@torch.no_grad()
def greedy(model: nn.Module, prompt: torch.Tensor, *, new: int, piece: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a prompt in pieces and generate `new` tokens greedily, with the caches of the layers.

    Returns all tokens, `(1, prompt + new)`, and the logits of every token but the last.
    """
    tokens, logits, seen = prompt, [], 0
    while tokens.shape[1] < prompt.shape[1] + new:
        end = min(seen + piece, tokens.shape[1])
        logits.append(model(tokens[:, seen:end], use_cache=False).logits)
        seen = end
        if seen == tokens.shape[1]:
            tokens = torch.cat([tokens, logits[-1][:, -1:].argmax(-1)], dim=1)
    return tokens, torch.cat(logits, dim=1)
