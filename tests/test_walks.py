"""The walks of docs/architecture.md name files and functions in the order in which the code reaches them."""

import re
import sys
from pathlib import Path

import pytest

import headwise
from headwise.attention.backends.native import library

PAGE = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGE = Path(headwise.__file__).parent
WALKS = re.findall(r"^## Walk \d.*?(?=^## )", PAGE, re.DOTALL | re.MULTILINE)


def steps_of(walk: str) -> list[tuple[str, str]]:
    """Return the file and the function in each row of a walk's table; the function is "" where none is named."""
    return re.findall(r"^\| `([\w/]+\.py)` \| (?:`([\w.]+)`)? \|", walk, re.MULTILINE)


def functions_run_by(code: str) -> list[tuple[str, str]]:
    """Execute code and return the file and the qualified name of each headwise function that ran, by first call."""
    functions: dict[tuple[str, str], None] = {}

    def on_event(frame, event, _argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            functions.setdefault((path.relative_to(PACKAGE).as_posix(), frame.f_code.co_qualname))

    profiler = sys.getprofile()
    sys.setprofile(on_event)
    try:
        exec(code, {})
    finally:
        sys.setprofile(profiler)
    return list(functions)


def test_the_page_has_two_walks_that_name_no_file_twice():
    files = [file for walk in WALKS for file, _ in steps_of(walk)]
    assert len(WALKS) == 2
    assert all(10 < len(steps_of(walk)) <= 14 for walk in WALKS)
    assert len(files) == len(set(files))
    assert all((PACKAGE / file).is_file() for file in files)


@pytest.mark.parametrize("number", [1, 2])
def test_the_code_reaches_the_functions_of_a_walk_in_the_given_order(number, monkeypatch):
    monkeypatch.setattr(library, "load", lambda: "the walks go through Python")
    [code] = re.findall(r"```python\n(.*?)```", WALKS[number - 1], re.DOTALL)
    functions = functions_run_by(code)

    def first_call(file: str, name: str) -> int:
        calls = [
            index
            for index, (path, function) in enumerate(functions)
            if path == file and f".{function}".endswith(f".{name}")
        ]
        assert calls, f"{file} {name} does not run"
        return calls[0]

    steps = [(file, name) for file, name in steps_of(WALKS[number - 1]) if name]
    indices = [first_call(file, name) for file, name in steps]
    assert [steps[i] for i in sorted(range(len(steps)), key=indices.__getitem__)] == steps
