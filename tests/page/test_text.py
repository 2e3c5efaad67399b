"""Text of a head: the weights of the active word, by mouse and by keyboard, compared with the weights of the head."""

import re
from dataclasses import replace

import pytest
import torch

from page.synthetic import (
    SENTENCE,
    SIDE,
    head_attention,
    page_contents,
    random_weights,
    text_side,
    two_sided_contents,
    with_heads,
    word_matrix,
)

COFFEE = SIDE.words.index("coffee")
ROUNDED_DOWN = "Each weight shown may be up to 0.007 too small."
"""Sentence next to weights of which only the largest are stored."""


def readout(page) -> tuple[str, dict[str, str]]:
    """Return the title of the list for the active word, and its words with their weights."""
    rows = page.locator(".readout:visible .bars li").all()
    texts = {row.locator(".bar-name").inner_text(): row.locator(".number").inner_text() for row in rows}
    return page.locator(".readout:visible h3").inner_text(), texts


def shown(weight: float) -> str:
    """Return a weight as the page writes it."""
    return "<0.01" if 0 < weight < 0.005 else f"{weight:.2f}"


def named(text: str) -> str:
    """Return a word as lists name it: in quotes if it is punctuation."""
    return text if re.search(r"\w", text) else f"“{text}”"


def expected_list(weights: torch.Tensor, words: tuple[str, ...] = SIDE.words) -> dict[str, str]:
    """Return the eight largest weights as the page lists them."""
    top = weights.topk(min(8, len(weights)))
    return {named(words[i]): shown(w) for w, i in zip(top.values.tolist(), top.indices.tolist(), strict=True)}


def strength(largest: float, uniform: float) -> float:
    """Return the strength of the colour of the largest weight that is shown."""
    return min(1, max(0.25, largest, largest / uniform / 4))


def word(page, unit: int):
    """Return a word of the visible text."""
    return page.locator(f'.head-view:visible .word[data-unit="{unit}"]')


def tints(words) -> list[float]:
    """Return the strengths of the colours of words or patches."""
    return words.evaluate_all("all => all.map(word => Number(word.style.getPropertyValue('--a')))")


@pytest.mark.parametrize("head", [0, 7])
def test_pointer_shows_the_row_and_the_column_of_a_word(open_page, head):
    contents, truth = page_contents()
    page = open_page(contents, address=f"#head={contents.models[0].heads[head].name}")
    weights = word_matrix(truth[0][0][head])
    assert readout(page) == ("Mean attention that each word receives", expected_list(weights.mean(0)))
    word(page, COFFEE).hover()
    assert readout(page) == ("Attention from “coffee”", expected_list(weights[COFFEE]))
    strongest = int(weights[COFFEE].argmax())
    expected = strength(float(weights[COFFEE].max()), 1 / len(SIDE.words))
    assert tints(word(page, strongest)) == [pytest.approx(expected, abs=0.002)]
    legend = page.locator(".text-legend:visible").inner_text().split("\n")
    assert legend == ["weight", "0", shown(weights[COFFEE].max())]
    page.locator("h1").hover()
    page.get_by_role("button", name="to the word", exact=True).click()
    word(page, COFFEE).hover()
    assert readout(page) == ("Attention to “coffee”", expected_list(weights[:, COFFEE]))


def test_pinned_word_stays_until_escape(open_page):
    page = open_page(page_contents()[0])
    word(page, COFFEE).click()
    word(page, 1).hover()
    assert readout(page)[0] == "Attention from “coffee”"
    assert "coffee → Which" in page.locator("#head-hint").inner_text()
    assert "pin=q7" in page.url
    assert word(page, COFFEE).get_attribute("aria-selected") == "true"
    page.keyboard.press("Escape")
    page.locator("h1").hover()
    assert readout(page)[0].startswith("Mean attention")


def test_arrow_keys_move_between_words_and_weights_are_announced(open_page):
    contents, truth = page_contents()
    page = open_page(contents, address="#head=0.0")
    word(page, 0).focus()
    for _ in range(COFFEE):
        page.keyboard.press("ArrowRight")
    weights = word_matrix(truth[0][0][0])[COFFEE]
    assert readout(page) == ("Attention from “coffee”", expected_list(weights))
    best = SIDE.words[int(weights.argmax())]
    assert f"Attention from “coffee”: {best} {shown(float(weights.max()))}" in page.locator("#live").inner_text()
    page.keyboard.press("Enter")
    assert "pin=q7" in page.url
    page.keyboard.press("Home")
    assert page.evaluate("document.activeElement.dataset.unit") == "0"
    assert page.locator('.head-view:visible .word[tabindex="0"]').count() == 1


