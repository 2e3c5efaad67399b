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
    """Yield each batch of a data set as a dictionary of the model's arguments by name. A batch is a tensor, or a
    mapping that contains tensors; raise `InputError` for anything else.
    """
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
    """Return a batch as a dictionary of the model's arguments by name. A mapping that contains tensors is copied; a
    single tensor gets the name "", which stands for the model's first positional argument. Return None for anything
    else.
    """
    if isinstance(batch, Tensor):
        return {POSITIONAL: batch}
    if isinstance(batch, Mapping) and any(isinstance(value, Tensor) for value in batch.values()):
        return dict(batch)
    return None


@dataclass(frozen=True, eq=False)
class NumberedBatches:
    """Data set of batches that are stored in memory; each batch is a dictionary of the model's arguments. `documents`
    has, for each sequence, the number of the document that the sequence is from.
    """

    batches: Sequence[dict[str, Tensor]]
    documents: Sequence[int]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def document_numbers(self) -> list[int]:
        """Return, for each sequence, the number of the document that the sequence is from."""
        return list(self.documents)


def documents_of(dataset: Any) -> list[int] | None:
    """Return, for each sequence of a data set in the order of its batches, the number of the document that the sequence
    is from. Return None for a data set that has no document numbers.
    """
    return dataset.document_numbers() if isinstance(dataset, Texts | NumberedBatches) else None


def to_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a batch with all its tensors moved to the device, and its other values unchanged."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def copied(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a batch and of all its values, so that a model that writes to its inputs leaves the original
    unchanged.
    """
    return {name: value.clone() if isinstance(value, Tensor) else deepcopy(value) for name, value in batch.items()}


def call_model(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Return the model's output for a batch that `iterate_batches` yielded. The tensors of the batch must be on the
    model's device. If a progress bar is displayed, it moves after each layer of the model.
    """
    arguments = dict(batch)
    with moving_with(model):
        return model(arguments.pop(POSITIONAL), **arguments) if POSITIONAL in arguments else model(**arguments)


def call_by_names(model: Any, inputs: Mapping[str, Tensor]) -> Any:
    """Run a model with the outputs of a tokenizer or image processor as arguments. A `transformers` model receives all
    of them. Another module receives those that its `forward` names. If `forward` does not name the first one (the token
    ids or pixels), the module receives all of them by its `**kwargs`. Without `**kwargs`, it receives only the first
    one, by position.
    """
    parameters, first = inspect.signature(model.forward).parameters, next(iter(inputs))
    accepts_any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if hasattr(model, "config") or accepts_any_name or first in parameters:
        is_own = not hasattr(model, "config") and first in parameters
        return model(**{name: tensor for name, tensor in inputs.items() if not is_own or name in parameters})
    return model(inputs[first])


def floating_tensors(output: Any) -> list[Tensor]:
    """Return a list of all floating-point tensors in the output of a model, in their order in the output. The output is
    a tensor, or a container of tensors such as a tuple or mapping.
    """
    leaves = pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def relative_difference(output: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference between `output` and `expected`, divided by the largest absolute value in
    `expected`. Return infinity if their shapes differ, and NaN if an element is NaN.
    """
    if output.shape != expected.shape:
        return math.inf
    difference = float((output - expected).abs().max())
    return difference and difference / float(expected.abs().max() or 1e-300)


def with_cache_disabled(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """Return the batch, with the argument `use_cache=False` added if `model.forward` accepts it and the batch does not
    contain it.
    """
    has_argument = "use_cache" in inspect.signature(model.forward).parameters
    return {"use_cache": False, **batch} if has_argument else batch


DATA = ("input_ids", "inputs_embeds", "pixel_values", "input_features", "input_values")
"""Names of the arguments of `transformers` that contain a model's data."""


def count_sequences_and_tokens(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of sequences in a batch and their total number of tokens. With an attention mask of shape
    `(sequences, tokens)`, padding is not counted. Without such a mask, both numbers are the sizes of the first two axes
    of the input data. This is an argument named in `DATA`, such as `input_ids`, or else the first tensor.
    """
    mask = batch.get("attention_mask")
    first_tensor = next(value for value in batch.values() if isinstance(value, Tensor))
    ids = next((batch[name] for name in DATA if isinstance(batch.get(name), Tensor)), first_tensor)
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return len(mask), int(mask.sum())
    return (len(ids), ids.shape[:2].numel()) if ids.ndim else (1, 1)


def select_examples(batch: Mapping[str, Any], chosen: Tensor) -> dict[str, Any]:
    """Return a batch with only the examples that `chosen` selects: their indices, or a boolean mask over all examples.
    A tensor whose first axis is not as long as the number of examples is kept unchanged.
    """
    count = count_sequences_and_tokens(batch)[0]
    return {
        name: value[chosen.to(value.device)] if isinstance(value, Tensor) and value.shape[:1] == (count,) else value
        for name, value in batch.items()
    }


def digest_of_batches(batches: Iterable[Mapping[str, Any]]) -> str:
    """Return one SHA-256 hash of all batches, computed from the name and value of every argument in each batch."""
    return digest_of(part for batch in batches for name in sorted(batch) for part in (name, batch[name]))


def digest_of(parts: Iterable[Any]) -> str:
    """Return one SHA-256 hash of a series of values. It is computed from the dtype, shape and bytes of each tensor, and
    from the `repr` of any value that is not a tensor.
    """
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
    """Return the name of the model argument that states which of the last hidden states are padding:
    "decoder_attention_mask" for an encoder-decoder, otherwise "attention_mask".
    """
    return "decoder_attention_mask" if is_encoder_decoder(model) else "attention_mask"


def real_tokens(batch: Mapping[str, Any], like: Tensor, name: str = "attention_mask") -> Tensor:
    """Return a boolean mask `(sequences, tokens)` that is True at tokens that are not padding. It is computed from the
    batch's argument `name`. If the batch lacks this argument, or if its shape differs from the first two axes of
    `like`, the mask is True everywhere.
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
    """Set `requires_grad` to False for all trainable parameters of a model while the context is open, then back to
    True.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
