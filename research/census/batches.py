"""Batches for one model type: the same sequences alone, together, and padded on either side."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from research.tiny_models.inputs import BATCH, DECODER_LENGTH, LENGTH, attempts

SHORTER = 4
"""Number of padded tokens of the last sequence, in the encoder and in the decoder."""
STREAMS = {"": LENGTH, "decoder_": DECODER_LENGTH}
"""Length of each stream of tokens, by the prefix of its arguments. All lengths differ."""


@dataclass(frozen=True)
class Batch:
    """Arguments of a model, and which of their tokens are real.

    Attributes:
        name: name of the run.
        inputs: arguments by name.
        real: for each number of tokens that a stream has, True for the real tokens, `(batch, tokens)`.
        tokens: for each number of tokens, the ids `(batch, tokens)`.
    """

    name: str
    inputs: dict[str, Any]
    real: dict[int, Tensor]
    tokens: dict[int, Tensor]

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return next(iter(self.real.values())).shape[0] if self.real else BATCH


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Return arguments with all floating tensors in a dtype."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value.clone()
    if isinstance(value, dict):
        return {name: in_dtype(part, dtype) for name, part in value.items()}
    return value


def unpadded(model_type: str, model: nn.Module) -> Iterator[Batch]:
    """Yield batches without padding, one of which the model may accept."""
    for inputs in attempts(model_type, model, None):
        yield _batch("unpadded", inputs)


def _batch(name: str, inputs: dict[str, Any]) -> Batch:
    real, tokens = {}, {}
    for prefix, length in STREAMS.items():
        ids = inputs.get(f"{prefix}input_ids")
        if isinstance(ids, Tensor) and ids.dim() in (2, 3) and ids.shape[1] == length:
            mask = inputs.get(f"{prefix}attention_mask")
            if ids.dim() == 2:  # otherwise each place has several tokens, as of sound
                tokens[length] = ids
            real[length] = torch.ones(ids.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
    return Batch(name, inputs, real, tokens)


def padded(batch: Batch, model: nn.Module) -> Iterator[Batch]:
    """Yield the batch with padding in its last sequence: each stream on each side, and both streams on the right."""
    signature = inspect.signature(model.forward).parameters
    streams = [prefix for prefix in STREAMS if _can_pad(batch, prefix, signature)]
    for prefix in streams:
        for side in ("left", "right"):
            yield _pad(batch, {prefix: side}, model)
    if len(streams) > 1:
        yield _pad(batch, dict.fromkeys(streams, "right"), model)
        yield _pad(batch, dict(zip(streams, ("left", "right"), strict=True)), model)


def _can_pad(batch: Batch, prefix: str, signature: Any) -> bool:
    ids = batch.inputs.get(f"{prefix}input_ids")
    has_mask = f"{prefix}attention_mask" in signature or ("decoder_input_ids" not in batch.inputs and not prefix)
    is_batch = isinstance(ids, Tensor) and ids.shape[:2] == (BATCH, STREAMS[prefix])
    return is_batch and has_mask and f"{prefix}attention_mask" in signature


def _pad(batch: Batch, sides: dict[str, str], model: nn.Module) -> Batch:
    """Shorten the last sequence of the streams and pad it."""
    inputs, name = dict(batch.inputs), []
    for prefix, side in sides.items():
        length = STREAMS[prefix]
        pad = padding_id(model, prefix)
        names = [key for key in inputs if key.startswith("decoder_") == bool(prefix)]
        for key in names:
            value = inputs[key]
            if isinstance(value, Tensor) and value.shape[:2] == (BATCH, length) and not key.endswith("mask"):
                row = value[-1].clone()
                kept, filler = value[-1, : length - SHORTER], torch.zeros_like(value[-1, :SHORTER])
                if key == f"{prefix}input_ids":
                    filler += pad
                row = torch.cat([filler, kept] if side == "left" else [kept, filler])
                inputs[key] = torch.cat([value[:-1], row[None]])
        mask = torch.ones(BATCH, length, dtype=torch.long)
        mask[-1, slice(0, SHORTER) if side == "left" else slice(length - SHORTER, length)] = 0
        inputs[f"{prefix}attention_mask"] = mask
        if "use_cache" in inspect.signature(model.forward).parameters:
            inputs["use_cache"] = False  # with a cache, FSMT ignores the decoder's masks
        name.append(f"{prefix.rstrip('_') or 'input'} {side}")
    return _batch(" and ".join(name), inputs)


def padding_id(model: nn.Module, prefix: str) -> int:
    """Return the id of padding in the model's config, 0 if it has none."""
    pad = getattr(model.config, "pad_token_id", None)
    return pad if isinstance(pad, int) and 0 <= pad < 97 else 0


def alone(batch: Batch) -> Iterator[Batch] | None:
    """Return each sequence of a batch as a batch of its own without padding; None if the inputs cannot be divided."""
    for value in batch.inputs.values():
        if isinstance(value, Tensor) and value.dim() and value.shape[0] != BATCH:
            return None
    return (_one(batch, index) for index in range(BATCH))


def _one(batch: Batch, index: int) -> Batch:
    inputs: dict[str, Any] = {}
    for key, value in batch.inputs.items():
        if not isinstance(value, Tensor) or not value.dim():
            inputs[key] = value
            continue
        prefix = "decoder_" if key.startswith("decoder_") else ""
        real = batch.real.get(STREAMS[prefix])
        row = value[index : index + 1]
        is_text = real is not None and value.dim() > 1 and value.shape[1] == real.shape[1]
        inputs[key] = row[:, real[index]] if is_text and real is not None else row
    shortened, tokens = {}, {}
    for length, real in batch.real.items():
        kept = real[index]
        shortened[int(kept.sum())] = torch.ones(1, int(kept.sum()), dtype=torch.bool)
        if length in batch.tokens:
            tokens[int(kept.sum())] = batch.tokens[length][index : index + 1, kept]
    return Batch(f"{batch.name}, alone", inputs, shortened, tokens)
