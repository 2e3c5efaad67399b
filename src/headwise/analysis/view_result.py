"""Result of `view`: statistics, links between words and attention weights of every head on one text."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from headwise.analysis.focus import Focus, find_heads
from headwise.analysis.head_view import HeadView, Link, ViewedText, shortened
from headwise.analysis.roles import Role
from headwise.analysis.view_contents import title_role_word, view_html
from headwise.checks import named_head, pair_of
from headwise.data.tokenization import Word
from headwise.errors import InputError, require
from headwise.page.columns import ModelIdentity
from headwise.plots.kinds import plot_kind
from headwise.plots.words import ViewedHead, ViewedHeads
from headwise.statistics.columns import column_named
from headwise.statistics.registry import STATISTICS
from headwise.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LONGEST_TEXT = 60
"""Largest number of characters of a text in `repr`."""

SMALLEST_SHOWN_WEIGHT = 0.005
"""Weight of the weakest link that is shown: a smaller one would print as 0.00."""


@dataclass(frozen=True, eq=False)
class View:
    """Attention of every head of a model on one text, or on a source and a target text.

    Attributes:
        title: name of the model, for display.
        texts: the texts that the model read, one or two.
        heads: views of the heads, by layer and head.
        head_count: number of heads of the model that were viewed, also of those that `select` left out.
        identity: identity of the model; None if it is unknown.
    """

    title: str
    texts: tuple[ViewedText, ...]
    heads: tuple[HeadView, ...]
    head_count: int
    identity: ModelIdentity | None = None

    @property
    def text(self) -> str:
        """The first text, up to where it was truncated."""
        return self.texts[0].text

    @property
    def truncated(self) -> bool:
        """True if the end of a text was cut off."""
        return any(text.truncated for text in self.texts)

    @property
    def words(self) -> tuple[Word, ...]:
        """Words of the first text, special tokens included."""
        return self.texts[0].words

    @property
    def tokens(self) -> int:
        """Number of tokens of all texts."""
        return sum(len(text.tokens) for text in self.texts)

    def query_words(self, head: HeadView) -> tuple[Word, ...]:
        """Return the words that a head attends from."""
        return self.texts[head.attention.queries].words

    def key_words(self, head: HeadView) -> tuple[Word, ...]:
        """Return the words that a head attends to."""
        return self.texts[head.attention.keys].words

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
        that it attends to most. Links with a weight below 0.005 (`SMALLEST_SHOWN_WEIGHT`) are left out.
        """
        return [link for link in head.links if link.weight >= SMALLEST_SHOWN_WEIGHT][:count]

    def word_label(self, text: int, index: int) -> str:
        """Return a word of text number `text` for display: long words are shortened, and a word that occurs several
        times is followed by its position among all words of the text, counted from 1, such as `the (3)`.
        """
        words = self.texts[text].words
        label = shortened(words[index].text)
        occurrences = self._occurrences[text][words[index].text]
        return label if occurrences == 1 else f"{label} ({index + 1})"

    @cached_property
    def _occurrences(self) -> list[Counter[str]]:
        """Number of occurrences of each word, for each text."""
        return [Counter(word.text for word in text.words) for text in self.texts]

    def role_title(self, role: Role) -> str:
        """Return the name of a role for display, with "the first token" replaced by the first word of the text."""
        return role.name.replace("the first token", title_role_word([self]) or "the first token")

    def select(self, layers: Collection[int] = (), heads: Collection[int | str | tuple[int, int]] = ()) -> "View":
        """Return a view with only the heads in these layers and with these indices; an empty collection selects all.

        Args:
            layers: numbers of layers.
            heads: indices of heads in all selected layers, and single heads: `(5, 11)` or "5.11".

        Raises:
            InputError: the view has no such layer or head, or a single head is in none of the `layers`.

        Example:
            >>> seen.select(heads=["5.11", (0, 3)]).heads  # doctest: +SKIP
        """
        named = [named_head(head) for head in heads]
        indices = [head for head in named if not isinstance(head, tuple)]
        single = [self.head(*pair_of("head", head, of="(layer, head)")) for head in named if isinstance(head, tuple)]
        for view in single:
            if layers and view.layer not in layers:
                raise InputError("head", expected=f"a head of the layers {list(layers)}", got=view.name)
        for option, selected, numbers in (
            ("layer", layers, sorted({head.layer for head in self.heads})),
            ("head", indices, sorted({head.head for head in self.heads})),
        ):
            is_gapless = len(numbers) == numbers[-1] - numbers[0] + 1
            expected = f"{numbers[0]} to {numbers[-1]}" if is_gapless else f"one of {', '.join(map(str, numbers))}"
            for number in selected:
                if number not in numbers:
                    raise InputError(option, expected=expected, got=number)
        views = (view for view in self.heads if not layers or view.layer in layers)
        return replace(
            self, heads=tuple(v for v in views if not named or v.head in indices or (v.layer, v.head) in named)
        )

    def table(self) -> Any:
        """Return a pandas DataFrame with one row per head: layer, head, module, kind, role, and the value of every
        statistic on the text.

        Raises:
            MissingExtra: pandas is not installed.
        """
        return require("pandas", purpose="a table", extra="tables").DataFrame(
            [{**head.identifiers, "role": head.role.name, **head.means} for head in self.heads]
        )

    def find(self, focus: Sequence[Any], *, kind: str = "received", name: str | None = None) -> Focus:
        """Rank the heads by how much more attention given words receive, or exchange, than under uniform attention over
        the same keys.

        The module `headwise.analysis.focus` has the formulas, and the rule by which a head has a focus.

        Args:
            focus: words, each with all its occurrences in the text, or indices of words. Of an encoder-decoder, words
                of the source.
            kind: "received" from other words, or "exchanged" between the words.
            name: name of the focus, for display; by default the words.

        Raises:
            InputError: a word does not occur, no word is left to compare with, or the weights of a long text were not
                kept.

        Example:
            >>> seen = headwise.view(model, tokenizer, "Do you like coffee or tea?")  # doctest: +SKIP
            >>> seen.find(["coffee", "tea"]).verdict  # doctest: +SKIP
        """
        return find_heads([self], focus, kind, name)

    def _repr_html_(self) -> str:
        """Return a table of the heads and their page for a notebook."""
        return view_html([self])

    def __repr__(self) -> str:
        text = " ".join(self.text.split())
        shown = text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}…"
        words = counted(len(self.words), "word")
        return f"View({counted(len(self.heads), 'head')} of {self.title}, {words}: {shown!r})"

    def plot(
        self,
        statistic: str | None = None,
        *,
        kind: str = "heatmap",
        against: str | None = None,
        heads: Collection[tuple[int, int]] | None = None,
        top: int | None = None,
        ax: Any = None,
    ) -> "Axes":
        """Draw a plot of the heads on this text, and return its matplotlib axes. Notebooks display these;
        `ax.figure.savefig("x.svg")` saves the plot as SVG, PDF or PNG.

        | kind          | plot                                                                        | option `heads` |
        | ------------- | --------------------------------------------------------------------------- | -------------- |
        | "heatmap"     | `statistic` of every head, layers down and heads across                     |                |
        | "ranking"     | heads in descending order of `statistic`                                    |                |
        | "scatter"     | one point per head, `statistic` against another one, coloured by role       |                |
        | "roles"       | the role of every head, layers down and heads across                        |                |
        | "role_counts" | the number of heads of each role in every layer                             |                |
        | "pattern"     | the attention weights of one head between words                             | one head       |
        | "lines"       | lines from each word to the words that it attends to most, a panel per head | some heads     |
        | "received"    | the attention that each word receives, one line per head                    | all by default |

        Args:
            statistic: name of a statistic, such as "entropy", which is the default; "distance" for "scatter".
            kind: the kind of plot.
            against: statistic along the x-axis of "scatter"; by default "entropy", or the first other one.
            heads: the `(layer, head)` that are drawn, zero-based, for the last three kinds.
            top: number of heads that "ranking" (10 by default) and "scatter" (0) name.
            ax: matplotlib axes to draw on; those of a new figure by default, which pyplot does not keep in memory.

        Raises:
            InputError: the view has no such statistic, kind or head, or there is nothing to draw.
            MissingExtra: matplotlib is not installed.

        Example:
            >>> seen.plot(kind="pattern", heads=[(0, 2)]).figure.savefig("pattern.svg")  # doctest: +SKIP
        """
        heads_to_draw = [
            ViewedHead(
                layer=head.layer,
                head=head.head,
                title=f"{head.name}  {self.role_title(head.role)}",
                role=head.role.name,
                means=head.means,
                queries=[word.text for word in self.query_words(head)],
                keys=[word.text for word in self.key_words(head)],
                special=[word.special for word in self.query_words(head)],
                picture=head.picture,
                top_keys=head.top_keys,
                top_weights=head.top_weights,
                received=head.received,
            )
            for head in self.heads
        ]
        units = {name: definition.unit for name, definition in STATISTICS.items()}
        meanings = {name: column_named(name).meaning for name in units}
        drawn = ViewedHeads(heads_to_draw, self.title, units, meanings).kinds()
        return plot_kind(drawn, kind, ax, statistic=statistic, against=against, heads=heads, top=top)
