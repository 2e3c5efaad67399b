"""Lines of received attention: the mean attention weight that the key at each position receives, one line per head."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headwise.checks import collection_of, head_pair
from headwise.errors import InputError
from headwise.plots.canvas import (
    add_colour_bar,
    axes_for,
    label_ticks,
    layer_colours,
    put_legend_right,
    require_finite,
    set_title,
    without_upper_frame,
)
from headwise.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_NAMED = 8
"""Largest number of heads whose lines have a colour and a name each; more lines are coloured by layer."""

LINE_COLOURS = ("#0078f3", "#692700", "#00a972", "#492740", "#c87500", "#124c81", "#000000", "#bf7ea6")
LINE_STYLES = ("-", "--")
"""Colours and styles of named lines. A test measures that the colours differ for readers with any colour vision, and
that their contrast to white is at least 3.
"""


def draw_received(
    received: Mapping[tuple[int, int], Sequence[float]],
    *,
    words: Sequence[str] = (),
    title: str = "",
    ax: Any = None,
) -> "Axes":
    """Draw the attention that the key at each position receives, as a line for each head, and return the axes. Up to 8
    heads have a colour and a name each; more are coloured by layer. The y-axis is logarithmic, since an attention sink
    receives many times what other keys receive; positions with a number of 0 or NaN are gaps.

    Args:
        received: for each head, by `(layer, head)`, the mean weight of the key at each position, from 0 to 1.
        words: word at each position, for labels; positions are numbered by default.
        title: end of the title, such as the model.
        ax: matplotlib axes to draw on; those of a new figure by default.

    Raises:
        InputError: there are no heads, no finite number, or `ax` is not axes.
        MissingExtra: matplotlib is not installed.

    Example:
        >>> draw_received({(0, 0): [0.7, 0.2, 0.1]}, words=["[CLS]", "hello", "[SEP]"])  # doctest: +SKIP
    """
    require_finite("received", [value for line in received.values() for value in line])
    positions = max(len(line) for line in received.values())
    axes = axes_for(ax, min(max(4.8, 2.2 + 0.22 * positions), 7.6), 3.6)
    if len(received) <= MOST_NAMED:
        for index, ((layer, head), line) in enumerate(received.items()):
            style: dict[str, Any] = {
                "color": LINE_COLOURS[index],
                "linestyle": LINE_STYLES[index % 2],
                "linewidth": 1.4,
            }
            axes.plot(range(len(line)), _positive(line), ".", markersize=4, label=f"{layer}.{head}", **style)
        put_legend_right(axes)
    else:
        _draw_by_layer(axes, received)
    axes.set_yscale("log")
    axes.set_ylabel("received attention (mean weight)")
    without_upper_frame(axes)
    if words:
        label_ticks(axes, "x", list(words), rotation=90)
    else:
        axes.set_xlabel("position of the key")
        axes.locator_params(axis="x", integer=True)
    axes.margins(x=0.02)
    set_title(axes, f"received attention of {counted(len(received), 'head')}", title)
    return axes


def chosen_heads(received: Mapping[tuple[int, int], Sequence[float]], heads: Any) -> dict[Any, Sequence[float]]:
    """Return the lines of the heads in `heads`, in their order, or of all heads if it is None.

    Raises:
        InputError: a head is not among the keys of `received`.
    """
    if heads is None:
        return dict(received)
    of = "a collection of (layer, head)"
    chosen = [head_pair("heads", head, of=of) for head in collection_of("heads", heads, of="heads (layer, head)")]
    for head in chosen:
        if head not in received:
            raise InputError("heads", expected="each a (layer, head) with received attention", got=head)
    return {head: received[head] for head in chosen}


def _positive(line: Sequence[float]) -> list[float]:
    """Return the numbers of a line, with NaN in place of numbers that a logarithmic axis cannot show."""
    return [value if value > 0 else float("nan") for value in line]


def _draw_by_layer(axes: "Axes", received: Mapping[tuple[int, int], Sequence[float]]) -> None:
    """Draw a thin line for each head, coloured by layer, and a colour bar of layers."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    layers = [layer for layer, _ in received]
    scale: Any = ScalarMappable(Normalize(min(layers), max(layers)), layer_colours())
    for (layer, _), line in received.items():
        axes.plot(range(len(line)), _positive(line), color=scale.to_rgba(layer), linewidth=0.7, alpha=0.7)
    if len(set(layers)) > 1:
        add_colour_bar(axes, scale, "layer")
