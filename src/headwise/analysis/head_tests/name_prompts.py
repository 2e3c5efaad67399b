"""Prompts with two names, one of which the model is to repeat (indirect object identification; Wang et al. 2022)."""

import re
from collections.abc import Collection
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.analysis.head_tests.token_spans import prompt_with_spans, require_fast
from headwise.checks import collection_of, whole_number
from headwise.errors import InputError
from headwise.shapes import Int

_NAMES = """
Alice Amy Andrew Anna Anthony Ben Brian Carl Charles Charlie Chris Christine Claire Daniel David Diana Edward Ella
Emily Emma Eric Frank George Grace Hannah Harry Helen Henry Jack Jacob James Jane Jason Jennifer Jessica John Joseph
Julia Karen Kate Kevin Laura Lisa Lucy Maria Mark Martin Mary Matthew Michael Nancy Nick Oliver Paul Peter Rachel
Rebecca Richard Robert Rose Ryan Sam Sarah Simon Sophie Stephen Steven Susan Thomas Tom Victoria William
"""
NAMES = _NAMES.split()
"""English first names, of which those are used that are one token each."""

TEMPLATES = (
    "When {A} and {B} walked home from the bakery, {C} handed a warm loaf to",
    "After {A} and {B} had dinner at the hotel, {C} gave the room key to",
    "While {A} and {B} waited for the train, {C} offered a magazine to",
    "Because {A} and {B} wanted to learn chess, {C} lent an old board to",
    "Before {A} and {B} left the museum, {C} showed a small painting to",
    "Last winter {A} and {B} shared a house, and {C} often wrote letters to",
    "Yesterday {A} and {B} met in the library, where {C} returned a book to",
    "At the market {A} and {B} bought apples, and then {C} passed the bag to",
    "On Sunday {A} and {B} repaired the boat, so {C} brought some tools to",
    "Once {A} and {B} had finished the exam, {C} sent a short message to",
    "During the concert {A} and {B} sat together, and {C} whispered something to",
    "The day {A} and {B} opened their shop, {C} sold the first ticket to",
    "In the garden {A} and {B} planted roses, until {C} threw the shovel to",
    "Although {A} and {B} disliked the plan, {C} explained every detail to",
    "As soon as {A} and {B} reached the harbour, {C} pointed the ship out to",
    "Long after {A} and {B} moved to the city, {C} still mailed postcards to",
)
"""Beginnings of sentences. {C} is one of {A} and {B}, and the other one of them follows."""

FEWEST_NAMES = 8
"""Least number of names."""

ROLES = ("indirect", "subject", "subject_again")
"""Places of a prompt: the name that follows, and the two occurrences of the other name."""


class NamePrompt(NamedTuple):
    """Token ids of a prompt with two names, whose correct continuation is the name of the indirect object.

    Attributes:
        places: positions of the indirect object's name and of both occurrences of the subject's name.
        answer, wrong: token ids of the indirect object's name and of the subject's.
        template: number of the template.
    """

    ids: Int[Tensor, " tokens"]
    places: tuple[int, int, int]
    answer: int
    wrong: int
    template: int


def name_prompts(
    tokenizer: Any,
    count: int,
    seed: int,
    names: Collection[str] = NAMES,
    templates: Collection[str] = TEMPLATES,
) -> list[NamePrompt]:
    """Draw `count` prompts with random names, using the templates in turn. The order of the two names alternates with
    each round over the templates: first the indirect object's name is before the subject's name (ABBA), then after it
    (BABA).
    """
    whole_number("prompts", count, least=2)
    whole_number("seed", seed, least=0)
    require_fast(tokenizer)
    texts = list(collection_of("templates", templates, of="texts"))
    for text in texts:
        if not isinstance(text, str) or re.findall("{.*?}", text) != ["{A}", "{B}", "{C}"] or text != text.rstrip():
            expected = "texts with {A}, {B} and {C} once each, in this order, that do not end with a blank"
            raise InputError("templates", expected=expected, got=repr(text))
    if len(texts) < 2:
        raise InputError("templates", expected="at least 2 texts", got=len(texts))
    candidates = list(dict.fromkeys(str(name) for name in collection_of("names", names, of="names")))
    usable = [name for name in candidates if all(_fits(tokenizer, text, name) for text in texts)]
    if len(usable) < FEWEST_NAMES:
        raise InputError(
            "tokenizer",
            expected=f"at least {FEWEST_NAMES} names of one token each, the same at each place of a text",
            got=f"{len(usable)} of {len(candidates)}",
            remedy="pass other names",
        )
    draws, prompts = Random(seed), []
    for number in range(count):
        template = number % len(texts)
        indirect, subject = draws.sample(usable, 2)
        is_indirect_first = number // len(texts) % 2 == 0
        pair = (indirect, subject) if is_indirect_first else (subject, indirect)
        ids, of_names = _tokens(tokenizer, texts[template], pair, subject)
        first, second, again = (place[0] for place in of_names)
        places = (first, second, again) if is_indirect_first else (second, first, again)
        prompts.append(NamePrompt(torch.tensor(ids), places, ids[places[0]], ids[places[1]], template))
    return prompts


def _fits(tokenizer: Any, text: str, name: str) -> bool:
    """Return True if a name is always a single token with the same id: at each of the three places for names in a
    template, and after the end of the template.
    """
    if not name or "{" in name:
        return False
    ids, places = _tokens(tokenizer, f"{text} {name}", (name, name), name)
    alone, _ = _tokens(tokenizer, text, (name, name), name)
    if any(len(place) != 1 for place in places) or ids[:-1] != alone:
        return False
    return len({ids[-1], *(ids[place[0]] for place in places)}) == 1 and ids[-1] != tokenizer.unk_token_id


def _tokens(tokenizer: Any, template: str, pair: tuple[str, str], again: str) -> tuple[list[int], list[list[int]]]:
    """Insert three names into a template: the two of `pair`, then `again`. Return the token ids of this prompt,
    including the special tokens before it, and the token positions of each name. Return empty positions if a token
    contains characters of a name and other characters.
    """
    text, spans = "", []
    for part, name in zip(re.split("{[ABC]}", template), (*pair, again, ""), strict=True):
        text += part
        spans.append((len(text), len(text) + len(name)))
        text += name
    ids, token_spans = prompt_with_spans(tokenizer, text)
    places: list[list[int]] = []
    for span_start, span_stop in spans[:3]:
        places.append([])
        for index, (start, stop) in enumerate(token_spans):
            if start < span_stop and stop > span_start:
                places[-1].append(index)
                if len(text[start:stop].strip()) > span_stop - span_start:
                    return ids, [[], [], []]
    return ids, places
