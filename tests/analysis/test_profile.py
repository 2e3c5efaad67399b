"""Profiles of tiny models against the weights that eager attention returns; runs that are stopped, and go on."""

import json
import math
import os
import signal
import statistics as numbers
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

import headwise as hw
import tiny
from headwise.intercept.watch import Heads, watch
from headwise.runs import checkpoint
from headwise.runs import table as table_module
from oracles import statistics_of

pytestmark = pytest.mark.usefixtures("as_user")  # shapes are checked where `watch` is tested

TEXTS = tiny.texts(11, 5, 23, 7, 11, 2, 11)
"""Of 7 sequences; in batches of 2, there are 6 of them."""
FILES = ("profile.parquet",)


def texts(kind="decoder", **options):
    return hw.Texts(TEXTS, tiny.tokenizer(kind), **{"batch": 2} | options)


def contents(folder):
    """All that a run leaves, to the last bit."""
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def values(profile):
    """Every number of a profile, NaN as None."""
    return [
        [None if isinstance(each, float) and math.isnan(each) else each for each in measured]
        for head in profile.heads
        for measured in head.statistics.values()
    ]


# -- what is measured -------------------------------------------------------------------------------------------------


@torch.no_grad()
def by_definition(kind, sequences, special=None):
    """Statistic -> values of each sequence, by `(layer, head)`, from the weights of eager attention."""
    model = tiny.model(kind, attn_implementation="eager")
    found = {}
    for sequence in sequences:
        weights = model(torch.tensor([sequence]), output_attentions=True).attentions
        marks = None if special is None else [token in special for token in sequence]
        for layer, of_layer in enumerate(weights):
            for head in range(6):
                for name, value in statistics_of(of_layer[0, head], sequence, marks).items():
                    found.setdefault((layer, head), {}).setdefault(name, []).append(value)
    return found


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_means_and_errors_are_those_of_the_definition(kind):
    data, special = texts(kind), {0, 2, 3} if kind == "encoder" else {0, 4}
    found = hw.profile(tiny.model(kind), data)
    expected = by_definition(kind, [sequence.tolist() for sequence in data.sequences], special)
    for head in found.heads:
        for name, of_sequences in expected[head.layer, head.head].items():
            value, sem, n = head.statistics[name]
            assert n == len(of_sequences), name
            assert value == pytest.approx(numbers.mean(of_sequences), rel=1e-4, abs=1e-5), name
            error = numbers.stdev(of_sequences) / math.sqrt(n) if n > 1 else math.nan
            assert sem == pytest.approx(error, rel=1e-3, abs=1e-5, nan_ok=True), name
    assert [head.name for head in found.heads] == [f"{layer}.{head}" for layer in range(2) for head in range(6)]
    groups = range(6) if kind == "encoder" else [0, 0, 0, 1, 1, 1]
    assert [head.kv_head for head in found.heads] == [*groups, *groups]


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_random_tokens_have_columns_of_their_own(kind):
    repeats = hw.random_repeats(97, tokens=5, times=3, samples=4)
    found = hw.profile(tiny.model(kind), texts(kind), repeats=repeats)
    expected = by_definition(kind, repeats.tolist())
    for head in found.heads:
        for name in ("induction", "duplicate"):
            mean = numbers.mean(expected[head.layer, head.head][name])
            assert head.statistics[f"{name}_random"].value == pytest.approx(mean, rel=1e-4, abs=1e-5)
            assert head.statistics[f"{name}_random"].n == 4
    by_default = hw.profile(tiny.model(kind), texts(kind))
    assert by_default.statistics == found.statistics
    assert by_default.heads[0].statistics["induction_random"].n == 10
    without = hw.profile(tiny.model(kind), texts(kind), repeats=False)
    assert [name for name in found.statistics if name not in without.statistics] == [
        "induction_random",
        "duplicate_random",
    ]


