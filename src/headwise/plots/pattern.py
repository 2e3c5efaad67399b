"""Attention pattern of one head on one text: the matrix of attention weights between words."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from headwise.errors import InputError
from headwise.plots.canvas import (
    WEIGHTS,
    add_colour_bar,
    axes_for,
    explain_blank,
    label_ticks,
    separate_cells,
    set_title,
)
from headwise.shapes import Float
from headwise.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LONGEST_WORD = 18
"""Largest number of characters of a word that are shown."""


def draw_pattern(
    weights: Float[Tensor, "rows columns"],
    queries: Sequence[str],
    keys: Sequence[str] | None = None,
    *,
    title: str = "",
    ax: Any = None,
) -> "Axes":
    """Draw the attention weights of one head between words as a matrix, with queries down and keys across, and return
    the axes. If the matrix is smaller than the numbers of words, its rows and columns are groups of consecutive words
    of nearly equal size, labelled by their first words.

    Args:
        weights: attention weights, from 0 to 1: the mean over the words of a row of the sums over those of a column.
        queries: words that the head attends from.
        keys: words that the head attends to; the queries by default.
        title: title of the plot, such as the name of the head.
        ax: matplotlib axes to draw on; those of a new figure by default.

    Raises:
        InputError: there is no weight, there are fewer words than rows or columns, or `ax` is not axes.
        MissingExtra: matplotlib is not installed.

    Example:
        >>> draw_pattern(torch.eye(2), ["hello", "world"], title="head 0.0")  # doctest: +SKIP
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
    """Return a label for each of `groups` groups of consecutive words of nearly equal size: its first word, shortened
    to 18 characters.
    """
    first_words = [words[-(-group * len(words) // groups)] for group in range(groups)]
    return [word if len(word) <= LONGEST_WORD else f"{word[: LONGEST_WORD - 1]}…" for word in first_words]
