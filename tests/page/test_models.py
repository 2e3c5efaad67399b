"""Pages of real models in Chromium: sizes, and the numbers that a reader sees."""

import re

import pytest
import torch

import headwise as hw


def test_the_page_of_a_small_model_on_one_sentence_is_small(coffee, open_page, tmp_path):
    path = tmp_path / "coffee.html"
    hw.write_page(path, coffee, foci=[coffee.find(["you", "coffee", "tea"], name="object")])
    assert path.stat().st_size < 300_000
    page = open_page(path, address="#head=5.11")
    assert page.locator(".cell").count() == 72
    weights = coffee.head(5, 11).attention.weights.weights
    strongest = weights.mean(0).topk(3)
    words = [coffee.words[index].text for index in strongest.indices.tolist()]
    shown = page.locator(".readout:visible").inner_text().split("\n")
    assert [line.strip() for line in shown if re.match(r"\w+$", line.strip())][:2] == words[:2]
    assert page.locator("#foci").inner_text().count("77 %") == 1


@pytest.mark.parametrize(("layer", "head"), [(0, 2), (2, 7), (5, 11)])
def test_the_links_of_a_page_are_the_strongest_links_of_the_view(coffee, open_page, tmp_path, layer, head):
    path = tmp_path / "coffee.html"
    hw.write_page(path, coffee)
    page = open_page(path, address=f"#head={layer}.{head}")
    words = [word.text for word in coffee.words]
    expected = []
    for link in coffee.strongest_links(coffee.head(layer, head), 8):
        arrow, back = ("→", "") if link.back is None else ("↔", f"/{link.back:.2f}")
        expected.append(f"{words[link.query]} {arrow} {words[link.key]} {link.weight:.2f}{back}")
    assert page.locator(".link-list:visible .links li").all_inner_texts() == expected


@pytest.mark.slow
def test_the_page_of_a_decoder_on_a_long_text_opens(open_page, tmp_path):
    loaded = hw.load("smollm2")
    generator = torch.Generator().manual_seed(0)
    text = loaded.tokenizer.decode(torch.randint(1000, 40_000, (1024,), generator=generator))
    seen = hw.view(loaded.model, loaded.tokenizer, text, title=loaded.title, truncate=True)
    path = tmp_path / "long.html"
    hw.write_page(path, seen)
    assert path.stat().st_size < 8_000_000
    page = open_page(path, address="#head=20.4")
    assert page.locator(".cell").count() == 270
    page.locator(f'.cell[data-head="{[head.name for head in seen.heads].index("3.2")}"]').click()
    page.wait_for_function("document.querySelector('#head-title').textContent.includes('3.2')")
    assert page.locator(".head-view:visible .word").count() > 500
