"""Texts with pictures: words and patches in one view, regions, steps of generation, overlays and maps of relevance."""

import base64
import math
import re
from dataclasses import replace

import pytest
import torch

from headwise.page.contents import RelevanceMap
from headwise.page.write import page_json
from page.synthetic import (
    GRIDS,
    MINUS,
    Contents,
    contents_on,
    head_attention,
    mixed_side,
    page_contents,
    picture_side,
    random_weights,
    text_side,
    with_heads,
    word_matrix,
)
from page.test_saved_matrix import PIXELS, saved
from page.test_text import expected_list, readout, strength, tints, word

SIDE = mixed_side()
FIRST = {0: 3, 1: 10}
"""Index of the first patch of each picture among the words."""

NAMES = [
    f"picture {SIDE.patches[token].picture + 1} {text}" if SIDE.patches[token]
    else f"{text} ({place + 1})" if SIDE.words.count(text) > 1 else text
    for place, (text, token) in enumerate((text, SIDE.word_of.index(at)) for at, text in enumerate(SIDE.words))
]  # fmt: skip
GENERATED = [SIDE.words.index(text) for text in ("a", "blue", "square")]
PATCHES = {picture: range(FIRST[picture], FIRST[picture] + 6) for picture in FIRST}


def contents(**options):
    """Return the contents of a page with the mixed side, and the attention between the words of each head."""
    page, truth = page_contents(layers=2, heads=3, sides=[SIDE], causal=True, **options)
    return page, [word_matrix(weights, SIDE) for weights in truth[0][0]]


def named(matrix: torch.Tensor) -> dict[str, str]:
    """Return the list of the largest weights that are not 0, as the page shows it."""
    return {name: text for name, text in expected_list(matrix, tuple(NAMES)).items() if text != "0.00"}


