"""Recipes: their results against the steps alone, resumption after kills at any moment, and mistakes."""

import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers

import headwise as hw
import tiny
from headwise.compression.recipe import compress as steps
from headwise.compression.recipe.inputs import count_common_sequences, load_inputs
from headwise.compression.recipe.recipe import read_recipe
from headwise.compression.report import times
from headwise.runs.rows import MeanEstimate

RECIPE = """
model = "m"
[data]
path = "data.jsonl"
batch = 2
[verify]
path = "held-out.jsonl"
[prune]
keep = 0.5
constraint = "groups"
[heal]
steps = 6
lr = 3e-3
checkpoint_every = 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with a tiny decoder, texts, and a recipe."""
    path = tmp_path_factory.mktemp("recipes")
    hw.save_model(tiny.model("decoder", top="ForCausalLM"), tiny.tokenizer("decoder"), path / "m")
    texts = tiny.texts(11, 5, 23, 7, 12, 9, 14, 8)
    for name, part in (("data", texts[:5]), ("held-out", texts[5:])):
        (path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    (path / "recipe.toml").write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """Output folder of an undisturbed run."""
    out = tmp_path_factory.mktemp("finished") / "out"
    hw.compress(folder / "recipe.toml", out)
    return out


def content(out):
    """Return the content of all files in a folder."""
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def changed(folder, tmp_path, old, new, **files):
    """Write a recipe in which a line is replaced, and return its path."""
    text = RECIPE.replace('"m"', f'"{folder / "m"}"')
    text = text.replace('"data.jsonl"', f'"{folder / "data.jsonl"}"')
    text = text.replace('"held-out.jsonl"', f'"{folder / "held-out.jsonl"}"')
    assert old in text
    (tmp_path / "recipe.toml").write_text(text.replace(old, new))
    return tmp_path / "recipe.toml"


# -- results ----------------------------------------------------------------------------------------------------------


def test_the_steps_are_those_of_the_functions(folder, finished):
    assert {path.name for path in finished.iterdir()} == {"recipe.json", "plan.json", "report.json", "pruned", "model"}
    dense, tokenizer = hw.load(str(folder / "m"), "causal")
    texts = hw.Texts(folder / "data.jsonl", tokenizer, batch=2).within(dense)
    plan = hw.plan_pruning(hw.LeastSquaresScores(dense, texts), keep=0.5, constraint="groups", model=dense)
    assert (finished / "plan.json").read_text() == plan.to_json()
    expected = hw.prune(dense, plan, calibration=texts)
    for name in ("pruned", "model"):
        if name == "model":
            hw.heal(expected, dense, texts, 6, lr=3e-3)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(finished / name)
        for key, value in loaded.state_dict().items():
            assert torch.equal(value, expected.state_dict()[key]), key
        assert loaded.config.num_key_value_heads == 1
    report = json.loads((finished / "report.json").read_text())
    assert [stage["name"] for stage in report["stages"]] == ["dense", "pruned", "healed"]
    held_out = list(hw.Texts(folder / "held-out.jsonl", tokenizer, batch=1))
    with torch.no_grad():
        losses = [
            [float(hw.next_token_loss(model, batch).double()) for batch in held_out] for model in (dense, expected)
        ]
    for stage, values in ((report["stages"][0], losses[0]), (report["stages"][2], losses[1])):
        _compare(stage["loss"], values)
    _compare(report["stages"][2]["difference"], [after - before for before, after in zip(*losses, strict=True)])
    assert (report["loader"], report["documents"]) == ("transformers", 3)
    assert report["stages"][2]["parameters"] == sum(weight.numel() for weight in expected.parameters())


def _compare(found, values):
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    assert found == [pytest.approx(mean, rel=1e-5), pytest.approx((variance / len(values)) ** 0.5, rel=1e-4), 3, 2.0]


def test_runs_with_other_documents_of_the_same_sequences_differ(folder, tmp_path):
    """The folds of the data, and the standard errors of the losses, depend on the documents."""
    words = tiny.texts(12)[0].split()
    settings = []
    for stop in (6, 12):  # two documents of one sequence, or one of two
        for name in ("data", "held-out"):
            lines = (json.dumps({"text": " ".join(words[start : start + stop])}) for start in range(0, 12, stop))
            (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        (tmp_path / "recipe.toml").write_text(
            RECIPE.replace('"m"', f'"{folder / "m"}"').replace("batch = 2", 'context = 6\ndocuments = "cut"')
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*share text")
            inputs = load_inputs(read_recipe(tmp_path / "recipe.toml"), None, torch.device("cpu"), shown=False)
        assert [sequence.tolist() for sequence in inputs.texts.sequences] == [
            inputs.tokenizer(" ".join(words[start : start + 6]))["input_ids"] for start in (0, 6)
        ]
        settings.append(inputs.settings(None)["hashes"])
    assert all(settings[0][name] != settings[1][name] for name in ("data", "verify"))


def test_a_finished_run_is_not_repeated(folder, finished, monkeypatch):
    before = content(finished)
    monkeypatch.setattr(steps, "prune", pytest.fail)
    monkeypatch.setattr(steps, "heal", pytest.fail)
    report = hw.compress(folder / "recipe.toml", finished)
    assert content(finished) == before
    assert report == hw.RecipeResult.load(finished / "report.json")


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("documents",), -1, "a number of documents, got -1"),
        (("documents",), "a", "a number of documents"),
        (("loader",), "x", "a loader of transformers, headwise, got 'x'"),
        (("model",), 3, "the name of the model"),
        (("loss",), None, "the name of the loss"),
        (("stages",), [], "some of dense, pruned, merged, healed"),
        (("stages", 1, "name"), "dense", "some of dense, pruned, merged, healed"),
        (("stages", 1, "parameters"), -5, "a number of parameters of pruned, got -5"),
        (("stages", 1, "loss"), "123", "JSON of a report"),
        (("stages", 1, "loss"), [1.0, 2.0, 3, -2.5], "mean, standard error, number and degrees of freedom for pruned"),
        (("stages", 1, "loss"), [1.0, -2.0, 3, 2.5], "mean, standard error, number and degrees of freedom for pruned"),
        (("stages", 1, "loss"), [1.0, 2.0, 4.7, 2.5], "mean, standard error, number and degrees of freedom for pruned"),
        (("stages", 1, "loss"), [None, 2.0, 4, 2.5], "mean, standard error, number and degrees of freedom for pruned"),
        (("stages", 1, "other"), 1, "JSON of a report"),
    ],
)
def test_edited_reports_are_checked(finished, place, value, message):
    report = json.loads((finished / "report.json").read_text())
    part = report
    for each in place[:-1]:
        part = part[each]
    part[place[-1]] = value
    with pytest.raises(hw.InputError, match=f"^report: expected {message}"):
        hw.RecipeResult.from_json(json.dumps(report))


