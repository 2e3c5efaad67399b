"""The check of standard errors by a bootstrap: it accepts right tables, and rejects wrong ones."""

import ast
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import headwise as hw
import tiny
from research.findings import check_errors
from research.findings.raw_results import statistics_of_sequences


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return a folder with an ablation and a profile of texts whose documents have several sequences."""
    folder = tmp_path_factory.mktemp("results")
    model = tiny.model("decoder", top="ForCausalLM").double()
    texts = hw.Texts(tiny.texts(*range(5, 22)), tiny.tokenizer("decoder"), 8, "cut", batch=4)
    hw.ablate(model, texts, hw.next_token_loss, units="layers", out=folder / "heads")
    hw.profile(model, texts, out=folder / "profile", repeats=False)
    numbered = hw.data.batches.NumberedBatches(list(texts), texts.document_numbers())
    raw = statistics_of_sequences(model, numbered, texts.tokenizer.all_special_ids, "entropy")
    (folder / "profile" / "entropies.json").write_text(json.dumps(raw))
    return folder


def changed(folder, to, column, change):
    """Copy the ablation to another folder, with one column changed, and return that folder."""
    table = pyarrow.parquet.read_table(folder / "heads" / "ablation.parquet")
    values = [change(value) for value in table.column(column).to_pylist()]
    table = table.set_column(table.schema.get_field_index(column), column, pyarrow.array(values))
    (to / "heads").mkdir()
    pyarrow.parquet.write_table(table, to / "heads" / "ablation.parquet")
    return to


def test_it_imports_nothing_of_headwise():
    tree = ast.parse(Path(check_errors.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(name.startswith(("headwise", "research")) for name in imported)


def test_right_tables_are_accepted(results):
    found = check_errors.check(results)
    assert set(found) == {"heads", "profile"}
    assert set(found["heads"]["ratios"]) == {"cost", "loss", "baseline"}
    assert all(map(check_errors.is_right, found.values()))
    assert found["heads"]["documents"] == found["profile"]["documents"] == 17
    assert found["profile"]["sequences"] > 25


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("cost", lambda value: value * (1 + 1e-6)),
        ("cost_median", lambda value: value + 1e-6),
        ("cost_trimmed", lambda value: value + 1e-6),
        ("cost_outliers", lambda value: value + 1),
        ("cost_p", lambda value: value / 2),
        ("cost_q", lambda value: value / 2),
        ("cost_n", lambda value: value + 1),
        ("cost_df", lambda value: value + 1),
    ],
)
def test_a_wrong_number_is_found(column, change, results, tmp_path):
    found = check_errors.check(changed(results, tmp_path, column, change))
    assert column in found["heads"]["differs"]
    assert not check_errors.is_right(found["heads"])


def test_a_standard_error_of_independent_sequences_is_rejected(results, tmp_path):
    found = check_errors.check(changed(results, tmp_path, "loss_sem", lambda value: value / 1.3))
    assert not check_errors.is_right(found["heads"])


def test_the_bootstrap_equals_the_formula_for_equal_sizes():
    values = np.random.default_rng(0).normal(size=(30, 4))
    found = check_errors.bootstrap_errors(values, np.full(30, 3))
    assert found == pytest.approx(values.std(0) / 30**0.5, rel=0.04)


def test_the_script_writes_a_file_and_returns_a_status(results, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["check_errors.py", str(results)])
    assert check_errors.main() == 0
    assert json.loads((results / "errors.json").read_text())["heads"]["documents"] == 17
    changed(results, tmp_path, "cost", lambda value: value + 1.0)
    monkeypatch.setattr("sys.argv", ["check_errors.py", str(tmp_path)])
    assert check_errors.main() == 1
