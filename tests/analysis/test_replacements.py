"""Replacements of head outputs, compared with the input of the output projection and with the values."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from test_gate import MODELS, PADDING, TOKENS, decoder, encoder, gptj, hidden, ours, projected, scaled, spread
from torch import nn

import headwise as hw
from headwise import replacements
from headwise.intercept.interceptor import SiteKey
from tiny import model as tiny
from tiny import texts, tokenizer

BUDGET = {"rtol": 0.0, "atol": 1e-12}
OTHERS = torch.randint(5, 97, (2, 13), generator=torch.Generator().manual_seed(2))
LEFT, RIGHT = PADDING.flip(1), PADDING


def gated(model, projection, values, **inputs):
    """Return the input of an output projection under gates, `(batch, queries, heads, head_dim)`."""
    with hw.gate(model, values):
        return projected(model, projection, **inputs)


def projected_of(model, path, *tokens, **inputs):
    """Return the input of an output projection for other model inputs, one for each call."""
    given = []
    hook = model.get_submodule(path).register_forward_pre_hook(lambda _, args: given.append(args[0]))
    model(*tokens, **inputs)
    hook.remove()
    return torch.stack(given).unflatten(-1, (6, -1)).squeeze(0)


def replaced(plain, head, new):
    """Return the input of a projection with the features of one head replaced."""
    expected = plain.clone()
    expected[:, :, head] = new
    return expected


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_zero(name):
    make, path, projection = MODELS[name]
    model = make()
    found = gated(model, projection, {(path, 2): replacements.zero()})
    assert torch.equal(found, replaced(projected(model, projection), 2, 0.0))


@torch.no_grad()
def test_zero_removes_nan():
    class Attends(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    model, x = Attends(), torch.randn(2, 3, 5, 7)
    x[0, 1] = torch.nan
    with hw.gate(model, {("", 1): replacements.zero()}):
        assert model(x).isfinite().all()
    with hw.gate(model, {("", 1): 0.0}):
        assert model(x)[0, 1].isnan().all()


# -- uniform ----------------------------------------------------------------------------------------------------------


def values_of(model, path, **inputs):
    """Return the values of each head, `(batch, heads, keys, head_dim)`."""
    given = []
    hook = model.get_submodule(path).register_forward_hook(lambda _, args, out: given.append(out))
    model(TOKENS, **inputs)
    hook.remove()
    kv_heads = getattr(model.config, "num_key_value_heads", 6)
    return given[0].unflatten(-1, (kv_heads, -1)).transpose(1, 2).repeat_interleave(6 // kv_heads, 1)


def uniform_output(v, hidden):
    """Return the mean of the values that are not hidden, or of all values if all are hidden."""
    seen = (~hidden).double()
    seen[seen.sum(-1) == 0] = 1.0
    return (seen / seen.sum(-1, keepdim=True)) @ v


UNIFORM = {
    "encoder": (encoder, 1, "encoder.layer.1.attention.output.dense", "encoder.layer.1.attention.self.value", False),
    "decoder": (decoder, 1, "layers.1.self_attn.o_proj", "layers.1.self_attn.v_proj", True),
    "gptj": (gptj, 1, "h.1.attn.out_proj", "h.1.attn.v_proj", True),
}


@pytest.mark.parametrize("padding", [None, RIGHT, LEFT], ids=["no padding", "right", "left"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", UNIFORM)
@torch.no_grad()
def test_uniform(name, implementation, padding):
    """Rows in which all keys are hidden, as by padding on the left, are included."""
    make, layer, projection, value, causal = UNIFORM[name]
    model, inputs = make(), {} if padding is None else {"attention_mask": padding}
    budget = BUDGET
    if name != "gptj":
        model.set_attn_implementation(implementation)
    if (name, implementation) == ("decoder", "eager"):  # whose softmax in float32 overflows at float64's least number
        model, budget = model.float(), {"rtol": 0.0, "atol": 1e-5}
    plain, v = projected(model, projection, **inputs), values_of(model, value, **inputs)
    hides = torch.zeros(2, 1, 13, 13, dtype=torch.bool)
    if causal:
        hides = hides | torch.ones(13, 13, dtype=torch.bool).triu(1)
    if padding is not None:
        hides = hides | ~padding.bool()[:, None, None]
    even = uniform_output(v.double(), hides.expand(2, 6, 13, 13)).transpose(1, 2).to(v)
    found = gated(model, projection, {(layer, 2): replacements.uniform(), (layer, 5): replacements.uniform()}, **inputs)
    empty = hides[:, 0].all(-1)
    for head in (2, 5):
        torch.testing.assert_close(found[~empty][:, head], even[~empty][:, head], **budget)
        # Where all is hidden, it gives what the model gives there: a mean of all, or nothing.
        nothing = plain[empty][:, head].abs().amax(-1) == 0
        expected = torch.where(nothing[:, None], 0.0, even[empty][:, head])
        torch.testing.assert_close(found[empty][:, head], expected, **budget)
    for head in (0, 1, 3, 4):
        assert torch.equal(found[:, :, head], plain[:, :, head])
    assert (plain[:, :, 2] - found[:, :, 2]).abs().max() > 1e-3


class Attends(nn.Module):
    def forward(self, *tensors, **options):
        return F.scaled_dot_product_attention(*tensors, **options)


Q, K = torch.randn(2, 6, 5, 7, dtype=torch.float64), torch.randn(2, 2, 11, 7, dtype=torch.float64)
V = torch.randn(2, 2, 11, 3, dtype=torch.float64)
SEEN = torch.rand(2, 1, 5, 11, generator=torch.Generator().manual_seed(4)) < 0.6
SEEN[1, :, 3] = False  # a row that hides all
FORMS = {
    "all": ({}, torch.zeros(5, 11).bool()),
    "causal": ({"is_causal": True}, torch.ones(5, 11).bool().triu(1)),
    "a boolean mask": ({"attn_mask": SEEN}, ~SEEN),
    "a float mask": ({"attn_mask": torch.where(SEEN, torch.randn(5, 11).double(), -torch.inf)}, ~SEEN),
    "a scale": ({"scale": 3.0}, torch.zeros(5, 11).bool()),
    "dropout": ({"dropout_p": 0.5}, torch.zeros(5, 11).bool()),
}


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_uniform_in_torchs_attention_functions(form):
    options, hides = FORMS[form]
    seen = (~hides).double().expand(2, 6, 5, 11)
    expected = (seen / seen.sum(-1, keepdim=True).clamp(min=1)) @ V.repeat_interleave(3, 1)
    with hw.gate(model := Attends(), {"": replacements.uniform()}):
        found = model(Q, K, V, enable_gqa=True, **options)
    torch.testing.assert_close(found, expected, **BUDGET)


@pytest.mark.parametrize("least", [-1e9, torch.finfo(torch.float64).min, -torch.inf])
@torch.no_grad()
def test_uniform_with_a_mask_of_large_negative_numbers(least):
    """The model writes its softmax out, and may fill hidden weights with zeros afterwards."""

    class Attention(nn.Module):
        num_heads = 3

        def forward(self, x, hides, fill):
            weights = (x @ x.mT).masked_fill(hides, least).softmax(-1)
            return torch.matmul(weights.masked_fill(hides, 0.0) if fill else weights, other=x)

    model, x = nn.ModuleDict({"attention": Attention()}), torch.randn(2, 3, 5, 7, dtype=torch.float64)
    model.forward = model["attention"].__call__
    hides = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(4)) < 0.4
    hides |= torch.eye(5, dtype=torch.bool)
    hides[1, :, 2] = least != -torch.inf  # softmax of that would be NaN
    hides[0, :, 1] = torch.tensor([True, False, False, True, False])
    even = uniform_output(x, hides.expand(2, 3, 5, 5))
    for fill in (False, True):
        expected = torch.where(hides.all(-1, keepdim=True), 0.0, even) if fill else even
        with hw.gate(model, {"attention": replacements.uniform()}):
            torch.testing.assert_close(model(x, hides, fill), expected, **BUDGET)


@torch.no_grad()
def test_uniform_in_our_layer():
    model = ours()
    layer, projection = model.layers[1], "layers.1.out_proj"
    given = []
    hook = layer.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    model(TOKENS)
    hook.remove()
    v = layer.v_proj(given[0]).unflatten(-1, (2, 7)).transpose(1, 2).repeat_interleave(3, 1)
    even = uniform_output(v, torch.ones(13, 13).bool().triu(1).expand(2, 6, 13, 13)).transpose(1, 2)
    found = gated(model, projection, {("layers.1", 4): replacements.uniform()})
    torch.testing.assert_close(found, replaced(projected(model, projection), 4, even[:, :, 4]), **BUDGET)


@pytest.mark.parametrize("name", ["Gemma2", "GptOss"])
@torch.no_grad()
def test_uniform_in_a_model_with_a_softcap_or_sinks(name):
    sizes = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 37, "num_hidden_layers": 1, "sliding_window": 4}
    sizes |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
    if name == "Gemma2":
        sizes |= {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}
    else:
        sizes |= {"num_local_experts": 2, "num_experts_per_tok": 1}
    config = getattr(transformers, f"{name}Config")(**sizes)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the others are not for float64
    model = spread(getattr(transformers, f"{name}Model")(config))
    found = gated(model, "layers.0.self_attn.o_proj", {(0, 4): replacements.uniform()})
    heads = values_of(model, "layers.0.self_attn.v_proj")
    distance = torch.arange(13)[:, None] - torch.arange(13)
    even = uniform_output(heads, ((distance < 0) | (distance >= 4)).expand(2, 6, 13, 13)).transpose(1, 2)
    torch.testing.assert_close(found[:, :, 4], even[:, :, 4], **BUDGET)


# -- mean -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["encoder", "decoder", "gptj"])
@torch.no_grad()
def test_mean(name):
    """The mean is over batches of several sizes, without padding, in training mode too."""
    make, path, projection = MODELS[name]
    model = make()
    batches = [
        {"input_ids": TOKENS, "attention_mask": RIGHT},
        {"input_ids": OTHERS[:1, :5], "attention_mask": torch.ones(1, 5, dtype=torch.long)},
        {"input_ids": OTHERS, "attention_mask": LEFT},
    ]
    rows = [projected_of(model, projection, **batch)[batch["attention_mask"].bool()] for batch in batches]
    mean = torch.cat(rows).mean(0)
    assert len(torch.cat(rows)) == 21 + 5 + 21
    plain = projected(model, projection)
    value = replacements.mean(batches)
    model.train()
    with hw.gate(model, {(path, 1): value, (path, 4): value}):
        model.eval()
        found = projected(model, projection)
    expected = replaced(replaced(plain, 1, mean[1]), 4, mean[4])
    torch.testing.assert_close(found, expected, **BUDGET)


CROSS = "decoder.layers.0.encoder_attn"


def bart():
    """Return an encoder-decoder with cross-attention at the path `CROSS`."""
    sizes = {"d_model": 48, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37}
    heads = {"encoder_attention_heads": 6, "decoder_attention_heads": 6}
    torch.manual_seed(0)
    return spread(transformers.BartModel(transformers.BartConfig(vocab_size=97, **sizes, **heads)))


@torch.no_grad()
def test_mean_of_cross_attention_is_over_the_decoders_tokens():
    model, path = bart(), CROSS
    batch = {"input_ids": TOKENS, "attention_mask": RIGHT, "decoder_input_ids": OTHERS, "decoder_attention_mask": LEFT}
    plain = projected_of(model, f"{path}.out_proj", **batch)
    with hw.gate(model, {(path, 3): replacements.mean([batch])}):
        found = projected_of(model, f"{path}.out_proj", **batch)
    torch.testing.assert_close(found, replaced(plain, 3, plain[LEFT.bool()][:, 3].mean(0)), **BUDGET)


class Padded(torch.nn.Module):
    """Attention of plain PyTorch, whose argument of padding has a name of its own."""

    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(48, 6, batch_first=True)

    def forward(self, x, is_padding):
        return self.attention(x, x, x, key_padding_mask=is_padding, need_weights=False)[0]


@torch.no_grad()
def test_mean_is_over_tokens_that_the_mask_of_attention_shows():
    torch.manual_seed(0)
    model, x = Padded(), torch.randn(2, 13, 48)
    real, v = RIGHT.bool(), model.attention.in_proj_weight[96:]
    # Uniform attention makes the outputs known: each is the mean of the values of the real tokens.
    model.attention.in_proj_weight[:96] = 0.0
    x[1] *= 3
    values = x @ v.T
    outs = torch.cat([values[i, real[i]].mean(0).expand(int(real[i].sum()), -1) for i in range(2)])
    inputs = {"x": x, "is_padding": ~real}
    with hw.gate(model, {("attention", 2): replacements.mean([inputs])}):
        found = model(**inputs)
    mean = torch.stack([values[i, real[i]].mean(0) for i in range(2)])
    mean[:, 16:24] = outs.mean(0)[16:24]
    expected = model.attention.out_proj(mean)[:, None].expand(-1, 13, -1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_mean_of_texts():
    model, words = tiny("encoder").double(), tokenizer("encoder")
    data = hw.Texts(texts(5, 11, 3), words, batch=2)
    found = gated(model, "encoder.layer.1.attention.output.dense", {(1, 2): replacements.mean(data)})[:, :, 2]
    rows = [
        projected_of(model, "encoder.layer.1.attention.output.dense", words(text, return_tensors="pt")["input_ids"])[0]
        for text in texts(5, 11, 3)
    ]
    torch.testing.assert_close(found, torch.cat(rows)[:, 2].mean(0).expand(2, 13, 8), **BUDGET)


@torch.no_grad()
def test_each_call_of_a_module_that_attends_several_times_is_replaced_by_the_same_call():
    sizes = {"vocab_size": 97, "hidden_size": 48, "embedding_size": 11, "num_hidden_layers": 3, "intermediate_size": 37}
    torch.manual_seed(0)
    model = spread(transformers.AlbertModel(transformers.AlbertConfig(**sizes, num_attention_heads=6)))
    path = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    plain = projected_of(model, f"{path}.dense", OTHERS)[..., 2, :]
    mean = plain.mean((1, 2), keepdim=True).expand_as(plain)
    for value, expected in ((replacements.mean([OTHERS]), mean), (replacements.resample(OTHERS), plain)):
        with hw.gate(model, {(path, 2): value}):
            found = projected_of(model, f"{path}.dense", TOKENS)
        assert len(found) == 3
        torch.testing.assert_close(found[..., 2, :], expected, **BUDGET)


@torch.no_grad()
def test_runs_of_a_replacement_are_not_observed_by_others():
    """These runs are not observed, not recorded, not changed by outer gates, and without dropout."""
    model = decoder()
    projection = "layers.1.self_attn.o_proj"
    mean = projected_of(model, projection, OTHERS[[0, 1, 0]]).mean((0, 1))
    outside = hw.gate(model, {0: 0.0, (1, 3): replacements.resample(TOKENS)})
    inside = hw.gate(model, {(1, 2): replacements.mean([OTHERS, OTHERS[:1]]), (1, 4): replacements.resample(OTHERS)})
    replaced = pytest.warns(UserWarning, match=r"so written_norm is left out: layers\.1\.self_attn$")
    with replaced, hw.watch(model) as heads, hw.record_outputs(model) as run, outside, inside:
        found = projected(model, projection)
    torch.testing.assert_close(found[:, :, 2], mean[2].expand(2, 13, 10), **BUDGET)
    assert [record.statistics["entropy"].count.tolist() for record in heads.records] == [[2.0] * 6] * 2
    calls = {site: len(outputs) for site, outputs in run.by_site.items()}
    assert calls == {SiteKey(f"layers.{i}.self_attn", cross=False): 1 for i in (0, 1)}


# -- another run ------------------------------------------------------------------------------------------------------


def test_a_module_that_did_not_run_in_the_last_run_is_refused():
    class Skips(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = hw.MultiHeadAttention(15, 3), hw.MultiHeadAttention(15, 3)

        def forward(self, x, skips=False):
            return self.first(x) if skips else self.second(self.first(x))

    model, x = Skips(), torch.randn(2, 7, 15)
    with hw.record_outputs(model) as run:
        model(x)
        model(x, skips=True)
    with hw.gate(model, {("first", 1): hw.replacements.patch(run)}):
        model(x)
    expected = "run: expected the last run to include second, got run 1 of 2; record one run"
    with pytest.raises(hw.InputError, match=expected), hw.gate(model, {("second", 1): hw.replacements.patch(run)}):
        model(x)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_resample_and_patch_replace_by_another_run(name):
    make, path, projection = MODELS[name]
    model = make()
    plain, other = projected(model, projection), projected_of(model, projection, OTHERS)
    expected = replaced(plain, 3, other[:, :, 3])
    with hw.record_outputs(model) as run:
        model(OTHERS)
    for value in (
        replacements.resample(OTHERS),
        replacements.resample({"input_ids": OTHERS}),
        replacements.patch(run),
    ):
        torch.testing.assert_close(gated(model, projection, {(path, 3): value}), expected, **BUDGET)
    found = gated(model, projection, {(path, 3): replacements.resample(OTHERS[:1])})
    torch.testing.assert_close(
        found, replaced(plain, 3, projected_of(model, projection, OTHERS[:1])[:, :, 3]), **BUDGET
    )
    assert (plain[:, :, 3] - other[:, :, 3]).abs().max() > 1e-3


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_run_patched_into_itself_changes_nothing(name):
    make, path, _ = MODELS[name]
    model = make()
    with hw.record_outputs(model) as run:
        plain = hidden(model)
    with hw.gate(model, dict.fromkeys((path, (path, 2)), replacements.patch(run))):
        assert torch.equal(hidden(model), plain)


@torch.no_grad()
def test_recorded_outputs_are_the_input_of_the_projection():
    model = decoder()
    with hw.record_outputs(model) as run:
        model(OTHERS)
        given = [projected(model, f"layers.{number}.self_attn.o_proj") for number in range(2)]
    assert [site.path for site in run.by_site] == ["layers.0.self_attn", "layers.1.self_attn"]
    for (out,), expected in zip(run.by_site.values(), given, strict=True):  # of the last run alone
        assert torch.equal(out.transpose(1, 2), expected)
    for layers in ([1], ["layers.1.self_attn"]):
        with hw.record_outputs(model, layers=layers) as run:
            model(TOKENS)
        assert list(run.by_site) == [SiteKey("layers.1.self_attn", cross=False)]
    with hw.gate(model, {(1, 2): 0.0}), hw.record_outputs(model) as run:
        model(TOKENS)
    assert run.by_site[SiteKey("layers.1.self_attn", cross=False)][0][:, 2].abs().max() == 0


@torch.no_grad()
def test_recording_generation_keeps_the_last_run():
    torch.manual_seed(0)
    sizes = {"d_model": 48, "num_layers": 1, "num_heads": 6, "d_kv": 7, "d_ff": 37, "decoder_start_token_id": 0}
    model = spread(transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=97, **sizes)))
    with hw.record_outputs(model) as run:
        model.generate(TOKENS, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    sizes = {site.path: [tuple(each.shape) for each in calls] for site, calls in run.by_site.items()}
    assert sizes == {
        "encoder.block.0.layer.0.SelfAttention": [(2, 6, 13, 7)],
        "decoder.block.0.layer.0.SelfAttention": [(2, 6, 1, 7)],
        "decoder.block.0.layer.1.EncDecAttention": [(2, 6, 1, 7)],
    }


@torch.no_grad()
def test_cross_attention_is_patched():
    model, path = bart(), CROSS
    other, this = ({"input_ids": each, "decoder_input_ids": each[:, :5]} for each in (OTHERS, TOKENS))
    expected = projected_of(model, f"{path}.out_proj", **this).clone()
    expected[:, 2, 1] = projected_of(model, f"{path}.out_proj", **other)[:, 2, 1]
    with hw.gate(model, {(path, 1): replacements.resample(other)}, positions=[2]):
        torch.testing.assert_close(projected_of(model, f"{path}.out_proj", **this), expected, **BUDGET)


def test_gradients_through_a_replacement():
    """A constant has no gradient; under uniform attention only the values have one."""
    model = decoder()
    other = scaled(model, "layers.1.self_attn.o_proj", [1.0] * 6)
    for value in (replacements.mean([OTHERS]), replacements.uniform()):
        model.zero_grad()
        with hw.gate(model, {1: value}):
            hidden(model).square().sum().backward()
        attention = model.layers[1].self_attn
        assert attention.q_proj.weight.grad is None or attention.q_proj.weight.grad.abs().max() == 0
        of_values = attention.v_proj.weight.grad
        assert (of_values is not None and of_values.abs().max() > 0) == isinstance(value, type(replacements.uniform()))
    hidden(other).square().sum().backward()
    assert other.layers[1].self_attn.q_proj.weight.grad.abs().max() > 0


# -- what cannot be ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def refused(sentence, make, model=None, tokens=TOKENS):
    model = decoder() if model is None else model
    with pytest.raises(hw.InputError, match=sentence), hw.gate(model, {(1, 2): make(model)}):
        model(tokens)


@torch.no_grad()
def run_of(model, tokens, **options):
    with hw.record_outputs(model, **options) as run:
        model(tokens)
    return run


def test_replacements_that_are_refused(as_user):
    sizes = r"^run: expected \(batch, heads, queries, value_dim\) = \(2, 6, 13, 10\) in layers.1.self_attn, "
    sizes += r"or a batch of 1, got "
    refused(sizes + r"\(2, 6, 11, 10\)$", lambda model: replacements.resample(OTHERS[:, :11]))
    refused(sizes + r"\(2, 6, 1, 10\)$", lambda model: replacements.resample(OTHERS[:, :1]))
    refused(sizes + r"\(3, 6, 13, 10\)$", lambda model: replacements.resample(TOKENS[[0, 1, 0]]))
    refused(sizes + r"\(2, 6, 11, 10\)$", lambda model: replacements.patch(run_of(model, OTHERS[:, :11])))
    other = decoder(num_attention_heads=4)
    refused(sizes + r"\(2, 4, 13, 10\)$", lambda model: replacements.patch(run_of(other, TOKENS)))
    sentence = "^run: expected at least 1 calls of layers.1.self_attn in it, got 0$"
    refused(sentence, lambda model: replacements.patch(run_of(model, TOKENS, layers=[0])))
    refused(sentence, lambda model: replacements.patch(run_of(encoder(), TOKENS)))
    refused("^dataset: expected at least one batch, got none$", lambda model: replacements.mean([]))
    refused("^dataset: expected batches: tensors, or mappings of them", lambda model: replacements.mean(["words"]))
    refused("^dataset: expected batches: tensors, or mappings of them", lambda model: replacements.resample("words"))
    with pytest.raises(
        hw.InputError, match=r"^run: expected a run of record_outputs\(model\), got Tensor; with hw.record_outputs"
    ):
        replacements.patch(TOKENS)


def test_recordings_that_are_refused(as_user):
    for model, layers, sentence in (
        ("llama", None, "^model: expected a torch module, got str$"),
        ("llama", [0], "^model: expected a torch module, got str$"),
        (decoder(), [2], "^layer: expected one of layers 0 to 1, got 2; name the module"),
        (torch.compile(decoder()), None, "^model: expected modules that run in Python, got a compiled one"),
    ):
        with pytest.raises(hw.InputError, match=sentence), hw.record_outputs(model, layers=layers):
            pass


def test_a_mean_without_calls_of_the_module_is_refused(as_user):
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = decoder(), decoder(seed=1)

        def forward(self, tokens, both=True):
            return self.second(tokens) if both else self.first(tokens)

    model = Halves()
    data = [{"tokens": TOKENS, "both": False}]
    sentence = "^dataset: expected batches in which second.layers.1.self_attn attends 1 times, got none$"
    with (
        torch.no_grad(),
        pytest.raises(hw.InputError, match=sentence),
        hw.gate(model, {("second.layers.1.self_attn", 1): replacements.mean(data)}),
    ):
        model(TOKENS)
