"""`view_image`: the attention of every head of a vision model on one image, between patches of the image."""

import base64
import inspect
import io
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.analysis.head_view import ViewedText
from headwise.analysis.image_patches import Box, grid_places, patch_boxes
from headwise.analysis.view import KEPT_TOKENS, view_of
from headwise.analysis.view_result import View
from headwise.checks import require_module
from headwise.data.batches import device_of
from headwise.data.tokenization import Token, Word
from headwise.errors import HeadwiseError, InputError, require
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, Interceptor
from headwise.intercept.model_name import model_name
from headwise.page.contents import Picture
from headwise.shapes import Float


class _Attention(NamedTuple):
    """First self-attention of a model.

    Attributes:
        path: path of the module.
        tokens: number of tokens.
    """

    path: str
    tokens: int


def view_image(
    model: nn.Module, processor: Any, image: Any, *, title: str | None = None, keep_all: int = KEPT_TOKENS
) -> View:
    """Run a vision model on one image, and return the attention of each head between patches of the image.

    The part of the image that each token stands for is derived: it is the part on which the token depends before the
    first attention. Tokens that depend on no part, such as a class token, or on the whole image are special tokens.

    Args:
        model: a vision transformer in evaluation mode whose tokens depend on parts of the image before the first
            attention.
        processor: its image processor, of `transformers`; None if `image` is a tensor that the model reads.
        image: an image that the processor reads, such as a `PIL.Image`, or pixel values `(1, channels, height,
            width)`.
        title: name of the model, for display; by default that of its hub id, folder or class.
        keep_all: number of tokens up to which all attention weights are kept, as for `view`.

    Raises:
        InputError: the model does not read images; its tokens do not stand for parts of the image; no self-attention
            over them was intercepted.
        MissingExtra: Pillow, which stores the image, is not installed.

    Example:
        >>> seen = headwise.view_image(model, processor, PIL.Image.open("cat.jpg"))  # doctest: +SKIP
        >>> headwise.write_page("cat.html", seen)  # doctest: +SKIP
    """
    require_module(model)
    require("PIL.Image", purpose="showing an image", extra="plot")
    if model.training:
        raise InputError("model", expected="a model in evaluation mode", got="training", remedy="call model.eval()")
    inputs = {name: value.to(device_of(model)) for name, value in _inputs(model, processor, image).items()}
    attention = _first_attention(model, inputs)
    boxes = patch_boxes(model, attention.path, inputs, attention.tokens)
    text = _patches(boxes, _picture(inputs["pixel_values"][0], processor, boxes))
    title = model_name(model) if title is None else title
    return view_of(model, [text], inputs, title=title, keep_all=keep_all)


def _inputs(model: nn.Module, processor: Any, image: Any) -> dict[str, Tensor]:
    """Return the arguments of the model: the pixel values, and other outputs of the processor that it accepts."""
    if processor is None:
        if not isinstance(image, Tensor) or image.ndim != 4 or len(image) != 1 or not image.is_floating_point():
            got = f"{tuple(image.shape)}, {image.dtype}" if isinstance(image, Tensor) else type(image).__name__
            raise InputError("image", expected="pixel values (1, channels, height, width) without processor", got=got)
        return {"pixel_values": image}
    if not callable(processor):
        raise InputError("processor", expected="an image processor of transformers", got=type(processor).__name__)
    try:
        outputs = processor(images=image, return_tensors="pt")
    except Exception as error:
        reason = f"{type(error).__name__} ({' '.join(str(error).split())[:200]})"
        raise InputError("image", expected="an image that the processor reads", got=reason) from error
    accepted = inspect.signature(model.forward).parameters
    inputs = {name: value for name, value in outputs.items() if isinstance(value, Tensor) and name in accepted}
    pixels = inputs.get("pixel_values")
    if pixels is None or pixels.ndim != 4 or len(pixels) != 1:
        got = "none" if pixels is None else f"shape {tuple(pixels.shape)}"
        raise InputError("processor", expected="pixel_values (1, channels, height, width) for the model", got=got)
    return inputs


def _first_attention(model: nn.Module, inputs: dict[str, Tensor]) -> _Attention:
    """Return the first attention of a model, which has to be self-attention over all tokens of the image at once.

    In later stages of other models, a token no longer stands for a part of the image.
    """
    calls: list[Call] = []

    class Probe(Interceptor):
        """Interceptor that records all attention calls."""

        def observe(self, call: Call) -> None:
            """Record the call."""
            calls.append(call)

    try:
        with torch.no_grad(), intercepted(model, Probe()):
            model(**inputs)
    except HeadwiseError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__} ({' '.join(str(error).split())[:200]})"
        raise InputError("model", expected="a vision model that reads these pixels", got=reason) from error
    expected = "self-attention over all tokens of the image at once, in the first attention"
    if not calls:
        raise InputError("model", expected=expected, got="no attention that can be seen")
    grid, site = calls[0].grid, calls[0].site
    if grid.batch != 1 or grid.queries != grid.keys or site.cross:
        got = f"a batch of {grid.batch} with {grid.queries} queries and {grid.keys} keys in {site.path}"
        raise InputError("model", expected=expected, got=got)
    return _Attention(site.path, grid.queries)


def _patches(boxes: list[Box | None], picture: Picture) -> ViewedText:
    """Return the tokens of an image as a text whose words are patches, named by their row and column."""
    names = [
        f"token {index}" if place is None else f"({place[0] + 1}, {place[1] + 1})"
        for index, place in enumerate(grid_places(boxes))
    ]
    tokens = tuple(Token(name, box is None, True, False) for name, box in zip(names, boxes, strict=True))
    words = tuple(Word(name, box is None, box is not None) for name, box in zip(names, boxes, strict=True))
    return ViewedText("image", "", False, tokens, words, torch.arange(len(boxes)), picture=picture)


def _picture(pixels: Float[Tensor, "channels height width"], processor: Any, boxes: list[Box | None]) -> Picture:
    """Return the image that the model reads, as a PNG file in text."""
    from PIL import Image

    values = pixels.detach().float().cpu()
    mean, std = getattr(processor, "image_mean", None), getattr(processor, "image_std", None)
    if getattr(processor, "do_normalize", False) and mean is not None and std is not None:
        values = values * torch.tensor(std)[:, None, None] + torch.tensor(mean)[:, None, None]
    else:  # the scale is unknown
        low, high = values.min(), values.max()
        values = (values - low) / (high - low).clamp(min=1e-12)
    values = values.expand(3, -1, -1) if len(values) == 1 else values[:3]
    integers = (values.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()
    buffer = io.BytesIO()
    Image.fromarray(integers.numpy()).save(buffer, format="PNG", optimize=True)
    height, width = pixels.shape[1:]
    source = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
    fractions = [None if box is None else box.fractions(height, width) for box in boxes]
    return Picture(source, width, height, tuple(fractions))
