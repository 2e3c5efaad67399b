"""Saved matrices: the SVG and the PNG show the cells of the screen, also those whose weights are not listed."""

import base64
import re
from pathlib import Path

import pytest
import torch

from page.synthetic import page_contents, text_side

LEFT, TOP, RIGHT, TITLE = 92, 74, 30, 30
"""Margins of the matrix on the screen and in a PNG, and the height of the title of a PNG."""

TOKENS, FIRST_GENERATED = 70, 50

PIXELS = """async ([source, points]) => {
  const picture = source ? new Image() : document.querySelector(".matrix-plot canvas");
  if (source) {
    picture.src = source;
    await picture.decode();
  }
  const canvas = new OffscreenCanvas(picture.width, picture.height);
  const context = canvas.getContext("2d");
  context.drawImage(picture, 0, 0);
  const {data} = context.getImageData(0, 0, picture.width, picture.height);
  const first = ([x, y]) => 4 * (Math.floor(y) * picture.width + Math.floor(x));
  return points.map(point => [...data.slice(first(point), first(point) + 3)]);
}"""
"""Function that returns the colours of points of a picture, or of the matrix on the screen."""


def saved(page, button: str, path: Path) -> bytes:
    """Return the file that a button saves."""
    with page.expect_download() as download:
        page.get_by_role("button", name=button).click()
    download.value.save_as(path)
    return path.read_bytes()


def centres(rows: int, width: float) -> list[tuple[float, float]]:
    """Return the centres of all cells of a plot of square cells."""
    cell = width / TOKENS
    return [((column + 0.5) * cell, (row + 0.5) * cell) for row in range(rows) for column in range(TOKENS)]


@pytest.mark.parametrize("generated", [False, True])
@pytest.mark.parametrize("listed", [3, None])
def test_saved_matrices_have_the_cells_of_the_screen(open_page, tmp_path, listed, generated):
    side = text_side([f"w{i}" for i in range(TOKENS)], first_generated=FIRST_GENERATED)
    contents, _ = page_contents(layers=1, heads=1, sides=[side], causal=True, listed=listed, sharpness=1.0)
    page = open_page(contents, address="#head=0.0" + "&generated=true" * generated)
    page.locator(".matrix:visible").wait_for()
    plot = page.locator(".matrix-plot")
    first = FIRST_GENERATED if generated else 0
    rows = TOKENS - first
    svg = saved(page, "Matrix SVG", tmp_path / "matrix.svg").decode()
    assert re.findall(r'text-anchor="end"[^>]*>(w\d+)<', svg) == [f"w{row}" for row in range(first, TOKENS)]
    rectangles = re.findall(
        r'<rect x="(\d+)" y="(\d+)" width="14" height="14" fill="rgb\((\d+), ?(\d+), ?(\d+)\)"', svg
    )
    assert len(rectangles) == sum(range(first + 1, TOKENS + 1))
    x, y, unseen = re.search(
        rf'<rect x="(\d+)" y="(\d+)" width="{14 * TOKENS}" height="{14 * rows}" fill="rgb\(([\d, ]+)\)"', svg
    ).groups()
    colours = {((int(r[0]) - int(x)) // 14, (int(r[1]) - int(y)) // 14): tuple(map(int, r[2:])) for r in rectangles}
    expected = [
        colours.get((column, row), tuple(map(int, unseen.split(","))))
        for row in range(rows)
        for column in range(TOKENS)
    ]
    png = saved(page, "Matrix PNG", tmp_path / "matrix.png")
    points = [(2 * (LEFT + cx), 2 * (TITLE + TOP + cy)) for cx, cy in centres(rows, 800)]
    source = "data:image/png;base64," + base64.b64encode(png).decode()
    of_png = page.evaluate(PIXELS, [source, points])
    width = plot.evaluate("plot => plot.clientWidth") - LEFT - RIGHT
    of_screen = page.evaluate(PIXELS, [None, [(LEFT + cx, TOP + cy) for cx, cy in centres(rows, width)]])
    for pixels in (of_png, of_screen):
        assert torch.tensor(pixels).sub(torch.tensor(expected)).abs().max() <= 3
    if listed:
        assert len(set(expected)) > 40