def test_it_does_not_matter_how_sequences_are_batched():
    one = hw.profile(tiny.model("decoder"), texts(batch=1))
    for batch in (3, 100):
        for mine, other in zip(values(one), values(hw.profile(tiny.model("decoder"), texts(batch=batch))), strict=True):
            assert mine == pytest.approx(other, rel=1e-4, abs=1e-6)


def test_batches_and_tensors_measure_what_texts_do():
    model, batches = tiny.model("decoder"), list(texts())
    expected = values(hw.profile(model, texts(), repeats=False, special=()))
    assert values(hw.profile(model, batches)) == expected
    assert values(hw.profile(model, (batch for batch in batches))) == expected
    ids = [sequence[None].long() for sequence in texts(batch=1).sequences]
    found = hw.profile(model, ids)
    assert found.metadata["measured"]["sequences"] == 7
    assert found.metadata["measured"]["tokens"] == sum(sequence.shape[1] for sequence in ids)
    for mine, other in zip(values(found), expected, strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-6)


def test_any_model_that_can_be_watched():
    layer = nn.TransformerEncoderLayer(24, 3, 37, batch_first=True)
    found = hw.profile(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), [torch.randn(2, 13, 24)] * 3)
    assert len(found.heads) == 6
    assert found.heads[0].statistics["entropy"].n == 6
    assert "induction" not in found.statistics


