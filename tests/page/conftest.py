"""Chromium for the tests of the page, with a record of every request and every message of the console."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headwise.page.contents import Contents
from headwise.page.write import page_html

CHROMIUM = "chromium-headless-shell"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
AXE = Path(__file__).resolve().parents[2] / "node_modules" / "axe-core" / "axe.min.js"


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail("The tests of the page need Playwright. Run: pip install playwright")
    if not (chromium := shutil.which(CHROMIUM)):
        pytest.fail(f"The tests of the page need {CHROMIUM}. Run: apt-get install {CHROMIUM}")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Function that writes contents as a page and opens it, and returns the browser's page.

    At the end of the test it is checked that the page requested nothing but its own file, and that the console is
    empty.
    """
    opened = []

    def opening(
        contents: Contents | Path, *, address: str = "", width: int = 1280, theme: str = "light", touch: bool = False
    ) -> Any:
        path = tmp_path / f"page{len(opened)}.html"
        if isinstance(contents, Path):
            path = contents
        else:
            path.write_text(page_html(contents), encoding="utf-8")
        size = {"width": width, "height": 900}
        context = browser.new_context(viewport=size, color_scheme=theme, has_touch=touch, accept_downloads=True)
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        page, record = context.new_page(), SimpleNamespace(requests=[], messages=[])
        page.on("request", lambda request: record.requests.append(request.url))
        page.on("console", lambda message: record.messages.append(message.text))
        page.on("pageerror", lambda error: record.messages.append(str(error)))
        page.goto(path.as_uri() + address)
        page.wait_for_selector("html[data-ready]")
        opened.append((context, record))
        return page

    yield opening
    for context, record in opened:
        context.close()
        requests = [url for url in record.requests if not url.startswith(("data:", "blob:"))]
        assert [url.split("#")[0] for url in requests] == requests[:1] or len(requests) == 1, requests
        assert all(url.startswith("file:") for url in requests), requests
        assert record.messages == []


@pytest.fixture(scope="session")
def axe() -> str:
    """Source of axe-core, which finds violations of accessibility rules."""
    if not AXE.exists():
        pytest.fail("The tests of the page need axe-core. Run in the repository root: npm ci")
    return AXE.read_text(encoding="utf-8")
