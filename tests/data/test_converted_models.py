"""Copies of GGUF files in the cache folder."""

import json
import os
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

import headwise as hw
from headwise.data import converted_models
from headwise.data.converted_models import MANIFEST, cache_folder, converted_folder
from headwise.data.models import ModelSource, find_model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_gguf(path):
    """Write a Llama-type model of random weights of 4 bits, with a tokenizer, to a GGUF file."""
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in {
        "block_count": 2,
        "context_length": 128,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "head_count": 4,
        "head_count_kv": 2,
        "layer_norm_rms_eps": 1e-5,
        "rope_freq_base": 1e5,
        "vocab_size": 96,
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "default",
        "token_list": ["<unk>", "<s>", "</s>", "ab", *map(chr, range(33, 125))],
        "token_types": [3, 3, 3] + [1] * 93,
        "token_merges": ["a b"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unk_token_id": 0,
    }.items():
        getattr(writer, f"add_{add}")(value)
    random, q4 = np.random.default_rng(0), gguf.GGMLQuantizationType.Q4_1
    shapes = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
    shapes |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64), "attn_norm": (32,), "ffn_norm": (32,)}
    names = {f"blk.{layer}.{name}.weight": shape for layer in range(2) for name, shape in shapes.items()}
    for name, shape in (names | {"token_embd.weight": (96, 32), "output_norm.weight": (32,)}).items():
        values = random.standard_normal(shape, dtype=np.float32)
        if len(shape) == 2:
            writer.add_tensor(name, gguf.quants.quantize(values, q4), raw_dtype=q4)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def same_weights(model, other):
    """True if two models have the same weights, bit for bit and of the same types."""
    states = model.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    return all(torch.equal(value, states[1][name]) for name, value in states[0].items()) and model.dtype == other.dtype


