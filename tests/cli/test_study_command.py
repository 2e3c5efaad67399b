"""The command `headwise study`: its output, its files, resuming, and one-sentence errors."""

import contextlib
import io
import json
import math
import random
import sys

import jaxtyping
import pytest

import headwise as hw
from command_lines import files_in, printed_by, refusal, replacing
from headwise.cli import app as cli
from headwise.studies import study_result, text_study

pytestmark = pytest.mark.usefixtures("as_user")

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "and", "then", "slept", "day"]
SIZES = ("--heads", "1,2", "--params", "20k", "--embed-dim", 16, "--layers", 1, "--context", 16, "--vocabulary", 300)
SHORT = ("--tokens", 1300, "--trials", 1, "--seeds", 2, "--batch", 8)


def text(words, seed=0):
    """Return random words as one string."""
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(words))


def call(*arguments):
    """Run the command in this process and return its status, output and errors."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["headwise", *map(str, arguments)])
        return cli.run(), out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Folder with usable and unusable files of text."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "text.txt").write_text(text(1500))
    (folder / "few.txt").write_text(text(30, 1))
    rows = [{"text": text(5 + n % 7, n), "label": ("odd", "even")[n % 2]} for n in range(40)]
    (folder / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "file").write_text("")
    return folder


@pytest.fixture(scope="module")
def finished_study(texts, tmp_path_factory):
    """Output folder, standard output and standard error of a finished study, run without shape checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    out = tmp_path_factory.mktemp("study") / "out"
    status, printed, err = call("study", "--data", texts / "text.txt", "--out", out, *SIZES, *SHORT)
    jaxtyping.config.update("jaxtyping_disable", False)
    assert status == 0, err
    return out, printed, err


def test_study_prints_and_saves_the_table_and_the_recommendation(finished_study):
    out, printed, err = finished_study
    found = hw.Study.load(out)
    lines = printed.splitlines()
    steps = math.ceil(1300 / (8 * 16))
    assert lines[0] == f"text.txt: 2 settings, 2 seeds, {steps} steps each"
    for row in found.rows:
        (line,) = (line for line in lines if line.startswith(f"{row.name} ") or line.strip().startswith(f"{row.name} "))
        loss, size = row.statistics["loss"], row.statistics["parameters"].value
        assert f"{loss.value:.4f} ± {loss.sem:.2g}" in line
        assert f"{size:,.0f}" in line
        assert abs(size - 20_000) <= 24
        assert line.rstrip().endswith("frontier") == (row.setting in found.frontier)
        assert row.statistics["cache_bytes"].value == 4 * 2 * 16  # keys and values of 16 features in float32
        assert row.statistics["decode_tokens_s"].value > 0
        assert loss.value < math.log(300)
    assert found.recommendation.sentence in printed
    assert lines[-1] == f"wrote {out}"
    assert "study" in err
    assert {path.name for path in out.iterdir()} == {"study.parquet", "study.png", "study.db", "models"}
    assert (out / "study.png").read_bytes().startswith(b"\x89PNG")
    models = {f"{setting}-seed-{seed}" for setting in ("1x16", "2x8") for seed in (1, 2)}
    assert {path.name for path in (out / "models").iterdir()} == models


def test_a_finished_study_prints_the_same_again_without_training(finished_study, texts, monkeypatch):
    out, printed, _ = finished_study
    monkeypatch.setattr("headwise.studies.training.train", None)
    before = files_in(out / "models")
    again = call("study", "--data", texts / "text.txt", "--out", out, *SIZES, *SHORT)
    assert again[:2] == (0, printed)
    assert files_in(out / "models") == before


def test_other_commands_run_on_a_saved_model(finished_study, texts, tmp_path):
    model = ("--model", finished_study[0] / "models" / "2x8-seed-1")
    data = ("--data", texts / "few.txt", "--documents", "cut", "--context", 16)
    printed_by(call("ablate", *model, *data, "--out", tmp_path / "a"))
    found = hw.Ablation.load(tmp_path / "a")
    assert found.metadata["settings"]["loss"] == "next_token_loss"
    assert 0.0 < found.baseline.value < math.log(300)
    assert [head.identifiers["head"] for head in found.heads] == [0, 1]
    assert "tokens, 2 heads" in printed_by(call("view", "the cat sat on the mat", *model))


@pytest.mark.parametrize("task", ["mlm", "classify"])
def test_masked_language_models_and_classifiers(task, texts, tmp_path):
    data = texts / ("labels.jsonl" if task == "classify" else "text.txt")
    options = ("study", "--task", task, "--data", data, "--out", tmp_path / "out", *SIZES, "--seeds", 1)
    more = ("--tokens", 640, "--trials", 1, "--heads", "2", "--kv-heads", "1,2", "--baseline", "2")
    printed = printed_by(call(*replacing(options, more)))
    assert "2x8 (baseline)" in printed
    assert "undecided: one seed shows no variation; use two or more (--seeds, seeds=)" in printed
    assert {path.name for path in (tmp_path / "out" / "models").iterdir()} == {"2x8-seed-1", "2x8-kv1-seed-1"}
    found = hw.Study.load(tmp_path / "out")
    assert found.baseline == hw.Setting(2, 8, 2)
    if task == "classify":
        config = json.loads((tmp_path / "out" / "models" / "2x8-seed-1" / "config.json").read_text())
        assert config["id2label"] == {"0": "even", "1": "odd"}
    model, few = tmp_path / "out" / "models" / "2x8-kv1-seed-1", texts / "few.txt"
    more = ("--data", few, "--documents", "cut", "--context", 16)
    printed_by(call("profile", "--model", model, *more, "--out", tmp_path / "p", "--no-repeats"))
    assert [head.kv_head for head in hw.load_profile(tmp_path / "p").heads] == [0, 0]


