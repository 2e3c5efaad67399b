"""Views of prompts with pictures. The oracle changes a small square of a picture in a model whose attention has zero
weights, and observes which tokens change.
"""

import base64
import functools
import io
import re
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from PIL import Image, ImageOps

import headwise as hw
import multimodal
import tiny
from headwise.analysis.view_prompts import picture_prompt

FAMILIES = [name for name in multimodal.NAMES if name not in ("Whisper", "PatchTST", "Florence-2")]

SQUARE = 0.06
"""Width and height of the changed square, as a fraction of the picture."""

BLUR = 0.1
"""Largest distance, as a fraction of the picture, over which resizing mixes pixels."""


def without_attention(model):
    """Return the model with attention whose outputs are zero, because its weights are."""
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "att" in path and not re.search(r"(q_proj|k_proj|query|key)$", path):
            torch.nn.init.zeros_(module.weight)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
    return model


def tokens_at(model, path, inputs, *, index):
    """Return the tokens that an attention module receives: argument number `index` of its float tensors."""
    received = []

    def read(module, arguments, named):
        tensors = [each for each in (*arguments, *named.values()) if isinstance(each, torch.Tensor)]
        tensors = [each for each in tensors if each.is_floating_point() and 1 < each.ndim < 4]
        received.append(tensors[index].flatten(0, -2))

    with model.get_submodule(path).register_forward_pre_hook(read, with_kwargs=True), torch.no_grad():
        model(**inputs)
    return received[0]


def inverted(picture, left, top):
    """Return a picture in which the colours of a small square are inverted."""
    box = [round(side) for side in (left * picture.width, top * picture.height)]
    size = [max(round(SQUARE * side), 3) for side in picture.size]
    region = (*box, box[0] + size[0], box[1] + size[1])
    changed = picture.copy()
    changed.paste(ImageOps.invert(picture.crop(region)), region[:2])
    return changed, [region[axis] / picture.size[axis % 2] for axis in range(4)]


CASES = [pytest.param(name, size, 1, id=f"{name}, {size}", marks=[] if size == 1 else [pytest.mark.slow])
         for name in FAMILIES for size in range(3)]  # fmt: skip
CASES += [pytest.param(name, 1, 2, id=f"{name}, two pictures", marks=[pytest.mark.slow])
          for name in FAMILIES if multimodal.ENTRIES[name].several]  # fmt: skip


@pytest.mark.parametrize(("name", "size", "count"), CASES)
@pytest.mark.filterwarnings("ignore:attention")
def test_each_token_stands_for_the_patch_whose_change_it_shows(name, size, count):
    case = multimodal.case(name)
    sizes = case.sizes[size:] + case.sizes[:size]
    pictures = [case.picture(each, seed) for seed, each in enumerate(sizes[:count])]
    processor = functools.partial(case.processor, max_patches=47) if name == "Pix2Struct" else case.processor
    seen = hw.view(case.model, processor, case.prompt(count), images=pictures)
    model = without_attention(case.model)
    inputs = dict(case.inputs(*pictures))
    generator = torch.Generator().manual_seed(size)
    checked = 0
    for number, text in enumerate(seen.texts):
        heads = [head for head in seen.heads if head.attention.keys == number]
        if not heads or not text.patches:
            continue
        head = heads[0]
        index = int(head.attention.queries != number)
        before = tokens_at(model, head.module, inputs, index=index)
        assert len(before) == len(text.tokens)
        for place in torch.rand(12, 3, generator=generator).tolist():
            chosen = int(place[0] * count)
            changed, (left, top, right, bottom) = inverted(pictures[chosen], *(0.9 * each for each in place[1:]))
            others = dict(case.inputs(*pictures[:chosen], changed, *pictures[chosen + 1 :]))
            after = tokens_at(model, head.module, others, index=index)
            # Pix2Struct divides a picture by the standard deviation of its colours, which the square changes.
            least = 0.05 if name == "Pix2Struct" else 1e-3
            has_changed = ((after - before).abs().amax(-1) > least * before.abs().max()).tolist()
            for token, patch in enumerate(text.patches):
                if patch is None:
                    assert not has_changed[token]
                    continue
                is_of_picture = text.pictures[patch.picture].name.startswith(
                    f"picture {chosen + 1}"[: 99 if count > 1 else 7]
                )
                x, y = (left + right) / 2, (top + bottom) / 2
                is_inside = patch.left <= x <= patch.left + patch.width and patch.top <= y <= patch.top + patch.height
                is_near = patch.left - BLUR <= right and left <= patch.left + patch.width + BLUR
                is_near &= patch.top - BLUR <= bottom and top <= patch.top + patch.height + BLUR
                assert has_changed[token] or not (is_of_picture and is_inside)
                assert (is_of_picture and is_near) or not has_changed[token]
                checked += has_changed[token]
    assert checked > 5


SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 37}


def vit(**options):
    """Return a tiny vision transformer with 3 x 3 patches."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(**SIZES, **{"image_size": 48, "patch_size": 16} | options)
    return tiny.with_distinct_heads(transformers.ViTModel(config))


def test_pixel_values_are_shown_with_the_weights_of_eager_attention():
    model, image = vit(), torch.rand(1, 3, 48, 48)
    seen = hw.view(model, None, images=image)
    expected = [(column / 3, row / 3, 1 / 3, 1 / 3) for row in range(3) for column in range(3)]
    assert seen.texts[0].patches[0] is None
    for patch, box in zip(seen.texts[0].patches[1:], expected, strict=True):
        assert patch[1:] == pytest.approx(box)
    assert [word.special for word in seen.words] == [True] + [False] * 9
    assert [word.text for word in seen.words[1:5]] == ["(1, 1)", "(1, 2)", "(1, 3)", "(2, 1)"]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = torch.cat(model(pixel_values=image, output_attentions=True).attentions).flatten(0, 1)
    weights = torch.stack([head.attention.weights.weights for head in seen.heads])
    torch.testing.assert_close(weights, attentions, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["LLaVA", "LLaVA-NeXT", "Qwen2-VL", "Llama 3.2 Vision", "SigLIP"])
def test_weights_of_all_texts_are_those_of_eager_attention(name):
    case = multimodal.case(name)
    count = 1 + case.several
    pictures = [case.picture(size, seed) for seed, size in enumerate(case.sizes[:count])]
    inputs = dict(case.inputs(*pictures))
    seen = hw.view(case.model, case.processor, case.prompt(count), images=pictures)
    recorded = {}

    class Weights(torch.overrides.TorchFunctionMode):
        """Record the weights of torch's attention, in the order of calls."""

        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function is torch.nn.functional.softmax or function is torch.Tensor.softmax:
                recorded.setdefault(len(recorded), result)
            return result

    case.model.set_attn_implementation("eager")
    with Weights(), torch.no_grad():
        case.model(**inputs)
    largest = {tuple(each.shape[-2:]): each for each in recorded.values() if each.ndim == 4}
    assert largest
    for head in seen.heads:
        weights = head.attention.weights.weights
        candidates = []
        for each in recorded.values():
            if each.ndim != 4 or head.head >= each.shape[1]:
                continue
            blocks = each[:, head.head]
            if blocks.shape[0] * blocks.shape[1] == weights.shape[0] and head.kind == "self":
                candidates.append(torch.block_diag(*blocks))
            elif blocks.shape[1:] == weights.shape:
                candidates.append(blocks[0])
        assert not candidates or any(torch.allclose(weights, each, atol=1e-5) for each in candidates), head


def test_the_picture_is_the_original_one():
    processor = transformers.ViTImageProcessorPil(size={"height": 48, "width": 48})
    image = Image.new("RGB", (96, 64), (200, 100, 0))
    image.paste((0, 50, 250), (48, 0, 96, 64))
    picture = hw.view(vit(), processor, images=image).texts[0].pictures[0]
    data = base64.b64decode(picture.source.removeprefix("data:image/png;base64,"))
    stored = Image.open(io.BytesIO(data))
    assert (picture.name, picture.width, picture.height) == ("picture", *stored.size) == ("picture", 96, 64)
    assert stored.getpixel((3, 20)) == (200, 100, 0)
    assert stored.getpixel((90, 20)) == (0, 50, 250)