def test_future_words_are_never_listed(open_page):
    contents, truth = page_contents(causal=True)
    page = open_page(contents, address="#head=1.1")
    word(page, 2).hover()
    title, weights = readout(page)
    assert title == "Attention from “do”"
    assert weights == expected_list(word_matrix(truth[0][0][6])[2][:3])
    page.get_by_role("button", name="Copy weights").click()
    copied = page.evaluate("navigator.clipboard.readText()")
    rows = [line.split("\t")[:2] for line in copied.split("\n")[1:]]
    assert len(rows) == len(SIDE.words) * (len(SIDE.words) + 1) // 2
    assert all(SIDE.words.index(key) <= SIDE.words.index(query) for query, key in rows)


def test_unmerged_tokens_and_hidden_words(open_page):
    contents, truth = page_contents()
    page = open_page(contents, address="#head=0.4")
    page.get_by_label("merge word pieces").uncheck()
    assert page.locator(".head-view:visible .word").all_inner_texts() == list(SENTENCE)
    weights = truth[0][0][4]
    page.get_by_label("hide special tokens").check()
    rows = weights[1:-1]
    hidden = float(rows[:, [0, -1]].sum(1).mean())
    assert (
        page.locator(".hidden-note:visible").inner_text()
        == f"{round(100 * hidden)} % of this head's attention is on hidden words."
    )
    word(page, 7).hover()
    kept = weights[7].clone()
    kept[[0, -1]] = 0
    assert readout(page) == ("Attention from “cof”", expected_list(kept, SENTENCE))


def test_each_word_is_linked_to_the_word_that_it_attends_to_most(open_page):
    contents, truth = page_contents()
    page = open_page(contents, address="#head=2.2")
    weights = word_matrix(truth[0][0][12])
    words = [i for i, text in enumerate(SIDE.words) if re.search(r"\w", text) and not text.startswith("[")]
    best = {q: max((k for k in words if k != q), key=lambda k, q=q: float(weights[q, k])) for q in words}
    links = []
    for query, key in best.items():
        weight, back = float(weights[query, key]), float(weights[key, query])
        is_mutual = best[key] == query and min(weight, back) > 1 / len(SIDE.words)
        if is_mutual and weight >= back:
            links.append(
                (weight, f"{SIDE.words[query]} ↔ {SIDE.words[key]} {shown(weight)}/{shown(back)}", weight + back)
            )
        elif not is_mutual and weight >= 0.005:
            links.append((weight, f"{SIDE.words[query]} → {SIDE.words[key]} {shown(weight)}", weight))
    links.sort(reverse=True)
    assert page.locator(".link-list:visible .links li").all_inner_texts() == [text for _, text, _ in links]
    share = sum(covered for _, _, covered in links) / float(weights.sum())
    assert (
        f"These {len(links)} links cover {round(100 * share)} % of the attention that is shown."
        in page.locator(".link-list:visible").inner_text()
    )


def test_more_links_are_shown_on_demand(open_page):
    page = open_page(page_contents(sides=[text_side([f"w{i}" for i in range(30)])])[0])
    links = page.locator(".link-list:visible .links li")
    assert links.count() == 8
    page.get_by_role("button", name="Show up to 50 links").click()
    assert 8 < links.count() <= 30


def test_links_to_the_first_word_of_a_decoder_are_left_out(open_page):
    page = open_page(page_contents(causal=True, sides=[text_side(("Once", "upon", "a", "time", "there", "was"))])[0])
    text = page.locator(".link-list:visible").inner_text()
    assert re.search(r"Links to the first word are left out; it gets \d+ % of the attention\.", text)
    assert not any(link.split(" ")[2] == "Once" for link in page.locator(".links li").all_inner_texts())


def test_repeated_words_have_positions(open_page):
    side = text_side(("the", "cat", "saw", "the", "dog"))
    contents, _truth = page_contents(sides=[side])
    page = open_page(contents, address="#head=0.0")
    word(page, 3).hover()
    assert readout(page)[0] == "Attention from “the (4)”"


