"""Files are replaced atomically, folders are put in place complete or not at all, and unusable ones are refused."""

import os
import shutil
from pathlib import Path

import pytest

from headwise.errors import InputError
from headwise.runs.files import locked_folder, new_folder, require_new_folder, writable_folder, write_atomically


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
    assert path.read_bytes() == b"new"
    assert [file.name for file in tmp_path.iterdir()] == ["table"]


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "table").mkdir()
    with pytest.raises(InputError, match=r"^out: expected a file '.*table' that can be written, got Is a directory$"):
        write_atomically(tmp_path / "table", b"new")
    assert [file.name for file in tmp_path.iterdir()] == ["table"]


@pytest.mark.usefixtures("as_user")
def test_a_folder_is_created(tmp_path):
    assert writable_folder(tmp_path / "new" / "folder").is_dir()
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "folder", "a\0b", 5):
        with pytest.raises(InputError, match=r"^out: expected a folder that can be created and written, got '.*'$"):
            writable_folder(folder)


class Kill(BaseException):
    """Stands for the end of the process."""


def fill(folder, text="new"):
    (folder / "config.json").write_text(text)
    (folder / "weights").write_text(text)


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_new_folder_appears_at_the_end(tmp_path):
    target = tmp_path / "a" / "b"
    with new_folder(target) as part:
        fill(part)
        assert not target.exists()
        assert part.parent.parent == target.parent  # on the same disk
    assert tree(tmp_path) == ["a", "a/b", "a/b/config.json", "a/b/weights"]


@pytest.mark.parametrize("error", [ValueError("x"), OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_error_leaves_nothing(error, tmp_path):
    expected, match = (InputError, "^out: expected a folder '.*' that can be written, got No space left on device")
    if not isinstance(error, OSError):
        expected, match = type(error), ""

    def run():
        with new_folder(tmp_path / "a" / "b") as part:
            fill(part)
            raise error

    with pytest.raises(expected, match=match):
        run()
    assert tree(tmp_path) == []


@pytest.mark.parametrize("failing", ["fsync", "rename"])
def test_a_failure_at_the_end_leaves_the_old_folder(failing, tmp_path, monkeypatch):
    fill(tmp_path, "old")
    target = tmp_path / "a"
    with new_folder(target) as part:
        fill(part, "old")

    def fail(*_):
        raise OSError(5, "Input/output error")

    if failing == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    rename = Path.rename
    monkeypatch.setattr(
        Path, "rename", lambda self, to: fail() if failing == "rename" and self.name == "new" else rename(self, to)
    )
    with pytest.raises(InputError, match="got Input/output error"), new_folder(target, force=True) as part:
        fill(part)
    assert (target / "weights").read_text() == "old"
    assert tree(target) == ["config.json", "weights"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "config.json", "weights"]


@pytest.mark.parametrize("moment", ["filled", "old moved", "replaced"])
def test_what_a_killed_process_leaves_is_complete_and_removed_by_the_next(moment, tmp_path, monkeypatch):
    """`rmtree` does nothing, as in a process that ends at once."""
    target, rename = tmp_path / "a", Path.rename
    with new_folder(target) as part:
        fill(part, "old")

    def renaming(self, to):
        if moment == "old moved" and self.name == "new":
            raise Kill
        if moment == "filled":
            raise Kill
        rename(self, to)
        if moment == "replaced" and self.name == "new":
            raise Kill

    def run(patch):
        with new_folder(target, force=True) as part:
            fill(part)
            exists = Path.exists
            if moment == "old moved":  # so that the clean-up does not move it back
                patch.setattr(Path, "exists", lambda self: self.name != "old" and exists(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", renaming)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(Kill):
            run(patch)
    left = [path.name for path in tmp_path.iterdir()]
    assert ".a.part" in left
    if moment != "old moved":
        assert (target / "weights").read_text() == {"filled": "old", "replaced": "new"}[moment]
    else:
        assert "a" not in left
    with new_folder(target, force=True) as part:
        assert tree(part) == []
        assert (target / "weights").read_text() == {"replaced": "new"}.get(moment, "old")
        fill(part, "third")
    assert (target / "weights").read_text() == "third"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_existing_folders_are_refused_or_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert require_new_folder("empty") == tmp_path / "empty"
    with new_folder("empty") as part:
        fill(part)
    with pytest.raises(InputError, match="^out: expected a new or empty folder, got files in 'empty'; --force"):
        require_new_folder("empty")
    (tmp_path / "link").symlink_to("empty")
    with new_folder("link", force=True) as part:
        fill(part, "newer")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "empty" / "weights").read_text() == "newer"
    (tmp_path / "empty" / "more").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    for name in ("empty", "other", "."):
        with pytest.raises(InputError, match="^out: expected the folder of a saved model, with a config.json and with"):
            require_new_folder(name, force=True)
    for name, message in (
        ("other/file", "^out: expected a folder 'other/file' that can be written, got Not a directory"),
        ("other/file/a", "^out: expected a folder that can be created and written, got"),
        ("x" * 300, "^out: expected a folder 'xx.* that can be written, got File name too long"),
        ("/", "^out: expected the path of a new folder, got '/'"),
        ("", "^out: expected the path of a folder, got ''"),
    ):
        with pytest.raises(InputError, match=message), new_folder(name, force=True):
            pytest.fail("entered")


def test_two_processes_do_not_write_to_the_same_folder(tmp_path):
    work = tmp_path / ".a.part"
    work.mkdir()
    other = pytest.raises(InputError, match="^out: expected a folder that no other run writes to")
    with locked_folder(work), other, new_folder(tmp_path / "a"):
        pytest.fail("entered")
    with new_folder(tmp_path / "a") as part:
        fill(part)
