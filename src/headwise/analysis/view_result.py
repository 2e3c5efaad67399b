"""Result of `view`: statistics, links between words and attention weights of every head on one or more texts, and the
heads by the attention that given words receive.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from headwise.analysis.roles import HALF, Role, page_roles, role_of
from headwise.analysis.token_sources import CallTokens, Place
from headwise.analysis.word_times import word_time_rows
from headwise.checks import named_head, pair_of
from headwise.data.batches import floating_tensors
from headwise.data.tokenization import Token, Word, character_spans
from headwise.errors import InputError, require
from headwise.page import contents as page
from headwise.page.columns import Columns, HeadPlace, ModelIdentity, estimates_of
from headwise.page.write import notebook_html
from headwise.plots.curves import chosen_heads, draw_received
from headwise.plots.kinds import HeadNumbers, Kind, plot_kind, require_heads
from headwise.plots.words import ViewedHead, draw_pattern, draw_word_lines
from headwise.runs.rows import MeanEstimate
from headwise.settings import FOCUS_KINDS
from headwise.shapes import Bool, Float, Int
from headwise.statistics.columns import column_named
from headwise.wording import counted, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LONGEST_WORD = 20
"""Number of characters of a word that are shown."""

LONGEST_TEXT = 60
"""Largest number of characters of a text in `repr`."""

LONGEST_TITLE = 120
"""Number of characters of a text that name it on a page."""

SMALLEST_SHOWN_WEIGHT = 0.005
"""Weight of the weakest link that is shown: a smaller one would print as 0.00."""

LEAST_EXCESS = 1e-4
"""Excess from which on attention is more than uniform; rounding stays below it."""

NAMED = 8
"""Largest number of heads that a verdict names."""

MIN_TESTED_TEXTS = 5
"""Least number of texts that are tested."""

SIGNIFICANCE = 0.05
"""Probability of a false finding among all heads."""


def shortened(word: str) -> str:
    """Return a word for display: the middle of a word of more than 20 characters is replaced by an ellipsis."""
    if len(word) <= LONGEST_WORD or len(spans := character_spans(word)) <= LONGEST_WORD:
        return word
    half = (LONGEST_WORD - 1) // 2
    return f"{word[: spans[LONGEST_WORD - 1 - half][0]]}…{word[spans[-half][0] :]}"


class Link(NamedTuple):
    """Link between two words of a text in one head: a word, the other word to which it attends most, and the attention
    weight. Special tokens and words without a letter or digit have no links. If the first token can attend only to
    itself, links to the first word are left out.

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
    """Text that a model read, as tokens and words. An image is represented as a text whose words are patches.

    Attributes:
        name: name of this text among those of a view, such as "text", "source" or "target".
        text: the text, up to where it was truncated; empty for an image.
        truncated: True if the end of the text was cut off.
        tokens: the tokens.
        words: the words, special tokens included.
        word_of: index of each token's word.
        ids: the token ids; None for the patches of an image.
        first_generated: index of the first token that the model generated; None if it generated none.
        pictures: pictures of which tokens are patches.
        patches: the patch of each token; None for a token that is no part of a picture. Empty without pictures.
        seconds: length of the sound of which tokens are patches; None without a sound.
        padding: True at tokens that are padding, whose attention does not count in statistics; None if there are none.
    """

    name: str
    text: str
    truncated: bool
    tokens: tuple[Token, ...]
    words: tuple[Word, ...]
    word_of: Int[Tensor, " tokens"]
    ids: Int[Tensor, "1 tokens"] | None = None
    first_generated: int | None = None
    pictures: tuple[page.Picture, ...] = ()
    patches: tuple[page.Patch | None, ...] = ()
    seconds: float | None = None
    padding: Bool[Tensor, " tokens"] | None = None