def test_words_flow_and_each_run_of_patches_is_a_label(open_page):
    page = open_page(contents()[0])
    text = page.locator(".head-view .text").inner_text()
    words = " ".join(SIDE.words[17:]).replace(" ?", "?")
    assert text == f"[BOS] USER : [picture 1] [IMG] [picture 2] [IMG] {words}"
    frames = page.locator(".head-view .picture-frame")
    assert [frames.nth(place).locator(".patch").count() for place in range(2)] == [6, 6]
    for picture, (rows, columns) in enumerate(GRIDS):
        frame = frames.nth(picture).bounding_box()
        for place, unit in enumerate(PATCHES[picture]):
            patch = word(page, unit).bounding_box()
            # The patches of picture 2 overlap. Those at its border are cut, so that their centres are moved.
            tolerance = {0: 1.1, 1: 0.03 * frame["height"]}[picture]
            assert patch["x"] - frame["x"] == pytest.approx(place % columns / columns * frame["width"], abs=tolerance)
            assert patch["y"] - frame["y"] == pytest.approx(place // columns / rows * frame["height"], abs=tolerance)
            if place >= columns:
                above = word(page, unit - columns).bounding_box()
                assert above["y"] + above["height"] == patch["y"]
    assert word(page, PATCHES[1][3]).get_attribute("aria-label") == "picture 2 (2, 2)"


def test_pinned_words_colour_words_and_patches_by_scales_of_their_own(open_page):
    page_of, matrices = contents()
    page = open_page(page_of, address="#head=1.1")
    unit = GENERATED[2]
    word(page, unit).click()
    row = matrices[4][unit]
    assert readout(page) == ("Attention from “square”", named(row))
    is_patch = torch.tensor([unit in PATCHES[0] or unit in PATCHES[1] for unit in range(len(row))])
    largest = {True: float(row[is_patch].max()), False: float(row[~is_patch].max())}
    uniform = len(SIDE.tokens) / len(SIDE.words) / len(SIDE.tokens)
    for each in range(unit + 1):
        of = largest[bool(is_patch[each])]
        expected = strength(of, uniform) * (float(row[each]) / of) ** 0.5
        assert tints(word(page, each)) == [pytest.approx(expected if expected > 0.003 else 0, abs=0.004)]
    legend = [text.split("\n") for text in page.locator(".text-legend:visible .legend-scale").all_inner_texts()]
    assert legend == [["weight, words", "0", f"{largest[False]:.2f}"], ["weight, patches", "0", f"{largest[True]:.2f}"]]
    page.get_by_role("button", name="to the word or patch", exact=True).click()
    page.keyboard.press("Escape")
    word(page, PATCHES[1][2]).click()
    column = torch.zeros(len(row), dtype=row.dtype)
    column[GENERATED] = matrices[4][GENERATED, PATCHES[1][2]]  # the rows of generated words are shown
    assert readout(page) == ("Attention to “picture 2 (2, 1)”", named(column))


def test_arrow_keys_move_in_a_picture_and_between_words(open_page):
    page = open_page(contents()[0])

    def press(*keys: str) -> int:
        for key in keys:
            page.keyboard.press(key)
        return int(page.evaluate("document.activeElement.dataset.unit"))

    word(page, 0).focus()
    assert press("ArrowRight", "ArrowRight") == 2
    assert press("ArrowRight") == SIDE.words.index("[IMG]")  # the next word, not the first patch
    assert press("ArrowLeft") == 2
    word(page, PATCHES[0][0]).focus()
    assert press("ArrowDown") == PATCHES[0][3]
    assert press("ArrowRight", "ArrowRight") == PATCHES[0][5]
    assert press("ArrowUp") == PATCHES[0][2]
    assert press("ArrowRight") == PATCHES[0][3]  # after the last patch of a row, the first one of the next row
    word(page, PATCHES[1][1]).focus()
    assert press("ArrowDown", "ArrowDown") == PATCHES[1][5]
    assert SIDE.patches[SIDE.word_of.index(press("ArrowDown"))] is None


def shares(page) -> dict[str, str]:
    """Return the shares of attention that the page lists."""
    rows = page.locator(".shares:visible li").all()
    return {row.locator(".bar-name").inner_text(): row.locator(".number").inner_text() for row in rows}


def test_steps_pin_generated_words_and_state_shares(open_page):
    page_of, matrices = contents()
    page = open_page(page_of, address="#head=0.2")
    slider = page.get_by_role("slider", name="Generated word")
    parts = {
        "picture 1": [*PATCHES[0]],
        "picture 2": [*PATCHES[1]],
        "generated words": GENERATED,
        "first token, [BOS]": [0],
        "special tokens": [place for place, text in enumerate(SIDE.words) if text == "[IMG]"],
    }
    parts["words of the prompt"] = [u for u in range(len(SIDE.words)) if not any(u in each for each in parts.values())]

    def expected(row: torch.Tensor) -> dict[str, str]:
        found = {name: float(row[units].sum()) for name, units in parts.items()}
        return {name: f"{100 * share:.{1 if 0 < share < 0.01 else 0}f} %" for name, share in found.items()}

    assert slider.get_attribute("aria-valuetext") == "all 3 (mean)"
    mean = matrices[2][GENERATED].mean(0)
    assert shares(page) == expected(mean)
    title = "Mean attention that each word or patch receives from generated words"
    assert readout(page) == (title, named(mean))
    slider.focus()
    for step, unit in enumerate(GENERATED, 1):
        page.keyboard.press("ArrowRight")
        text = f"{step} of 3: “{SIDE.words[unit]}”"
        assert slider.get_attribute("aria-valuetext") == text
        assert f"pin=q{unit}" in page.url
        assert shares(page) == expected(matrices[2][unit])
        assert readout(page)[1] == named(matrices[2][unit])
    page.keyboard.press("Home")
    assert "pin=" not in page.url
    assert shares(page) == expected(mean)
    word(page, 2).click()
    assert slider.get_attribute("aria-valuetext") == "another word is pinned"
    assert "Xiao et al. 2023" in page.locator(".shares:visible").inner_text()
    page.get_by_role("button", name="to the word or patch", exact=True).click()
    assert page.locator(".shares:visible").count() == 0


def test_shares_of_sparse_rows_are_bounds(open_page):
    page_of, matrices = contents(listed=4, sharpness=1.0)
    page = open_page(page_of, address=f"#head=0.1&pin=q{GENERATED[1]}")
    found = shares(page)
    assert "not stored" in found
    row = matrices[1][GENERATED[1]]
    for picture in (0, 1):
        if text := found.get(f"picture {picture + 1}"):
            assert (
                float(text.removeprefix("≥ ").removesuffix(" %")) <= 100 * float(row[[*PATCHES[picture]]].sum()) + 0.1
            )


def test_a_text_without_pictures_and_generated_words_has_no_shares(open_page):
    page = open_page(page_contents()[0])
    assert page.locator(".shares:visible").count() == 0
    assert page.locator(".field-steps").is_hidden()


CELLS = """unit => [...document.querySelectorAll("#overview .cell")].map(cell => {
  const canvas = cell.querySelector("canvas");
  if (!canvas) return null;
  const {data, width} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const patches = [...Array(6).keys()].map(place => {
    const [x, y] = [((place % 3) + 0.5) / 3 * width, (1 / 6 + (Math.floor(place / 3) + 0.5) / 2 * 2 / 3) * width];
    return data[4 * (Math.floor(y) * width + Math.floor(x))];
  });
  return [cell.querySelector(".cell-share").textContent, patches];
})"""
"""Script that returns the share of each cell, and the red of its patches on a white picture, 3 wide and 2 high."""


def test_overview_shows_the_attention_on_a_picture(open_page):
    page_of, matrices = contents()
    page = open_page(page_of, address="#group=none")
    page.get_by_label("Colour by").select_option("attention on picture 1")
    assert "picture%3Apicture+1" in page.url

    def check(rows: list[int]) -> None:
        for head, (share, red) in enumerate(page.evaluate(CELLS, 0)):
            row = matrices[head][rows].mean(0)
            weights = row[[*PATCHES[0]]]
            assert share == f"{100 * float(weights.sum()):.{1 if 0 < float(weights.sum()) < 0.01 else 0}f} %"
            largest = float(weights.max())
            seen = len(SIDE.tokens) if len(rows) > 1 else SIDE.word_of.index(rows[0]) + 1
            full = strength(largest, len(SIDE.tokens) / len(SIDE.words) / seen)
            for place, weight in enumerate(weights.tolist()):
                veil = 0.75 * (1 - full * (weight / largest) ** 0.5)
                assert red[place] == pytest.approx(255 - veil * (255 - 80), abs=4), (head, place)

    page.locator(".cell-share", has_text="%").nth(5).wait_for()
    check(GENERATED)
    before = page.locator(".cell-share").all_inner_texts()
    page.get_by_role("slider", name="Generated word").fill("2")
    page.wait_for_function("before => [...document.querySelectorAll('.cell-share')].map(e => e.innerText)"
                           ".every((text, at) => text !== before[at])", arg=before)  # fmt: skip
    check([GENERATED[1]])
    page.get_by_label("Colour by").select_option("role")
    assert page.locator(".cell-share").all_inner_texts() == [""] * 6


def test_a_rectangle_on_a_picture_marks_its_patches_and_ranks_the_heads(open_page):
    page_of, matrices = contents()
    page = open_page(page_of)
    page.keyboard.press("m")
    frame = page.locator(".head-view .picture-frame").first.bounding_box()
    at = lambda x, y: (frame["x"] + x * frame["width"], frame["y"] + y * frame["height"])  # noqa: E731
    page.mouse.move(*at(0.9, 0.9))
    page.mouse.down()
    page.mouse.move(*at(0.6, 0.5))
    page.mouse.move(*at(0.4, 0.2))
    assert page.locator(".region").count() == 1
    page.mouse.up()
    assert page.locator(".region").count() == 0
    marked = [PATCHES[0][place] for place in (1, 2, 4, 5)]
    assert f"marks=0%3A{'.'.join(map(str, marked))}" in page.url
    page.locator("#find-result tbody tr").first.wait_for()
    others = [u for u, text in enumerate(SIDE.words) if u not in marked and not text.startswith("[")]
    uniform = sum(sum(token >= key for key in marked) / (token + 1) if u != SIDE.words.index("circle")
                  else (4 / (token + 1) + 4 / (token + 2)) / 2
                  for u in others for token in [SIDE.word_of.index(u)]) / len(others)  # fmt: skip
    found = {f"{head // 3}.{head % 3}": float(matrix[others][:, marked].sum(1).mean())
             for head, matrix in enumerate(matrices)}  # fmt: skip
    order = sorted(found, key=found.__getitem__, reverse=True)
    rows = [row.locator("th, td").all_inner_texts()[:3] for row in page.locator("#find-result tbody tr").all()]
    assert rows == [[name, f"{found[name]:.2f}", f"{uniform:.2f}"] for name in order]
    page.mouse.move(*at(0.9, 0.9))
    page.mouse.down()
    page.mouse.move(*at(0.7, 0.6))
    page.mouse.up()
    page.mouse.click(*at(0.1, 0.1))  # a click without movement marks one patch
    names = ", ".join(f"picture 1 {text}" for text in ("(1, 1)", "(1, 2)", "(1, 3)", "(2, 2)"))
    page.locator("#find-words", has_text=f"Marked: {names}").wait_for()
    assert page.locator("#find-words").inner_text() == f"Marked: {names}"


def test_shift_and_arrow_keys_mark_a_rectangle(open_page):
    page = open_page(contents()[0], address="#marking=true")
    word(page, PATCHES[1][0]).focus()
    for key in ("Shift+ArrowRight", "Shift+ArrowDown", "Shift+ArrowDown"):
        page.keyboard.press(key)
    assert page.locator(".patch.marked").count() == 6
    page.keyboard.press("Shift+ArrowUp")
    assert page.locator(".patch.marked").count() == 4
    assert page.locator('.head-view .word[aria-selected="true"]').count() == 4
    assert "hold Shift and press the arrow keys" in page.locator("#head-hint").inner_text()


def test_heads_are_ranked_by_the_attention_of_the_pinned_word(open_page):
    page_of, matrices = contents()
    unit, marked = GENERATED[1], [*PATCHES[1]][:3]
    marks = ".".join(map(str, marked))
    page = open_page(page_of, address=f"#pin=q{unit}&marking=true&marks=0:{marks}")
    page.get_by_role("button", name="pinned", exact=True).click()
    page.locator("#find-kind", has_text="The attention that “blue” puts on the marked words and patches.").wait_for()
    page.locator("#find-result tbody tr").first.wait_for()
    found = sorted(((float(matrix[unit, marked].sum()), f"{head // 3}.{head % 3}")
                    for head, matrix in enumerate(matrices)), reverse=True)  # fmt: skip
    rows = [row.locator("th, td").all_inner_texts()[:3] for row in page.locator("#find-result tbody tr").all()]
    token = SIDE.word_of.index(unit)
    assert rows == [[name, f"{share:.2f}", f"{3 / (token + 1):.2f}"] for share, name in found]


@pytest.mark.parametrize("pinned", [True, False])
def test_pictures_are_saved_with_their_caption(open_page, tmp_path, pinned):
    page_of, matrices = contents()
    page = open_page(page_of, address="#head=1.0" + f"&pin=q{GENERATED[0]}" * pinned)
    page.locator(".matrix:visible").wait_for()
    svg = saved(page, "Picture SVG", tmp_path / "picture.svg").decode()
    row = matrices[3][GENERATED[0]] if pinned else matrices[3][GENERATED].mean(0)
    label = "Attention from “a”" if pinned else "Mean attention that each word or patch receives from generated words"
    assert all(f">{text}<" in svg for text in ("Head 1.0 · synthetic A", label, "picture 1", "picture 2", "0"))
    assert svg.count("<image") == 2
    weights = row[[*PATCHES[0], *PATCHES[1]]]
    largest = float(weights.max())
    full = strength(largest, 1 / (GENERATED[0] + 2) if pinned else 1 / (GENERATED[1] + 2))
    opacities = [float(each) for each in re.findall(r'fill="rgb\(80, ?80, ?80\)" fill-opacity="([\d.]+)"', svg)]
    assert opacities == pytest.approx([0.75 * (1 - full * (w / largest) ** 0.5) for w in weights.tolist()], abs=0.006)
    png = saved(page, "Picture PNG", tmp_path / "picture.png")
    source = "data:image/png;base64," + base64.b64encode(png).decode()
    points = []
    for x, y, width, height in re.findall(
        r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)" shape', svg
    )[:6]:
        points.append((2 * (12 + float(x) + float(width) / 2), 2 * (50 + float(y) + float(height) / 2)))
    for (red, green, blue), opacity in zip(page.evaluate(PIXELS, [source, points]), opacities, strict=False):
        assert red == green == blue == pytest.approx(255 - opacity * (255 - 80), abs=3)


