"""The command `headwise monitor`."""

import csv
import io
import json
import math

import pytest

from command_lines import printed_by, refusal
from headwise.monitoring.history import History
from histories import rows

NUMBERS = {
    0: {(0, 0): (1.0, 2.0), (0, 1): (2.0, 9.0), (1, 0): (3.0, 4.0), (1, 1): (4.0, 5.0)},
    50: {(0, 0): (1.5, 120.0), (0, 1): (0.001, 9.5), (1, 0): (3.0, 300.0), (1, 1): (math.nan, 5.0)},
}
"""Entropy and largest logit of each head in each step."""


@pytest.fixture
def folder(tmp_path):
    """Run folder with the two steps in `NUMBERS`."""
    run = tmp_path / "run"
    run.mkdir()
    written = History.create(run, {"model": "TinyModel", "statistics": ["entropy", "max_logit"]})
    for step, numbers in NUMBERS.items():
        named = {head: dict(zip(("entropy", "max_logit"), values, strict=True)) for head, values in numbers.items()}
        written.append(step, rows(2, 2, lambda *head, named=named: named[head]))
    return run


def test_the_state_of_a_training_is_printed(folder, headwise):
    status, out, err = headwise("monitor", folder)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "TinyModel: 4 heads, 2 observed steps, the last is 50"
    assert lines[2].rstrip().split("  ")[-1] == "largest changes since step 0"
    entropy, max_logit = ([cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[3:5])
    assert entropy == ["entropy", "0.001 (0.1)", "1.5 (0.0)", "3 (1.0)", "0.1 -2, 0.0 +0.5, 1.0 +0"]
    assert max_logit[:4] == ["max_logit", "5 (1.1)", "9.5 (0.1)", "300 (1.0)"]
    assert max_logit[4] == "1.0 +296, 0.0 +118, 0.1 +0.5, 1.1 +0"
    assert lines[6] == "alarms in step 50: 2 high logit (0.0, 1.0), 1 low entropy (0.1)"
    assert lines[-1] == f"wrote {folder}"
    assert sorted(path.name for path in folder.glob("*.png")) == ["entropy.png", "max_logit.png"]


def test_options_change_limits_pictures_and_heads(folder, headwise, tmp_path):
    options = ("--changed", 1, "--max-logit", 200, "--entropy", 1e-5, "--out", tmp_path / "pictures", "--quiet")
    status, out, err = headwise("monitor", folder, *options)
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == "alarms in step 50: 1 high logit (1.0)"
    assert [line.rstrip().split("  ")[-1].strip() for line in out.splitlines()[3:5]] == ["0.1 -2", "1.0 +296"]
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == ["entropy.png", "max_logit.png"]
    assert not list(folder.glob("*.png"))
    assert headwise("monitor", folder, "--no-pictures", "--max-logit", 1000, "--entropy", 1e-5)[1].endswith(
        "no alarms in step 50\n"
    )
    assert not list(folder.glob("*.png"))


def test_one_step_has_no_changes(folder, headwise):
    (folder / "steps" / "000000000050.parquet").unlink()
    out = printed_by(headwise("monitor", folder, "--no-pictures"))
    assert "changes" not in out
    assert "TinyModel: 4 heads, 1 observed step, the last is 0" in out


def test_json_and_csv_have_the_rows_of_the_last_step(folder, headwise):
    status, out, err = headwise("monitor", folder, "--no-pictures", "--json")
    assert (status, err) == (0, "")
    result = json.loads(out, parse_constant=pytest.fail)
    assert result["metadata"]["steps"] == [0, 50]
    assert [(alarm["kind"], alarm["layer"], alarm["head"]) for alarm in result["metadata"]["alarms"]] == [
        ("high logit", 0, 0),
        ("low entropy", 0, 1),
        ("high logit", 1, 0),
    ]
    first, *_, last = result["rows"]
    assert (first["step"], first["layer"], first["entropy"], first["entropy_change"]) == (50, 0, 1.5, 0.5)
    assert (last["entropy"], last["entropy_change"], last["max_logit_change"]) == (None, None, 0.0)
    lines = list(csv.DictReader(io.StringIO(headwise("monitor", folder, "--no-pictures", "--csv")[1])))
    assert list(lines[0]) == list(first)
    assert [line["max_logit"] for line in lines] == ["120.0", "9.5", "300.0", "5.0"]


def test_a_folder_without_history_or_steps_is_one_sentence(folder, headwise, tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "none"):
        path = tmp_path / name
        refused = refusal(headwise("monitor", path))
        assert refused == f"folder: expected a run folder of monitor, got {str(path)!r}"
    for file in (folder / "steps").iterdir():
        file.unlink()
    refused = refusal(headwise("monitor", folder))
    assert refused == f"folder: expected a run folder with observed steps, got '{folder}' without steps"


def test_the_training_may_write_meanwhile(folder, headwise):
    from headwise.runs.files import locked_folder

    with locked_folder(folder):
        (folder / "steps" / "000000000100.parquet.part").write_bytes(b"PAR1")
        out = headwise("monitor", folder, "--no-pictures")[1]
    assert out.startswith("TinyModel: 4 heads, 2 observed steps, the last is 50")
