"""Data of a compression report: batches with the document of each example, prompts, and inputs to be timed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from headwise.data.batches import POSITIONAL, call_model, copied, count_sequences_and_tokens, iterate_batches, to_device
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
    """Held-out data as batches on the device of the models.

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
        """Read a data set.

        Raises:
            InputError: the data set is empty or cannot be read.
        """
        batches = [to_device(batch, device) for batch in iterate_batches(dataset)]
        if not batches:
            raise InputError("dataset", expected="at least one batch", got="none")
        examples = sum(count_sequences_and_tokens(batch)[0] for batch in batches)
        is_texts = isinstance(dataset, Texts)
        documents = dataset.document_numbers() if is_texts else list(range(examples))
        return ReportData(batches, documents, is_texts, list(_sequences(batches)))

    def prompts(self, length: int, count: int) -> list[tuple[Tensor, int]]:
        """Return the first tokens of some sequences, at most `length` of each, with the number of the document. Each
        document has a sequence before any document has a second one.
        """
        seen: dict[int, int] = {}
        ranked = []
        for index, document in enumerate(self.documents):
            if len(self.sequences[index]):
                ranked.append((seen.get(document, 0), index))
                seen[document] = seen.get(document, 0) + 1
        return [(self.sequences[index][:length], self.documents[index]) for _, index in sorted(ranked)[:count]]

    def tokens(self, examples: int, length: int) -> Int[Tensor, "examples length"]:
        """Return token ids of the data as examples of one length; tokens repeat if there are too few."""
        ids = torch.cat(self.sequences)
        return ids.repeat(-(-examples * length // len(ids)))[: examples * length].view(examples, length)

    def call_inputs(self, examples: int, length: int) -> dict[str, Any]:
        """Return arguments of the models with a number of examples: sequences of one length if the batches contain
        nothing but tokens, otherwise examples of the first batch, which repeat if there are too few.
        """
        first = self.batches[0]
        if not self.sequences:
            return resized(first, examples)
        ids = self.tokens(examples, length)
        return {name: torch.ones_like(ids) if name == "attention_mask" else ids for name in first}


def resized(batch: Mapping[str, Any], examples: int) -> dict[str, Any]:
    """Return a batch with another number of examples, which repeat if there are too few. Tensors whose first axis has
    another length than the number of examples are not changed.
    """
    count = count_sequences_and_tokens(batch)[0]
    index = torch.arange(examples) % count
    return {
        name: value[index.to(value.device)] if isinstance(value, Tensor) and value.shape[:1] == (count,) else value
        for name, value in batch.items()
    }


@torch.no_grad()
def has_examples_first(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Return True if the first axis of a batch's tensors has the examples: the output for the first example alone is
    the first part of the output for the batch.
    """
    try:
        together, alone = (_first_tensor(call_model(model, copied(each))) for each in (batch, resized(batch, 1)))
    except Exception:  # a model that needs the size of the batch
        return False
    if together is None or alone is None or together.shape[1:] != alone.shape[1:] or len(alone) != 1:
        return False
    return bool((together[:1] - alone).abs().max() <= SAME * together.abs().max())


def _first_tensor(output: Any) -> Tensor | None:
    """Return the first tensor of floating-point numbers in a model's output that has axes; None if there is none."""
    leaves = pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    return next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim), None)


def _sequences(batches: Sequence[Mapping[str, Any]]) -> Iterator[Tensor]:
    """Yield the token ids of each example without padding; nothing if the batches contain more than tokens."""
    for batch in batches:
        ids = batch.get("input_ids", batch.get(POSITIONAL))
        is_ids = isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point()
        if set(batch) not in TOKENS or not is_ids:
            return
    for batch in batches:
        ids = batch.get("input_ids", batch.get(POSITIONAL))
        mask = batch.get("attention_mask")
        yield from ids if mask is None else (row[real.bool()] for row, real in zip(ids, mask, strict=True))