def test_a_head_without_a_statistic_has_none():
    """Self-attention knows tokens, cross-attention does not: both are in one table."""
    import transformers

    sizes = {"d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3}
    model = transformers.BartModel(transformers.BartConfig(vocab_size=97, **sizes, **heads))
    batch = {"input_ids": torch.randint(5, 97, (2, 11)), "decoder_input_ids": torch.randint(5, 97, (2, 7))}
    found = hw.profile(model, [batch])
    assert {head.kind for head in found.heads} == {"self", "cross"}
    for head in found.heads:
        assert tuple(head.statistics) == found.statistics
        if head.kind == "cross":
            assert math.isnan(head.statistics["induction"].value)
            assert head.statistics["induction"].n == 0


def test_a_model_is_left_as_it_was():
    model = tiny.model("decoder").train()
    model.layers[1].eval()
    before = [module.training for module in model.modules()]
    seen = []
    model.register_forward_hook(lambda module, *_: seen.append((module.training, torch.is_grad_enabled())))
    hw.profile(model, texts())
    assert [module.training for module in model.modules()] == before
    assert set(seen) == {(False, False)}
    assert torch.is_grad_enabled()


def test_parts_merge_to_the_whole():
    model, batches = tiny.model("decoder"), list(texts(batch=1))
    with torch.no_grad(), watch(model) as whole:
        for batch in batches:
            model(**batch)
    merged = Heads(model, ())
    for start in range(3):
        with torch.no_grad(), watch(model) as part:
            for batch in batches[start::3]:
                model(**batch)
        merged.merge(part.records)
    for record, other in zip(merged.records, whole.records, strict=True):
        assert record.site == other.site
        for name, spread in other.statistics.items():
            mine = record.statistics[name]
            torch.testing.assert_close(mine.value, spread.value, rtol=1e-12, atol=1e-14, equal_nan=True)
            torch.testing.assert_close(mine.standard_error, spread.standard_error, rtol=1e-9, atol=0, equal_nan=True)


# -- tables and files -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found():
    return hw.profile(tiny.model("decoder"), texts())


def test_tables_have_a_row_a_head(found):
    table, errors = found.table(), found.sem()
    assert list(table.columns) == ["layer", "head", "kv_head", "module", "kind", "role", *found.statistics]
    assert list(errors.columns) == list(table.columns)
    assert len(table) == len(errors) == 12
    for row, head in enumerate(found.heads):
        assert table["entropy"][row] == head.statistics["entropy"].value
        assert errors["entropy"][row] == head.statistics["entropy"].sem
        assert table["role"][row] == head.role
    listed = [place for heads in found.roles().values() for place in heads]
    assert sorted(listed) == [(head.layer, head.head) for head in found.heads]


def test_what_is_saved_is_what_is_loaded(found, tmp_path):
    import pyarrow.parquet

    found.save(tmp_path / "new" / "folder")
    loaded = hw.load_profile(tmp_path / "new" / "folder")
    assert values(loaded) == values(found)
    assert [head.identifiers for head in loaded.heads] == [head.identifiers for head in found.heads]
    assert loaded.metadata == found.metadata
    columns = pyarrow.parquet.read_table(tmp_path / "new" / "folder" / "profile.parquet").column_names
    assert columns[:9] == ["layer", "head", "kv_head", "module", "kind", "role", "entropy", "entropy_sem", "entropy_n"]
    metadata = json.loads(
        pyarrow.parquet.read_schema(tmp_path / "new" / "folder" / "profile.parquet").metadata[b"headwise"]
    )
    assert set(metadata) == {"format", "model", "data", "versions", "settings", "measured"}
    assert metadata["versions"]["torch"] == torch.__version__
    with pytest.raises(hw.InputError, match="^out: expected a folder without profile.parquet, got .*; --force .force"):
        found.save(tmp_path / "new" / "folder")
    found.save(tmp_path / "new" / "folder", force=True)


def test_no_profile_to_load(found, tmp_path):
    import pyarrow
    from pyarrow import parquet

    with pytest.raises(hw.InputError, match="^profile: expected a folder with a readable profile.parquet, got No"):
        hw.load_profile(tmp_path)
    found.save(tmp_path)
    path = tmp_path / "profile.parquet"
    saved = path.read_bytes()
    whole = parquet.read_table(path)
    broken = {
        "unreadable content": [
            lambda: path.write_bytes(b"no"),
            lambda: path.write_bytes(saved[: len(saved) // 2]),
            lambda: parquet.write_table(whole.replace_schema_metadata({b"headwise": b"["}), path),
            lambda: parquet.write_table(whole.drop_columns(["kv_head"]), path),
            lambda: parquet.write_table(whole.drop_columns(["entropy_n"]), path),
        ],
        "a file without it, as older versions": [
            lambda: parquet.write_table(whole.replace_schema_metadata(None), path),
            lambda: parquet.write_table(whole.replace_schema_metadata({b"headwise": b'{"format": 1}'}), path),
            lambda: parquet.write_table(whole.replace_schema_metadata({b"headwise": b"[]"}), path),
            lambda: parquet.write_table(pyarrow.table({"layer": [1]}), path),
        ],
    }
    for got, writers in broken.items():
        for write in writers:
            write()
            with pytest.raises(hw.InputError, match=f"^profile: expected .*profile.parquet.*, got {got}"):
                hw.load_profile(tmp_path)
    path.write_bytes(saved)
    assert values(hw.load_profile(tmp_path)) == values(found)


def test_a_picture_has_every_head(found):
    figure = found.plot("first")
    image = figure.axes[0].images[0].get_array()
    assert image.shape == (2, 6)
    for head in found.heads:
        assert image[head.layer, head.head] == pytest.approx(head.statistics["first"].value)
    with pytest.raises(hw.InputError, match="^statistic: expected one of entropy, .*, got 'attention'$"):
        found.plot("attention")


def test_a_head_by_its_place(found):
    assert found.head(1, 3).name == "1.3"
    with pytest.raises(hw.InputError, match="^head: expected a .layer, head. of this profile, got .2, 0.$"):
        found.head(2, 0)


# -- runs that are stopped --------------------------------------------------------------------------------------------


class Stopped(BaseException):
    """As by a key."""


@pytest.fixture
def always(monkeypatch):
    """What was measured is written after every batch."""
    monkeypatch.setattr(checkpoint, "CHECKPOINT_SECONDS", 0.0)


def stop_after(model, batches):
    """Stop the model in the middle of the next batch."""
    ran = []

    def hook(*_):
        ran.append(None)
        if len(ran) > batches:
            raise Stopped

    return model.layers[1].register_forward_pre_hook(hook), ran


@pytest.fixture
def uninterrupted(tmp_path):
    hw.profile(tiny.model("decoder"), texts(), out=tmp_path / "uninterrupted")
    return contents(tmp_path / "uninterrupted")


@pytest.mark.parametrize("batches", range(7))
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(batches, uninterrupted, tmp_path, always):
    model, out = tiny.model("decoder"), tmp_path / "out"
    hook, _ = stop_after(model, batches)
    with pytest.raises(Stopped):
        hw.profile(model, texts(), out=out)
    hook.remove()
    assert all(name.startswith("unfinished-0.pt") for name in contents(out))
    hook, ran = stop_after(model, 100)
    hw.profile(model, texts(), out=out)
    assert len(ran) == 6 - batches + 1  # the batches that were left, and the random tokens
    assert contents(out) == uninterrupted


@pytest.mark.parametrize("moment", ["fsync", "replace"])
@pytest.mark.parametrize("count", range(1, 10))
def test_a_run_that_was_stopped_while_it_wrote(moment, count, uninterrupted, tmp_path, always, monkeypatch):
    model, out, calls = tiny.model("decoder"), tmp_path / "out", []
    original = getattr(os, moment)

    def stops(*args):
        calls.append(None)
        if len(calls) == count:
            raise Stopped
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(table_module.os, moment, stops)
        with suppress(Stopped):  # the last ones come when all is written
            hw.profile(model, texts(), out=out)
    hw.profile(model, texts(), out=out)
    assert contents(out) == uninterrupted


RUN = """
import sys, time, torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
import tiny, headwise as hw
from headwise.runs import checkpoint
from test_profile import texts
checkpoint.CHECKPOINT_SECONDS = 0.0
model = tiny.model("decoder")
model.register_forward_hook(lambda *_: time.sleep(0.3))
hw.profile(model, texts(batch=1), out=sys.argv[2])
"""


def test_a_run_that_was_killed(tmp_path):
    out, here = tmp_path / "out", Path(__file__).parent
    hw.profile(tiny.model("decoder"), texts(batch=1), out=tmp_path / "uninterrupted")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
    process = subprocess.Popen([sys.executable, "-c", RUN, str(here.parent), str(out)], env=environment)
    state = out / "unfinished-0.pt"
    try:
        for _ in range(1200):
            if state.exists() and torch.load(state, weights_only=True)["state"]["batches"] >= 3:
                break
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert 3 <= torch.load(state, weights_only=True)["state"]["batches"] < 7
    model = tiny.model("decoder")
    _, ran = stop_after(model, 100)
    hw.profile(model, texts(batch=1), out=out)
    assert len(ran) <= 4 + 1
    assert contents(out) == contents(tmp_path / "uninterrupted")


def test_a_run_that_ended_is_not_run_again(uninterrupted, tmp_path):
    model = tiny.model("decoder")
    _, ran = stop_after(model, 100)
    again = hw.profile(model, texts(), out=tmp_path / "uninterrupted")
    assert ran == []
    assert values(again) == values(hw.load_profile(tmp_path / "uninterrupted"))
    assert contents(tmp_path / "uninterrupted") == uninterrupted
    hw.profile(model, texts(), out=tmp_path / "uninterrupted", force=True)
    assert len(ran) == 7
    assert contents(tmp_path / "uninterrupted") == uninterrupted


OTHERS = {
    "data.batch": lambda out: hw.profile(tiny.model("decoder"), texts(batch=3), out=out),
    "data.context": lambda out: hw.profile(tiny.model("decoder"), texts(context=64), out=out),
    "model.weights": lambda out: hw.profile(tiny.model("decoder", seed=1), texts(), out=out),
    "settings.special": lambda out: hw.profile(tiny.model("decoder"), texts(), out=out, special=[7]),
    "settings.repeats": lambda out: hw.profile(tiny.model("decoder"), texts(), out=out, repeats=False),
    "data": lambda out: hw.profile(
        tiny.model("decoder"), hw.Texts([*TEXTS[1:], "w5 w6"], tiny.tokenizer("decoder"), batch=2), out=out
    ),
}


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("differs", OTHERS)
def test_a_folder_of_another_run(differs, stopped, tmp_path, always):
    model, out = tiny.model("decoder"), tmp_path / "out"
    if stopped:
        stop_after(model, 2)
        with pytest.raises(Stopped):
            hw.profile(model, texts(), out=out)
    else:
        hw.profile(model, texts(), out=out)
    before = contents(out)
    with pytest.raises(hw.InputError) as refused:
        OTHERS[differs](out)
    assert str(refused.value) == (
        "out: expected a folder of its own, or that of the run to resume, "
        f"got another run ({differs} differs) in {str(out)!r}; --force (force=True) replaces it"
    )
    assert contents(out) == before


@pytest.mark.parametrize("name", ["unfinished-0.pt", *FILES])
def test_files_that_are_not_ours_are_not_overwritten(name, tmp_path):
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(hw.InputError, match="^out: expected a folder of its own, .*, got another run"):
        hw.profile(tiny.model("decoder"), texts(), out=tmp_path)
    assert contents(tmp_path) == {name: b"mine"}
    hw.profile(tiny.model("decoder"), texts(), out=tmp_path, force=True)
    assert tuple(contents(tmp_path)) == FILES


def test_fewer_batches_than_before_are_other_data(tmp_path, always):
    model, batches = tiny.model("decoder"), list(texts())
    stop_after(model, 3)
    with pytest.raises(Stopped):
        hw.profile(model, batches, out=tmp_path)
    with pytest.raises(hw.InputError, match="another run .data differs. in"):
        hw.profile(tiny.model("decoder"), batches[:2], out=tmp_path)
    assert hw.profile(tiny.model("decoder"), batches, out=tmp_path).metadata["measured"]["sequences"] == 7


def test_what_cannot_be_profiled(tmp_path):
    model = tiny.model("decoder")
    (tmp_path / "file").write_text("")
    cases = [
        ((None, []), {}, "model: expected a torch module, got NoneType"),
        ((model, []), {}, "dataset: expected at least one batch, got none"),
        (
            (model, ["w5"]),
            {},
            "dataset: expected batches: tensors, or mappings of them, as the model takes them, got str; "
            "hw.Texts(source, tokenizer) makes batches of texts and files",
        ),
        (
            (model, texts()),
            {"out": tmp_path / "file"},
            f"out: expected a folder that can be created and written, got {str(tmp_path / 'file')!r}",
        ),
        (
            (nn.Linear(2, 2), [torch.ones(2, 2)]),
            {"repeats": True},
            "model: expected a model with input embeddings, got Linear; "
            "repeats=hw.random_repeats(vocabulary), or repeats=False",
        ),
        (
            (tiny.model("decoder", vocab_size=20), texts()),
            {},
            "tokenizer: expected ids below 20, the model's vocabulary, got 27",
        ),
        ((nn.Linear(2, 2), texts()), {}, "model: expected a transformers model, got Linear"),
        ((nn.Linear(2, 2), [torch.ones(2, 2)]), {}, "model: expected attention in a way that can be seen, got none in"),
    ]
    for arguments, options, sentence in cases:
        with pytest.raises(hw.InputError) as refused:
            hw.profile(*arguments, **options)
        assert str(refused.value).startswith(sentence)


def test_a_bar_on_standard_error(capsys):
    hw.profile(tiny.model("decoder"), texts(), progress=True)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "70/70 tokens" in printed.err
    hw.profile(tiny.model("decoder"), (batch for batch in texts()), progress=True)
    assert "6/?" in capsys.readouterr().err
    hw.profile(tiny.model("decoder"), texts())
    assert capsys.readouterr().err == ""