def test_a_copy_is_equal_to_its_gguf_file_and_is_read_in_place_of_it(tmp_path, cache, capsys, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf")
    sources = [ModelSource("t", "T", str(tmp_path), {"gguf_file": "tiny.gguf"}, converts) for converts in (False, True)]
    direct, copy = (source.model("causal") for source in sources)
    assert "headwise: converting tiny.gguf, once, to " in capsys.readouterr().err
    assert same_weights(direct, copy)
    assert not copy.training
    assert direct.lm_head.weight is direct.model.embed_tokens.weight
    assert copy.lm_head.weight is copy.model.embed_tokens.weight
    assert copy.config.name_or_path == copy.name_or_path == str(tmp_path)
    fields = [config.to_dict() | {"architectures": None} for config in (direct.config, copy.config)]
    assert fields[0] == fields[1]
    assert direct.generation_config.to_dict() == copy.generation_config.to_dict()
    tokenizers = [source.tokenizer() for source in sources]
    texts = ["ab ba  !", "<s>cab</s>"]
    assert tokenizers[0](texts)["input_ids"] == tokenizers[1](texts)["input_ids"]
    (folder,) = (path for path in (cache / "models").iterdir() if path.is_dir())
    assert same_weights(transformers.AutoModelForCausalLM.from_pretrained(folder), direct)
    assert transformers.AutoTokenizer.from_pretrained(folder)(texts)["input_ids"] == tokenizers[0](texts)["input_ids"]
    types = [source.model(None, torch.bfloat16) for source in sources]
    assert same_weights(*types)
    assert [source.lm_head() for source in sources] == ["causal", "causal"]
    new = ModelSource("t", "T", str(tmp_path), {"gguf_file": "tiny.gguf"})
    capsys.readouterr()
    monkeypatch.setattr(gguf, "GGUFReader", None)
    assert same_weights(new.model("causal"), direct)
    assert new.config().model_type == "llama"
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_smollm2_is_equal_to_its_gguf_file():
    source = find_model("smollm2")
    direct = ModelSource(source.name, source.title, source.location, source.options, converts=False)
    assert same_weights(direct.model("causal"), source.model("causal"))
    assert direct.tokenizer().get_vocab() == source.tokenizer().get_vocab()


class Saving:
    """Function that saves a model of two files, and counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, folder):
        self.calls += 1
        (folder / "weights").write_bytes(bytes(1000))
        (folder / "config.json").write_text("{}")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "some.gguf"
    path.write_bytes(b"content")
    return path


def test_a_copy_is_made_once_for_each_content_and_version_of_a_package(tmp_path, file, monkeypatch):
    save, other = Saving(), tmp_path / "other" / "some.gguf"
    folder = converted_folder(file, save)
    other.parent.mkdir()
    other.write_bytes(file.read_bytes())
    assert converted_folder(other, save) == folder
    assert save.calls == 1
    other.write_bytes(b"Content")
    assert converted_folder(other, save) != folder
    assert save.calls == 2
    version = converted_models.version
    for package in ("transformers", "gguf"):
        replaced = {package: "99.0"}
        monkeypatch.setattr(converted_models, "version", lambda name, new=replaced: new.get(name) or version(name))
        assert converted_folder(file, save) != folder
    assert save.calls == 4


DAMAGE = {
    "truncated": lambda folder: (folder / "weights").write_bytes(bytes(999)),
    "another bit": lambda folder: (folder / "weights").write_bytes(bytes(500) + b"\1" + bytes(499)),
    "no file": lambda folder: (folder / "config.json").unlink(),
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "empty manifest": lambda folder: (folder / MANIFEST).write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_copy_is_made_anew(file, damage):
    save = Saving()
    folder = converted_folder(file, save)
    os.utime(folder / "weights", ns=(0, 0))
    assert converted_folder(file, save) == folder
    assert save.calls == 1  # only the time differs
    DAMAGE[damage](folder)
    assert converted_folder(file, save) == folder
    assert save.calls == 2
    assert (folder / "weights").read_bytes() == bytes(1000)
    assert sorted(json.loads((folder / MANIFEST).read_text())["files"]) == ["config.json", "weights"]


def test_a_copy_that_a_killed_process_began_is_made_anew(file):
    save = Saving()
    folder = converted_folder(file, save)
    partial = folder.rename(folder.with_name(f"{folder.name}.partial"))
    (partial / "left over").touch()
    assert converted_folder(file, save) == folder
    assert save.calls == 2
    assert not partial.exists()
    assert not (folder / "left over").exists()


def test_of_two_at_once_one_waits_for_the_other(file):
    save, folders, is_saving, may_go_on = Saving(), [], threading.Event(), threading.Event()

    def save_slowly(folder):
        is_saving.set()
        assert may_go_on.wait(10)
        save(folder)

    threads = [threading.Thread(target=lambda: folders.append(converted_folder(file, save_slowly))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert is_saving.wait(10)
    assert not [path for path in (cache_folder() / "models").iterdir() if (path / MANIFEST).exists()]
    may_go_on.set()
    for thread in threads:
        thread.join(10)
    assert save.calls == 1
    assert len(set(folders)) == 1
    assert len(folders) == 2


def test_a_cache_that_cannot_be_written_is_named_once_and_not_used(file, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWISE_CACHE", str(file / "below a file"))
    message = (
        f"^some.gguf is read slowly at each start, since '{file}/below a file' cannot be written .Not a directory.; "
    )
    with pytest.warns(UserWarning, match=f"{message}HEADWISE_CACHE can name another folder$") as warned:
        assert converted_folder(file, Saving()) is None
    assert len(warned) == 1


def test_a_full_disk_leaves_nothing_behind(file):
    def save(folder):
        (folder / "weights").touch()
        raise OSError(28, "No space left on device")

    with pytest.warns(UserWarning, match="cannot be written .No space left on device."):
        assert converted_folder(file, save) is None
    assert [path.suffix for path in (cache_folder() / "models").iterdir()] == [".lock"]


def test_a_file_that_cannot_be_read_is_the_error_of_the_model(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but no more")
    source = ModelSource("broken", "Broken", str(tmp_path), {"gguf_file": "broken.gguf"})
    with pytest.raises(hw.InputError, match="^tokenizer: expected a tokenizer in 'broken' that can be loaded, got "):
        source.config()
    assert [path.suffix for path in (cache_folder() / "models").iterdir()] == [".lock"]


def test_the_cache_folder_is_that_of_the_system_or_the_stated_one(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADWISE_CACHE", "~/models")
    assert cache_folder() == Path.home() / "models"
    monkeypatch.delenv("HEADWISE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder().name == "headwise"
