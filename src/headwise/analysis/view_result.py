"""Result of `view`: statistics, words and pictures of every head on one text."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from headwise.analysis.roles import Role
from headwise.data.tokenization import Word
from headwise.errors import InputError
from headwise.shapes import Float, Int

SMALLEST_SHOWN_WEIGHT = 0.005
"""Weight of the weakest link that is shown: a smaller one would print as 0.00."""


@dataclass(frozen=True)
class Link:
    """Link between two words in one head: a word of the text, the other word that it attends to most, and the attention
    weight. Special tokens and words without a letter or digit are not linked.

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


def link_strength(link: Link) -> tuple[float, int]:
    """Return a key that sorts links by attention weight, largest first, and links of equal rounded weight in the order
    of the text.
    """
    return -round(link.weight, 4), link.query


@dataclass(frozen=True)
class HeadView:
    """Attention of one head on one text: statistics, role, strongest links between words, and a small picture of the
    weights.

    Attributes:
        layer, head: zero-based numbers of the head.
        role: what the head mostly attends to, by its statistics.
        means: value of every statistic, by name.
        links: strongest link of each word, strongest first.
        top_keys: indices of the words that each word attends to most, strongest first.
        top_weights: their weights.
        picture: weights between words, pooled to at most 64 rows and columns.
    """

    layer: int
    head: int
    role: Role
    means: Mapping[str, float]
    links: tuple[Link, ...]
    top_keys: Int[Tensor, "words top"]
    top_weights: Float[Tensor, "words top"]
    picture: Float[Tensor, "side side"]

    @property
    def name(self) -> str:
        """Name of the head, `layer.head`, zero-based."""
        return f"{self.layer}.{self.head}"


@dataclass(frozen=True)
class View:
    """Attention of every head of a model on one text.

    Attributes:
        title: name of the model, for display.
        text: the text, up to where it was truncated.
        truncated: True if the end of the text was cut off.
        words: words of the text, special tokens included.
        tokens: number of tokens.
        heads: views of the heads, by layer and head.
    """

    title: str
    text: str
    truncated: bool
    words: tuple[Word, ...]
    tokens: int
    heads: tuple[HeadView, ...]

    def head(self, layer: int, head: int) -> HeadView:
        """Return the attention of one head on the text, by zero-based layer and head.

        Raises:
            InputError: the view has no such head.
        """
        for candidate in self.heads:
            if (candidate.layer, candidate.head) == (layer, head):
                return candidate
        raise InputError("head", expected="a (layer, head) of this view", got=(layer, head))

    def strongest_links(self, head: HeadView, count: int) -> list[Link]:
        """Return up to `count` links of a head with the largest attention weights, each from a word to the other word
        that it attends to most. Links with a weight below 0.005 (`SMALLEST_SHOWN_WEIGHT`) are left out. If words occur
        several times in the text, only the strongest link from one spelling to another is included.
        """
        visible = [link for link in head.links if link.weight >= SMALLEST_SHOWN_WEIGHT]
        by_pair = {(self.words[link.query].text, self.words[link.key].text): link for link in reversed(visible)}
        return sorted(by_pair.values(), key=link_strength)[:count]

    def role_title(self, role: Role) -> str:
        """Return the name of a role for display, with "the first token" replaced by the first word of the text."""
        return role.name.replace("the first token", self.words[0].text)

    def select(self, layers: Collection[int] = (), heads: Collection[int] = ()) -> "View":
        """Return a view with only the heads in these layers and with these indices; an empty collection selects all.

        Raises:
            InputError: the view has no such layer or head.
        """
        for option, selected, numbers in (
            ("layer", layers, sorted({head.layer for head in self.heads})),
            ("head", heads, sorted({head.head for head in self.heads})),
        ):
            is_gapless = len(numbers) == numbers[-1] - numbers[0] + 1
            expected = f"{numbers[0]} to {numbers[-1]}" if is_gapless else f"one of {', '.join(map(str, numbers))}"
            for number in selected:
                if number not in numbers:
                    raise InputError(option, expected=expected, got=number)
        views = [
            view for view in self.heads if (not layers or view.layer in layers) and (not heads or view.head in heads)
        ]
        return replace(self, heads=tuple(views))
