"""Tokens of a text with the characters that each consists of."""

from typing import Any

from headwise.data.tokenization import SpecialTokens
from headwise.errors import InputError


def require_fast(tokenizer: Any) -> None:
    """Raise `InputError` unless the tokenizer is a fast one of `transformers`, which returns the character positions of
    each token.
    """
    if not getattr(tokenizer, "is_fast", False):
        expected = "a fast tokenizer, which states the characters of each token"
        raise InputError("tokenizer", expected=expected, got=type(tokenizer).__name__)


def tokens_with_spans(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the token ids of a text without special tokens, and the start and stop position of each token's characters
    in the text.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return list(encoded["input_ids"]), [(start, stop) for start, stop in encoded["offset_mapping"]]


def prompt_with_spans(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the token ids of a text after the special tokens that the tokenizer puts before a text, but without those
    at the end. Also return the start and stop position of each token's characters; special tokens have (0, 0).
    """
    before = SpecialTokens.of(tokenizer).before
    ids, spans = tokens_with_spans(tokenizer, text)
    return [*before, *ids], [*[(0, 0)] * len(before), *spans]
