"""Files are replaced atomically, and unusable folders are refused."""

import os

import pytest

import headwise as hw
from headwise.runs.files import writable_folder, write_atomically


def test_a_file_is_replaced_and_leaves_no_temporary_file(tmp_path):
    path = tmp_path / "table"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert [file.name for file in tmp_path.iterdir()] == ["table"]
    assert path.read_bytes() == b"new"


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "table"
    write_atomically(path, b"old")

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    write_atomically(path, b"new")
    assert [file.name for file in tmp_path.iterdir()] == ["table"]


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "table").mkdir()
    with pytest.raises(
        hw.InputError, match=r"^out: expected a file '.*table' that can be written, got Is a directory$"
    ):
        write_atomically(tmp_path / "table", b"new")
    assert [file.name for file in tmp_path.iterdir()] == ["table"]


@pytest.mark.usefixtures("as_user")
def test_a_folder_is_created(tmp_path):
    assert writable_folder(tmp_path / "new" / "folder").is_dir()
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "folder", "a\0b", 5):
        with pytest.raises(hw.InputError, match=r"^out: expected a folder that can be created and written, got '.*'$"):
            writable_folder(folder)