@dataclass(frozen=True, eq=False)
class HeadView:
    """Attention of one head on one text: statistics, role (name for what the head attends to), strongest links between
    words, and attention weights.

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
    attention: page.HeadAttention

    def __repr__(self) -> str:
        return f"HeadView({self.name}, {self.role.name}, entropy {number(self.means.get('entropy'), '.4g')})"

    @property
    def name(self) -> str:
        """Name of the head: its zero-based layer and index, such as "3.5"."""
        return f"{self.layer}.{self.head}"

    @property
    def place(self) -> HeadPlace:
        """Values that identify the head in its model, as a tuple: layer, head, kind of attention, and module path."""
        return HeadPlace(self.layer, self.head, self.kind, self.module)

    @property
    def identifiers(self) -> dict[str, Any]:
        """Values that identify the head in its model: layer, head, module and kind."""
        return {"layer": self.layer, "head": self.head, "module": self.module, "kind": self.kind}


@dataclass(frozen=True)
class Region:
    """Rectangle of a picture, which stands for the patches whose centres lie inside it.

    Attributes:
        left, top, right, bottom: fractions of the width and height of the picture, from 0 to 1.
        picture: name of the picture, such as "picture 2" if the prompt has several; by default the only one, also the
            spectrogram of a sound or the curves of a series. All parts of a picture that is shown several times count.

    Raises:
        InputError: the rectangle is empty, or not inside the picture.

    Example:
        >>> seen = headwise.view(model, processor, "What is this?", images="cups.png")  # doctest: +SKIP
        >>> seen.find([headwise.Region(0.5, 0.0, 1.0, 0.5)]).verdict  # doctest: +SKIP
    """

    left: float
    top: float
    right: float
    bottom: float
    picture: str = "picture"

    def __post_init__(self) -> None:
        sides = (self.left, self.top, self.right, self.bottom)
        is_number = all(isinstance(side, int | float) and 0 <= side <= 1 for side in sides)
        if not is_number or not (self.left < self.right and self.top < self.bottom):
            raise InputError("region", expected="left < right and top < bottom, from 0 to 1", got=sides)

    def __str__(self) -> str:
        sides = "-".join(f"{100 * side:.0f}" for side in (self.left, self.right))
        return f"{self.picture} {sides} % across, {100 * self.top:.0f}-{100 * self.bottom:.0f} % down"

    def has(self, patch: page.Patch, pictures: Sequence[page.Picture]) -> bool:
        """Return True if the centre of a patch of `pictures` lies in this region."""
        name = pictures[patch.picture].name
        across, down = patch.left + patch.width / 2, patch.top + patch.height / 2
        is_inside = self.left <= across < self.right and self.top <= down < self.bottom
        is_only = self.picture == "picture" and len(pictures) == 1
        return is_inside and (is_only or name == self.picture or name.startswith(f"{self.picture},"))


@dataclass(frozen=True)
class HeadFocus:
    """Attention that one head pays to some chosen words (the focus of a search with the method `find`), compared with
    uniform attention.

    Attributes:
        head: the head, of the first text.
        index: index of the head in the view.
        share: mean share of attention on the words, over texts.
        uniform: the same under uniform attention over the same keys.
        excess: `share - uniform`: mean over texts, standard error and number of texts.
        p: p-value of the test that the excess is not positive, corrected for the number of heads; NaN for fewer than
            five texts.
        other: word or special token outside of the focus that gets most attention from the same words.
        other_share: mean share of attention on it, over texts.
    """

    head: HeadView
    index: int
    share: float
    uniform: float
    excess: MeanEstimate
    p: float
    other: str
    other_share: float

    @property
    def has_focus(self) -> bool:
        """True if the head puts at least half of its attention on the chosen words, and more than under uniform
        attention. If the difference was tested, it must also be significant.
        """
        return self.share >= HALF and self.excess.value > LEAST_EXCESS and not self.p > SIGNIFICANCE


@dataclass(frozen=True)
class Focus:
    """Result of a search with the method `find`: chosen words (the focus), and the heads of the model, ranked by
    attention on these words. The rank is by how much more attention the words receive from other words, or exchange
    among themselves, than under uniform attention.

    F are the words of the focus, A the attention weights between words (sums over the tokens of a key word, means over
    the tokens of a query word that see a key), and U the same under uniform attention over the tokens that each query
    token sees.

        received    mean over query words i outside F of sum_{j in F} A_ij
        exchanged   mean over query words i in F of sum_{j in F, j != i} A_ij

    With chosen query words, the first mean is over these. Query words that are special tokens do not count unless they
    were chosen, nor do words of F that see no other word of F. The *excess* of a
    head is its share minus the share of U. A head *has* a focus if its share is at least one half, as for roles, and
    its excess is positive; over at least five texts, the excess must be positive by a t-test over texts, one-sided, at
    5 %, corrected for the number of heads of the model (Bonferroni). Fewer texts are not tested: nearly equal excesses
    on two texts would be significant by chance, whatever caused them.

    Attributes:
        name: name of the focus, for display.
        kind: "received" or "exchanged".
        words: for each text, the indices of the words.
        queries: for each text, the indices of the words whose attention counts; None for all words outside of F.
        heads: all heads, the one with the largest excess first.
        texts: the texts.
        identities: identity of the model that read each text; None if it is unknown.
    """

    name: str
    kind: str
    words: tuple[tuple[int, ...], ...]
    queries: tuple[tuple[int, ...], ...] | None
    heads: tuple[HeadFocus, ...]
    texts: tuple[ViewedText, ...]
    identities: tuple[ModelIdentity | None, ...]

    def __repr__(self) -> str:
        best = self.heads[0]
        shares = f"{best.share:.2f}, uniform {best.uniform:.2f}"
        return f"Focus({self.name!r} {self.kind} in {counted(len(self.words), 'text')}: head {best.head.name} {shares})"

    @property
    def verdict(self) -> str:
        """Text that states which heads have the focus (attend mostly to the chosen words). These are the heads with at
        least half of their attention on the chosen words, and more than under uniform attention. For several texts, the
        text also states the result of a significance test.
        """
        texts, largest = len(self.words), max(self.heads, key=lambda each: each.share)
        is_tested = texts >= MIN_TESTED_TEXTS
        names = [each.head.name for each in self.heads if each.has_focus]
        on = "on" if self.kind == "received" else "among"
        more = "significantly more" if is_tested else "more"
        if names:
            subject, verb, their = ("Heads", "have", "their") if len(names) > 1 else ("Head", "has", "its")
            verdict = (
                f"{subject} {_listed(names)} {verb} this focus: at least half of {their} attention "
                f"is {on} these words, {more} than under uniform attention."
            )
        elif largest.share < HALF:
            verdict = (
                f"No head puts at least half of its attention {on} these words. Head {largest.head.name} comes "
                f"closest: {100 * largest.share:.0f} % (uniform attention: {100 * largest.uniform:.0f} %)."
            )
        else:
            verdict = (
                f"No head has this focus: where at least half of the attention is {on} these words, it is not {more} "
                f"than under uniform attention."
            )
        if texts == 1:
            return verdict
        if not is_tested:
            return f"{verdict} This is not tested: {texts} texts are fewer than {MIN_TESTED_TEXTS}."
        significant = [
            each.head.name for each in self.heads if each.excess.value > LEAST_EXCESS and each.p <= SIGNIFICANCE
        ]
        names_in_brackets = f" ({_listed(significant)})" if significant else ""
        return (
            f"{verdict} In {len(significant)} of {len(self.heads)} heads{names_in_brackets}, the words get "
            f"significantly more attention than under uniform attention ({texts} texts, one-sided t-test at 5 %, "
            f"Bonferroni-corrected)."
        )

    @property
    def note(self) -> str:
        """Sentence about the first head, the one whose attention on the chosen words exceeds uniform attention most. It
        names the word to which this head attends more than to the chosen words. It is empty if there is no such word.
        """
        best = self.heads[0]
        if best.other_share <= best.share + LEAST_EXCESS:
            return ""
        return f"Head {best.head.name} puts more on {best.other}: {100 * best.other_share:.0f} %."

    def rows(self) -> list[dict[str, Any]]:
        """Return one dictionary per head, the head with the largest excess first. It has the head's layer, head,
        module, kind and role; the `share` of attention on the chosen words, the share under `uniform` attention, and
        their difference `excess`; the standard error (`excess_sem`), number of texts (`excess_n`) and degrees of
        freedom (`excess_df`) of the excess; the p-value `p`; and `has_focus`.
        """
        return [
            {
                **each.head.identifiers,
                "role": each.head.role.name,
                "share": each.share,
                "uniform": each.uniform,
                **each.excess.columns("excess"),
                "p": each.p,
                "has_focus": each.has_focus,
            }
            for each in self.heads
        ]

    def table(self) -> Any:
        """Return the dictionaries of `rows`, one per head, as a pandas DataFrame.

        Raises:
            MissingExtra: pandas is not installed.
        """
        return require("pandas", purpose="a table", extra="tables").DataFrame(self.rows())


def _listed(names: Sequence[str]) -> str:
    """Return names of heads as text, separated by commas. Of more than 8 names, only the first 8 are listed, followed
    by the number of the others.
    """
    others = f" and {counted(len(names) - NAMED, 'other')}" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + others


@dataclass(frozen=True, eq=False)
class ViewedRun:
    """Run of a model of which a view shows the attention.

    Attributes:
        inputs: arguments of the model.
        tokens_of: for each text of the view, and for some of the inputs by name, the token that depends on each element
            of the input, or -1; in several rows where several tokens do. Token ids have one element each.
        baselines: for inputs with pictures, sound or numbers, what the model reads in place of an occluded part.
        calls: tokens of the queries and keys of each attention call. The streams are the texts.
        last_row: numbers of the output by which a changed model is noticed; see `last_row`.
    """

    inputs: Mapping[str, Tensor]
    tokens_of: tuple[Mapping[str, Int[Tensor, "_ _"]], ...]
    baselines: Mapping[str, Tensor]
    calls: Mapping[Place, tuple[CallTokens, CallTokens]]
    last_row: Float[Tensor, " numbers"] | None = None


def last_row(output: Any) -> Float[Tensor, " numbers"] | None:
    """Return the last row of the first floating-point tensor in the output of a model, such as the logits at the last
    token; None if there is none.
    """
    tensors = [each for each in floating_tensors(output) if each.ndim and each.numel()]
    return tensors[0].detach().reshape(-1, tensors[0].shape[-1])[-1].clone() if tensors else None


@dataclass(frozen=True, eq=False)
class View:
    """Attention of every head of a model on one text, or on the source and target text of an encoder-decoder.

    Attributes:
        title: name of the model, for display.
        texts: the texts that the model read, one or two.
        heads: views of the heads, by layer and head.
        head_count: number of heads of the model that were viewed, also of those that `select` left out.
        identity: identity of the model; None if it is unknown.
        run: the run of the model, which `relevance` repeats with changed inputs; None if it is unknown.
        alignment_heads: heads that follow a sound, by its generation config, as `(layer, head)`; empty if it names
            none.
    """

    title: str
    texts: tuple[ViewedText, ...]
    heads: tuple[HeadView, ...]
    head_count: int
    identity: ModelIdentity | None = None
    run: ViewedRun | None = None
    alignment_heads: tuple[tuple[int, int], ...] = ()

    @property
    def text(self) -> str:
        """The first text that the model read, up to the place where it was cut off, if it was too long."""
        return self.texts[0].text

    @property
    def truncated(self) -> bool:
        """True if the end of one of the texts was cut off before the model read it."""
        return any(text.truncated for text in self.texts)

    @property
    def words(self) -> tuple[Word, ...]:
        """Words of the first text, including special tokens."""
        return self.texts[0].words

    @property
    def tokens(self) -> int:
        """Number of tokens of all texts together."""
        return sum(len(text.tokens) for text in self.texts)

    def query_words(self, head: HeadView) -> tuple[Word, ...]:
        """Return the words of the text that has the queries of a head. In cross-attention of an encoder-decoder this is
        the target; in self-attention, queries and keys are in the same text.
        """
        return self.texts[head.attention.queries].words

    def key_words(self, head: HeadView) -> tuple[Word, ...]:
        """Return the words of the text that has the keys of a head. In cross-attention of an encoder-decoder this is
        the source; in self-attention, queries and keys are in the same text.
        """
        return self.texts[head.attention.keys].words

    def head(self, layer: int, head: int) -> HeadView:
        """Return the attention of one head on the text. `layer` and `head` are its zero-based numbers.

        Raises:
            InputError: the view has no such head.
        """
        for candidate in self.heads:
            if (candidate.layer, candidate.head) == (layer, head):
                return candidate
        raise InputError("head", expected="a (layer, head) of this view", got=(layer, head))

    def strongest_links(self, head: HeadView, count: int) -> list[Link]:
        """Return up to `count` links of a head, those with the largest attention weights, strongest first. A link joins
        a word to the other word to which it attends most. Links with a weight below 0.005 (`SMALLEST_SHOWN_WEIGHT`) are
        left out.
        """
        return [link for link in head.links if link.weight >= SMALLEST_SHOWN_WEIGHT][:count]

    def word_label(self, text: int, index: int) -> str:
        """Return word number `index` of text number `text` for display. The middle of a long word is left out. A word
        that occurs several times is followed by its position among all words of the text, counted from 1, such as `the
        (3)`.
        """
        words = self.texts[text].words
        label = shortened(words[index].text)
        occurrences = self._occurrences[text][words[index].text]
        return label if occurrences == 1 else f"{label} ({index + 1})"

    @cached_property
    def _occurrences(self) -> list[Counter[str]]:
        return [Counter(word.text for word in text.words) for text in self.texts]

    def role_title(self, role: Role) -> str:
        """Return the name of a head's role for display. In a view of one text, "the first token" is replaced by the
        text's first word.
        """
        return role.name.replace("the first token", title_role_word([self]) or "the first token")

    def select(self, layers: Collection[int] = (), heads: Collection[int | str | tuple[int, int]] = ()) -> "View":
        """Return a view with only some of the heads: those in `layers` that are also listed in `heads`. An empty
        collection restricts nothing.

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
            for index in selected:
                if index not in numbers:
                    raise InputError(option, expected=expected, got=index)
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

    def find(
        self,
        focus: Sequence[Any],
        *,
        kind: str = "received",
        queries: Sequence[Any] | None = None,
        name: str | None = None,
    ) -> Focus:
        """Rank the heads by how much more attention some chosen words, or parts of a picture, receive from other words,
        or exchange among themselves, than under uniform attention over the same keys. A word stands for all its
        occurrences in the text. In an encoder-decoder, the words are words of the source. `ViewSet.find` is the same
        search in several texts.

        Example:
            >>> seen = headwise.view(model, tokenizer, "Do you like coffee or tea?")  # doctest: +SKIP
            >>> seen.find(["coffee", "tea"]).verdict  # doctest: +SKIP
        """
        return ViewSet((self,)).find(focus, kind=kind, queries=queries, name=name)

    def word_times(self, heads: Collection[Any] | None = None) -> Any:
        """Return the times in a sound to which words attend, as a pandas DataFrame with a row per word and head. The
        words are those that the model generated or, if it generated none, all words of the text that attends to the
        sound. A word is output by the position before each of its tokens, so that the attention of these positions
        counts.

        A time states where a head looks, not when the word is spoken: a head may attend to the words before, to silence
        or to the end of the sound. Heads that follow the sound are known for Whisper models: their generation config
        names them as `alignment_heads`.

        Each row has the `word`, its `index` among the words of its text, the head (layer, head, module and kind), and
        the `lower_quartile`, `median` and `upper_quartile` in seconds. They are quantiles of the attention on the
        strips of the sound: the first centre of a strip up to which at least 25, 50 or 75 % of it lie. Attention on
        padding and on special tokens does not count. Its share is the column `elsewhere`: where it is large, the times
        say little. Weights of several positions are averaged.

        Args:
            heads: heads as `(layer, head)` or "3.5"; by default the `alignment_heads` of the model or, if it names
                none, all heads with attention of words on the sound.

        Raises:
            InputError: no word attends to a sound; `heads` names other heads; the weights were not all kept.
            MissingExtra: pandas is not installed.

        Example:
            >>> seen = headwise.view(model, processor, audio="speech.wav", generate=20)  # doctest: +SKIP
            >>> seen.word_times().groupby("word")["median"].median()  # doctest: +SKIP
        """
        pandas = require("pandas", purpose="a table", extra="tables")
        return pandas.DataFrame(word_time_rows(self, heads))

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: the first rows of a table of the heads, and an interactive page that shows their
        attention.
        """
        return ViewSet((self,))._repr_html_()

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
        """Draw the statistics, roles or attention weights of the heads on this text, as `kind` selects. Return the
        matplotlib axes, which notebooks display; `ax.figure.savefig("x.svg")` saves the plot as SVG, PDF or PNG.

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
        numbers = HeadNumbers.of_columns(ViewSet((self,)).columns())
        kinds = numbers.kinds() | {
            "pattern": Kind(self._draw_pattern, ("heads",)),
            "lines": Kind(self._draw_lines, ("heads",)),
            "received": Kind(self._draw_received, ("heads",)),
        }
        return plot_kind(kinds, kind, ax, statistic=statistic, against=against, heads=heads, top=top)

    def _drawn(self, heads: Any) -> list[tuple[HeadView, ViewedHead]]:
        """Return the heads that are named in `heads` as `(layer, head)`. Each is paired with the data that the plot
        functions need: title, role, words and strongest weights.
        """
        by_place = {(head.layer, head.head): head for head in self.heads}
        pairs = [] if heads is None else require_heads(heads, by_place, "of this view")
        if not pairs:
            expected = "a collection of (layer, head)"
            raise InputError("heads", expected=expected, got="none", remedy="such as heads=[(0, 2)]")
        drawn = []
        for head in map(by_place.__getitem__, pairs):
            queries, keys = self.query_words(head), self.key_words(head)
            words = [word.text for word in queries], [word.text for word in keys]
            title = f"{head.name}  {self.role_title(head.role)}"
            special = [word.special for word in queries]
            drawn.append((head, ViewedHead(title, head.role.name, *words, head.top_keys, head.top_weights, special)))
        return drawn

    def _draw_pattern(self, heads: Any = None, *, ax: Any = None) -> "Axes":
        drawn = self._drawn(heads)
        if len(drawn) > 1:
            remedy = "ax= draws each on axes of its own"
            raise InputError("heads", expected="one head for the kind 'pattern'", got=len(drawn), remedy=remedy)
        head, described = drawn[0]
        return draw_pattern(head.picture, described.queries, described.keys, title=described.title, ax=ax)

    def _draw_lines(self, heads: Any = None, *, ax: Any = None) -> "Axes":
        return draw_word_lines([described for _, described in self._drawn(heads)], ax=ax)

    def _draw_received(self, heads: Any = None, *, ax: Any = None) -> "Axes":
        lines = {(head.layer, head.head): head.received.tolist() for head in self.heads}
        chosen = chosen_heads(lines, heads)
        shown = [head for head in self.heads if (head.layer, head.head) in chosen]
        keys = {tuple(word.text for word in self.key_words(head)) for head in shown}
        return draw_received(chosen, words=keys.pop() if len(keys) == 1 else (), title=self.title, ax=ax)


