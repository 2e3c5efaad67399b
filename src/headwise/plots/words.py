"""Attention of heads between the words of a text, as a matrix or as lines."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from headwise.errors import InputError
from headwise.plots.canvas import (
    INK,
    SOFT,
    WEIGHTS,
    add_colour_bar,
    axes_for,
    explain_blank,
    label_ticks,
    separate_cells,
    set_title,
)
from headwise.plots.grids import role_style
from headwise.shapes import Float, Int
from headwise.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LONGEST_WORD = 18
"""Largest number of characters of a word that are shown in a matrix."""

MIN_WEIGHT = 0.03
"""Weights below this are not drawn as lines."""

PANEL_WIDTH = 2.7
"""Distance between the panels of two heads, in units of the distance between the two columns of words."""


class ViewedHead(NamedTuple):
    """Strongest attention weights of one head between words, for plots. The words are those of one text or, in
    cross-attention, of two.

    Attributes:
        title: title of plots of the head, such as its name and role.
        queries: words that the head attends from.
        keys: words that the head attends to.
        top_keys: indices of the keys that each query attends to most.
        top_weights: their weights.
        special: True for each special token among the queries; no word is special if it is empty.
    """

    title: str
    role: str
    queries: Sequence[str]
    keys: Sequence[str]
    top_keys: Int[Tensor, "queries top"]
    top_weights: Float[Tensor, "queries top"]
    special: Sequence[bool] = ()


def draw_pattern(
    weights: Float[Tensor, "rows columns"],
    queries: Sequence[str],
    keys: Sequence[str] | None = None,
    *,
    title: str = "",
    ax: Any = None,
) -> "Axes":
    """Draw the attention weights of one head as a matrix, with a row for each query word and a column for each key
    word. `keys` are the same words as `queries` by default. If the matrix has fewer rows than there are query words,
    each row stands for a group of consecutive words, and is labelled by the first one; the same applies to columns. The
    weights of a group are sums over its keys, averaged over its queries.
    """
    rows, columns = weights.shape
    keys = queries if keys is None else keys
    for name, words, least in (("queries", queries, rows), ("keys", keys, columns)):
        if not least or len(words) < least:
            raise InputError(name, expected=f"at least {counted(max(least, 1), 'word')}", got=len(words))
    axes = axes_for(ax, min(2.6 + 0.24 * columns, 10.0), min(1.8 + 0.24 * rows, 9.4))
    image = axes.imshow(weights.float().cpu().tolist(), cmap=WEIGHTS, vmin=0.0, interpolation="nearest", aspect="auto")
    label_ticks(axes, "x", group_labels(keys, columns), rotation=90)
    label_ticks(axes, "y", group_labels(queries, rows))
    separate_cells(axes, rows, columns)
    axes.set(xlabel="key", ylabel="query")
    explain_blank(axes, weights.flatten().tolist(), "cell")
    is_grouped = rows < len(queries) or columns < len(keys)
    add_colour_bar(axes, image, "attention weight, summed over a group of words" if is_grouped else "attention weight")
    set_title(axes, title)
    return axes


def group_labels(words: Sequence[str], groups: int) -> list[str]:
    """Divide words into `groups` groups of consecutive words, of nearly equal size. Return a label for each group: its
    first word, shortened to 18 characters.
    """
    first_words = [words[-(-group * len(words) // groups)] for group in range(groups)]
    return [word if len(word) <= LONGEST_WORD else f"{word[: LONGEST_WORD - 1]}…" for word in first_words]


def draw_word_lines(heads: Sequence[ViewedHead], *, ax: Any = None) -> "Axes":
    """Draw the strongest attention weights of each head as lines between words, in one panel per head. A panel has the
    words in two columns, queries on the left and keys on the right. Lines lead from each word to the words to which it
    attends most, in the colour of the head's role. Wider and more opaque lines are larger weights; weights below 0.03
    are not drawn. Special tokens are grey.
    """
    if not heads:
        raise InputError("heads", expected="at least one head to plot", got="none")
    for head in heads:
        if len(head.top_keys) != len(head.queries):
            expected = f"{counted(len(head.top_keys), 'word')}, as in the weights"
            raise InputError("queries", expected=expected, got=len(head.queries))
    lines = max(len(words) for head in heads for words in (head.queries, head.keys))
    axes = axes_for(ax, PANEL_WIDTH * 1.15 * len(heads), 0.27 * lines + 0.7)
    for index, head in enumerate(heads):
        left, colour = index * PANEL_WIDTH, role_style(head.role).colour  # keys are 1 to the right of queries
        axes.plot(left + 0.02, -1.15, "s", color=colour, markersize=6)
        style: dict[str, Any] = {"va": "center", "parse_math": False}
        axes.text(left + 0.13, -1.13, head.title, ha="left", fontsize=10, fontweight="bold", color=INK, **style)
        special = {word for word, is_special in zip(head.queries, head.special, strict=False) if is_special}
        for x, words, side in ((left - 0.06, head.queries, "right"), (left + 1.06, head.keys, "left")):
            for row, word in enumerate(words):
                axes.text(x, row, word, ha=side, fontsize=9, color=SOFT if word in special else INK, **style)
        for query, (keys, weights) in enumerate(zip(head.top_keys.tolist(), head.top_weights.tolist(), strict=True)):
            for key, weight in zip(keys, weights, strict=True):
                if weight >= MIN_WEIGHT:
                    line: dict[str, Any] = {"color": colour, "alpha": min(1.0, 0.3 + weight)}
                    line |= {"linewidth": 0.4 + 2.2 * weight, "solid_capstyle": "round"}
                    axes.plot([left, left + 1], [query, key], **line)
    axes.set_xlim(-0.85, PANEL_WIDTH * (len(heads) - 1) + 1.85)
    axes.set_ylim(lines - 0.4, -1.6)
    axes.axis("off")
    return axes
