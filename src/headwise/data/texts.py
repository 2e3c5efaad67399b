"""Texts as batches of tokens: read from files, cut to a length that the model takes, always in the same order."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.data.tokenization import NO_LIMIT, longest_input
from headwise.errors import InputError, require
from headwise.shapes import Int

DEFAULT_CONTEXT = 2048
"""The most tokens of a sequence where nobody says otherwise and the model takes as many."""

DOCUMENTS_PER_CALL = 256
"""How many documents the tokenizer is given at a time: enough for its threads."""

ColumnTypes = tuple[type[str] | type[int], ...]
"""What may be in a column."""

JSON_LINES = (".jsonl", ".ndjson", ".json")
"""Files with a document in each line; those in `.parquet` have one in each row, and any other file is one."""


class Document(NamedTuple):
    """A text, and where it stands, for messages."""

    text: str
    where: str


class SpecialTokens(NamedTuple):
    """The special tokens that a tokenizer puts around every text: `[CLS]` and `[SEP]`, a token of beginning, none."""

    before: list[int]
    after: list[int]

    @staticmethod
    def of(tokenizer: Any) -> "SpecialTokens":
        encoded = tokenizer("a", return_special_tokens_mask=True, verbose=False)
        ids, text = encoded["input_ids"], [not mark for mark in encoded["special_tokens_mask"]]
        stop = len(text) - text[::-1].index(True)
        return SpecialTokens(ids[: text.index(True)], ids[stop:])

    @property
    def size(self) -> int:
        return len(self.before) + len(self.after)

    def around(self, ids: list[int]) -> list[int]:
        return [*self.before, *ids, *self.after]


@dataclass(frozen=True)
class Texts:
    """Documents as batches of tokens that a model of `transformers` takes; it can be iterated any number of times.

    Attributes:
        source: a file or a folder, of which every file is read in the order of their names; or documents themselves:
            strings, or mappings with a `column`, such as a data set of Hugging Face.
        tokenizer: the model's.
        context: the most tokens of a sequence, special tokens included; as many as the tokenizer allows, and at most
            2048, by default.
        documents: what becomes of a document. "whole": one sequence, and one that is longer than the context is
            refused; "truncate": one sequence, its beginning; "cut": as many sequences as it takes; "pack": all
            documents end to end, the tokenizer's token of end between them, in sequences of just the context.
        batch: the most sequences in a batch. Those of a batch are of one length, so that nothing is padding, and the
            longest come first.
        limit: how many sequences are taken, the first; all by default.
        column: where the text is, in JSON lines, parquet and mappings.

    Raises:
        InputError: an option that is not one of these.
    """

    source: str | Path | Iterable[Any]
    tokenizer: Any
    context: int | None = None
    documents: str = "whole"
    batch: int = 8
    limit: int | None = None
    column: str = "text"

    def __post_init__(self) -> None:
        if not callable(self.tokenizer) or not hasattr(self.tokenizer, "convert_ids_to_tokens"):
            raise InputError("tokenizer", expected="a transformers tokenizer", got=type(self.tokenizer).__name__)
        if self.documents not in DOCUMENT_MODES:
            raise InputError("documents", expected=f"one of {', '.join(DOCUMENT_MODES)}", got=repr(self.documents))
        if isinstance(self.source, Iterator):  # it is gone once it was read
            object.__setattr__(self, "source", list(self.source))
        for name in ("context", "batch", "limit"):
            number = getattr(self, name)
            if number is not None and not (isinstance(number, int) and number >= 1):
                raise InputError(name, expected="a number of at least 1", got=number)

    def within(self, model: nn.Module) -> "Texts":
        """These texts with a context that the model takes.

        Raises:
            InputError: a context that was asked for and is more than that.
        """
        limit = longest_input(model, self.tokenizer)
        if self.context is None:
            return replace(self, context=min(limit or DEFAULT_CONTEXT, DEFAULT_CONTEXT))
        if limit is not None and self.context > limit:
            raise InputError("context", expected=f"at most {limit} tokens, the model's limit", got=self.context)
        return self

    def __iter__(self) -> Iterator[dict[str, Int[Tensor, "batch tokens"]]]:
        """Batches with `input_ids` and `attention_mask`.

        Raises:
            InputError: what is read is empty, binary, not UTF-8, without the column, or longer than the context.
            MissingExtra: a parquet file, and pyarrow is not installed.
        """
        ordered = sorted(self.sequences, key=len, reverse=True)  # stable: those of one length in their own order
        for _, alike in groupby(ordered, key=len):
            while several := list(islice(alike, self.batch)):
                ids = torch.stack(several).long()
                yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    @property
    def tokens(self) -> int:
        """How many there are in all sequences."""
        return sum(map(len, self.sequences))

    @cached_property
    def sequences(self) -> list[Int[Tensor, " tokens"]]:
        """All sequences of tokens, in the order of the data."""
        frame = SpecialTokens.of(self.tokenizer)
        room = (self.context or self._most) - frame.size
        if room < 1:
            raise InputError(
                "context", expected=f"more than the {frame.size} special tokens of a sequence", got=self.context
            )
        parts = islice(DOCUMENT_MODES[self.documents](self, self._tokenized(), room), self.limit)
        found = [torch.tensor(frame.around(part), dtype=torch.int32) for part in parts]
        if not found:
            raise InputError("data", expected="at least one document", got=f"no text in {self.name}")
        return found

    @property
    def name(self) -> str:
        """Of the source, to show."""
        return str(self.source) if isinstance(self.source, str | Path) else "memory"

    @property
    def _most(self) -> int:
        of_tokenizer = self.tokenizer.model_max_length
        return min(DEFAULT_CONTEXT, of_tokenizer) if of_tokenizer and 0 < of_tokenizer < NO_LIMIT else DEFAULT_CONTEXT

    def _tokenized(self) -> Iterator[tuple[list[int], str]]:
        """Ids of each document without special tokens, and where it stands. Blank ones are left out."""
        source = self.source
        documents = (
            read_documents(source, self.column)
            if isinstance(source, str | Path)
            else documents_in_memory(source, self.column)
        )
        filled = (document for document in documents if not document.text.isspace() and document.text)
        while several := list(islice(filled, DOCUMENTS_PER_CALL)):
            for document in several:
                _require_unicode(document)
            texts = [document.text for document in several]
            encoded = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
            for ids, document in zip(encoded["input_ids"], several, strict=True):
                if ids:
                    yield ids, document.where


# -- what becomes of a document ---------------------------------------------------------------------------------------


def _whole(texts: Texts, tokenized: Iterable[tuple[list[int], str]], room: int) -> Iterator[list[int]]:
    for ids, where in tokenized:
        if len(ids) > room:
            raise InputError(
                "data",
                expected=f"documents of at most {room} tokens beside special ones, the context",
                got=f"{len(ids)} in {where}",
                remedy="--documents cut, pack or truncate (documents=...) takes longer ones",
            )
        yield ids


def _truncated(texts: Texts, tokenized: Iterable[tuple[list[int], str]], room: int) -> Iterator[list[int]]:
    for ids, _ in tokenized:
        yield ids[:room]


def _cut(texts: Texts, tokenized: Iterable[tuple[list[int], str]], room: int) -> Iterator[list[int]]:
    for ids, _ in tokenized:
        yield from (ids[start : start + room] for start in range(0, len(ids), room))


def _packed(texts: Texts, tokenized: Iterable[tuple[list[int], str]], room: int) -> Iterator[list[int]]:
    """What is left at the end is less than a sequence, and is one only where there is no other."""
    tokenizer = texts.tokenizer
    between = next((token for token in (tokenizer.eos_token_id, tokenizer.sep_token_id) if token is not None), None)
    rest: list[int] = []
    alone = True
    for ids, _ in tokenized:
        if between is not None and (rest or not alone):
            rest.append(between)
        rest += ids
        whole = len(rest) // room * room
        for start in range(0, whole, room):
            alone = False
            yield rest[start : start + room]
        rest = rest[whole:]
    if alone and rest:
        yield rest


DOCUMENT_MODES = {"whole": _whole, "truncate": _truncated, "cut": _cut, "pack": _packed}
"""What becomes of documents, by the name that `documents` takes."""


# -- reading ----------------------------------------------------------------------------------------------------------


def documents_in_memory(items: Iterable[Any], column: str) -> Iterator[Document]:
    """Documents in memory."""
    for number, item in enumerate(items, 1):
        where = f"document {number}"
        yield Document(item, where) if isinstance(item, str) else _of_column(item, column, where)


def read_documents(source: str | Path, column: str, kinds: ColumnTypes = (str,)) -> Iterator[Document]:
    """Documents of a file, or of every file in a folder; of a column of other kinds, what is in it as text."""
    for file in list_files(source):
        try:
            yield from _read(file, column, kinds)
        except OSError as error:
            raise InputError(
                "data", expected=f"a file {str(file)!r} that can be read", got=error.strerror or str(error)
            ) from None


def list_files(source: str | Path) -> list[Path]:
    """The file itself, or all in a folder that are not hidden."""
    path = Path(source)
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.is_file() and not _hidden(file.relative_to(path)))
    if not files:
        raise InputError("data", expected="a folder with files", got=f"none in {source}")
    return files


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _read(file: Path, column: str, kinds: ColumnTypes) -> Iterator[Document]:
    if file.suffix == ".parquet":
        yield from _read_parquet(file, column, kinds)
    elif file.suffix in JSON_LINES:
        with file.open("rb") as lines:
            offset = 0
            for number, line in enumerate(lines, 1):
                if not line.isspace():
                    yield _of_line(line, column, kinds, f"line {number} of {file}", file, offset)
                offset += len(line)
    else:
        yield Document(_decoded(file.read_bytes(), file, 0), str(file))


def _decoded(data: bytes, file: Path, offset: int) -> str:
    if b"\0" in data:
        raise InputError("data", expected=f"text in {file}", got="a binary file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            "data", expected=f"UTF-8 in {file}", got=f"another byte at offset {offset + error.start}"
        ) from None


def _of_line(line: bytes, column: str, kinds: ColumnTypes, where: str, file: Path, offset: int) -> Document:
    text = _decoded(line, file, offset)
    try:
        return _of_column(json.loads(text), column, where, kinds)
    except json.JSONDecodeError as error:
        raise InputError("data", expected=f"JSON in {where}", got=f"{error.msg} at column {error.colno}") from None


def _of_column(item: Any, column: str, where: str, kinds: ColumnTypes = (str,)) -> Document:
    if not isinstance(item, Mapping):
        raise InputError("data", expected=f"an object with a column {column!r} in {where}", got=type(item).__name__)
    if column not in item:
        names = ", ".join(map(str, item)) or "no column"
        raise InputError("column", expected=f"one of {where}, which has {names}", got=repr(column))
    text = item[column]
    if not isinstance(text, kinds):
        raise InputError("column", expected=f"text in {column!r} of {where}", got=type(text).__name__)
    return Document(str(text), where)


def _read_parquet(file: Path, column: str, kinds: ColumnTypes) -> Iterator[Document]:
    pyarrow = require("pyarrow", purpose="reading parquet", extra="tables")
    parquet = require("pyarrow.parquet", purpose="reading parquet", extra="tables")
    try:
        table = parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid:
        raise InputError("data", expected=f"a parquet file in {file}", got="another format") from None
    names = table.schema_arrow.names
    if column not in names:
        raise InputError("column", expected=f"one of {file}, which has {', '.join(names)}", got=repr(column))
    number = 0
    for rows in table.iter_batches(columns=[column]):
        for value in rows.column(0).to_pylist():
            number += 1
            yield _of_column({column: value}, column, f"row {number} of {file}", kinds)


def _require_unicode(document: Document) -> None:
    try:
        document.text.encode()
    except UnicodeEncodeError:
        raise InputError(
            "data", expected="text that can be written as UTF-8", got=f"half a character in {document.where}"
        ) from None