@dataclass(frozen=True, eq=False)
class ViewSet:
    """Attention of every head of a model on several texts: one `View` per text.

    Attributes:
        views: one view for each text, all of the same heads.

    Raises:
        InputError: the views are of different heads or models.
    """

    views: tuple[View, ...]

    def __post_init__(self) -> None:
        first = self.views[0]
        for view in self.views[1:]:
            pairs = zip(view.heads, first.heads, strict=False)
            if len(view.heads) != len(first.heads) or not all(each.place.is_same(other.place) for each, other in pairs):
                got = f"other heads for {view.text[:40]!r} than for {first.text[:40]!r}"
                raise InputError("views", expected="the same heads for all texts", got=got)
            if view.identity is not None and first.identity is not None and view.identity.is_other(first.identity):
                got = f"another model for {view.text[:40]!r} than for {first.text[:40]!r}"
                raise InputError("views", expected="the same model for all texts", got=got)

    def __repr__(self) -> str:
        heads, texts = counted(len(self.views[0].heads), "head"), counted(len(self.views), "text")
        return f"ViewSet({heads} of {self.title}, {texts})"

    def __len__(self) -> int:
        return len(self.views)

    def __iter__(self) -> Iterator[View]:
        return iter(self.views)

    def __getitem__(self, index: int) -> View:
        return self.views[index]

    @property
    def title(self) -> str:
        """Name of the model, for display."""
        return self.views[0].title

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the attention statistics that at least one head has."""
        return tuple(dict.fromkeys(name for head in self.views[0].heads for name in head.means))

    def select(self, layers: Collection[int] = (), heads: Collection[Any] = ()) -> "ViewSet":
        """Return a set of views with only the heads in some layers, or with some indices, as `View.select` does for one
        view.
        """
        return ViewSet(tuple(view.select(layers, heads) for view in self.views))

    def columns(self) -> Columns:
        """Return the statistics of each head, as means over the texts, in the form of columns that an HTML page
        shows.
        """
        heads, source = self.views[0].heads, "this text" if len(self) == 1 else f"{len(self)} texts"
        return Columns(
            model=self.title,
            source=source,
            places=tuple(head.place for head in heads),
            statistics=tuple(column_named(name).on_page(source) for name in self.statistics),
            estimates=estimates_of(
                [[self.estimate(name, index) for index in range(len(heads))] for name in self.statistics]
            ),
            roles=tuple(self.role(index).name for index in range(len(heads))),
            identity=self.views[0].identity,
        )

    def estimate(self, statistic: str, index: int) -> MeanEstimate:
        """Return the mean of a statistic over the texts, with its standard error, for one head. `index` is the head's
        position in the list of all viewed heads.
        """
        return MeanEstimate.of(view.heads[index].means.get(statistic, math.nan) for view in self.views)

    def role(self, index: int) -> Role:
        """Return the role (name for what it attends to) of the head at position `index` among all viewed heads. For one
        text, it is the head's role on this text. For several texts, the means of its statistics over the texts decide
        the role.
        """
        heads = [view.heads[index] for view in self.views]
        if len(heads) == 1:
            return heads[0].role
        means = {name: self.estimate(name, index).value for name in heads[0].means}
        return role_of(means, {name: sum(head.rows.get(name, 0) for head in heads) for name in means})

    def records(self) -> list[dict[str, Any]]:
        """Return one dictionary per head: layer, head, module, kind and role, and for every statistic its mean over the
        texts. The mean is accompanied by its standard error (`_sem`), the number of texts that have a value (`_n`), and
        the degrees of freedom (`_df`).
        """
        names = self.statistics
        return [
            {**head.identifiers, "role": self.role(index).name}
            | {column: value for name in names for column, value in self.estimate(name, index).columns(name).items()}
            for index, head in enumerate(self.views[0].heads)
        ]

    def table(self) -> Any:
        """Return the dictionaries of `records`, one per head, as a pandas DataFrame.

        Raises:
            MissingExtra: pandas is not installed.
        """
        return require("pandas", purpose="a table", extra="tables").DataFrame(self.records())

    def find(
        self,
        focus: Sequence[Any],
        *,
        kind: str = "received",
        queries: Sequence[Any] | None = None,
        name: str | None = None,
    ) -> Focus:
        """Rank the heads by how much more attention some chosen words, or parts of a picture, receive from other words,
        or exchange among themselves, than under uniform attention over the same keys. The share of attention on these
        words is a mean over the texts. The difference from uniform attention has a standard error and a test.

        `Focus` has the formulas, and the rule by which a head has a focus.

        Args:
            focus: words that occur in every text, or one list for each text. A list has words, indices of words, or
                `Region` objects, which stand for patches of a picture.
            kind: "received" from other words, or "exchanged" between the words.
            queries: the words whose attention is measured, in the same form; by default all outside of the focus.
            name: name of the focus, for display; by default the words.

        Raises:
            InputError: a word does not occur, no word is left to compare with, or the weights of a long text were not
                kept.
            MissingExtra: scipy, which tests several texts, is not installed.
        """
        if kind not in FOCUS_KINDS:
            raise InputError("kind", expected='"received" or "exchanged"', got=repr(kind))
        if isinstance(focus, str) or not isinstance(focus, Sequence) or not focus:
            raise InputError("focus", expected='a list of words, such as ["coffee", "tea"]', got=repr(focus))
        if queries is not None and kind != "received":
            raise InputError("queries", expected='None, or kind="received"', got=f"kind={kind!r}")
        texts = tuple(view.texts[0] for view in self.views)
        words = _indices_by_text("focus", focus, texts)
        contents = [
            (None if text.ids is None else text.ids[0].tolist(), [picture.source for picture in text.pictures])
            for text in texts
        ]
        for text, content in zip(texts, contents, strict=True):
            if contents.count(content) > 1:  # the test would count one text as two
                got = f"{text.text[:60]!r} twice"
                raise InputError("texts", expected="different texts", got=got, remedy="view each text once")
        rows, of_queries = None, 0
        if queries is not None:
            of_queries, rows = self._query_words(queries)
        if name is None:
            named = [text.words[index].text for text, chosen in zip(texts, words, strict=True) for index in chosen]
            lists = focus if _is_by_text(focus) else [focus]
            regions = [str(each) for chosen in lists for each in chosen if isinstance(each, Region)]
            name = "regions of the pictures" if len(regions) > 1 else ", ".join(dict.fromkeys(regions or named))
        heads = [
            _head_focus(self.views, index, words, kind, rows)
            for index, head in enumerate(self.views[0].heads)
            if head.attention.keys == 0
            and (kind == "received" or head.attention.queries == 0)
            and (rows is None or head.attention.queries == of_queries)
        ]
        heads.sort(key=lambda each: each.excess.value, reverse=True)
        identities = tuple(view.identity for view in self.views)
        return Focus(name, kind, words, rows, tuple(heads), texts, identities)

    def _query_words(self, queries: Sequence[Any]) -> tuple[int, tuple[tuple[int, ...], ...]]:
        """Return the index of the first text of the views that has the words `queries`, and their indices in it. Only
        texts that attend to the first text are searched.
        """
        attending = dict.fromkeys(head.attention.queries for head in self.views[0].heads if head.attention.keys == 0)
        for of_text in attending:
            try:
                return of_text, _indices_by_text("queries", queries, [view.texts[of_text] for view in self.views])
            except InputError:
                if of_text == list(attending)[-1]:
                    raise
        raise InputError("queries", expected="a text with attention on the first text", got="none")

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: the first rows of a table of the heads, and an interactive page that shows their
        attention.
        """
        columns = self.columns()
        passages = passages_of([(self.views, columns.source)], columns.statistics)
        contents = columns.contents(page_roles(columns.roles, title_role_word(self.views)))
        caption = f"{len(columns.places)} heads of {columns.model}"
        return notebook_html(caption, columns, replace(contents, passages=passages))


