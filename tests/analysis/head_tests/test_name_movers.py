"""The name-mover test against plain hooks, whole attention matrices and matrices from weights."""

import math

import pytest
import torch
import transformers

import headwise as hw
import tiny
from full_attention import weights_of
from headwise.analysis.head_tests.name_prompts import NAMES, TEMPLATES, name_prompts
from jackknife import jackknife
from prompt_models import HEADS, LAYERS, language_model, projections, split

pytestmark = pytest.mark.usefixtures("as_user")

OWN_NAMES = tiny.WORDS[:20]
OWN_TEMPLATES = ("w70 {A} w71 {B} w72 {C} w73", "w74 w75 {A} {B} w76 w77 {C} w78 w79", "w80 {A} {B} w81 {C} w82 w83")


def prompts(count=12):
    return name_prompts(tiny.tokenizer("decoder"), count, 3, OWN_NAMES, OWN_TEMPLATES)


def movers(model, **options):
    options = {"prompts": 12, "copied": 5, "seed": 3, "names": OWN_NAMES, "templates": OWN_TEMPLATES} | options
    return hw.name_movers(model, tiny.tokenizer("decoder"), **options)


def random_norms(model):
    """Return the model with random weights and biases of norms."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and ("norm" in name or "ln_" in name):
                parameter.normal_(0.8 if name.endswith("weight") else 0.0, 0.3)
    return model


@torch.no_grad()
def direct_effects(model, prompt):
    """Return what each head adds to the logit of the answer minus that of the wrong one, and that difference."""
    outputs, streams = [], []
    norm = model.model.norm if model.config.model_type == "llama" else model.transformer.ln_f
    hooks = [
        part.register_forward_pre_hook(lambda _, args: outputs.append(args[0][0, -1])) for part in projections(model)
    ]
    hooks.append(norm.register_forward_pre_hook(lambda _, args: streams.append(args[0][0, -1])))
    logits = model(prompt.ids[None]).logits[0, -1]
    for hook in hooks:
        hook.remove()
    (stream,) = streams
    is_llama = model.config.model_type == "llama"
    scale = (stream.square().mean() + 1e-6).sqrt() if is_llama else (stream.var(correction=0) + norm.eps).sqrt()
    unembedding = model.get_output_embeddings().weight
    read = (unembedding[prompt.answer] - unembedding[prompt.wrong]) * norm.weight / scale
    effects = []
    for layer, part in enumerate(projections(model)):
        weight = part.weight if is_llama else part.weight.T
        for head, out in enumerate(split(outputs[layer])):
            written = split(weight)[:, head] @ out
            effects.append(read @ (written if is_llama else written - written.mean()))
    return torch.stack(effects), logits[prompt.answer] - logits[prompt.wrong]


@torch.no_grad()
def copies(model, prompt):
    """Return whether the logits of both names are among the 5 highest, and lowest, that OV matrices produce."""
    is_llama = model.config.model_type == "llama"
    layers = model.model.layers if is_llama else model.transformer.h
    norm = model.model.norm if is_llama else model.transformer.ln_f
    states = []
    hook = layers[1].register_forward_pre_hook(lambda _, args: states.append(args[0][0]))
    model(prompt.ids[None])
    hook.remove()
    unembedding = model.get_output_embeddings().weight
    found = []
    for layer in range(1, LAYERS):
        for head in range(HEADS):
            of_names = []
            for place, name in ((prompt.places[0], prompt.answer), (prompt.places[1], prompt.wrong)):
                x = states[0][place]
                if is_llama:
                    attention, kv = layers[layer].self_attn, head // 3
                    value = attention.v_proj.weight[10 * kv : 10 * kv + 10] @ (x * layers[layer].input_layernorm.weight)
                    written = attention.o_proj.weight[:, 10 * head : 10 * head + 10] @ value
                else:
                    attention = layers[layer].attn
                    inputs = (x - x.mean()) * layers[layer].ln_1.weight
                    value = inputs @ attention.c_attn.weight[:, 96 + 8 * head : 96 + 8 * head + 8]
                    written = value @ attention.c_proj.weight[8 * head : 8 * head + 8]
                    written = written - written.mean()
                order = (unembedding @ (written * norm.weight)).argsort(descending=True).tolist()
                of_names.append((name in order[:5], name in order[-5:]))
            found.append(of_names)
    return torch.tensor(found).double()  # (heads of later layers, names, highest and lowest)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_columns_are_those_of_plain_hooks(kind):
    model, drawn = random_norms(language_model(kind)), prompts()
    table = movers(model)
    effects, differences, weights = [], [], []
    for prompt in drawn:
        effect, difference = direct_effects(model, prompt)
        last = weights_of(model, prompt.ids[None])[:, 0, :, -1].flatten(0, 1)
        effects.append(effect)
        differences.append(difference)
        weights.append(last[:, list(prompt.places)])
    effects, weights = torch.stack(effects), torch.stack(weights)
    clusters = torch.tensor([prompt.template for prompt in drawn])
    columns = {
        "attention_indirect": weights[..., 0],
        "attention_subject": weights[..., 1:].sum(-1),
        "preference": weights[..., 0] - weights[..., 1:].sum(-1),
        "logit": effects,
    }
    assert len(table.rows) == HEADS * LAYERS
    for index, row in enumerate(table.rows):
        assert (row.layer, row.head) == (index // HEADS, index % HEADS)
        for name, values in columns.items():
            expected = jackknife(values[:, index], clusters)
            assert row.statistics[name] == pytest.approx(expected, rel=1e-10, abs=1e-10)
    of_names = torch.stack([copies(model, prompt) for prompt in drawn[:5]])
    assert 0 < of_names.mean() < 0.5
    for index, row in enumerate(table.rows):
        for name, part in (("copying", 0), ("negative_copying", 1)):
            if row.layer == 0:
                assert math.isnan(row.statistics[name].value)
            else:
                values = of_names[:, index - HEADS, :, part]
                expected = jackknife(values.flatten(), clusters[:5].repeat_interleave(2))
                assert row.statistics[name] == pytest.approx(expected)
    measured = table.metadata["measured"]
    assert measured["logit"]["value"] == pytest.approx(torch.stack(differences).mean().item(), rel=1e-10)
    assert measured["solved"] == pytest.approx((torch.stack(differences) > 0).double().mean().item())


def test_prompts_ask_for_the_other_name_and_have_both_orders():
    tokenizer, drawn = tiny.tokenizer("decoder"), prompts()
    first = []
    for prompt in drawn:
        words = tokenizer.convert_ids_to_tokens(prompt.ids)
        indirect, *subjects = (words[place] for place in prompt.places)
        answer, wrong = tokenizer.convert_ids_to_tokens([prompt.answer, prompt.wrong])
        assert (indirect, subjects) == (answer, [wrong, wrong])
        assert {indirect, wrong} <= set(OWN_NAMES)
        assert words.count(answer) == 1
        assert prompt.places[1] < prompt.places[2]
        assert prompt.places[0] < prompt.places[2]
        first.append((prompt.template, prompt.places[0] < prompt.places[1]))
    assert sorted(first) == sorted([(each, order) for each in range(3) for order in (False, True)] * 2)


def test_tests_are_those_of_student_and_hochberg():
    stats = pytest.importorskip("scipy.stats")
    table = movers(language_model("gpt2"), copied=0)
    frame, sem = table.table(), table.sem()

    def above(name, sign):
        return stats.t.sf(sign * frame[name] / sem[name], 2)

    for kind, sign in (("name_mover", 1), ("negative", -1)):
        p = [max(pair) for pair in zip(above("preference", 1), above("logit", sign), strict=True)]
        assert frame[f"{kind}_p"].tolist() == pytest.approx(p)
        assert frame[f"{kind}_q"].tolist() == pytest.approx(stats.false_discovery_control(p).tolist())
        found = [(row.layer, row.head) for row in table.found(kind, 0.6)]
        passed = frame[frame[f"{kind}_q"] <= 0.6].sort_values("logit", ascending=sign < 0)
        assert found == list(zip(passed["layer"], passed["head"], strict=True))
    assert frame["logit_p"].tolist() == pytest.approx((2 * stats.t.sf(abs(frame["logit"] / sem["logit"]), 2)).tolist())
    assert math.isnan(frame["copying"][10])
    assert table.plot(kind="scatter", against="preference").has_data()
    with pytest.raises(hw.InputError, match="^kind: expected one of name_mover, negative, got 'other'"):
        table.found("other")


def test_an_encoder_is_refused_by_name():
    with pytest.raises(hw.InputError, match="^model: expected a causal decoder, .*, got BertForMaskedLM, whose logits"):
        movers(language_model("bert"))


def test_unusable_names_and_templates_are_refused():
    model = language_model("llama")
    with pytest.raises(hw.InputError, match="^tokenizer: expected at least 8 names of one token each.*, got 0 of 72; "):
        movers(model, names=NAMES)
    with pytest.raises(hw.InputError, match="got 7 of 8"):
        movers(model, names=[*OWN_NAMES[:7], "unknown"])
    for template in ("w7 {A} {B}", "w7 {B} {A} {C} w9", "w7 {A} {B} {C} w9 ", "w7 {A} {B} {C} {A}", 3):
        with pytest.raises(hw.InputError, match="^templates: expected texts with {A}, {B} and {C} once each"):
            movers(model, templates=[template, OWN_TEMPLATES[0]])


def test_templates_and_names_are_distinct():
    assert len(set(TEMPLATES)) == len(TEMPLATES) == 16
    assert len(set(NAMES)) == len(NAMES)


def test_a_slow_tokenizer_is_refused(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *tiny.WORDS]))
    tokenizer = transformers.BertTokenizer.from_pretrained(tmp_path)
    tokenizer.__class__ = type("Slow", (type(tokenizer),), {"is_fast": False})
    with pytest.raises(hw.InputError, match="^tokenizer: expected a fast tokenizer, .*, got Slow"):
        hw.name_movers(language_model("llama"), tokenizer)
