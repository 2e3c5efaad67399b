"""Search for heads by the words that they attend to: rankings, bounds, and marks."""

import re

import pytest

from page.synthetic import (
    MINUS,
    SIDE,
    head_attention,
    other_words,
    page_contents,
    random_weights,
    share_on,
    text_side,
    two_sided_contents,
    with_heads,
    word_matrix,
)
from page.test_text import word


def quoted(word: str) -> str:
    """Return a word as sentences name it: in quotes unless it is a special token."""
    return word if word.startswith("[") else f"“{word}”"


@pytest.mark.parametrize("kind", ["received", "exchanged"])
def test_marked_words_rank_the_heads(open_page, kind):
    contents, truth = page_contents()
    page = open_page(contents, address=f"#focus={kind}")
    page.keyboard.press("m")
    marked = [SIDE.words.index("coffee"), SIDE.words.index("tea")]
    for unit in marked:
        word(page, unit).click()
    page.locator("#find-result tbody tr").first.wait_for()
    uniform = 3 / 13 if kind == "received" else 3 / 2 / 13  # coffee has two tokens, and tea one
    scores = []
    for head, weights in zip(contents.models[0].heads, truth[0][0], strict=True):
        pairs = word_matrix(weights)[marked][:, list(reversed(marked))].diagonal()
        share = share_on(weights, *marked) if kind == "received" else float(pairs.mean())
        scores.append((share - uniform, head.name, share, uniform))
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
    matrix = word_matrix(truth[0][0][[head.name for head in contents.models[0].heads].index(name)])
    rows_of = other_words(*marked) if kind == "received" else marked
    means = matrix[rows_of].mean(0)
    means[marked] = 0
    most = int(means.argmax())
    note = f" Head {name} puts more on {quoted(SIDE.words[most])}: {100 * float(means[most]):.0f} %."
    expected = f"{none} {closest}{note if float(means[most]) > share else ''}"
    assert page.locator("#find-status").inner_text() == expected
    assert page.locator("#find-words").inner_text() == "Marked: coffee, tea"
    above, below = page.locator(".text-legend:visible").bounding_box(), page.locator(".readout:visible").bounding_box()
    assert above["y"] < page.locator("#find").bounding_box()["y"] < below["y"]
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
    shares = {
        head.name: share_on(weights, *marked)
        for head, weights in zip(contents.models[0].heads, truth[0][0], strict=True)
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
    target = head_attention(random_weights(4, 4, causal=False, seed=9), causal=False, queries=1, keys=1)
    contents = with_heads(contents, (target, *contents.passages[0].heads[0][1:]))
    page = open_page(contents, address="#head=0.1&marking=true&marks=0:2")
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


def test_marked_words_that_occur_twice_have_their_position(open_page):
    page = open_page(
        page_contents(sides=[text_side(("the", "cat", "saw", "the", ","))])[0], address="#marking=true&marks=0:3.4"
    )
    page.locator("#find-words", has_text="Marked: the (4), “,”").wait_for()


def test_search_by_focus_names_the_model_that_it_uses(open_page):
    contents, truth = page_contents(models=2)
    page = open_page(contents, address="#marking=true&marks=0:7&model=difference")
    best = [max(share_on(weights, 7) for weights in of_model) for of_model in truth[0]]
    for model, button in enumerate((f"B {MINUS} A", "B")):
        page.get_by_role("button", name=button, exact=True).click()
        page.locator("#find-kind", has_text=f"The search uses model {'AB'[model]}, synthetic {'AB'[model]}.").wait_for()
        page.locator("#find-result tbody tr td", has_text=f"{best[model]:.2f}").first.wait_for()
