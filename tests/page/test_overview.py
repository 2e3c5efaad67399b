"""Overview of all heads: groups, order, filters, search, colours and the choice of a head."""

import dataclasses
import re

import pytest
import torch

from page.synthetic import MINUS, ROLES, SIDE, STATISTICS, page_contents, share_on, table_contents, text_side


def names(page) -> list[str]:
    """Return the names of the heads in the overview, in order."""
    return page.locator("#overview .cell-name").all_inner_texts()


def statistic(contents, name: str) -> torch.Tensor:
    """Return the means of a statistic, one per head."""
    return contents.models[0].estimates.means[[s.name for s in STATISTICS].index(name)]


def test_heads_are_grouped_by_role_and_by_layer(open_page):
    contents, _ = page_contents()
    page = open_page(contents)
    groups = page.locator("#overview .group")
    assert groups.count() == 3
    for place, role in enumerate(ROLES):
        heads = [head.name for head in contents.models[0].heads if head.role == role.name]
        assert groups.nth(place).locator(".cell-name").all_inner_texts() == heads
        assert groups.nth(place).locator(".rule").inner_text() == role.rule
    page.get_by_label("Group by").select_option("layer")
    assert page.locator("#overview .group h3").all_inner_texts() == ["layer 0", "layer 1", "layer 2"]
    assert names(page) == [head.name for head in contents.models[0].heads]


def test_heads_are_sorted_by_a_statistic(open_page):
    contents, _ = page_contents()
    page = open_page(contents, address="#group=none")
    page.get_by_label("Sort by").select_option(label="entropy")
    order = statistic(contents, "entropy").argsort(descending=True).tolist()
    assert names(page) == [contents.models[0].heads[head].name for head in order]


def test_filters_leave_matching_heads(open_page):
    contents, _ = page_contents()
    page = open_page(contents, address="#group=none")
    page.get_by_text("Filter", exact=True).click()
    page.get_by_label("Layers").fill("1-2")
    page.get_by_role("checkbox", name="mixed").check()
    page.get_by_label("Values of").select_option(label="special")
    page.get_by_label("from", exact=True).fill("0.4")
    values = statistic(contents, "special")
    expected = [
        head.name
        for place, head in enumerate(contents.models[0].heads)
        if head.layer >= 1 and head.role == "mixed" and values[place] >= 0.4
    ]
    page.locator("#overview-status", has_text=f"{len(expected)} of 15 heads").wait_for()
    assert names(page) == expected
    page.get_by_role("button", name="Remove all filters").click()
    assert len(names(page)) == 15


def test_search_finds_names_and_words(open_page):
    contents, truth = page_contents()
    page = open_page(contents, address="#group=none")
    page.get_by_label("Search").fill("1.3")
    page.locator("#overview-status", has_text="1 of 15 heads").wait_for()
    assert names(page) == ["1.3"]
    page.get_by_label("Search").fill("Coffee")
    page.locator("#overview-status", has_text="sorted by the mean attention on “Coffee”").wait_for()
    shares = torch.tensor([share_on(weights, SIDE.words.index("coffee")) for weights in truth[0][0]])
    assert names(page) == [contents.models[0].heads[i].name for i in shares.argsort(descending=True).tolist()]
    status = page.locator("#overview-status").inner_text()
    assert status.endswith(f"sorted by the mean attention on “Coffee”: the largest is {float(shares.max()):.2f}.")
    page.get_by_label("Search").fill("espresso")
    page.locator("#overview-status", has_text="is not a word of this text").wait_for()


def test_search_for_a_word_states_lower_bounds_and_the_model(open_page):
    contents, truth = page_contents(listed=3, models=2, sharpness=0.7)
    page = open_page(contents, address="#group=none&model=difference")
    page.get_by_label("Search").fill("coffee")
    page.locator("#overview-status", has_text="sorted by lower bounds").wait_for()
    status = page.locator("#overview-status").inner_text()
    assert "of the mean attention on “coffee” in model A: the largest is at least" in status
    assert "at most" not in status
    shares = [share_on(weights, SIDE.words.index("coffee")) for weights in truth[0][0]]
    assert float(re.search(r"at least ([\d.]+\d)", status)[1]) <= max(shares)


def test_colours_by_a_statistic_show_the_values(open_page):
    contents, _ = page_contents()
    page = open_page(contents, address="#group=none")
    assert page.locator("#overview canvas").count() == 15
    page.get_by_label("Colour by").select_option(label="effect")
    values = statistic(contents, "effect").tolist()
    written = [f"{value:.{2 if abs(value) >= 0.01 else 3}f}".replace("-", MINUS) for value in values]
    assert page.locator(".cell-value").all_inner_texts() == written
    legend = page.locator("#overview-legend").inner_text()
    largest = max(map(abs, values))
    assert legend.split("\n")[:3] == ["effect (nats)", f"{MINUS}{largest:.2f}", f"{largest:.2f}"]
    assert page.get_by_role("button", name=f"Head 0.0, previous token, effect {written[0]}").count() == 1