def _is_by_text(words: Sequence[Any]) -> bool:
    """Return True if `words` has one list of words for each text, and False if it is itself a list of words."""
    return all(isinstance(each, Sequence) and not isinstance(each, str) for each in words)


def _indices_by_text(argument: str, words: Sequence[Any], texts: Sequence[ViewedText]) -> tuple[tuple[int, ...], ...]:
    """Return, for each text, the indices of words, in the order of the text. `words` is a list of words for all texts,
    or one list for each. Words are indices, strings, which stand for all their occurrences, or regions of a picture.
    `argument` is the argument's name for messages.
    """
    if isinstance(words, str) or not isinstance(words, Sequence) or not words:
        raise InputError(argument, expected='a list of words, such as ["coffee", "tea"]', got=repr(words))
    by_text = list(words) if _is_by_text(words) else [words] * len(texts)
    if len(by_text) != len(texts):
        raise InputError(argument, expected=f"{len(texts)} lists of words, one per text", got=len(by_text))
    return tuple(word_indices(argument, text, chosen) for text, chosen in zip(texts, by_text, strict=True))


def word_indices(argument: str, text: ViewedText, words: Sequence[Any]) -> tuple[int, ...]:
    """Return the indices of words in one text; see `_indices_by_text`."""
    chosen: set[int] = set()
    for word in words:
        if isinstance(word, Region):
            inside = [patch is not None and word.has(patch, text.pictures) for patch in text.patches]
            found = [index for index, is_inside in zip(text.word_of.tolist(), inside, strict=False) if is_inside]
            if not found:
                names = ", ".join(picture.name for picture in text.pictures) or "no picture"
                raise InputError(argument, expected=f"a region with the centre of a patch ({names})", got=str(word))
        elif isinstance(word, Integral) and not isinstance(word, bool):
            found = [int(word)]
            if not 0 <= found[0] < len(text.words):
                raise InputError(argument, expected=f"indices of words from 0 to {len(text.words) - 1}", got=word)
        else:
            sought = str(word).strip().casefold()
            found = [index for index, each in enumerate(text.words) if each.text.casefold() == sought]
            if not found:
                own = [each for each, index in zip(text.words, _is_patch(text), strict=True) if not index]
                shown = ", ".join(dict.fromkeys(each.text for each in own[:40]))
                raise InputError(argument, expected=f"words of the text ({shown})", got=repr(word))
        chosen.update(found)
    if not chosen:
        raise InputError(argument, expected="at least one word for each text", got="none")
    return tuple(sorted(chosen))


