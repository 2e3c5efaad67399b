"""Draw the pictures of the README and of the docs from real models: `make pictures`."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from playwright.sync_api import sync_playwright

import headwise as hw
from headwise.data.models import load

ROOT = Path(__file__).parent.parent.parent
PICTURES, RESULTS = ROOT / "docs" / "pictures", ROOT / "research" / "findings" / "results"

QUESTION = "Which do you like better, coffee or tea?"
FOCI = {
    "sentence type": ["Which", "do", "?"],
    "object": ["you", "coffee", "tea"],
    "relation": ["like", "coffee", "or", "tea"],
    "sentiment": ["like", "better"],
}
"""Words of the question whose attention is measured, by the name of the focus."""


def main() -> None:
    loaded = load("minilm")
    seen = hw.view(loaded.model, loaded.tokenizer, QUESTION, title=loaded.title)
    draw_page(seen)
    lines = seen.plot(kind="lines", heads=[(0, 2), (1, 8), (5, 11), (1, 11)])
    roles = hw.load_profile(RESULTS / "smollm2" / "profile").plot(kind="role_counts")
    for axes, name in ((lines, "heads"), (roles, "roles")):
        figure: Any = axes.figure
        figure.savefig(PICTURES / f"{name}.png", dpi=110)


def draw_page(seen: hw.View) -> None:
    """Take pictures of the page of a view: the best head for each focus, and the whole page in both themes."""
    foci = [seen.find(words, name=name) for name, words in FOCI.items()]
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "page.html"
        hw.write_page(path, seen, foci=foci)
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium-headless-shell", args=["--no-sandbox", "--disable-gpu"]
        )
        for theme in ("light", "dark"):
            size: Any = {"width": 1240, "height": 1330}
            context = browser.new_context(viewport=size, color_scheme=theme, device_scale_factor=1.5)  # type: ignore[arg-type]
            page = context.new_page()
            page.goto(f"{path.as_uri()}#head=5.11")
            page.wait_for_selector("html[data-ready]")
            page.wait_for_timeout(500)  # the pictures of heads are drawn when they come into view
            if theme == "light":
                page.locator("#foci").screenshot(path=PICTURES / "foci.png")
            page.screenshot(path=PICTURES / f"page-{theme}.png")
        browser.close()


if __name__ == "__main__":
    main()
