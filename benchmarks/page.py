"""Size of the page, and the time in which Chromium opens it and answers a click on a head.

Regime: all-MiniLM-L6-v2 (72 heads) on one sentence; SmolLM2-135M-Instruct (270 heads) on 2,048 tokens of the
documentation of this project, and on 8,192 with `--long`. Headless Chromium without a GPU. "opens" is the time from the
request for the file until the page is ready. "click" is the time from a click on a head until its text is coloured and
painted: the median and the largest over 12 heads that were not opened before.

    python -m benchmarks.page [--long]

The last line is JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import headwise as hw

ROOT = Path(__file__).parent.parent
SENTENCE = "Which do you like better, coffee or tea?"
CLICKS = 12

CLICK = """
async ([head, name]) => {
  const cell = document.querySelector(`.cell[data-head="${head}"]`);
  if (document.querySelector("#head-title").textContent === `Head ${name}`) return null;  // it is shown already
  cell.scrollIntoView({block: "center"});
  await new Promise(resolve => requestAnimationFrame(() => setTimeout(resolve, 200)));
  const shown = () => document.querySelector("#head-title").textContent === `Head ${name}`
    && document.querySelector(".head-view:not([hidden]) .word") && document.querySelector(".readout").textContent;
  const before = document.querySelector(".readout").textContent, start = performance.now();
  cell.click();
  while (!shown() || document.querySelector(".readout").textContent === before) {
    if (performance.now() - start > 5000) throw new Error(`head ${name} is not shown`);
    await new Promise(resolve => setTimeout(resolve, 1));
  }
  await new Promise(resolve => requestAnimationFrame(() => setTimeout(resolve, 0)));
  return performance.now() - start;
}
"""
"""Script that clicks a head, by its index and name, and returns the milliseconds until its text is painted."""


def measure(browser: Any, path: Path, heads: dict[int, str]) -> dict[str, float]:
    """Return the size of a page in MB, and the times in which it opens and answers clicks, in seconds."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    start = time.perf_counter()
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready]")
    opened = time.perf_counter() - start
    times = [page.evaluate(CLICK, list(head)) for head in heads.items()]
    clicks = [milliseconds / 1000 for milliseconds in times if milliseconds is not None]
    page.close()
    return {
        "megabytes": path.stat().st_size / 1e6,
        "opens_s": opened,
        "click_s": statistics.median(clicks),
        "slowest_click_s": max(clicks),
    }


def main() -> None:
    """Write the pages, measure them, and print a table and JSON."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="also 8,192 tokens, which takes minutes")
    lengths = (2048, 8192) if parser.parse_args().long else (2048,)
    minilm, smollm2 = hw.load("minilm"), hw.load("smollm2")
    documentation = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "docs").rglob("*.md")))
    ids = smollm2.tokenizer(documentation, verbose=False)["input_ids"]
    cases: list[tuple[str, Any, str]] = [("MiniLM, one sentence", minilm, SENTENCE)]
    cases += [(f"SmolLM2, {n} tokens", smollm2, smollm2.tokenizer.decode(ids[:n])) for n in lengths]
    results = {}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium-headless-shell", args=flags)
        for name, loaded, text in cases:
            start = time.perf_counter()
            seen = hw.view(loaded.model, loaded.tokenizer, text, title=loaded.title, truncate=True)
            viewed = time.perf_counter() - start
            path = Path(folder) / "page.html"
            hw.write_page(path, seen)
            step = len(seen.heads) // CLICKS
            heads = {index: seen.heads[index].name for index in range(step // 2, len(seen.heads), step)}
            results[name] = {"tokens": seen.tokens, "view_s": viewed, **measure(browser, path, heads)}
            print(name, {key: round(value, 3) for key, value in results[name].items()}, flush=True)
        browser.close()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
