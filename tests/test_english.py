"""The checker of English finds what it is meant to find."""

import pytest

from tools import check_english


def findings(tmp_path, monkeypatch, name, text):
    monkeypatch.setattr(check_english, "ROOT", tmp_path)
    (tmp_path / name).write_text(text)
    return list(check_english.findings_in(tmp_path / name))


@pytest.mark.parametrize("opening", ["What", "Who", "Which", "Whether", "How"])
def test_docstrings_that_open_with_a_question_word_are_found(tmp_path, monkeypatch, opening):
    source = f'x = 1\n"""{opening} x is."""\n\n\ndef f():\n    """{opening} f does."""\n'
    found = findings(tmp_path, monkeypatch, "module.py", source)
    assert [line.split(": ")[0] for line in found] == ["module.py:2", "module.py:6"]


def test_private_terms_are_found_in_comments_strings_and_pages(tmp_path, monkeypatch):
    found = findings(tmp_path, monkeypatch, "module.py", "# calls that are\nx = 'the calls are met'  # beside it\n")
    assert [line.split(": ")[0] for line in found] == ["module.py:2", "module.py:2"]
    page = "The word met is fine.\nThis head rests\non the first token.\n"
    assert findings(tmp_path, monkeypatch, "page.md", page) == [
        "page.md:2: write 'attends to by default, attention sink' for 'rests on'"
    ]


def test_identifiers_are_not_prose(tmp_path, monkeypatch):
    assert findings(tmp_path, monkeypatch, "module.py", "beside = ledger = 1\n") == []


def test_long_sentences_are_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(check_english, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("Short.\n\n" + "word " * 36 + "end.\n\n```\n" + "code " * 40 + "\n```\n")
    assert list(check_english.long_sentences(page)) == [f"page.md: 37 words: {('word ' * 36 + 'end.')[:100]}..."]
