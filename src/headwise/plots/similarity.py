"""Matrix of the similarity of every two heads, in the order of the model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from headwise.plots.canvas import BLANK, add_colour_bar, axes_for, explain_blank, require_finite, set_title
from headwise.plots.heatmap import colour_scale
from headwise.shapes import Float

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_similarity(
    values: Float[Tensor, "heads heads"],
    layers: Sequence[int],
    *,
    measure: str,
    title: str = "",
    centred: bool = False,
    ax: Any = None,
) -> "Axes":
    """Draw the similarity of every two heads as a matrix, and return the axes. Ticks stand at the first head of each
    layer. Pairs of heads that were not compared are grey.

    Args:
        values: similarity of every two heads; NaN for pairs that were not compared.
        layers: layer of each head, zero-based, in the order of the rows.
        measure: name of the measure of similarity.
        title: end of the title, such as the model.
        centred: use colours around 0; they are also used if a number is negative.
        ax: matplotlib axes to draw on; those of a new figure by default.

    Raises:
        InputError: there is no finite number, or `ax` is not axes.
        MissingExtra: matplotlib is not installed.

    Example:
        >>> draw_similarity(torch.eye(4), [0, 0, 1, 1], measure="cka")  # doctest: +SKIP
    """
    numbers = values.flatten().tolist()
    require_finite(measure, numbers)
    side = min(3.2 + 0.04 * len(layers), 9.0)
    axes = axes_for(ax, side + 0.9, side)
    image = axes.imshow(values.tolist(), interpolation="nearest", **colour_scale(numbers, centred))
    axes.set_facecolor(BLANK)
    first_heads = [index for index in range(len(layers)) if not index or layers[index] != layers[index - 1]]
    labels = [str(layers[index]) for index in first_heads]
    axes.set_xticks(first_heads, labels)
    axes.set_yticks(first_heads, labels)
    axes.set(xlabel="layer", ylabel="layer")
    explain_blank(axes, numbers, "pair")
    axes.tick_params(labelsize=7)
    axes.spines[:].set_visible(False)
    add_colour_bar(axes, image, measure)
    set_title(axes, measure, title)
    return axes
