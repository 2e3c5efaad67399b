"""Parts of the page: foci, comparison, two models, two sides, passages and statistics."""

import dataclasses

import pytest
import torch

from headwise.page.contents import AllWeights
from page.synthetic import (
    MINUS,
    SIDE,
    STATISTICS,
    head_attention,
    other_words,
    page_contents,
    random_weights,
    text_side,
    two_sided_contents,
    with_heads,
    word_matrix,
)
from page.test_pictures import point_at_cell
from page.test_text import expected_list, readout, shown, strength, tints, word


def test_first_block_shows_the_best_head_of_each_focus(open_page):
    contents, truth = page_contents(foci=True)
    page = open_page(contents)
    block = page.locator("#foci-lines .focus")
    assert block.locator("h3").inner_text() == "objects"
    assert block.locator(".underlined").all_inner_texts() == [SIDE.words[5], SIDE.words[7]]
    assert block.locator(".focus-share strong").inner_text() == "90 %"
    assert block.locator(".verdict").inner_text() == contents.foci[0].verdict
    weights = word_matrix(truth[0][0][14])[other_words(5, 7)].mean(0)[1:-1]
    largest = float(weights.max())
    expected = strength(largest, 1 / 12) * (float(weights[6]) / largest) ** 0.5
    assert page.locator("#foci-legend").inner_text().split("\n") == ["mean weight", "0", f"{largest:.2f}"]
    assert tints(block.locator(".word", has_text="coffee")) == [pytest.approx(expected, abs=0.002)]
    top = page.locator("#foci").bounding_box()["y"]
    assert top < page.locator("#overview").bounding_box()["y"]
    assert "puts more" not in block.inner_text()
    block.get_by_role("button", name="head 2.4").click()
    assert page.locator("#head-title").inner_text() == "Head 2.4"


def test_the_best_head_of_a_focus_that_puts_more_on_another_token_says_so(open_page):
    contents, _ = page_contents(foci=True)
    count = len(SIDE.tokens)
    weights = torch.full((count, count), 0.01, dtype=torch.float64)
    weights[:, 0] = 0.6
    weights[:, 5] = 0.4 - 0.01 * (count - 2)
    heads = (*contents.passages[0].heads[0][:-1], head_attention(weights, causal=False))
    page = open_page(with_heads(contents, heads))
    verdict = page.locator("#foci-lines .verdict").inner_text()
    assert verdict == f"{contents.foci[0].verdict} Head 2.4 puts more on [CLS]: 60 %."


def test_models_are_named_by_what_differs_and_small_differences_stay_on_one_line(open_page):
    contents, _ = page_contents(models=2)
    models = tuple(
        dataclasses.replace(model, name=name)
        for model, name in zip(contents.models, ("net-135M-chat", "net-360M-chat"), strict=True)
    )
    heads = contents.passages[0].heads[0]
    nearly = [dataclasses.replace(one, weights=AllWeights(one.weights.weights * (1 - 1e-5))) for one in heads]
    contents = with_heads(dataclasses.replace(contents, models=models, opening={"model": "difference"}), heads, nearly)
    page = open_page(contents, width=400)
    assert page.locator("#toolbar .choice button").all_inner_texts() == ["A: 135M", "B: 360M", f"B {MINUS} A"]
    assert page.locator("#head-statistics thead th").all_inner_texts()[1:3] == ["A: 135M", "B: 360M"]
    page.locator(".readout:visible .number").first.wait_for()
    heights = page.locator(".bars:visible .number").evaluate_all(
        "all => all.map(each => each.getClientRects()[0].height)"
    )
    assert max(heights) < 30
    assert max(map(len, page.locator(".bars:visible .number").all_inner_texts())) > 6
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


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
    mean = torch.stack([word_matrix(w).mean(0) for w in truth[0][0][:5]]).mean(0)
    mean[[0, -1]] = 0
    summary = [
        f"{SIDE.words[i]} {round(100 * float(mean[i]))} %" for i in mean.topk(3).indices.tolist() if mean[i] > 1 / 12
    ]
    assert lines.nth(2).locator("p.soft").inner_text() == (", ".join(summary) or "no word is above uniform attention")
    word(page, 3).click()
    row = word_matrix(truth[0][0][1])[3].clone()
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
    columns = [word_matrix(truth[0][0][head])[:, 7] for head in (0, 5)]
    for column in columns:
        column[[0, -1]] = 0
    largest = max(float(column.max()) for column in columns)
    legend = page.locator("#tray-legend").inner_text().split("\n")
    assert legend == ["attention to “coffee”", "0", f"{largest:.2f}"]
    for place, column in enumerate(columns):
        line = page.locator("#tray-lines .focus").nth(place)
        best = int(column.argmax())
        assert f"{SIDE.words[best]} {100 * float(column[best]):.0f} %" in line.locator("p.soft").inner_text()
        expected = strength(largest, 1 / 12) * (float(column[best]) / largest) ** 0.5
        assert tints(line.locator(".word").nth(best - 1)) == [pytest.approx(expected, abs=0.002)]


