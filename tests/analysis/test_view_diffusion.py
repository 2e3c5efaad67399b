"""Views of diffusion pipelines. The oracles are the embedding of latents by the transformer itself, the text encoding
of the pipeline, and the softmax of the queries and keys that torch's attention function receives.
"""

import base64
import functools
import io
import math

import diffusers
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import headwise as hw
import pipelines
from headwise.analysis.patches import ElementPlaces
from headwise.analysis.token_sources import token_sources
from headwise.analysis.view_prompts import EmbeddedText, Prompt, viewed_texts


@functools.cache
def viewed(name, width=32, count=2, **options):
    """Return a pipeline, the options with which it was called, and the view of some of its steps."""
    pipeline, own = pipelines.pipeline(name)
    own |= {"width": width} | options
    called = functools.partial(pipeline, generator=torch.Generator().manual_seed(0), **own)
    return pipeline, own, hw.view(pipeline.transformer, called, pipelines.TEXT, generate=count)


def side_of(view):
    """Return the number of the text of a view that has patches."""
    return next(index for index, text in enumerate(view.texts) if text.patches)


@pytest.mark.parametrize("width", [16, 32, 48])
@pytest.mark.parametrize("name", pipelines.PIPELINES)
def test_each_patch_is_the_one_of_the_latents_that_change_its_token(name, width):
    pipeline, _, steps = viewed(name, width)
    model = pipeline.transformer
    for view in steps:
        patches = [patch for patch in view.texts[side_of(view)].patches if patch is not None]
        latents = torch.randn(1, 4, 8, width // 2, generator=torch.Generator().manual_seed(1))
        for row, column in [(0, 0), (7, width // 2 - 1), (5, 2), (2, width // 4)]:
            changed = latents.clone()
            changed[0, 1, row, column] += 1
            with torch.no_grad():
                if name == "Flux":
                    packed = [pipeline._pack_latents(each, 1, 4, 8, width // 2) for each in (latents, changed)]
                    before, after = (model.x_embedder(each)[0] for each in packed)
                else:
                    before, after = (model.pos_embed(each)[0] for each in (latents, changed))
            (token,) = (before - after).abs().amax(-1).nonzero()[:, 0].tolist()
            left, top, of_width, of_height = patches[token][1:]
            assert len(patches) == len(before)
            assert left <= (column + 0.5) / (width // 2) <= left + of_width
            assert top <= (row + 0.5) / 8 <= top + of_height
            assert (of_width, of_height) == (pytest.approx(4 / width), pytest.approx(0.25))
    picture = steps[0].texts[side_of(steps[0])].pictures[0]
    assert (picture.width, picture.height) == (width, 16)


@pytest.mark.parametrize("negative", [None, "a green star a red red circle"])
@pytest.mark.parametrize("name", pipelines.PIPELINES)
def test_the_words_are_those_of_the_text_and_not_of_the_negative_one(name, negative):
    options = {} if negative is None or name == "Flux" else {"negative_prompt": negative}
    pipeline, _, steps = viewed(name, **options)
    of_t5, of_clip = (
        each(pipelines.TEXT, padding="max_length").input_ids
        for each in (getattr(pipeline, "tokenizer_3", getattr(pipeline, "tokenizer_2", pipeline.tokenizer)),
                     pipeline.tokenizer)
    )  # fmt: skip
    expected = [*of_clip, *of_t5] if name == "Stable Diffusion 3" else of_t5
    with torch.no_grad():
        if name == "PixArt":
            encoded = pipeline.encode_prompt(pipelines.TEXT, max_sequence_length=pipelines.LENGTH)[0]
        elif name == "Flux":
            encoded = pipeline.encode_prompt(pipelines.TEXT, None, max_sequence_length=pipelines.LENGTH)[0]
        else:
            texts = [pipelines.TEXT] * 3
            encoded = pipeline.encode_prompt(*texts, max_sequence_length=pipelines.LENGTH)[0]
    for view in steps:
        (text,) = [text for text in view.texts if text.ids is not None]
        ids = text.ids[0][text.ids[0] >= 0].tolist()
        assert ids == expected
        assert torch.equal(view.run.inputs["encoder_hidden_states"], encoded)
        words = [word.text for word in text.words if not word.special and not word.text.startswith("(")]
        assert words == pipelines.TEXT.split() * (2 if name == "Stable Diffusion 3" else 1)
    assert [view.text for view in steps] == [f"step {number} of 3: {pipelines.TEXT}" for number in (1, 3)]


@pytest.mark.parametrize("name", pipelines.PIPELINES)
def test_weights_are_the_softmax_of_the_queries_and_keys_of_each_step(name):
    pipeline, _, steps = viewed(name)
    for view in steps:
        weights = []

        class Weights(torch.overrides.TorchFunctionMode):
            """Record the softmax of scores, in the order of calls."""

            def __torch_function__(self, function, types, args=(), kwargs=None, weights=weights):
                if function is F.scaled_dot_product_attention:
                    named = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | (kwargs or {})
                    scores = named["query"] @ named["key"].mT / math.sqrt(named["query"].shape[-1])
                    mask = named.get("attn_mask")
                    weights.append((scores if mask is None else scores + mask).softmax(-1)[0])
                return function(*args, **(kwargs or {}))

        with Weights(), torch.no_grad():
            pipeline.transformer(**view.run.inputs)
        expected = torch.cat(weights) if len({each.shape for each in weights}) == 1 else None
        assert len(view.heads) == sum(len(each) for each in weights)
        for number, head in enumerate(view.heads):
            own = head.attention.weights.weights
            layer = weights[number // 3][number % 3] if expected is None else expected[number]
            assert torch.allclose(own, layer, atol=1e-5)


class Attention(torch.nn.Module):
    """Attention of three heads, from some tokens to others."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(24, 24) for _ in range(4))

    def forward(self, tokens, others):
        q, k, v = (
            linear(each).unflatten(-1, (3, 8)).transpose(1, 2)
            for linear, each in ((self.q, tokens), (self.k, others), (self.v, others))
        )
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class TwoTexts(torch.nn.Module):
    """Transformer of two texts and four latents: self-attention of all, or of latents whose scale depends on a text and
    which then attend to it.
    """

    def __init__(self, *, is_joint):
        super().__init__()
        self.is_joint, self.embedding, self.attention = is_joint, torch.nn.Linear(4, 24), Attention()

    def forward(self, latents, one, two):
        tokens = self.embedding(latents.flatten(2).mT)
        if self.is_joint:
            joined = torch.cat([one, tokens, two], 1)
            return self.attention(joined, joined)
        tokens = tokens * one.mean(1, keepdim=True)
        return self.attention(tokens, one)


def prompt_of_two_texts():
    """Return a prompt with latents of 2 x 2 and texts of four and two words."""
    words = pipelines.tokenizer(8, has_start=False)
    generator = torch.Generator().manual_seed(0)
    inputs = {"latents": torch.randn(1, 4, 2, 2, generator=generator)}
    inputs |= {name: torch.randn(1, count, 24, generator=generator) for name, count in (("one", 4), ("two", 2))}
    y, x = torch.meshgrid(torch.tensor([0.25, 0.75]).double(), torch.tensor([0.25, 0.75]).double(), indexing="ij")
    nothing = torch.zeros(16, dtype=torch.long)
    places = ElementPlaces(nothing, x.flatten().repeat(4), y.flatten().repeat(4), nothing)
    ids = {"one": words("a red circle left").input_ids[:4], "two": words("of star").input_ids[:2]}
    embedded = {
        name: EmbeddedText(of_input, torch.tensor([ids[of_input]]), [words] * len(ids[of_input]))
        for name, of_input in (("input_ids", "one"), ("two_input_ids", "two"))
    }
    return Prompt(inputs, {"latents": places}, (Image.new("RGB", (8, 8)),), {}, embedded=embedded)


def test_the_words_of_several_texts_in_one_sequence_are_shown():
    torch.manual_seed(0)
    prompt = prompt_of_two_texts()
    (text,), _, calls = viewed_texts(TwoTexts(is_joint=True).eval(), prompt, prompt.inputs, None, 0)
    patches = ["(1, 1)", "(1, 2)", "(2, 1)", "(2, 2)"]
    assert [word.text for word in text.words] == ["a", "red", "circle", "left", *patches, "of", "star"]
    assert len(calls) == 1


def test_keys_of_other_tokens_than_the_queries_are_not_taken_for_them():
    torch.manual_seed(0)
    prompt, model = prompt_of_two_texts(), TwoTexts(is_joint=False).eval()
    with torch.no_grad(), hw.watch(model) as heads:  # which would make a plan
        model(**prompt.inputs)
    assert len(heads.table()) == 3
    sources = token_sources(
        model,
        prompt.inputs,
        {"latents": torch.ones(16, dtype=torch.bool)},
        {"input_ids": "one", "two_input_ids": "two"},
    )
    for queries, keys in sources.calls.values():
        assert queries.stream != keys.stream


def test_heads_of_joint_attention_that_is_split_by_sizes_are_removed():
    pipeline, _, steps = viewed("Flux")
    model, inputs = pipeline.transformer, steps[0].run.inputs
    removed = {(0, 1), (1, 2)}
    layers = iter(range(2))

    class Removed(torch.overrides.TorchFunctionMode):
        """Replace the outputs of the removed heads by zeros."""

        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function is F.scaled_dot_product_attention:
                layer, result = next(layers), result.clone()
                result[:, [head for of_layer, head in removed if of_layer == layer]] = 0
            return result

    with torch.no_grad():
        with Removed():
            expected = model(**inputs).sample
        with hw.gate(model, dict.fromkeys(removed, 0.0)):
            actual = model(**inputs).sample
        assert torch.allclose(actual, expected, atol=1e-5)
        assert not torch.allclose(actual, model(**inputs).sample, atol=1e-3)


def test_all_steps_are_viewed_by_default_and_have_a_page(tmp_path):
    pipeline, _, steps = viewed("PixArt", count=0)
    assert [view.text[:11] for view in steps] == [f"step {number} of 3" for number in (1, 2, 3)]
    hw.write_page(tmp_path / "page.html", steps)
    focus = steps[0].find(["red"], queries=[hw.Region(0.0, 0.0, 1.0, 1.0)])
    assert 0 < focus.table()["share"].max() < 1
    assert "step" not in vars(pipeline.scheduler)


@pytest.mark.parametrize("width", [16, 32])
def test_a_view_shows_the_picture_that_the_pipeline_generates(width):
    """Stochastic schedulers take the generator as an argument of their step."""
    pipeline, own = pipelines.pipeline("PixArt")
    pipeline.scheduler = diffusers.EulerAncestralDiscreteScheduler()
    called = functools.partial(pipeline, width=width, **own)
    (expected,) = called(prompt=pipelines.TEXT, generator=torch.Generator().manual_seed(3)).images
    state = torch.get_rng_state()
    steps = hw.view(
        pipeline.transformer,
        functools.partial(called, generator=torch.Generator().manual_seed(3)),
        pipelines.TEXT,
        generate=1,
    )
    assert torch.equal(torch.get_rng_state(), state)
    source = steps[0].texts[side_of(steps[0])].pictures[0].source
    shown = Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))
    assert shown.tobytes() == expected.tobytes()
    assert "step" not in vars(pipeline.scheduler)


def test_a_text_that_is_too_long_is_cut_off_on_request_alone():
    pipeline, own = pipelines.pipeline("PixArt")
    called = functools.partial(pipeline, width=16, **own)
    text = " ".join(["red"] * 30)
    with pytest.raises(hw.InputError, match="^text: expected a text that the pipeline reads whole, .*; truncate=True"):
        hw.view(pipeline.transformer, called, text, generate=1)
    (view,) = hw.view(pipeline.transformer, called, text, generate=1, truncate=True)
    assert view.texts[0].truncated


def test_pipelines_in_bfloat16_are_viewed():
    pipeline, own = pipelines.pipeline("Stable Diffusion 3")
    pipeline.to(torch.bfloat16)
    assert len(hw.view(pipeline.transformer, functools.partial(pipeline, width=16, **own), pipelines.TEXT)) == 3


def cropped(pipeline):
    """Return a pipeline that returns a part of its picture."""
    pipeline.image_processor.postprocess = lambda image, **options: [Image.new("RGB", (8, 16))]
    return pipeline


MISTAKES = {
    "the pipeline as model": (
        lambda pipe: (pipe, pipe, "a red circle", {}),
        "^model: expected the transformer of a pipeline, got PixArt.*; hw.view",
    ),
    "another model": (
        lambda pipe: (torch.nn.Linear(2, 2).eval(), pipe, "a red circle", {}),
        "^model: expected a part of the pipeline, such as pipeline.transformer, got Linear",
    ),
    "no text": (lambda pipe: (pipe.transformer, pipe, None, {}), "^text: expected one text .*, got NoneType"),
    "several texts": (lambda pipe: (pipe.transformer, pipe, ["a", "red"], {}), "^text: expected one text .*, got list"),
    "a picture": (
        lambda pipe: (pipe.transformer, pipe, "a red circle", {"images": "red.png"}),
        "^text: expected one text alone for a diffusion pipeline, got one with images",
    ),
    "a cropped picture": (
        lambda pipe: (pipe.transformer, cropped(pipe), "a red circle", {}),
        "^processor: expected a pipeline that returns the whole decoded picture, got 8 x 16 of 16 x 16 pixels; bind",
    ),
    "latents": (
        lambda pipe: (pipe.transformer, functools.partial(pipe, output_type="latent"), "a red circle", {}),
        "^processor: expected a pipeline that returns a list of one PIL.Image, got ",
    ),
    "two pictures": (
        lambda pipe: (pipe.transformer, functools.partial(pipe, num_images_per_prompt=2), "a red circle", {}),
        "^processor: expected a pipeline that returns a list of one PIL.Image, got 2 of them",
    ),
    "a negative text with the same words": (
        lambda pipe: (
            pipe.transformer,
            functools.partial(pipe, negative_prompt="a red circle"),
            "a red circle",
            {},
        ),
        "^processor: expected a pipeline in which one call of the model in step 1 .*, got 2 that read these words",
    ),
}


def test_a_negative_text_that_has_the_text_is_not_taken_for_it():
    pipeline, own = pipelines.pipeline("Flux")
    negative = {"negative_prompt": "a red square below", "true_cfg_scale": 3.0}
    called = functools.partial(pipeline, width=16, **negative, **own)
    (view,) = hw.view(pipeline.transformer, called, "a red square", generate=1)
    assert [word.text for word in view.texts[0].words[:4]] == ["a", "red", "square", "</s>"]
    with pytest.raises(
        hw.InputError, match="^processor: expected a pipeline in which one element .*, got none that rea"
    ):
        hw.view(pipeline.transformer, functools.partial(called, prompt_2="a blue star"), "a red square", generate=1)


def test_other_texts_for_other_text_encoders_are_refused():
    pipeline, own = pipelines.pipeline("Stable Diffusion 3")
    called = functools.partial(pipeline, width=16, prompt_2="a blue star", **own)
    with pytest.raises(
        hw.InputError, match="^processor: expected a pipeline that passes one text .* at the same place"
    ):
        hw.view(pipeline.transformer, called, pipelines.TEXT)


@pytest.mark.parametrize("name", MISTAKES)
def test_pipelines_that_do_not_fit_are_refused(name):
    pipeline, own = pipelines.pipeline("PixArt")
    model, processor, text, others = MISTAKES[name][0](pipeline)
    called = functools.partial(processor, width=16, **own)
    with pytest.raises(hw.InputError, match=MISTAKES[name][1]):
        hw.view(model, called, text, **others)


def test_maps_of_relevance_are_refused():
    pipeline, _, steps = viewed("PixArt")
    with pytest.raises(
        hw.InputError, match="^seen: expected a view of a model that reads .*, got a step of a diffusion"
    ):
        hw.relevance(pipeline.transformer, steps[0], "red")
