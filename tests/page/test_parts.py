"""Parts of the page: foci, comparison, search by focus, two models, two sides, pictures, matrix and files."""

import dataclasses
import re

import pytest
import torch

from page.synthetic import (
    MINUS,
    STATISTICS,
    head_attention,
    page_contents,
    picture_contents,
    random_weights,
    text_side,
    two_sided_contents,
    word_matrix,
)
from page.test_text import SIDE, expected_list, readout, strength, word


def test_first_block_shows_the_best_head_of_each_focus(open_page):
    contents, truth = page_contents(foci=True)
    page = open_page(contents)
    block = page.locator("#foci-lines .focus")
    assert block.locator("h3").inner_text() == "objects"
    assert block.locator(".underlined").all_inner_texts() == [SIDE.words[5], SIDE.words[7]]
    assert block.locator(".focus-share strong").inner_text() == "90 %"
    assert block.locator(".verdict").inner_text() == contents.foci[0].verdict
    rows = [i for i, text in enumerate(SIDE.words) if i not in (5, 7) and not text.startswith("[")]
    weights = word_matrix(truth[0][0][14], SIDE)[rows].mean(0)[1:-1]
    largest = float(weights.max())
    expected = strength(largest, 1 / 12) * (float(weights[6]) / largest) ** 0.5
    assert page.locator("#foci-legend").inner_text().split("\n") == ["mean weight", "0", f"{largest:.2f}"]
    tint = float(block.locator(".word", has_text="coffee").evaluate("word => word.style.getPropertyValue('--a')"))
    assert tint == pytest.approx(expected, abs=0.002)
    top = page.locator("#foci").bounding_box()["y"]
    assert top < page.locator("#overview").bounding_box()["y"]
    block.get_by_role("button", name="head 2.4").click()
    assert page.locator("#head-title").inner_text() == "Head 2.4"


@pytest.mark.parametrize("kind", ["received", "exchanged"])
def test_marked_words_rank_the_heads(open_page, kind):
    contents, truth = page_contents()
    page = open_page(contents, address=f"#focus={kind}")
    page.keyboard.press("m")
    marked = [SIDE.words.index("coffee"), SIDE.words.index("tea")]
    for unit in marked:
        word(page, unit).click()
    page.locator("#find-result tbody tr").first.wait_for()
    others = [i for i, text in enumerate(SIDE.words) if i not in marked and not text.startswith("[")]
    scores = []
    for head, weights in enumerate(truth[0][0]):
        matrix = word_matrix(weights, SIDE)
        pairs = matrix[marked][:, list(reversed(marked))].diagonal()
        share = matrix[others][:, marked].sum(1).mean() if kind == "received" else pairs.mean()
        sizes = [2, 1]
        uniform = sum(sizes) / 13 if kind == "received" else sum(reversed(sizes)) / 2 / 13
        scores.append((float(share) - uniform, contents.models[0].heads[head].name, float(share), uniform))
    rows = [row.locator("th, td").all_inner_texts() for row in page.locator("#find-result tbody tr").all()]
    best = sorted(scores, reverse=True)[:10]
    assert [row[:3] for row in rows] == [[name, f"{share:.2f}", f"{uniform:.2f}"] for _, name, share, uniform in best]
    assert [float(row[3].replace(MINUS, "-")) for row in rows] == pytest.approx(
        [score[0] for score in best], abs=0.0051
    )
    assert [row[4] for row in rows] == ["yes" if share >= 0.5 and excess > 0 else "no" for excess, _, share, _ in best]
    _, name, share, uniform = best[0]
    none = {
        "received": "No head puts at least half of its attention on these words.",
        "exchanged": "In no head do these words put at least half of their attention on each other.",
    }[kind]
    closest = f"Head {name} comes closest: {100 * share:.0f} % (uniform attention: {100 * uniform:.0f} %)."
    assert page.locator("#find-status").inner_text() == f"{none} {closest}"
    word(page, marked[0]).focus()
    page.keyboard.press("Enter")
    assert page.locator(".head-view:visible .word.marked").count() == 1


