"""Page under hostile text, in a sandbox, on paper, on a phone, in both themes, and for assistive technology."""

import html

import pytest

from headwise.page.write import page_html
from page.synthetic import MINUS, long_contents, page_contents, text_side
from page.test_text import readout, word

HOSTILE = (
    "[CLS]",
    "<script>document.title='broken'</script>",
    "</script><img src=x onerror=document.title='broken'>",
    "\"'&amp;",
    "שלום",
    "مرحبا",
    "\u202eabc",
    "a\u200bb",
    "👩\u200d👩\u200d👧",
    "x" * 10_000,
    "{{ 7 * 7 }}",
    "-->",
    "\u200b",
    "constructor",
    "__proto__",
)


@pytest.mark.parametrize("width", [1280, 390])
def test_hostile_words_are_shown_as_text(open_page, width):
    contents, _ = page_contents(sides=[text_side(HOSTILE)], title="<b>title</b> & </title>")
    page = open_page(contents, address="#pin=q9&tray=A0+A3", width=width)
    assert page.locator("h1").inner_text() == "<b>title</b> & </title>"
    assert page.title() == "<b>title</b> & </title> · headwise"
    words = page.locator(".head-view:visible .word").all_inner_texts()
    assert words[1] == HOSTILE[1]
    assert words[3:9] == list(HOSTILE[3:9])
    assert len(words[9]) < 100
    assert len(word(page, 9).get_attribute("title")) <= 350
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("img").count() == 0
    # A Hebrew and an Arabic word in a row are read from right to left; the words after them stay in their places.
    first, second, after = (word(page, unit).bounding_box() for unit in (4, 5, 7))
    assert (second["y"], second["x"]) < (first["y"], first["x"]) < (after["y"], after["x"])


def test_link_restores_the_state(open_page):
    contents, _ = page_contents(models=2)
    page = open_page(contents, address="#head=1.3")
    page.get_by_label("Group by").select_option("layer")
    page.get_by_label("Colour by").select_option(label="entropy")
    page.get_by_label("hide special tokens").check()
    page.get_by_role("button", name="to the word", exact=True).click()
    word(page, 4).click()
    page.keyboard.press("+")
    page.get_by_label("Theme").select_option("dark")
    address = "#" + page.url.split("#")[1]
    before = readout(page)
    again = open_page(contents, address=address)
    assert readout(again) == before
    assert before[0].startswith("Attention to “")
    assert again.locator("html").get_attribute("data-theme") == "dark"
    assert again.get_by_label("hide special tokens").is_checked()
    assert again.get_by_label("Group by").input_value() == "layer"
    assert again.locator("#tray-lines .focus").count() == 1
    again.evaluate("location.hash = '#head=2.2'")
    again.locator("#head-title", has_text="Head 2.2").wait_for()
    assert not again.get_by_label("hide special tokens").is_checked()


@pytest.fixture
def framed(browser, tmp_path):
    """Function that opens a document with a page in a sandboxed frame below empty space of a height, and returns the
    document and the frame.
    """
    opened = []

    def opening(above, width, height):
        source = html.escape(page_html(page_contents()[0]), quote=True)
        (tmp_path / "outer.html").write_text(
            f'<!doctype html><div style="height: {above}px"></div><iframe sandbox="allow-scripts" width="{width}" '
            f'height="{height}" srcdoc="{source}"></iframe><div style="height: 2000px"></div>',
            encoding="utf-8",
        )
        opened.append(page := browser.new_page(viewport={"width": 1280, "height": 900}))
        page.goto((tmp_path / "outer.html").as_uri())
        page.evaluate("scrollTo(0, 400)")
        frame = page.frame_locator("iframe")
        frame.locator("html[data-ready]").wait_for()
        return page, frame

    yield opening
    for page in opened:
        page.close()


def test_sandboxed_frame_keeps_its_state(framed):
    _, frame = framed(0, 1200, 3000)
    frame.get_by_role("button", name="Head 1.2,").click()
    frame.locator("#head-title", has_text="Head 1.2").wait_for()
    frame.locator('.word[data-unit="3"]').first.click()
    frame.locator(".readout h3", has_text="Attention from").wait_for()
    frame.get_by_role("button", name="Curves SVG").click()
    assert "<svg" in frame.locator("#export-content textarea").input_value()


