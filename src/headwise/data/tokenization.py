"""A text, or token ids without a text such as those that a model generated, as tokens that are grouped into words."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unicodedata import category, east_asian_width

import torch
from torch import Tensor, nn

from headwise.errors import InputError, require
from headwise.shapes import Int

NO_LIMIT = 10**9
"""Value of a tokenizer's `model_max_length` from which on it means that there is no limit."""

JOINERS = re.compile("(?<=.)[\u200c\u200d]|(?<=\U0001f3f4)[\U000e0020-\U000e007f]+", re.DOTALL)
"""Invisible characters that change how the characters before them are drawn: joiners, and the letters of a
flag such as that of Scotland.
"""


CONTEXT = 16
"""Number of tokens before those that are decoded, at most, that are decoded with them."""


@dataclass(frozen=True)
class Word:
    """Word of a text for display: its characters, whether it is a special token, and whether it is an ordinary word
    with letters or digits.

    Attributes:
        text: the word on one line, with visible blanks and control characters.
        special: True for a special token such as `[CLS]`.
        lexical: True for a word with at least one letter or digit that is not a special token.
    """

    text: str
    special: bool
    lexical: bool


@dataclass(frozen=True)
class Token:
    """Token of a text for display: its characters, whether it is a special token, and whether white space or a line
    break separates it from the token before it.

    Attributes:
        text: its characters on one line, with visible blanks and control characters.
        special: True for a special token such as `[CLS]`.
        follows_blank: True if white space separates it from the token before.
        starts_line: True if a line break separates it from the token before.
    """

    text: str
    special: bool
    follows_blank: bool
    starts_line: bool


class EncodedText(NamedTuple):
    """Result of tokenizing one text for a model: the model's inputs, and the tokens and words for display.

    Attributes:
        text: the text; of a truncated one, the part that the tokens stand for.
        truncated: True if text was cut off.
        inputs: arguments of the model, each `(1, tokens)`.
        words: the words of the text, special tokens included.
        word_of: index of each token's word, `(tokens,)`.
        tokens: the tokens.
    """

    text: str
    truncated: bool
    inputs: dict[str, Int[Tensor, "1 tokens"]]
    words: tuple[Word, ...]
    word_of: Int[Tensor, " tokens"]
    tokens: tuple[Token, ...]


def encode_text(model: Any, tokenizer: Any, text: Any, truncate: bool) -> EncodedText:
    """Tokenize a text for a model, and group the tokens into words. A text that is too long for the model is cut if
    `truncate` is True; otherwise `InputError` is raised. `InputError` is also raised for an empty text, and if the
    tokenizer has ids outside of the model's vocabulary.
    """
    require_tokenizer(tokenizer)
    require_text(text)
    limit = max_input_tokens(model, tokenizer)
    truncates = truncate and limit is not None
    encoding = tokenizer(
        text,
        return_tensors="pt",
        return_special_tokens_mask=True,
        return_offsets_mapping=tokenizer.is_fast,
        truncation=truncates,
        max_length=limit if truncates else None,
        verbose=False,
    )
    added_by_tokenizer = encoding.pop("special_tokens_mask")[0].tolist()
    spans = encoding.pop("offset_mapping")[0].tolist() if tokenizer.is_fast else None
    ids = encoding["input_ids"][0].tolist()
    if not ids:
        raise InputError("text", expected="at least one token", got="a text that the tokenizer drops whole")
    if limit is not None and len(ids) > limit:
        expected, remedy = f"at most {limit} tokens, the model's limit", "--truncate (truncate=True) cuts it there"
        raise InputError("text", expected=expected, got=len(ids), remedy=remedy)
    vocabulary = getattr(input_embeddings(model), "num_embeddings", None)
    if vocabulary is not None and max(ids) >= vocabulary:
        raise InputError("tokenizer", expected=f"ids below {vocabulary}, the model's vocabulary", got=max(ids))
    special = special_ids(tokenizer)
    is_special = [bool(added) or token in special for added, token in zip(added_by_tokenizer, ids, strict=True)]
    names = tokenizer.convert_ids_to_tokens(ids)
    tokens, end = [], 0
    if spans is None:  # the tokenizer does not report the characters of tokens, so that each is a word of its own
        words = []
        for token, name, is_added in zip(ids, names, is_special, strict=True):
            characters = name if is_added else tokenizer.decode([token])
            if not characters or "\ufffd" in characters:  # part of a character
                characters = name
            words.append(Word(name, True, False) if is_added else displayed_word(characters))
            tokens.append(Token(words[-1].text, is_added, True, False))
        word_of = torch.arange(len(ids))
    else:
        words, word_of = _group_into_words(text, names, encoding.word_ids(), spans, is_special)
        for name, (start, stop), is_added in zip(names, spans, is_special, strict=True):
            if is_added or start == stop:
                tokens.append(displayed_token(name, is_added, " "))
            else:  # blanks at the ends of a span belong to the token or not
                tokens.append(displayed_token(text[start:stop], False, text[end:stop]))
                end = max(stop, end)
    read, is_cut = text, truncates and len(ids) < len(tokenizer(text, verbose=False)["input_ids"])
    if is_cut and spans is None:
        read = tokenizer.decode([token for token, is_added in zip(ids, is_special, strict=True) if not is_added])
    elif is_cut and spans is not None:
        own = [span for span, is_added in zip(spans, is_special, strict=True) if not is_added]
        read = text[min((start for start, _ in own), default=0) : max((stop for _, stop in own), default=0)]
    return EncodedText(read, is_cut, dict(encoding), tuple(words), word_of, tuple(tokens))