@pytest.mark.parametrize(("listed", "sharpness"), [(3, 0.7), (6, 1.5), (13, 2.5)])
def test_ranking_by_the_largest_weights_states_bounds(open_page, listed, sharpness):
    contents, truth = page_contents(layers=1, listed=listed, sharpness=sharpness)
    page = open_page(contents, address="#marking=true&marks=0:1.2.3.4.5.7")
    page.locator("#find-result tbody tr").first.wait_for()
    assert (
        "only the largest weights of this text, so heads are ranked by lower bounds"
        in page.locator("#find-kind").inner_text()
    )
    marked = [1, 2, 3, 4, 5, 7]
    others = [i for i, text in enumerate(SIDE.words) if i not in marked and not text.startswith("[")]
    shares = {
        head.name: float(word_matrix(w, SIDE)[others][:, marked].sum(1).mean())
        for head, w in zip(contents.models[0].heads, truth[0][0], strict=True)
    }
    uniform = 7 / 13
    answers, bounds = [], []
    for row in page.locator("#find-result tbody tr").all():
        name, share, _, excess, has_focus = row.locator("th, td").all_inner_texts()
        assert re.fullmatch(r"at least \d\.\d\d", share)
        assert float(share.removeprefix("at least ")) <= shares[name] + 1e-6
        if excess != "unknown":
            assert float(re.fullmatch(r"(?:at least|≥) ([\d.]+)", excess)[1]) <= shares[name] - uniform + 1e-6
        bounds.append(excess)
        truly = shares[name] >= 0.5 and shares[name] > uniform
        assert has_focus in ("unknown", "yes" if truly else "no")
        answers.append(has_focus)
    assert "unknown" in bounds or sharpness != 0.7
    verdict = page.locator("#find-status").inner_text()
    if "yes" in answers:
        assert verdict.startswith("At least ")
    elif "unknown" in answers:
        assert verdict.startswith("No head is known to put at least half of its attention on these words, because")
    else:
        assert verdict.startswith("No head puts at least half")


def test_marks_belong_to_the_key_side_of_the_chosen_head(open_page):
    queries, keys = text_side(("Kaffee", "oder", "Tee", "?"), "target"), text_side(("coffee", "or", "tea"), "source")
    contents, _ = two_sided_contents(queries, keys)
    passage = contents.passages[0]
    target = head_attention(random_weights(4, 4, causal=False, seed=9), causal=False, queries=1, keys=1)
    heads = ((target, *passage.heads[0][1:]),)
    page = open_page(
        dataclasses.replace(contents, passages=(dataclasses.replace(passage, heads=heads),)),
        address="#head=0.1&marking=true&marks=0:2",
    )
    rows = page.locator("#find-result tbody th")

    def marked() -> list[str]:
        return page.locator(".head-view:visible .word.marked").all_inner_texts()

    page.locator("#find-words", has_text="Marked in “source”: tea").wait_for()
    rows.first.wait_for()
    assert (sorted(rows.all_inner_texts()), marked()) == (["0.1", "0.2"], ["tea"])
    page.get_by_role("button", name="Head 0.0,").click()
    page.locator("#find-words", has_text="No word in “target” is marked.").wait_for()
    assert (rows.count(), marked()) == (0, [])
    word(page, 0).click()
    page.locator("#find-words", has_text="Marked in “target”: Kaffee").wait_for()
    rows.first.wait_for()
    assert (rows.all_inner_texts(), marked()) == (["0.0"], ["Kaffee"])
    assert "marks=0%3A2%2C1%3A0" in page.url
    page.get_by_role("button", name="Head 0.2,").click()
    page.locator("#find-words", has_text="Marked in “source”: tea").wait_for()
    page.locator(".head-view:visible .word.marked", has_text="tea").wait_for()
    rows.nth(1).wait_for()
    assert marked() == ["tea"]
    rows.nth(0).locator("button").click()
    page.locator("#head-title", has_text=f"Head {rows.nth(0).inner_text()}").wait_for()
    assert page.evaluate("document.activeElement.closest('#find-result') !== null")
    page.get_by_role("button", name="Remove all marks").click()
    page.locator("#find-words", has_text="No word in “source” is marked.").wait_for()
    assert "marks=" not in page.url


