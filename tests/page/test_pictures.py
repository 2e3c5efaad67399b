"""Pictures of a head: the matrix, images of patches, and saved files."""

import re

import pytest
import torch

from page.synthetic import SIDE, head_attention, page_contents, picture_contents, text_side, with_heads, word_matrix
from page.test_text import expected_list, readout, strength, tints


def point_at_cell(page, plot, row, column, count):
    """Move the pointer to a cell of a matrix with this number of columns, within the margins of its labels."""
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    cell = (box["width"] - 122) / count
    page.mouse.move(box["x"] + 92 + (column + 0.5) * cell, box["y"] + 74 + (row + 0.5) * cell)


def test_picture_has_a_rectangle_for_each_patch(open_page):
    contents, weights = picture_contents()
    page = open_page(contents, address="#head=0.2")
    assert page.locator(".head-view .patch").count() == 6
    assert page.locator(".head-view .text .word").all_inner_texts() == ["[CLS]"]
    frame, patch = page.locator(".picture-frame").bounding_box(), page.locator('.patch[data-unit="6"]').bounding_box()
    assert patch["x"] - frame["x"] == pytest.approx(frame["width"] * 2 / 3, abs=1)
    assert patch["y"] - frame["y"] == pytest.approx(frame["height"] / 2, abs=1)
    page.locator('.patch[data-unit="6"]').hover()
    words = contents.passages[0].sides[0].words
    assert readout(page) == ("Attention from “row 2, column 3”", expected_list(weights[2][6], words))


def test_matrix_zooms_and_names_its_cells(open_page):
    contents, truth = page_contents()
    page = open_page(contents, address="#head=1.4")
    plot = page.locator(".matrix-plot:visible")
    point_at_cell(page, plot, 7, 3, len(SIDE.words))
    weight = float(word_matrix(truth[0][0][9])[7, 3])
    assert page.locator(".tip:visible").inner_text() == f"coffee → you: {weight:.2f}"
    assert page.locator(".matrix-note").text_content() == ""
    plot.focus()
    page.keyboard.press("+")
    page.mouse.wheel(0, -300)
    page.locator(".matrix-plot.zoomed").wait_for()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("0")
    page.locator(".matrix-plot.zoomed").wait_for(state="detached")
    page.get_by_role("button", name="linear scale").click()
    assert "scale=linear" in page.url


def test_sparse_matrix_states_bounds(open_page):
    contents, truth = page_contents(layers=1, heads=2, listed=3, sharpness=0.7, causal=True)
    page = open_page(contents, address="#head=0.1&words=false")
    plot, weights = page.locator(".matrix-plot:visible"), truth[0][0][1]
    key = int(weights[9, :10].argmin())
    point_at_cell(page, plot, 9, key, 13)
    text = page.locator(".tip:visible").inner_text()
    assert float(re.search(r"at most ([\d.]+\d)", text)[1]) >= float(weights[9, key])
    key = int(weights[9, :10].argmax())
    point_at_cell(page, plot, 9, key, 13)
    text = page.locator(".tip:visible", has_text="at least").inner_text()
    assert float(weights[9, key]) - 0.017 <= float(re.search(r"at least ([\d.]+)", text)[1]) <= float(weights[9, key])
    point_at_cell(page, plot, 9, 11, 13)
    page.locator(".tip:visible", has_text="not visible").wait_for()
    note = page.locator(".matrix-note:visible").inner_text()
    assert "Every other cell has the mean weight of the tile around it" in note


@pytest.mark.parametrize("button", ["Matrix PNG", "Matrix SVG", "Curves PNG", "Curves SVG"])
def test_pictures_are_saved(open_page, button, tmp_path):
    page = open_page(page_contents()[0], address="#head=0.3")
    page.locator("svg.lines:visible").wait_for()
    with page.expect_download() as download:
        page.get_by_role("button", name=button).click()
    path = tmp_path / download.value.suggested_filename
    download.value.save_as(path)
    kind, suffix = button.lower().split()
    assert path.name == f"head-0.3-{kind}.{suffix}"
    content = path.read_bytes()
    if suffix == "svg":
        assert b"<svg" in content
        text = content.decode("utf-8")
        assert "coffee" in text
        assert "Head 0.3 · synthetic A" in text
        assert text.count("<rect") > 40 if kind == "matrix" else ">weight<" in text
    else:
        assert content.startswith(b"\x89PNG")
        assert len(content) > 2000


PIXELS = """(canvas, [x, y, width, height]) => {
  const copy = document.createElement("canvas");
  [copy.width, copy.height] = [canvas.width, canvas.height];
  const context = copy.getContext("2d", {willReadFrequently: true});
  context.drawImage(canvas, 0, 0);
  return [...context.getImageData(x, y, width, height).data];
}"""
"""Function that returns the red, green, blue and alpha values of a part of a canvas."""


def test_matrix_fits_its_plot_after_the_window_becomes_narrow(open_page):
    count = len(text_side().tokens)
    contents, _ = page_contents(layers=1, heads=1)
    page = open_page(with_heads(contents, [head_attention(torch.eye(count, dtype=torch.float64), causal=False)]))
    page.locator("svg.lines:visible").wait_for()
    for width in (1280, 500, 1100):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(300)
        plot = page.locator(".matrix-plot:visible")
        plot_width, height = plot.bounding_box()["width"], plot.locator("canvas").evaluate("canvas => canvas.height")
        pixels = plot.locator("canvas").evaluate(PIXELS, [0, height - 8, int(plot_width), 1])
        dark = [place for place in range(95, int(plot_width) - 25) if sum(pixels[4 * place : 4 * place + 3]) < 600]
        assert max(dark) == pytest.approx(plot_width - 31, abs=3), width  # the last cell of the diagonal is complete
        assert len(dark) == pytest.approx((plot_width - 122) / len(SIDE.words), abs=2), width


