"""`view_image`: the attention of every head of a vision model on one image, between patches of the image.

The part of the image that each token stands for is derived from the gradients of the tokens.
"""

import base64
import inspect
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.analysis.view import KEPT_TOKENS, errors_of, view_of
from headwise.analysis.view_result import View, ViewedText
from headwise.checks import require_module
from headwise.data.batches import device_of
from headwise.data.tokenization import Token, Word
from headwise.errors import InputError, require
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, Interceptor
from headwise.intercept.model_name import model_name
from headwise.page.contents import Picture
from headwise.shapes import Float

CONTRASTS = (1.0, 10.0)
"""Standard deviations of the random pixels with which dependence is tested."""


class Box(NamedTuple):
    """Rectangle of pixels of an image. `top` and `left` are its first row and column; `bottom` and `right` are one more
    than its last row and column.
    """

    top: int
    left: int
    bottom: int
    right: int


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
    path, tokens = _first_attention(model, inputs)
    boxes = patch_boxes(model, path, inputs, tokens)
    text = _patches(boxes, _picture(inputs["pixel_values"][0], processor, boxes))
    title = model_name(model) if title is None else title
    return view_of(model, [text], inputs, title=title, keep_all=keep_all)


def _inputs(model: nn.Module, processor: Any, image: Any) -> dict[str, Tensor]:
    """Return the arguments with which to call the model: the pixel values of the image, and other outputs of the image
    processor that the model accepts. Without a processor, `image` itself has the pixel values.
    """
    if processor is None:
        if not isinstance(image, Tensor) or image.ndim != 4 or len(image) != 1 or not image.is_floating_point():
            got = f"{tuple(image.shape)}, {image.dtype}" if isinstance(image, Tensor) else type(image).__name__
            raise InputError("image", expected="pixel values (1, channels, height, width) without processor", got=got)
        return {"pixel_values": image}
    if not callable(processor):
        raise InputError("processor", expected="an image processor of transformers", got=type(processor).__name__)
    with errors_of("image", expected="an image that the processor reads"):
        outputs = processor(images=image, return_tensors="pt")
    accepted = inspect.signature(model.forward).parameters
    inputs = {name: value for name, value in outputs.items() if isinstance(value, Tensor) and name in accepted}
    pixels = inputs.get("pixel_values")
    if pixels is None or pixels.ndim != 4 or len(pixels) != 1:
        got = "none" if pixels is None else f"shape {tuple(pixels.shape)}"
        raise InputError("processor", expected="pixel_values (1, channels, height, width) for the model", got=got)
    return inputs


