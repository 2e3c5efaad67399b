"""Batches of any data set: iterated as keyword arguments, moved to a device, run, counted and hashed."""

import ctypes
import hashlib
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.progress import moving_with

POSITIONAL = ""
"""Name, within a batch, of the tensor that the model takes as its first positional argument."""


def iterate_batches(dataset: Texts | Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield each batch of a data set, a tensor or a mapping that contains tensors, as `arguments_of` returns it."""
    if not isinstance(dataset, Iterable):
        raise InputError("dataset", expected="Texts, or batches", got=type(dataset).__name__)
    for batch in dataset:
        arguments = arguments_of(batch)
        if arguments is None:
            expected = "batches: tensors, or mappings of them, as the model takes them"
            remedy = "hw.Texts(source, tokenizer) makes batches of texts and files"
            raise InputError("dataset", expected=expected, got=type(batch).__name__, remedy=remedy)
        yield arguments


def arguments_of(batch: Any) -> dict[str, Any] | None:
    """Return a batch as a dictionary of the model's arguments by name; None if it is neither a tensor nor a mapping
    that contains tensors. The name of a single tensor, the model's first positional argument, is the empty string.
    """
    if isinstance(batch, Tensor):
        return {POSITIONAL: batch}
    if isinstance(batch, Mapping) and any(isinstance(value, Tensor) for value in batch.values()):
        return dict(batch)
    return None


@dataclass(frozen=True, eq=False)
class NumberedBatches:
    """Batches in memory, dictionaries of the model's arguments, with the number of the document of each sequence."""

    batches: Sequence[dict[str, Tensor]]
    documents: Sequence[int]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def document_numbers(self) -> list[int]:
        """Return the number of the document of each sequence."""
        return list(self.documents)


def documents_of(dataset: Any) -> list[int] | None:
    """Return the document of each sequence of a data set, in the order of its batches; None if it states none."""
    return dataset.document_numbers() if isinstance(dataset, Texts | NumberedBatches) else None


def to_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a batch with all its tensors moved to the device, and its other values unchanged."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def copied(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a batch with copies of all its values: the model may write to them."""
    return {name: value.clone() if isinstance(value, Tensor) else deepcopy(value) for name, value in batch.items()}


def call_model(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Run the model on a batch, as `iterate_batches` yields it, on the model's device; a shown progress bar moves."""
    arguments = dict(batch)
    with moving_with(model):
        return model(arguments.pop(POSITIONAL), **arguments) if POSITIONAL in arguments else model(**arguments)


def floating_tensors(output: Any) -> list[Tensor]:
    """Return the tensors of floating-point numbers in an output of a model, in order."""
    leaves = pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def relative_difference(output: Tensor, expected: Tensor) -> float:
    """Return the largest difference of an output from the expected one, in units of the largest number of the expected
    one; infinity for another shape, NaN if a number is NaN.
    """
    if output.shape != expected.shape:
        return math.inf
    difference = float((output - expected).abs().max())
    return difference and difference / float(expected.abs().max() or 1e-300)


def with_cache_disabled(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """Return the batch with `use_cache=False` added, if `model.forward` has this argument and the batch does not."""
    has_argument = "use_cache" in inspect.signature(model.forward).parameters
    return {"use_cache": False, **batch} if has_argument else batch


DATA = ("input_ids", "inputs_embeds", "pixel_values", "input_features", "input_values")
"""Names of the arguments of `transformers` that contain a model's data."""


def count_sequences_and_tokens(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of sequences in a batch, and the number of tokens in all of them, without padding if the batch
    has an attention mask of shape `(sequences, tokens)`. The data are the argument with one of the names in `DATA`, or
    the first tensor.
    """
    mask = batch.get("attention_mask")
    first_tensor = next(value for value in batch.values() if isinstance(value, Tensor))
    ids = next((batch[name] for name in DATA if isinstance(batch.get(name), Tensor)), first_tensor)
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return len(mask), int(mask.sum())
    return (len(ids), ids.shape[:2].numel()) if ids.ndim else (1, 1)


def select_examples(batch: Mapping[str, Any], chosen: Tensor) -> dict[str, Any]:
    """Return some examples of a batch, by their indices or by a mask of all examples. Tensors whose first axis has
    another length than the number of examples are not changed.
    """
    count = count_sequences_and_tokens(batch)[0]
    return {
        name: value[chosen.to(value.device)] if isinstance(value, Tensor) and value.shape[:1] == (count,) else value
        for name, value in batch.items()
    }


def digest_of_batches(batches: Iterable[Mapping[str, Any]]) -> str:
    """Return the SHA-256 hash of batches: of the names and values of the model's arguments in each."""
    return digest_of(part for batch in batches for name in sorted(batch) for part in (name, batch[name]))


def digest_of(parts: Iterable[Any]) -> str:
    """Return the SHA-256 hash of a series of values: tensors by dtype, shape and bytes, other values by their repr."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
            values = part.detach().cpu().contiguous()
            digest.update(ctypes.string_at(values.data_ptr(), values.nbytes))
        else:
            digest.update(repr(part).encode())
    return digest.hexdigest()


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter, or the CPU if the model has no parameters."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def is_encoder_decoder(model: Any) -> bool:
    """Return True for a model of `transformers` whose decoder attends to the outputs of an encoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def name_of_mask(model: Any) -> str:
    """Return the name of the argument that states the padding of the last hidden states that a model returns."""
    return "decoder_attention_mask" if is_encoder_decoder(model) else "attention_mask"


def real_tokens(batch: Mapping[str, Any], like: Tensor, name: str = "attention_mask") -> Tensor:
    """Return a boolean mask `(sequences, tokens)` that is True at tokens that are not padding: everywhere, if the
    argument `name` of a batch is not a mask of the first two axes of `like`.
    """
    mask = batch.get(name)
    if isinstance(mask, Tensor) and mask.shape == like.shape[:2]:
        return mask.bool()
    return torch.ones(like.shape[:2], dtype=torch.bool, device=like.device)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode while the context is open, then restore each module's training flag."""
    training_modules = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training_modules:
            module.training = True


@contextmanager
def frozen_parameters(model: nn.Module) -> Iterator[None]:
    """Turn off the gradients of all trainable parameters of a model while the context is active."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
