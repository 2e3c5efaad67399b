"""Models are loaded by packaged name or folder, and unusable ones are refused."""

import json
import re

import pytest
import torch
import transformers

import headwise as hw
import tiny
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
    with pytest.raises(hw.InputError, match=r"^tokenizer: expected a tokenizer in '.*', got a folder with none of tok"):
        load(str(tmp_path))


def test_weights_of_other_shapes_are_named(tmp_path, minilm):
    minilm.model.save_pretrained(tmp_path)
    minilm.tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"type_vocab_size": 3}))
    name = re.escape("embeddings.token_type_embeddings.weight of shape (3, 384), got (2, 384) in ")
    with pytest.raises(hw.InputError, match=f"^model: expected {name}'.*'$"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 96}))
    with pytest.raises(hw.InputError, match=r"^model: expected embeddings.LayerNorm.bias .* \(\d+ weights differ\)$"):
        load(str(tmp_path))


def test_a_classifier_is_loaded_as_it_was_saved(tmp_path):
    config = tiny.model("encoder").config
    model = tiny.with_distinct_heads(transformers.BertForSequenceClassification(config))
    hw.save_model(model, tiny.tokenizer("encoder"), tmp_path / "m")
    loaded = hw.load(str(tmp_path / "m"), "saved").model
    assert type(loaded) is transformers.BertForSequenceClassification
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    assert type(hw.load(str(tmp_path / "m")).model) is transformers.BertModel
    content = json.loads((tmp_path / "m" / "config.json").read_text())
    for names, got in ((["Nothing"], "Nothing"), (None, "none in its configuration"), (["BertConfig"], "BertConfig")):
        (tmp_path / "m" / "config.json").write_text(json.dumps(content | {"architectures": names}))
        with pytest.raises(hw.InputError, match=f"^model: expected a class of transformers that '.*' names, got {got}"):
            hw.load(str(tmp_path / "m"), "saved")


def test_a_classifier_without_its_pooler_is_refused(tmp_path):
    config = transformers.BertConfig(**{**tiny.model("encoder").config.to_dict(), "architectures": ["BertModel"]})
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    tiny.tokenizer("encoder").save_pretrained(tmp_path)
    assert hw.load(str(tmp_path)).model.pooler is not None
    with pytest.raises(hw.InputError, match="^model: expected all of the model's weights, got none for pooler"):
        hw.load(str(tmp_path), "saved")


def test_a_model_of_images_needs_no_tokenizer(tmp_path):
    sizes = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 6, "intermediate_size": 37}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8)
    model = transformers.ViTForImageClassification(config).eval()
    model.save_pretrained(tmp_path)
    loaded, tokenizer = hw.load(str(tmp_path), "saved")
    assert (type(loaded), tokenizer) == (transformers.ViTForImageClassification, None)
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(loaded(pixels).logits, model(pixels).logits)


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
    def offline(name, revision):
        raise OSError("no network here")

    monkeypatch.setattr(models_module, "_require_on_hub", offline)
    with pytest.raises(hw.InputError, match="got 'nobody/nothing'; the reason: no network here$"):
        load("nobody/nothing")


def test_the_public_function_returns_model_and_tokenizer(tmp_path):
    tiny.model("decoder", top="ForCausalLM").to(torch.bfloat16).save_pretrained(tmp_path)
    tiny.tokenizer("decoder").save_pretrained(tmp_path)
    model, tokenizer = hw.load(str(tmp_path), "causal")
    assert (type(model).__name__, model.dtype) == ("LlamaForCausalLM", torch.bfloat16)
    assert tokenizer("w5 w6").input_ids == [5, 6]
    assert hw.load(str(tmp_path), dtype=torch.float64).model.dtype == torch.float64


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        ((7,), {}, "model: expected the name of a model, got 7"),
        (("",), {}, "model: expected the name of a model, got ''"),
        (("minilm", "lm"), {}, 'lm_head: expected "causal", "masked", "saved" or None, got \'lm\''),
        (("minilm",), {"dtype": "float16"}, "dtype: expected a floating-point dtype, such as torch.float16, got 'fl"),
        (
            ("minilm",),
            {"revision": "v1"},
            "revision: expected a model on the hub, got 'v1' of 'minilm', which is local",
        ),
    ],
)
@pytest.mark.usefixtures("as_user")
def test_unusable_arguments_are_refused(arguments, options, sentence):
    with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}"):
        hw.load(*arguments, **options)


def test_a_revision_is_passed_to_the_hub(monkeypatch):
    asked = []
    monkeypatch.setattr(models_module, "_require_on_hub", lambda *arguments: asked.append(arguments))
    source = models_module.find_model("nobody/nothing", "v2")
    assert asked == [("nobody/nothing", "v2")]
    assert source.options == {"revision": "v2"}
