"""Documents as batches of tokens, always in the same order."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.checks import LARGEST_INTEGER, whole_number
from headwise.data.documents import documents_in_memory, read_documents, require_source
from headwise.data.tokenization import SpecialTokens, max_input_tokens, require_tokenizer
from headwise.errors import InputError
from headwise.settings import DOCUMENT_MODES
from headwise.shapes import Int

DEFAULT_CONTEXT = 2048
"""Default of the largest number of tokens in a sequence, if the model accepts as many."""

DOCUMENTS_PER_CALL = 256
"""Number of documents in one call of the tokenizer: enough to occupy its threads."""

MOST_IDS = 2**32
"""Number above every token id."""


class _Sequence(NamedTuple):
    """One sequence of token ids, including special tokens, and the number of the document that the sequence is from.
    The document number is -1 if the sequence contains only separators between documents.
    """

    ids: Int[Tensor, " tokens"]
    document: int


def batches_of(sequences: Iterable[Int[Tensor, "_"]], size: int) -> Iterator[dict[str, Int[Tensor, "_ _"]]]:
    """Yield batches of at most `size` sequences of equal length. The longest sequences come first; sequences of the
    same length stay in their order.
    """
    for _, same_length in groupby(sorted(sequences, key=len, reverse=True), key=len):
        while rows := list(islice(same_length, size)):
            ids = torch.stack(rows).long()
            yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@dataclass(frozen=True)
class Texts:
    """A data set of documents that yields batches of tokens for a `transformers` model. You can iterate over it any
    number of times.

    Iteration yields mappings with `input_ids` and `attention_mask` of shape `(batch, tokens)`. All sequences of a batch
    have the same length and need no padding; the longest come first.

    Attributes:
        source: a file, a folder (all its files in the order of their names), or the documents themselves: strings, or
            mappings with the column `column`, such as a Hugging Face data set.
        tokenizer: the model's tokenizer.
        context: largest number of tokens in a sequence, including special tokens; by default as many as the tokenizer
            allows, at most 2048.
        documents: how a document becomes sequences. "whole": one sequence; a document longer than the context is an
            error. "truncate": one sequence, its beginning. "cut": consecutive sequences. "pack": all documents joined
            by the tokenizer's end token, cut into sequences of exactly the context.
        batch: largest number of sequences in a batch.
        limit: number of sequences to use, from the start of the data; all by default.
        column: name of the column with the text, in JSON lines, CSV, Parquet and mappings.

    Raises:
        InputError: a file does not exist, there is no document, or an option has an unusable value.

    Example:
        >>> texts = Texts("corpus.jsonl", tokenizer, documents="pack", context=1024)  # doctest: +SKIP
        >>> profile = headwise.profile(model, texts)  # doctest: +SKIP
    """

    source: str | Path | Iterable[Any]
    tokenizer: Any
    context: int | None = None
    documents: str = "whole"
    batch: int = 8
    limit: int | None = None
    column: str = "text"

    def __post_init__(self) -> None:
        require_tokenizer(self.tokenizer)
        if self.source == "" or not isinstance(self.source, str | Path | Iterable):
            got = "an empty path" if self.source == "" else type(self.source).__name__
            raise InputError("source", expected="a file, a folder, or documents: strings or mappings", got=got)
        if not isinstance(self.documents, str) or self.documents not in DOCUMENT_MODES:
            raise InputError("documents", expected=f"one of {', '.join(DOCUMENT_MODES)}", got=repr(self.documents))
        if isinstance(self.source, Iterator):  # an iterator can be read only once
            object.__setattr__(self, "source", list(self.source))
        if isinstance(self.source, str | Path):
            require_source(self.source)
        elif isinstance(self.source, Sized) and not len(self.source):
            raise InputError("source", expected="at least one document", got="none")
        for name in ("context", "batch", "limit"):
            number = getattr(self, name)
            if number is not None:
                number = whole_number(name, number, least=1, most=LARGEST_INTEGER)
                object.__setattr__(self, name, number)  # an int, also for an integer of numpy

    def within(self, model: nn.Module) -> "Texts":
        """Return a copy of these texts whose option `context`, the largest number of tokens per sequence, fits a model.
        If `context` is None, it becomes 2048, or the limit of the model and its tokenizer if that limit is smaller. A
        `context` above the limit raises `InputError`.

        Raises:
            InputError: `context` is set and exceeds the model's limit.
        """
        limit = max_input_tokens(model, self.tokenizer)
        if self.context is None:
            within = replace(self, context=min(limit or DEFAULT_CONTEXT, DEFAULT_CONTEXT))
            if within.context == self._default_context and self.is_tokenized:
                vars(within)["_tokenized"] = self._tokenized
            return within
        if limit is not None and self.context > limit:
            raise InputError("context", expected=f"at most {limit} tokens, the model's limit", got=self.context)
        return self

    def __iter__(self) -> Iterator[dict[str, Int[Tensor, "batch tokens"]]]:
        """Yield batches with `input_ids` and `attention_mask`, both `(batch, tokens)`, the longest sequences first.

        Raises:
            InputError: the data is empty, binary, not UTF-8, lacks the column, or is longer than the context.
            MissingExtra: a Parquet file, and pyarrow is not installed.
        """
        return batches_of(self.sequences, self.batch)

    @property
    def tokens(self) -> int:
        """Number of tokens in all sequences of these texts, including special tokens."""
        return sum(map(len, self.sequences))

    @property
    def sequences(self) -> list[Int[Tensor, " tokens"]]:
        """All sequences of token ids with their special tokens, in the order of the data. The option `documents`
        ("whole", "truncate", "cut" or "pack") determines how documents become sequences. If `limit` is set, only the
        first `limit` sequences are returned. The sequences are read and cached on first use.

        Raises:
            InputError: the data is empty, binary, not UTF-8, lacks the column, or is longer than the context.
            MissingExtra: a Parquet file, and pyarrow is not installed.
        """
        return [ids for ids, _ in self._tokenized]

    def document_numbers(self) -> list[int]:
        """Return, for each sequence in the order of the batches, the number of the document that the sequence is from.
        Documents are numbered from 0, including those without text, which have no sequence. A packed sequence contains
        tokens of several documents, and gets the number of the document with most of these tokens.

        Raises:
            InputError: the data is empty, binary, not UTF-8, lacks the column, or is longer than the context.
            MissingExtra: a Parquet file, and pyarrow is not installed.
        """
        longest_first = sorted(self._tokenized, key=lambda sequence: len(sequence.ids), reverse=True)
        return [sequence.document for sequence in longest_first]

    def tokenize(self, advance: Callable[[int], None]) -> None:
        """Read and tokenize the texts now, if this has not been done. `advance(1)` is called after each new sequence,
        so that a caller can show the progress.

        Raises:
            InputError: the data is empty, binary, not UTF-8, lacks the column, or is longer than the context.
            MissingExtra: a Parquet file, and pyarrow is not installed.
        """
        if not self.is_tokenized:
            vars(self)["_tokenized"] = self._tokenize(advance)  # where `cached_property` keeps it

    @property
    def is_tokenized(self) -> bool:
        """True if the texts have been read and tokenized."""
        return "_tokenized" in vars(self)

    @cached_property
    def _tokenized(self) -> list["_Sequence"]:
        """All sequences of tokens with the numbers of their documents, in the order of the data. They are read and
        tokenized at first access.
        """
        return self._tokenize(lambda _sequences: None)

    def _tokenize(self, advance: Callable[[int], None]) -> list["_Sequence"]:
        """Read and tokenize the texts, and return all sequences with their special tokens. `advance(1)` is called after
        each sequence.
        """
        special_tokens = SpecialTokens.of(self.tokenizer)
        room = (self.context or self._default_context) - special_tokens.size
        if room < 1:
            expected = f"more than the {special_tokens.size} special tokens of a sequence"
            raise InputError("context", expected=expected, got=self.context)
        sequences = []
        for part in islice(self._parts(room), self.limit):
            ids = [token % MOST_IDS if token >= 0 else -1 - token for token in part]
            documents = Counter(token // MOST_IDS for token in part if token >= 0)
            document = documents.most_common(1)[0][0] if documents else -1
            sequences.append(_Sequence(torch.tensor(special_tokens.around(ids), dtype=torch.int32), document))
            advance(1)
        if not sequences:
            raise InputError("data", expected="at least one document", got=f"no text in {self.name}")
        return sequences

    @property
    def name(self) -> str:
        """Name of the texts for display: the path of their file or folder, or "memory" for documents in memory."""
        return str(self.source) if isinstance(self.source, str | Path) else "memory"

    @property
    def _default_context(self) -> int:
        """Largest number of tokens in a sequence if the option `context` is not set: 2048, or the tokenizer's limit if
        that is smaller.
        """
        return min(max_input_tokens(None, self.tokenizer) or DEFAULT_CONTEXT, DEFAULT_CONTEXT)

    def _parts(self, room: int) -> Iterator[list[int]]:
        """Yield each sequence as a list of at most `room` tokens, without the special tokens at its start and end. Each
        token is one number: its token id plus `MOST_IDS` (2**32) times the number of its document. A separator between
        documents is -1 minus its token id.
        """
        if self.documents == "pack":
            yield from self._packed(room)
            return
        for tokens, location in self._tokens_of_documents():
            if self.documents == "whole" and len(tokens) > room:
                limit = "1 token" if room == 1 else f"{room} tokens"
                raise InputError(
                    "data",
                    expected=f"documents of at most {limit}, the context without special tokens",
                    got=f"{len(tokens)} in {location}",
                    remedy="--documents cut, pack or truncate (documents=...) accepts longer ones",
                )
            stop = len(tokens) if self.documents == "cut" else 1  # a document that is truncated has one sequence
            yield from (tokens[start : start + room] for start in range(0, stop, room))

    def _packed(self, room: int) -> Iterator[list[int]]:
        """Join the tokens of all documents, and yield consecutive sequences of exactly `room` tokens. Between documents
        there is a separator if the tokenizer has an end token. The shorter remainder at the end is dropped, except when
        it is the only sequence.
        """
        end_tokens = (self.tokenizer.eos_token_id, self.tokenizer.sep_token_id)
        separator = [-1 - token for token in end_tokens if token is not None][:1]
        remainder: list[int] = []
        has_yielded = False
        for tokens, _ in self._tokens_of_documents():
            if remainder or has_yielded:
                remainder += separator
            remainder += tokens
            complete = len(remainder) // room * room
            for start in range(0, complete, room):
                has_yielded = True
                yield remainder[start : start + room]
            remainder = remainder[complete:]
        if remainder and not has_yielded:
            yield remainder

    def _tokens_of_documents(self) -> Iterator[tuple[list[int], str]]:
        """Yield the tokens of each document that is not blank, with the document's location for error messages. Each
        token is one number: its id plus `MOST_IDS` (2**32) times the number of its document. Blank documents are
        numbered too.
        """
        read = read_documents if isinstance(self.source, str | Path) else documents_in_memory
        source: Any = self.source
        remaining = (each for each in enumerate(read(source, self.column)) if each[1].text.strip())
        while numbered := list(islice(remaining, DOCUMENTS_PER_CALL)):
            texts = [document.text for _, document in numbered]
            for _, document in numbered:
                try:
                    document.text.encode()
                except UnicodeEncodeError:
                    got = f"half a character in {document.location}"  # of a surrogate pair, which cannot be encoded
                    raise InputError("data", expected="text that can be written as UTF-8", got=got) from None
            encoded = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
            for ids, (number, document) in zip(encoded["input_ids"], numbered, strict=True):
                if ids:
                    yield [number * MOST_IDS + token for token in ids], document.location
