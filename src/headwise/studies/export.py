"""Export of trained models in Hugging Face format: a Llama, or for encoders a EuroBERT."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from headwise.convert.transformers import to_transformers
from headwise.errors import InputError, require
from headwise.studies.model import NORM_EPS, Transformer

POSITIONS_FACTOR = 4
"""Positions in the saved configuration, as a multiple of the training context; rotary positions have no limit."""


def save_model(
    model: Transformer, tokenizer: Any, folder: str | Path, *, context: int, labels: Sequence[str] = ()
) -> None:
    """Save a trained study model in float32, with its configuration and tokenizer, to a folder in Hugging Face format.
    `transformers` loads it as a Llama if it is a decoder, as a EuroBERT if it is an encoder or a classifier.

    Args:
        model: a trained model.
        tokenizer: a `transformers` tokenizer.
        folder: folder that is created.
        context: tokens per training sequence.
        labels: labels of a classifier's classes.

    Raises:
        InputError: the model is an encoder, and this version of `transformers` has no EuroBERT.
        MissingExtra: `transformers` is not installed.
    """
    converted = as_transformers(model, tokenizer, context=context)
    if labels:
        converted.config.id2label = dict(enumerate(labels))
        converted.config.label2id = {label: number for number, label in enumerate(labels)}
    converted.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def as_transformers(model: Transformer, tokenizer: Any, *, context: int) -> Any:
    """Convert a study model to a `transformers` model with the same weights, and return it in evaluation mode: a Llama
    for a decoder, a EuroBERT for an encoder or a classifier.
    """
    transformers = require_transformers()
    shape, setting = model.shape, model.setting
    sizes: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.embed_dim,
        "intermediate_size": model.mlp_dim,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": setting.num_heads,
        "num_key_value_heads": setting.num_kv_heads,
        "head_dim": setting.head_dim,
        "rms_norm_eps": NORM_EPS,
        "max_position_embeddings": POSITIONS_FACTOR * context,
        "tie_word_embeddings": shape.classes is None,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if shape.causal and shape.classes is None:
        converted = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    elif not hasattr(transformers, "EuroBertConfig"):
        got = f"transformers {transformers.__version__}"
        raise InputError("task", expected="lm, or for an encoder a transformers version with EuroBERT", got=got)
    else:
        sizes["classifier_pooling"] = "late"
        if tokenizer.mask_token_id is not None:
            sizes["mask_token_id"] = tokenizer.mask_token_id
        if shape.classes is None:
            converted = transformers.EuroBertForMaskedLM(transformers.EuroBertConfig(**sizes))
        else:
            config = transformers.EuroBertConfig(**sizes, num_labels=shape.classes)
            converted = transformers.EuroBertForSequenceClassification(config)
    with torch.no_grad():
        for layer, converted_layer in zip(model.layers, converted.model.layers, strict=True):
            to_transformers(layer.self_attn, converted_layer.self_attn)  # type: ignore[arg-type]
        state = {
            name.removeprefix("top.") if name.startswith("top.") else f"model.{name}": tensor
            for name, tensor in model.state_dict().items()
            if ".self_attn." not in name
        }
        unexpected = set(converted.load_state_dict(state, strict=False).unexpected_keys)
    if unexpected:
        got = f"additional parameters {', '.join(sorted(unexpected))}"
        raise InputError("model", expected="a Transformer without changes", got=got)
    return converted.eval()


def require_transformers() -> Any:
    """Import and return the package transformers, or raise `MissingExtra` if it is not installed."""
    return require("transformers", purpose="a model in Hugging Face format", extra="hf")
