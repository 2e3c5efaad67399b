"""A new analysis of few lines has a command, a table that is saved, a test, a plot, a page and a run that resumes."""

import json

import pytest

import headwise as hw
import tiny
import toy_analysis
from command_lines import printed_by
from headwise.cli.app import add_command, app
from profile_runs import texts

pytestmark = pytest.mark.usefixtures("as_user")


@pytest.fixture
def command(monkeypatch):
    """The command of the analysis, which the application has during a test."""
    monkeypatch.setattr(app, "registered_commands", [*app.registered_commands])
    add_command(toy_analysis.reach)
    return "reach"


def test_the_command_runs_the_analysis(command, headwise, folder, tmp_path):
    options = ("--model", folder / "decoder", "--data", folder / "data.jsonl", "--out", tmp_path / "out")
    assert "standard errors" in printed_by(headwise(command, *options))
    table = toy_analysis.Reach.load(tmp_path / "out")
    out = printed_by(headwise(command, *options, "--json"))
    assert [row["reach"] for row in json.loads(out)["rows"]] == [row.statistics["reach"].value for row in table.rows]
    out = printed_by(headwise(command, "--help"))
    assert "headwise reach --data corpus.jsonl --out reach" in out
    assert "An interrupted run resumes" in " ".join(out.split())


def test_standard_errors_are_clustered_by_the_documents_that_the_model_reads():
    """A document is cut at the length limit of the model, which `Texts` alone do not know."""
    model, dataset = tiny.model("decoder"), hw.Texts(tiny.texts(300, 20), tiny.tokenizer("decoder"), documents="cut")
    table, expected = toy_analysis.mean_reach(model, dataset), hw.profile(model, dataset, repeats=False)
    assert table.metadata["measured"]["sequences"] == 4
    for row, of_profile in zip(table.rows, expected.rows, strict=True):
        assert row.statistics["reach"].n == 2
        assert row.statistics["reach"].sem == pytest.approx(of_profile.statistics["distance"].sem, abs=1e-6)


def test_the_table_is_tested_drawn_and_shown_on_a_page(tmp_path):
    model = tiny.model("decoder")
    table, expected = toy_analysis.mean_reach(model, texts()), hw.profile(model, texts(), repeats=False)
    for row, of_profile in zip(table.rows, expected.rows, strict=True):
        assert row.statistics["reach"].value == pytest.approx(of_profile.statistics["distance"].value - 1, abs=1e-6)
    assert list(table.tests()) == ["reach_p", "reach_q"]
    assert table.plot(kind="ranking").get_ylabel().startswith("reach (tokens)")
    hw.write_page(tmp_path / "page.html", table)
    assert "Mean distance of the attention, minus 1." in (tmp_path / "page.html").read_text()
