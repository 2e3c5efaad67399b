"""Tiny random language models in float64, and their head outputs by plain forward hooks, for tests of patching."""

import math
from contextlib import contextmanager

import pytest
import torch
import transformers

KINDS = ("llama", "gpt2", "bert")
KINDS_AND_DIRECTIONS = [
    pytest.param(kind, way, marks=() if (way == "noise") == (kind == "gpt2") else pytest.mark.slow)
    for kind in KINDS
    for way in ("denoise", "noise")
]
"""Each kind with each direction of patching; by default each kind with one of them."""

HEADS, LAYERS = 6, 3
CLEAN, CORRUPTED = torch.randint(5, 97, (2, 3, 11), generator=torch.Generator().manual_seed(3))
ANSWER, WRONG = torch.tensor([[7, 11, 13], [17, 19, 23]])
ASKED = {"answer": ANSWER, "wrong": WRONG}
PADDED = {
    "left": ((torch.arange(11) >= torch.tensor([[0], [4], [6]])).long(), (10, 10, 10)),
    "right": ((torch.arange(11) < torch.tensor([[11], [7], [5]])).long(), (10, 6, 4)),
}
"""Padding masks of the prompts by side, with the position of each prompt's last token."""


def causal(kind="llama", seed=0):
    """Return a causal language model with 2 layers of 6 heads."""
    sizes = {"vocab_size": 97, "num_hidden_layers": 2, "num_attention_heads": 6, "hidden_size": 48}
    torch.manual_seed(seed)
    if kind == "llama":
        config = transformers.LlamaConfig(**sizes, intermediate_size=37, num_key_value_heads=2, head_dim=10)
    else:
        config = transformers.GPT2Config(vocab_size=97, n_embd=48, n_layer=2, n_head=6)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def language_model(kind, seed=0, implementation="sdpa", std=0.2, **options):
    """Return Llama with 3 query heads for each key/value head, GPT-2, or BERT with logits of masked words: 3 layers of
    6 heads. With weights of this standard deviation, heads have large effects.
    """
    torch.manual_seed(seed)
    sizes = {"vocab_size": 97, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_size": 48}
    if kind == "llama":
        sizes |= {"intermediate_size": 37, "num_key_value_heads": 2, "head_dim": 10}
        config = transformers.LlamaConfig(**sizes | options)
    elif kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=97, n_embd=48, n_layer=LAYERS, n_head=HEADS, **options)
    else:
        config = transformers.BertConfig(**sizes, intermediate_size=37, max_position_embeddings=64, **options)
    config._attn_implementation = implementation
    auto = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
    model = auto.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=std)
    if kind == "llama":
        use_float64_norms(model)
    return model.double().eval()


def use_float64_norms(model):
    """Replace the norms of Llama, which compute in float32 at most, by those of torch."""
    for layer in model.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = torch.nn.RMSNorm(48, 1e-6), torch.nn.RMSNorm(48, 1e-6)
    model.model.norm = torch.nn.RMSNorm(48, 1e-6)


def projections(model):
    """Return the output projection of each layer, whose input is the outputs of the layer's heads, side by side."""
    kind = model.config.model_type
    if kind == "llama":
        return [layer.self_attn.o_proj for layer in model.model.layers]
    if kind == "gpt2":
        return [layer.attn.c_proj for layer in model.transformer.h]
    return [layer.attention.output.dense for layer in model.bert.encoder.layer]


def split(features):
    """Split `(batch, length, heads * width)` into heads."""
    return features.unflatten(-1, (HEADS, -1))


@contextmanager
def changed_outputs(model, change):
    """Replace the outputs of the heads of each layer, `(batch, length, heads, width)`, by `change(layer, outputs)`."""

    def hook_of(layer):
        return lambda _, args: (change(layer, split(args[0])).flatten(-2), *args[1:])

    hooks = [part.register_forward_pre_hook(hook_of(layer)) for layer, part in enumerate(projections(model))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def difference(model, ids, **inputs):
    """Return the logit of each right answer minus that of the wrong one, at the last token."""
    logits = model(ids, **inputs).logits[:, -1]
    return (logits.gather(1, ANSWER[:, None]) - logits.gather(1, WRONG[:, None]))[:, 0]


@torch.no_grad()
def outputs_of(model, ids):
    """Return the outputs of the heads of each layer, in one run."""
    found = {}
    with changed_outputs(model, found.setdefault):
        model(ids)
    return [found[layer] for layer in range(LAYERS)]


@torch.no_grad()
def scale(model, direction):
    """Return the prompts that patched values come from, the patched prompts, and the function from a difference of
    logits to `recovered`.
    """
    low, high = difference(model, CORRUPTED), difference(model, CLEAN)
    source, destination = (CLEAN, CORRUPTED) if direction == "denoise" else (CORRUPTED, CLEAN)
    return source, destination, lambda patched: (patched - low) / (high - low)


def require_values(row, differences, to_recovered):
    """Compare the means and standard errors of a row of patching with the differences of logits of each pair."""
    for name, expected in (("difference", differences), ("recovered", to_recovered(differences))):
        found = row.statistics[name]
        assert found.value == pytest.approx(expected.mean().item(), abs=1e-10)
        assert found.sem == pytest.approx((expected.std() / math.sqrt(len(expected))).item(), abs=1e-10)
        assert found.n == 3