def test_choosing_a_head_shows_its_statistics(open_page):
    contents, _ = page_contents()
    page = open_page(contents)
    page.get_by_role("button", name="Head 1.2,").click()
    assert page.locator("#head-title").inner_text() == "Head 1.2"
    rows = {
        row.locator("th").inner_text(): row.locator("td").all_inner_texts()
        for row in page.locator("#head-statistics tbody tr").all()
    }
    assert page.locator("#head-statistics caption").inner_text() == "Statistics. Rank 1 = largest value of all heads."
    entropy = statistic(contents, "entropy")
    rank = int((entropy > entropy[7]).sum()) + 1
    ending = {1: "st", 2: "nd", 3: "rd"}.get(rank, "th")
    assert rows["entropy (nats)"] == [f"{entropy[7]:.2f}", "0.02", "31", f"{rank}{ending} of 15"]
    assert rows["previous (share)"][1] == "\N{EN DASH}"
    assert "head=1.2" in page.url


def test_arrow_keys_move_between_cells(open_page):
    page = open_page(page_contents()[0], address="#group=layer&head=1.1")
    page.locator('.cell[aria-pressed="true"]').focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.locator("#head-title").inner_text() == "Head 2.2"
    assert page.locator('.cell[tabindex="0"]').count() == 1
    page.keyboard.press("[")
    assert page.locator("#head-title").inner_text() == "Head 2.1"


def test_thumbnails_keep_every_row(open_page):
    contents, _truth = page_contents(layers=1, heads=1, sides=[text_side([f"w{i}" for i in range(64)])], sharpness=1.0)
    page = open_page(contents)
    size, darkest = page.locator("#overview canvas").evaluate(
        "canvas => { const d = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;"
        " const sums = []; for (let y = 0; y < canvas.height; y++) { let s = 0;"
        " for (let x = 0; x < canvas.width; x++) s += 255 - d[4 * (y * canvas.width + x)]; sums.push(s); }"
        " return [canvas.width, Math.min(...sums) / Math.max(...sums)]; }"
    )
    assert size >= 100  # one head has a large picture
    assert darkest > 0.5


def test_thumbnails_fill_the_width_and_differ_where_all_weights_are_small(open_page):
    contents, _ = page_contents(layers=2, heads=2, sides=[text_side([f"w{i}" for i in range(64)])], sharpness=1.5)
    page = open_page(contents, address="#group=none")
    row = page.locator(".cells").bounding_box()
    boxes = [cell.bounding_box() for cell in page.locator(".cell").all()]
    assert boxes[0]["width"] > 100
    assert boxes[-1]["x"] + boxes[-1]["width"] == pytest.approx(row["x"] + row["width"], abs=boxes[0]["width"])
    darkness = page.locator("#overview canvas").first.evaluate(
        "canvas => { const d = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;"
        " const all = []; for (let i = 0; i < d.length; i += 4) all.push(255 - d[i]); all.sort((a, b) => a - b);"
        " return all[all.length - 1] - all[0]; }"
    )
    assert darkness > 50


def test_a_page_opens_sorted_and_coloured_by_its_result(open_page):
    contents, _ = page_contents()
    row = [each.name for each in STATISTICS].index("effect")
    opening = {"colour": str(row), "sort": str(row), "group": "none"}
    page = open_page(dataclasses.replace(contents, opening=opening))
    order = statistic(contents, "effect").argsort(descending=True).tolist()
    expected = [contents.models[0].heads[head].name for head in order]
    assert names(page) == expected
    assert page.locator(".cell-value").count() == 15
    assert page.get_by_label("Colour by").locator("option:checked").inner_text() == "effect"
    assert page.locator("#head-title").inner_text() == f"Head {expected[0]}"
    assert "#" not in page.url
    page.get_by_label("Sort by").select_option(label="layer and head")
    assert "sort=" in page.url
    assert names(page) == [head.name for head in contents.models[0].heads]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_page_of_a_table_alone_shows_coloured_values(open_page, theme):
    page = open_page(table_contents(), theme=theme)
    assert page.locator(".cell-value").count() == 8
    assert page.locator("#head-statistics tbody tr").count() == 7
    assert page.locator("#tray").is_hidden()
    page.get_by_label("Colour by").select_option(label="entropy")
    assert page.locator(".cell-value").count() == 8
