"""Documents read from text, JSON lines, CSV and Parquet files, or given in memory."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from headwise.errors import InputError, require

ColumnTypes = tuple[type[str] | type[int], ...]
"""Types of value that a column may have."""

JSON_LINES = (".jsonl", ".ndjson", ".json")
"""Suffixes of files with one document per line; `.parquet` has one per row, and any other file is one document."""

SEPARATORS = {".csv": ",", ".tsv": "\t"}
"""Characters between the columns of files with one document per row, by their suffix. The first row has the names."""


class Document(NamedTuple):
    """Text of one document, with the place where the document is stored, such as "line 3 of notes.jsonl", for error
    messages.
    """

    text: str
    location: str


def documents_in_memory(items: Iterable[Any], column: str) -> Iterator[Document]:
    """Yield a `Document` for each item: a string, or a mapping whose value in `column` is the text. Its location in
    error messages is "document" and its number, from 1.
    """
    for number, item in enumerate(items, 1):
        location = f"document {number}"
        yield Document(item, location) if isinstance(item, str) else _document_of_row(item, column, location)


def read_documents(source: str | Path, column: str, types: ColumnTypes = (str,)) -> Iterator[Document]:
    """Yield the documents in the file `source`, or in all files below the folder `source`. Each row of a Parquet or CSV
    file is one document, and so is each nonblank line of a JSON lines file. The document's text is the value in
    `column`, converted to a string; the value must have one of the Python types `types`. Any other file is one document
    as a whole.
    """
    for file in list_files(source):
        try:
            if file.suffix == ".parquet":
                yield from _read_parquet(file, column, types)
            elif file.suffix in JSON_LINES:
                for row, location in read_json_lines(file):
                    yield _document_of_row(row, column, location, types)
            elif file.suffix in SEPARATORS:
                yield from _read_csv(file, column, SEPARATORS[file.suffix])
            else:
                yield Document(_decode(file.read_bytes(), file, offset=0), str(file))
        except OSError as error:
            raise _unreadable(file, error) from None


def require_first_document(source: Path, column: str) -> None:
    """Raise `InputError` if a file or folder contains no document, or if its first document cannot be read. Further
    documents are not read. A pipe is not checked, because it can be read only once.
    """
    with suppress(OSError):  # too long a path, which is reported when it is read
        if source.is_fifo():
            return
    if next(read_documents(source, column), None) is None:
        raise InputError("data", expected="at least one document", got=f"no text in {source}")


def require_source(source: str | Path) -> None:
    """Raise `InputError` if a file or folder does not exist, if the file is empty, or if the folder has no files. No
    file is read.
    """
    for file in list_files(source):
        try:
            is_empty = not file.stat().st_size and file.is_file()
        except OSError as error:
            raise _unreadable(file, error) from None
        if is_empty and file == Path(source):
            raise InputError("data", expected="at least one document", got=f"no text in {source}")


def list_files(source: str | Path) -> list[Path]:
    """Return the files of a data source: the file `source` itself, or all files below the folder `source`, sorted by
    path. Files and subfolders whose name starts with a dot are left out.
    """
    path = Path(source)
    if "\0" in str(path):
        raise _unreadable(path, ValueError("a null character in the path"))
    try:
        if not path.is_dir():
            return [path]
    except OSError as error:  # the path is too long
        raise _unreadable(path, error) from None
    files = sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not files:
        raise InputError("data", expected="a folder with files", got=f"none in {source}")
    return files


def _unreadable(file: Path, error: Exception) -> InputError:
    """Return the `InputError` for a file that cannot be read. Its message repeats the reason that the exception `error`
    states.
    """
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())
    return InputError("data", expected=f"a file {str(file)!r} that can be read", got=reason)


def _read_csv(file: Path, column: str, separator: str) -> Iterator[Document]:
    """Yield a document for each row of a CSV file, with the text in the column called `column`. The first row has the
    names of the columns.
    """
    rows = csv.reader(io.StringIO(_decode(file.read_bytes(), file, offset=0), newline=""), delimiter=separator)
    names = None
    try:
        for row in filter(None, rows):
            if names is None:
                names = row
                if names.count(column) != 1:
                    expected = f"a column of {file}, whose first row is {separator.join(names)}"
                    remedy = "--column (column=) names the one with the text"
                    raise InputError("column", expected=expected, got=repr(column), remedy=remedy)
                continue
            location = f"line {rows.line_num} of {file}"
            if len(row) != len(names):
                raise InputError("data", expected=f"{len(names)} columns in {location}", got=len(row))
            yield Document(row[names.index(column)], location)
    except csv.Error as error:
        raise _unreadable(file, error) from None


def read_json_lines(file: Path) -> Iterator[tuple[Any, str]]:
    """Yield each nonblank line of a JSON lines file as a pair: the parsed value, and its location, such as "line 3 of
    notes.jsonl".
    """
    with file.open("rb") as lines:
        offset = 0
        for number, line in enumerate(lines, 1):
            if not line.isspace():
                location = f"line {number} of {file}"
                text = _decode(line, file, offset)
                try:
                    value = json.loads(text)
                except json.JSONDecodeError as error:
                    reason = f"{error.msg.removesuffix(' at')} at column {error.colno}"
                    raise InputError("data", expected=f"JSON in {location}", got=reason) from None
                except (ValueError, RecursionError):
                    reason = "a number or nesting beyond the limits"  # of Python
                    raise InputError("data", expected=f"JSON in {location}", got=reason) from None
                yield value, location
            offset += len(line)


def _read_parquet(file: Path, column: str, types: ColumnTypes) -> Iterator[Document]:
    """Yield a document for each row of a Parquet file. The document's text is the value in `column`, which must have
    one of the Python types `types`.
    """
    pyarrow = require("pyarrow", purpose="reading parquet", extra="tables")
    parquet = require("pyarrow.parquet", purpose="reading parquet", extra="tables")
    with file.open("rb") as stream:  # pyarrow cannot open some names
        try:
            table = parquet.ParquetFile(stream)
        except pyarrow.ArrowInvalid:
            raise InputError("data", expected=f"a parquet file in {file}", got="another format") from None
        names = table.schema_arrow.names
        if column not in names:
            raise InputError("column", expected=f"one of {file}, which has {', '.join(names)}", got=repr(column))
        number = 0
        try:
            for rows in table.iter_batches(columns=[column]):
                for value in rows.column(0).to_pylist():
                    number += 1
                    yield _document_of_row({column: value}, column, f"row {number} of {file}", types)
        except pyarrow.ArrowException as error:
            raise _unreadable(file, error) from None


def _decode(data: bytes, file: Path, offset: int) -> str:
    """Return bytes of a text file, decoded as UTF-8. Raise `InputError` for other encodings, and for null bytes, as in
    a binary file. `data` is the whole file or one of its lines, and starts `offset` bytes after the start of the file.
    """
    if b"\0" in data:
        raise InputError("data", expected=f"text in {file}", got="a binary file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        got = f"another byte at offset {offset + error.start}"
        raise InputError("data", expected=f"UTF-8 in {file}", got=got) from None


def _document_of_row(row: Any, column: str, location: str, types: ColumnTypes = (str,)) -> Document:
    """Return the document whose text is `row[column]` as a string. Raise `InputError` if `row` is not a mapping, if it
    lacks the column, and for a value of another type than those in `types`.
    """
    if not isinstance(row, Mapping):
        raise InputError("data", expected=f"an object with a column {column!r} in {location}", got=type(row).__name__)
    if column not in row:
        names = ", ".join(map(str, row)) or "no column"
        raise InputError("column", expected=f"one of {location}, which has {names}", got=repr(column))
    text = row[column]
    if not isinstance(text, types):
        raise InputError("column", expected=f"text in {column!r} of {location}", got=type(text).__name__)
    return Document(str(text), location)
