"""A text in a model's terms: its tokens, and the words they belong to."""

from dataclasses import dataclass
from typing import Any, NamedTuple
from unicodedata import east_asian_width

import torch
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.shapes import Int

NO_LIMIT = 10**9
"""From here on a tokenizer's largest length means that it has none."""


@dataclass(frozen=True)
class Word:
    """A word of the text, to show.

    It is `lexical` when it is neither a special token nor only punctuation and blanks.
    """

    text: str
    special: bool
    lexical: bool


class EncodedText(NamedTuple):
    """A text in the model's terms, and the word of each of its tokens."""

    text: str
    truncated: bool
    inputs: dict[str, Int[Tensor, "1 tokens"]]
    words: tuple[Word, ...]
    word_of: Int[Tensor, " tokens"]


def encode_text(model: Any, tokenizer: Any, text: Any, truncate: bool) -> EncodedText:
    """The text cut into tokens; `InputError` for one that is empty or too long."""
    _check_text(text)
    limit = longest_input(model, tokenizer)
    cut = truncate and limit is not None
    encoding = tokenizer(
        text,
        return_tensors="pt",
        return_special_tokens_mask=True,
        return_offsets_mapping=tokenizer.is_fast,
        truncation=cut,
        max_length=limit if cut else None,
        verbose=False,
    )
    added = encoding.pop("special_tokens_mask")[0].tolist()
    spans = encoding.pop("offset_mapping")[0].tolist() if tokenizer.is_fast else None
    ids = encoding["input_ids"][0].tolist()
    _check_ids(ids, limit, model.get_input_embeddings().num_embeddings)
    specials = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}  # an unknown word is still a word
    special = [bool(mark) or token in specials for mark, token in zip(added, ids, strict=True)]
    if spans is None:
        words, word_of = _pieces(tokenizer, ids, special)
    else:
        words, word_of = _words(text, tokenizer.convert_ids_to_tokens(ids), encoding.word_ids(), spans, special)
    end = max(stop for _, stop in spans) if spans is not None and cut else len(text)
    rest = text[end:].strip()
    kept = text[:end] if rest else text
    return EncodedText(kept, bool(rest), dict(encoding), words, word_of)


def text_model(given: Any) -> nn.Module:
    """The model, or its encoder where it also has a decoder, when it is one of `transformers` that reads text."""
    if not isinstance(given, nn.Module) or not hasattr(given, "config"):
        raise InputError("model", expected="a transformers model", got=type(given).__name__)
    model: Any = given
    if getattr(model.config, "is_encoder_decoder", False) and hasattr(model, "get_encoder"):
        model = model.get_encoder() or model
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise InputError("model", expected="a model that reads text", got=f"one that reads {model.main_input_name}")
    reads: nn.Module = model
    return reads


def _check_text(text: Any) -> None:
    if not isinstance(text, str):
        raise InputError("text", expected="a string", got=type(text).__name__)
    if not any(character.isprintable() and not character.isspace() for character in text):
        raise InputError("text", expected="at least one word", got="an empty text")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InputError("text", expected="text that can be written as UTF-8", got="bytes of another encoding")


def _check_ids(ids: list[int], limit: int | None, vocabulary: int) -> None:
    if not ids:
        raise InputError("text", expected="at least one token", got="a text that the tokenizer drops whole")
    if limit is not None and len(ids) > limit:
        raise InputError(
            "text",
            expected=f"at most {limit} tokens, the model's limit",
            got=len(ids),
            remedy="--truncate (truncate=True) cuts it there",
        )
    if max(ids) >= vocabulary:
        raise InputError("tokenizer", expected=f"ids below {vocabulary}, the model's vocabulary", got=max(ids))


def longest_input(model: Any, tokenizer: Any) -> int | None:
    """The most tokens the model takes, None where nothing limits it."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None:
        for module in model.modules():
            # Tables that count positions from after the padding index (RoBERTa) hold that many fewer.
            counts = isinstance(module, nn.Embedding) and module.num_embeddings == positions
            if counts and module.padding_idx is not None and module is not model.get_input_embeddings():
                positions -= module.padding_idx + 1
                break
    limits = [limit for limit in (positions, tokenizer.model_max_length) if limit and 0 < limit < NO_LIMIT]
    return min(limits, default=None)


def _words(
    text: str, tokens: list[str], origins: list[int | None], spans: list[list[int]], special: list[bool]
) -> tuple[tuple[Word, ...], Int[Tensor, " tokens"]]:
    """Tokens joined to words by their place in the text, `spans`, and the tokenizer's own cut, `origins`.

    A special token stands alone. Another token goes on with the word before it when the tokenizer cut both from one
    piece and they touch, with no blank between; a wide character (Chinese, say) begins a word. Neither is enough
    alone: some tokenizers take a whole text for one piece, others keep the blank in the token.
    """
    words: list[Word] = []
    word_of: list[int] = []
    begin, origin, end = 0, None, -1  # the last word's beginning, piece and end
    for token, piece, (start, stop), alone in zip(tokens, origins, spans, special, strict=True):
        if alone or start == stop:
            words.append(Word(token, alone, False))
            origin = None
        else:
            goes_on = piece is not None and piece == origin and start <= end and not text[start].isspace()
            if goes_on and start == end and east_asian_width(text[start]) == "W":
                goes_on = False
            if not goes_on:
                begin = start
                words.append(Word("", False, False))
            origin, end = piece, max(stop, end) if goes_on else stop
            words[-1] = _word(text[begin:end])
        word_of.append(len(words) - 1)
    return tuple(words), torch.tensor(word_of)


def _pieces(tokenizer: Any, ids: list[int], special: list[bool]) -> tuple[tuple[Word, ...], Int[Tensor, " tokens"]]:
    """Every token as a word of its own, for tokenizers that do not tell where a token came from."""
    words = [
        Word(tokenizer.convert_ids_to_tokens(token), True, False) if alone else _word(tokenizer.decode([token]))
        for token, alone in zip(ids, special, strict=True)
    ]
    return tuple(words), torch.arange(len(ids))


def _word(piece: str) -> Word:
    """A word to show: on one line, and blanks and control characters made visible."""
    shown = " ".join(piece.split()) or piece.replace(" ", "") or "␣"
    shown = "".join(character if character.isprintable() else repr(character)[1:-1] for character in shown)
    return Word(shown, False, any(character.isalnum() for character in piece))
