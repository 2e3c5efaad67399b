"""Text of a user as training data of a small model: batches to train on, held-out batches, and a loss."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.losses import Loss, MaskedTokenLoss, next_token_loss
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.shapes import Int
from headwise.studies.classification import class_loss, labelled_examples, pad_examples
from headwise.studies.text_options import TextOptions
from headwise.studies.training import Batches

HELD_OUT, MAX_HELD_OUT = 10, 64
"""One sequence in `HELD_OUT` is held out, but not more than `MAX_HELD_OUT`."""


@dataclass(frozen=True)
class Corpus:
    """Text prepared as data of a study for one task (next token, masked tokens or classification): training batches,
    held-out batches, the loss function, and the label names of a classifier.

    Attributes:
        training: batches to train on.
        held_out: batches to judge trained models by.
        loss: `(model, batch) -> (batch,)`.
        labels: labels of a classifier in the order of its classes; empty for other tasks.
    """

    training: Batches
    held_out: Batches
    loss: Loss
    labels: tuple[str, ...] = ()


def make_corpus(source: str | Path, tokenizer: Any, options: TextOptions) -> Corpus:
    """Read and tokenize the text in `source` for a task (next token, masked tokens or classification), and return it as
    a `Corpus`: training batches, held-out batches and the loss function.

    Args:
        source: file or folder: text, JSON lines, CSV or Parquet.
        tokenizer: a `transformers` tokenizer.
        options: task, columns and sizes.

    Raises:
        InputError: the data cannot be read or is too small, or the tokenizer has no mask token for "mlm".
    """
    if options.task == "classify":
        return _classification_corpus(source, tokenizer, options)
    if options.task == "mlm" and tokenizer.mask_token_id is None:
        raise InputError("tokenizer", expected="a tokenizer with a mask token", got="one without")
    context, batch = options.context, options.batch
    texts = Texts(source, tokenizer, context, "pack", batch, None, options.column)
    sequences = [sequence for sequence in texts.sequences if len(sequence) == context]
    if len(sequences) < HELD_OUT:
        expected = (
            f"text of at least {HELD_OUT * context:,} tokens, for {HELD_OUT} sequences of {context} with one held out"
        )
        raise InputError("data", expected=expected, got=f"{texts.tokens:,} tokens in {source}")
    training, held_out = _split(sequences)
    loss: Loss = next_token_loss
    if options.task == "mlm":
        loss = MaskedTokenLoss(tokenizer.mask_token_id, special=tokenizer.all_special_ids)
    return Corpus(_stacked(training, batch), _stacked(held_out, batch), loss)


def _classification_corpus(source: str | Path, tokenizer: Any, options: TextOptions) -> Corpus:
    """Read labelled texts from `source`, and return them as a `Corpus`: padded training and held-out batches, the
    cross-entropy loss of a classifier, and the label names.
    """
    texts = Texts(source, tokenizer, options.context, "truncate", options.batch, None, options.column)
    examples, labels = labelled_examples(texts, options.label, min_texts=HELD_OUT)
    pad_id = tokenizer.pad_token_id or 0
    training, held_out = (
        [pad_examples(group, pad_id) for group in _grouped(part, options.batch)] for part in _split(examples)
    )
    return Corpus(training, held_out, class_loss, labels)


def _split(examples: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Split examples into two lists, training and held-out. Every tenth example is held out; of more than 640 examples,
    every n-th, where n is the number of examples / 64, rounded up. The training examples are shuffled, always in the
    same order.
    """
    stride = max(HELD_OUT, -(-len(examples) // MAX_HELD_OUT))
    held_out = list(examples[stride // 2 :: stride])
    training = [example for number, example in enumerate(examples) if (number - stride // 2) % stride]
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(0)).tolist()
    return [training[index] for index in order], held_out


def _grouped(examples: Sequence[Any], batch: int) -> Iterator[Sequence[Any]]:
    """Yield consecutive groups of exactly `batch` examples; examples left over at the end are dropped. If there are
    fewer than `batch` examples in all, yield them as one smaller group.
    """
    for start in range(0, max(1, len(examples) - batch + 1), batch):
        yield examples[start : start + batch]


def _stacked(sequences: Sequence[Int[Tensor, " length"]], batch: int) -> Batches:
    """Stack token sequences of equal length to batches `{"input_ids": (batch, length)}`. Sequences left over at the end
    are dropped; fewer than `batch` sequences in all become one smaller batch.
    """
    return [{"input_ids": torch.stack(list(group)).long()} for group in _grouped(sequences, batch)]