def with_stem(stem, size):
    """Return a tiny vision transformer whose patches come from another module."""
    model = vit(image_size=size)
    side = stem(torch.zeros(1, 3, size, size)).shape[-1]
    if not hasattr(stem, "weight"):
        stem.weight = torch.nn.Parameter(torch.zeros(1))  # whose dtype the embeddings read
    model.embeddings.patch_embeddings.projection = stem
    model.embeddings.patch_embeddings.image_size = (size, size)
    model.embeddings.position_embeddings = torch.nn.Parameter(torch.randn(1, side**2 + 1, 48))
    return model


@pytest.mark.parametrize("image", [torch.zeros(1, 3, 32, 32), torch.rand(1, 3, 32, 32) * (torch.arange(32) < 16)])
def test_a_patch_that_is_dark_is_no_special_token(image):
    torch.manual_seed(0)
    stem = torch.nn.Sequential(torch.nn.Conv2d(3, 24, 4, 4), torch.nn.ReLU(), torch.nn.Conv2d(24, 48, 2, 2))
    torch.nn.init.constant_(stem[0].bias, -0.5)
    seen = hw.view(with_stem(stem, 32), None, images=image)
    assert [word.special for word in seen.words] == [True] + [False] * 16
    expected = [(column / 4, row / 4, 1 / 4, 1 / 4) for row in range(4) for column in range(4)]
    assert [pytest.approx(box) for box in expected] == [patch[1:] for patch in seen.texts[0].patches[1:]]


def test_overlapping_patches_have_overlapping_boxes_and_their_places_in_the_grid():
    stem = torch.nn.Conv2d(3, 48, 24, stride=8, padding=8)
    seen = hw.view(with_stem(stem, 32), None, images=torch.rand(1, 3, 32, 32))
    names = [f"({row}, {column})" for row in range(1, 5) for column in range(1, 5)]
    assert [word.text for word in seen.words[1:]] == names
    assert seen.texts[0].patches[6][1:] == pytest.approx((0.0, 0.0, 0.75, 0.75), abs=1e-6)  # row 2, column 2


def test_a_token_that_depends_on_the_whole_image_is_special():
    model = vit()
    model.embeddings.register_forward_hook(
        lambda module, arguments, output: torch.cat(
            [output[:, :1] + output[:, 1:].mean(1, keepdim=True), output[:, 1:]], 1
        )
    )
    seen = hw.view(model, None, images=torch.rand(1, 3, 48, 48))
    assert [word.special for word in seen.words] == [True] + [False] * 9


