"""Removal of heads, against gates of 0 on the dense model, and loading of models without these heads."""

from copy import deepcopy

import pytest
import torch
import transformers

import headwise as hw
from headwise.data.models import find_model
from headwise.families.registry import family_of, head_module
from headwise.intercept.survey import survey
from headwise.removal.remove_heads import RECORD, remove_heads
from removal import families
from removal.families import output


def some_heads(model, arguments, *, share="free"):
    """Return the heads that remain in each module, drawn at random, and gates of 0 for the others: "equal" has the same
    heads in all modules, "uniform" as many, "free" different numbers.
    """
    registry = survey(model, lambda: model(**arguments))
    generator, kept = torch.Generator().manual_seed(3), {}
    for index, record in enumerate(registry.records):
        module, group = head_module(model, record.site.path), record.heads // record.kv_heads
        assert (module.num_heads, module.num_kv_heads) == (record.heads, record.kv_heads)
        if share == "equal":
            generator.manual_seed(3)
        count = 2 + index % 3 if share == "free" else 3
        if group == 1:
            query = torch.randperm(record.heads, generator=generator)[:count].tolist()
        else:
            kv_count = max(1, record.kv_heads - (index % 2 if share == "free" else 1))
            kv_heads = torch.randperm(record.kv_heads, generator=generator)[:kv_count].tolist()
            query = [
                kv * group + own for kv in kv_heads for own in torch.randperm(group, generator=generator)[: group - 1]
            ]
        kept[record.site.path] = module.kept(int(head) for head in query)
    gates = {
        (labels["layer"], labels["head"]): 0.0
        for record, labels in registry.head_labels()
        if labels["head"] not in kept[record.site.path].query
    }
    return kept, gates


@pytest.mark.parametrize("share", ["equal", "uniform", "free"])
@pytest.mark.parametrize("name", families.CONFIGS)
def test_removed_heads_equal_gates_of_0(name, share):
    dense, arguments = families.model(name), families.inputs(name)
    before = {key: value.clone() for key, value in dense.state_dict().items()}
    kept, gates = some_heads(dense, arguments, share=share)
    pruned = deepcopy(dense)
    if (name, share) == ("phi3", "free"):
        with pytest.raises(hw.InputError, match="^heads: expected equally many heads in all layers of a Phi3Model"):
            remove_heads(pruned, kept)
        return
    remove_heads(pruned, kept)
    assert sum(map(torch.Tensor.numel, pruned.parameters())) < sum(map(torch.Tensor.numel, dense.parameters()))
    families.assert_gated(pruned, dense, gates, arguments)
    assert (output(pruned, arguments) - output(dense, arguments)).abs().max() > 0.1
    assert all(torch.equal(value, before[key]) for key, value in dense.state_dict().items())
    is_plain = name in families.IN_TRANSFORMERS and share != "free" and (name != "t5" or share == "equal")
    assert hasattr(pruned.config, RECORD) != is_plain


@pytest.mark.parametrize("name", families.IN_TRANSFORMERS)
def test_plain_transformers_loads_equally_many_heads(name, tmp_path):
    pruned, arguments = families.model(name).float(), families.inputs(name, torch.float32)
    kept, _ = some_heads(pruned, arguments, share="equal")
    remove_heads(pruned, kept)
    pruned.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path).eval()
    assert torch.equal(output(loaded, arguments), output(pruned, arguments))


@pytest.mark.parametrize("name", [name for name in families.CONFIGS if name != "phi3"])
def test_headwise_loads_different_numbers_of_heads(name, tmp_path):
    pruned, arguments = families.model(name).float(), families.inputs(name, torch.float32)
    kept, _ = some_heads(pruned, arguments)
    remove_heads(pruned, kept)
    pruned.save_pretrained(tmp_path)
    loaded = find_model(str(tmp_path)).model()
    assert type(loaded).__name__ == type(pruned).__name__
    assert torch.equal(output(loaded, arguments), output(pruned, arguments))
    with pytest.raises(RuntimeError):  # sizes differ
        transformers.AutoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "auto", "lm_head"),
    [
        ("llama", transformers.AutoModelForCausalLM, "causal"),
        ("gpt2", transformers.AutoModelForCausalLM, "causal"),
        ("gpt_neox", transformers.AutoModelForCausalLM, "causal"),
        ("bert", transformers.AutoModelForMaskedLM, "masked"),
    ],
)
def test_a_language_model_is_loaded_with_and_without_its_head(name, auto, lm_head, tmp_path):
    pruned, arguments = families.model(name, auto).float(), families.inputs(name, torch.float32)
    kept, _ = some_heads(pruned, arguments)
    remove_heads(pruned, kept)
    pruned.save_pretrained(tmp_path)
    source = find_model(str(tmp_path))
    assert torch.equal(output(source.model(lm_head), arguments), output(pruned, arguments))
    assert torch.equal(output(source.model(), arguments), output(getattr(pruned, pruned.base_model_prefix), arguments))


