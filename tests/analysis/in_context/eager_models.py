"""Tiny causal language models in float64, with distinct heads."""

import functools

import torch
import transformers

import tiny


@functools.cache
def models(name):
    """Return a tiny Llama with grouped heads, or GPT-2."""
    sizes = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
    rotary = sizes | {"intermediate_size": 37, "max_position_embeddings": 128}
    if name == "llama":
        config = transformers.LlamaConfig(**rotary, num_key_value_heads=2, head_dim=10)
    else:
        config = transformers.GPT2Config(vocab_size=97, n_embd=48, n_layer=2, n_head=6)
    torch.manual_seed(3)
    return tiny.with_distinct_heads(transformers.AutoModelForCausalLM.from_config(config)).double()
