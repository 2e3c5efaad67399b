"""A notebook displays results: a table, the page in a sandboxed frame, and plots."""

import base64
import os
from pathlib import Path

import pytest

CELLS = (
    """
import torch, transformers
import headwise as hw, tiny
model, tokenizer = tiny.model("encoder"), tiny.tokenizer("encoder")
""",
    'seen = hw.view(model, tokenizer, "w5 w6 w7 w8 w9", title="tiny"); seen',
    'profile = hw.profile(model, hw.Texts(["w5 w6 w7", "w8 w9 w10 w11"], tokenizer), progress=True); profile',
    "with hw.watch(model) as heads:\n    model(**tokenizer('w5 w6', return_tensors='pt'))\nheads",
    'seen.plot("entropy")',
    'profile.plot(kind="roles")',
    "seen.find(['w5', 'w6'])",
)


@pytest.fixture(scope="module")
def outputs():
    """The output of the last expression of each cell of a notebook that was run, by type."""
    import nbclient
    import nbformat

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    root = Path(__file__).resolve().parents[2]
    paths = [str(root / "src"), str(root / "tests"), os.environ.get("PYTHONPATH", "")]
    client = nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": root}}
    )
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", os.pathsep.join(paths))
        environment.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
        client.execute()
    results = []
    printed = str(notebook.cells[2].outputs)
    assert "Warning" not in printed  # rich warns of a progress bar without ipywidgets
    for cell in notebook.cells:
        data = [output["data"] for output in cell.outputs if output["output_type"] == "execute_result"]
        results.append(data[-1] if data else {})
    return results


@pytest.mark.parametrize(("cell", "rows"), [(1, 12), (2, 12), (3, 12)])
def test_results_are_displayed_as_a_table_and_a_page(outputs, cell, rows):
    html, text = outputs[cell]["text/html"], outputs[cell]["text/plain"]
    assert html.count("<tr>") == 1 + rows
    assert html.count("<iframe") == 1
    assert len(text) < 300  # the name, not the page


def test_plots_are_displayed_as_pictures(outputs):
    for cell in (4, 5):
        assert base64.b64decode(outputs[cell]["image/png"]).startswith(b"\x89PNG")


def test_a_focus_is_displayed_as_a_sentence(outputs):
    assert len(outputs[6]["text/plain"]) < 300


def test_the_page_works_in_the_sandbox_of_the_notebook(outputs, browser, tmp_path):
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!doctype html><title>notebook</title>{outputs[1]['text/html']}", encoding="utf-8")
    messages, requests = [], []
    page = browser.new_page()
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(notebook.as_uri())
    frame = page.frame_locator("iframe")
    frame.locator("html[data-ready]").wait_for(timeout=20_000)
    frame.get_by_role("button", name="1.3").first.click()
    assert frame.locator("#head-title").inner_text() == "Head 1.3"
    assert [url for url in requests if not url.startswith(("file:", "data:", "about:"))] == []
    assert messages == []
    page.close()