def _is_patch(text: ViewedText) -> list[bool]:
    """Return True for each word of a text that is a patch of a picture."""
    patches = {index for index, patch in zip(text.word_of.tolist(), text.patches, strict=False) if patch is not None}
    return [index in patches for index in range(len(text.words))]


def _head_focus(
    views: Sequence[View],
    index: int,
    words: Sequence[tuple[int, ...]],
    kind: str,
    queries: Sequence[tuple[int, ...]] | None,
) -> HeadFocus:
    """Return how much more attention one head pays to chosen words than under uniform attention, as a mean over texts.
    `index` is the head's position among the viewed heads, `words` are the indices of the chosen words in each text, and
    `queries` those of the words whose attention counts.
    """
    shares = [
        _shares(view, view.heads[index], chosen, kind, None if queries is None else queries[number])
        for number, (view, chosen) in enumerate(zip(views, words, strict=True))
    ]
    share, uniform = (math.fsum(part) / len(shares) for part in zip(*(each[:2] for each in shares), strict=True))
    excesses = [of_text - of_uniform for of_text, of_uniform, _ in shares]
    sums: Counter[str] = Counter()
    for *_, others in shares:
        sums.update(others)
    other, other_sum = sums.most_common(1)[0]
    p = math.nan
    if len(shares) >= MIN_TESTED_TEXTS:
        stats = require("scipy.stats", purpose="testing several texts", extra="tables")
        is_constant = len(set(excesses)) == 1  # as for equal texts, which are no evidence
        p = 1.0 if is_constant else float(stats.ttest_1samp(excesses, 0.0, alternative="greater").pvalue)
        p = min(1.0, p * views[0].head_count)
    excess = MeanEstimate.of(excesses)
    return HeadFocus(views[0].heads[index], index, share, uniform, excess, p, other, other_sum / len(shares))


