"""Rows of tokens of the World English Bible, and copies of passages inside these rows.

Chapters are split into training and held-out ones (`research.claims.corpora`). The tokens are those of a byte-pair
tokenizer that was trained on the training chapters.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from headwise.shapes import Bool, Int
from headwise.studies.text_study import train_tokenizer
from research.claims.corpora import Corpus, bible

VOCABULARY, LENGTH = 512, 64
"""Number of tokens of the tokenizer, and of a row."""

HELD_OUT, HELD_OUT_SEED = 128, 99
"""Number of held-out rows, and the seed of their draw and of their copies."""

Copies = tuple[Int[torch.Tensor, "rows length"], Bool[torch.Tensor, "rows length"]]
"""Rows of token ids, and True for copied tokens: those that can be predicted from an earlier occurrence of the passage
in the row. The first token of the second occurrence cannot.
"""


@dataclass(frozen=True)
class Text:
    """Rows of token ids of the training part, and of the held-out part, as they are in the Bible."""

    training: Int[torch.Tensor, "rows length"]
    held_out: Int[torch.Tensor, "rows length"]


@cache
def text() -> Text:
    """Return the rows of the Bible."""
    corpus = bible()
    documents = {part: _documents(corpus, part) for part in ("training", "validation")}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "training.jsonl"
        source.write_text("\n".join(json.dumps({"text": document}) for document in documents["training"]))
        tokenizer = train_tokenizer(source, "text", VOCABULARY)
    training, held_out = (
        rows([tokenizer(document)["input_ids"] for document in documents[part]], LENGTH) for part in documents
    )
    return Text(training, held_out)


def _documents(corpus: Corpus, part: str) -> list[str]:
    """Return the documents of a part of a corpus as texts."""
    separator = corpus.separator.decode()
    return [separator.join(passage.decode() for passage in each) for each in corpus.passages[part].values()]


def rows(documents: Sequence[Sequence[int]], length: int) -> Int[torch.Tensor, "rows length"]:
    """Cut documents into rows of `length` tokens. The rest of a document that fills no row is left out."""
    return torch.tensor(
        [ids[start : start + length] for ids in documents for start in range(0, len(ids) - length + 1, length)]
    )


def held_out_rows(text: Text, kind: str) -> Copies:
    """Return the held-out rows with which trainings of a kind are measured. Rows with repeats measure the trainings on
    unchanged rows too.
    """
    generator = torch.Generator().manual_seed(HELD_OUT_SEED)
    drawn = text.held_out[torch.randperm(len(text.held_out), generator=generator)[:HELD_OUT]]
    return COPIED.get(kind, with_repeats)(drawn, generator)


def with_repeats(ids: Int[torch.Tensor, "rows length"], generator: torch.Generator) -> Copies:
    """Return rows in which the first passage is repeated to the end of the row, and the mask of the copied tokens. The
    passage is a quarter to a half of the row, another length in each row.
    """
    repeated, is_copied = ids.clone(), torch.zeros_like(ids, dtype=torch.bool)
    length = ids.shape[1]
    for row, mask in zip(repeated, is_copied, strict=True):
        size = _draw(length // 4, length // 2, generator)
        row[:] = row[:size].repeat(length // size + 1)[:length]
        mask[size + 1 :] = True
    return repeated, is_copied


def with_quotes(ids: Int[torch.Tensor, "rows length"], generator: torch.Generator) -> Copies:
    """Return rows in which one passage occurs a second time, and the mask of the copied tokens.

    In each row, a passage of a quarter to a half of the row replaces the tokens at a random later place. Its length
    and both places are random, so the distance between the two occurrences is another one in each row.
    """
    quoted, is_copied = ids.clone(), torch.zeros_like(ids, dtype=torch.bool)
    length = ids.shape[1]
    for row, mask in zip(quoted, is_copied, strict=True):
        size = _draw(length // 4, length // 2, generator)
        start = _draw(0, length - 2 * size, generator)
        place = _draw(start + size, length - size, generator)
        row[place : place + size] = row[start : start + size].clone()
        mask[place + 1 : place + size] = True
    return quoted, is_copied


COPIED: dict[str, Callable[[Int[torch.Tensor, "rows length"], torch.Generator], Copies]] = {
    "repeats": with_repeats,
    "quotes": with_quotes,
}
"""Functions that copy passages inside rows, by the kind of the training. Other kinds have unchanged rows."""


def _draw(least: int, most: int, generator: torch.Generator) -> int:
    """Draw a whole number from `least` to `most`."""
    return int(torch.randint(least, most + 1, (), generator=generator))
