"""Matplotlib figures and axes that notebooks display as pictures without pyplot.

Figures of pyplot stay in memory until they are closed. The figures of plots are not registered there, so notebooks
would show them as text. Import this module only where matplotlib is needed.
"""

from io import BytesIO
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

DPI = 110
"""Resolution of pictures in notebooks."""


class NotebookFigure(Figure):
    """Matplotlib figure that notebooks display as a PNG picture, without pyplot."""

    def _repr_png_(self) -> bytes:
        """Return the figure as a PNG picture, for notebooks."""
        stream = BytesIO()
        self.savefig(stream, format="png", dpi=DPI, bbox_inches="tight")
        return stream.getvalue()


class NotebookAxes(Axes):
    """Matplotlib axes that notebooks display as a PNG picture of their figure, without pyplot."""

    def _repr_png_(self) -> bytes:
        """Return the figure of the axes as a PNG picture, for notebooks."""
        figure: Any = self.get_figure(root=True)
        picture: bytes = figure._repr_png_()
        return picture


def new_axes(width: float, height: float) -> Axes:
    """Return the axes of a new figure of `width` by `height` inches. Pyplot does not register the figure, and so does
    not keep it in memory.
    """
    figure = NotebookFigure(figsize=(width, height), layout="constrained")
    return figure.add_subplot(axes_class=NotebookAxes)