def _shares(
    view: View, head: HeadView, words: tuple[int, ...], kind: str, chosen: tuple[int, ...] | None
) -> tuple[float, float, dict[str, float]]:
    """Return three means over query words, for one head and text: the share of attention on chosen words, the same
    share under uniform attention, and a dictionary with the share on every other word by name. The query words are
    `chosen`. By default they are the words that were not chosen or, if `kind` is "exchanged", the chosen words.
    """
    attention, queries, keys = head.attention, view.texts[head.attention.queries], view.texts[head.attention.keys]
    if not isinstance(attention.weights, page.AllWeights):
        remedy = f"pass keep_all={len(keys.tokens)} to view, which then keeps all weights in memory"
        raise InputError("focus", expected="a text whose weights were all kept", got="a longer text", remedy=remedy)
    # A run of visible keys adds 1 from its first key on, and subtracts it after its last one.
    edges = torch.zeros(len(queries.tokens), len(keys.tokens) + 1, dtype=torch.int32)
    rows = torch.arange(len(queries.tokens)).repeat_interleave(attention.visible.runs)
    ones = torch.ones(len(rows), dtype=torch.int32)
    edges.index_put_((rows, attention.visible.starts), ones, accumulate=True)
    edges.index_put_((rows, attention.visible.stops), -ones, accumulate=True)
    is_visible = edges.cumsum(1)[:, :-1] > 0
    seeing = torch.zeros(len(queries.words)).index_add_(0, queries.word_of, is_visible.any(-1).float()).clamp(min=1)

    def between_words(matrix: Tensor) -> Tensor:
        """Return a matrix of words from a matrix of tokens. Weights are summed over the tokens of a key word, and
        averaged over those tokens of a query word that can attend to at least one key.
        """
        to_words = torch.zeros(len(matrix), len(keys.words)).index_add_(1, keys.word_of, matrix.float())
        sums = torch.zeros(len(queries.words), len(keys.words)).index_add_(0, queries.word_of, to_words)
        return sums / seeing[:, None]

    weights = between_words(attention.weights.weights)
    uniform = between_words(is_visible / is_visible.sum(-1, keepdim=True).clamp(min=1))
    in_focus = torch.zeros(len(keys.words), dtype=torch.bool)
    in_focus[list(words)] = True
    is_row = torch.tensor([not word.special for word in queries.words])
    if chosen is not None:
        is_row = torch.zeros(len(queries.words), dtype=torch.bool)
        is_row[list(chosen)] = True
    columns = in_focus.expand(len(queries.words), -1).clone()
    if kind == "exchanged":
        columns.fill_diagonal_(False)
        is_row &= in_focus & ((uniform * columns).sum(-1) > 0)
    else:
        is_row &= uniform.sum(-1) > 0
        if attention.queries == attention.keys and chosen is None:
            is_row &= ~in_focus
    if not is_row.any():
        needed = "a word outside of the focus" if kind == "received" else "two words that can attend to each other"
        raise InputError("focus", expected=needed, got=", ".join(keys.words[index].text for index in words))
    share, of_uniform = (float((matrix * columns).sum(-1)[is_row].double().mean()) for matrix in (weights, uniform))
    others: dict[str, float] = {}
    for word, own in zip(keys.words, weights[is_row].double().mean(0).masked_fill(in_focus, 0.0).tolist(), strict=True):
        name = word.text if word.special else repr(word.text)
        others[name] = others.get(name, 0.0) + own
    return share, of_uniform, others