def test_a_time_limit_and_the_tokenizer_of_another_model(finished_study, texts, tmp_path):
    model = finished_study[0] / "models" / "1x16-seed-1"
    sizes = ("--heads", "1", "--params", "20k", "--embed-dim", 16, "--layers", 1, "--context", 16)
    options = ("--data", texts / "text.txt", "--out", tmp_path / "out", "--budget", "60s", "--seeds", 1)
    printed = printed_by(call("study", *options, *sizes, "--tokenizer", model))
    assert "nothing to compare: fewer than two settings were trained to the end" in printed


def test_a_time_limit_that_ends_before_the_first_training_leaves_an_empty_table(texts, tmp_path, monkeypatch):
    def no_training(definition, _budget, *, title, baseline, left_out, **_options):
        parameters = {setting.name: 20_000 for setting in definition.settings}
        metadata = {"model": {"name": title}, "left_out": left_out, "steps": 20}
        return study_result.collect_results((), definition.settings, parameters, metadata, 2, baseline)

    monkeypatch.setattr(text_study, "run_study", no_training)
    printed = printed_by(call("study", "--data", texts / "text.txt", "--out", tmp_path / "out", *SIZES, *SHORT))
    assert "nothing to compare: fewer than two settings were trained to the end" in printed
    assert not (tmp_path / "out" / "study.png").exists()


AMOUNT, TIME = "expected an amount such as 1.5M or 300k, got", "expected a time such as 30m, 90s or 2h, got"


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            ["--data", "{texts}/no.txt"],
            "data: expected a file '{texts}/no.txt' that can be read, got No such file or directory",
        ),
        (["--out", "{texts}/file"], "out: expected a folder that can be created and written, got '{texts}/file'"),
        (["--heads", "a"], "Invalid value for '--heads': expected numbers such as 1,2,4, got 'a'"),
        (["--heads", "1,,2"], "Invalid value for '--heads': expected numbers such as 1,2,4, got '1,,2'"),
        (["--budget", "x"], f"Invalid value for '--budget': {TIME} 'x'"),
        (["--budget", "0"], f"Invalid value for '--budget': {TIME} '0'"),
        (["--budget", "3w"], f"Invalid value for '--budget': {TIME} '3w'"),
        (["--tokens", "some"], f"Invalid value for '--tokens': {AMOUNT} 'some'"),
        (["--params", "-1"], f"Invalid value for '--params': {AMOUNT} '-1'"),
        (["--task", "foo"], "Invalid value for '--task': expected one of lm, mlm, classify, got 'foo'"),
        (
            ["--task", "classify"],
            "data: expected JSON lines, CSV or Parquet with a column 'label', got {texts}/text.txt",
        ),
        (
            ["--storage", "postgresql+psycopg2://me:se@cret@host/db"],
            "storage: expected the URL of a database, got 'postgresql+psycopg2://me:***@host/db', "
            "whose driver psycopg2 is not installed; pip install psycopg2",
        ),
        (
            ["--device", "meta"],
            "device: expected a device that torch can use, got 'meta', whose tensors have no numbers",
        ),
        (
            ["--data", "{texts}", "--out", "{texts}/out"],
            "out: expected a folder outside of the data, which would be read as data, got '{texts}/out' in '{texts}'",
        ),
        (
            ["--baseline", "3"],
            "baseline: expected a valid setting, got '3': 3 heads do not divide embed_dim 16",
        ),
        (
            ["--tokenizer", "{texts}"],
            "tokenizer: expected a folder with a config.json (Hugging Face format), got '{texts}'",
        ),
        (
            ["--device", "abacus"],
            "device: expected a device that torch can use, got 'abacus'; use --device cpu (device='cpu')",
        ),
    ],
)
def test_a_mistake_is_one_sentence_and_status_2(more, sentence, texts, tmp_path):
    before = files_in(texts)
    options = ("--data", texts / "text.txt", "--out", tmp_path / "out", *SIZES, *SHORT)
    refused = refusal(call("study", *replacing(options, (part.format(texts=texts) for part in more))))
    assert refused == sentence.format(texts=texts)
    assert files_in(texts) == before
    assert not (tmp_path / "out" / "study.parquet").exists()


def test_a_mistake_with_force_keeps_the_old_models(finished_study, texts):
    models = finished_study[0] / "models"
    before = files_in(models)
    arguments = ("study", "--data", texts / "text.txt", "--out", finished_study[0], *SIZES, *SHORT, "--force")
    assert call(*arguments, "--device", "abacus")[0] == 2
    assert files_in(models) == before
