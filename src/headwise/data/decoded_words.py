"""Token ids without a text, such as those that a model generated, as tokens and words for display."""

from collections.abc import Sequence
from typing import Any, NamedTuple
from unicodedata import east_asian_width

import torch
from torch import Tensor

from headwise.data.special_tokens import special_ids
from headwise.data.tokenization import Token, Word, character_spans, displayed_token, displayed_word
from headwise.shapes import Int

CONTEXT = 16
"""Number of tokens before those that are decoded, at most, that are decoded with them."""


class DecodedWords(NamedTuple):
    """Decoded tokens, for display.

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
    """Decode token ids, and group the tokens into words. A word starts at a token that begins with white space, at a
    special token and after it, at a wide character (such as a Chinese one), and between letters or digits and other
    characters, but never within a character as readers see it, such as a flag.

    Args:
        tokenizer: the tokenizer.
        ids: the token ids.
        context: token ids before these, which may decide whether the first token begins with white space.
    """
    special = special_ids(tokenizer)
    names = tokenizer.convert_ids_to_tokens(ids)
    pieces = _pieces(tokenizer, ids, list(context[-CONTEXT:]))
    tokens, words, word_of = [], list[Word](), []
    characters, follows_special = "", True
    for token, name, piece in zip(ids, names, pieces, strict=True):
        is_special = token in special
        continues = not is_special and not follows_special and _continues(characters, piece)
        characters = characters + piece if continues else piece
        word = Word(name, True, False) if is_special else displayed_word(characters or name)
        words[len(words) - int(continues) :] = [word]
        tokens.append(displayed_token(name if is_special else piece or name, is_special, " " if is_special else piece))
        word_of.append(len(words) - 1)
        follows_special = is_special
    return DecodedWords(tuple(pieces), tuple(tokens), tuple(words), torch.tensor(word_of, dtype=torch.int64))


def _continues(word: str, piece: str) -> bool:
    """Return True if the characters of a token continue a word."""
    if not piece:
        return True
    if word.strip() and all(start != len(word) for start, _ in character_spans(word + piece)):
        return True
    if piece[0].isspace() or east_asian_width(piece[0]) == "W":
        return False
    return not word.strip() or word[-1].isalnum() == piece[0].isalnum()


def _pieces(tokenizer: Any, ids: list[int], context: list[int]) -> list[str]:
    """Return the characters that each token adds to the decoded text after `context`. The last token of a character
    that consists of several adds this character.
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