def test_sparse_rows_say_what_is_not_listed(open_page):
    contents, truth = page_contents(layers=1, heads=2, listed=3, sharpness=0.7)
    page = open_page(contents, address="#head=0.1&words=false")
    page.locator('.head-view:visible .word[data-unit="4"]').hover()
    rest = 1 - float(truth[0][0][1][4].topk(3).values.sum())
    _title, weights = readout(page)
    assert len(weights) == 3
    note = page.locator(".readout:visible p").first.inner_text()
    number = float(re.search(r"get at most ([\d.]+) together", note)[1])
    assert rest - 0.01 <= number <= rest + 0.03
    assert ROUNDED_DOWN in page.locator(".readout:visible").inner_text()
    assert ROUNDED_DOWN in page.locator(".link-list:visible").inner_text()
    page.get_by_role("button", name="Copy weights").click()
    copied = page.evaluate("navigator.clipboard.readText()").split("\n")
    assert copied[0] == f"# {ROUNDED_DOWN} Smaller weights are not listed."
    assert len(copied) == 2 + 3 * len(SENTENCE)
    assert all(re.fullmatch(r"\d\.\d{3}", line.split("\t")[2]) for line in copied[2:])


def test_small_weights_are_not_shown_as_zero(open_page):
    contents, truth = page_contents(sharpness=9.0)
    page = open_page(contents, address="#words=false")
    for unit in range(4):
        word(page, unit).hover()
        weights = truth[0][0][0][unit]
        # A weight below 1e-10 is stored as 0, and not listed.
        listed = min(8, int((weights > 2e-10).sum()))
        assert list(readout(page)[1].values()) == list(expected_list(weights, SENTENCE).values())[:listed]
        assert "0.00" not in readout(page)[1].values()


def test_generated_words_are_underlined_and_can_be_chosen(open_page):
    side = text_side(first_generated=8)
    contents, truth = page_contents(sides=[side], causal=True)
    page = open_page(contents, address="#head=0.0&words=false")
    assert page.locator(".head-view:visible .word.generated").all_inner_texts() == list(SENTENCE[8:])
    page.get_by_label("only rows of generated words").check()
    assert readout(page)[1] == expected_list(truth[0][0][0][8:].mean(0), SENTENCE)


def test_rows_of_a_head_without_generated_words_are_all_shown(open_page):
    queries, keys = text_side(name="target", first_generated=8), text_side(("coffee", "or", "tea"), "source")
    contents, _ = two_sided_contents(queries, keys)
    source = head_attention(random_weights(3, 3, causal=False, seed=9), causal=False)
    contents = with_heads(contents, (source, *contents.passages[0].heads[0][1:]))
    page = open_page(contents, address="#head=0.0&generated=true&tray=A0")
    weights = random_weights(3, 3, causal=False, seed=9)
    expected = ("Mean attention that each word receives", expected_list(weights.mean(0), keys.words))
    assert readout(page) == expected
    page.locator(".matrix:visible").wait_for()
    page.get_by_role("button", name="Head 0.1,").click()
    page.locator(".readout h3", has_text="Mean attention that each word receives from generated words").wait_for()


RIGHT_TO_LEFT = ("[CLS]", "أحب", "برنامج", "Google", "Maps", "لأن", "שלום", ".", "[SEP]")


def test_lines_have_the_direction_of_their_words(open_page):
    side = replace(text_side((*RIGHT_TO_LEFT, "She", "said", "שלום", "אדוני", "twice")), line_starts=(9,))
    page = open_page(page_contents(sides=[side])[0], address="#head=0.0&tray=A0")
    assert page.locator(".head-view .text > div").evaluate_all("all => all.map(line => line.dir)") == ["rtl", "ltr"]
    boxes = [word(page, unit).bounding_box() for unit in range(14)]
    order = sorted(range(9), key=lambda unit: -boxes[unit]["x"])
    assert order == [0, 1, 2, 4, 3, 5, 6, 7, 8]  # the Latin words are read from left to right
    assert sorted(range(9, 14), key=lambda unit: boxes[unit]["x"]) == [9, 10, 12, 11, 13]
    assert page.locator(".head-view .word").all_inner_texts() == list(side.words)
    word(page, 0).focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.dataset.unit") == "2"
    page.keyboard.press("Enter")
    assert page.locator(".readout:visible h3").inner_text() == f"Attention from “\u2068{RIGHT_TO_LEFT[2]}\u2069”"
    assert page.locator("#tray-lines .sentence").get_attribute("dir") == "rtl"