def test_infinite_losses_are_saved(finished):
    report = hw.RecipeResult.load(finished / "report.json")
    infinite = MeanEstimate(float("inf"), float("nan"), 3, 2)
    changed = replace(report, stages=(replace(report.stages[0], loss=infinite), *report.stages[1:]))
    loaded = hw.RecipeResult.from_json(changed.to_json())
    assert str(loaded.stages[0].loss) == str(infinite)
    assert loaded.stages[1:] == report.stages[1:]


class Stopped(Exception):
    """Stands for the end of a run before its first step."""


def raising_stopped(*_, **options):
    raise Stopped


def test_common_text_is_a_warning(folder, tmp_path, monkeypatch):
    recipe = changed(folder, tmp_path, "held-out", "data")
    monkeypatch.setattr(steps, "plan_by_name", raising_stopped)
    with pytest.warns(match=r"5 of 5 sequences in \[verify\] share text with \[data\]"), pytest.raises(Stopped):
        hw.compress(recipe, tmp_path / "out")


def common_by_hand(texts, others, special):
    """Return the number of sequences with a token in 13 tokens that both have, or that both have as sequences."""

    def words(sequences):
        return [each.tolist()[special : len(each) - special] for each in sequences]

    known, sequences = words(texts.sequences), words(others.sequences)
    joined, stream = (list(itertools.chain(*each)) for each in (known, sequences))
    windows = {tuple(joined[start : start + 13]) for start in range(len(joined) - 12)}
    common = {
        place
        for start in range(len(stream) - 12)
        if tuple(stream[start : start + 13]) in windows
        for place in range(start, start + 13)
    }
    count, start = 0, 0
    for each in sequences:
        count += each in known or any(place in common for place in range(start, start + len(each)))
        start += len(each)
    return count


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("mode", ["cut", "pack", "truncate"])
def test_common_text_is_found_however_it_is_cut(kind, mode):
    tokenizer, special = tiny.tokenizer(kind), 1 if kind == "encoder" else 0
    *data, first, second = tiny.texts(30, 5, 60, 41, 40, 16)
    texts = hw.Texts(data, tokenizer, 19, mode)
    for context in (4, 18, 19, 20, 100):
        same, other, mixed = (
            hw.Texts(documents, tokenizer, context, "cut")
            for documents in (data[2:], [first, second], [first, data[2], second])
        )
        assert count_common_sequences(texts, other) == 0
        for each in (same, mixed):
            assert count_common_sequences(texts, each) == common_by_hand(texts, each, special)
        if mode == "cut":
            assert count_common_sequences(texts, same) == len(same.sequences)
            assert count_common_sequences(texts, mixed) == -(-60 // (context - 2 * special))
    assert count_common_sequences(texts, hw.Texts([data[1]], tokenizer)) == (0 if mode == "pack" else 1)


@pytest.mark.parametrize(("length", "count"), [(12, 0), (13, 1)])
def test_13_consecutive_tokens_are_common_text(length, count):
    tokenizer = tiny.tokenizer("decoder")
    texts = hw.Texts([" ".join(tiny.WORDS[:20])], tokenizer)
    others = hw.Texts([" ".join(tiny.WORDS[40:50] + tiny.WORDS[3 : 3 + length])], tokenizer)
    assert count_common_sequences(texts, others) == count


# -- the section [report] ---------------------------------------------------------------------------------------------

REPORT = "\n[report]\nprompt = 6\nnew_tokens = 2\nbatches = [1]\nrounds = 6\n"


@pytest.fixture
def quick(monkeypatch):
    """Time one run per sample, and ignore times."""
    monkeypatch.setattr(times, "LEAST_SECONDS", 0.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no speed-up")
        yield


@pytest.mark.usefixtures("quick")
def test_a_report_is_added_to_a_finished_run(folder, finished, tmp_path, monkeypatch):
    out, before = tmp_path / "out", content(finished)
    shutil.copytree(finished, out)
    monkeypatch.setattr(steps, "plan_by_name", pytest.fail)
    monkeypatch.setattr(steps, "heal", pytest.fail)
    recipe = folder / "with-report.toml"
    recipe.write_text(RECIPE + REPORT)
    result = hw.compress(recipe, out)
    first = (out / "before-after.json").read_bytes()
    assert content(out) == before | {"before-after.json": first}
    report = hw.CompressionReport.load(out / "before-after.json")
    row = report.row("loss, next_token_loss")
    assert (row.dense, row.compressed) == pytest.approx([result.stages[index].loss.value for index in (0, 2)])
    assert row.change_sem == pytest.approx(result.stages[2].difference.sem, rel=1e-4)
    assert (row.documents, row.samples) == (3, 3)
    assert {"decoding a token after 6, batch 1", "cache per token"} <= {row.quantity for row in report.rows}
    hw.compress(recipe, out)
    assert (out / "before-after.json").read_bytes() == first  # not made again
    recipe.write_text(RECIPE + REPORT.replace("prompt = 6", "prompt = 5"))
    hw.compress(recipe, out)
    assert "prompt of 5 tokens, batch 1" in {
        row.quantity for row in hw.CompressionReport.load(out / "before-after.json").rows
    }
    (out / "before-after.json").write_text("{")
    hw.compress(folder / "recipe.toml", out)
    assert (out / "before-after.json").read_text() == "{"  # the recipe has no report
    hw.compress(recipe, out)
    assert hw.CompressionReport.load(out / "before-after.json").rows


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("prompt = 6", "prompt = 0", r"^prompt: expected a whole number of 1 or more, got 0, in \[report\]$"),
        ("rounds = 6", "rounds = 5", r"^rounds: expected a whole number of 6 or more, got 5, in \[report\]$"),
        ("new_tokens = 2", "new_tokens = 1", "^new_tokens: expected a whole number of 2 or more, got 1"),
        ("[1]", "[1, 0]", "^batches: expected a whole number of 1 or more, got 0"),
        ("[1]", "[]", r"^recipe: expected whole numbers such as \[1, 8\] for batches in \[report\], got \[\]$"),
        ("[1]", "[true]", r"^recipe: expected whole numbers such as .* got \[True\]"),
        ("[1]", "1", "^recipe: expected whole numbers such as .* got 1"),
        ("prompt = 6", "prompt = 127", r"^prompt: expected at most 128 tokens of prompt and new_tokens in \[report\],"),
    ],
)
def test_mistakes_in_a_report_are_found_before_anything_runs(old, new, message, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "plan_by_name", pytest.fail)
    recipe = changed(folder, tmp_path, "[heal]", f"{REPORT.replace(old, new)}[heal]")
    with pytest.raises(hw.InputError, match=message):
        hw.compress(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_key_value_heads_are_merged_between_pruning_and_healing(folder, tmp_path):
    recipe = changed(folder, tmp_path, '[prune]\nkeep = 0.5\nconstraint = "groups"', "[merge]\nkv_heads = 1")
    report = hw.compress(recipe, tmp_path / "out")
    assert [stage.name for stage in report.stages] == ["dense", "merged", "healed"]
    merged, _ = hw.load(str(tmp_path / "out" / "merged"), "causal")
    dense, tokenizer = hw.load(str(folder / "m"), "causal")
    texts = hw.Texts(str(folder / "data.jsonl"), tokenizer, batch=2).within(dense)
    expected = hw.merge_kv(dense, num_kv_heads=1, calibration=texts, method="procrustes").state_dict()
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("prune", "kv_heads", "message"),
    [
        (
            'keep = 0.5\nconstraint = "groups"',
            1,
            "no section [merge] for 1 key/value head of a layer after [prune], g",
        ),
        ('keep = 0.5\nconstraint = "uniform"', 2, "1 for 2 key/value heads of a layer after [prune], got 2"),
        ('keep = 0.5\nconstraint = "free"\nscores = "ablation"', 1, "uniform or groups in [prune] before [merge]"),
        ('plan = "PLAN"', 1, "no section [merge] for 1 key/value head of a layer after [prune], got 1"),
        (None, 3, "1 for 2 key/value heads of a layer, got 3"),
    ],
)
def test_a_merge_that_is_impossible_is_found_before_anything_runs(
    prune, kv_heads, message, folder, finished, tmp_path, monkeypatch
):
    monkeypatch.setattr(steps, "plan_by_name", pytest.fail)
    monkeypatch.setattr(steps, "prune", pytest.fail)
    section = "" if prune is None else f"[prune]\n{prune.replace('PLAN', str(finished / 'plan.json'))}\n"
    old = '[prune]\nkeep = 0.5\nconstraint = "groups"'
    recipe = changed(folder, tmp_path, old, f"{section}[merge]\nkv_heads = {kv_heads}")
    argument = "constraint" if "free" in section else "kv_heads"
    with pytest.raises(hw.InputError, match=f"^{argument}: expected {re.escape(message)}"):
        hw.compress(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_merge_after_pruning_is_possible(folder, tmp_path):
    recipe = changed(folder, tmp_path, 'constraint = "groups"', 'constraint = "uniform"\n[merge]\nkv_heads = 1')
    recipe.write_text(recipe.read_text().replace("steps = 6", "steps = 1"))
    report = hw.compress(recipe, tmp_path / "out")
    assert [stage.name for stage in report.stages] == ["dense", "pruned", "merged", "healed"]


@pytest.mark.parametrize(
    ("kind", "scores"), [("bfloat16", "magnitude"), pytest.param("free", "ablation", marks=pytest.mark.slow)]
)
def test_other_models_and_options(kind, scores, folder, tmp_path):
    """Models in bfloat16 are healed in float32; models with different layers are loaded by headwise."""
    recipe = changed(folder, tmp_path, 'constraint = "groups"', f'scores = "{scores}"\nconstraint = "free"')
    if kind == "bfloat16":
        recipe.write_text(f'dtype = "bfloat16"\n{recipe.read_text()}')
    report = hw.compress(recipe, tmp_path / "out")
    loaded, _ = hw.load(str(tmp_path / "out" / "model"), "causal")
    if kind == "bfloat16":
        assert loaded.dtype == torch.bfloat16
        assert json.loads((tmp_path / "out" / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    before, _ = hw.load(str(tmp_path / "out" / "pruned"), "causal")
    assert not torch.equal(loaded.lm_head.weight, before.lm_head.weight)
    assert report.stages[-1].loss.n == 3


def embedding(model, batch):
    """Return the mean of a text's hidden states."""
    with torch.no_grad():
        return model(**batch).last_hidden_state[0].mean(0)


@pytest.mark.usefixtures("quick")
def test_an_encoder_is_compared_with_its_dense_embeddings(folder, tmp_path):
    hw.save_model(tiny.model("encoder"), tiny.tokenizer("encoder"), tmp_path / "encoder")
    recipe = changed(folder, tmp_path, str(folder / "m"), "encoder")
    recipe.write_text(recipe.read_text() + REPORT.replace("prompt = 6", "prompt = 127"))
    out = tmp_path / "out"
    report = hw.compress(recipe, out)
    dense, *changed_models = (
        hw.load(str(each), "saved").model for each in (tmp_path / "encoder", out / "pruned", out / "model")
    )
    texts = hw.Texts(folder / "held-out.jsonl", tiny.tokenizer("encoder"), batch=1)
    expected = [
        [1 - float(F.cosine_similarity(embedding(model, batch), embedding(dense, batch), dim=0)) for batch in texts]
        for model in changed_models
    ]
    assert report.stages[0].loss.value == pytest.approx(0.0, abs=1e-6)
    for stage, values in zip(report.stages[1:], expected, strict=True):
        assert stage.loss.value == pytest.approx(statistics.fmean(values), abs=1e-6)
        assert stage.loss.value > 1e-4
    assert (report.loss, report.loader) == ("EmbeddingDistance", "headwise")
    rows = hw.CompressionReport.load(out / "before-after.json").rows
    assert {"cosine of outputs", "call on 127 tokens, batch 1"} <= {row.quantity for row in rows}


# -- resumption -------------------------------------------------------------------------------------------------------


def run_in_child(recipe, out, kill_at):
    """Run a recipe in a child process that is killed at a call of `os.fsync`; return True if it ends before."""
    child = os.fork()
    if child == 0:
        calls, fsync = [], os.fsync

        def killing(descriptor):
            calls.append(0)
            if len(calls) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            fsync(descriptor)

        os.fsync = killing
        status = 1
        try:
            hw.compress(recipe, out)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status == 0


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param([2, 7, 4, 9], id="some moments"),
        *(pytest.param([number], marks=pytest.mark.slow, id=f"call {number}") for number in range(1, 45)),
    ],
)
@pytest.mark.usefixtures("as_user")
def test_a_killed_run_resumes_to_the_same_files(kills, folder, finished, tmp_path):
    """Kills between and within steps: at each call that writes a file or a folder to disk."""
    out = tmp_path / "out"
    for kill_at in kills:
        run_in_child(folder / "recipe.toml", out, kill_at)
        for name in ("pruned", "healed", "model"):
            if (out / name).exists():
                transformers.AutoModelForCausalLM.from_pretrained(out / name)
    hw.compress(folder / "recipe.toml", out)
    assert content(out) == content(finished)
    assert {path.name for path in out.iterdir()} == {path.name for path in finished.iterdir()}


@pytest.mark.slow
def test_a_command_that_is_killed_at_random_moments_resumes_to_the_same_files(folder, finished, tmp_path):
    command = [
        sys.executable,
        "-m",
        "headwise",
        "compress",
        str(folder / "recipe.toml"),
        "--out",
        str(tmp_path / "out"),
    ]
    generator = random.Random(0)
    start = time.monotonic()
    subprocess.run([*command[:-1], str(tmp_path / "timed")], check=True, capture_output=True)
    duration = time.monotonic() - start
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for _ in range(2):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
        try:
            process.wait(generator.uniform(0.3, 1.0) * duration)
        except subprocess.TimeoutExpired:
            process.kill()
        _, error = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), error
    subprocess.run(command, check=True, capture_output=True, env=environment)
    assert content(tmp_path / "out") == content(finished)