def test_pictures_of_a_head_without_pictures_cannot_be_saved(open_page):
    page = open_page(page_contents()[0])
    page.locator(".matrix:visible").wait_for()
    assert page.get_by_role("button", name="Picture SVG").is_hidden()


def relevance_maps(target: int) -> tuple[RelevanceMap, ...]:
    """Return two maps of relevance for a token, with values of patches only; the second one does not agree."""
    values = torch.full((len(SIDE.tokens),), torch.nan)
    patches = [token for token, patch in enumerate(SIDE.patches) if patch]
    values[patches] = torch.linspace(-0.5, 1, len(patches))
    curves = {"deletion": (0.8, 0.2, 0.0), "insertion": (0.0, 0.6, 0.8), "random deletion": (0.8, 0.5, 0.0),
              "random insertion": (0.0, 0.4, 0.8)}  # fmt: skip
    weights = torch.where(values.isnan(), values, values.abs())
    return (
        RelevanceMap("occlusion", "Fall of the probability.", 0, 0, target, values, None, curves),
        RelevanceMap("attention", "Mean attention.", 0, 0, target, weights, (0.03, -0.12, 0.19), curves),
    )


def with_maps(page_of: Contents) -> Contents:
    """Return contents with maps of relevance for the last two words."""
    maps = tuple(each for target in (len(SIDE.tokens) - 2, len(SIDE.tokens) - 1) for each in relevance_maps(target))
    return replace(page_of, passages=(replace(page_of.passages[0], maps=maps),))


