"""Tiny models of each family of which heads can be removed, and inputs for them."""

from copy import deepcopy

import torch
import transformers

import headwise as hw
import tiny

SIZES = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
ROTARY = SIZES | {"intermediate_size": 37, "max_position_embeddings": 64}
PAIR = {
    "vocab_size": 97, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 6,
    "decoder_attention_heads": 6, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37,
}  # fmt: skip
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}

CONFIGS = {
    "llama": transformers.LlamaConfig(**ROTARY, num_key_value_heads=2, head_dim=10, attention_bias=True),
    "mistral": transformers.MistralConfig(**ROTARY, num_key_value_heads=3, sliding_window=4),
    "qwen2": transformers.Qwen2Config(**ROTARY, num_key_value_heads=2),
    "qwen3": transformers.Qwen3Config(**ROTARY, num_key_value_heads=2, head_dim=10),
    "gemma2": transformers.Gemma2Config(**ROTARY, num_key_value_heads=2, head_dim=10),
    "gemma3": transformers.Gemma3TextConfig(**ROTARY, num_key_value_heads=2, head_dim=10),
    "phi": transformers.PhiConfig(**ROTARY),
    "phi3": transformers.Phi3Config(**ROTARY, num_key_value_heads=2, pad_token_id=0, **SPECIAL),
    "gpt2": transformers.GPT2Config(vocab_size=97, n_embd=48, n_layer=2, n_head=6, **SPECIAL),
    "gpt_neox": transformers.GPTNeoXConfig(**ROTARY),
    "bert": transformers.BertConfig(**SIZES, intermediate_size=37),
    "roberta": transformers.RobertaConfig(**SIZES, intermediate_size=37),
    "xlm-roberta": transformers.XLMRobertaConfig(**SIZES, intermediate_size=37),
    "camembert": transformers.CamembertConfig(**SIZES, intermediate_size=37),
    "electra": transformers.ElectraConfig(**SIZES, intermediate_size=37, embedding_size=48),
    "eurobert": transformers.EuroBertConfig(**ROTARY, num_key_value_heads=2, head_dim=10, pad_token_id=0, **SPECIAL),
    "t5": transformers.T5Config(vocab_size=97, d_model=48, num_layers=2, num_heads=6, d_kv=11, d_ff=37),
    "bart": transformers.BartConfig(**PAIR),
    "vit": transformers.ViTConfig(**{**SIZES, "vocab_size": None}, intermediate_size=37, image_size=32, patch_size=8),
    "whisper": transformers.WhisperConfig(
        **PAIR, max_source_positions=10, pad_token_id=0, decoder_start_token_id=1, **SPECIAL
    ),
}

IN_TRANSFORMERS = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi", "phi3", "eurobert", "vit", "t5")
"""Families whose configuration can state equally many heads in each module."""


def inputs(name: str, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Return arguments of the model of a family."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 97, (2, 13), generator=generator)
    if name in ("t5", "bart"):
        return {"input_ids": ids, "decoder_input_ids": ids[:, :9]}
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator, dtype=dtype)}
    if name == "whisper":
        features = torch.randn(2, 80, 20, generator=generator, dtype=dtype)
        return {"input_features": features, "decoder_input_ids": ids[:, :9]}
    return {"input_ids": ids}


def model(name: str, auto: type = transformers.AutoModel) -> torch.nn.Module:
    """Return the tiny model of a family in float64."""
    torch.manual_seed(0)
    return tiny.with_distinct_heads(auto.from_config(deepcopy(CONFIGS[name]))).double()


@torch.no_grad()
def output(model: torch.nn.Module, arguments: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the output of a model, or the first of its outputs."""
    found = model(**arguments)
    return found if isinstance(found, torch.Tensor) else found[0]


def assert_gated(pruned: torch.nn.Module, dense: torch.nn.Module, gates: dict, arguments: dict) -> None:
    """Check that a model returns what another one does with these gates."""
    with hw.gate(dense, gates):
        expected = output(dense, arguments)
    assert (output(pruned, arguments) - expected).abs().max() <= 1e-12 * expected.abs().max()
