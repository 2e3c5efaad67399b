"""Trained models in the format of Hugging Face, for everything that reads it: a Llama, or its encoder, EuroBERT."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from headwise.convert.transformers import to_transformers
from headwise.errors import InputError, require
from headwise.studies.model import EPS, Transformer

ROOM = 4
"""How many times the length that a model was trained on its configuration allows: rotary positions end nowhere."""


def save(model: Transformer, tokenizer: Any, folder: str | Path, *, context: int, labels: Sequence[str] = ()) -> None:
    """Write weights, configuration and tokenizer into a folder that `transformers` loads, in float32.

    Args:
        model: a trained one.
        tokenizer: of `transformers`.
        folder: it is made.
        context: tokens of the sequences that it was trained on.
        labels: of a classifier's classes.

    Raises:
        InputError: an encoder, and a `transformers` that does not know EuroBERT.
        MissingExtra: `transformers` is not installed.
    """
    theirs = as_transformers(model, tokenizer, context=context)
    if labels:
        theirs.config.id2label = dict(enumerate(labels))
        theirs.config.label2id = {label: number for number, label in enumerate(labels)}
    theirs.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def as_transformers(model: Transformer, tokenizer: Any, *, context: int) -> Any:
    """The same model as `transformers` has it."""
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
        "rms_norm_eps": EPS,
        "max_position_embeddings": ROOM * context,
        "tie_word_embeddings": shape.classes is None,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if shape.causal and shape.classes is None:
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    else:
        made = _encoder(transformers, sizes, shape.classes, tokenizer.mask_token_id)
    with torch.no_grad():
        for block, theirs in zip(model.layers, made.model.layers, strict=True):
            to_transformers(block.self_attn, theirs.self_attn)  # type: ignore[arg-type]
        ours = {name: tensor for name, tensor in model.state_dict().items() if ".self_attn." not in name}
        ours = {name.removeprefix("top.") if name.startswith("top.") else f"model.{name}": ours[name] for name in ours}
        left = set(made.load_state_dict(ours, strict=False).unexpected_keys)
    if left:
        raise InputError("model", expected="a Transformer as it was made", got=f"{', '.join(sorted(left))} besides")
    return made.eval()


def _encoder(transformers: Any, sizes: dict[str, Any], classes: int | None, mask_id: int | None) -> Any:
    if not hasattr(transformers, "EuroBertConfig"):
        got = f"transformers {transformers.__version__}"
        raise InputError("task", expected="lm, or a transformers that knows EuroBERT for an encoder", got=got)
    sizes |= {"classifier_pooling": "late"} | ({} if mask_id is None else {"mask_token_id": mask_id})
    if classes is None:
        return transformers.EuroBertForMaskedLM(transformers.EuroBertConfig(**sizes))
    return transformers.EuroBertForSequenceClassification(transformers.EuroBertConfig(**sizes, num_labels=classes))


def require_transformers() -> Any:
    """Import and return `transformers`."""
    return require("transformers", purpose="a model in the format of Hugging Face", extra="hf")