def test_two_models_show_both_heads_and_the_difference(open_page):
    contents, truth = page_contents(models=2)
    page = open_page(contents, address="#head=0.3")
    assert readout(page)[1] == expected_list(word_matrix(truth[0][0][3]).mean(0))
    page.get_by_role("button", name="B", exact=True).click()
    page.locator(".model-name:visible", has_text="B: synthetic B").first.wait_for()
    assert readout(page)[1] == expected_list(word_matrix(truth[0][1][3]).mean(0))
    page.get_by_role("button", name=f"B {MINUS} A").click()
    views, lists = page.locator(".head-view:visible"), page.locator(".lists:visible")
    views.nth(2).wait_for()
    views.nth(1).locator('.word[data-unit="7"]').hover()
    rows = [word_matrix(truth[0][model][3])[7] for model in range(2)]
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
    largest = float(weights[1][2].max())
    expected = [strength(largest, 1 / 4) * (float(weight) / largest) ** 0.5 for weight in weights[1][2]]
    assert tints(texts.nth(1).locator(".word")) == pytest.approx(expected, abs=0.01)
    texts.nth(1).locator('.word[data-unit="0"]').hover()
    assert readout(page) == ("Attention to “coffee”", expected_list(weights[1][:, 0], queries.words))


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


def test_statistics_have_units(open_page):
    page = open_page(page_contents()[0])
    text = page.locator("#head-statistics").inner_text()
    assert all(f"{each.name} ({each.unit})" in text for each in STATISTICS)


def test_head_that_was_not_called_on_a_passage(open_page):
    contents, _ = page_contents(sides=[text_side(), text_side(("a", "b", "c"))])
    contents = with_heads(contents, (None, *contents.passages[1].heads[0][1:]), passage=1)
    page = open_page(contents, address="#head=0.0&passage=1&tray=A0+AL0")
    page.locator("#head-hint", has_text="This head did not attend on this passage.").wait_for()
    page.locator("#tray-lines", has_text="layer 0, mean of 4 heads").wait_for()
    assert page.locator(".cell-empty").count() == 1
    page.get_by_role("combobox", name="Text").select_option("0")
    page.locator(".head-view:visible .word").first.wait_for()


def encoder_decoder_contents():
    """Return the contents of a page with a head of each kind of an encoder-decoder."""
    queries, keys = text_side(("Kaffee", "oder", "Tee", "?"), "target"), text_side(("coffee", "or", "tea"), "source")
    contents, _ = two_sided_contents(queries, keys)
    kinds = (("encoder", 0, 0), ("decoder", 1, 1), ("decoder.cross", 1, 0))
    model = contents.models[0]
    heads = tuple(
        dataclasses.replace(head, name=f"{layer}.0", layer=layer, head=0, module=f"{module}.{layer}")
        for layer, (head, (module, _, _)) in enumerate(zip(model.heads, kinds, strict=True))
    )
    count = (3, 4)
    stored = [
        head_attention(random_weights(count[q], count[k], causal=False, seed=9), causal=False, queries=q, keys=k)
        for _, q, k in kinds
    ]
    return with_heads(dataclasses.replace(contents, models=(dataclasses.replace(model, heads=heads),)), stored)


def test_heads_of_encoder_decoders_are_labelled_by_their_kind(open_page):
    page = open_page(encoder_decoder_contents(), address="#head=1.0&tray=A1")
    assert page.locator("#summary").inner_text() == "3 attention heads in 3 attention modules"
    assert page.locator("#head-title").inner_text() == "Head 1.0, decoder self-attention"
    assert page.locator(".cell-kind").all_inner_texts() == ["enc", "dec", "cross"]
    assert page.get_by_role("button", name="Head 2.0, cross-attention").count() == 1
    assert "decoder self-attention" in page.locator("#tray-lines .focus-head").inner_text()
    page.get_by_label("Group by").select_option("layer")
    titles = page.locator("#overview .group h3")
    assert titles.all_inner_texts() == ["layer 0, encoder self", "layer 1, decoder self", "layer 2, cross"]
    page.get_by_label("Group by").select_option("kind")
    assert titles.all_inner_texts() == ["encoder self-attention", "decoder self-attention", "cross-attention"]
    page.get_by_text("Filter", exact=True).click()
    page.get_by_role("combobox", name="Kind").select_option("cross")
    assert page.locator("#overview .cell-name").all_inner_texts() == ["2.0"]


def test_tooltips_of_a_comparison_name_the_model(open_page):
    contents, truth = page_contents(models=2)
    page = open_page(contents, address="#head=0.3&model=difference")
    weights = [float(word_matrix(truth[0][model][3])[7, 3]) for model in range(2)]
    plots = page.locator(".matrix-plot:visible")
    plots.nth(2).wait_for()
    signed = f"{weights[1] - weights[0]:+.2f}".replace("-", MINUS)
    expected = (f"B {MINUS} A, coffee → you: {signed} (A {shown(weights[0])}, B {shown(weights[1])})",
                f"A, coffee → you: {shown(weights[0])}", f"B, coffee → you: {shown(weights[1])}")  # fmt: skip
    for place, text in enumerate(expected):
        point_at_cell(page, plots.nth(place), 7, 3, len(SIDE.words))
        assert page.locator(".tip:visible").inner_text() == text
    scales = page.locator(".matrix:visible .legend-scale").all_inner_texts()
    assert scales[1] == scales[2]
    assert scales[0].startswith(MINUS)
