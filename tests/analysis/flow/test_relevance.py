"""Maps of relevance, compared with whole matrices in float64, with loops over patches, and with models whose relevance
is known.
"""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
import transformers
from PIL import Image

import headwise as hw
import multimodal
import tiny
from headwise.analysis.flow import relevance as module
from headwise.analysis.flow.relevance import (
    ATTENTION,
    GRADIENT,
    OCCLUSION,
    ROLLOUT,
    mean_agreement,
    relevance,
    spatial_spearman,
)
from headwise.analysis.page import page_contents
from headwise.errors import InputError

OF_ATTENTION = (GRADIENT, ROLLOUT, ATTENTION)

SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 37}
VISION = SIZES | {"image_size": 30, "patch_size": 6}
"""A picture of 5 x 5 patches and a class token."""


def built(architecture, config, implementation):
    """Return a tiny model in float64, in which all parameters are random."""
    torch.manual_seed(2)
    return tiny.with_distinct_heads(architecture._from_config(config, attn_implementation=implementation)).double()


def vit(implementation="sdpa"):
    return built(transformers.ViTForImageClassification, transformers.ViTConfig(**VISION, num_labels=7), implementation)


def picture(seed=5):
    return torch.randn(1, 3, 30, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def seen_by(model, seed=5):
    """Return the view of a vision model on a picture of 5 x 5 patches, after a class token."""
    return hw.view(model, None, images=picture(seed))


# -- oracle ------------------------------------------------------------------------------------------------------------


def weights_and_gradients(model, inputs, paths, score):
    """Run a model with eager attention. Return for each module in `paths` its attention weights and the gradient of the
    score with respect to them (None where the score does not depend on them), in the order of the run.
    """
    found = []

    def keep(_module, _args, output):
        weights = [each for each in output if isinstance(each, torch.Tensor) and each.ndim == 4][-1]
        weights.retain_grad()
        found.append(weights)

    hooks = [model.get_submodule(path).register_forward_hook(keep) for path in paths]
    softmax = F.softmax
    with pytest.MonkeyPatch.context() as patch:  # transformers asks for float32
        patch.setattr(F, "softmax", lambda scores, dim, dtype=None: softmax(scores, dim))
        score(model(**inputs)).backward()
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    return [(each[0].detach(), None if each.grad is None else each.grad[0]) for each in found]


def oracle(steps, sizes, query, residual=0.5):
    """Return rows of two products of whole matrices over the tokens of all streams, by the definition: the
    gradient-weighted relevance R, and the rollout.

    Args:
        steps: for each attention call (stream of queries, stream of keys, weights, gradients); for a link between
            streams its matrix (later tokens x earlier tokens), and None in place of gradients.
        sizes: number of tokens of each stream.
        query: stream and index of the query.
    """
    starts = dict(zip(sizes, torch.tensor([0, *sizes.values()]).cumsum(0).tolist(), strict=False))
    total = sum(sizes.values())
    parts = {name: slice(starts[name], starts[name] + size) for name, size in sizes.items()}
    relevant = rolled = torch.eye(total, dtype=torch.float64)
    for queries, keys, weights, gradients in steps:
        update, kept = torch.zeros(total, total, dtype=torch.float64), torch.eye(total, dtype=torch.float64)
        share = torch.zeros_like(update)
        if gradients is None:
            update[parts[queries], parts[keys]] = share[parts[queries], parts[keys]] = weights
        else:
            update[parts[queries], parts[keys]] = (weights * gradients).clamp(min=0).mean(0)
            share[parts[queries], parts[keys]] = (1 - residual) * weights.mean(0)
            kept[parts[queries], parts[queries]] *= residual
        relevant = relevant + update @ relevant
        rolled = (kept + share) @ rolled
    row = starts[query[0]] + query[1] % sizes[query[0]]
    return {name: {GRADIENT: relevant[row, part], ROLLOUT: rolled[row, part]} for name, part in parts.items()}


TOLERANCE = {"sdpa": 1e-9, "eager": 1e-5}
"""Tolerance by attention implementation: eager attention of transformers has a softmax in float32."""


def require_maps(result, expected, tolerance=1e-9):
    for name, values in expected.items():
        torch.testing.assert_close(result.of(name).values, values, rtol=tolerance, atol=tolerance)


# -- maps of attention -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_maps_of_a_vision_transformer_equal_whole_matrices(implementation):
    found = weights_and_gradients(
        vit("eager"),
        {"pixel_values": picture()},
        [f"vit.layers.{layer}.attention" for layer in range(2)],
        lambda output: output.logits[0].log_softmax(-1)[3],
    )
    expected = oracle([("t", "t", *each) for each in found], {"t": 26}, ("t", 0))["t"]
    expected[ATTENTION] = found[-1][0].mean(0)[0]
    model = vit(implementation)
    result = relevance(model, seen_by(model), 3, methods=OF_ATTENTION, steps=0)
    require_maps(result, expected, TOLERANCE[implementation])
    assert result.patches == tuple(range(1, 26))
    assert (result.left_out, result.word, result.query) == ((), "LABEL_3", (0, 0))
    assert (expected[GRADIENT][1:] > 0).sum() > 20  # the oracle is not trivial


NAMES = {
    "llama": "LlamaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "mistral": "MistralForCausalLM",
}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "gemma2, softcap", "gpt-oss, sinks", "mistral, window 4"])
def test_maps_of_decoders_with_grouped_heads_equal_whole_matrices(name, implementation):
    if implementation == "sdpa" and name in tiny.EAGER_ONLY:
        pytest.skip("transformers has eager attention alone")

    def model_of(implementation):
        return built(getattr(transformers, NAMES[name.partition(",")[0]]), tiny.configs()[name], implementation)

    eager, model = model_of("eager"), model_of(implementation)
    dtype = torch.float64
    if name.startswith("gpt-oss"):  # its experts compute in one dtype
        eager, model, dtype = eager.float(), model.float(), torch.float32
    text = " ".join(tiny.WORDS[:11])
    ids = tiny.tokenizer("decoder")(text, return_tensors="pt")["input_ids"]
    layers = [f"model.layers.{layer}.self_attn" for layer in range(3)]
    token = int(ids[0, 9])
    found = weights_and_gradients(
        eager, {"input_ids": ids}, layers, lambda output: output.logits[0, 8].to(dtype).log_softmax(-1)[token]
    )
    steps = [("t", "t", weights.double(), gradients.double()) for weights, gradients in found]
    expected = oracle(steps, {"t": 11}, ("t", 8), residual=0.3)["t"]
    expected[ATTENTION] = steps[-1][2].mean(0)[8]
    seen = hw.view(model, tiny.tokenizer("decoder"), text)
    result = relevance(model, seen, tiny.WORDS[9], methods=OF_ATTENTION, steps=0, residual=0.3)
    require_maps(result, expected, 1e-4 if dtype == torch.float32 else TOLERANCE[implementation])
    assert bool((result.of(GRADIENT).values[9:] == 0).all())  # later tokens
    assert result.query == (0, 9)