def test_search_by_focus_names_the_model_that_it_uses(open_page):
    contents, truth = page_contents(models=2)
    page = open_page(contents, address="#marking=true&marks=0:7&model=difference")
    others = [i for i, text in enumerate(SIDE.words) if i != 7 and not text.startswith("[")]
    best = [max(float(word_matrix(w, SIDE)[others, 7].mean()) for w in of_model) for of_model in truth[0]]
    for model, button in enumerate((f"B {MINUS} A", "B")):
        page.get_by_role("button", name=button, exact=True).click()
        page.locator("#find-kind", has_text=f"The search uses model {'AB'[model]}, synthetic {'AB'[model]}.").wait_for()
        page.locator("#find-result tbody tr td", has_text=f"{best[model]:.2f}").first.wait_for()


def test_comparison_shows_a_line_for_each_head_and_the_mean_of_a_layer(open_page):
    contents, truth = page_contents()
    page = open_page(contents, address="#head=0.1")
    page.keyboard.press("+")
    page.get_by_role("button", name="Head 1.0,").click()
    page.locator("#head-tools").get_by_role("button", name="Add to comparison").click()
    assert page.locator("#head-tools").get_by_role("button", name="Comparison (2)").count() == 1
    page.get_by_role("button", name="Overlay all heads of a layer").click()
    lines = page.locator("#tray-lines .focus")
    lines.nth(2).wait_for()
    assert lines.locator(".focus-head > :first-child").all_inner_texts() == [
        "head 0.1",
        "head 1.0",
        "layer 0, mean of 5 heads",
    ]
    mean = torch.stack([word_matrix(w, SIDE).mean(0) for w in truth[0][0][:5]]).mean(0)
    mean[[0, -1]] = 0
    summary = [
        f"{SIDE.words[i]} {round(100 * float(mean[i]))} %" for i in mean.topk(3).indices.tolist() if mean[i] > 1 / 12
    ]
    assert lines.nth(2).locator("p.soft").inner_text() == (", ".join(summary) or "no word is above uniform attention")
    word(page, 3).click()
    row = word_matrix(truth[0][0][1], SIDE)[3].clone()
    row[[0, -1]] = 0
    best = int(row.argmax())
    lines.nth(0).locator("p.soft", has_text=f"{SIDE.words[best]} {round(100 * float(row[best]))} %").wait_for()
    lines.nth(1).get_by_role("button", name="Remove head 1.0").click()
    page.locator("#tray-lines .focus").nth(2).wait_for(state="detached")
    page.get_by_role("button", name="Comparison (2)").click()
    assert page.evaluate("document.activeElement.id") == "tray"


def test_comparison_has_one_scale_and_shows_the_attention_to_a_pinned_word(open_page):
    contents, truth = page_contents()
    page = open_page(contents, address="#direction=to&pin=k7&tray=A0+A5")
    page.locator("#tray-lines .focus").nth(1).wait_for()
    columns = [word_matrix(truth[0][0][head], SIDE)[:, 7] for head in (0, 5)]
    for column in columns:
        column[[0, -1]] = 0
    largest = max(float(column.max()) for column in columns)
    legend = page.locator("#tray-legend").inner_text().split("\n")
    assert legend == ["attention to “coffee”", "0", f"{largest:.2f}"]
    for place, column in enumerate(columns):
        line = page.locator("#tray-lines .focus").nth(place)
        best = int(column.argmax())
        assert f"{SIDE.words[best]} {100 * float(column[best]):.0f} %" in line.locator("p.soft").inner_text()
        tint = float(line.locator(".word").nth(best - 1).evaluate("word => word.style.getPropertyValue('--a')"))
        full = strength(largest, 1 / 12)
        assert tint == pytest.approx(full * (float(column[best]) / largest) ** 0.5, abs=0.002)


