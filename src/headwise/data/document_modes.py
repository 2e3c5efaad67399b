"""Modes by which tokenized documents become sequences of limited length: whole, truncated, cut or packed."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from headwise.errors import InputError


class TokenizedDocument(NamedTuple):
    """Token ids of a document (special tokens such as `[CLS]` excluded), and the document's location for error
    messages, such as "line 3 of notes.jsonl".
    """

    ids: list[int]
    location: str


def whole(documents: Iterable[TokenizedDocument], room: int, separator: int | None) -> Iterator[list[int]]:
    """Yield each document's token ids as one sequence; raise `InputError` for a document with more than `room` tokens.
    `separator` is not used.
    """
    for ids, location in documents:
        if len(ids) > room:
            limit = "1 token" if room == 1 else f"{room} tokens"
            raise InputError(
                "data",
                expected=f"documents of at most {limit}, the context without special tokens",
                got=f"{len(ids)} in {location}",
                remedy="--documents cut, pack or truncate (documents=...) accepts longer ones",
            )
        yield ids


def truncate(documents: Iterable[TokenizedDocument], room: int, separator: int | None) -> Iterator[list[int]]:
    """Yield the first `room` token ids of each document as one sequence; `separator` is not used."""
    for ids, _ in documents:
        yield ids[:room]


def cut(documents: Iterable[TokenizedDocument], room: int, separator: int | None) -> Iterator[list[int]]:
    """Cut the token ids of each document into consecutive sequences of `room` ids, and yield the sequences. The last
    one of a document may be shorter. `separator` is not used.
    """
    for ids, _ in documents:
        yield from (ids[start : start + room] for start in range(0, len(ids), room))


def pack(documents: Iterable[TokenizedDocument], room: int, separator: int | None) -> Iterator[list[int]]:
    """Join the token ids of all documents, with the token id `separator` (if it is not None) between documents, and
    yield consecutive sequences of exactly `room` ids. The shorter remainder at the end is dropped, except when it is
    the only sequence.
    """
    remainder: list[int] = []
    has_yielded = False
    for ids, _ in documents:
        if separator is not None and (remainder or has_yielded):
            remainder.append(separator)
        remainder += ids
        complete = len(remainder) // room * room
        for start in range(0, complete, room):
            has_yielded = True
            yield remainder[start : start + room]
        remainder = remainder[complete:]
    if remainder and not has_yielded:
        yield remainder


DOCUMENT_MODES: dict[str, Callable[[Iterable[TokenizedDocument], int, int | None], Iterator[list[int]]]] = {
    "whole": whole,
    "truncate": truncate,
    "cut": cut,
    "pack": pack,
}
"""The modes by the name that the argument `documents` accepts."""
