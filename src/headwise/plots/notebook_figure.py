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
    """Figure that notebooks display as a picture."""

    def _repr_png_(self) -> bytes:
        """Return the figure as a PNG picture, for notebooks."""
        stream = BytesIO()
        self.savefig(stream, format="png", dpi=DPI, bbox_inches="tight")
        return stream.getvalue()


class NotebookAxes(Axes):
    """Axes that notebooks display as the picture of their figure."""

    def _repr_png_(self) -> bytes:
        """Return the figure of the axes as a PNG picture, for notebooks."""
        figure: Any = self.get_figure(root=True)
        picture: bytes = figure._repr_png_()
        return picture


def new_axes(width: float, height: float) -> Axes:
    """Return the axes of a new figure of `width` by `height` inches, of which pyplot has no record."""
    figure = NotebookFigure(figsize=(width, height), layout="constrained")
    return figure.add_subplot(axes_class=NotebookAxes)
