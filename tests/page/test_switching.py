"""A page after many switches of text, model, head and settings: it shows the same as a new page with its address."""

import random
import time

import pytest

from page.synthetic import page_contents, text_side, with_heads
from page.test_text import readout, word

SHOWN = """() => {
  const visible = node => node.getClientRects().length > 0;
  const all = selector => [...document.querySelectorAll(selector)].filter(visible);
  const texts = selector => all(selector).map(node => node.innerText).join(" | ");
  return Object.fromEntries([
    ...["#head-title", "#head-role", "#head-module", "#head-hint", ".readout", ".link-list", ".text-legend",
      ".hidden-note", "#head-statistics", "#head-examples", "#tray-lines", "#tray-legend", "#tray-empty", "#find",
      "#overview-status", "#overview-groups", "#overview-legend", "#foci-lines", "#head-export", ".curves",
      ".matrix-note", ".legend-scale"].map(selector => [selector, texts(selector)]),
    ["words", all(".head-view .word").map(node => [node.innerText, [...node.classList].sort().join("."),
      node.style.getPropertyValue("--a"), node.ariaSelected].join(" ")).join(" | ")],
    ["pressed", all("[aria-pressed=true]").map(node => node.innerText).join(" | ")],
    ["checked", all("input").map(node => node.type === "checkbox" ? node.checked : node.value).join(" | ")],
    ["chosen", all("select").map(node => node.selectedOptions[0].text).join(" | ")],
    ["matrix", all(".matrix-plot canvas").map(node => node.toDataURL()).join(" | ")],
  ]);
}"""
"""Function that returns what the page shows, as texts."""

ACT = """async actions => {
  const visible = node => node.getClientRects().length > 0;
  const all = selector => [...document.querySelectorAll(selector)].filter(visible);
  const nth = (selector, number) => all(selector)[number % all(selector).length];
  const handlers = {
    text(number) {
      const select = nth("#toolbar select", 0);
      select.selectedIndex = number % select.options.length;
      select.dispatchEvent(new Event("change"));
    },
    press: ([selector, number]) => nth(selector, number)?.click(),
    point: number => nth(".head-view .word", number)?.dispatchEvent(new PointerEvent("pointerover", {bubbles: true})),
    address(hash) {
      location.hash = hash;
    },
  };
  for (const [kind, value, pause] of actions) {
    handlers[kind](value);
    if (pause !== null) await new Promise(resolve => setTimeout(resolve, pause));
  }
  for (const text of all(".head-view .side-words")) text.dispatchEvent(new PointerEvent("pointerleave"));
}"""
"""Function that does a list of actions, [kind, value, milliseconds to wait, or null for no pause]."""

BUTTONS = ("#toolbar .choice button", "#toolbar input", "#overview .cell", "#head-tools .choice button", "#mark-words",
           "#find-tools button", "#tray-tools > button:not(:nth-child(3))", "#tray-lines button",
           ".link-list .links button", ".matrix-tools .choice button", ".head-view .word")  # fmt: skip


def lengths_contents(*, models: int = 2):
    """Return the contents of a page with texts of 12, 3 and 24 words. One head did not attend on the second text."""
    sides = [
        text_side(),
        text_side(("a", "##b", "c", "[SEP]")),
        text_side([f"w{i}" for i in range(24)], first_generated=19),
    ]
    contents, _ = page_contents(layers=2, heads=2, sides=sides, models=models)
    *others, last = contents.passages[1].heads
    return with_heads(contents, *others, (None, *last[1:]), passage=1)


def random_address(draw: random.Random) -> str:
    """Return an address with some settings, also of words that not all texts have."""
    settings = {
        "passage": draw.randrange(3),
        "model": draw.choice(("A", "B", "difference")),
        "head": draw.choice(("0.0", "0.1", "1.0", "1.1")),
        "pin": draw.choice("qk") + str(draw.randrange(26)),
        "direction": "to",
        "words": "false",
        "special": "true",
        "first": "true",
        "generated": "true",
        "marking": "true",
        "marks": f"0:{draw.randrange(14)}.{draw.randrange(24)}",
        "focus": "exchanged",
        "tray": draw.choice(("A0", "B0 A3", "BL0 A1")),
        "search": draw.choice(("coffee", "c", "1.1", "nothing")),
    }
    chosen = draw.sample(list(settings), draw.randrange(1, 8))
    return "&".join(f"{name}={settings[name]}" for name in chosen)


