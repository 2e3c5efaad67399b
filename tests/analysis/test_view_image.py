"""Views of images: patches derived from gradients, against the known grids of vision transformers."""

import base64
import io

import pytest
import torch
import transformers
from PIL import Image

import headwise as hw
import tiny
from headwise.analysis.view_image import patch_boxes

SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 37}
MODELS = {  # configuration, tokens before the patches, patches on a side, pixels of a patch
    "vit": (transformers.ViTConfig(**SIZES, image_size=48, patch_size=16), 1, 3, 16),
    "deit": (transformers.DeiTConfig(**SIZES, image_size=48, patch_size=16), 2, 3, 16),
    "dinov2": (
        transformers.Dinov2WithRegistersConfig(**SIZES, image_size=42, patch_size=14, num_register_tokens=4),
        5,
        3,
        14,
    ),
    "clip": (transformers.CLIPVisionConfig(**SIZES, image_size=48, patch_size=16), 1, 3, 16),
}


def vision_model(name):
    """Return a tiny vision model with distinct heads."""
    torch.manual_seed(0)
    return tiny.with_distinct_heads(transformers.AutoModel.from_config(MODELS[name][0]))


@pytest.mark.parametrize("name", MODELS)
def test_each_patch_is_found_in_the_image_and_has_the_weights_of_eager_attention(name):
    config, special, side, pixels = MODELS[name]
    model, image = vision_model(name), torch.rand(1, 3, config.image_size, config.image_size)
    shown = hw.view_image(model, None, image)
    picture = shown.texts[0].picture
    patches = [(column / side, row / side, 1 / side, 1 / side) for row in range(side) for column in range(side)]
    assert picture.boxes[:special] == (None,) * special
    for box, expected in zip(picture.boxes[special:], patches, strict=True):
        assert box == pytest.approx(expected)
    assert [word.special for word in shown.words] == [True] * special + [False] * side**2
    assert [word.text for word in shown.words[special:]][: side + 1] == ["(1, 1)", "(1, 2)", "(1, 3)", "(2, 1)"]
    assert (picture.width, picture.height) == (side * pixels, side * pixels)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = torch.cat(model(pixel_values=image, output_attentions=True).attentions).flatten(0, 1)
    weights = torch.stack([head.attention.weights.weights for head in shown.heads])
    torch.testing.assert_close(weights, attentions, rtol=1e-4, atol=1e-6)


def test_the_picture_is_what_the_model_reads():
    processor = transformers.ViTImageProcessorPil(size={"height": 48, "width": 48})
    image = Image.new("RGB", (96, 64), (200, 100, 0))
    image.paste((0, 50, 250), (48, 0, 96, 64))
    shown = hw.view_image(vision_model("vit"), processor, image, title="tiny")
    data = base64.b64decode(shown.texts[0].picture.source.removeprefix("data:image/png;base64,"))
    stored = Image.open(io.BytesIO(data))
    assert stored.size == (48, 48)
    assert stored.getpixel((3, 20)) == pytest.approx((200, 100, 0), abs=1)
    assert stored.getpixel((44, 20)) == pytest.approx((0, 50, 250), abs=1)


def test_overlapping_patches_have_overlapping_boxes():
    model = vision_model("vit")
    embedding = model.embeddings.patch_embeddings
    embedding.projection = torch.nn.Conv2d(3, 48, kernel_size=20, stride=14)
    pixels = torch.rand(1, 3, 48, 48)
    boxes = patch_boxes(model, "layers.0.attention", {"pixel_values": pixels}, 10)
    assert boxes[0] is None
    assert [tuple(box) for box in boxes[1:4]] == [(0, 0, 20, 20), (0, 14, 20, 34), (0, 28, 20, 48)]


def test_images_whose_tokens_are_no_patches_are_refused():
    model = vision_model("vit")
    model.embeddings.register_forward_hook(lambda module, arguments, output: output + output.mean())
    with pytest.raises(hw.InputError, match="^model: expected tokens that each depend on a part of the image, got tok"):
        hw.view_image(model, None, torch.rand(1, 3, 48, 48))


WINDOWS = {"depths": [1, 1, 1], "num_heads": [2, 2, 2], "window_size": 4}
STAGES = {"num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [16, 32], "num_attention_heads": [1, 2]}
STAGES |= {"patch_sizes": [7, 3], "strides": [4, 2]}
IN_ONE = "self-attention over all tokens of the image at once"
REFUSED = {  # configuration, pixels on a side, message
    "swin": (transformers.SwinConfig(embed_dim=12, **WINDOWS, image_size=64, patch_size=4), 64, IN_ONE),
    "pooled keys": (transformers.SegformerConfig(**STAGES, sr_ratios=[4, 1]), 64, IN_ONE),
    "later stages": (
        transformers.SegformerConfig(**STAGES, sr_ratios=[1, 1]),
        32,
        "attention over the same patches in all layers, got 16 q",
    ),
    "patches that are masked at random": (
        transformers.ViTMAEConfig(**SIZES, image_size=48, patch_size=8),
        48,
        "the same tokens for the same image, got other tokens",
    ),
    "another size": (MODELS["vit"][0], 40, "a vision model that reads these pixels, got ValueError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_and_images_that_do_not_fit_are_refused(name):
    config, side, message = REFUSED[name]
    with pytest.raises(hw.InputError, match=f"^model: expected {message}"):
        hw.view_image(transformers.AutoModel.from_config(config).eval(), None, torch.rand(1, 3, side, side))


@pytest.mark.parametrize(
    ("processor", "image", "message"),
    [
        (None, torch.rand(3, 48, 48), r"^image: expected pixel values \(1, channels, height, width\) without"),
        (None, "cat.png", "^image: expected pixel values .* got str"),
        (3, torch.rand(1, 3, 48, 48), "^processor: expected an image processor of transformers, got int"),
        (transformers.ViTImageProcessorPil(), "no image", "^image: expected an image that the processor reads, got "),
    ],
)
def test_mistakes_are_named(processor, image, message):
    with pytest.raises(hw.InputError, match=message):
        hw.view_image(vision_model("vit"), processor, image)


def with_stem(stem, size):
    """Return a tiny ViT whose patches come from another module."""
    model = tiny.with_distinct_heads(transformers.ViTModel(transformers.ViTConfig(**SIZES, image_size=size)))
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
    shown = hw.view_image(with_stem(stem, 32), None, image)
    assert [word.special for word in shown.words] == [True] + [False] * 16
    expected = [(column / 4, row / 4, 1 / 4, 1 / 4) for row in range(4) for column in range(4)]
    assert [pytest.approx(box) for box in expected] == list(shown.texts[0].picture.boxes[1:])


def test_patches_that_reach_over_the_border_have_their_place_in_the_grid():
    shown = hw.view_image(
        with_stem(torch.nn.Conv2d(3, 48, 24, stride=8, padding=8), 32), None, torch.rand(1, 3, 32, 32)
    )
    names = [f"({row}, {column})" for row in range(1, 5) for column in range(1, 5)]
    assert [word.text for word in shown.words[1:]] == names


def test_a_token_that_depends_on_the_whole_image_is_special():
    model = vision_model("vit")
    model.embeddings.register_forward_hook(
        lambda module, arguments, output: torch.cat(
            [output[:, :1] + output[:, 1:].mean(1, keepdim=True), output[:, 1:]], 1
        )
    )
    shown = hw.view_image(model, None, torch.rand(1, 3, 48, 48))
    assert [word.special for word in shown.words] == [True] + [False] * 9
