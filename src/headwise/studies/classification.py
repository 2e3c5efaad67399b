"""Classification of texts: labelled examples, padded batches, loss and accuracy."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.data.batches import device_of, evaluation_mode, to_device
from headwise.data.documents import JSON_LINES, SEPARATORS, list_files, read_documents
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.shapes import Float, Int
from headwise.studies.training import Batches

Example = tuple[Int[Tensor, " length"], int]
"""Token ids of a text, and the number of its class."""


def labelled_examples(texts: Texts, label: str, *, min_texts: int) -> tuple[list[Example], tuple[str, ...]]:
    """Return a list of pairs `(token ids, class number)`, one for each text that is not blank, and the sorted label
    names. Labels are read from the column `label`; a class number is the index of the text's label among the sorted
    names. Fewer than `min_texts` texts, or fewer than two different labels, raise `InputError`.

    Args:
        texts: texts in JSON lines, CSV or Parquet.
        label: column with the label.
        min_texts: smallest number of texts.

    Raises:
        InputError: a file without columns; too few texts; fewer than two labels.
    """
    source: Any = texts.source
    if plain := next(
        (file for file in list_files(source) if file.suffix not in (*JSON_LINES, *SEPARATORS, ".parquet")), None
    ):
        raise InputError("data", expected=f"JSON lines, CSV or Parquet with a column {label!r}", got=str(plain))
    labels = [document.text for document in read_documents(source, label, (str, int))]
    documents = [document.text for document in read_documents(source, texts.column)]
    pairs = [(text, name) for text, name in zip(documents, labels, strict=True) if text.strip()]
    classes = tuple(sorted({name for _, name in pairs}))
    if len(pairs) < min_texts or len(classes) < 2:
        expected = f"at least {min_texts} texts, of which one is held out, with at least two labels"
        raise InputError("data", expected=expected, got=f"{len(pairs)} texts with {len(classes)} labels in {source}")
    numbers = {name: number for number, name in enumerate(classes)}
    return [(_encoded(texts, text), numbers[name]) for text, name in pairs], classes


def _encoded(texts: Texts, text: str) -> Int[Tensor, " length"]:
    """Return the token ids of a text, truncated to the context length of `texts`, as an int64 tensor."""
    ids = texts.tokenizer(text, truncation=True, max_length=texts.context, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)


def pad_examples(examples: Sequence[Example], pad_id: int) -> dict[str, Any]:
    """Combine labelled texts to one batch: `input_ids`, padded on the right with `pad_id` to the longest text,
    `attention_mask` (1 for tokens, 0 for padding), and `label` with one class number per text.
    """
    sequences = [ids for ids, _ in examples]
    padded = nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=pad_id)
    lengths = torch.tensor([len(ids) for ids in sequences])
    attention_mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
    labels = torch.tensor([label for _, label in examples])
    return {"input_ids": padded, "attention_mask": attention_mask, "label": labels}


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