def test_maps_of_relevance_are_shown_for_the_pinned_word(open_page):
    page = open_page(with_maps(contents()[0]))
    panel = page.locator("#head-maps")
    assert panel.inner_text().split("\n") == ["Maps of relevance", "", "For the prediction of “blue”, of “square”"]
    panel.get_by_role("button", name="of “square”").click()
    panel.locator("h3", has_text="Maps of relevance for the prediction of “square”").wait_for()
    cards = panel.locator(".map")
    assert cards.locator("h4").all_inner_texts() == ["occlusion", "attention"]
    first, second = cards.nth(0).inner_text(), cards.nth(1).inner_text()
    assert f"Fall of the probability. From {MINUS}0.50 to 1.00." in first
    assert "Spearman" not in first
    assert "This map does not agree with occlusion." not in first
    assert f"Agreement with occlusion: Spearman 0.03 ({MINUS}0.12 to 0.19)" in second
    assert "This map does not agree with occlusion." in second
    for text in (first, second):
        assert "Deletion: area 0.30 (random order 0.45)" in text
        assert "Insertion: area 0.50 (random order 0.40)" in text
    assert cards.nth(0).locator(".patch").count() == 12
    strengths = torch.linspace(-0.5, 1, 12).abs().sqrt().tolist()
    assert tints(cards.nth(0).locator(".patch")) == pytest.approx(strengths, abs=0.001)
    assert cards.nth(0).locator(".patch.lower").count() == 4
    assert cards.nth(0).locator(".difference").count() == 1
    assert cards.nth(1).locator(".difference").count() == 0
    assert panel.locator("svg .curve").count() == 2 * 3
    page.get_by_role("slider", name="Generated word").fill("2")
    panel.locator("h3", has_text="“blue”").wait_for()
    page.get_by_role("slider", name="Generated word").fill("1")
    panel.locator("p", has_text="For the prediction of “blue”, of “square”").wait_for()