def _first_attention(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[str, int]:
    """Run a vision model, and return the path of the first module that attends and the number of its tokens. Raise
    `InputError` if its attention is not self-attention over all tokens of the image at once.
    """
    calls: list[Call] = []

    class Probe(Interceptor):
        def observe(self, call: Call) -> None:
            calls.append(call)

    reads = errors_of("model", expected="a vision model that reads these pixels")
    with reads, torch.no_grad(), intercepted(model, Probe()):
        model(**inputs)
    expected = "self-attention over all tokens of the image at once, in the first attention"
    if not calls:
        raise InputError("model", expected=expected, got="no attention that can be seen")
    grid, site = calls[0].grid, calls[0].site
    if grid.batch != 1 or grid.queries != grid.keys or site.cross:
        got = f"a batch of {grid.batch} with {grid.queries} queries and {grid.keys} keys in {site.path}"
        raise InputError("model", expected=expected, got=got)
    return site.path, grid.queries


def patch_boxes(model: nn.Module, path: str, inputs: Mapping[str, Tensor], tokens: int) -> list[Box | None]:
    """Return, for each token, the smallest rectangle that contains all pixels on which the token depends. Dependence is
    tested at the input of the module at `path`, the first that attends. The result is None for a token that depends on
    no pixel, or on the whole image.

    A token depends on a pixel if the gradient is not zero for one of several images: the given one, and random ones of
    growing contrast and both signs, for which units that are off in the given image are on.
    """
    pixels, generator = inputs["pixel_values"], torch.Generator().manual_seed(0)
    with torch.no_grad():
        first, again = (_input_of(model, path, inputs, tokens) for _ in range(2))
    if not torch.allclose(first, again, rtol=1e-4, atol=1e-6):
        got = "other tokens in a second call, as of a model that masks patches at random"
        raise InputError("model", expected="the same tokens for the same image", got=got)
    noise = torch.randn(pixels.shape, generator=generator).to(pixels)
    images = [pixels.detach().clone(), *(sign * contrast * noise for contrast in CONTRASTS for sign in (1, -1))]
    depends = torch.zeros(tokens, *pixels.shape[2:], dtype=torch.bool)
    for image in images:
        embedded = _input_of(model, path, {**inputs, "pixel_values": image.requires_grad_()}, tokens)
        # With random factors, contributions of a pixel do not cancel.
        factors = torch.rand(embedded.shape[-1], generator=generator).to(embedded) + 0.5
        for token, value in enumerate(embedded[0] @ factors):
            if not value.requires_grad:
                continue
            (gradient,) = torch.autograd.grad(value, image, retain_graph=True, allow_unused=True)
            if gradient is not None:
                depends[token] |= (gradient[0] != 0).any(0).cpu()
    boxes: list[Box | None] = []
    for of_token in depends:
        rows, columns = (of_token.any(axis).nonzero()[:, 0].tolist() for axis in (1, 0))
        boxes.append(Box(rows[0], columns[0], rows[-1] + 1, columns[-1] + 1) if rows else None)
    whole = Box(0, 0, *pixels.shape[2:])
    if all(box is None or box == whole for box in boxes):
        got = f"tokens that depend on {'no pixel' if set(boxes) == {None} else 'the whole image'} in {path}"
        raise InputError("model", expected="tokens that each depend on a part of the image", got=got)
    return [None if box == whole else box for box in boxes]


def _input_of(
    model: nn.Module, path: str, inputs: Mapping[str, Tensor], tokens: int
) -> Float[Tensor, "1 tokens width"]:
    """Run a model up to the module at `path`, and return the first argument of this module."""

    class Reached(Exception):
        """Exception that stops a run of the model just before a certain module. Its argument is the input of this
        module.
        """

    def stop(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        tensors = [value for value in (*arguments, *named.values()) if isinstance(value, Tensor)]
        fitting = [tensor for tensor in tensors if tensor.ndim == 3 and tuple(tensor.shape[:2]) == (1, tokens)]
        if not fitting:
            raise InputError("model", expected=f"an input (1, {tokens}, width) of {path}", got="another")
        raise Reached(fitting[0])

    hook = model.get_submodule(path).register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with hook, torch.set_grad_enabled(inputs["pixel_values"].requires_grad):
            model(**inputs)
    except Reached as reached:
        embedded: Tensor = reached.args[0]
        return embedded
    raise InputError("model", expected=f"the same modules in each call, with {path}", got="a call without it")


def _patches(boxes: Sequence[Box | None], picture: Picture) -> ViewedText:
    """Return the tokens of an image as a text. Each word is a patch (part of the image), named by its row and column,
    such as "(1, 2)"; tokens without a patch are special tokens.
    """
    # Overlapping boxes are cut off at the border of the image, so their order is that of their centres, not corners.
    centres = [None if box is None else (box.top + box.bottom, box.left + box.right) for box in boxes]
    known = [centre for centre in centres if centre is not None]
    if len(set(known)) < len(known):
        got = "several tokens for the same part"
        raise InputError("model", expected="tokens for different parts of the image", got=got)
    rows, columns = (sorted(set(axis)) for axis in zip(*known, strict=True))
    names = [
        f"token {index}" if centre is None else f"({rows.index(centre[0]) + 1}, {columns.index(centre[1]) + 1})"
        for index, centre in enumerate(centres)
    ]
    tokens = tuple(Token(name, box is None, True, False) for name, box in zip(names, boxes, strict=True))
    words = tuple(Word(name, box is None, box is not None) for name, box in zip(names, boxes, strict=True))
    return ViewedText("image", "", False, tokens, words, torch.arange(len(boxes)), picture=picture)


def _picture(pixels: Float[Tensor, "channels height width"], processor: Any, boxes: list[Box | None]) -> Picture:
    """Return the image as the model reads it, for display: a PNG file in base64, and in addition the rectangle of each
    token in the image. The processor's normalisation of pixel values is undone.
    """
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
    fractions = tuple(
        None
        if box is None
        else (box.left / width, box.top / height, (box.right - box.left) / width, (box.bottom - box.top) / height)
        for box in boxes
    )
    return Picture(source, width, height, fractions)
