"""Properties of all analyses that run a model over data: they resume to the same bits, processes share their batches,
and folders of other runs are not overwritten.
"""

import functools
import inspect
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
import torch

import headwise as hw
import tiny
import toy_analysis
from headwise.analysis.head_tests import name_movers
from headwise.runs import checkpoint
from profile_runs import contents, results_of_two_processes

pytestmark = pytest.mark.usefixtures("as_user")  # shapes are checked where each analysis is tested

TOKENIZER = tiny.tokenizer("decoder")

TEXTS = tiny.texts(11, 5, 43, 11)
"""Four documents; as sequences of equal length, at most two at a time, they are three batches."""


def texts(**options):
    """Return the documents as sequences in batches of two by default."""
    return hw.Texts(TEXTS, TOKENIZER, **{"batch": 2} | options)


TREEBANK = "\n".join(
    f"# newdoc id = {number}\n# text = {' '.join(tiny.WORDS[number : number + 5])}\n"
    + "\n".join(
        "\t".join([str(1 + at), tiny.WORDS[number + at], *"____", str(at), "root" if at == 0 else "obj", "_", "_"])
        for at in range(5)
    )
    + "\n"
    for number in range(8)
)
"""Eight sentences of five words, each of which depends on the one before."""

NEEDLES = [hw.Needle("w60 w61 ", "w62 w63", " w65", "w66 w60"), hw.Needle("w70 w71 ", "w72 w73", " w75", "w76 w70")]


@functools.cache
def haystack():
    """Return the path of a text of 120 words."""
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name) / "hay.txt"
    path.write_text("\n\n".join([" ".join(tiny.WORDS[:40])] * 3))
    return folder, path


def in_context(model, dataset, out=None):
    """Measure in-context scores, and save the table in the folder of the run."""
    options = {"early": 2, "late": 11, "window": 1, "sequences": 4, "repeats": False}
    table = hw.in_context_score(model, dataset, **options, out=out)
    if out is not None and not (torch.distributed.is_initialized() and torch.distributed.get_rank()):
        table.save(out, force=True)
    return table


def name_movers_of(model, _dataset, out=None):
    templates = ("w70 {A} w71 {B} w72 {C} w73", "w74 {A} w75 {B} w76 {C} w77")
    options = {"prompts": 12, "copied": 0, "names": tiny.WORDS[:20], "templates": templates}
    return hw.name_movers(model, TOKENIZER, **options, out=out)


def of_loss(function, **options):
    """Return a function that measures the effects of heads on the next-token loss."""
    return lambda model, dataset, out=None: function(model, dataset, hw.next_token_loss, **options, out=out)


PASSES = {
    "profile": hw.profile,
    "norm_weighted": hw.norm_weighted,
    "attention_distances": hw.attention_distances,
    "position_curves": hw.position_curves,
    "rollout": hw.rollout,
    "sink_rate": hw.sink_rate,
    "toy_analysis": toy_analysis.mean_reach,
    "redundancy": lambda model, dataset, out=None: hw.redundancy(model, dataset, pairs="all", out=out),
    "redundancy with effects of clusters": lambda model, dataset, out=None: hw.redundancy(
        model, dataset, threshold=0.2, loss=hw.next_token_loss, out=out
    ),
    "ablate": of_loss(hw.ablate),
    "importance": of_loss(hw.importance),
    "importance by integrated gradients": of_loss(hw.importance, method="integrated", steps=2, most_steps=2),
    "importance by ablation": of_loss(hw.importance, method="ablation"),
    "in_context_score": in_context,
    "dependency_accuracy": lambda model, _dataset, out=None: hw.dependency_accuracy(
        model, TOKENIZER, TREEBANK, fewest=2, out=out
    ),
    "name_movers": name_movers_of,
    "retrieval_score": lambda model, _dataset, out=None: hw.retrieval_score(
        model, TOKENIZER, haystack=haystack()[1], lengths=(20, 30), depths=(0.0, 1.0), needles=NEEDLES,
        continuation="forced", out=out,
    ),
}  # fmt: skip
"""Analyses of a model over data, `(model, dataset, out=None)`. Those with prompts of their own ignore the data.

The model is a causal decoder, and batches have no padding. For an analysis of encoders, set `self_attn.is_causal` to
False in each of `model.model.layers`.
"""

OWN_DATA = {"in_context_score", "dependency_accuracy", "name_movers", "retrieval_score"}
"""Analyses that choose or make their own data."""


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """Let the analysis of name movers read two prompts at once."""
    monkeypatch.setattr(name_movers, "AT_ONCE", 2)


@pytest.fixture(scope="module", params=PASSES)
def name(request):
    """Name of an analysis."""
    return request.param


@pytest.fixture(scope="module")
def analysis(name):
    """An analysis."""
    return PASSES[name]


def model(seed=0):
    """Return a causal decoder of 2 layers of 4 heads; some analyses run it once for each head."""
    return tiny.model("decoder", seed=seed, top="ForCausalLM", num_attention_heads=4)


def counted(seen):
    """Return a model that appends to a list at each run."""
    counting = model()
    counting.model.register_forward_pre_hook(lambda *_: seen.append(None))
    return counting