@pytest.mark.parametrize(
    ("name", "auto", "head"),
    [
        ("bert", transformers.AutoModelForSequenceClassification, "classifier"),
        ("gpt2", transformers.AutoModelForSequenceClassification, "score"),
        ("vit", transformers.AutoModelForImageClassification, "classifier"),
        ("bart", transformers.AutoModelForSeq2SeqLM, "lm_head"),
    ],
)
def test_another_head_is_loaded_by_name_or_named(name, auto, head, tmp_path, recwarn):
    pruned, arguments = families.model(name, auto).float(), families.inputs(name, torch.float32)
    pruned.config.pad_token_id = 0
    kept, _ = some_heads(pruned, arguments)
    remove_heads(pruned, kept)
    pruned.save_pretrained(tmp_path)
    source = find_model(str(tmp_path))
    loaded = source.model("saved")
    assert not recwarn.list
    assert type(loaded) is type(pruned)
    for key, value in getattr(pruned, head).state_dict().items():
        assert torch.equal(getattr(loaded, head).state_dict()[key], value)
    with torch.no_grad():
        assert torch.equal(loaded(**arguments).logits, pruned(**arguments).logits)
    sentence = f"^the head of the saved {type(pruned).__name__} is not loaded; hw.load.'.*', 'saved'. loads it$"
    with pytest.warns(UserWarning, match=sentence):
        source.model()


@pytest.mark.parametrize(("name", "lm_head"), [("llama", "causal"), ("bert", None)])
def test_a_loaded_model_is_saved_copied_and_pickled(name, lm_head, tmp_path):
    auto = transformers.AutoModelForCausalLM if lm_head else transformers.AutoModel
    pruned, arguments = families.model(name, auto).float(), families.inputs(name, torch.float32)
    kept, _ = some_heads(pruned, arguments)
    remove_heads(pruned, kept)
    pruned.save_pretrained(tmp_path / "first")
    loaded = find_model(str(tmp_path / "first")).model(lm_head)
    assert type(loaded) is type(pruned)
    loaded.save_pretrained(tmp_path / "second")
    torch.save(loaded, tmp_path / "model.pt")
    for other in (
        find_model(str(tmp_path / "second")).model(lm_head),
        torch.load(tmp_path / "model.pt", weights_only=False),
        deepcopy(loaded),
    ):
        assert type(other) is type(pruned)
        assert getattr(other.config, RECORD) == getattr(pruned.config, RECORD)
        assert torch.equal(output(other, arguments), output(pruned, arguments))


def test_heads_that_cannot_be_removed_are_named():
    module = head_module(families.model("llama"), "layers.0.self_attn")
    for query, message in (
        ([], "^heads: expected heads from 0 to 5, at least one, for layers.0.self_attn, got none"),
        ([0, 6], r"^heads: expected heads from 0 to 5, .*, got \[0, 6\]"),
        ([0, 1, 3], "^heads: expected equally many query heads of each remaining key/value head in layers.0.self_attn"),
    ):
        with pytest.raises(hw.InputError, match=message):
            module.kept(query)
    with pytest.raises(hw.InputError, match="^model: expected attention modules of .*LlamaAttention, .* got LlamaMLP"):
        head_module(families.model("llama"), "layers.0.mlp")
    with pytest.raises(hw.InputError, match=r"^model: expected a module layers.0\[1\], got none"):
        head_module(families.model("llama"), "layers.0[1]")
    changed = families.model("llama")
    changed.layers[0].self_attn.num_key_value_groups = 5
    with pytest.raises(hw.InputError, match="^model: expected num_key_value_groups = 3 in layers.0.self_attn, got num"):
        remove_heads(changed, {"layers.0.self_attn": module.kept([0, 1, 3, 4])})