def test_maps_and_rows_are_stored(monkeypatch):
    from headwise.page import write

    page_of, _ = contents()
    values, arrays = page_json(with_maps(page_of))
    maps = values["passages"][0]["maps"]
    assert [maps[place]["agreement"] for place in (0, 1)] == [None, [0.03, -0.12, 0.19]]
    unknown = replace(relevance_maps(0)[1], agreement=(math.nan,) * 3)
    page_of_unknown = replace(page_of, passages=(replace(page_of.passages[0], maps=(unknown,)),))
    assert page_json(page_of_unknown)[0]["passages"][0]["maps"][0]["agreement"] == [None] * 3
    assert [each["target"] for each in maps] == [len(SIDE.tokens) - 2] * 2 + [len(SIDE.tokens) - 1] * 2
    assert maps[1]["curves"] == [("deletion", 3), ("insertion", 3), ("random deletion", 3), ("random insertion", 3)]
    assert "p0-maps" in arrays
    monkeypatch.setattr(write, "DENSE_WEIGHTS", 1)
    words = sum(patch is None for patch in SIDE.patches)
    monkeypatch.setattr(write, "LISTED_OF_WORDS", 6 * words * 6)
    monkeypatch.setattr(write, "LISTED_OF_PATCHES", 6 * 12 * 2)
    heads = page_of.passages[0].heads[0]
    is_patch = torch.tensor([patch is not None for patch in SIDE.patches])
    numbers = torch.zeros(2)
    for _, data in write.stored_rows(heads, [is_patch] * len(heads)):
        counts = torch.frombuffer(bytearray(data[4 : 4 + 2 * len(SIDE.tokens)]), dtype=torch.uint16).long()
        numbers += torch.stack([counts[~is_patch].sum(), counts[is_patch].sum()])
    assert 0.8 * 6 * words * 6 < numbers[0] <= 6 * words * 6
    assert 0.8 * 6 * 12 * 2 < numbers[1] <= 6 * 12 * 2


