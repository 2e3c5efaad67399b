"""Dependency treebanks in CoNLL-U format: sentences, words with their characters, and relations."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headwise.analysis.head_tests.token_spans import require_fast, tokens_with_spans
from headwise.data.documents import list_files
from headwise.data.tokenization import SpecialTokens
from headwise.errors import InputError, require
from headwise.shapes import Int

SUFFIX = ".conllu"
"""Suffix of the files of a treebank in a folder."""


class TreeWord(NamedTuple):
    """Word of a sentence in a treebank, with its place in the text and its syntactic relation to its governor, the word
    that it depends on.

    Attributes:
        span: start and stop of its characters in the text of the sentence; None if it has none of its own, such as a
            part of a contraction.
        governor: index of its governor among the words of the sentence; None for the root.
        relation: relation to the governor.
    """

    span: tuple[int, int] | None
    governor: int | None
    relation: str


class TreeSentence(NamedTuple):
    """Sentence of a treebank: its text, its words with their syntactic relations, and the number of its document.

    Attributes:
        document: number of its document; its own number if the treebank states no documents.
        name: id of the sentence, for messages.
    """

    text: str
    words: tuple[TreeWord, ...]
    document: int
    name: str


def read_treebank(source: Any, *, subtypes: bool = False) -> list[TreeSentence]:
    """Read the sentences of a treebank (texts with syntactic dependencies) in the CoNLL-U format of Universal
    Dependencies.

    The characters of a word follow from the text of the sentence, in which all words must occur in their order. The
    parts of a contraction have characters if these make up the contraction, as in "do" and "n't"; otherwise, as in
    French "du", they have none. Empty nodes are left out.
    """
    conllu = require("conllu", purpose="a treebank", extra="trees")
    sentences: list[TreeSentence] = []
    document = -1
    for text in _texts(source):
        has_documents = False
        try:
            parsed = conllu.parse(text)
        except Exception as error:  # whatever the parser raises for another format
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError("treebank", expected="sentences in CoNLL-U format", got=reason) from error
        for tokens in parsed:
            metadata = tokens.metadata
            starts = "newdoc id" in metadata or "newdoc" in metadata
            has_documents |= starts
            if starts or not has_documents:
                document += 1
            name = str(metadata.get("sent_id") or f"number {len(sentences) + 1}")
            sentences.append(_sentence(list(tokens), metadata.get("text"), document, name, subtypes))
    if not sentences:
        raise InputError("treebank", expected="at least one sentence", got="none")
    return sentences


def _texts(source: Any) -> Iterator[str]:
    """Yield the text of each file of a treebank. `source` is a file, a folder of `.conllu` files, or the text of one
    file.
    """
    if isinstance(source, str) and "\n" in source:
        yield source
        return
    if not isinstance(source, str | Path) or not str(source):
        expected = "a file, a folder, or the text of a file"
        raise InputError("treebank", expected=expected, got=type(source).__name__)
    is_folder = Path(source).is_dir()
    files: Iterable[Path] = list_files(source)
    files = [file for file in files if file.suffix == SUFFIX] if is_folder else files
    if not files:
        raise InputError("treebank", expected=f"a folder with {SUFFIX} files", got=str(source))
    for file in files:
        try:
            yield file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "bytes that are not UTF-8"
            raise InputError("treebank", expected=f"a file {str(file)!r} that can be read", got=reason) from None


def _sentence(tokens: list[Any], text: str | None, document: int, name: str, subtypes: bool) -> TreeSentence:
    """Convert the parsed tokens of one sentence in CoNLL-U format to a `TreeSentence`. Raise `InputError` if its words
    do not occur in its text, or the governor or relation of a word is missing or invalid.
    """
    words = [token for token in tokens if isinstance(token["id"], int)]
    if [token["id"] for token in words] != list(range(1, len(words) + 1)):
        raise InputError("treebank", expected=f"words numbered from 1 in sentence {name}", got="other numbers")
    surface = list(_surface_forms(tokens))
    if text is None:
        text = "".join(form + (" " if follows_blank else "") for form, _, follows_blank in surface).rstrip()
    spans: dict[int, tuple[int, int]] = {}
    position = 0
    for form, ids, _ in surface:
        start = text.find(form, position)
        if start < 0 or text[position:start].strip():
            got = f"a text without {form!r} after {text[:position][-20:]!r}"
            raise InputError("treebank", expected=f"the words of sentence {name} in its text", got=got)
        position = start + len(form)
        parts = [words[number - 1]["form"] for number in ids]
        if "".join(parts) == form:
            for number, part in zip(ids, parts, strict=True):
                spans[number] = (start, start + len(part))
                start += len(part)
    found = []
    for token in words:
        head, relation = token["head"], token["deprel"]
        if not isinstance(head, int) or not 0 <= head <= len(words) or not isinstance(relation, str):
            expected = f"a head and a relation of word {token['id']} in sentence {name}"
            raise InputError("treebank", expected=expected, got=f"{head!r}, {relation!r}")
        label = relation if subtypes else relation.partition(":")[0]
        found.append(TreeWord(spans.get(token["id"]), head - 1 if head else None, label))
    return TreeSentence(text, tuple(found), document, name)


def _surface_forms(tokens: list[Any]) -> Iterator[tuple[str, list[int], bool]]:
    """Yield each form that is written in the text of a sentence: a word, or a contraction of several words. With each
    form, yield the list of its words, each by its number in the sentence, and True if a blank follows the form.
    """
    covered = 0
    for token in tokens:
        number = token["id"]
        misc = token["misc"] or {}
        blank = misc.get("SpaceAfter") != "No"
        if isinstance(number, int):
            if number > covered:
                yield token["form"], [number], blank
        elif number[1] == "-":
            covered = number[2]
            yield token["form"], list(range(number[0], number[2] + 1)), blank


class AlignedTokens(NamedTuple):
    """Token ids of a text, with the word to which each token belongs.

    Attributes:
        ids: token ids, with the tokenizer's special tokens.
        word_of: index of each token's word; -1 for tokens of no word, such as special ones, and of several words.
        is_aligned: True for the words whose tokens are theirs alone.
    """

    ids: Int[torch.Tensor, " tokens"]
    word_of: Int[torch.Tensor, " tokens"]
    is_aligned: list[bool]


def aligned_tokens(
    tokenizer: Any, text: str, spans: Sequence[tuple[int, int] | None], start_token: int | None = None
) -> AlignedTokens:
    """Tokenize a text, and assign each token to the word whose characters it contains. `spans` are the start and stop
    characters of each word; None for a word without characters. A word is not aligned if it has no token, or if one of
    its tokens also contains other characters than the word's own and blanks.

    `start_token` is put before the text and the special tokens of the tokenizer.
    """
    require_fast(tokenizer)
    special = SpecialTokens.of(tokenizer)
    before = [*([] if start_token is None else [start_token]), *special.before]
    token_ids, token_spans = tokens_with_spans(tokenizer, text)
    word_at = torch.full((len(text) + 1,), -1, dtype=torch.int64)
    for index, span in enumerate(spans):
        if span is not None:
            word_at[span[0] : span[1]] = index
    is_aligned = [False] * len(spans)
    shared: set[int] = set()
    word_of = []
    for start, stop in token_spans:
        is_blank = [character.isspace() for character in text[start:stop]]
        at = {int(word_at[start + place]) for place, blank in enumerate(is_blank) if not blank}
        own = at - {-1}
        is_single = len(at) == 1 and len(own) == 1
        word_of.append(own.pop() if is_single else -1)
        if is_single:
            is_aligned[word_of[-1]] = True
        else:
            shared |= own
    for word in shared:
        is_aligned[word] = False
    ids = [*before, *token_ids, *special.after]
    padded = [*[-1] * len(before), *word_of, *[-1] * len(special.after)]
    of_words = torch.tensor([word if word >= 0 and is_aligned[word] else -1 for word in padded])
    return AlignedTokens(torch.tensor(ids), of_words, is_aligned)