def test_the_rollout_equals_that_of_token_rollout():
    model, tokenizer = tiny.model("decoder", top="ForCausalLM"), tiny.tokenizer("decoder")
    (text,) = tiny.texts(17)
    result = relevance(model, hw.view(model, tokenizer, text), 14, methods=[ROLLOUT], steps=0)
    rolled = hw.token_rollout(model, tokenizer, text, queries=[-4])
    torch.testing.assert_close(result.of(ROLLOUT).values, rolled.weights[0].double(), rtol=1e-5, atol=1e-6)


def test_row_blocks_of_long_sequences_equal_one_block(monkeypatch):
    model = vit()
    seen = seen_by(model)
    whole = relevance(model, seen, methods=OF_ATTENTION, steps=0)
    monkeypatch.setattr(module, "ROW_BLOCK_BYTES", 4 * 6 * 26 * 7)  # seven rows
    blocks = relevance(model, seen, methods=OF_ATTENTION, steps=0)
    require_maps(blocks, {each.method: each.values for each in whole.maps}, 1e-12)


def encoder_decoder(name, implementation):
    sizes = {"vocab_size": 97, "d_model": 48, "decoder_start_token_id": 0, "pad_token_id": 0}
    if name == "t5":
        config = transformers.T5Config(**sizes, num_layers=2, num_heads=6, d_kv=11, d_ff=37)
        return built(transformers.T5ForConditionalGeneration, config, implementation)
    kinds = ("encoder", "decoder")
    sizes |= {f"{kind}_{size}": number for kind in kinds for size, number in (("layers", 2), ("ffn_dim", 37))}
    config = transformers.BartConfig(**sizes, encoder_attention_heads=6, decoder_attention_heads=6)
    return built(transformers.BartForConditionalGeneration, config, implementation)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_relevance_passes_through_cross_attention(name, implementation):
    model, eager = encoder_decoder(name, implementation), encoder_decoder(name, "eager")
    tokenizer, (source, target) = tiny.tokenizer("decoder"), tiny.texts(9, 5)
    seen = hw.view(model, tokenizer, source, target=target)
    inputs = {name: seen.run.inputs[name] for name in ("input_ids", "decoder_input_ids")}
    token = int(inputs["decoder_input_ids"][0, 4])
    if name == "t5":
        layers = [(f"encoder.block.{i}.layer.0.SelfAttention", "source", "source") for i in range(2)]
        for i in range(2):
            layers.append((f"decoder.block.{i}.layer.0.SelfAttention", "target", "target"))
            layers.append((f"decoder.block.{i}.layer.1.EncDecAttention", "target", "source"))
    else:
        layers = [(f"model.encoder.layers.{i}.self_attn", "source", "source") for i in range(2)]
        for i in range(2):
            layers.append((f"model.decoder.layers.{i}.self_attn", "target", "target"))
            layers.append((f"model.decoder.layers.{i}.encoder_attn", "target", "source"))
    found = weights_and_gradients(
        eager, inputs, [path for path, *_ in layers], lambda output: output.logits[0, 3].log_softmax(-1)[token]
    )
    steps = [(queries, keys, *each) for (_, queries, keys), each in zip(layers, found, strict=True)]
    expected = oracle(steps, {"source": 9, "target": 5}, ("target", 3))
    wanted = expected["source"] | {ATTENTION: found[-1][0].mean(0)[3]}
    index = int(seen.texts[1].word_of[4])
    result = relevance(model, seen, index, methods=OF_ATTENTION, steps=0)
    require_maps(result, wanted, TOLERANCE[implementation])
    assert (result.side, result.query) == (0, (1, 4))


class Double:
    """Processor whose numbers are in float64."""

    def __init__(self, processor):
        self._processor = processor

    def __call__(self, **options):
        outputs = self._processor(**options)
        return {name: each.double() if each.is_floating_point() else each for name, each in outputs.items()}

    def __getattr__(self, name):
        return getattr(self._processor, name)


def viewed_llava(implementation="sdpa", strategy="default"):
    """Return LLaVA in float64, whose language model reads the last layer but one of its tower, and its view. With the
    strategy "full" it also reads the class token.
    """
    case = multimodal.case("LLaVA")
    case.model.config.vision_feature_select_strategy = case.processor.vision_feature_select_strategy = strategy
    case.model.double().set_attn_implementation(implementation)
    return case.model, hw.view(case.model, Double(case.processor), case.prompt(1), images=case.picture((60, 60)))


