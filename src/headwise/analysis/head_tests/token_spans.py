"""Tokens of a text with the characters that each consists of."""

from typing import Any

from headwise.data.tokenization import SpecialTokens
from headwise.errors import InputError


def require_fast(tokenizer: Any) -> None:
    """Raise `InputError` if a tokenizer does not state the characters of each token."""
    if not getattr(tokenizer, "is_fast", False):
        expected = "a fast tokenizer, which states the characters of each token"
        raise InputError("tokenizer", expected=expected, got=type(tokenizer).__name__)


def tokens_with_spans(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the token ids of a text, without special tokens, and start and stop of the characters of each."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return list(encoded["input_ids"]), [(start, stop) for start, stop in encoded["offset_mapping"]]


def prompt_with_spans(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the token ids of the start of a text, after the special tokens that the tokenizer puts before a text and
    that have no characters, and start and stop of the characters of each.
    """
    before = SpecialTokens.of(tokenizer).before
    ids, spans = tokens_with_spans(tokenizer, text)
    return [*before, *ids], [*[(0, 0)] * len(before), *spans]