@pytest.fixture(scope="module")
def uninterrupted(analysis, tmp_path_factory):
    """The folder that a run leaves which was not interrupted, its table, and the number of runs of the model."""
    out, seen = tmp_path_factory.mktemp("uninterrupted"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(name_movers, "AT_ONCE", 2)
        table = analysis(counted(seen), texts(), out=out)
    return out, table, len(seen)


def numbers(table):
    """Return all rows of a result, for comparison."""
    if isinstance(table, hw.Redundancy):
        return [*table.table().to_dict("records"), *({"cost": each.together.value} for each in table.cluster_costs)]
    return [row for each in (table, *(getattr(table, part) for part, _ in table.PARTS)) for row in each.records()]


def run_until_killed(analysis, out, runs):
    """Run an analysis, and kill this process in the middle of a run of the model."""
    checkpoint.CHECKPOINT_SECONDS = 0.0
    os.fsync = lambda file: None  # many checkpoints wait for the disk otherwise
    killed, begun = model(), []

    def kill(*_):
        begun.append(None)
        if len(begun) > runs:
            os.kill(os.getpid(), signal.SIGKILL)

    killed.model.layers[1].register_forward_pre_hook(kill)
    analysis(killed, texts(), out=out)


def test_a_killed_process_resumes_to_the_same_bits(name, analysis, uninterrupted, tmp_path):
    out, _, runs = uninterrupted
    arguments = analysis, tmp_path, round((0.85 if name in OWN_DATA else 0.55) * runs)
    process = multiprocessing.get_context("fork").Process(target=run_until_killed, args=arguments)
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    (checkpoint_file,) = tmp_path.rglob("unfinished-*-0.pt")
    with torch.serialization.safe_globals(checkpoint.STORABLE):
        assert torch.load(checkpoint_file, weights_only=True)["state"].batches > 0
    seen = []
    analysis(counted(seen), texts(), out=tmp_path)
    assert 0 < len(seen) < runs
    assert contents(tmp_path) == contents(out)


def test_a_finished_run_is_read_and_not_repeated(name, analysis, uninterrupted, tmp_path):
    out, table, runs = uninterrupted
    shutil.copytree(out, tmp_path / "out")
    seen = []
    again = analysis(counted(seen), texts(), out=tmp_path / "out")
    assert repr(numbers(again)) == repr(numbers(table)) == repr(numbers(type(table).load(out)))
    assert json.dumps(again.metadata) == json.dumps(table.metadata)
    assert len(seen) < runs if name in OWN_DATA else not seen  # some check first that the model is causal
    assert contents(tmp_path / "out") == contents(out)


def test_the_folder_of_another_run_is_refused(name, analysis, uninterrupted, tmp_path):
    shutil.copytree(uninterrupted[0], tmp_path / "out")
    others = {"model.weights": (model(seed=1), texts())}
    if name not in OWN_DATA:
        others |= {"data.batch": (model(), texts(batch=3))}
        others |= {"data": (model(), hw.Texts([*TEXTS[1:], "w5 w6"], TOKENIZER, batch=2))}
    for difference, arguments in others.items():
        expected = (
            rf"^out: expected a folder of its own, .* \({difference} differs\) in .*; --force \(force=True\) repl"
        )
        with pytest.raises(hw.InputError, match=expected):
            analysis(*arguments, out=tmp_path / "out")
    assert contents(tmp_path / "out") == contents(uninterrupted[0])


@pytest.mark.parametrize("file", ["unfinished-{}-0.pt", "unfinished-{}-1.pt", "{}.parquet"])
def test_files_that_headwise_did_not_write_are_not_overwritten(file, name, analysis, uninterrupted, tmp_path):
    folder, kind = (
        (tmp_path, type(uninterrupted[1])) if name != "in_context_score" else (tmp_path / "zero", hw.Ablation)
    )
    folder.mkdir(exist_ok=True)
    (folder / file.format(kind.NAME)).write_bytes(b"mine")
    before = contents(tmp_path)
    with pytest.raises(hw.InputError, match="^out: expected a folder of its own, .*, got another run in"):
        analysis(model(), texts(), out=tmp_path)
    assert contents(tmp_path) == before


def test_data_without_a_batch_is_refused(name, analysis):
    if name in OWN_DATA:
        pytest.skip("it has data of its own, or chooses sequences")
    with pytest.raises(hw.InputError, match=r"^dataset: expected at least one batch, got none$"):
        analysis(model(), [])


def test_two_processes_agree_with_one(analysis, uninterrupted, tmp_path):
    def measure(_rank):
        seen = []
        return numbers(analysis(counted(seen), texts(), out=tmp_path / "out")), len(seen)

    out, table, runs = uninterrupted
    (first, seen), (second, others_seen) = results_of_two_processes(measure, tmp_path)
    assert repr(first) == repr(second)
    assert min(seen, others_seen) < runs
    for row, expected in zip(first, numbers(table), strict=True):
        assert list(row) == list(expected)
        for column, value in expected.items():
            tolerance = {"rel": 1e-9, "abs": 1e-12, "nan_ok": True}
            assert row[column] == (pytest.approx(value, **tolerance) if isinstance(value, int | float) else value), (
                column
            )
    assert contents(tmp_path / "out").keys() == contents(out).keys()


def test_every_analysis_of_data_is_among_these():
    functions = {name: getattr(hw, name) for name in hw.__all__ if inspect.isfunction(getattr(hw, name))}
    analyses = {
        name
        for name, function in functions.items()
        if function.__module__.startswith("headwise.analysis") and "out" in inspect.signature(function).parameters
    }
    assert analyses - {"pruning_curve"} <= set(PASSES)  # which calls `ablate`
