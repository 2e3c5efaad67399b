"""Needles in haystacks: sentences that are hidden in a long text, with questions about them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from headwise.analysis.head_tests.token_spans import tokens_with_spans
from headwise.data.documents import read_documents
from headwise.errors import InputError

THINGS = ("password", "motto", "access code", "callsign", "code name", "secret phrase")
_PLACES = """
Oslo Lima Cairo Dublin Prague Havana Nairobi Vienna Lisbon Seoul Denver Quito Athens Manila Geneva Warsaw Tunis Bergen
Kyoto Boston
"""
PLACES = _PLACES.split()
_ANSWERS = """
amber falcon river candle winter marble orange violin silver copper garden rocket lemon castle tiger pepper ocean
button thunder velvet hammer island mirror pencil desert kitten ladder basket cotton saddle turtle anchor
"""
ANSWERS = _ANSWERS.split()
"""Words of which needles are drawn."""

WORDS = 5
"""Number of words of an answer."""


class Needle(NamedTuple):
    """Sentence that is hidden in a long text, with a question about it. The answer to the question is a part of the
    sentence.

    Attributes:
        before: the sentence up to the answer.
        answer: the answer, which the model must repeat.
        after: the end of the sentence.
        question: the question after the text, up to the answer.
    """

    before: str
    answer: str
    after: str
    question: str


class Haystack(NamedTuple):
    """Long text in which a sentence (the needle) is hidden, followed by a question about this sentence.

    Attributes:
        text: the text, up to the answer.
        answer: start and stop of the needle's answer in it, in characters.
        needle: number of the needle.
        length: number of tokens that the text was to have.
        depth: share of the text that precedes the needle.
        continuation: the answer after the question, with the blank before it.
    """

    text: str
    answer: tuple[int, int]
    needle: int
    length: int
    depth: float
    continuation: str


def draw_needles(count: int, seed: int) -> list[Needle]:
    """Draw `count` random sentences with different questions, such as "The motto of Oslo is amber falcon river candle
    winter".
    """
    draws = Random(seed)
    subjects = [(thing, place) for thing in THINGS for place in PLACES]
    if count > len(subjects):
        raise InputError("needles", expected=f"at most {len(subjects)}", got=count)
    needles = []
    for thing, place in draws.sample(subjects, count):
        start = f"The {thing} of {place} is"
        question = f"Question: What is the {thing} of {place}?\nAnswer: {start}"
        needles.append(Needle(f"{start} ", " ".join(draws.sample(ANSWERS, WORDS)), ".", question))
    return needles


def read_haystack(source: str | Path | None, column: str = "text") -> str:
    """Return the long text in which sentences are hidden. It consists of all documents of a file or folder, or by
    default of the help topics that are included in Python (`pydoc_data.topics`).
    """
    if source is None:
        from pydoc_data.topics import topics

        texts = [topics[name] for name in sorted(topics)]
    else:
        texts = [document.text for document in read_documents(source, column)]
    text = "\n\n".join(each.strip() for each in texts if each.strip())
    if not text:
        raise InputError("haystack", expected="a text", got=f"none in {source}")
    return text


def haystacks(
    tokenizer: Any, text: str, needles: Sequence[Needle], lengths: Sequence[int], depths: Sequence[float], seed: int
) -> Iterator[Haystack]:
    """Yield one text for each combination of a hidden sentence (needle), a length in tokens, and a depth (the share of
    the text before the needle). The needle is inserted after a whole sentence or paragraph, the last one that ends
    before this depth.

    For each needle, the long text starts at a random paragraph.
    """
    draws = Random(seed)
    starts = [0, *(index + 2 for index in range(len(text) - 1) if text.startswith("\n\n", index))]
    for number, needle in enumerate(needles):
        hidden = f"{needle.before}{needle.answer}{needle.after}"
        if needle.answer in text:
            raise InputError("haystack", expected="a text without the answers of needles", got=repr(needle.answer))
        overhead = len(tokenizer(f"{hidden}\n\n{needle.question} {needle.answer}", verbose=False)["input_ids"])
        start = draws.choice(starts)
        long = f"{text[start:]}\n\n{text[:start]}"
        for length in lengths:
            room = length - overhead
            if room < 1:
                raise InputError("lengths", expected="room for needle and question", got=length)
            part = long[: 40 * room + 100]
            _, spans = tokens_with_spans(tokenizer, part)
            if len(spans) < room:
                raise InputError("haystack", expected=f"a text of at least {room} tokens", got=len(spans))
            part = part[: spans[room - 1][1]]
            for depth in depths:
                limit = round(depth * len(part))
                ends = [
                    part.rfind(mark, 0, limit) + len(mark) for mark in (". ", ".\n", "\n\n") if mark in part[:limit]
                ]
                cut = len(part) if depth >= 1.0 else max(ends, default=0)
                before, after = part[:cut].rstrip(), part[cut:].strip()
                opening = f"{before}\n\n{needle.before}" if before else needle.before
                whole = f"{opening}{needle.answer}{needle.after}\n\n{after}".rstrip()
                answer = (len(opening), len(opening) + len(needle.answer))
                prompt = f"{whole}\n\n{needle.question}"
                yield Haystack(prompt, answer, number, length, depth, f" {needle.answer}")