def test_row_and_column_under_the_pointer_are_highlighted(open_page):
    page = open_page(page_contents(causal=True, sides=[text_side([f"w{i}" for i in range(80)])])[0])
    plot = page.locator(".matrix-plot:visible")
    plot.scroll_into_view_if_needed()
    canvas = plot.locator("canvas")

    def blue() -> int:
        """Return the number of blue pixels next to the rows."""
        pixels = canvas.evaluate(PIXELS, [40, 70, 50, 300])
        return sum(pixels[place + 2] - pixels[place] > 100 for place in range(0, len(pixels), 4))

    assert blue() == 0
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 150, box["y"] + 300)
    page.locator(".tip:visible").wait_for()
    page.wait_for_timeout(100)
    assert blue() > 20


def test_patches_have_the_colour_of_the_largest_weight_that_is_shown(open_page):
    contents, weights = picture_contents()
    page = open_page(contents, address="#head=0.2&pin=q6&tray=A0")
    row = weights[2][6]
    largest = float(row.max())
    found = [tints(page.locator(f'.head-view .word[data-unit="{unit}"]')) for unit in range(7)]
    full = strength(largest, 1 / 7)
    assert found == [[pytest.approx(full * (float(weight) / largest) ** 0.5, abs=0.005)] for weight in row]
    assert page.locator(".text-legend:visible").inner_text().split("\n") == ["weight", "0", f"{largest:.2f}"]
    assert page.locator("#tray-lines .picture-frame .patch").count() == 6
    text = page.locator("main").inner_text()
    assert "from the patch" in text
    assert "Mark patches" in text
    assert "distance" not in text
    assert "this picture" in text
    assert not {"word", "words", "text", "texts"} & set(text.lower().replace(".", " ").replace(",", " ").split())


def test_uniform_attention_has_a_pale_colour(open_page):
    contents, _ = picture_contents(heads=1)
    uniform = head_attention(torch.full((7, 7), 1 / 7, dtype=torch.float64), causal=False)
    page = open_page(with_heads(contents, [uniform]))
    assert tints(page.locator(".head-view .patch")) == pytest.approx([0.25] * 6, abs=0.01)


def columns(page) -> tuple[list[str], list[str]]:
    """Return the words from which and to which curves are drawn."""
    return tuple(page.locator(f".line-word[data-{axis}]").all_text_contents() for axis in ("query", "key"))


def test_curves_of_long_texts_are_those_of_a_window_or_of_the_pinned_word(open_page):
    contents, truth = page_contents(layers=1, heads=1, sides=[text_side([f"w{i}" for i in range(150)])])
    weights = truth[0][0][0]
    page = open_page(contents)
    assert columns(page) == ([f"w{i}" for i in range(60)],) * 2
    assert "These are words 1 to 60 of 150" in page.locator(".curves p").inner_text()
    page.get_by_role("button", name="Later words").click()
    assert columns(page)[0] == [f"w{i}" for i in range(60, 120)]
    page.get_by_role("button", name="Later words").click()
    assert columns(page)[1] == [f"w{i}" for i in range(90, 150)]
    assert page.get_by_role("button", name="Later words").is_disabled()
    text = page.locator(".head-view:visible .text")
    text.evaluate("text => { text.style.maxHeight = '80px'; text.scrollTop = text.scrollHeight / 3; }")
    page.locator(".curves p").filter(has_not_text="words 91 to").wait_for()
    first = int(columns(page)[0][0][1:])
    frame = text.bounding_box()
    box = page.locator(f'.word[data-unit="{first}"]').bounding_box()
    assert 20 < first < 90
    assert abs(box["y"] - frame["y"]) < box["height"] + 12  # it is in the first line that is visible
    page.locator('.word[data-unit="140"]').evaluate("word => word.click()")
    drawn = [key for key in range(150) if float(weights[140, key]) >= 0.04] or [int(weights[140].argmax())]
    assert columns(page) == (["w140"], [f"w{key}" for key in drawn])
    page.get_by_role("button", name="to the word", exact=True).click()
    queries = weights[:, 140].topk(60).indices.tolist()
    strong = [query for query in sorted(queries) if float(weights[query, 140]) >= 0.04] or [queries[0]]
    assert columns(page) == ([f"w{query}" for query in strong], ["w140"])
    assert page.get_by_role("button", name="Curves SVG").count() == 1


def test_a_veil_keeps_the_hues_of_a_picture_and_has_an_opacity(open_page):
    contents, weights = picture_contents()
    page = open_page(contents, address="#head=0.2&pin=q6")
    colour = "patch => getComputedStyle(patch).backgroundColor.match(/[\\d.]+/g).map(Number)"
    full = strength(float(weights[2][6].max()), 1 / 7)
    for opacity in (0.75, 0.2):
        if opacity == 0.2:
            page.get_by_label("Opacity").fill("20")
        for unit in range(1, 7):
            red, green, blue, *alpha = page.locator(f'.head-view .patch[data-unit="{unit}"]').evaluate(colour)
            assert red == green == blue  # grey changes no hue
            part = full * (float(weights[2][6][unit]) / float(weights[2][6].max())) ** 0.5
            assert (alpha or [1])[0] == pytest.approx(opacity * (1 - part), abs=0.01)
    assert "opacity=20" in page.url
