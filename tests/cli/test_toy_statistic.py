"""A new statistic of few lines is measured next to the others, and gets its place in tables, plots, pages, the output
of commands and the docs. Runs with it resume.
"""

import csv
import io

import pytest
import torch

import headwise as hw
import tiny
from command_lines import printed_by, refusal
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.native.library import why_not_loaded
from headwise.attention.problem import Problem
from headwise.runs import checkpoint
from headwise.statistics import kernel_statistics
from headwise.statistics.registry import STATISTICS
from headwise.statistics.tally import Tally
from profile_runs import Interrupted, contents, interrupt_after, run, texts
from research.tables.statistics import PAGE, page_with_table
from toy_statistic import SQUARES, squares

NATIVE = pytest.mark.skipif(why_not_loaded() is not None, reason=str(why_not_loaded()))

IDS = torch.randint(5, 9, (2, 7), generator=torch.Generator().manual_seed(1))


def model(**options):
    """Return a decoder of one layer, since Triton's interpreter takes seconds for each."""
    return tiny.model("decoder", num_hidden_layers=1, **options)


@pytest.fixture
def statistic(monkeypatch):
    """The statistic, which headwise has during a test."""
    monkeypatch.setitem(STATISTICS, "squares", SQUARES)


@pytest.fixture
@torch.no_grad()
def expected(statistic):
    """Values of the statistic in a tiny model by layer and head, from whole matrices: means over sequences."""
    attentions = model(attn_implementation="eager")(IDS, output_attentions=True).attentions
    sequences = [[[squares(head) for head in heads] for heads in layer] for layer in attentions]
    return torch.tensor(sequences).mean(1)


@torch.no_grad()
def watched():
    """Return the rows of a watched model, and the sets of statistics that were computed from row blocks."""
    in_blocks, add = set(), Tally.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tally, "add", lambda tally, block: (in_blocks.add(tally.measured), add(tally, block)))
        with hw.watch(decoder := model()) as heads:
            decoder(IDS)
    return heads.rows(), in_blocks


@pytest.mark.parametrize("kernels", [pytest.param("native", marks=NATIVE), "triton"])
def test_watch_computes_it_in_blocks_and_the_others_in_kernels(kernels, expected, monkeypatch, request):
    if kernels == "triton":
        request.getfixturevalue("statistics_in_triton")
    rows, in_blocks = watched()
    assert in_blocks == {frozenset(kernel_statistics.left_to_blocks())}
    for row in rows:
        assert row.pop("squares") == pytest.approx(expected[row["layer"], row["head"]].item(), rel=1e-5)
    monkeypatch.delitem(STATISTICS, "squares")
    others = kernel_statistics.left_to_blocks()
    assert watched() == (rows, {frozenset(others)} if others else set())  # to the bit


@NATIVE
@pytest.mark.usefixtures("statistic")
def test_the_explanation_names_it():
    q = torch.randn(1, 3, 7, 11)
    explained = kernel_statistics.explain(Problem.checked(q, q, q), CallContext())
    others = sorted(kernel_statistics.left_to_blocks())
    assert "squares" in others
    assert explained == f"native kernels, and row blocks for {', '.join(others)}, which the kernels do not compute"
    alone = kernel_statistics.explain(Problem.checked(q, q, q), CallContext(), frozenset({"squares"}))
    assert alone == "row blocks: the kernels do not compute the statistics squares"


@pytest.mark.usefixtures("as_user")
def test_it_is_in_the_table_the_plots_and_the_page_of_a_profile(expected, tmp_path):
    profile = hw.profile(model(), [IDS])
    for row in profile.rows:
        assert row.statistics["squares"].value == pytest.approx(expected[row.layer, row.head].item(), rel=1e-5)
        assert (row.statistics["squares"].n, row.statistics["squares"].sem > 0) == (2, True)
    assert profile.table()["squares"].tolist() == [row.statistics["squares"].value for row in profile.rows]
    label = profile.plot("squares", kind="ranking").get_ylabel()
    assert " ".join(label.split()).startswith(f"squares {SQUARES.meaning.removesuffix('.')}")
    hw.write_page(tmp_path / "page.html", profile)
    assert SQUARES.meaning in (tmp_path / "page.html").read_text(encoding="utf-8")
    curves = hw.position_curves(model(), [IDS], edges=(0, 100))
    for row in curves.rows:
        assert row.statistics["squares"].value == pytest.approx(expected[row.layer, row.head].item(), rel=1e-5)


@pytest.mark.usefixtures("statistic")
def test_the_command_prints_it_and_its_page_opens_on_it(headwise, folder, tmp_path):
    options = ("--model", folder / "decoder", "--data", folder / "data.jsonl", "--out", tmp_path / "out")
    page = ("--html", tmp_path / "page.html", "--statistic")
    out = printed_by(headwise("profile", *options, *page, "squares", "--csv"))
    printed = [float(row["squares"]) for row in csv.DictReader(io.StringIO(out))]
    assert printed == [row.statistics["squares"].value for row in hw.load_profile(tmp_path / "out").rows]
    assert (tmp_path / "page.html").is_file()
    assert "squares, got 'cubes'" in refusal(headwise("profile", *options, *page, "cubes"))


@pytest.mark.usefixtures("statistic", "as_user")
def test_runs_with_it_resume_to_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "CHECKPOINT_SECONDS", 0.0)
    run(tiny.model("decoder"), tmp_path / "whole", texts())
    model = tiny.model("decoder")
    hook, _ = interrupt_after(model, 3)
    with pytest.raises(Interrupted):
        run(model, tmp_path / "resumed", texts())
    hook.remove()
    resumed = run(model, tmp_path / "resumed", texts())
    assert "squares" in resumed.rows[0].statistics
    assert contents(tmp_path / "resumed") == contents(tmp_path / "whole")


@pytest.mark.usefixtures("statistic")
def test_it_has_a_row_in_the_docs():
    row = "| `squares` | sum_j A_ij^2, which is 1 / n with uniform attention to n keys | share |"
    assert row in page_with_table(PAGE.read_text(encoding="utf-8")).splitlines()


def test_the_docs_have_a_row_for_every_statistic():
    text = PAGE.read_text(encoding="utf-8")
    assert text == page_with_table(text)
