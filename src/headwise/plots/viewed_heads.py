"""Kinds of plots of the heads of one text: all kinds of a table of heads, and attention between words."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from headwise.checks import collection_of, head_pair
from headwise.errors import InputError
from headwise.plots.head_numbers import HeadNumbers
from headwise.plots.kinds import Kind
from headwise.plots.pattern import draw_pattern
from headwise.plots.received import chosen_heads, draw_received
from headwise.plots.role_colours import role_style
from headwise.plots.word_lines import HeadLines, draw_word_lines
from headwise.shapes import Float, Int

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, eq=False, kw_only=True)
class ViewedHead:
    """Attention of one head between the words of a text, or from those of one text to those of another, for plots.

    Attributes:
        layer, head: zero-based numbers of the head.
        title: title of plots of the head, such as its name and role.
        role: name of the role.
        means: value of every statistic, by name.
        queries: words that the head attends from.
        keys: words that the head attends to.
        special: True for each special token among the queries; no word is special if it is empty.
        picture: weights from queries to keys, pooled to groups of words if there are many.
        top_keys: indices of the keys that each query attends to most.
        top_weights: their weights.
        received: attention that each key receives, the mean over the queries that may attend to it.
    """

    layer: int
    head: int
    title: str
    role: str
    means: Mapping[str, float]
    queries: Sequence[str]
    keys: Sequence[str]
    special: Sequence[bool] = ()
    picture: Float[Tensor, "rows columns"]
    top_keys: Int[Tensor, "queries top"]
    top_weights: Float[Tensor, "queries top"]
    received: Float[Tensor, " keys"]


@dataclass(frozen=True)
class ViewedHeads:
    """Heads of a model on one text, for plots.

    Attributes:
        heads: the heads.
        title: end of titles, such as the model.
        units: unit of each statistic that has one.
        meanings: meaning of statistics in one sentence, for labels.
    """

    heads: Sequence[ViewedHead]
    title: str = ""
    units: Mapping[str, str] = field(default_factory=dict)
    meanings: Mapping[str, str] = field(default_factory=dict)

    def kinds(self) -> dict[str, Kind]:
        """Return every kind of plot of these heads by name: those of a table of heads, and "pattern", "lines" and
        "received".
        """
        names = dict.fromkeys(name for head in self.heads for name in head.means)
        numbers = HeadNumbers(
            heads=[(head.layer, head.head) for head in self.heads],
            values={name: [head.means.get(name, math.nan) for head in self.heads] for name in names},
            roles=[head.role for head in self.heads],
            title=self.title,
            units=self.units,
            meanings=self.meanings,
        )
        return numbers.kinds() | {
            "pattern": Kind(self._draw_pattern, ("heads",)),
            "lines": Kind(self._draw_lines, ("heads",)),
            "received": Kind(self._draw_received, ("heads",)),
        }

    def _chosen(self, heads: Any) -> list[ViewedHead]:
        """Return the heads `(layer, head)` in the collection `heads`.

        Raises:
            InputError: `heads` is empty or None, or there is no such head.
        """
        expected = "a collection of (layer, head)"
        pairs = [] if heads is None else list(collection_of("heads", heads, of="heads (layer, head)"))
        if not pairs:
            raise InputError("heads", expected=expected, got="none", remedy="such as heads=[(0, 2)]")
        by_place = {(head.layer, head.head): head for head in self.heads}
        pairs = [head_pair("heads", pair, of=expected) for pair in pairs]
        for pair in pairs:
            if pair not in by_place:
                raise InputError("heads", expected="each a (layer, head) of this view", got=pair)
        return [by_place[pair] for pair in pairs]

    def _draw_pattern(self, heads: Any = None, *, ax: Any = None) -> "Axes":
        """Draw the weights of one head between words."""
        chosen = self._chosen(heads)
        if len(chosen) > 1:
            remedy = "ax= draws each on axes of its own"
            raise InputError("heads", expected="one head for the kind 'pattern'", got=len(chosen), remedy=remedy)
        (head,) = chosen
        return draw_pattern(head.picture, head.queries, head.keys, title=head.title, ax=ax)

    def _draw_lines(self, heads: Any = None, *, ax: Any = None) -> "Axes":
        """Draw lines from each word to the words that it attends to most, with a panel for each of the heads."""
        panels = [
            HeadLines(
                title=head.title,
                colour=role_style(head.role).colour,
                queries=head.queries,
                keys=head.keys,
                special=head.special,
                top_keys=head.top_keys,
                top_weights=head.top_weights,
            )
            for head in self._chosen(heads)
        ]
        return draw_word_lines(panels, ax=ax)

    def _draw_received(self, heads: Any = None, *, ax: Any = None) -> "Axes":
        """Draw the attention that each word receives, for all or some heads."""
        lines = {(head.layer, head.head): head.received.tolist() for head in self.heads}
        chosen = chosen_heads(lines, heads)
        keys = {tuple(head.keys) for head in self.heads if (head.layer, head.head) in chosen}
        return draw_received(chosen, words=next(iter(keys)) if len(keys) == 1 else (), title=self.title, ax=ax)
