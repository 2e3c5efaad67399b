"""Batches of a data set, whatever they are: called, counted, told apart from others."""

import ctypes
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.data.texts import Texts
from headwise.errors import InputError


def iterate_batches(dataset: Texts | Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Each batch as arguments by name; one that is no mapping has no name."""
    for batch in dataset:
        if isinstance(batch, Tensor):
            yield {"": batch}
        elif isinstance(batch, Mapping) and any(isinstance(each, Tensor) for each in batch.values()):
            yield dict(batch)
        else:
            expected = "batches: tensors, or mappings of them, as the model takes them"
            remedy = "hw.Texts(source, tokenizer) makes batches of texts and files"
            raise InputError("dataset", expected=expected, got=type(batch).__name__, remedy=remedy)


def to_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch with its tensors on a device."""
    return {name: each.to(device) if isinstance(each, Tensor) else each for name, each in batch.items()}


def call_model(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """What the model makes of a batch that is on its device."""
    named = dict(batch)
    return model(named.pop(""), **named) if "" in named else model(**named)


def count_sequences_and_tokens(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Sequences and tokens of a batch, padding aside."""
    real = batch.get("attention_mask")
    first = next(each for each in batch.values() if isinstance(each, Tensor))
    ids = batch.get("input_ids", first)
    if isinstance(real, Tensor) and real.ndim == 2:
        return len(real), int(real.sum())
    return (len(ids), ids.shape[:2].numel()) if ids.ndim else (1, 1)


def digest_of(parts: Iterable[Any]) -> str:
    """Of tensors, bit by bit, and of what else there is."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
            bits = part.detach().cpu().contiguous()
            digest.update(ctypes.string_at(bits.data_ptr(), bits.nbytes))
        else:
            digest.update(repr(part).encode())
    return digest.hexdigest()


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are."""
    return next((each.device for each in model.parameters()), torch.device("cpu"))


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """In evaluation mode; then every module as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
