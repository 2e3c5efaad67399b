"""Size of the page, and the time in which Chromium opens it and answers a click on a head.

Regime: all-MiniLM-L6-v2 (72 heads) on one sentence; SmolLM2-135M-Instruct (270 heads) on 2,048 tokens of the
documentation of this project, and on 8,192 with `--long`; and random attention of 384 heads on a prompt of 576 patches
and 60 words. Headless Chromium without a GPU. "opens" is the time from the request for the file until the page is
ready. "click" is the time from a click on a head until its text is coloured and painted: the median and the largest
over 12 heads that were not opened before. With a picture, "step" is the time from a step of the slider of generated
words until the text is painted, and "overlays" the time until all visible cells show the attention on the picture.

    python -m benchmarks.page [--long]

The last line is JSON.
"""

import argparse
import base64
import io
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import headwise as hw
from headwise.page.contents import (
    Contents,
    Estimates,
    HeadAttention,
    LargestWeights,
    PageHead,
    PageModel,
    Passage,
    Patch,
    Picture,
    Side,
    VisibleKeys,
)
from headwise.page.write import page_html

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

STEP = """
async step => {
  const slider = document.querySelector(".field-steps input"), start = performance.now();
  const box = document.querySelector("#overview").getBoundingClientRect();
  const cells = [...document.querySelectorAll(".cell")].filter(cell => {
    const {top, bottom} = cell.getBoundingClientRect();
    return top < box.bottom && bottom > box.top;
  });
  const before = cells.map(cell => cell.querySelector("canvas"));
  slider.value = step;
  slider.dispatchEvent(new Event("input"));
  await new Promise(resolve => requestAnimationFrame(() => setTimeout(resolve, 0)));
  const painted = performance.now() - start;
  while (cells.some((cell, place) => cell.querySelector("canvas") === before[place])) {
    if (performance.now() - start > 20000) throw new Error("the overlays are not painted");
    await new Promise(resolve => setTimeout(resolve, 5));
  }
  return [painted, performance.now() - start];
}
"""
"""Script that moves the slider of generated words, and returns the milliseconds until the text and all visible cells
are painted.
"""


def picture_contents(*, grid: int = 24, words: int = 60, layers: int = 24, heads: int = 16) -> Contents:
    """Return the contents of a page of a prompt with a picture: random attention, of which the page has the 32 largest
    weights of each query, as a view of a prompt of this length.
    """
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(grid, grid, 3, generator=generator)
    picture = io.BytesIO()
    image = Image.fromarray((pixels * 255).byte().numpy())
    image.resize((14 * grid, 14 * grid)).save(picture, format="PNG")
    source = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode('ascii')}"
    patches = [Patch(0, c / grid, r / grid, 1 / grid, 1 / grid) for r in range(grid) for c in range(grid)]
    texts = ["[BOS]", *(f"({n // grid + 1}, {n % grid + 1})" for n in range(grid**2)), *(f"w{n}" for n in range(words))]
    tokens = len(texts)
    side = Side("prompt", tuple(texts), (True,) * tokens, (), (True, *(False,) * (tokens - 1)), tuple(texts),
                tuple(range(tokens)), tokens - 12, (Picture("picture 1", source, 14 * grid, 14 * grid),),
                (None, *patches, *(None,) * words))  # fmt: skip
    position = torch.arange(tokens)
    visible = VisibleKeys(torch.ones_like(position), torch.zeros_like(position), position + 1)
    attention = []
    for _ in range(layers * heads):
        scores = 2 * torch.randn(tokens, tokens, generator=generator)
        weights = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        tiles = torch.zeros(64, 64).index_put_((position[:, None] * 64 // tokens, position * 64 // tokens), weights,
                                               accumulate=True)  # fmt: skip
        top = weights.topk(32)
        largest = LargestWeights(top.indices, top.values, weights.sum(-1))
        tiles /= torch.bincount(position * 64 // tokens)[:, None]
        attention.append(HeadAttention(0, 0, tokens, tiles, largest, visible))
    names = [(layer, head) for layer in range(layers) for head in range(heads)]
    page_heads = tuple(
        PageHead(f"{layer}.{head}", layer, head, f"layers.{layer}", "self", None) for layer, head in names
    )
    model = PageModel("random attention", page_heads, Estimates(*(torch.zeros(0, len(names)) for _ in range(3))))
    passage = Passage("prompt", (side,), (tuple(attention),), (torch.zeros(0, len(names)),))
    return Contents("random attention", (), (), (), (model,), (passage,))


def measure(browser: Any, path: Path, heads: dict[int, str], address: str = "") -> dict[str, float]:
    """Return the size of a page in MB, and the times in which it opens and answers clicks, in seconds."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    start = time.perf_counter()
    page.goto(path.as_uri() + address)
    page.wait_for_selector("html[data-ready]")
    opened = time.perf_counter() - start
    times = [page.evaluate(CLICK, list(head)) for head in heads.items()]
    clicks = [milliseconds / 1000 for milliseconds in times if milliseconds is not None]
    steps = {}
    if address:
        page.wait_for_timeout(3000)
        painted, overlays = zip(*(page.evaluate(STEP, step) for step in (3, 9, 5, 7)), strict=True)
        steps = {"step_s": statistics.median(painted) / 1000, "overlays_s": statistics.median(overlays) / 1000}
    page.close()
    return {
        "megabytes": path.stat().st_size / 1e6,
        "opens_s": opened,
        "click_s": statistics.median(clicks),
        "slowest_click_s": max(clicks),
        **steps,
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
        contents = picture_contents()
        path.write_text(page_html(contents), encoding="utf-8")
        step = len(contents.models[0].heads) // CLICKS
        heads = {index: head.name for index, head in list(enumerate(contents.models[0].heads))[step // 2 :: step]}
        results["prompt with a picture"] = measure(browser, path, heads, "#colour=picture:picture+1&group=layer")
        print("prompt with a picture", results["prompt with a picture"])
        browser.close()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