def test_two_models_show_both_heads_and_the_difference(open_page):
    contents, truth = page_contents(models=2)
    page = open_page(contents, address="#head=0.3")
    assert readout(page)[1] == expected_list(word_matrix(truth[0][0][3], SIDE).mean(0))
    page.get_by_role("button", name="B", exact=True).click()
    page.locator(".model-name:visible", has_text="B: synthetic B").first.wait_for()
    assert readout(page)[1] == expected_list(word_matrix(truth[0][1][3], SIDE).mean(0))
    page.get_by_role("button", name=f"B {MINUS} A").click()
    views, lists = page.locator(".head-view:visible"), page.locator(".lists:visible")
    views.nth(2).wait_for()
    views.nth(1).locator('.word[data-unit="7"]').hover()
    rows = [word_matrix(truth[0][model][3], SIDE)[7] for model in range(2)]
    for model in range(2):
        bars = lists.nth(1 + model).locator(".readout .number").all_inner_texts()
        assert bars == list(expected_list(rows[model]).values())
        legend = views.nth(1 + model).locator(".legend-scale").inner_text()
        assert legend.split("\n")[-1] == f"{float(max(rows[0].max(), rows[1].max())):.2f}"  # one scale for both
    difference = rows[1] - rows[0]
    best = int(difference.abs().argmax())
    assert lists.nth(0).locator("h3").inner_text() == "Difference of the attention from “coffee”"
    number = f"{float(difference[best]):+.2f}".replace("-", MINUS)
    assert lists.nth(0).locator(".readout .number").first.inner_text() == number
    classes = views.nth(0).locator(f'.word[data-unit="{best}"]').get_attribute("class").split()
    assert ("lower" in classes) == (float(difference[best]) < 0)
    means = [model.estimates.means[3, 3] for model in contents.models]
    cells = page.locator("#head-statistics tr", has_text="entropy").locator("td").all_inner_texts()
    assert cells[:3] == [
        f"{means[0]:.2f} ± 0.02",
        f"{means[1]:.2f} ± 0.02",
        f"{float(means[1] - means[0]):.2f}".replace("-", MINUS),
    ]
    assert f"B {MINUS} A of entropy (nats)" in page.locator("#overview-legend").inner_text()
    assert page.locator("#head-statistics thead th").last.inner_text() == f"rank of B {MINUS} A"
    caption = page.locator("#head-statistics caption").inner_text()
    assert caption == f"Statistics. Rank 1 = largest difference B {MINUS} A of all heads."
    page.get_by_text("Filter", exact=True).click()
    page.get_by_label("only heads whose role changed").check()
    assert sorted(page.locator("#overview .cell-name").all_inner_texts()) == ["0.0", "1.0", "2.0"]


def test_two_sides_tint_each_other(open_page):
    queries, keys = (
        text_side(("Kaffee", "oder", "Tee", "?"), "target"),
        text_side(("coffee", "or", "tea", "?"), "source"),
    )
    contents, weights = two_sided_contents(queries, keys)
    page = open_page(contents, address="#head=0.1")
    assert page.locator(".side-title").all_inner_texts() == ["Queries: target", "Keys: source"]
    texts = page.locator(".head-view .text")
    texts.nth(0).locator('.word[data-unit="2"]').hover()
    assert readout(page) == ("Attention from “Tee”", expected_list(weights[1][2], keys.words))
    tints = [
        float(w.evaluate("word => word.style.getPropertyValue('--a') || 0"))
        for w in texts.nth(1).locator(".word").all()
    ]
    largest = float(weights[1][2].max())
    full = strength(largest, 1 / 4)
    assert tints == pytest.approx([full * (float(w) / largest) ** 0.5 for w in weights[1][2]], abs=0.01)
    texts.nth(1).locator('.word[data-unit="0"]').hover()
    assert readout(page) == ("Attention to “coffee”", expected_list(weights[1][:, 0], queries.words))


def test_picture_has_a_rectangle_for_each_patch(open_page):
    contents, weights = picture_contents()
    page = open_page(contents, address="#head=0.2")
    assert page.locator(".head-view .patch").count() == 6
    assert page.locator(".picture-tokens .word").all_inner_texts() == ["[CLS]"]
    frame, patch = page.locator(".picture-frame").bounding_box(), page.locator('.patch[data-unit="6"]').bounding_box()
    assert patch["x"] - frame["x"] == pytest.approx(frame["width"] * 2 / 3, abs=1)
    assert patch["y"] - frame["y"] == pytest.approx(frame["height"] / 2, abs=1)
    page.locator('.patch[data-unit="6"]').hover()
    words = contents.passages[0].sides[0].words
    assert readout(page) == ("Attention from “row 2, column 3”", expected_list(weights[2][6], words))