class T5Attention(torch.nn.Module):
    """Attention with the projections of T5's class of this name, and without a position bias."""

    def __init__(self):
        super().__init__()
        self.key_value_proj_dim, self.n_heads = 8, 6
        self.q, self.k, self.v, self.o = (torch.nn.Linear(48, 48, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (-1, 8)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.o(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class MultiHeadAttention(torch.nn.Module):
    """Another class of the name of headwise's."""


def test_other_classes_of_the_names_of_layers_are_unknown():
    layer = MultiHeadAttention()
    assert family_of(layer) is None
    with pytest.raises(hw.InputError, match="^model: expected headwise's MultiHeadAttention, got another Mul.* in 0"):
        head_module(torch.nn.Sequential(layer), "0")


OPTIONS = {
    "class of the name of T5's": None,
    "plain": {},
    "fused": {"fused_qkv": True, "mask": hw.causal()},
    "grouped": {"num_kv_heads": 2, "value_dim": 5, "rotary": hw.Rotary(), "qk_norm": hw.QKNorm()},
    "gated": {"output_gate": "element", "scores": hw.Scores(sinks=True, temperature=True)},
    "gated by head": {"output_gate": "head", "bias": False},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_heads_of_our_layer_are_removed(name):
    torch.manual_seed(0)
    options = OPTIONS[name]
    layers = (T5Attention() if options is None else hw.MultiHeadAttention(48, 6, **options) for _ in range(2))
    dense = torch.nn.Sequential(*layers).double().eval()
    for parameter in dense.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    arguments = {"input": torch.randn(2, 9, 48, dtype=torch.float64)}
    kept, gates = some_heads(dense, arguments)
    pruned = deepcopy(dense)
    remove_heads(pruned, kept)
    families.assert_gated(pruned, dense, gates, arguments)
    found, unpruned = output(pruned, arguments), output(dense, arguments)
    assert (found - unpruned).abs().max() > 0.1 * found.abs().max()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_bias": hw.ALiBi()}, "position_bias"),
        ({"scores": hw.Scores(talking_heads=True)}, "talking heads"),
        ({"qk_norm": hw.QKNorm(over="heads")}, "a norm over all heads"),
        ({"mask": hw.causal() & hw.per_head([hw.window(3)] * 6)}, "masks of single heads"),
    ],
)
def test_layers_whose_heads_depend_on_each_other_are_refused(options, message):
    layer = torch.nn.Sequential(hw.MultiHeadAttention(48, 6, **options))
    with pytest.raises(hw.InputError, match=f"^model: expected a layer without {message}, got one in 0"):
        head_module(layer, "0")


class LoRA(torch.nn.Linear):
    """Projection with two further matrices."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, dtype=linear.weight.dtype)
        self.a = torch.nn.Parameter(torch.randn(2, linear.in_features, dtype=linear.weight.dtype))
        self.b = torch.nn.Parameter(torch.randn(linear.out_features, 2, dtype=linear.weight.dtype))

    def forward(self, x):
        return super().forward(x) + x @ self.a.mT @ self.b.mT


@pytest.mark.parametrize(("name", "path"), [("llama", "layers.1.self_attn"), ("gpt2", "h.1.attn")])
@pytest.mark.parametrize("which", [0, -1])
def test_projections_that_compute_their_weights_are_refused(name, path, which):
    places = [each.parameter for each in head_module(families.model(name), path).blocks if "bias" not in each.parameter]
    changed = places[which].removesuffix(".weight")
    weight_norm = families.model(name)
    torch.nn.utils.parametrizations.weight_norm(weight_norm.get_submodule(changed))
    old_weight_norm = families.model(name)
    torch.nn.utils.weight_norm(old_weight_norm.get_submodule(changed))
    for model in (weight_norm, old_weight_norm):
        for act in (
            lambda model=model: head_module(model, path),
            lambda model=model: hw.MagnitudeScores(model, families.inputs(name)),
            lambda model=model: hw.LeastSquaresScores(model, [families.inputs(name)]),
        ):
            with pytest.raises(hw.InputError, match=f"^model: expected projections with plain weights, got {changed}"):
                act()
    if name == "llama":
        model = families.model(name)
        setattr(model.get_submodule(path), changed.rpartition(".")[2], LoRA(model.get_submodule(changed)))
        with pytest.raises(hw.InputError, match=f"without further parameters, got {changed} with a, b; merge adapters"):
            head_module(model, path)
        model.get_submodule(path).q_proj = torch.nn.Identity()
        with pytest.raises(hw.InputError, match="^model: expected a LlamaAttention with the modules of its family, go"):
            head_module(model, path)
