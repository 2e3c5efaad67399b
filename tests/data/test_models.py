"""Models are loaded by packaged name or folder, and unusable ones are refused."""

import json

import pytest

import headwise as hw
from headwise.data import models as models_module
from headwise.data.models import load


def test_a_packaged_model_is_loaded_without_importing_its_package(minilm):
    assert minilm.title == "all-MiniLM-L6-v2"
    assert type(minilm.model).__name__ == "BertModel"
    assert not minilm.model.training


def test_a_folder_is_loaded(tmp_path, minilm):
    minilm.model.save_pretrained(tmp_path / "copy")
    minilm.tokenizer.save_pretrained(tmp_path / "copy")
    loaded = load(str(tmp_path / "copy"))
    assert loaded.title == "copy"
    assert loaded.model.num_parameters() == minilm.model.num_parameters()


def test_missing_weights_are_refused_instead_of_initialised(tmp_path, minilm):
    minilm.model.save_pretrained(tmp_path)
    minilm.tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 7}))
    with pytest.raises(hw.InputError, match=r"^model: expected all .* weights, got none for encoder.layer.6.* missing"):
        load(str(tmp_path))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path, minilm):
    minilm.model.save_pretrained(tmp_path)
    with pytest.raises(hw.InputError, match="^model: .* the reason: the folder has none of tokenizer.json"):
        load(str(tmp_path))


def test_a_broken_file_of_weights_is_refused(tmp_path, minilm):
    minilm.model.save_pretrained(tmp_path)
    minilm.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a model")
    with pytest.raises(hw.InputError, match="^model: .* the reason: "):
        load(str(tmp_path))


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(hw.InputError, match=r"^model: expected a folder with a config.json .*, got '.*'"):
        load(str(tmp_path))


def test_a_folder_with_a_broken_configuration_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(hw.InputError, match="^model: expected minilm, smollm2, a folder .*; the reason: "):
        load(str(tmp_path))


def test_an_unknown_name_is_refused_with_the_reason(monkeypatch):
    def offline(name):
        raise OSError("no network here")

    monkeypatch.setattr(models_module, "_require_on_hub", offline)
    with pytest.raises(hw.InputError, match="got 'nobody/nothing'; the reason: no network here$"):
        load("nobody/nothing")