def test_passages_can_be_chosen_and_examples_open_them(open_page):
    sides = [text_side(), text_side(("a", "b", "c")), text_side(("d", "e", "##f"))]
    sides += [text_side([f"{letter}{i}" for i in range(40)]) for letter in "ghi"]
    contents, truth = page_contents(sides=sides)
    page = open_page(contents, address="#head=0.0")
    choice = page.get_by_role("combobox", name="Text")
    choice.select_option("1")
    page.locator(".head-view:visible .word", has_text="a").first.wait_for()
    assert readout(page)[1] == expected_list(truth[1][0][0].mean(0), sides[1].words)
    values = [float(passage.means[0][0, 0]) for passage in contents.passages]
    order = sorted(range(6), key=lambda i: -values[i])[:5]
    assert page.locator(".examples .number").all_inner_texts() == [f"{values[i]:.2f}" for i in order]
    options = choice.locator("option").all_inner_texts()
    assert options[0] == "1. [CLS] Which do you like better , coffee or…"
    assert all(text.endswith("…") and text[:-1].split()[-1][0] == text[3] for text in options[3:])
    page.locator(".examples button").first.click()
    assert choice.input_value() == str(order[0])


@pytest.mark.parametrize(("head", "passages"), [("0.1", 6), ("0.0", 5)])
def test_typical_passages_are_left_out_for_mixed_heads_and_few_texts(open_page, head, passages):
    contents, _ = page_contents(sides=[text_side(("a", "b", letter)) for letter in "cdefgh"[:passages]])
    page = open_page(contents, address=f"#head={head}")
    page.locator("svg.lines:visible").wait_for()
    assert page.locator(".examples").count() == 0


def test_matrix_zooms_and_names_its_cells(open_page):
    contents, truth = page_contents()
    page = open_page(contents, address="#head=1.4")
    plot = page.locator(".matrix-plot:visible")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    cell = (box["width"] - 122) / len(SIDE.words)
    page.mouse.move(box["x"] + 92 + 3.5 * cell, box["y"] + 74 + 7.5 * cell)
    weight = float(word_matrix(truth[0][0][9], SIDE)[7, 3])
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
    plot = page.locator(".matrix-plot:visible")
    plot.scroll_into_view_if_needed()
    box, weights = plot.bounding_box(), truth[0][0][1]
    cell = (box["width"] - 122) / 13
    key = int(weights[9, :10].argmin())
    page.mouse.move(box["x"] + 92 + (key + 0.5) * cell, box["y"] + 74 + 9.5 * cell)
    text = page.locator(".tip:visible").inner_text()
    assert float(re.search(r"at most ([\d.]+\d)", text)[1]) >= float(weights[9, key])
    key = int(weights[9, :10].argmax())
    page.mouse.move(box["x"] + 92 + (key + 0.5) * cell, box["y"] + 74 + 9.5 * cell)
    text = page.locator(".tip:visible", has_text="at least").inner_text()
    assert float(weights[9, key]) - 0.017 <= float(re.search(r"at least ([\d.]+)", text)[1]) <= float(weights[9, key])
    page.mouse.move(box["x"] + 92 + 11.5 * cell, box["y"] + 74 + 9.5 * cell)
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


def test_statistics_have_units(open_page):
    page = open_page(page_contents()[0])
    text = page.locator("#head-statistics").inner_text()
    assert all(f"{each.name} ({each.unit})" in text for each in STATISTICS)


def test_head_that_was_not_called_on_a_passage(open_page):
    contents, _ = page_contents(sides=[text_side(), text_side(("a", "b", "c"))])
    absent = (None, *contents.passages[1].heads[0][1:])
    passages = (contents.passages[0], dataclasses.replace(contents.passages[1], heads=(absent,)))
    page = open_page(dataclasses.replace(contents, passages=passages), address="#head=0.0&passage=1&tray=A0+AL0")
    page.locator("#head-hint", has_text="This head did not attend on this passage.").wait_for()
    page.locator("#tray-lines", has_text="layer 0, mean of 4 heads").wait_for()
    assert page.locator(".cell-empty").count() == 1
    page.get_by_role("combobox", name="Text").select_option("0")
    page.locator(".head-view:visible .word").first.wait_for()