REFUSED = {  # model, side of the image, message
    "tokens of the whole image": (
        vit,
        48,
        "tokens that each depend on a part of a picture, got ",
    ),
    "patches that are masked at random": (
        lambda: transformers.ViTMAEModel(transformers.ViTMAEConfig(**SIZES, image_size=48, patch_size=8)).eval(),
        48,
        "the same tokens for the same input, got other tokens",
    ),
    "another size": (vit, 40, "a model that reads these inputs, got ValueError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_and_images_that_do_not_fit_are_refused(name):
    build, side, message = REFUSED[name]
    model = build()
    if name == "tokens of the whole image":
        model.embeddings.register_forward_hook(
            lambda module, arguments, output: output.mean(1, keepdim=True) + 0 * output
        )
    with pytest.raises(hw.InputError, match=f"^model: expected {message}"):
        hw.view(model, None, images=torch.rand(1, 3, side, side))


PROCESSOR = transformers.ViTImageProcessorPil(size={"height": 48, "width": 48})
MISTAKES = [
    (None, torch.rand(3, 48, 48), r"^images: expected pixel values \(1, channels, height, width\) without"),
    (None, "cat.png", "^images: expected pixel values .* got str"),
    (3, Image.new("RGB", (48, 48)), "^processor: expected a processor of transformers, got int"),
    (PROCESSOR, "no such file.png", "^images: expected a picture file, got 'no such file.png' .No such file"),
    (PROCESSOR, __file__, r"^images: expected a picture file, got .* \(no picture that Pillow reads\)"),
    (PROCESSOR, [], "^images: expected at least one picture, got an empty list"),
    (PROCESSOR, 3.5, "^images: expected PIL.Image objects or paths of files, got float"),
    (
        tiny.tokenizer("encoder"),
        Image.new("RGB", (48, 48)),
        "^processor: expected a processor that reads pictures, got the tokenizer ",
    ),
]


@pytest.mark.parametrize(("processor", "image", "message"), MISTAKES)
def test_mistakes_are_named(processor, image, message):
    with pytest.raises(hw.InputError, match=message):
        hw.view(vit(), processor, images=image)


def test_a_text_without_the_token_of_a_picture_is_refused():
    case = multimodal.case("LLaVA")
    with pytest.raises(
        hw.InputError, match="^images: expected pictures and a text that the processor reads, got .* 0 <image> tok"
    ):
        hw.view(case.model, case.processor, "w5 w6", images=case.picture(case.sizes[0], 0))


def test_a_region_of_a_picture_ranks_heads_by_the_attention_on_its_patches():
    case = multimodal.case("LLaVA")
    seen = hw.view(case.model, case.processor, case.prompt(1), images=case.picture((60, 60), 0))
    focus = seen.find([hw.Region(0.0, 0.0, 0.5, 0.5)], queries=["w6"])
    text = seen.texts[0]
    inside = [
        index
        for index, patch in enumerate(text.patches)
        if patch is not None and patch.left + patch.width / 2 < 0.5 and patch.top + patch.height / 2 < 0.5
    ]
    query = [word.text for word in text.words].index("w6")
    token = text.word_of.tolist().index(query)
    assert 9 <= len(inside) <= 16
    for each in focus.heads:
        weights = each.head.attention.weights.weights[token]
        assert each.share == pytest.approx(float(weights[inside].sum()), rel=1e-5)
        assert each.uniform == pytest.approx(len(inside) / (token + 1), rel=1e-5)
    assert focus.heads[0].excess.value == max(each.excess.value for each in focus.heads)
    with pytest.raises(
        hw.InputError, match="^focus: expected a region with the centre of a patch .picture., got picture 2"
    ):
        seen.find([hw.Region(0.0, 0.0, 0.5, 0.5, "picture 2")])
    with pytest.raises(hw.InputError, match="^region: expected left < right and top < bottom, from 0 to 1, got"):
        hw.Region(0.5, 0.0, 0.2, 1.0)


def test_a_plain_question_becomes_a_message_by_the_chat_template_and_begins_once():
    case = multimodal.case("LLaVA")
    case.processor.chat_template = (
        "{{ bos_token }}{% for part in messages[0].content %}"
        "{% if part.type == 'image' %}<image>\n{% else %}{{ part.text }}{% endif %}{% endfor %}"
    )
    case.processor.tokenizer.bos_token = "[CLS]"
    seen = hw.view(case.model, case.processor, "w5 w6", images=case.picture(case.sizes[0], 0))
    words = [word.text for word, patch in zip(seen.words, seen.texts[0].patches, strict=True) if patch is None]
    assert words == ["[CLS]", "\\n", "w5", "w6"]
    assert seen.text == "\\n w5 w6"


def test_a_processor_whose_output_depends_on_colours_is_refused():
    def process(images, return_tensors):
        width = 48 if images[0].getpixel((0, 0))[0] == 200 else 32
        return PROCESSOR.__class__(size={"height": 48, "width": width})(images=images, return_tensors=return_tensors)

    with pytest.raises(
        hw.InputError, match="^processor: expected one whose output depends on the size of a picture al"
    ):
        hw.view(vit(), process, images=Image.new("RGB", (48, 48), (200, 0, 0)))


def test_files_and_transparent_pictures_are_read_as_by_the_processor(tmp_path):
    case = multimodal.case("LLaVA")
    picture = case.picture((60, 40))
    exif = picture.getexif()
    exif[274] = 6  # to be turned by 90 degrees
    picture.save(tmp_path / "turned.png", exif=exif)
    transparent = picture.copy()
    transparent.putalpha(Image.linear_gradient("L").resize(picture.size))
    transparent.save(tmp_path / "transparent.png")
    palette = picture.quantize(8)
    palette.info["transparency"] = 3
    for given in (str(tmp_path / "turned.png"), str(tmp_path / "transparent.png"), transparent, palette):
        seen = hw.view(case.model, case.processor, case.prompt(1), images=given)
        assert torch.equal(seen.run.inputs["pixel_values"], case.inputs(given)["pixel_values"])


def test_small_patches_between_padding_on_both_sides_are_found():
    processor = multimodal.pictures_of("donut", size={"height": 64, "width": 48}, do_align_long_axis=False)
    seen = hw.view(vit(image_size=(64, 48), patch_size=4), processor, images=multimodal.picture(45, 90))
    patches = [patch for patch in seen.texts[0].patches if patch is not None]
    assert len(patches) == 8 * 16
    for number, patch in enumerate(patches):
        row, column = divmod(number, 8)
        assert patch[1:] == pytest.approx((column / 8, row / 16, 1 / 8, 1 / 16), abs=0.01)


def test_many_tokens_of_the_whole_image_are_refused_after_few_gradients():
    model = vit(patch_size=4)  # 144 patches
    model.embeddings.register_forward_hook(
        lambda module, arguments, output: output + output.mean(1, keepdim=True).tanh()
    )
    with (
        mock.patch.object(torch.autograd, "grad", wraps=torch.autograd.grad) as gradients,
        pytest.raises(hw.InputError, match="^model: expected tokens that each depend on a part of a picture"),
    ):
        hw.view(model, images=torch.rand(1, 3, 48, 48))
    assert gradients.call_count < 100


@pytest.mark.parametrize("without_gradients", [torch.inference_mode, torch.no_grad])
def test_a_context_without_gradients_changes_no_view(without_gradients):
    case = multimodal.case("LLaVA")
    arguments = {"text": case.prompt(1), "images": case.picture(case.sizes[0])}
    expected = hw.view(case.model, case.processor, **arguments)
    with without_gradients():
        seen = hw.view(case.model, case.processor, **arguments)
    assert seen.texts[0].patches == expected.texts[0].patches
    assert seen.table().equals(expected.table())


def test_weights_without_gradients_are_refused():
    with torch.inference_mode():
        model = vit()
    with pytest.raises(hw.InputError, match="^model: expected weights with which gradients .*inference_mode$"):
        hw.view(model, images=torch.rand(1, 3, 48, 48))


def test_pictures_are_not_truncated():
    with pytest.raises(hw.InputError, match="^truncate: expected False with pictures, got True"):
        hw.view(vit(), None, images=torch.rand(1, 3, 48, 48), truncate=True)


MISMATCHES = [  # model, processor, message
    (
        "LLaVA",
        "Qwen2-VL",
        "^processor: expected the processor of Llava.*, with token ids below 100, got Qwen2VL.* 102$",
    ),
    (
        "LLaVA",
        "CLIP",
        "^processor: expected the processor of Llava.*, whose token for a picture has the id 99, got CLIPP",
    ),
    ("Qwen2-VL", "LLaVA", "^processor: expected the processor of Qwen2VL.* id 100, got LlavaProcessor .* the id 99$"),
    (
        "LLaVA",
        "BLIP-2",
        "^processor: .* has 49 features for these pictures, got Blip2Processor with 5 tokens for them$",
    ),
    (
        "LLaVA",
        "ViT",
        "^processor: expected a processor that returns input_ids, which Llava.* reads, got ViT.* pixel_val",
    ),
    ("LLaVA", "Pix2Struct", "^text: expected a text, which Llava.* reads with the pictures, got None$"),
    (
        "LLaVA-NeXT",
        "LLaVA",
        "^processor: expected LlavaNextProcessor, the processor of LlavaNext.*, got LlavaProcessor$",
    ),
    ("ViT", "CLIP", "^text: expected None for ViTForImageClassification, which reads no token ids, got 5 token ids$"),
]


@pytest.mark.parametrize(("name", "other", "message"), MISMATCHES)
@pytest.mark.parametrize("generate", [0, 2])
def test_a_processor_of_another_model_is_named_as_the_cause(name, other, message, generate):
    model, case = multimodal.case(name).model, multimodal.case(other)
    if generate and not multimodal.ENTRIES[name].generates:
        pytest.skip("the model does not generate")
    with pytest.raises(hw.InputError, match=message):
        hw.view(model, case.processor, case.prompt(1), images=case.picture(case.sizes[0]), generate=generate)


def test_an_output_that_the_model_does_not_take_is_named():
    def process(images, return_tensors):
        return PROCESSOR(images=images, return_tensors=return_tensors) | {"sizes": torch.tensor([[48, 48]])}

    model = vit(image_size=32)
    with pytest.raises(hw.InputError, match="^processor: .* are arguments of ViTModel, got process with sizes$"):
        hw.view(model, process, images=Image.new("RGB", (48, 48)))


@pytest.mark.parametrize("name", ["PaliGemma", "Gemma 3", "Qwen2-VL", "Idefics3"])
def test_generated_tokens_are_those_of_generate_and_are_viewed_as_they_were_generated(name):
    case = multimodal.case(name)
    picture = case.picture(case.sizes[0])
    seen = hw.view(case.model, case.processor, case.prompt(1), images=picture, generate=3)
    inputs = case.inputs(picture)
    with torch.no_grad():
        expected = case.model.generate(**inputs, max_new_tokens=3, do_sample=False)[0]
    text = next(text for text in seen.texts if text.first_generated is not None)
    length = inputs["input_ids"].shape[1]
    assert text.ids[0, text.first_generated :].tolist() == expected[length:].tolist()
    # The last token attends as it does in a step of generation, which reads the earlier tokens from a cache.
    head = next(each for each in seen.heads if each.attention.queries == seen.texts.index(text))
    with torch.no_grad(), hw.watch(case.model, detail=hw.WeightCapture(rows=[-1])) as heads:
        case.model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    last = heads.details[head.module].rows[0, head.head, -1]
    weights = head.attention.weights.weights[-1, -len(last) :]  # a cache of a window has the last keys alone
    torch.testing.assert_close(weights, last, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["LLaVA", "Qwen2-VL", "Idefics3", "Gemma 3", "BLIP-2"])
def test_padding_changes_neither_patches_nor_weights_nor_statistics(name, side):
    case = multimodal.case(name)
    picture = case.picture(case.sizes[0])
    plain = hw.view(case.model, case.processor, case.prompt(1), images=picture)
    case.processor.tokenizer.padding_side = side
    longer = case.inputs(picture)["input_ids"].shape[1] + 7
    processor = functools.partial(case.processor, padding="max_length", max_length=longer)
    padded = hw.view(case.model, processor, case.prompt(1), images=picture)
    number = next(index for index, text in enumerate(plain.texts) if text.ids is not None)
    before, after = plain.texts[number], padded.texts[number]
    real = [index for index, token in enumerate(after.tokens) if token.text != "[PAD]"]
    assert len(after.tokens) == len(real) + 7
    assert [token.special for token in after.tokens if token.text == "[PAD]"] == [True] * 7
    assert [after.tokens[index].text for index in real] == [token.text for token in before.tokens]
    assert [after.patches[index] for index in real if after.patches] == list(before.patches)
    checked = 0
    for one, other in zip(plain.heads, padded.heads, strict=True):
        if (one.attention.queries, one.attention.keys) != (number, number):
            continue
        weights = other.attention.weights.weights[real]
        assert float(weights.sum(-1).sub(weights[:, real].sum(-1)).abs().max()) < 1e-6
        torch.testing.assert_close(weights[:, real], one.attention.weights.weights, rtol=1e-4, atol=1e-5)
        for statistic in ("entropy", "first", "special", "self", "confidence"):
            assert other.means[statistic] == pytest.approx(one.means[statistic], abs=1e-4), statistic
        checked += 1
    assert checked


def test_a_padded_prompt_is_continued_after_its_last_word_alone():
    case = multimodal.case("LLaVA")
    picture = case.picture(case.sizes[0])
    processor = functools.partial(case.processor, padding="max_length", max_length=64)
    plain = hw.view(case.model, case.processor, case.prompt(1), images=picture, generate=3)
    case.processor.tokenizer.padding_side = "left"
    padded = hw.view(case.model, processor, case.prompt(1), images=picture, generate=3)
    new = [seen.texts[0].tokens[seen.texts[0].first_generated :] for seen in (plain, padded)]
    assert new[0] == new[1]
    case.processor.tokenizer.padding_side = "right"
    with pytest.raises(
        hw.InputError, match="^generate: expected a prompt that ends with its last word, got padding aft"
    ):
        hw.view(case.model, processor, case.prompt(1), images=picture, generate=3)


def test_prompts_of_a_list_are_viewed_as_each_alone():
    case = multimodal.case("LLaVA")
    pictures = [case.picture(size, seed) for seed, size in enumerate(case.sizes)]
    prompts, parts = [case.prompt(1), case.prompt(2)], [pictures[:1], pictures[1:]]
    together = hw.view(case.model, case.processor, prompts, images=parts)
    for seen, prompt, part in zip(together, prompts, parts, strict=True):
        alone = hw.view(case.model, case.processor, prompt, images=part)
        assert seen.texts[0].patches == alone.texts[0].patches
        for one, other in zip(seen.heads, alone.heads, strict=True):
            torch.testing.assert_close(one.attention.weights.weights, other.attention.weights.weights)


def around_the_brightest_part(images, return_tensors):
    """Crop each picture to three quarters around its brightest column and row, and process it."""
    cropped = []
    for picture in images:
        brightness = torch.tensor(np.asarray(picture.convert("L")), dtype=torch.float64)
        sides = []
        for axis, size in ((0, picture.width), (1, picture.height)):
            kept = 3 * size // 4
            sums = brightness.mean(axis).unfold(0, kept, 1).mean(-1)
            sides.append((int(sums.argmax()), int(sums.argmax()) + kept))
        (left, right), (top, bottom) = sides
        cropped.append(picture.crop((left, top, right, bottom)))
    return PROCESSOR(images=cropped, return_tensors=return_tensors)


@pytest.mark.parametrize("size", multimodal.SIZES)
def test_a_processor_that_moves_pixels_by_their_colours_is_refused(size):
    with pytest.raises(
        hw.InputError, match="^processor: expected one that places pixels by the size of a picture alone"
    ):
        hw.view(vit(), around_the_brightest_part, images=multimodal.picture(*size))


PLAIN = [Image.new("RGB", size, colour) for size in ((60, 60), (1, 1), (3, 5), (900, 500))
         for colour in ((0, 0, 0), (127, 127, 127), (255, 255, 255))]  # fmt: skip
PLAIN += [multimodal.picture(1200, 700), multimodal.picture(12, 9), multimodal.picture(300, 40)]


@pytest.mark.parametrize("name", ["LLaVA", "Qwen2-VL", "Pix2Struct", "DINOv2 with registers"])
def test_no_plain_small_or_large_picture_is_refused(name):
    case = multimodal.case(name)
    processor = functools.partial(case.processor, max_patches=47) if name == "Pix2Struct" else case.processor
    for picture in PLAIN:
        prompt = picture_prompt(case.model, processor, case.prompt(1), picture)
        assert any(bool((each.picture == 0).any()) for each in prompt.places.values())