def test_choosing_a_head_does_not_scroll_the_document_around_a_frame(framed):
    page, frame = framed(700, 600, 700)
    frame.locator(".cell").nth(3).evaluate("cell => cell.click()")
    page.wait_for_timeout(800)
    assert page.evaluate("scrollY") == 400
    assert frame.locator("html").evaluate("() => scrollY") > 300


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_no_serious_violation_of_accessibility_rules(open_page, axe, theme, width):
    contents, _ = page_contents(models=2, foci=True, sides=[text_side(), text_side(first_generated=8)])
    address = "#head=0.2&pin=q5&tray=A1+BL2&marking=true&marks=0:3.7&passage=1"
    page = open_page(contents, address=address, theme=theme, width=width)
    page.locator("#find-result tbody tr").first.wait_for()
    page.get_by_text("Filter", exact=True).click()
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


def test_themes_differ_and_follow_the_system(open_page):
    contents, _ = page_contents()
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = open_page(contents), open_page(contents, theme="dark")
    assert light.evaluate(ground) == "rgb(245, 246, 248)"
    assert dark.evaluate(ground) == "rgb(15, 18, 23)"
    dark.get_by_label("Theme").select_option("light")
    assert dark.evaluate(ground) == "rgb(245, 246, 248)"


def test_paper_is_light_and_has_no_controls(open_page):
    page = open_page(page_contents(layers=80, heads=8)[0], theme="dark")
    assert page.locator(".cell canvas").count() < 640
    page.emulate_media(media="print", color_scheme="dark")
    page.locator(".cell canvas").nth(639).wait_for()
    page.locator('html[data-theme="light"]').wait_for()
    assert page.locator("#overview").is_visible()
    assert page.locator("#head-title").is_visible()
    assert page.locator("button:visible").count() == page.locator(".cell:visible, .links button:visible").count()
    assert page.locator("#toolbar").is_hidden()
    assert page.locator("#tray").is_hidden()


def test_phone_shows_everything_without_scrolling_sideways(open_page):
    page = open_page(page_contents(foci=True)[0], address="#tray=A0&marking=true&marks=0:3", width=390, touch=True)
    page.locator("#find-result tbody tr").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.get_by_role("button", name="Head 0.3,").tap()
    page.locator("#head-title", has_text="Head 0.3").wait_for()
    assert page.locator("#head-hint").inner_text().startswith("Tap words to mark them.")
    page.get_by_role("button", name="Mark words").tap()
    assert page.locator("#head-hint").inner_text() == "Tap a word to pin it."
    word(page, 2).tap()
    assert readout(page)[0] == "Attention from “do”"


def test_help_lists_the_shortcuts(open_page):
    page = open_page(page_contents()[0])
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    assert page.locator("#help kbd").count() >= 8
    page.keyboard.press("Escape")
    assert page.locator("#help").is_hidden()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.dataset.setting") == "search"


def test_a_large_model_has_few_canvases_and_answers_clicks(open_page, tmp_path):
    path = tmp_path / "large.html"
    path.write_text(page_html(long_contents(layers=30, heads=9, tokens=2048)), encoding="utf-8")
    assert path.stat().st_size < 8_000_000
    page = open_page(path)
    page.locator(".cell canvas").first.wait_for()
    assert page.locator(".cell canvas").count() < 270
    for head in (5, 117, 240, 33):
        page.evaluate(CLICK, head)
        assert page.locator(f'.cell[data-head="{head}"]').get_attribute("aria-pressed") == "true"


CLICK = """async head => {
  document.querySelector(`.cell[data-head="${head}"]`).click();
  const readout = document.querySelector(".readout");
  await new Promise(resolve => new MutationObserver(resolve).observe(readout, {childList: true}));
}"""
"""Script that clicks a head, and ends when its text is shown."""


def test_text_of_8192_tokens_opens(open_page):
    page = open_page(long_contents(layers=1, heads=2, tokens=8192))
    page.locator('.word[data-unit="5000"]').click()
    assert readout(page)[0].startswith("Attention from “")
