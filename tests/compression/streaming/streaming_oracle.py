"""Tiny decoders, and an oracle for streaming heads: eager attention with one dense mask per head, in float64."""

from contextlib import contextmanager
from copy import deepcopy
from unittest import mock

import torch
import transformers

import tiny
from headwise.compression.streaming.streaming_attention import LocalizedModule
from headwise.compression.streaming.streaming_heads import StreamingHeads

ROTARY = {
    "vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 37,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "llama": transformers.LlamaConfig(**ROTARY, num_key_value_heads=2, head_dim=10),
    "mistral": transformers.MistralConfig(**ROTARY, num_key_value_heads=3, sliding_window=None),
    "qwen3": transformers.Qwen3Config(**ROTARY, num_key_value_heads=3, head_dim=10),
    "gemma3": transformers.Gemma3TextConfig(
        **ROTARY, num_key_value_heads=2, head_dim=10, sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    ),
    "phi": transformers.PhiConfig(**ROTARY),
    "phi3": transformers.Phi3Config(**ROTARY, num_key_value_heads=2),
    "gpt_neox": transformers.GPTNeoXConfig(**ROTARY),
    "gpt2": transformers.GPT2Config(
        vocab_size=97, n_embd=48, n_layer=3, n_head=6, bos_token_id=1, eos_token_id=2, pad_token_id=0
    ),
}  # fmt: skip


def model(name, implementation="sdpa"):
    """Return a tiny decoder with random weights in float64."""
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(deepcopy(CONFIGS[name]), attn_implementation=implementation)
    made = tiny.with_distinct_heads(made).double().eval()
    made.generation_config.eos_token_id = None  # so that generation has the length that a test chooses
    return made


def ids(rows, tokens, seed=3):
    """Return random tokens."""
    return torch.randint(3, 97, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def streaming_heads(made, window, first, pattern):
    """Return streaming heads of a decoder: for each layer the key/value heads in `pattern`."""
    modules = []
    paths = [path for path, module in made.named_modules() if isinstance(getattr(module, "layer_idx", None), int)]
    paths = [path for path in paths if path.rpartition(".")[2] in ("self_attn", "attention", "attn")]
    config = made.config
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer, (path, kind) in enumerate(zip(paths, types, strict=True)):
        own = config.sliding_window if kind == "sliding_attention" else None
        heads = () if own else tuple(head for head in pattern[layer] if head < kv_heads)
        modules.append(
            LocalizedModule(layer, path, config.num_attention_heads, kv_heads, 2 * width, "float64", own, heads)
        )
    return StreamingHeads(tuple(modules), window, first, 0.01, (1.0, 1.0), (1.0, 1.0), 1, 1, False)


def decoder(name="llama", window=5, first=2, implementation="sdpa", pattern=((0, 2, 5), (1,), (0, 1, 2, 3, 4, 5))):
    """Return a tiny decoder, and streaming heads of it."""
    made = model(name, implementation)
    return made, streaming_heads(made, window, first, pattern)


def head_mask(streaming, module, real):
    """Return the mask `(batch, heads, tokens, tokens)` of each head of a module, for tokens where `real` is True."""
    batch, tokens = real.shape
    mask = torch.zeros(batch, module.num_heads, tokens, tokens, dtype=torch.bool)
    for b in range(batch):
        number = real[b].long().cumsum(0) - 1
        for head in range(module.num_heads):
            streams = head // (module.num_heads // module.num_kv_heads) in module.streaming
            for i in range(tokens):
                for j in range(i + 1):
                    inside = number[i] - number[j] < streaming.window or number[j] < streaming.first
                    if module.own_window is not None and i - j >= module.own_window:
                        continue
                    mask[b, head, i, j] = bool(real[b, j]) and (not streams or bool(inside))
    return mask


@contextmanager
def oracle(streaming, real_of):
    """Compute all attention of `transformers` with dense masks. `real_of` returns a mask of tokens `(batch, tokens)`
    from their number, and the run must have no cache.
    """
    by_layer = {module.layer: module for module in streaming.modules}
    masks = {}

    def attention(module, query, key, value, attention_mask, scaling=None, **options):
        layer = by_layer[module.layer_idx]
        group = layer.num_heads // layer.num_kv_heads
        tokens = query.shape[2]
        assert key.shape[2] == tokens
        real = real_of(tokens).expand(query.shape[0], -1)
        mask = masks.setdefault((layer.layer, real.shape), head_mask(streaming, layer, real))
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
        return (weights @ value).transpose(1, 2).contiguous(), None

    with mock.patch.object(transformers.AttentionInterface, "get_interface", return_value=attention):
        yield


def expected_logits(made, streaming, tokens, real=None, positions=None):
    """Return the logits of a decoder with dense masks."""
    real = torch.ones_like(tokens, dtype=torch.bool) if real is None else real
    with torch.no_grad(), oracle(streaming, lambda length: real[:, :length]):
        return made(tokens, use_cache=False, **({} if positions is None else {"position_ids": positions})).logits


def assert_close(found, expected, tolerance=1e-10):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@torch.no_grad()
def in_chunks(made, cache, tokens, sizes, real=None):
    """Return the logits of tokens that are read in chunks of these sizes, with a mask of tokens."""
    logits, start = [], 0
    for size in sizes:
        options = {} if real is None else {"attention_mask": real[:, : start + size].long()}
        if real is not None:
            positions = (real.long().cumsum(1) - 1).clamp(min=0)
            options["position_ids"] = positions[:, start : start + size]
        logits.append(made(tokens[:, start : start + size], past_key_values=cache, **options).logits)
        start += size
    return torch.cat(logits, 1)
