"""Tokens of the words of a sentence, by characters."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from headwise.data.tokenization import SpecialTokens
from headwise.errors import InputError
from headwise.shapes import Int


class AlignedTokens(NamedTuple):
    """Tokens of a text, and the word of each.

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
    """Tokenize a text, and find the tokens of each word. A token belongs to the words with whose characters it
    overlaps, blanks aside. Words that share a token, and those without a token, are not aligned.

    Args:
        tokenizer: a tokenizer that states the characters of each token.
        text: the text.
        spans: start and stop of the characters of each word; None for a word that has none.
        start_token: id of a token that is put before the text, in addition to the special tokens of the tokenizer.

    Raises:
        InputError: the tokenizer does not state characters.
    """
    require_fast(tokenizer)
    special = SpecialTokens.of(tokenizer)
    before = [*([] if start_token is None else [start_token]), *special.before]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    word_at = torch.full((len(text) + 1,), -1, dtype=torch.int64)
    for index, span in enumerate(spans):
        if span is not None:
            word_at[span[0] : span[1]] = index
    is_aligned = [False] * len(spans)
    shared: set[int] = set()
    word_of = []
    for start, stop in encoded["offset_mapping"]:
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
    ids = [*before, *encoded["input_ids"], *special.after]
    padded = [*[-1] * len(before), *word_of, *[-1] * len(special.after)]
    of_words = torch.tensor([word if word >= 0 and is_aligned[word] else -1 for word in padded])
    return AlignedTokens(torch.tensor(ids), of_words, is_aligned)


def require_fast(tokenizer: Any) -> None:
    """Raise `InputError` if a tokenizer does not state the characters of each token."""
    if not getattr(tokenizer, "is_fast", False):
        expected = "a fast tokenizer, which states the characters of each token"
        raise InputError("tokenizer", expected=expected, got=type(tokenizer).__name__)