def random_actions(draw: random.Random, count: int) -> list[tuple[str, object, int | None]]:
    """Return random actions: half of them are switches of the text and new addresses."""
    actions = []
    for _ in range(count):
        kind = draw.choice(("text", "address", "point", "press", "press", "press"))
        number = draw.randrange(1000)
        value = {"text": number, "point": number, "press": [draw.choice(BUTTONS), number]}.get(kind)
        actions.append(
            (kind, random_address(draw) if kind == "address" else value, draw.choice((None, None, 0, 3, 20, 60)))
        )
    return actions


def settled(page) -> dict[str, str]:
    """Return what a page shows as soon as it stays the same."""
    before = page.evaluate(SHOWN)
    for _ in range(40):
        page.wait_for_timeout(60)
        if before == (before := page.evaluate(SHOWN)):
            return before
    pytest.fail("The page does not come to rest.")


@pytest.mark.parametrize("seed", range(4))
def test_a_page_shows_what_a_new_page_with_its_address_shows(open_page, tmp_path, seed):
    draw = random.Random(seed)
    page = open_page(lengths_contents())
    for _ in range(3):
        actions = random_actions(draw, 8)
        page.evaluate(ACT, actions)
        fresh = open_page(tmp_path / "page0.html", address="#" + page.evaluate("location.hash.slice(1)"))
        expected = settled(fresh)
        fresh.close()
        stop = time.monotonic() + 3
        while (shown := page.evaluate(SHOWN)) != expected and time.monotonic() < stop:
            page.wait_for_timeout(60)
        differences = {name: (shown[name], expected[name]) for name in expected if shown[name] != expected[name]}
        assert not differences, (actions, page.url)


def test_a_pinned_word_of_a_longer_text_is_unpinned_with_the_text(open_page):
    page = open_page(lengths_contents(models=1), address="#passage=2&head=0.1&tray=A1")
    word(page, 20).click()
    page.locator("#tray-legend", has_text="attention from “w20”").wait_for()
    page.locator("#mark-words").click()
    word(page, 21).click()
    page.locator("#find-words", has_text="w21").wait_for()
    page.get_by_role("combobox", name="Text").select_option("1")
    page.locator("#find-words", has_text="No word is marked").wait_for()
    page.locator("#tray-legend", has_text="mean attention from all words").wait_for()
    assert page.locator("#tray-lines .word").all_inner_texts() == ["ab", "c"]
    assert set(readout(page)[1]) == {"ab", "c", "[SEP]"}
    assert "pin=" not in page.url


def test_a_link_that_is_opened_in_an_open_page_keeps_its_pin(open_page):
    page = open_page(lengths_contents(models=1))
    page.evaluate("location.hash = 'passage=2&pin=q20&words=false'")
    page.locator(".readout:visible h3", has_text="Attention from “w20”").wait_for()
    assert "pin=q20" in page.url
    page.evaluate("location.hash = 'passage=0&pin=q8'")
    page.locator(".readout:visible h3", has_text="Attention from “or”").wait_for()
    page.get_by_label("merge word pieces").uncheck()
    page.locator(".readout:visible h3", has_text="Mean attention").wait_for()
    assert "pin=" not in page.url


def test_a_hidden_view_of_another_model_keeps_no_weights_of_an_earlier_text(open_page):
    page = open_page(lengths_contents(), address="#passage=1&model=difference&head=0.1")
    page.get_by_role("button", name="A", exact=True).click()
    page.get_by_role("combobox", name="Text").select_option("2")
    word(page, 20).hover()
    page.locator(".readout:visible h3", has_text="Attention from “w20”").wait_for()
    word(page, 20).click()
    page.get_by_role("button", name="B", exact=True).click()
    page.locator(".readout:visible h3", has_text="Attention from “w20”").wait_for()


def test_copied_weights_are_those_of_all_words_if_the_pinned_word_is_not_in_the_text(open_page):
    page = open_page(lengths_contents(models=1), address="#head=0.1&pin=q20")
    page.locator("svg.lines:visible").wait_for()
    page.get_by_role("button", name="Copy weights").click()
    page.locator("#live", has_text="The text was copied.").wait_for()
    assert len(page.evaluate("navigator.clipboard.readText()").split("\n")) == 1 + 12 * 12


def test_a_search_that_was_removed_leaves_no_status(open_page):
    page = open_page(page_contents()[0])
    page.evaluate("""() => {
      addEventListener("hashchange", () => (location.hash = ""), {once: true});
      location.hash = "search=tea";
    }""")
    page.wait_for_timeout(300)
    assert page.locator("#overview-status").inner_text() == "15 heads"
