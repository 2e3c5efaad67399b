"""The models of studies: number of parameters, masks, caches, and equal logits in transformers."""

import re
import types

import pytest
import torch
import transformers
from torch import nn

import headwise as hw
import tiny
from headwise.attention.caches import DynamicCache
from headwise.studies import model as models
from headwise.studies.model import ModelShape, Transformer, as_transformers, save_model

pytestmark = pytest.mark.usefixtures("as_user")

VOCABULARY, WIDTH, LAYERS, SIZE = 97, 12, 3, 9_000
SETTINGS = (
    *(hw.Setting(1, 12, 1), hw.Setting(2, 6, 2), hw.Setting(3, 4, 1), hw.Setting(6, 2, 6)),
    *(hw.Setting(4, 8, 2), hw.Setting(6, 6, 3)),
)
KINDS = {"decoder": {}, "encoder": {"causal": False}, "classifier": {"causal": False, "classes": 5}}


def random_model(kind, setting=SETTINGS[4], std=0.3):
    """Return a model in evaluation mode with normally distributed parameters."""
    torch.manual_seed(3)
    model = Transformer(ModelShape(VOCABULARY, WIDTH, LAYERS, SIZE, **KINDS[kind]), setting).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=std)
    return model


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def by_definition(shape, setting, mlp):
    """Return the number of parameters of a model with MLPs of width `mlp`, added up module by module."""
    h, d, k, e = setting.num_heads, setting.head_dim, setting.num_kv_heads, shape.embed_dim
    block = e * h * d + 2 * e * k * d + h * d * e + 3 * e * mlp + 2 * e
    top = 0 if shape.classes is None else e * e + e + e * shape.classes + shape.classes
    return shape.vocabulary * e + shape.layers * block + e + top


@pytest.mark.parametrize("kind", KINDS)
def test_all_settings_have_the_same_number_of_parameters(kind):
    """The numbers differ from the size by at most half the parameters of one more unit in every MLP."""
    shape = ModelShape(VOCABULARY, WIDTH, LAYERS, SIZE, **KINDS[kind])
    for setting in SETTINGS:
        model = Transformer(shape, setting)
        width = model.layers[0].mlp.gate_proj.out_features
        assert {block.mlp.down_proj.in_features for block in model.layers} == {width} == {shape.mlp_dim(setting)}
        assert count(model) == by_definition(shape, setting, width)
        assert abs(count(model) - SIZE) <= 3 * WIDTH * LAYERS / 2
        assert all(
            abs(by_definition(shape, setting, width) - SIZE) <= abs(by_definition(shape, setting, other) - SIZE)
            for other in (width - 1, width + 1)
        )


def test_heads_that_leave_no_parameters_for_the_mlp_are_refused():
    setting = hw.Setting(4, 8, 2)
    least = by_definition(ModelShape(VOCABULARY, WIDTH, LAYERS, 1), setting, 1)
    assert least == 97 * 12 + 3 * (12 * 32 + 2 * 12 * 16 + 32 * 12 + 36 + 24) + 12
    assert count(Transformer(ModelShape(VOCABULARY, WIDTH, LAYERS, least), setting)) == least
    small = 1_234
    sentence = f"params: expected at least {least:,} for 4x8/2 at this width and depth, got 1,234"
    with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
        Transformer(ModelShape(VOCABULARY, WIDTH, LAYERS, small), setting)


def test_initial_weights_have_the_documented_deviations():
    torch.manual_seed(0)
    model = Transformer(ModelShape(499, 48, 2, 80_000, causal=False, classes=3), hw.Setting(4, 12, 4))
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            assert parameter.eq(0.0 if name.endswith("bias") else 1.0).all(), name
        elif parameter.numel() > 1_000:
            is_added_to_residual = name.endswith(("out_proj.weight", "down_proj.weight"))
            assert parameter.std().item() == pytest.approx(0.01 if is_added_to_residual else 0.02, rel=0.06), name


@torch.no_grad()
def test_a_decoder_does_not_see_the_future_and_an_encoder_does():
    ids = torch.randint(0, VOCABULARY, (2, 11))
    other = ids.clone()
    other[:, 7] = (other[:, 7] + 1) % VOCABULARY
    for kind in ("decoder", "encoder"):
        model = random_model(kind)
        assert not torch.equal(model(ids)[:, 7:], model(other)[:, 7:])
        earlier = (model(ids)[:, :7] - model(other)[:, :7]).abs().amax((0, 2))
        assert (earlier == 0.0).all() if kind == "decoder" else (earlier > 1e-3).all()
    first = random_model("decoder")
    assert not torch.equal(first(ids)[:, 8:], first(other)[:, 8:])  # later tokens do change


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_padding_does_not_change_the_logits_of_tokens(kind):
    model = random_model(kind).double()
    lengths = (5, 11, 7)
    ids = torch.randint(0, VOCABULARY, (3, 11))
    is_token = (torch.arange(11) < torch.tensor(lengths)[:, None]).long()
    logits, with_other_padding = (
        model(ids, is_token),
        model(ids + (1 - is_token) * (1 - 2 * (ids > 50).long()), is_token),
    )
    for row, length in enumerate(lengths):
        alone = model(ids[row : row + 1, :length])[0]
        for padded in (logits[row], with_other_padding[row]):
            assert (padded if kind == "classifier" else padded[:length]) == pytest.approx(alone, abs=1e-12)
    if kind != "decoder":
        assert (logits - model(ids)).abs().max() > 1e-3  # the mask matters


