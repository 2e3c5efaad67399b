"""Pairs of prompts as text: the tokens of both, and the tokens of their answers."""

from collections.abc import Sequence
from typing import Any

import torch

from headwise.errors import InputError


def patching_prompts(
    tokenizer: Any,
    clean: str | Sequence[str],
    corrupted: str | Sequence[str],
    *,
    answer: str | Sequence[str],
    wrong: str | Sequence[str],
) -> dict[str, Any]:
    """Tokenize pairs of prompts and their answers for the functions of patching, which take the result as `**pair`.
    Shorter prompts are padded on the right.

        pair = hw.patching_prompts(tokenizer, "Paris is in", "Rome is in", answer=" France", wrong=" Italy")
        hw.activation_patching(model, **pair)

    The two prompts of a pair must have equally many tokens, since patching puts the output at one token into the run at
    the same token. An answer must continue each prompt of its pair with one and the same token: the tokens of prompt
    and answer together are compared with those of the prompt. Answers usually start with a space.

    Args:
        tokenizer: a tokenizer of `transformers` that puts no special token after a text.
        clean: one prompt or several, which the model answers correctly.
        corrupted: as many prompts, which differ in what decides the answer.
        answer: right answer of each clean prompt; one for all, or one per prompt.
        wrong: right answer of each corrupted prompt, in the same form.

    Returns:
        `clean` and `corrupted`, each a dictionary of `input_ids` and `attention_mask`, both `(prompts, length)`;
        `answer` and `wrong`, token ids `(prompts,)`.

    Raises:
        InputError: another number of prompts or answers; prompts of a pair with different numbers of tokens; an answer
            that is not one token; a tokenizer that ends every text with a special token.
    """
    cleans, corrupteds = _texts("clean", clean), _texts("corrupted", corrupted)
    if len(cleans) != len(corrupteds):
        raise InputError("corrupted", expected=f"{len(cleans)} prompts, as many as in clean", got=len(corrupteds))
    pairs = [
        (_prompt_tokens(tokenizer, "clean", one), _prompt_tokens(tokenizer, "corrupted", other))
        for one, other in zip(cleans, corrupteds, strict=True)
    ]
    for number, (one, other) in enumerate(pairs):
        if len(one) != len(other):
            expected = f"as many tokens in the corrupted prompt of pair {number} as in the clean one, {len(one)}"
            raise InputError("corrupted", expected=expected, got=len(other))
    answers = {
        name: torch.tensor(
            [
                _answer_token(tokenizer, name, text, {clean: ids[0], corrupted: ids[1]})
                for text, clean, corrupted, ids in zip(
                    _per_prompt(name, given, len(cleans)), cleans, corrupteds, pairs, strict=True
                )
            ]
        )
        for name, given in (("answer", answer), ("wrong", wrong))
    }
    return {
        "clean": _padded(tokenizer, [one for one, _ in pairs]),
        "corrupted": _padded(tokenizer, [other for _, other in pairs]),
        **answers,
    }


def _texts(name: str, given: Any) -> list[str]:
    """Return one text or a sequence of texts as a list.

    Raises:
        InputError: it is neither, or empty.
    """
    texts = [given] if isinstance(given, str) else list(given) if isinstance(given, Sequence) else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise InputError(name, expected="a text or a sequence of texts, none of them empty", got=repr(given))
    return texts


def _per_prompt(name: str, given: Any, number: int) -> list[str]:
    """Return one answer for each of `number` prompts."""
    texts = _texts(name, given)
    if len(texts) == 1:
        return texts * number
    if len(texts) != number:
        raise InputError(name, expected=f"one answer for all prompts, or {number}", got=len(texts))
    return texts


def _token_ids(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer(text)["input_ids"]]


def _prompt_tokens(tokenizer: Any, name: str, prompt: str) -> list[int]:
    """Return the token ids of a prompt, whose last one is a token of the text.

    Raises:
        InputError: the tokenizer puts a special token after the text, so that no answer follows the last token.
    """
    ids = _token_ids(tokenizer, prompt)
    bare = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if not ids or not bare or ids[len(ids) - len(bare) :] != list(bare):
        last = tokenizer.convert_ids_to_tokens(ids[-1]) if ids else "no token"
        expected = "a tokenizer that ends a text with the text's last token"
        remedy = "tokenize the prompts yourself, and pass at="
        raise InputError(name, expected=expected, got=f"{last} at the end", remedy=remedy)
    return ids


def _answer_token(tokenizer: Any, name: str, answer: str, prompts: dict[str, list[int]]) -> int:
    """Return the token with which an answer continues every prompt, of the given token ids.

    Raises:
        InputError: the answer adds another number of tokens, other tokens after other prompts, or changes the prompt's.
    """
    found = set()
    for prompt, ids in prompts.items():
        together = _token_ids(tokenizer, prompt + answer)
        if together[: len(ids)] != ids or len(together) != len(ids) + 1:
            got = f"{answer!r}, which is {tokenizer.convert_ids_to_tokens(together[len(ids) :])} after {prompt!r}"
            expected = "an answer that continues the prompt with one token"
            raise InputError(name, expected=expected, got=got, remedy="most answers start with a space")
        found.add(together[-1])
    if len(found) != 1:
        got = f"{answer!r}, with the tokens {tokenizer.convert_ids_to_tokens(sorted(found))}"
        raise InputError(name, expected="an answer that is the same token after both prompts", got=got)
    return found.pop()


def _padded(tokenizer: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """Return token ids and attention mask of prompts, padded on the right: `(prompts, length)` each."""
    length = max(map(len, prompts))
    filler = getattr(tokenizer, "pad_token_id", None) or 0
    return {
        "input_ids": torch.tensor([ids + [filler] * (length - len(ids)) for ids in prompts]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids in prompts]),
    }