@pytest.mark.parametrize(
    "failing_at",
    [1, 8, *(pytest.param(number, marks=pytest.mark.slow) for number in range(2, 27, 3))],
)
def test_a_full_disk_leaves_complete_folders_only(failing_at, folder, finished, tmp_path, monkeypatch):
    out, fsync, calls = tmp_path / "out", os.fsync, []

    def failing(descriptor):
        calls.append(0)
        if len(calls) >= failing_at:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(hw.InputError, match="^out: expected a .* that can be written, got No space left on device$"):
        hw.compress(folder / "recipe.toml", out)
    monkeypatch.setattr(os, "fsync", fsync)
    if failing_at < 3:
        assert not out.exists()
        return
    if out.exists():
        for path in out.iterdir():
            assert path.is_file() or path.name == "healing" or (path / "model.safetensors").is_file()
            assert ".part" not in path.name
    hw.compress(folder / "recipe.toml", out)
    assert content(out) == content(finished)


def test_another_recipe_is_refused_by_name_or_replaced(folder, finished, tmp_path, monkeypatch):
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    (out / "before-after.json").write_text("{")  # the report of an earlier recipe
    before = content(out)
    monkeypatch.setattr("headwise.data.models.ModelSource.model", pytest.fail)  # it is refused before
    for old, new, difference in (
        ("keep = 0.5", "keep = 0.9", "recipe.prune.keep"),
        ("steps = 6", "steps = 5", "recipe.heal.steps"),
        ("[heal]", "[heal]\nseed = 3", "recipe.heal.seed"),
        ("batch = 2", "batch = 3", "recipe.data.batch"),
    ):
        recipe = folder / "changed.toml"
        recipe.write_text(RECIPE.replace(old, new))
        with pytest.raises(
            hw.InputError, match=rf"^out: expected .*, got another run \({difference} differs\) in .*--fo"
        ):
            hw.compress(recipe, out)
    assert content(out) == before
    monkeypatch.undo()
    recipe.write_text(RECIPE.replace("[heal]", "[heal]\nseed = 3"))
    hw.compress(recipe, out, force=True)
    replaced = content(out)
    assert replaced.keys() == before.keys() - {"before-after.json"}
    assert replaced["model/model.safetensors"] != before["model/model.safetensors"]
    for name in ("plan.json", "pruned/model.safetensors"):
        assert replaced[name] == before[name]


