"""A user's text as what a small model is trained on: a tokenizer made for it, batches, and some held out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.analysis.losses import Loss, MaskedTokenLoss, next_token_loss
from headwise.data.batches import device_of, evaluation_mode, to_device
from headwise.data.documents import JSON_LINES, list_files, read_documents
from headwise.data.texts import Texts
from headwise.errors import InputError, require
from headwise.shapes import Float, Int
from headwise.studies.training import Batches

TASKS = ("lm", "mlm", "classify")
"""What a model learns: the next token, tokens that are masked, or which of some labels a text has."""

PAD, END, MASK = "<|pad|>", "<|end|>", "<|mask|>"
"""Special tokens of a tokenizer that is made here."""

HELD_OUT, MOST_HELD_OUT = 10, 64
"""One sequence of so many is held out, and no more than so many."""


@dataclass(frozen=True)
class Corpus:
    """What a task is about.

    Attributes:
        tokenizer: of the text.
        training: batches to learn from.
        held_out: batches to judge by.
        loss: one number an example.
        labels: of a classifier, in the order of its classes; none otherwise.
    """

    tokenizer: Any
    training: Batches
    held_out: Batches
    loss: Loss
    labels: tuple[str, ...] = ()


def corpus(
    task: str,
    source: str | Path,
    tokenizer: Any,
    *,
    context: int,
    batch: int,
    column: str = "text",
    label: str = "label",
) -> Corpus:
    """Batches of a text, and what is to be learned from them.

    Args:
        task: one of `TASKS`.
        source: a file or folder: text, JSON lines, parquet.
        tokenizer: of `transformers`.
        context: tokens of a sequence; a text that is to be classified is cut to it.
        batch: sequences of a batch.
        column: where the text is, in JSON lines and parquet.
        label: where its label is.

    Raises:
        InputError: another task, data that cannot be read, or too little of it.
    """
    if task not in TASKS:
        raise InputError("task", expected=f"one of {', '.join(TASKS)}", got=repr(task))
    if task == "classify":
        return _classified(Texts(source, tokenizer, context, "truncate", batch, None, column), label)
    if task == "mlm" and tokenizer.mask_token_id is None:
        raise InputError("tokenizer", expected="a tokenizer with a mask token", got="one without")
    texts = Texts(source, tokenizer, context, "pack", batch, None, column)
    sequences = [each for each in texts.sequences if len(each) == context]
    if len(sequences) < HELD_OUT:
        got = f"{texts.tokens:,} tokens in {source}"
        expected = f"text of at least {HELD_OUT * context:,} tokens: {HELD_OUT} sequences of {context}, one held out"
        raise InputError("data", expected=expected, got=got)
    training, held_out = _divided(sequences)
    special = tokenizer.all_special_ids
    loss: Loss = next_token_loss if task == "lm" else MaskedTokenLoss(tokenizer.mask_token_id, special=special)
    return Corpus(tokenizer, _stacked(training, batch), _stacked(held_out, batch), loss)


def class_loss(model: nn.Module, batch: dict[str, Any]) -> Float[Tensor, " batch"]:
    """-ln p of the label of each text, nats."""
    given = {name: each for name, each in batch.items() if name != "label"}
    return F.cross_entropy(model(**given), batch["label"], reduction="none")


def accuracy(model: nn.Module, batches: Batches) -> float:
    """The share of texts whose label has the largest logit."""
    right = total = 0
    with evaluation_mode(model), torch.no_grad():
        for batch in batches:
            here = to_device(batch, device_of(model))
            label = here.pop("label")
            right, total = right + int((model(**here).argmax(-1) == label).sum()), total + len(label)
    return right / total


def make_tokenizer(source: str | Path, column: str, vocabulary: int) -> Any:
    """A tokenizer of byte pairs (Sennrich et al. 2016) for a text, the same whenever it is made.

    Raises:
        InputError: data that cannot be read, or is empty.
        MissingExtra: `transformers` is not installed.
    """
    require("transformers", purpose="making a tokenizer", extra="hf")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + 3
    if vocabulary < least:
        raise InputError("vocabulary", expected=f"at least {least}, the bytes and special tokens", got=vocabulary)
    texts = [document.text for document in read_documents(source, column)]
    if not any(text.strip() for text in texts):
        raise InputError("data", expected="at least one document", got=f"no text in {source}")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = [PAD, END, MASK]
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=special, initial_alphabet=sorted(alphabet), show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=PAD, eos_token=END, mask_token=MASK)


# -- batches ----------------------------------------------------------------------------------------------------------


def _divided(examples: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Examples to learn from, in an order that is drawn once, and every tenth or fewer, held out."""
    stride = max(HELD_OUT, -(-len(examples) // MOST_HELD_OUT))
    held_out = list(examples[stride // 2 :: stride])
    training = [each for number, each in enumerate(examples) if (number - stride // 2) % stride]
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(0)).tolist()
    return [training[place] for place in order], held_out


def _grouped(examples: Sequence[Any], batch: int) -> Iterator[Sequence[Any]]:
    """As many at a time; what is left over is a group only where there is no other."""
    for start in range(0, max(1, len(examples) - batch + 1), batch):
        yield examples[start : start + batch]


def _stacked(sequences: Sequence[Int[Tensor, " length"]], batch: int) -> Batches:
    return [{"input_ids": torch.stack(list(group)).long()} for group in _grouped(sequences, batch)]


def _classified(texts: Texts, label: str) -> Corpus:
    """Texts with their labels."""
    source: Any = texts.source
    if plain := next((file for file in list_files(source) if file.suffix not in (*JSON_LINES, ".parquet")), None):
        raise InputError("data", expected=f"JSON lines or parquet, with a column {label!r}", got=str(plain))
    labels = [document.text for document in read_documents(source, label, (str, int))]
    documents = [document.text for document in read_documents(source, texts.column)]
    kept = [(text, name) for text, name in zip(documents, labels, strict=True) if text.strip()]
    classes = tuple(sorted({name for _, name in kept}))
    if len(kept) < HELD_OUT or len(classes) < 2:
        expected = f"at least {HELD_OUT} texts, one held out, with two labels or more"
        raise InputError("data", expected=expected, got=f"{len(kept)} texts with {len(classes)} labels in {source}")
    number, encode = {name: place for place, name in enumerate(classes)}, _encoder(texts)
    examples = [(encode(text), number[name]) for text, name in kept]
    training, held_out = _divided(examples)
    pad = texts.tokenizer.pad_token_id or 0
    made = [[_padded(group, pad) for group in _grouped(each, texts.batch)] for each in (training, held_out)]
    return Corpus(texts.tokenizer, made[0], made[1], class_loss, classes)


def _encoder(texts: Texts) -> Callable[[str], Int[Tensor, " length"]]:
    def encode(text: str) -> Int[Tensor, " length"]:
        ids = texts.tokenizer(text, truncation=True, max_length=texts.context, verbose=False)["input_ids"]
        return torch.tensor(ids, dtype=torch.int64)

    return encode


def _padded(examples: Sequence[tuple[Int[Tensor, " length"], int]], pad: int) -> dict[str, Any]:
    """A batch, padded on the right."""
    sequences = [ids for ids, _ in examples]
    padded = nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=pad)
    lengths = torch.tensor([len(ids) for ids in sequences])
    real = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
    return {"input_ids": padded, "attention_mask": real, "label": torch.tensor([label for _, label in examples])}