def test_three_sides_with_attention_between_any_two(open_page):
    sides = (
        replace(picture_side(), name="vision"),
        text_side(("query1", "query2"), "queries"),
        replace(SIDE, name="text"),
    )
    pairs = [(0, 0), (1, 1), (1, 0), (2, 2), (2, 1), (2, 0)]
    counts = [len(side.tokens) for side in sides]
    weights = [random_weights(counts[q], counts[k], causal=False, seed=place) for place, (q, k) in enumerate(pairs)]
    page_of, _ = contents_on("three sides", *sides, heads=len(pairs))
    page_of = with_heads(page_of, [head_attention(each, causal=False, queries=q, keys=k)
                                   for each, (q, k) in zip(weights, pairs, strict=True)])  # fmt: skip
    page = open_page(page_of, address="#group=kind&tray=A0+A2+A3+AL0")
    titles = page.locator("#overview .group h3").all_inner_texts()
    assert titles == ["vision self-attention", "queries self-attention", "text self-attention",
                      *(f"{q} to {k} cross-attention" for q, k in (("queries", "vision"), ("text", "queries"),
                                                                   ("text", "vision")))]  # fmt: skip
    for place, (queries, keys) in enumerate(pairs):
        page.locator(f'.cell[data-head="{place}"]').click()
        page.locator("#head-title", has_text=f"Head 0.{place}").wait_for()
        if queries != keys:
            expected = [f"Queries: {sides[queries].name}", f"Keys: {sides[keys].name}"]
            assert page.locator(".side-title").all_inner_texts() == expected
        row = word_matrix(weights[place], sides[queries]) if queries == keys else None
        if row is not None:
            mean = row[GENERATED] if queries == 2 else row
            values = list(expected_list(mean.mean(0), tuple(map(str, range(row.shape[1])))).values())
            assert list(readout(page)[1].values()) == values
    page.get_by_label("Group by").select_option("none")
    page.get_by_label("Colour by").select_option("attention on image")
    page.locator(".cell-share", has_text="%").nth(2).wait_for()
    assert page.locator(".cell-empty").count() == 3
    # A word that is pinned for one head is no word of a head with other sides.
    page.locator('.cell[data-head="3"]').click()
    page.locator("#head-title", has_text="Head 0.3").wait_for()
    word(page, 4).click()
    assert "pin=q4" in page.url
    page.locator('.cell[data-head="0"]').click()
    page.locator("#head-title", has_text="Head 0.0").wait_for()
    assert "pin=" not in page.url


