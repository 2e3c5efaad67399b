"""Attention of one head on one text, and the text: the parts of a view."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from headwise.analysis.roles import Role
from headwise.data.tokenization import Token, Word, character_spans
from headwise.page.columns import HeadPlace
from headwise.page.contents import HeadAttention, Picture
from headwise.shapes import Float, Int
from headwise.wording import number

LONGEST_WORD = 20
"""Number of characters of a word that are shown."""


def shortened(word: str) -> str:
    """Return a word for display: the middle of a word of more than 20 characters is replaced by an ellipsis."""
    if len(word) <= LONGEST_WORD or len(spans := character_spans(word)) <= LONGEST_WORD:
        return word
    half = (LONGEST_WORD - 1) // 2
    return f"{word[: spans[LONGEST_WORD - 1 - half][0]]}…{word[spans[-half][0] :]}"


class Link(NamedTuple):
    """Link between two words in one head: a word of the text, the other word that it attends to most, and the attention
    weight. Special tokens and words without a letter or digit are not linked, and no word is linked to the first word
    if the first token sees no other token.

    Attributes:
        query: index of the word.
        key: index of the other word.
        weight: attention weight from the first to the second.
        back: weight from the second to the first, if each is the other's strongest and both weights are larger than
            under uniform attention; otherwise None.
    """

    query: int
    key: int
    weight: float
    back: float | None


@dataclass(frozen=True, eq=False)
class ViewedText:
    """Text that a model read, as tokens and words. An image is a text of patches.

    Attributes:
        name: name of this text among those of a view, such as "text", "source" or "target".
        text: the text, up to where it was truncated; empty for an image.
        truncated: True if the end of the text was cut off.
        tokens: the tokens.
        words: the words, special tokens included.
        word_of: index of each token's word.
        ids: the token ids; None for the patches of an image.
        first_generated: index of the first token that the model generated; None if it generated none.
        picture: the image; None for a text.
    """

    name: str
    text: str
    truncated: bool
    tokens: tuple[Token, ...]
    words: tuple[Word, ...]
    word_of: Int[Tensor, " tokens"]
    ids: Int[Tensor, "1 tokens"] | None = None
    first_generated: int | None = None
    picture: Picture | None = None


@dataclass(frozen=True, eq=False)
class HeadView:
    """Attention of one head on one text: statistics, role, strongest links between words, and attention weights.

    Attributes:
        layer, head: zero-based numbers of the head.
        module: path of the attention module.
        kind: "self" or "cross" attention.
        role: what the head mostly attends to, by its statistics.
        means: value of every statistic, by name.
        rows: number of query rows behind each of them.
        links: strongest link of each word, strongest first.
        top_keys: indices of the words that each word attends to most, strongest first.
        top_weights: their weights.
        picture: weights between words, pooled to at most 64 rows and columns.
        received: attention that each word receives: the sum over its tokens of the mean weight of the token over the
            query rows that may attend to it; NaN if no row may.
        attention: weights between tokens.
    """

    layer: int
    head: int
    module: str
    kind: str
    role: Role
    means: Mapping[str, float]
    rows: Mapping[str, float]
    links: tuple[Link, ...]
    top_keys: Int[Tensor, "words top"]
    top_weights: Float[Tensor, "words top"]
    picture: Float[Tensor, "rows columns"]
    received: Float[Tensor, " key_words"]
    attention: HeadAttention

    def __repr__(self) -> str:
        return f"HeadView({self.name}, {self.role.name}, entropy {number(self.means.get('entropy'), '.4g')})"

    @property
    def name(self) -> str:
        """Name of the head, `layer.head`, zero-based."""
        return f"{self.layer}.{self.head}"

    @property
    def place(self) -> HeadPlace:
        """Place of the head in its model."""
        return HeadPlace(self.layer, self.head, self.kind, self.module)

    @property
    def identifiers(self) -> dict[str, Any]:
        """Values that identify the head in its model: layer, head, module and kind."""
        return {"layer": self.layer, "head": self.head, "module": self.module, "kind": self.kind}
