"""Text of a user as training data of a small model: tokenizer, training batches, held-out batches, and a loss."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.analysis.losses import Loss, MaskedTokenLoss, next_token_loss
from headwise.data.batches import device_of, evaluation_mode, to_device
from headwise.data.documents import JSON_LINES, SEPARATORS, list_files, read_documents
from headwise.data.texts import Texts
from headwise.errors import InputError, require
from headwise.shapes import Float
from headwise.studies.text_options import TextOptions
from headwise.studies.training import Batches

HELD_OUT, MAX_HELD_OUT = 10, 64
"""One sequence in `HELD_OUT` is held out, but not more than `MAX_HELD_OUT`."""

PAD, END, MASK = "<|pad|>", "<|end|>", "<|mask|>"
"""Special tokens of a trained tokenizer."""


def train_tokenizer(source: str | Path, column: str, vocabulary: int) -> Any:
    """Train a byte-level byte-pair tokenizer (Sennrich et al. 2016) on the texts of the file or folder `source`, and
    return it as a `transformers` tokenizer with at most `vocabulary` tokens. The same texts yield the same tokenizer.

    Args:
        source: file or folder: text, JSON lines, CSV or Parquet.
        column: column with the text.
        vocabulary: largest number of tokens.

    Returns:
        A `transformers` tokenizer with tokens for padding, end of text and masking.

    Raises:
        InputError: the data cannot be read or is empty; the vocabulary is smaller than the byte alphabet.
        MissingExtra: `transformers` is not installed.
    """
    require("transformers", purpose="training a tokenizer", extra="hf")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), [PAD, END, MASK]
    smallest = len(alphabet) + len(special)
    if vocabulary < smallest:
        raise InputError("vocabulary", expected=f"at least {smallest}, for bytes and special tokens", got=vocabulary)
    texts = [document.text for document in read_documents(source, column)]
    if not any(text.strip() for text in texts):
        raise InputError("data", expected="at least one document", got=f"no text in {source}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, mask_token=MASK)


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
    loss: Loss = next_token_loss
    if options.task == "mlm":
        loss = MaskedTokenLoss(tokenizer.mask_token_id, special=tokenizer.all_special_ids)
    training, held_out = (
        [{"input_ids": torch.stack(list(group)).long()} for group in _grouped(part, batch)]
        for part in _split(sequences)
    )
    return Corpus(training, held_out, loss)


def _classification_corpus(source: str | Path, tokenizer: Any, options: TextOptions) -> Corpus:
    """Read labelled texts from JSON lines, CSV or Parquet, and return them as a `Corpus`: padded training and held-out
    batches, the cross-entropy loss of a classifier, and the sorted label names. A class number is the index of a text's
    label among these names. Blank texts are left out.

    Raises:
        InputError: a file without columns; too few texts; fewer than two labels.
    """
    Texts(source, tokenizer, options.context, "truncate", options.batch, None, options.column)  # checks its arguments
    label = options.label
    if plain := next(
        (file for file in list_files(source) if file.suffix not in (*JSON_LINES, *SEPARATORS, ".parquet")), None
    ):
        raise InputError("data", expected=f"JSON lines, CSV or Parquet with a column {label!r}", got=str(plain))
    labels = [document.text for document in read_documents(source, label, (str, int))]
    documents = [document.text for document in read_documents(source, options.column)]
    pairs = [(text, name) for text, name in zip(documents, labels, strict=True) if text.strip()]
    classes = tuple(sorted({name for _, name in pairs}))
    if len(pairs) < HELD_OUT or len(classes) < 2:
        expected = f"at least {HELD_OUT} texts, of which one is held out, with at least two labels"
        raise InputError("data", expected=expected, got=f"{len(pairs)} texts with {len(classes)} labels in {source}")
    examples = []
    for text, name in pairs:
        ids = tokenizer(text, truncation=True, max_length=options.context, verbose=False)["input_ids"]
        examples.append((torch.tensor(ids, dtype=torch.int64), classes.index(name)))

    def padded(group: Sequence[tuple[Tensor, int]]) -> dict[str, Any]:
        """Combine labelled texts to one batch: `input_ids`, padded on the right to the longest text, `attention_mask`
        (1 for tokens, 0 for padding), and `label` with one class number per text.
        """
        sequences = [ids for ids, _ in group]
        ids = nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=tokenizer.pad_token_id or 0)
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        attention_mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        return {
            "input_ids": ids,
            "attention_mask": attention_mask,
            "label": torch.tensor([number for _, number in group]),
        }

    training, held_out = ([padded(group) for group in _grouped(part, options.batch)] for part in _split(examples))
    return Corpus(training, held_out, class_loss, classes)


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


def class_loss(model: nn.Module, batch: dict[str, Any]) -> Float[Tensor, " batch"]:
    """Return the cross-entropy, in nats, between a classifier's logits and the correct class, one value for each text
    in the batch.
    """
    inputs = {name: value for name, value in batch.items() if name != "label"}
    return F.cross_entropy(model(**inputs), batch["label"], reduction="none")


def accuracy(model: nn.Module, batches: Batches) -> float:
    """Return the share of texts in all batches for which a classifier's largest logit is that of the correct class,
    with the model in evaluation mode.
    """
    correct = total = 0
    with evaluation_mode(model), torch.no_grad():
        for batch in batches:
            inputs = to_device(batch, device_of(model))
            label = inputs.pop("label")
            correct, total = correct + int((model(**inputs).argmax(-1) == label).sum()), total + len(label)
    return correct / total