def text_model(model: Any) -> nn.Module:
    """Return the part of a `transformers` model that reads text: the encoder of an encoder-decoder, otherwise the model
    itself. Raise `InputError` for a model that reads other data, such as images.
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise InputError("model", expected="a transformers model", got=type(model).__name__)
    reader: Any = model
    if getattr(reader.config, "is_encoder_decoder", False) and hasattr(reader, "get_encoder"):
        reader = reader.get_encoder() or reader
    if getattr(reader, "main_input_name", "input_ids") != "input_ids":
        raise InputError("model", expected="a model that reads text", got=f"one that reads {reader.main_input_name}")
    module: nn.Module = reader
    return module


def max_input_tokens(model: Any, tokenizer: Any) -> int | None:
    """Return the largest number of tokens that a model and its tokenizer both accept; None if neither has a limit."""
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if positions is not None:
        for module in model.modules():
            # Position tables that start after the padding index (RoBERTa) hold that many fewer positions.
            is_position_table = isinstance(module, nn.Embedding) and module.num_embeddings == positions
            if is_position_table and module.padding_idx is not None and module is not input_embeddings(model):
                positions -= module.padding_idx + 1
                break
    limits = [limit for limit in (positions, tokenizer.model_max_length) if limit and 0 < limit < NO_LIMIT]
    return min(limits, default=None)


def input_embeddings(model: Any) -> Any:
    """Return the module that embeds a model's token ids. Return None if the model does not provide it by
    `get_input_embeddings`.
    """
    try:
        return model.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # of a plain module, and of some of `transformers`
        return None


def output_embeddings(model: Any) -> Any:
    """Return the output embeddings of a model, which turn its last hidden states into logits over the vocabulary.
    Return None if the model has no `get_output_embeddings`, or if this returns an `nn.Embedding`, as FSMT's does.
    """
    try:
        module = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return None if isinstance(module, nn.Embedding) else module


def require_tokenizer(tokenizer: Any) -> None:
    """Raise an `InputError` for an object that is not a tokenizer of `transformers`."""
    if not callable(tokenizer) or not hasattr(tokenizer, "convert_ids_to_tokens"):
        remedy = "the order is (model, tokenizer, text)" if isinstance(tokenizer, str) else None
        got = type(tokenizer).__name__
        raise InputError("tokenizer", expected="a transformers tokenizer", got=got, remedy=remedy)


def require_text(text: Any) -> None:
    """Raise an `InputError` for a text that is not a string, has no visible character, or is not valid Unicode."""
    if not isinstance(text, str):
        raise InputError("text", expected="a string", got=type(text).__name__)
    if not any(character.isprintable() and not character.isspace() for character in text):
        raise InputError("text", expected="at least one word", got="an empty text")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InputError("text", expected="text that can be written as UTF-8", got="bytes of another encoding")


def _group_into_words(
    text: str, tokens: list[str], pieces: list[int | None], spans: list[list[int]], is_special: list[bool]
) -> tuple[list[Word], Int[Tensor, " tokens"]]:
    """Group the tokens of a text into words. Return the words for display, and for each token the index of its word. A
    token joins the word before it if no blank separates them in the text, and if the tokenizer split both from the same
    piece of the text. A special token is a word by itself, and a wide character (such as a Chinese one) starts a word.
    No word starts inside a user-perceived character, such as a flag, an emoji of several code points, or a letter with
    its marks.

    Both conditions for joining are needed: some tokenizers treat a whole text as one piece, others include the blank in
    the token.

    Args:
        text: the tokenized text.
        tokens: the tokens as strings.
        pieces: index of the piece of text that each token was split from; None for special tokens.
        spans: start and end of each token in the text, in characters.
        is_special: True for each special token.
    """
    words: list[Word] = []
    word_of: list[int] = []
    word_start, word_piece, word_end = 0, None, -1
    starts = {start for start, _ in character_spans(text)}
    for token, piece, (start, stop), special in zip(tokens, pieces, spans, is_special, strict=True):
        if special or start == stop:
            words.append(Word(token, special, False))
            word_piece = None
        else:
            # The tokenizer may have dropped characters in between, such as accents.
            has_blank = any(character.isspace() for character in text[word_end : start + 1])
            continues = piece is not None and piece == word_piece and not has_blank
            if start not in starts:
                continues = word_piece is not None and not has_blank
            elif continues and start == word_end and east_asian_width(text[start]) == "W":
                continues = False
            if not continues:
                word_start = start
                words.append(Word("", False, False))
            word_piece, word_end = piece, max(stop, word_end) if continues else stop
            while word_end < len(text) and category(text[word_end]).startswith("M"):
                word_end += 1  # a combining mark that the tokenizer dropped
            words[-1] = displayed_word(text[word_start:word_end])
        word_of.append(len(words) - 1)
    return words, torch.tensor(word_of)


def displayed_token(characters: str, special: bool, with_blanks: str) -> Token:
    """Return a `Token` for display from its characters. `with_blanks` is the text from the end of the previous token to
    the end of this one. The blanks at the start of `with_blanks` show how the two tokens are separated.
    """
    blanks = with_blanks[: len(with_blanks) - len(with_blanks.lstrip())]
    return Token(_on_one_line(characters), special, bool(blanks), "\n" in blanks)


def displayed_word(characters: str) -> Word:
    """Return a `Word` for display from its characters. It counts as an ordinary word if one of the characters is a
    letter or digit.
    """
    return Word(_on_one_line(characters), False, any(character.isalnum() for character in characters))


def _on_one_line(characters: str) -> str:
    """Return a text for display on one line. Blanks at its ends are removed, and blanks inside become single spaces. A
    text of blanks alone becomes `␣`. Control characters become escape sequences, except the invisible characters in
    `JOINERS`.
    """
    shown = " ".join(characters.split()) or characters.replace(" ", "") or "␣"
    kept = {index for joiner in JOINERS.finditer(shown) for index in range(*joiner.span())}
    return "".join(
        character if character.isprintable() or index in kept else repr(character)[1:-1]
        for index, character in enumerate(shown)
    )


def character_spans(text: str) -> list[tuple[int, int]]:
    """Return start and end index of each user-perceived character of a text (extended grapheme cluster of Unicode)."""
    if text.isascii():
        return [(index, index + 1) for index in range(len(text))]
    regex = require("regex", purpose="dividing a text into words", extra="hf")
    return [match.span() for match in regex.finditer(r"\X", text)]


class DecodedWords(NamedTuple):
    """Decoded token ids for display: the characters of each token, and the words that the tokens form.

    Attributes:
        pieces: characters of each token; empty for a token that ends in the middle of a character.
        tokens: the tokens.
        words: the words.
        word_of: index of each token's word.
    """

    pieces: tuple[str, ...]
    tokens: tuple[Token, ...]
    words: tuple[Word, ...]
    word_of: Int[Tensor, " tokens"]


def decoded_words(tokenizer: Any, ids: list[int], context: Sequence[int] = ()) -> DecodedWords:
    """Decode token ids that follow the ids in `context`, and group the tokens into words. A word starts at white space,
    before and after a special token, and at a wide character (such as a Chinese one). It also starts where letters or
    digits meet other characters. No word starts inside a user-perceived character, such as a flag.
    """
    special = special_ids(tokenizer)
    names = tokenizer.convert_ids_to_tokens(ids)
    pieces = _pieces(tokenizer, ids, list(context[-CONTEXT:]))
    tokens, words, word_of = [], list[Word](), []
    characters, follows_special = "", True
    for token, known, piece in zip(ids, names, pieces, strict=True):
        # Models with a padded table of embeddings may generate ids that the tokenizer does not have.
        is_special, name = token in special, f"token {token}" if known is None else known
        continues = not (is_special or known is None or follows_special) and _continues(characters, piece)
        characters = characters + piece if continues else piece
        word = Word(name, True, False) if is_special else displayed_word(characters or name)
        words[len(words) - int(continues) :] = [word]
        tokens.append(displayed_token(name if is_special else piece or name, is_special, " " if is_special else piece))
        word_of.append(len(words) - 1)
        follows_special = is_special or known is None
    return DecodedWords(tuple(pieces), tuple(tokens), tuple(words), torch.tensor(word_of, dtype=torch.int64))


def _continues(word: str, piece: str) -> bool:
    """Return True if a token with the characters `piece` belongs to the current word, whose characters so far are
    `word`.
    """
    if not piece:
        return True
    if word.strip() and all(start != len(word) for start, _ in character_spans(word + piece)):
        return True
    if piece[0].isspace() or east_asian_width(piece[0]) == "W":
        return False
    return not word.strip() or word[-1].isalnum() == piece[0].isalnum()


def _pieces(tokenizer: Any, ids: list[int], context: list[int]) -> list[str]:
    """Return, for each of `ids`, the characters that this token adds to the decoded text of all tokens before it
    (`context` and the earlier ids). If several tokens form one character, the last of them adds it, and the others add
    an empty string.
    """
    pieces: list[str] = []
    done = tokenizer.decode(context, skip_special_tokens=False, clean_up_tokenization_spaces=False) if context else ""
    for stop in range(1, len(ids) + 1):
        text = tokenizer.decode([*context, *ids[:stop]], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if text.endswith("\ufffd") and stop < len(ids):  # the token ends in the middle of a character
            pieces.append("")
            continue
        pieces.append(text.removeprefix(done) if text.startswith(done) else tokenizer.decode(ids[stop - 1]))
        done = text
    return pieces


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of a tokenizer's special tokens. The unknown token is left out, because it stands for an ordinary
    word. It is included if the same id is also another special token, such as the end token.
    """
    names = ("bos", "eos", "sep", "pad", "cls", "mask")
    others = {getattr(tokenizer, f"{name}_token_id", None) for name in names}
    unknown = {tokenizer.unk_token_id} - others
    return set(tokenizer.all_special_ids) - unknown


class SpecialTokens(NamedTuple):
    """Ids of the special tokens that a tokenizer adds before and after every text, such as `[CLS]` and `[SEP]`."""

    before: list[int]
    after: list[int]

    @staticmethod
    def of(tokenizer: Any) -> "SpecialTokens":
        """Return the special tokens that a tokenizer adds before and after a text, found by tokenizing a short text."""
        encoded = tokenizer("a", return_special_tokens_mask=True, verbose=False)
        ids, is_text = encoded["input_ids"], [not special for special in encoded["special_tokens_mask"]]
        start, stop = is_text.index(True), len(is_text) - is_text[::-1].index(True)
        return SpecialTokens(ids[:start], ids[stop:])

    @property
    def size(self) -> int:
        """Number of special tokens that are added to a text."""
        return len(self.before) + len(self.after)

    def around(self, ids: list[int]) -> list[int]:
        """Return the token ids of a text with the special tokens added before and after them."""
        return [*self.before, *ids, *self.after]
