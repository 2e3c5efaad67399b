"""Data of a compression report, and decoding of these data with a cache."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.data.batches import (
    POSITIONAL,
    call_model,
    copied,
    count_sequences_and_tokens,
    floating_tensors,
    is_encoder_decoder,
    iterate_batches,
    relative_difference,
    select_examples,
    to_device,
)
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.shapes import Int

TOKENS = ({"input_ids"}, {"input_ids", "attention_mask"}, {POSITIONAL})
"""Names of arguments of batches that state nothing but tokens."""

ModelPair = tuple[nn.Module, nn.Module]
"""The dense model and the compressed one."""

SAME = 1e-3
"""Largest relative difference between outputs that count as equal."""


@dataclass(frozen=True)
class ReportData:
    """Held-out data for a comparison of a dense and a compressed model, as batches on the device of the models.

    Attributes:
        batches: arguments of the models.
        documents: document of each example, in the order of the batches.
        knows_documents: False if each example counts as a document because the data does not state documents.
        sequences: token ids of each example without padding; empty if the batches contain more than tokens.
    """

    batches: list[dict[str, Any]]
    documents: list[int]
    knows_documents: bool
    sequences: list[Tensor]

    @staticmethod
    def of(dataset: Any, device: torch.device) -> "ReportData":
        """Return the batches, documents and token sequences of a data set, moved to a device."""
        batches = [to_device(batch, device) for batch in iterate_batches(dataset)]
        if not batches:
            raise InputError("dataset", expected="at least one batch", got="none")
        examples = sum(count_sequences_and_tokens(batch)[0] for batch in batches)
        is_texts = isinstance(dataset, Texts)
        documents = dataset.document_numbers() if is_texts else list(range(examples))
        return ReportData(batches, documents, is_texts, list(_sequences(batches)))

    def prompts(self, length: int, count: int) -> list[tuple[Tensor, int]]:
        """Return up to `count` prompts, each with the number of its document. A prompt is the start of a sequence, at
        most `length` tokens long. Each document supplies one prompt before any document supplies a second one.
        """
        seen: dict[int, int] = {}
        ranked = []
        for index, document in enumerate(self.documents):
            if len(self.sequences[index]):
                ranked.append((seen.get(document, 0), index))
                seen[document] = seen.get(document, 0) + 1
        return [(self.sequences[index][:length], self.documents[index]) for _, index in sorted(ranked)[:count]]

    def tokens(self, examples: int, length: int) -> Int[Tensor, "examples length"]:
        """Return token ids as `examples` sequences of `length` tokens, cut from the joined tokens of the data. The
        tokens repeat if there are too few.
        """
        ids = torch.cat(self.sequences)
        return ids.repeat(-(-examples * length // len(ids)))[: examples * length].view(examples, length)

    def call_inputs(self, examples: int, length: int) -> dict[str, Any]:
        """Return model arguments for `examples` sequences of `length` tokens, if the batches contain nothing but
        tokens. Otherwise return `examples` examples of the first batch, which repeat if there are too few.
        """
        first = self.batches[0]
        if not self.sequences:
            return select_examples(first, torch.arange(examples) % count_sequences_and_tokens(first)[0])
        ids = self.tokens(examples, length)
        return {name: torch.ones_like(ids) if name == "attention_mask" else ids for name in first}


@torch.no_grad()
def has_examples_first(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Return True if the first axis of the tensors in a batch has one index per example. The check is that the model's
    output for the first example alone equals the first item of its output for the batch.
    """
    try:
        together, alone = (
            next(tensor for tensor in floating_tensors(call_model(model, copied(each))) if tensor.ndim)
            for each in (batch, select_examples(batch, torch.arange(1)))
        )
    except Exception:  # a model that needs the size of the batch, or returns no tensor
        return False
    return relative_difference(alone, together[:1]) <= SAME


def _sequences(batches: Sequence[Mapping[str, Any]]) -> Iterator[Tensor]:
    """Yield the token ids of each example without padding. Yield nothing if the batches have arguments other than token
    ids and their padding mask.
    """
    for batch in batches:
        ids = batch.get("input_ids", batch.get(POSITIONAL))
        is_ids = isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point()
        if set(batch) not in TOKENS or not is_ids:
            return
    for batch in batches:
        ids = batch.get("input_ids", batch.get(POSITIONAL))
        mask = batch.get("attention_mask")
        yield from ids if mask is None else (row[real.bool()] for row, real in zip(ids, mask, strict=True))


def decode(model: nn.Module, ids: Int[Tensor, "batch tokens"], cache: Any = None) -> Any:
    """Run a causal model on new tokens, with a cache of the tokens before them, and return its output. If the model
    supports it, logits are computed for the last token alone.
    """
    names = inspect.signature(model.forward).parameters
    last = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
    return model(input_ids=ids, past_key_values=cache, use_cache=True, **last)


@torch.no_grad()
def why_not_decoded(model: Any, ids: Int[Tensor, " tokens"] | None) -> str | None:
    """Return the reason, for display, why a model cannot decode tokens with a key/value cache; None if it can. The
    model is tried on the token ids `ids`. They are None if the data contain more than token ids.
    """
    name = type(model).__name__
    if is_encoder_decoder(model):
        return f"{name} is an encoder-decoder"
    if not {"input_ids", "past_key_values", "use_cache"} <= set(inspect.signature(model.forward).parameters):
        return f"the call of {name} has no past_key_values"
    if ids is None:
        return "the batches do not consist of token ids alone"
    output = decode(model, ids[None])
    if getattr(output, "past_key_values", None) is None:
        return f"{name} returns no past_key_values, so it has no cache"
    return None if isinstance(getattr(output, "logits", None), Tensor) else f"{name} returns no logits"


@torch.no_grad()
def cache_sizes(model: nn.Module, ids: Int[Tensor, "1 tokens"], lengths: tuple[int, ...]) -> list[int]:
    """Return the bytes of a model's cache after each number of tokens in `lengths`, which ascend. The first
    `lengths[0]` tokens are read in one call, and later ones are decoded one by one.
    """
    cache, sizes = decode(model, ids[:, : lengths[0]]).past_key_values, []
    for position in range(lengths[0], lengths[-1] + 1):
        if position in lengths:
            sizes.append(cache_bytes(cache))
        if position < lengths[-1]:
            cache = decode(model, ids[:, position : position + 1], cache).past_key_values
    return sizes


def cache_bytes(cache: Any) -> int:
    """Return the bytes of all tensors in a cache. Tensors without axes, such as a count of tokens, are ignored, and a
    tensor that occurs twice counts once.
    """
    tensors = [each for each in _tensors(cache, set()) if each.ndim]
    return sum({(each.data_ptr(), each.shape, each.stride()): each.nbytes for each in tensors}.values())


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield all tensors in an object, at any depth: in its items if it is a collection, otherwise in its attributes.
    Modules, classes and configurations are left out.
    """
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, seen)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _tensors(item, seen)
    elif not isinstance(value, nn.Module | type) and not hasattr(value, "to_dict"):
        for item in getattr(value, "__dict__", {}).values():
            yield from _tensors(item, seen)