@pytest.mark.parametrize("strategy", ["default", "full"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_maps_of_llava_pass_from_the_prompt_to_the_vision_tower(implementation, strategy):
    model, seen = viewed_llava(implementation, strategy)
    eager, _ = viewed_llava("eager", strategy)
    (prompt, tower), inputs = seen.texts, seen.run.inputs
    counts = [
        sum(f"{part}.{i}.self_attn" in dict(model.named_modules()) for i in range(9))
        for part in ("model.vision_tower.encoder.layers", "model.language_model.layers")
    ]
    layers = [(f"model.vision_tower.encoder.layers.{i}.self_attn", "tower", "tower") for i in range(counts[0])]
    layers += [(f"model.language_model.layers.{i}.self_attn", "prompt", "prompt") for i in range(counts[1])]
    last, token = len(prompt.tokens) - 2, int(inputs["input_ids"][0, -1])
    found = weights_and_gradients(
        eager, inputs, [path for path, *_ in layers], lambda output: output.logits[0, -2].log_softmax(-1)[token]
    )
    used = sum(gradients is not None for _, gradients in found[: counts[0]])
    assert used == counts[0] - 1
    steps = [(*each[1:], *of_call) for each, of_call in zip(layers, found, strict=True) if of_call[1] is not None]
    sizes, query = {"tower": len(tower.tokens), "prompt": len(prompt.tokens)}, ("prompt", last)
    in_prompt = (inputs["input_ids"][0] == model.config.image_token_id).nonzero()[:, 0]
    in_tower = torch.arange(strategy == "default", sizes["tower"])  # token 0 is the class token
    passed = torch.zeros(sizes["prompt"], sizes["tower"], dtype=torch.float64)
    passed[in_prompt, in_tower] = 1.0
    expected = oracle([*steps[:used], ("prompt", "tower", passed, None), *steps[used:]], sizes, query)["tower"]
    attention = torch.zeros(sizes["tower"], dtype=torch.float64)
    attention[in_tower] = found[-1][0].mean(0)[last, in_prompt]
    result = relevance(model, seen, len(prompt.words) - 1, methods=OF_ATTENTION, steps=0)
    require_maps(result, expected | {ATTENTION: attention}, TOLERANCE[implementation])
    assert (result.left_out, result.side, result.query) == ((), 1, (0, last + 1))


def test_a_path_that_is_not_known_is_refused():
    case = multimodal.case("InstructBLIP")
    seen = hw.view(case.model, case.processor, case.prompt(1), images=case.picture((60, 60)))
    word = max(index for index, each in enumerate(seen.texts[-1].words) if each.lexical)
    message = r"model: expected attention that leads from 'w\d+' to the patches.*; pass methods=\['occlusion'\]"
    with pytest.raises(InputError, match=message):
        relevance(case.model, seen, word, steps=0)
    result = relevance(case.model, seen, word, methods=[OCCLUSION], steps=0)
    assert bool((result.of(OCCLUSION).values[list(result.patches)].abs() > 0).any())


def test_tokens_that_overlapping_convolutions_mix_are_no_path():
    config = transformers.SegformerConfig(
        depths=[1] * 4, hidden_sizes=[8, 16, 24, 32], num_attention_heads=[1, 2, 3, 4], sr_ratios=[1] * 4
    )
    model = tiny.with_distinct_heads(transformers.SegformerForImageClassification(config))
    seen = hw.view(model, images=torch.rand(1, 3, 64, 64))
    with pytest.raises(InputError, match=r"model: expected attention that leads from 'LABEL_1' to the patches"):
        relevance(model, seen, 1, steps=0)


def test_a_text_that_is_only_attended_to_has_a_map():
    config = transformers.PerceiverConfig(
        num_latents=7, d_latents=48, d_model=512, image_size=32, num_blocks=1, num_self_attends_per_block=2,
        num_self_attention_heads=3, num_cross_attention_heads=1, num_labels=3,
    )  # fmt: skip
    model = tiny.with_distinct_heads(transformers.PerceiverForImageClassificationLearned(config))
    seen = hw.view(model, images=torch.rand(1, 3, 32, 32))
    result = relevance(model, seen, 1, methods=[ROLLOUT, ATTENTION], steps=0)
    # Half of the rollout stays at the latents in each of two of the calls; the last one attends to the latents alone.
    assert float(result.of(ROLLOUT).values.nansum()) == pytest.approx(0.25)
    assert float(result.of(ATTENTION).values.nansum()) == 0


@pytest.mark.parametrize("name", ["Qwen2-VL", "LLaVA-NeXT", "InternVL", "Idefics3", "Llama 3.2 Vision", "Qwen2.5-VL"])
def test_relevance_reaches_every_patch_of_families_with_tiles_windows_and_merged_patches(name):
    case = multimodal.case(name)
    seen = hw.view(case.model, case.processor, case.prompt(1), images=case.picture(case.sizes[0]))
    text = next(text for text in seen.texts if text.ids is not None and any(word.lexical for word in text.words))
    word = max(index for index, each in enumerate(text.words) if each.lexical)
    result = relevance(case.model, seen, word, steps=0)
    index = list(result.patches)
    assert result.left_out == ()
    for method in OF_ATTENTION:
        assert bool((result.of(method).values[index] > 0).all()), method
    total = result.of(ROLLOUT).values.sum()
    assert 0 < total <= 1 + 1e-5
    assert bool((result.of(OCCLUSION).values[index].abs() > 0).all())


def test_a_token_that_several_tokens_become_is_divided_among_them():
    case = multimodal.case("Qwen2-VL")
    seen = hw.view(case.model, case.processor, case.prompt(1), images=case.picture(case.sizes[0]))
    prompt, tower = seen.texts
    head = next(each for each in seen.heads if "language_model.layers.1" in each.module)
    word = max(index for index, each in enumerate(prompt.words) if each.lexical)
    result = relevance(case.model, seen, word, methods=[ATTENTION], heads=[(head.layer, 0)], steps=0)
    (query,) = ((prompt.word_of == word).nonzero()[:, 0] - 1).tolist()
    with torch.no_grad(), hw.watch(case.model, detail=hw.WeightCapture(rows=[query])) as heads:
        case.model(**seen.run.inputs)
    weights = heads.details[head.module].rows[0, 0, 0]
    of_patches = weights[[index for index, patch in enumerate(prompt.patches) if patch is not None]]
    values = result.of(ATTENTION).values
    assert len(of_patches) * 4 == len(tower.tokens)  # 2 x 2 patches are merged
    assert float(values.sum()) == pytest.approx(float(of_patches.sum()), rel=1e-5)
    assert sorted(values.tolist()) == pytest.approx(sorted((of_patches / 4).repeat(4).tolist()), rel=1e-4)


def test_the_map_of_chosen_heads_is_their_mean():
    eager, model = vit("eager"), vit()
    with torch.no_grad():
        weights = eager(picture(), output_attentions=True).attentions
    expected = (weights[0][0, 4, 0] + weights[1][0, 2, 0] + weights[1][0, 5, 0]) / 3
    options = {"methods": [ATTENTION], "steps": 0}
    result = relevance(model, seen_by(model), 3, heads=[(0, 4), "1.2", (1, 5)], **options)
    require_maps(result, {ATTENTION: expected}, 1e-6)
    with pytest.raises(InputError, match=r"head: expected .*, got \(2, 0\)"):
        relevance(model, seen_by(model), 3, heads=[(2, 0)], **options)


class MeanOfTokens(torch.nn.Module):
    """Classifier that averages the tokens of a vision transformer."""

    def __init__(self):
        super().__init__()
        self.vit = vit()

    def forward(self, pixel_values):
        return self.vit.vit(pixel_values).last_hidden_state.mean(1)


def test_the_query_of_a_model_that_averages_its_tokens_is_their_mean():
    model = MeanOfTokens().eval()
    seen = seen_by(model)
    result = relevance(model, seen, score=lambda output: output[0, 3], methods=[ROLLOUT, ATTENTION], steps=0)
    with torch.no_grad():
        weights = vit("eager").vit(picture(), output_attentions=True).attentions
    one, two = (each[0].mean(0) / 2 + torch.eye(26) / 2 for each in weights)
    require_maps(result, {ROLLOUT: (two @ one).mean(0), ATTENTION: weights[1][0].mean((0, 1))}, 1e-6)


# -- attention in parts, and attention written by hand -----------------------------------------------------------------


class Attention(torch.nn.Module):
    """Self-attention of 3 heads over tokens of width 21, in one of several forms."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.qkv, self.out = torch.nn.Linear(21, 63), torch.nn.Linear(21, 21)

    def attend(self, q, k, v):
        if self.form == "by hand":
            return ((q @ k.mT / 7**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (3, 7)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        if self.form == "parts of queries":
            out = torch.cat([self.attend(part, k, v) for part in q.split([4, 6], 2)], 1)
        elif self.form == "windows":
            parts = zip(*(each.split([4, 6], 2) for each in (q, k, v)), strict=True)
            out = torch.cat([self.attend(*part) for part in parts], 1)
        else:
            out = self.attend(q, k, v)
        return self.out(out)


class Layers(torch.nn.Module):
    """Classifier of three layers of attention; the score is read at the last token."""

    def __init__(self, *forms):
        super().__init__()
        torch.manual_seed(4)
        self.layers = torch.nn.ModuleList(Attention(form) for form in forms)
        self.top = torch.nn.Linear(21, 5)
        tiny.with_distinct_heads(self).double()

    def forward(self, pixel_values):
        x = pixel_values[:, :, 0].mT
        for layer in self.layers:
            x = x + layer(x)
        return self.top(x[:, -1])


def ten_tokens(seed=1):
    """Return a "picture" of 10 patches in a row, with 21 channels."""
    return torch.randn(1, 21, 1, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def score_of(token):
    """Return the log-probability of a class as a score."""
    return lambda output: output[0].log_softmax(-1)[token]


def by_differentiation(model, pixels, target):
    """Return the maps of a stack of `Layers` from whole matrices, of which the gradients are those of autograd."""
    x, steps, found = pixels[:, :, 0].mT, [], []
    for layer in model.layers:
        q, k, v = (each.unflatten(-1, (3, 7)).transpose(1, 2) for each in layer.qkv(x).chunk(3, -1))
        scores = q @ k.mT / 7**0.5
        if layer.form == "windows":
            part = torch.arange(10) >= 4
            scores = scores.masked_fill(part[:, None] != part, -torch.inf)
        found.append(scores.softmax(-1))
        x = x + layer.out((found[-1] @ v).transpose(1, 2).flatten(2))
    gradients = torch.autograd.grad(model.top(x[:, -1])[0].log_softmax(-1)[target], found)
    for weights, gradient in zip(found, gradients, strict=True):
        steps.append(("t", "t", weights[0].detach(), gradient[0]))
    return oracle(steps, {"t": 10}, ("t", 9))["t"]


@pytest.mark.parametrize(
    "forms",
    [
        ("sdpa", "sdpa", "sdpa"),
        ("by hand", "sdpa", "by hand"),
        ("parts of queries", "windows", "sdpa"),
        ("windows",) * 3,
    ],
)
def test_attention_by_hand_in_parts_and_in_windows(forms):
    model, pixels = Layers(*forms), ten_tokens()
    seen = hw.view(model, None, images=pixels)
    result = relevance(model, seen, score=score_of(2), methods=[GRADIENT, ROLLOUT], steps=0)
    require_maps(result, by_differentiation(model, pixels, 2))


def test_a_model_whose_heads_are_not_weights_times_values_is_refused():
    class Noisy(Attention):
        def attend(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5).transpose(1, 2).flatten(2)

    model = Layers("sdpa", "sdpa")
    seen = hw.view(model, None, images=ten_tokens())
    seen = replace(seen, run=replace(seen.run, last_row=None))  # by which the change would be noticed
    model.layers[1].__class__ = Noisy
    with pytest.raises(InputError, match=r"head outputs that are finite weights times values, got .* in layers\.1"):
        relevance(model, seen, score=score_of(2), methods=[GRADIENT], steps=0)


# -- occlusion, and models whose relevance is known --------------------------------------------------------------------


def test_occlusion_equals_a_loop_over_patches():
    model = vit()
    seen, pixels = seen_by(model), picture()

    def score(pixels):
        with torch.no_grad():
            return model(pixels).logits[0].log_softmax(-1)[3]

    mean = pixels.mean((0, 2, 3))
    for size in (1, 3):
        expected = []
        for row in range(5):
            for column in range(5):
                occluded = pixels.clone()
                for i in range(max(row - size // 2, 0), min(row + size // 2, 4) + 1):
                    for j in range(max(column - size // 2, 0), min(column + size // 2, 4) + 1):
                        occluded[0, :, 6 * i : 6 * i + 6, 6 * j : 6 * j + 6] = mean[:, None, None]
                expected.append(score(pixels) - score(occluded))
        result = relevance(model, seen, 3, methods=[OCCLUSION], neighbourhood=size, steps=0, batch_size=4)
        values = result.of(OCCLUSION).values
        torch.testing.assert_close(values[1:], torch.stack(expected), rtol=0, atol=1e-10)
        assert math.isnan(values[0])
        assert result.of(OCCLUSION).agreement is None
        assert result.score == pytest.approx(float(score(pixels)), abs=1e-10)
        everything = mean[:, None, None].expand(1, 3, 30, 30)
        assert result.baseline_score == pytest.approx(float(score(everything)), abs=1e-10)


def test_the_grid_of_patches_and_their_neighbours():
    case = multimodal.case("SmolVLM")  # parts of a picture, and the whole of it
    seen = hw.view(case.model, case.processor, case.prompt(1), images=case.picture(case.sizes[0]))
    scorer = module._Scorer(case.model, seen, 1)
    boxes = [seen.texts[scorer.side].patches[index] for index in scorer.patches.tolist()]
    assert len({box.picture for box in boxes}) == 2
    square = scorer.neighbours(3)
    for box, of_box in zip(boxes, square, strict=True):
        for other, is_neighbour in zip(boxes, of_box.tolist(), strict=True):
            across, down = abs(box.left - other.left) / box.width, abs(box.top - other.top) / box.height
            assert is_neighbour == (box.picture == other.picture and max(across, down) < 1.5)
    assert torch.equal(scorer.neighbours(1), torch.eye(len(boxes), dtype=torch.bool))


def test_an_occluded_patch_has_the_mean_colour_of_its_picture():
    case = multimodal.case("Qwen2-VL")
    picture = case.picture((90, 45))
    mean = Image.new("RGB", picture.size, tuple(np.array(picture).mean((0, 1)).round().astype(int).tolist()))
    seen = hw.view(case.model, case.processor, case.prompt(1), images=picture)
    inputs, blank = case.inputs(picture), case.inputs(mean)
    scorer = module._Scorer(case.model, seen, 1)
    calls = []
    hook = case.model.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True)
    scorer.predictions = [module._Prediction("score", lambda output: output.logits.sum())]
    hidden = torch.zeros(1, len(scorer.patches), dtype=torch.bool)
    hidden[0, 5] = True
    with torch.no_grad():
        scorer(hidden)
    hook.remove()
    pixels = calls[0]["pixel_values"]
    is_occluded = torch.arange(len(pixels)) == scorer.patches[5]  # one row is one patch of the tower
    torch.testing.assert_close(pixels[~is_occluded], inputs["pixel_values"][~is_occluded], rtol=0, atol=0)
    torch.testing.assert_close(pixels[is_occluded], blank["pixel_values"][is_occluded], rtol=0, atol=1e-6)


def test_an_occluded_word_has_the_mean_embedding_of_the_text():
    model, tokenizer = tiny.model("decoder", top="ForCausalLM").double(), tiny.tokenizer("decoder")
    (text,) = tiny.texts(9)
    seen = hw.view(model, tokenizer, text)
    result = relevance(model, seen, 8, methods=[OCCLUSION], steps=0, batch_size=4)
    ids = seen.run.inputs["input_ids"]
    embedded = model.get_input_embeddings()(ids).detach()
    with torch.no_grad():
        for place in range(9):
            changed = embedded.clone()
            changed[0, place] = embedded[0].mean(0)
            before, after = (
                model(inputs_embeds=each).logits[0, 7].log_softmax(-1)[ids[0, 8]] for each in (embedded, changed)
            )
            assert float(result.of(OCCLUSION).values[place]) == pytest.approx(float(before - after), abs=1e-10)
    assert result.table()["word"].tolist() == text.split()


class Uniform(torch.nn.Module):
    """Uniform attention over tokens: the output is the mean of linear functions of the tokens."""

    def __init__(self):
        super().__init__()
        self.value = torch.nn.Linear(4, 4, bias=False)
        torch.nn.init.normal_(self.value.weight)

    def forward(self, x):
        values = self.value(x).unflatten(-1, (2, 2)).transpose(1, 2)
        queries = torch.zeros_like(values) * values  # zero scores that depend on the input
        return F.scaled_dot_product_attention(queries, values, values).transpose(1, 2).flatten(2)


class Linear(torch.nn.Module):
    """Model whose only layer is uniform attention over the columns of a picture."""

    def __init__(self):
        super().__init__()
        self.attention = Uniform()
        self.double()

    def forward(self, pixel_values):
        return self.attention(pixel_values[:, :, 0].mT)


def nine_tokens():
    """Return a "picture" of 9 patches in a row, with 4 channels."""
    return torch.randn(1, 4, 1, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(8))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_linear_model_has_the_known_relevance(batch_size):
    model, pixels = Linear().eval(), nine_tokens()
    factors = torch.randn(4, dtype=torch.float64)
    values = pixels[0, :, 0].T @ model.attention.value.weight.detach().T
    by_head = (values * factors).view(9, 2, 2).sum(-1) / 9  # what each token adds to the score
    effects = by_head.sum(-1)
    total, above_mean = float(effects.sum()), effects - effects.mean()
    seen = hw.view(model, None, images=pixels)
    options = {"steps": 4, "orders": 3, "batch_size": batch_size}
    result = relevance(model, seen, score=lambda output: output[0, 4] @ factors, **options)
    torch.testing.assert_close(result.of(OCCLUSION).values, above_mean)
    query = torch.ones(9, dtype=torch.float64) / 9  # all tokens attend in the same way
    torch.testing.assert_close(result.of(ATTENTION).values, query)
    torch.testing.assert_close(
        result.of(GRADIENT).values, by_head.clamp(min=0).mean(-1) + F.one_hot(torch.tensor(4), 9)
    )
    assert all(math.isnan(number) for number in result.of(ATTENTION).agreement)  # a constant map
    assert (result.score, result.baseline_score) == pytest.approx((total, total), abs=1e-12)
    curves, largest_first = result.of(OCCLUSION).curves, above_mean.sort(descending=True).values
    counts = [0, 2, 4, 6, 9]
    shown = torch.stack([largest_first[:count].sum() for count in counts])
    torch.testing.assert_close(curves.insertion, total + shown)
    torch.testing.assert_close(curves.deletion, total - shown)
    torch.testing.assert_close(curves.shares, torch.tensor(counts).double() / 9)


class Cubic(Linear):
    """A model in which a patch of the mean colour is not the mean of the patches."""

    def forward(self, pixel_values):
        return super().forward(pixel_values**3)


@pytest.mark.parametrize("mixing", ["refuses", "mixes", "keeps apart"])
def test_models_that_do_not_accept_batches_run_one_by_one(mixing):
    sizes = []

    class Model(Cubic):
        def forward(self, pixel_values):
            sizes.append(len(pixel_values))
            if mixing == "refuses" and len(pixel_values) > 1:
                raise RuntimeError("one example alone")
            out = super().forward(pixel_values)
            return out - out.mean(0) + out[:1] if mixing == "mixes" else out

    def result_of(model, batch_size):
        seen = hw.view(model.eval(), None, images=nine_tokens())
        sizes.clear()
        options = {"methods": [OCCLUSION], "steps": 0, "batch_size": batch_size}
        return relevance(model, seen, score=lambda output: (output[0] + 0.1).square().sum(), **options)

    torch.manual_seed(0)
    result = result_of(Model(), 4)
    assert sizes == [1] + ([1, 1, 2, 4, 4, 1] if mixing == "keeps apart" else [1, 1, 2] + [1] * 9)
    torch.manual_seed(0)
    alone = result_of(Cubic(), 1)
    torch.testing.assert_close(result.of(OCCLUSION).values, alone.of(OCCLUSION).values)


def test_several_words_share_the_runs_with_occluded_patches():
    model, seen = viewed_llava()
    calls = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    words = [index for index, each in enumerate(seen.texts[0].words) if each.lexical and index][-2:]
    together = relevance(model, seen, words, steps=0, batch_size=7)
    hook.remove()
    # the complete input, a change of each word, two ends, the backward pass, the check of batches, 49 patches
    assert sorted(calls) == [1] * 6 + [2] + [7] * 7
    assert [each.word for each in together] == [seen.texts[0].words[index].text for index in words]
    for word, result in zip(words, together, strict=True):
        alone = relevance(model, seen, word, steps=0)
        for each in result.maps:
            values = alone.of(each.method).values
            torch.testing.assert_close(each.values, values, equal_nan=True, rtol=1e-9, atol=1e-9)


# -- curves and agreement ----------------------------------------------------------------------------------------------


def test_deletion_and_insertion_curves_equal_an_independent_computation():
    model = vit()
    result = relevance(model, seen_by(model), 3, steps=7, orders=3, seed=9)

    @torch.no_grad()
    def probability(hidden):
        pixels, mean = picture(), picture().mean((0, 2, 3))
        for patch in hidden:
            row, column = divmod(patch, 5)
            pixels[0, :, 6 * row : 6 * row + 6, 6 * column : 6 * column + 6] = mean[:, None, None]
        return float(model(pixels).logits[0].softmax(-1)[3])

    def curves(order):
        counts = [25 * step // 7 for step in range(8)]
        return [[probability(order[:n]) for n in counts], [probability(order[n:]) for n in counts]]

    def area(values):
        counts = [25 * step // 7 for step in range(8)]
        return sum(
            (b - a) / 25 * (x + y) / 2 for a, b, x, y in zip(counts, counts[1:], values, values[1:], strict=False)
        )

    generator = torch.Generator().manual_seed(9)
    of_random = [curves(torch.randperm(25, generator=generator).tolist()) for _ in range(3)]
    for each in result.maps:
        values = each.values[1:].tolist()
        deletion, insertion = curves(sorted(range(25), key=lambda patch: -values[patch]))
        for kind, curve, place in (("deletion", deletion, 0), ("insertion", insertion, 1)):
            torch.testing.assert_close(
                getattr(each.curves, kind), torch.tensor(curve, dtype=torch.float64), rtol=0, atol=1e-10
            )
            random = torch.tensor([pair[place] for pair in of_random], dtype=torch.float64)
            torch.testing.assert_close(getattr(each.curves, f"random_{kind}"), random, rtol=0, atol=1e-10)
            assert each.curves.area(kind) == pytest.approx(area(curve), abs=1e-10)
            differences = [area(curve) - area(pair[place]) for pair in of_random]
            low, high = scipy.stats.t.interval(0.95, 2, sum(differences) / 3, scipy.stats.sem(differences))
            wanted = (sum(differences) / 3, low, high)
            assert each.curves.difference(kind) == pytest.approx(wanted, abs=1e-10)


def grid_of(rows, columns):
    return torch.tensor([(0, row, column) for row in range(rows) for column in range(columns)]).double()


def test_the_correlation_is_that_of_ranks_and_the_interval_that_of_independent_values():
    grid, generator = grid_of(30, 30), torch.Generator().manual_seed(3)
    x = torch.randn(900, dtype=torch.float64, generator=generator)
    y = x + torch.randn(900, dtype=torch.float64, generator=generator)
    x[:50] = 0.0  # ties
    correlation, low, high = spatial_spearman(x, y, grid)
    assert correlation == pytest.approx(scipy.stats.spearmanr(x, y).statistic, abs=1e-12)
    width = 1.96 * math.sqrt((1 + correlation**2 / 2) / 897)
    independent = math.tanh(math.atanh(correlation) - width), math.tanh(math.atanh(correlation) + width)
    assert (low, high) == pytest.approx(independent, abs=0.01)


def test_the_interval_is_wider_for_smooth_maps_and_ignores_distances_between_pictures():
    generator = torch.Generator().manual_seed(3)
    smooth = [
        F.avg_pool2d(torch.randn(1, 1, 16, 16, dtype=torch.float64, generator=generator), 5, 1, 0).flatten()
        for _ in range(2)
    ]
    grid = grid_of(12, 12)
    _, low, high = spatial_spearman(*smooth, grid)
    order = torch.randperm(144, generator=generator)
    _, shuffled_low, shuffled_high = spatial_spearman(*(each[order] for each in smooth), grid)
    assert high - low > 1.5 * (shuffled_high - shuffled_low)
    pictures = torch.cat([grid, grid + torch.tensor([1.0, 1000.0, 0.0])])
    twice = [torch.cat([each, each.flip(0)]) for each in smooth]
    one = spatial_spearman(*twice, pictures)
    other = spatial_spearman(*twice, torch.cat([grid, grid + torch.tensor([1.0, 0.0, 3.0])]))
    assert one == pytest.approx(other)
    assert one[2] - one[1] < high - low


def test_correlations_that_are_not_defined():
    grid = grid_of(1, 5)
    assert all(math.isnan(each) for each in spatial_spearman(torch.ones(5), torch.arange(5.0), grid))
    assert all(math.isnan(each) for each in spatial_spearman(torch.arange(3.0), torch.arange(3.0), grid[:3]))
    with pytest.raises(InputError, match="y: expected finite values, got NaN or infinity"):
        spatial_spearman(torch.arange(5.0), torch.full((5,), torch.nan), grid)
    correlation, low, high = spatial_spearman(torch.arange(5.0), torch.arange(5.0), grid)
    assert correlation == pytest.approx(1.0)
    assert low < high <= 1.0


def smooth_maps(grid, length, rho, count, generator):
    """Draw pairs of Gaussian maps whose autocorrelation is exp(-distance / length), and whose correlation is `rho`."""
    covariance = (-torch.cdist(grid, grid) / length).exp() if length else torch.eye(len(grid), dtype=torch.float64)
    factor = torch.linalg.cholesky(covariance + 1e-9 * torch.eye(len(grid), dtype=torch.float64))
    for _ in range(count):
        x, e = torch.randn(2, len(grid), dtype=torch.float64, generator=generator) @ factor.T
        yield x, rho * x + math.sqrt(1 - rho**2) * e


SIMULATIONS = [((12, 12), length, rho, 200) for length in (0, 1, 3) for rho in (0.0, 0.6)]
LONG_SIMULATIONS = [
    pytest.param(size, length, rho, 1000, marks=pytest.mark.slow)
    for size in ((7, 7), (12, 12), (20, 20), (1, 30))
    for length in (0, 1, 2, 4)
    for rho in (0.0, 0.5, 0.8)
]
"""Rows and columns of patches, length of the autocorrelation in patches, correlation, number of maps: those of the
table in docs/relevance.md.
"""


@pytest.mark.parametrize(("size", "length", "rho", "count"), [*SIMULATIONS, *LONG_SIMULATIONS])
def test_the_interval_covers_the_true_correlation_of_smooth_maps(size, length, rho, count):
    grid, generator = grid_of(*size), torch.Generator().manual_seed(6)
    true, covered, plain = 6 / math.pi * math.asin(rho / 2), 0, 0
    for x, y in smooth_maps(grid, length, rho, count, generator):
        correlation, low, high = spatial_spearman(x, y, grid)
        covered += low <= true <= high
        width = 1.96 * math.sqrt((1 + correlation**2 / 2) / (len(grid) - 3))
        plain += math.tanh(math.atanh(correlation) - width) <= true <= math.tanh(math.atanh(correlation) + width)
    shown = f"{covered / count:.1%}, as of independent patches {plain / count:.1%}"
    print(f"{size[0]} x {size[1]} patches, length {length}, correlation {rho}: {shown}")
    assert covered >= 0.91 * count
    assert length < 3 or len(grid) < 100 or plain < 0.75 * count  # the interval of independent patches does not


def test_results_of_several_examples():
    model = vit()
    results = [relevance(model, seen_by(model, seed), 3, steps=0) for seed in range(4)]
    values = [each.of(GRADIENT).agreement[0] for each in results]
    mean, low, high = mean_agreement(results, GRADIENT)
    assert mean == pytest.approx(sum(values) / 4)
    assert (low, high) == pytest.approx(scipy.stats.t.interval(0.95, 3, mean, scipy.stats.sem(values)))
    assert math.isnan(mean_agreement(results[:1], GRADIENT)[1])
    with pytest.raises(InputError, match="method: expected a method that was compared with occlusion, got 'occlusion'"):
        mean_agreement(results, OCCLUSION)


def test_the_tables_and_the_maps_of_a_page():
    model = vit()
    seen = seen_by(model)
    result = relevance(model, seen, "label_3", steps=5, orders=2)
    table = result.table()
    assert list(table.columns) == ["token", "word", "is_patch", GRADIENT, ROLLOUT, ATTENTION, OCCLUSION]
    assert table["is_patch"].tolist() == [False] + [True] * 25
    assert table["word"].tolist()[1:3] == ["(1, 1)", "(1, 2)"]
    assert table[GRADIENT].tolist() == result.of(GRADIENT).values.tolist()
    summary = result.summary().set_index("method")
    assert summary.loc[ROLLOUT, "spearman_low"] == result.of(ROLLOUT).agreement[1]
    assert summary.loc[ROLLOUT, "deletion_difference"] == result.of(ROLLOUT).curves.difference("deletion")[0]
    assert math.isnan(summary.loc[OCCLUSION, "spearman"])
    assert repr(result) == f"Relevance('LABEL_3': {GRADIENT}, {ROLLOUT}, {ATTENTION}, {OCCLUSION}; 25 patches)"
    (passage,) = page_contents([seen.select(heads=[(0, 1)]), result]).passages
    assert [each.method for each in passage.maps] == [GRADIENT, ROLLOUT, ATTENTION, OCCLUSION]
    for each, of_page in zip(result.maps, passage.maps, strict=True):
        assert (of_page.side, of_page.target_side, of_page.target) == (0, 0, 0)
        assert of_page.agreement == each.agreement
        torch.testing.assert_close(of_page.values, each.values.float(), equal_nan=True)
        assert {len(curve) for curve in of_page.curves.values()} == {6}
        assert of_page.curves["deletion"] == each.curves.deletion.tolist()
        assert of_page.curves["random insertion"] == each.curves.random_insertion.mean(0).tolist()
        assert of_page.meaning.endswith(".")
    with pytest.raises(InputError, match="method: expected .*, got 'grad'"):
        result.of("grad")
    with pytest.raises(InputError, match="results: expected maps of relevance together with their view, got maps for"):
        page_contents([seen_by(model), result])
    assert len(page_contents([result]).passages) == 1  # a map has its view


def test_a_page_compares_models_on_the_same_pictures():
    model = vit()
    seen, other = seen_by(model), seen_by(model, 6)
    with pytest.raises(InputError, match="^against: expected views of the same pictures, got other pictures$"):
        page_contents([seen], against=[other])


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("as_user")
def test_unusable_arguments_are_refused():
    model = vit()
    seen, base = seen_by(model), vit().vit
    other = vit()
    next(other.vit.parameters()).data += 1.0
    cases = [
        ({"model": 3}, "model: expected a torch module, got int"),
        ({"seen": picture()}, "seen: expected a view, which hw.view returns, got Tensor"),
        ({"model": other}, "seen: expected a view of this model, got one of .* with other weights"),
        ({"word": []}, "word: expected a word, or a score in its place, got none"),
        ({"score": lambda out: out}, "word: expected a word, or a score in its place, got both"),
        ({"word": 7}, "word: expected a whole number from 0 to 6, got 7"),
        ({"word": "cat"}, r"word: expected a class \(LABEL_0, .*\) or its number, got 'cat'"),
        ({"methods": []}, "methods: expected at least one, got none"),
        ({"methods": ["lime"]}, "method: expected .*, got 'lime'"),
        ({"residual": 1.0}, "residual: expected a share of at least 0 and below 1, got 1.0"),
        ({"neighbourhood": 2}, "neighbourhood: expected an odd number, got 2"),
        ({"steps": -1}, "steps: expected .*, got -1"),
        ({"orders": 1}, "orders: expected .*, got 1"),
        ({"batch_size": 0}, "batch_size: expected .*, got 0"),
        ({"heads": [3]}, r"heads: expected heads \(layer, head\), got 3"),
        ({"word": None, "score": lambda out: out.logits}, r"score: .*one number, got shape \(1, 7\)"),
        ({"word": None, "score": lambda out: 1.0}, "score: .*one number, got float"),
        ({"word": None, "score": lambda out: torch.ones(())}, "score: expected a score that depends on"),
        ({"word": None, "score": lambda out: out.logits.sum() * torch.inf}, "model: expected a finite score"),
        ({"model": base, "seen": seen_by(base)}, r"model: expected logits .* of one example, got none; pass score="),
    ]
    for changes, message in cases:
        arguments = {"model": model, "seen": seen, "word": 3, "steps": 0} | changes
        with pytest.raises(InputError, match=message):
            relevance(**arguments)
    encoder = {name: tiny.model("encoder", top=f"For{name}") for name in ("MaskedLM", "TokenClassification")}
    encoder["regression"] = tiny.model("encoder", top="ForSequenceClassification", num_labels=1)
    for kind, each in encoder.items():
        seen = hw.view(each, tiny.tokenizer("encoder"), "w5 w6 w7")
        got = r"logits of two or more classes, got 1 logits" if kind == "regression" else "predicts each token from"
        with pytest.raises(InputError, match=f"model: expected .*{got}.*pass score="):
            relevance(each, seen, None if kind == "regression" else "w6")
    decoder = tiny.model("decoder", top="ForCausalLM")
    seen = hw.view(decoder, tiny.tokenizer("decoder"), "w5 w6 w7 w6")
    assert relevance(decoder, seen, "w6", methods=[ATTENTION], steps=0).query == (0, 3)
    for word, message in (
        (None, r"word: expected a word of the text \(w5, w6, w7\), got None"),
        ("w9", "word: expected words of the text .*, got 'w9'"),
        (0, "word: expected a word that is predicted from tokens before it, got 'w5'"),
    ):
        with pytest.raises(InputError, match=message):
            relevance(decoder, seen, word)


def test_numbers_that_are_not_finite_are_refused_by_name():
    model = vit()
    model.classifier.weight.data[3, 0] = torch.inf
    with pytest.raises(
        InputError, match="model: expected a finite score for every occluded input, got NaN or infinity"
    ):
        relevance(model, seen_by(model), 3, steps=0)

    def score(output):
        logit = output.logits[0, 3]
        return logit + (logit - logit.detach()).abs().sqrt()  # finite, with an infinite derivative

    with pytest.raises(InputError, match="score: expected finite gradients, got NaN or infinity in vit"):
        relevance(vit(), seen_by(vit()), score=score, steps=0)


def test_the_model_is_unchanged():
    model = vit()
    seen = seen_by(model)
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    relevance(model, seen, 3, steps=2, orders=2)
    assert model.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_words_after_the_prediction_do_not_count():
    model, tokenizer = tiny.model("decoder", top="ForCausalLM").double(), tiny.tokenizer("decoder")
    text = " ".join(tiny.WORDS[:14])
    long = relevance(model, hw.view(model, tokenizer, text), 9, steps=5, orders=3)
    short = relevance(model, hw.view(model, tokenizer, " ".join(tiny.WORDS[:10])), 9, steps=5, orders=3)
    assert long.patches == short.patches == tuple(range(9))
    for one, other in zip(long.maps[:3], short.maps[:3], strict=True):
        torch.testing.assert_close(one.values[:10], other.values, rtol=1e-9, atol=1e-12)
        assert one.agreement is not None
    with torch.no_grad():
        unchanged = relevance(model, hw.view(model, tokenizer, text), 9, steps=5, orders=3, methods=[OCCLUSION])
    assert unchanged.of(OCCLUSION).values[9:].abs().max() < 1e-12


def test_token_ids_without_an_embedding_table_are_refused():
    class Lookup(torch.nn.Module):
        """Llama that takes the rows of its embedding table by indexing."""

        def __init__(self):
            super().__init__()
            self.llama = tiny.model("decoder", top="ForCausalLM")

        def forward(self, input_ids):
            return self.llama(inputs_embeds=self.llama.get_input_embeddings().weight[input_ids])

    model = Lookup().eval()
    seen = hw.view(model, tiny.tokenizer("decoder"), "w5 w6 w7")
    with pytest.raises(InputError, match="model: expected an nn.Embedding that reads input_ids, got none"):
        relevance(model, seen, "w7", steps=0)


def test_a_model_that_was_changed_after_the_view_is_refused():
    model, tokenizer = tiny.model("decoder", top="ForCausalLM"), tiny.tokenizer("decoder")
    seen = hw.view(model, tokenizer, "w5 w6 w7")
    torch.nn.init.normal_(model.lm_head.weight)
    with pytest.raises(InputError, match="seen: expected a view of this model, got an output that differs"):
        relevance(model, seen, "w7")
    seen = hw.view(model, tokenizer, "w5 w6 w7")
    with torch.inference_mode():
        relevance(model, seen, "w7", steps=0)
    with pytest.raises(InputError, match="score: expected a gradient that is not 0, got 0 at all heads; pass methods"):
        relevance(model, seen, score=lambda output: output.logits.sum() * 0.0, methods=[GRADIENT], steps=0)


def test_words_of_a_prefix_that_is_read_in_both_directions_are_refused():
    case = multimodal.case("PaliGemma")
    seen = hw.view(case.model, case.processor, case.prompt(1), images=case.picture((60, 60)), generate=2)
    word = int(seen.texts[0].word_of[seen.texts[0].first_generated])
    assert relevance(case.model, seen, word, methods=[OCCLUSION], steps=0).query == (0, seen.texts[0].first_generated)
    message = "model: expected a model that predicts each token from .*, got logits before 'w6' that change by .* with"
    with pytest.raises(InputError, match=message):
        relevance(case.model, seen, "w6")


def test_the_classes_of_several_labels_are_independent():
    model = tiny.model("encoder", top="ForSequenceClassification", num_labels=3).double()
    model.config.problem_type = "multi_label_classification"
    seen = hw.view(model, tiny.tokenizer("encoder"), "w5 w6 w7")
    with torch.no_grad():
        expected = model(**seen.run.inputs).logits[0, 1].sigmoid().log()
    assert relevance(model, seen, 1, steps=0).score == pytest.approx(float(expected), abs=1e-10)


def test_a_name_of_several_classes_is_refused():
    model = vit()
    model.config.id2label = {**model.config.id2label, 4: "crane", 6: "crane"}
    with pytest.raises(InputError, match="^word: expected the number of a class .* got 'crane', the name of the cla"):
        relevance(model, seen_by(model), "crane")


MEMORY = """
from pathlib import Path

import torch

import headwise as hw
import tiny

torch.set_num_threads(1)
sizes = {"max_position_embeddings": 16384, "num_hidden_layers": 1, "num_attention_heads": 2}
model = tiny.model("decoder", top="ForCausalLM", **sizes)


def run(length):
    seen = hw.view(model, tiny.tokenizer("decoder"), " ".join(["w5"] * length))
    hw.relevance(model, seen, length - 1, methods=METHODS, steps=0)
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


METHODS = ("gradient-weighted attention", "attention rollout", "attention")
before = run(256)
print(run(4096) - before, run(8192) - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_memory_grows_with_the_length_and_not_with_its_square():
    root = Path(__file__).parents[3]
    paths = os.pathsep.join(str(root / part) for part in ("src", ".", "tests"))
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True, env=environment)
    shorter, longer = map(float, done.stdout.split())
    print(f"peak memory rises by {shorter:.0f} MiB at 4,096 tokens, and by {longer:.0f} MiB at 8,192")
    assert longer - shorter < 3 * 4 * 4096**2 / 2**20  # MiB by which one float32 matrix grows
