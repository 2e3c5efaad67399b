"""Maps of relevance, compared with whole matrices in float64, with loops over patches, and with models whose relevance
is known.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import scipy.stats
import torch
import torch.nn.functional as F
import transformers

import headwise as hw
import tiny
from headwise.analysis.flow import relevance as module
from headwise.analysis.flow.relevance import (
    ATTENTION,
    GRADIENT,
    OCCLUSION,
    ROLLOUT,
    CallStreams,
    InputPatches,
    PredictedToken,
    TokenStreams,
    mean_agreement,
    relevance,
    spatial_spearman,
)
from headwise.errors import InputError

OF_ATTENTION = (GRADIENT, ROLLOUT, ATTENTION)

SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 37}
VISION = SIZES | {"image_size": 30, "patch_size": 6}
"""A picture of 5 x 5 patches and a class token."""


def built(architecture, config, implementation):
    """Return a tiny model in float64, in which all parameters are random."""
    torch.manual_seed(2)
    return tiny.with_distinct_heads(architecture._from_config(config, attn_implementation=implementation)).double()


def token_of_pixels(first):
    """Return the index of the token of each pixel of a picture (1, 3, 30, 30), if the first patch is token `first`."""
    rows = torch.arange(30) // 6
    return (first + 5 * rows[:, None] + rows).expand(1, 3, 30, 30)


def vit(implementation="sdpa"):
    return built(transformers.ViTForImageClassification, transformers.ViTConfig(**VISION, num_labels=7), implementation)


def picture(seed=5):
    return torch.randn(1, 3, 30, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def vit_patches(**options):
    return InputPatches({"pixel_values": picture()}, "pixel_values", token_of_pixels(1), **options)


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
    eager, patches = vit("eager"), vit_patches()
    found = weights_and_gradients(
        eager,
        {"pixel_values": picture()},
        [f"vit.layers.{layer}.attention" for layer in range(2)],
        lambda output: output.logits[0].log_softmax(-1)[3],
    )
    expected = oracle([("t", "t", *each) for each in found], {"t": 26}, ("t", 0))["t"]
    expected[ATTENTION] = found[-1][0].mean(0)[0]
    (result,) = relevance(vit(implementation), patches, [PredictedToken(3)], methods=OF_ATTENTION, steps=0)
    require_maps(result, expected, TOLERANCE[implementation])
    assert result.patches == tuple(range(1, 26))
    assert result.left_out == ()
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
    ids = tiny.TOKENS[:1, :11]
    inputs = {"inputs_embeds": eager.get_input_embeddings()(ids).detach()}
    layers = [f"model.layers.{layer}.self_attn" for layer in range(3)]
    found = weights_and_gradients(
        eager, inputs, layers, lambda output: output.logits[0, 8].to(dtype).log_softmax(-1)[42]
    )
    steps = [("t", "t", weights.double(), gradients.double()) for weights, gradients in found]
    expected = oracle(steps, {"t": 11}, ("t", 8), residual=0.3)["t"]
    expected[ATTENTION] = steps[-1][2].mean(0)[8]
    token_of = torch.arange(11)[:, None].expand_as(inputs["inputs_embeds"])
    patches = InputPatches(inputs, "inputs_embeds", token_of)
    target = PredictedToken(42, position=-3)
    (result,) = relevance(model, patches, [target], methods=OF_ATTENTION, steps=0, residual=0.3)
    require_maps(result, expected, 1e-4 if dtype == torch.float32 else TOLERANCE[implementation])
    assert bool((result.of(GRADIENT).values[9:] == 0).all())  # later tokens


def test_the_rollout_equals_that_of_token_rollout():
    model, tokenizer = tiny.model("decoder", top="ForCausalLM"), tiny.tokenizer("decoder")
    (text,) = tiny.texts(17)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    inputs = {"inputs_embeds": model.get_input_embeddings()(ids).detach()}
    patches = InputPatches(inputs, "inputs_embeds", torch.arange(17)[:, None].expand_as(inputs["inputs_embeds"]))
    (result,) = relevance(model, patches, [PredictedToken(7, position=-4)], methods=[ROLLOUT], steps=0)
    rolled = hw.token_rollout(model, tokenizer, text, queries=[-4])
    torch.testing.assert_close(result.of(ROLLOUT).values, rolled.weights[0].double(), rtol=1e-5, atol=1e-6)


def test_row_blocks_of_long_sequences_equal_one_block(monkeypatch):
    model, patches = vit(), vit_patches()
    (whole,) = relevance(model, patches, [PredictedToken(3)], methods=OF_ATTENTION, steps=0)
    monkeypatch.setattr(module, "ROW_BLOCK_BYTES", 4 * 6 * 26 * 7)  # seven rows
    (blocks,) = relevance(model, patches, [PredictedToken(3)], methods=OF_ATTENTION, steps=0)
    require_maps(blocks, {each.method: each.values for each in whole.maps}, 1e-12)


def encoder_decoder(name, implementation):
    sizes = {"vocab_size": 97, "d_model": 48}
    if name == "t5":
        config = transformers.T5Config(**sizes, num_layers=2, num_heads=6, d_kv=11, d_ff=37)
        return built(transformers.T5ForConditionalGeneration, config, implementation)
    kinds = ("encoder", "decoder")
    sizes |= {f"{kind}_{size}": number for kind in kinds for size, number in (("layers", 2), ("ffn_dim", 37))}
    config = transformers.BartConfig(**sizes, encoder_attention_heads=6, decoder_attention_heads=6)
    return built(transformers.BartForConditionalGeneration, config, implementation)


def streams_of_encoder_decoder(call):
    own = "target" if "decoder" in call.site.path else "source"
    return own, "source" if call.site.cross else own


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_relevance_passes_through_cross_attention(name, implementation):
    model, eager = encoder_decoder(name, implementation), encoder_decoder(name, "eager")
    source, target = tiny.TOKENS[:1, :9], tiny.TOKENS[1:, :5]
    inputs = {
        "inputs_embeds": eager.get_input_embeddings()(source).detach(),
        "decoder_inputs_embeds": eager.get_input_embeddings()(target).detach(),
    }
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
        eager, inputs, [path for path, *_ in layers], lambda output: output.logits[0, 3].log_softmax(-1)[42]
    )
    steps = [(queries, keys, *each) for (_, queries, keys), each in zip(layers, found, strict=True)]
    expected = oracle(steps, {"source": 9, "target": 5}, ("target", 3))
    for stream, argument, last in (("source", "inputs_embeds", -1), ("target", "decoder_inputs_embeds", -2)):
        wanted = expected[stream] | {ATTENTION: found[last][0].mean(0)[3]}
        token_of = torch.arange(inputs[argument].shape[1])[:, None].expand_as(inputs[argument])
        patches = InputPatches(inputs, argument, token_of)
        streams = TokenStreams(streams_of_encoder_decoder, "target", stream)
        options = {"methods": OF_ATTENTION, "steps": 0, "streams": streams}
        (result,) = relevance(model, patches, [PredictedToken(42, position=3)], **options)
        require_maps(result, wanted, TOLERANCE[implementation])
    with pytest.raises(
        InputError, match=r"model: expected self-attention alone, got cross-attention in .*; pass streams"
    ):
        relevance(model, patches, [PredictedToken(42, position=3)], methods=OF_ATTENTION)


PROMPT = torch.cat([torch.tensor([7, 9]), torch.full((25,), 3), tiny.TOKENS[0, :6]])[None]
"""Token ids of a prompt with a picture of 25 patches, from token 2 on."""


def llava(implementation="sdpa"):
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION | {"num_hidden_layers": 3}),
        text_config=transformers.LlamaConfig(**SIZES, vocab_size=97, num_key_value_heads=2),
        image_token_id=3,
    )
    return built(transformers.LlavaForConditionalGeneration, config, implementation)


def of_llava(call):
    return ("tower", "tower") if "vision" in call.site.path else ("prompt", "prompt")


def llava_inputs():
    return {"input_ids": PROMPT, "pixel_values": picture(), "attention_mask": torch.ones_like(PROMPT)}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_maps_of_llava_pass_from_the_prompt_to_the_vision_tower(implementation):
    layers = [(f"model.vision_tower.encoder.layers.{i}.self_attn", "tower", "tower") for i in range(3)]
    layers += [(f"model.language_model.layers.{i}.self_attn", "prompt", "prompt") for i in range(2)]
    found = weights_and_gradients(
        llava("eager"),
        llava_inputs(),
        [path for path, *_ in layers],
        lambda output: output.logits[0, -1].log_softmax(-1)[42],
    )
    assert [gradients is None for _, gradients in found] == [False, False, True, False, False]
    steps = [(*each[1:], *of_call) for each, of_call in zip(layers, found, strict=True) if of_call[1] is not None]
    sizes, query = {"tower": 26, "prompt": 33}, ("prompt", -1)
    passed = torch.zeros(33, 26, dtype=torch.float64)
    passed[torch.arange(2, 27), torch.arange(1, 26)] = 1.0
    expected = oracle([*steps[:2], ("prompt", "tower", passed, None), *steps[2:]], sizes, query)
    attention = found[-1][0].mean(0)[-1]
    target, model = PredictedToken(42, position=-1), llava(implementation)
    options = {"methods": OF_ATTENTION, "steps": 0}
    # In the stream of the prompt alone, which is the default.
    (result,) = relevance(model, InputPatches(llava_inputs(), "pixel_values", token_of_pixels(2)), [target], **options)
    require_maps(result, oracle(steps, sizes, query)["prompt"] | {ATTENTION: attention}, TOLERANCE[implementation])
    assert len(result.left_out) == 3
    link = torch.cat([torch.tensor([-1]), torch.arange(2, 27)])
    streams = TokenStreams(of_llava, "prompt", "tower", {("prompt", "tower"): link})
    patches = InputPatches(llava_inputs(), "pixel_values", token_of_pixels(1))
    (result,) = relevance(model, patches, [target], streams=streams, **options)
    require_maps(result, expected["tower"] | {ATTENTION: F.pad(attention[2:27], (1, 0))}, TOLERANCE[implementation])
    assert result.left_out == ()


def test_parts_of_a_model_with_as_many_tokens_by_chance_need_streams():
    ids = torch.cat([torch.full((25,), 3), torch.tensor([7])])[None]  # as many as in the tower
    patches = InputPatches(
        llava_inputs() | {"input_ids": ids, "attention_mask": None}, "pixel_values", token_of_pixels(0)
    )
    target = PredictedToken(42, position=-1)
    with pytest.raises(
        InputError, match=r"got 26 tokens in model\.language_model.*, model\.vision_tower.*; pass streams="
    ):
        relevance(llava(), patches, [target], methods=[GRADIENT], steps=0)
    streams = TokenStreams(lambda call: None if "vision" in call.site.path else ("p", "p"), "p", "p")
    relevance(llava(), patches, [target], methods=[GRADIENT], steps=0, streams=streams)


def test_padding_and_tensors_of_inference_mode():
    model, patches = vit(), vit_patches()
    with torch.inference_mode():
        inference = InputPatches({"pixel_values": picture()}, "pixel_values", token_of_pixels(1))
    (one,), (other,) = (relevance(model, each, [PredictedToken(3)], steps=0) for each in (patches, inference))
    require_maps(other, {each.method: each.values for each in one.maps if each.method != OCCLUSION}, 0)
    decoder = built(transformers.LlamaForCausalLM, tiny.configs()["llama"], "sdpa")
    ids, results = tiny.TOKENS[:1, :8], []
    for length in (0, 3):
        padded = F.pad(ids, (length, 0))
        mask = (torch.arange(8 + length) >= length).long()[None]
        embeddings = decoder.get_input_embeddings()(padded).detach()
        token_of = torch.arange(8 + length)[:, None].masked_fill(~mask.bool()[0, :, None], -1)
        inputs = {"inputs_embeds": embeddings, "attention_mask": mask, "position_ids": mask.cumsum(1) - 1}
        padded_patches = InputPatches(inputs, "inputs_embeds", token_of.expand_as(embeddings))
        (result,) = relevance(decoder, padded_patches, [PredictedToken(42, position=-2)], steps=0)
        results.append({each.method: each.values[length:] for each in result.maps})
    for name, values in results[0].items():
        torch.testing.assert_close(results[1][name], values, rtol=1e-7, atol=1e-9)


def test_a_token_that_several_tokens_become_is_divided_among_them():
    link = torch.cat([torch.tensor([-1]), torch.arange(25) // 5 + 2])  # as if five patches were merged
    streams = TokenStreams(of_llava, "prompt", "tower", {("prompt", "tower"): link})
    patches = InputPatches(llava_inputs(), "pixel_values", token_of_pixels(1))
    target = PredictedToken(42, position=-1)
    (result,) = relevance(llava(), patches, [target], streams=streams, methods=[ATTENTION], steps=0)
    patches = InputPatches(llava_inputs(), "pixel_values", token_of_pixels(2))
    (unlinked,) = relevance(llava(), patches, [target], methods=[ATTENTION], steps=0)
    of_prompt = unlinked.of(ATTENTION).values
    expected = torch.cat([torch.zeros(1), of_prompt[2:7].repeat_interleave(5) / 5])
    torch.testing.assert_close(result.of(ATTENTION).values, expected.double())


def test_the_map_of_chosen_heads_is_their_mean():
    eager, patches = vit("eager"), vit_patches()
    with torch.no_grad():
        weights = eager(picture(), output_attentions=True).attentions
    expected = (weights[0][0, 4, 0] + weights[1][0, 2, 0] + weights[1][0, 5, 0]) / 3
    options = {"methods": [ATTENTION], "steps": 0}
    (result,) = relevance(vit(), patches, [PredictedToken(3)], heads=[(0, 4), "1.2", (1, 5)], **options)
    require_maps(result, {ATTENTION: expected}, 1e-6)
    with pytest.raises(InputError, match=r"heads: expected heads with queries .*, got \(2, 0\)"):
        relevance(vit(), patches, [PredictedToken(3)], heads=[(2, 0)], **options)


def test_the_query_may_be_a_mean_over_tokens():
    model, patches = vit(), vit_patches()
    rows = [
        relevance(model, patches, [PredictedToken(3, query=query)], methods=OF_ATTENTION, steps=0)[0]
        for query in (*range(26), torch.full((26,), 1 / 26, dtype=torch.float64))
    ]
    for name in OF_ATTENTION:
        mean = torch.stack([each.of(name).values for each in rows[:-1]]).mean(0)
        torch.testing.assert_close(rows[-1].of(name).values, mean, rtol=1e-9, atol=1e-12)


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

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.top(x[:, -1])


def ten_tokens(seed=1):
    x = torch.randn(1, 10, 21, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return InputPatches({"x": x}, "x", torch.arange(10)[:, None].expand_as(x))


PARTS = (torch.arange(4)[None], torch.arange(4, 10)[None])


def of_part(call):
    """Return the streams of a call whose queries, or queries and keys, are one of two parts."""
    queries = PARTS[call.index] if call.grid.queries < 10 else None
    keys = PARTS[call.index] if call.grid.keys < 10 else None
    return CallStreams("t", "t", queries, keys)


def by_differentiation(model, patches, target, query=-1):
    """Return the maps of a stack of `Layers` from whole matrices, of which the gradients are those of autograd."""
    x, steps, found = patches.inputs["x"], [], []
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
    return oracle(steps, {"t": 10}, ("t", query))["t"]


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
    model, patches = Layers(*forms), ten_tokens()
    is_divided = bool({"windows", "parts of queries"} & set(forms))
    streams = TokenStreams(of_part, "t", "t") if is_divided else None
    target = PredictedToken(2, query=-1)
    (result,) = relevance(model, patches, [target], streams=streams, methods=[GRADIENT, ROLLOUT], steps=0)
    require_maps(result, by_differentiation(model, patches, 2))


def test_a_model_whose_heads_are_not_weights_times_values_is_refused():
    class Noisy(Attention):
        def attend(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5).transpose(1, 2).flatten(2)

    model = Layers("sdpa", "sdpa")
    model.layers[1].__class__ = Noisy
    with pytest.raises(InputError, match=r"head outputs that are finite weights times values, got .* in layers\.1"):
        relevance(model, ten_tokens(), [PredictedToken(2, query=-1)], methods=[GRADIENT], steps=0)


# -- occlusion, and models whose relevance is known --------------------------------------------------------------------


def test_occlusion_equals_a_loop_over_patches():
    model, patches = vit(), vit_patches()
    pixels, expected = picture(), []

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
        (result,) = relevance(
            model, patches, [PredictedToken(3)], methods=[OCCLUSION], neighbourhood=size, steps=0, batch_size=4
        )
        values = result.of(OCCLUSION).values
        torch.testing.assert_close(values[1:], torch.stack(expected), rtol=0, atol=1e-10)
        assert math.isnan(values[0])
        assert result.of(OCCLUSION).agreement is None
        assert result.score == pytest.approx(float(score(pixels)), abs=1e-10)
        everything = mean[:, None, None].expand(1, 3, 30, 30)
        assert result.baseline_score == pytest.approx(float(score(everything)), abs=1e-10)


def test_baselines():
    pixels, token_of = picture(), token_of_pixels(0).clone()
    token_of[..., :6] = -1  # the first column of patches is padding
    inputs = {"pixel_values": pixels}
    hidden = torch.zeros(2, 20, dtype=torch.bool)
    hidden[1, 3] = True  # token 4, in the first row and the last column

    def replaced(**options):
        unchanged, occluded = InputPatches(inputs, "pixel_values", token_of, **options).occluded(hidden)
        assert torch.equal(unchanged, pixels)
        changed = occluded != pixels
        assert bool(changed[..., :6, 24:].all())
        assert int(changed.sum()) == 3 * 36
        return occluded[0, :, :6, 24:]

    real = pixels[..., 6:]
    torch.testing.assert_close(replaced()[:, 0, 0], real.mean((0, 2, 3)))
    torch.testing.assert_close(replaced(channel_axis=-3)[:, 2, 1], real.mean((0, 2, 3)))
    torch.testing.assert_close(replaced(channel_axis=3)[1, 4], real.mean((0, 1, 2))[-6:])
    assert bool((replaced(baseline=0.25) == 0.25).all())
    noise = torch.randn(3, 1, 1, dtype=torch.float64)
    assert torch.equal(replaced(baseline=noise), noise.expand(3, 6, 6))
    embeddings = InputPatches({"x": pixels[0]}, "x", token_of[0])
    torch.testing.assert_close(embeddings.replacement.flatten(), real.mean()[None])


def test_the_grid_of_patches():
    pixels = torch.zeros(2, 3, 12, 18)
    rows, columns = torch.arange(12) // 4, torch.arange(18) // 6  # patches of 4 x 6 pixels
    token_of = rows[:, None] * 3 + columns
    token_of = torch.stack([token_of, token_of + 9])[:, None].expand_as(pixels)
    patches = InputPatches({"pixels": pixels}, "pixels", token_of)
    cells = [(picture, row, column) for picture in range(2) for row in range(3) for column in range(3)]
    differences = patches.grid - torch.tensor(cells)
    torch.testing.assert_close(differences, differences[:1].expand(18, 3))
    torch.testing.assert_close(differences[0, 0], torch.zeros((), dtype=torch.float64))
    square = patches.neighbours(3)
    assert square[4].nonzero()[:, 0].tolist() == list(range(9))
    assert square[9].nonzero()[:, 0].tolist() == [9, 10, 12, 13]
    assert torch.equal(patches.neighbours(1), torch.eye(18, dtype=torch.bool))
    line = ten_tokens()
    assert line.neighbours(5)[3].nonzero()[:, 0].tolist() == [1, 2, 3, 4, 5]
    centres = torch.full((12, 3), torch.nan)
    centres[3:] = torch.tensor([(0, 5 * row, 7 * column) for row in range(3) for column in range(3)]).float()
    stated = InputPatches({"pixels": pixels[:1]}, "pixels", token_of[:1] + 3, centres=centres)
    torch.testing.assert_close(stated.grid, torch.tensor(cells[:9]).double())


class Linear(torch.nn.Module):
    """Uniform attention over tokens: the output is the mean of linear functions of the tokens."""

    def __init__(self):
        super().__init__()
        self.value = torch.nn.Linear(4, 4, bias=False)
        torch.nn.init.normal_(self.value.weight)
        self.double()

    def forward(self, x):
        values = self.value(x)[:, None]
        queries = torch.zeros_like(values) * values  # zero scores that depend on the input
        return F.scaled_dot_product_attention(queries, values, values)[:, 0]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_linear_model_has_the_known_relevance(batch_size):
    model, x = Linear(), torch.randn(1, 9, 4, dtype=torch.float64)
    factors = torch.randn(4, dtype=torch.float64)
    effects = (x[0] @ model.value.weight.detach().T @ factors) / 9  # what each token adds to the score
    patches = InputPatches({"x": x}, "x", torch.arange(9)[:, None].expand_as(x), baseline=0.0)
    target = PredictedToken(query=4, score=lambda output: output[0, 4] @ factors)
    (result,) = relevance(model, patches, [target], steps=4, orders=3, batch_size=batch_size)
    torch.testing.assert_close(result.of(OCCLUSION).values, effects)
    torch.testing.assert_close(result.of(GRADIENT).values, effects.clamp(min=0) + F.one_hot(torch.tensor(4), 9))
    torch.testing.assert_close(result.of(ATTENTION).values, torch.full((9,), 1 / 9, dtype=torch.float64))
    assert all(math.isnan(number) for number in result.of(ATTENTION).agreement)  # a constant map
    assert result.score == pytest.approx(float(effects.sum()), abs=1e-12)
    assert result.baseline_score == pytest.approx(0.0, abs=1e-12)
    curves, largest_first = result.of(OCCLUSION).curves, effects.sort(descending=True).values
    counts = [0, 2, 4, 6, 9]
    shown = torch.stack([largest_first[:count].sum() for count in counts])
    torch.testing.assert_close(curves.insertion, shown)
    torch.testing.assert_close(curves.deletion, effects.sum() - shown)
    torch.testing.assert_close(curves.shares, torch.tensor(counts).double() / 9)


@pytest.mark.parametrize("mixing", ["refuses", "mixes", "keeps apart"])
def test_models_that_do_not_accept_batches_run_one_by_one(mixing):
    sizes = []

    class Model(Linear):
        def forward(self, x):
            sizes.append(len(x))
            if mixing == "refuses" and len(x) > 1:
                raise RuntimeError("one example alone")
            out = super().forward(x)
            return out - out.mean(0) + out[:1] if mixing == "mixes" else out

    x = torch.randn(1, 9, 4, dtype=torch.float64)
    patches = InputPatches({"x": x}, "x", torch.arange(9)[:, None].expand_as(x), baseline=0.0)
    target = PredictedToken(score=lambda output: output[0].square().sum())
    torch.manual_seed(0)
    (result,) = relevance(Model(), patches, [target], methods=[OCCLUSION], steps=0, batch_size=4)
    assert sizes == ([1, 1, 2, 4, 4, 1] if mixing == "keeps apart" else [1, 1, 2] + [1] * 9)
    torch.manual_seed(0)
    (alone,) = relevance(Linear(), patches, [target], methods=[OCCLUSION], steps=0, batch_size=1)
    torch.testing.assert_close(result.of(OCCLUSION).values, alone.of(OCCLUSION).values)


def test_several_predicted_tokens_share_the_runs_with_occluded_patches():
    model, patches = llava(), InputPatches(llava_inputs(), "pixel_values", token_of_pixels(2))
    calls = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    targets = [PredictedToken(token, position) for token, position in ((42, -1), (7, -3), (11, 29))]
    together = relevance(model, patches, targets, steps=0, batch_size=5)
    hook.remove()
    assert sorted(calls) == [1, 1, 1, 2] + [5] * 5  # two ends, the backward pass, the check of batches, 25 patches
    for target, result in zip(targets, together, strict=True):
        (alone,) = relevance(model, patches, [target], steps=0)
        require_maps(alone, {each.method: each.values for each in result.maps if each.method != OCCLUSION})
        torch.testing.assert_close(
            result.of(OCCLUSION).values, alone.of(OCCLUSION).values, equal_nan=True, rtol=1e-9, atol=1e-9
        )


# -- curves and agreement ----------------------------------------------------------------------------------------------


def test_deletion_and_insertion_curves_equal_an_independent_computation():
    model, patches = vit(), vit_patches()
    (result,) = relevance(model, patches, [PredictedToken(3)], steps=7, orders=3, seed=9)

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
    model, target = vit(), PredictedToken(3)
    results = []
    for seed in range(4):
        patches = InputPatches({"pixel_values": picture(seed)}, "pixel_values", token_of_pixels(1))
        results += relevance(model, patches, [target], steps=0)
    values = [each.of(GRADIENT).agreement[0] for each in results]
    mean, low, high = mean_agreement(results, GRADIENT)
    assert mean == pytest.approx(sum(values) / 4)
    assert (low, high) == pytest.approx(scipy.stats.t.interval(0.95, 3, mean, scipy.stats.sem(values)))
    assert math.isnan(mean_agreement(results[:1], GRADIENT)[1])
    with pytest.raises(InputError, match="method: expected a method that was compared with occlusion, got 'occlusion'"):
        mean_agreement(results, OCCLUSION)


def test_the_tables_and_the_maps_for_a_page():
    (result,) = relevance(vit(), vit_patches(), [PredictedToken(3)], steps=5, orders=2)
    table = result.table()
    assert list(table.columns) == ["token", "is_patch", GRADIENT, ROLLOUT, ATTENTION, OCCLUSION]
    assert table["is_patch"].tolist() == [False] + [True] * 25
    assert table[GRADIENT].tolist() == result.of(GRADIENT).values.tolist()
    summary = result.summary().set_index("method")
    assert summary.loc[ROLLOUT, "spearman_low"] == result.of(ROLLOUT).agreement[1]
    assert summary.loc[ROLLOUT, "deletion_difference"] == result.of(ROLLOUT).curves.difference("deletion")[0]
    assert math.isnan(summary.loc[OCCLUSION, "spearman"])
    assert repr(result) == f"Relevance({GRADIENT}, {ROLLOUT}, {ATTENTION}, {OCCLUSION}; 25 patches)"
    maps = result.page_maps(side=1, target=6)
    assert [each.method for each in maps] == [GRADIENT, ROLLOUT, ATTENTION, OCCLUSION]
    for each, of_page in zip(result.maps, maps, strict=True):
        assert (of_page.side, of_page.target, of_page.agreement) == (1, 6, each.agreement)
        torch.testing.assert_close(of_page.values, each.values.float(), equal_nan=True)
        assert {len(curve) for curve in of_page.curves.values()} == {6}
        assert of_page.curves["deletion"] == each.curves.deletion.tolist()
        assert of_page.curves["random insertion"] == each.curves.random_insertion.mean(0).tolist()
        assert of_page.meaning.endswith(".")
    with pytest.raises(InputError, match="method: expected .*, got 'grad'"):
        result.of("grad")


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("as_user")
def test_unusable_patches_are_refused():
    pixels, token_of = picture(), token_of_pixels(1)

    def make(values=pixels, of=token_of, name="pixel_values", **options):
        return InputPatches({"pixel_values": values}, name, of, **options)

    cases = [
        (lambda: make(name="pixels"), "name: expected the name of a float tensor among the inputs, got 'pixels'"),
        (lambda: make(values=pixels.long()), r"name: .*got 'pixel_values' \(torch.int64\)"),
        (lambda: make(values=pixels.log()), "inputs: expected finite numbers in pixel_values, got NaN or infinity"),
        (lambda: make(of=token_of[:, :1]), r"token_of: .* \(1, 3, 30, 30\), got torch.int64 of shape \(1, 1, 30, 30\)"),
        (lambda: make(of=token_of.double()), "token_of: expected whole numbers of shape .*, got torch.float64"),
        (lambda: make(of=token_of - 3), "token_of: expected indices of tokens, and -1 for no token, got from -2"),
        (lambda: make(of=token_of * 0 - 1), "token_of: expected indices of tokens"),
        (lambda: make(baseline=math.inf), "baseline: expected a finite number, got inf"),
        (
            lambda: make(baseline=torch.zeros(2)),
            r"baseline: .* that broadcast to shape \(1, 3, 30, 30\), got shape \(2,\)",
        ),
        (lambda: make(baseline=torch.full((3, 1, 1), torch.nan)), "baseline: expected finite numbers .*, got NaN"),
        (lambda: make(channel_axis=4), "channel_axis: expected .* from -4 to 3, got 4"),
        (lambda: make(centres=torch.zeros(25, 3)), r"centres: .* of at least 26 tokens, got \(25, 3\)"),
        (lambda: make(centres=torch.full((26, 3), torch.nan)), "centres: expected finite numbers for tokens"),
    ]
    for build, message in cases:
        with pytest.raises(InputError, match=message):
            build()


@pytest.mark.usefixtures("as_user")
def test_unusable_arguments_are_refused():
    model, patches, target = vit(), vit_patches(), PredictedToken(3)
    far = InputPatches({"pixel_values": picture()}, "pixel_values", token_of_pixels(2))
    cases = [
        ({"model": 3}, "model: expected a torch module, got int"),
        ({"patches": picture()}, "patches: expected InputPatches, got Tensor"),
        ({"targets": target}, "targets: expected a list of PredictedToken objects, got PredictedToken"),
        ({"targets": []}, "targets: expected at least one, got none"),
        ({"methods": []}, "methods: expected at least one, got none"),
        ({"methods": ["lime"]}, "method: expected .*, got 'lime'"),
        ({"residual": 1.0}, "residual: expected a share of at least 0 and below 1, got 1.0"),
        ({"neighbourhood": 2}, "neighbourhood: expected an odd number, got 2"),
        ({"steps": -1}, "steps: expected .*, got -1"),
        ({"orders": 1}, "orders: expected .*, got 1"),
        ({"batch_size": 0}, "batch_size: expected .*, got 0"),
        ({"heads": [3]}, r"heads: expected heads \(layer, head\), got 3"),
        ({"targets": [PredictedToken(7)]}, "token: expected an id below 7, got 7"),
        (
            {"targets": [PredictedToken(3, position=0)]},
            r"model: expected logits \(1, length, vocabulary\).*got shape \(1, 7\)",
        ),
        ({"targets": [PredictedToken(3, query=26)]}, "query: expected one of 26 tokens, got 26"),
        (
            {"targets": [PredictedToken(3, query=torch.ones(5))]},
            "query: expected a finite weight for each of 26 tokens",
        ),
        ({"targets": [PredictedToken(score=lambda out: out.logits)]}, r"score: .*one number, got shape \(1, 7\)"),
        ({"targets": [PredictedToken(score=lambda out: 1.0)]}, "score: .*one number, got float"),
        ({"targets": [PredictedToken(score=lambda out: torch.ones(()))]}, "score: expected a score that depends on"),
        (
            {"targets": [PredictedToken(score=lambda out: out.logits.sum() * torch.inf)]},
            "model: expected a finite score",
        ),
        ({"patches": far}, "token_of: expected indices of 26 tokens of the stream of patches, got 26"),
        (
            {"streams": TokenStreams(lambda call: None, "t", "t")},
            "streams: expected attention calls of the stream 't'",
        ),
        (
            {"streams": TokenStreams(lambda call: "t", "t", "t")},
            "streams: expected CallStreams, a pair of names, or None",
        ),
        (
            {"streams": TokenStreams(lambda call: ("t", "t"), "t", "t", {("t", "u"): torch.tensor([26])})},
            r"links: expected a token of 't', or -1, for each of 1 tokens of 'u', got shape \(1,\), from 26 to 26",
        ),
    ]
    for changes, message in cases:
        arguments = {"model": model, "patches": patches, "targets": [target], "steps": 0} | changes
        with pytest.raises(InputError, match=message):
            relevance(**arguments)
    with pytest.raises(InputError, match="token: expected the id of a token or class, or a score, got neither"):
        PredictedToken()
    with pytest.raises(InputError, match="position: expected .*, got 0.5"):
        PredictedToken(3, position=0.5)


def test_numbers_that_are_not_finite_are_refused_by_name():
    model = vit()
    model.classifier.weight.data[3, 0] = torch.inf
    with pytest.raises(
        InputError, match="model: expected a finite score for every occluded input, got NaN or infinity"
    ):
        relevance(model, vit_patches(), [PredictedToken(3)], steps=0)

    def score(output):
        logit = output.logits[0, 3]
        return logit + (logit - logit.detach()).abs().sqrt()  # finite, with an infinite derivative

    with pytest.raises(InputError, match="score: expected finite gradients, got NaN or infinity in vit"):
        relevance(vit(), vit_patches(), [PredictedToken(score=score)], steps=0)


def test_the_model_is_unchanged():
    model = vit().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    relevance(model, vit_patches(), [PredictedToken(3)], steps=2, orders=2)
    assert model.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


MEMORY = """
from pathlib import Path

import torch

import tiny
from headwise.analysis.flow.relevance import InputPatches, PredictedToken, relevance

torch.set_num_threads(1)
sizes = {"max_position_embeddings": 16384, "num_hidden_layers": 1, "num_attention_heads": 2}
model = tiny.model("decoder", top="ForCausalLM", **sizes)


def run(length):
    token_of = torch.arange(length)[:, None].expand(1, -1, 48)
    patches = InputPatches({"inputs_embeds": torch.randn(1, length, 48)}, "inputs_embeds", token_of)
    relevance(model, patches, [PredictedToken(3, -1)], methods=METHODS, steps=0)
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