@torch.no_grad()
def test_a_classifier_averages_its_logits_over_tokens():
    model, hidden = random_model("classifier").double(), []
    model.norm.register_forward_hook(lambda _module, _inputs, output: hidden.append(output))
    got = model(torch.randint(0, VOCABULARY, (2, 7)))
    dense, out = model.top.dense, model.top.classifier
    inner = hidden[0] @ dense.weight.T + dense.bias
    gelu = inner * (1 + torch.erf(inner / 2**0.5)) / 2
    assert got == pytest.approx((gelu @ out.weight.T + out.bias).mean(1), abs=1e-12)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@torch.no_grad()
def test_cached_decoding_equals_one_forward_pass(setting):
    model = random_model("decoder", setting).double()
    ids = torch.randint(0, VOCABULARY, (2, 11))
    caches = [DynamicCache() for _ in range(LAYERS)]
    steps = [model(ids[:, :4], caches=caches), *(model(ids[:, i : i + 1], caches=caches) for i in range(4, 11))]
    torch.testing.assert_close(torch.cat(steps, 1), model(ids), rtol=0, atol=1e-12)


TOPS = {
    "decoder": (transformers.AutoModelForCausalLM, "LlamaForCausalLM"),
    "encoder": (transformers.AutoModelForMaskedLM, "EuroBertForMaskedLM"),
    "classifier": (transformers.AutoModelForSequenceClassification, "EuroBertForSequenceClassification"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[4], SETTINGS[5]], ids=str)
@torch.no_grad()
def test_the_saved_model_has_the_same_logits_in_transformers(kind, setting, tmp_path):
    model, tokenizer = random_model(kind, setting), tiny.tokenizer("decoder")
    labels = ("a", "b", "c", "d", "e") if kind == "classifier" else ()
    save_model(model, tokenizer, tmp_path, context=13, labels=labels)
    auto, name = TOPS[kind]
    theirs, loading_info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading_info["missing_keys"]
    assert not loading_info["unexpected_keys"]
    assert type(theirs).__name__ == name
    assert count(theirs) == count(model)
    assert next(theirs.parameters()).dtype == torch.float32
    ids = torch.randint(5, VOCABULARY, (3, 11))
    is_token = (torch.arange(11) < torch.tensor((11, 4, 7))[:, None]).long()
    theirs.eval()
    torch.testing.assert_close(theirs(input_ids=ids).logits, model(ids), rtol=1e-4, atol=1e-4)
    got, expected = theirs(input_ids=ids, attention_mask=is_token).logits, model(ids, is_token)
    if kind != "classifier":
        got, expected = got[is_token.bool()], expected[is_token.bool()]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.1
    assert theirs.config.max_position_embeddings == 52
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)("w5 w9")["input_ids"] == tokenizer("w5 w9")["input_ids"]
    if labels:
        assert theirs.config.id2label == {0: "a", 1: "b", 2: "c", 3: "d", 4: "e"}
        assert theirs.config.label2id == {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4}


def test_a_model_with_additional_parameters_is_not_exported():
    model = random_model("decoder")
    model.more = nn.Parameter(torch.zeros(2))
    sentence = "model: expected a Transformer without changes, got additional parameters model.more"
    with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
        as_transformers(model, tiny.tokenizer("decoder"), context=8)


def test_an_encoder_needs_a_transformers_version_with_eurobert(monkeypatch):
    monkeypatch.setattr(models, "require_transformers", lambda: types.SimpleNamespace(__version__="4.47.1"))
    sentence = "task: expected lm, or for an encoder a transformers version with EuroBERT, got transformers 4.47.1"
    with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
        as_transformers(random_model("encoder"), tiny.tokenizer("decoder"), context=8)


@pytest.mark.parametrize("size", [150_000, 1_500_000, 20_000_000])
@pytest.mark.parametrize("heads", [(1, 2, 4, 8, 16), (3, 6), (1, 2, 3, 4, 6, 12), (5,), (1,)])
def test_the_width_for_a_size_is_divisible_by_all_heads(size, heads):
    """MLPs of usual width then reach about the size."""
    shape = ModelShape.of_size(size, 300, heads)
    assert (shape.vocabulary, shape.parameters, shape.causal, shape.classes) == (300, size, True, None)
    assert all(shape.embed_dim % (2 * number) == 0 for number in heads)
    usual = 300 * shape.embed_dim + 12 * shape.layers * shape.embed_dim**2
    assert 1 / 2 < usual / size < 2
    for number in heads:
        setting = hw.Setting(number, shape.embed_dim // number, number)
        assert 0.5 < shape.mlp_dim(setting) / shape.embed_dim < 8
    assert 10 <= shape.embed_dim / shape.layers <= 60


def test_a_given_width_or_depth_is_used():
    shape = ModelShape.of_size(20_000, 300, (1, 7), embed_dim=16, layers=1, causal=False, classes=2)
    assert shape == ModelShape(300, 16, 1, 20_000, causal=False, classes=2)
    assert ModelShape.of_size(1_500_000, 300, (2,), layers=5).layers == 5
    assert ModelShape.of_size(1_500_000, 300, (2,), embed_dim=50).embed_dim == 50
    assert ModelShape.of_size(1_500_000, 300, (7, 11, 13)).embed_dim % 2 == 0  # too many to divide it by all
