"""Models by name."""

import pytest
import transformers

import headwise as hw
from headwise.models import load as loading
from headwise.models.load import load


def test_a_packaged_model_is_found_without_importing_its_package(minilm):
    assert minilm.title == "all-MiniLM-L6-v2"
    assert type(minilm.model).__name__ == "BertModel"
    assert not minilm.model.training


def test_a_folder_is_loaded(tmp_path, minilm):
    minilm.model.save_pretrained(tmp_path / "copy")
    minilm.tokenizer.save_pretrained(tmp_path / "copy")
    loaded = load(str(tmp_path / "copy"))
    assert loaded.title == "copy"
    assert loaded.model.num_parameters() == minilm.model.num_parameters()


def test_an_encoder_decoder_is_its_encoder(tmp_path, minilm):
    sizes = {"d_model": 8, "num_layers": 1, "num_heads": 2, "d_kv": 4, "d_ff": 16}
    config = transformers.T5Config(vocab_size=minilm.tokenizer.vocab_size, **sizes)
    transformers.T5Model(config).save_pretrained(tmp_path)
    minilm.tokenizer.save_pretrained(tmp_path)
    assert type(load(str(tmp_path)).model).__name__ == "T5Stack"
    assert load(str(tmp_path)).title.endswith("(encoder)")


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(hw.InputError, match=r"^model: expected a folder with a config.json .*, got '.*'"):
        load(str(tmp_path))


def test_a_folder_with_a_broken_model(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(hw.InputError, match="^model: expected minilm, smollm2, a folder .*; the reason: "):
        load(str(tmp_path))


def test_a_name_that_is_nowhere(monkeypatch):
    def offline(name):
        raise OSError("no network here")

    monkeypatch.setattr(loading, "_require_on_hub", offline)
    with pytest.raises(hw.InputError, match="got 'nobody/nothing'; the reason: no network here$"):
        load("nobody/nothing")