def test_many_frames_scroll_sideways(open_page):
    pixel = SIDE.pictures[0]
    frames = tuple(replace(pixel, name=f"frame {number + 1}") for number in range(9))
    side = picture_side()
    patches = [patch._replace(picture=number) for number in range(9) for patch in side.patches[1:]]
    tokens = ["[BOS]", *side.tokens[1:] * 9, "What", "moves", "?"]
    text = replace(text_side(tokens), pictures=frames, patches=(None, *patches, None, None, None))
    for width in (1280, 390):
        page = open_page(
            page_contents(layers=1, heads=1, sides=[text], causal=True)[0], address="#pin=q50", width=width
        )
        strip = page.locator(".head-view .strip")
        assert strip.evaluate("strip => strip.scrollWidth > strip.clientWidth + 100")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        tops = [frame.bounding_box()["y"] for frame in strip.locator(".picture-frame").all()]
        assert len(set(tops)) == 1
        frame, patch = strip.bounding_box(), word(page, 50).bounding_box()
        assert frame["x"] <= patch["x"] <= frame["x"] + frame["width"]  # the pinned patch is visible


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_no_serious_violation_of_accessibility_rules(open_page, axe, theme, width):
    page_of = with_maps(page_contents(models=2, layers=2, heads=3, sides=[SIDE], causal=True, foci=True)[0])
    address = f"#head=0.2&pin=q{GENERATED[2]}&tray=A1+BL1&marking=true&marks=0:4.5&colour=picture:picture+1"
    page = open_page(page_of, address=address, theme=theme, width=width)
    page.locator("#find-result tbody tr").first.wait_for()
    page.locator("#head-maps svg").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    for view in ("A", f"B {MINUS} A"):
        page.get_by_role("button", name=view, exact=True).click()
        page.locator("#tray-lines .focus").first.wait_for()
        found = page.evaluate(f"(() => {{ {axe} }})(); axe.run().then(result => result.violations)")
        serious = [
            (each["id"], each["nodes"][0]["html"][:200], each["nodes"][0]["failureSummary"][:300])
            for each in found
            if each["impact"] in ("serious", "critical")
        ]
        assert serious == []


def test_touch_draws_a_rectangle(open_page):
    page = open_page(contents()[0], address="#marking=true", width=390, touch=True)
    frame = page.locator(".head-view .picture-frame").first
    assert frame.evaluate("frame => getComputedStyle(frame).touchAction") == "none"
    frame.scroll_into_view_if_needed()
    box = frame.bounding_box()
    client = page.context.new_cdp_session(page)
    for kind, part in (("touchStart", 0.1), ("touchMove", 0.5), ("touchMove", 0.9), ("touchEnd", None)):
        points = [] if part is None else [{"x": box["x"] + part * box["width"], "y": box["y"] + part * box["height"]}]
        client.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    page.locator(".patch.marked").nth(5).wait_for()
    assert page.locator(".patch.marked").count() == 6