def test_a_saved_model_that_loads_differently_is_not_put_in_place(folder, tmp_path, monkeypatch):
    def breaking(model, tokenizer, part):
        model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 77.0}
        write(model, tokenizer, part)

    write = steps.write_model
    monkeypatch.setattr(steps, "write_model", breaking)
    out = tmp_path / "out"
    sentence = (
        "^model: expected a saved model that is unchanged when it is loaded, got other outputs of the same weights$"
    )
    with pytest.raises(hw.InputError, match=sentence):
        hw.compress(folder / "recipe.toml", out)
    assert {path.name for path in out.iterdir()} == {"recipe.json", "plan.json"}

    def rounding(model, tokenizer, part):
        changed = deepcopy(model)
        changed.lm_head.weight.data[0, 0] *= 1.0001
        write(changed, tokenizer, part)

    monkeypatch.setattr(steps, "write_model", rounding)
    with pytest.raises(hw.InputError, match="got other weights lm_head.weight$"):
        hw.compress(folder / "recipe.toml", out)


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("keep = 0.5", "kepe = 0.5", r"^recipe: expected only the keys keep, plan, .* in \[prune\], got 'kepe'"),
        ("[heal]", "[finish]", "^recipe: expected only the keys model, data, .* in the recipe, got 'finish'"),
        ("keep = 0.5", "keep = 0", r"^keep: expected a share above 0 and at most 1, got 0.0, in \[prune\]"),
        ("keep = 0.5", "keep = 1.5", r"^keep: expected a share above 0 and at most 1, got 1.5, in \[prune\]"),
        ("keep = 0.5", "keep = nan", r"^keep: expected a finite number, got nan, in \[prune\]"),
        ("keep = 0.5", 'keep = "half"', r"^recipe: expected a number for keep in \[prune\], got 'half'"),
        ("keep = 0.5", "keep = true", r"^recipe: expected a number for keep in \[prune\], got True"),
        ("keep = 0.5", "", r"^keep: expected one of keep and plan, got neither, in \[prune\]"),
        ("keep = 0.5", 'keep = 0.5\nplan = "p"', r"^keep: expected one of keep and plan, got both, in \[prune\]"),
        ("steps = 6", "steps = 6.0", r"^recipe: expected a whole number for steps in \[heal\], got 6.0"),
        ("steps = 6", "steps = 0", r"^steps: expected a whole number of 1 or more, got 0, in \[heal\]"),
        ("steps = 6", "", r"^recipe: expected a key steps in \[heal\], got none"),
        ("lr = 3e-3", "lr = 0", r"^lr: expected a finite number above 0, got 0.0, in \[heal\]"),
        ("batch = 2", "batch = 0", r"^batch: expected a whole number of 1 or more, got 0, in \[data\]"),
        ("batch = 2", 'documents = "pack"', r"^documents: expected whole, truncate or cut in \[verify\], whose standa"),
        ("batch = 2", "[data.more]\na = 1", r"^recipe: expected only the keys path, .* in \[data\], got 'more'"),
        ("batch = 2", "column = 3", r"^recipe: expected a text for column in \[data\], got 3"),
        ('constraint = "groups"', 'constraint = "group"', "^constraint: expected one of uniform, groups, free, got 'g"),
        ('constraint = "groups"', 'scores = "size"', "^scores: expected one of least-squares, magnitude, importance, "),
        ("[verify]", "[verify", "^recipe: expected a TOML file '.*' that can be read, got Expected"),
        ("held-out.jsonl", "none.jsonl", "^data: expected a file '.*none.jsonl' that can be read, got No such file"),
        ("data.jsonl", "empty.jsonl", "^data: expected at least one document, got no text in .*empty.jsonl"),
        ("held-out.jsonl", "a\\u0000b", r"^path: expected a path, got '.*a\\x00b', in \[verify\]"),
        ("data.jsonl", "a\\u0000b", r"^path: expected a path, got '.*a\\x00b', in \[data\]"),
        ("held-out.jsonl", "a" * 5000, "^data: expected a file '.*a' that can be read, got File name too long"),
        ("keep = 0.5", 'plan = "a\\u0000b"', r"^plan: expected a path, got 'a\\x00b', in \[prune\]"),
        ("keep = 0.5", f'plan = "{"a" * 5000}"', "^plan: expected a file with a plan, got '.*a'"),
        ("keep = 0.5", 'plan = "no.json"', "^plan: expected a file with a plan, got '.*no.json'"),
    ],
)
def test_a_mistake_in_a_recipe_is_one_sentence_before_anything_runs(old, new, message, folder, tmp_path, monkeypatch):
    (folder / "empty.jsonl").touch()
    monkeypatch.setattr("headwise.data.models.ModelSource.model", pytest.fail)
    with pytest.raises(hw.InputError, match=message) as error:
        hw.compress(changed(folder, tmp_path, old, new), tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_names_that_cannot_be_paths_are_one_sentence(folder, tmp_path):
    recipe = tmp_path / "recipe.toml"
    text = changed(folder, tmp_path, "keep", "keep").read_text()
    for name in ("a\\u0000b", "a" * 5000):
        recipe.write_text(text.replace(str(folder / "m"), name))
        with pytest.raises(hw.InputError, match="^model: expected minilm, smollm2, a folder in Hugging Face format or"):
            hw.compress(recipe, tmp_path / "out")
    recipe.write_text(text)
    for name in ("a\0b", "a" * 5000):
        with pytest.raises(hw.InputError, match="^out: expected (the path of a folder|a folder that can .*), got 'a"):
            hw.compress(recipe, name)
        with pytest.raises(hw.InputError, match="^recipe: expected a TOML file 'a.* that can be read, got "):
            hw.compress(name, tmp_path / "out")


def test_sections_are_required(tmp_path):
    recipe = tmp_path / "recipe.toml"
    for text, message in (
        ("", "^recipe: expected a key model in the recipe, got none"),
        ('model = "m"\ndata = 3\nverify = 3', r"^recipe: expected a section \[data\], got 3"),
        (
            'model = "m"\n[data]\npath = "a"\n[verify]\npath = "b"\n[heal]\nsteps = 1',
            r"^recipe: expected a section \[pr",
        ),
        ("\xff", "^recipe: expected a TOML file"),
    ):
        recipe.write_text(text, encoding="latin-1")
        with pytest.raises(hw.InputError, match=message):
            read_recipe(recipe)
    with pytest.raises(hw.InputError, match="^recipe: expected a TOML file '.*' that can be read, got No such file"):
        read_recipe(tmp_path / "no.toml")
    with pytest.raises(hw.InputError, match="^recipe: expected a TOML file '.*' that can be read, got Is a directory"):
        read_recipe(tmp_path)


def test_a_plan_for_another_model_leaves_nothing(folder, tmp_path):
    other = tiny.model("decoder", seed=1, top="ForCausalLM")
    plan = hw.plan_pruning(hw.MagnitudeScores(other, {"input_ids": tiny.TOKENS}), keep=0.5)
    plan.save(tmp_path / "plan.json")
    recipe = changed(folder, tmp_path, "keep = 0.5", f'plan = "{tmp_path / "plan.json"}"')
    with pytest.raises(hw.InputError, match="^plan: expected a plan for this model, got one for a model with other we"):
        hw.compress(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_plan_in_a_file_is_applied(folder, finished, tmp_path):
    recipe = changed(folder, tmp_path, "keep = 0.5", f'plan = "{finished / "plan.json"}"')
    hw.compress(recipe, tmp_path / "out")
    for name in ("model", "pruned"):
        assert content(tmp_path / "out" / name) == content(finished / name)


def test_a_folder_of_something_else_is_refused(folder, tmp_path):
    (tmp_path / "model").mkdir()
    for force in (False, True):
        with pytest.raises(hw.InputError, match="^out: expected a folder of its own, .* got model of something else i"):
            hw.compress(folder / "recipe.toml", tmp_path, force=force)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_that_sees_later_tokens_has_no_next_token_loss(folder, tmp_path):
    model = transformers.BertLMHeadModel(tiny.model("encoder").config)
    hw.save_model(tiny.with_distinct_heads(model), tiny.tokenizer("encoder"), tmp_path / "both-sides")
    recipe = changed(folder, tmp_path, str(folder / "m"), "both-sides")
    with pytest.raises(hw.InputError, match="got BertLMHeadModel, whose logits depend on later tokens$"):
        hw.compress(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_classifier_is_refused(folder, tmp_path):
    config = transformers.AutoConfig.from_pretrained(folder / "m")
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "classifier")
    tiny.tokenizer("decoder").save_pretrained(tmp_path / "classifier")
    recipe = changed(folder, tmp_path, str(folder / "m"), "classifier")
    recipe.write_text(recipe.read_text().replace("[prune]", '[prune]\nscores = "magnitude"'))
    with pytest.raises(hw.InputError, match="^model: expected one without a head, .* got a LlamaForSequenceClassifica"):
        hw.compress(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()