def title_role_word(views: Sequence[View]) -> str | None:
    """Return the text that replaces "the first token" in titles of roles. If there is a single text, it is its first
    word, in quotes unless it is a special token. Otherwise, and for an image, return None.
    """
    if len(views) != 1 or views[0].texts[0].pictures:
        return None
    word = views[0].words[0]
    return shortened(word.text) if word.special else f"“{shortened(word.text)}”"


def passages_of(
    models: Sequence[tuple[Sequence[View], str]], statistics: Sequence[page.PageStatistic]
) -> tuple[page.Passage, ...]:
    """Return the texts of a page, with the attention of every head of each model on them. For each model, `models` has
    one `View` per text (the attention of its heads on the text) and a name, the source of its statistics. A model's
    heads have values only for those `statistics` that have the same source; other values are NaN.
    """
    passages = []
    for views in zip(*(views for views, _ in models), strict=True):
        texts = views[0].texts
        title = " ".join(texts[0].text.split()) or texts[0].name
        sides = tuple(
            page.Side(
                name=text.name,
                tokens=tuple(token.text for token in text.tokens),
                follows_blank=tuple(token.follows_blank for token in text.tokens),
                line_starts=tuple(index for index, token in enumerate(text.tokens) if token.starts_line),
                special=tuple(token.special for token in text.tokens),
                words=tuple(word.text for word in text.words),
                word_of=tuple(text.word_of.tolist()),
                first_generated=text.first_generated,
                pictures=text.pictures,
                patches=text.patches,
            )
            for text in texts
        )
        means = []
        for view, (_, source) in zip(views, models, strict=True):
            rows = [
                [head.means.get(each.name, math.nan) if each.source == source else math.nan for head in view.heads]
                for each in statistics
            ]
            means.append(torch.tensor(rows, dtype=torch.float64).view(len(statistics), len(view.heads)))
        passages.append(
            page.Passage(
                title=title if len(title) <= LONGEST_TITLE else title[: LONGEST_TITLE - 1] + "…",
                sides=sides,
                heads=tuple(tuple(head.attention for head in view.heads) for view in views),
                means=tuple(means),
            )
        )
    return tuple(passages)
