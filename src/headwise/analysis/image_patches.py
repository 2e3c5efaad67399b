"""Part of an image that each token of a vision model stands for, derived from the gradients of the tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.shapes import Bool, Float

CONTRASTS = (1.0, 10.0)
"""Standard deviations of the random pixels with which dependence is tested."""


class Box(NamedTuple):
    """Rectangle of pixels.

    Attributes:
        top, left: first row and column.
        bottom, right: row and column after the last ones.
    """

    top: int
    left: int
    bottom: int
    right: int

    def fractions(self, height: int, width: int) -> tuple[float, float, float, float]:
        """Return (left, top, width, height) as fractions of an image of this size."""
        return (
            self.left / width,
            self.top / height,
            (self.right - self.left) / width,
            (self.bottom - self.top) / height,
        )


class _Reached(Exception):
    """Signal that the attention module was reached.

    Attributes:
        tokens: its input.
    """

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens


def patch_boxes(model: nn.Module, path: str, inputs: Mapping[str, Tensor], tokens: int) -> list[Box | None]:
    """Return for each token the smallest rectangle that contains all pixels on which the token depends before the first
    attention. Return None for a token that stands for no part of the image: it depends on no pixel, or on all.

    A token depends on a pixel if the gradient is not zero for one of several images: the given one, and random ones of
    growing contrast and both signs, for which units that are off in the given image are on.

    Args:
        model: the model.
        path: path of the module with the first attention.
        inputs: arguments of the model, with `pixel_values` `(1, channels, height, width)`.
        tokens: number of tokens.

    Raises:
        InputError: the input of the module has another form; no token stands for a part of the image; tokens differ
            from call to call.
    """
    pixels = inputs["pixel_values"]
    with torch.no_grad():
        first, again = (_input_of(model, path, inputs, tokens) for _ in range(2))
    if not torch.allclose(first, again, rtol=1e-4, atol=1e-6):
        got = "other tokens in a second call, as of a model that masks patches at random"
        raise InputError("model", expected="the same tokens for the same image", got=got)
    height, width = pixels.shape[2:]
    whole = Box(0, 0, height, width)
    boxes = [_box(of_token) for of_token in _dependences(model, path, inputs, tokens)]
    if all(box is None or box == whole for box in boxes):
        got = f"tokens that depend on {'no pixel' if set(boxes) == {None} else 'the whole image'} in {path}"
        raise InputError("model", expected="tokens that each depend on a part of the image", got=got)
    return [None if box == whole else box for box in boxes]


def grid_places(boxes: Sequence[Box | None]) -> list[tuple[int, int] | None]:
    """Return the zero-based row and column of each box in the grid of all boxes; None for None. Overlapping boxes are
    cut off at the border of the image, so that their centres tell their order, not their corners.

    Raises:
        InputError: two boxes have the same place.
    """
    rows, columns = (sorted({box[axis] + box[axis + 2] for box in boxes if box is not None}) for axis in (0, 1))
    places = [
        None if box is None else (rows.index(box.top + box.bottom), columns.index(box.left + box.right))
        for box in boxes
    ]
    known = [place for place in places if place is not None]
    if len(set(known)) < len(known):
        got = "several tokens for the same part"
        raise InputError("model", expected="tokens for different parts of the image", got=got)
    return places


def _dependences(
    model: nn.Module, path: str, inputs: Mapping[str, Tensor], tokens: int
) -> Bool[Tensor, "tokens height width"]:
    """Return True at the pixels on which each token depends, in the given image or a random one."""
    pixels, generator = inputs["pixel_values"], torch.Generator().manual_seed(0)
    noise = torch.randn(pixels.shape, generator=generator).to(pixels)
    images = [pixels.detach().clone(), *(sign * contrast * noise for contrast in CONTRASTS for sign in (1, -1))]
    depends = torch.zeros(tokens, *pixels.shape[2:], dtype=torch.bool)
    for image in images:
        embedded = _input_of(model, path, {**inputs, "pixel_values": image.requires_grad_()}, tokens)
        # With random factors, contributions of a pixel do not cancel.
        factors = torch.rand(embedded.shape[-1], generator=generator).to(embedded) + 0.5
        projected = embedded[0] @ factors
        for token in range(tokens):
            depends[token] |= _dependence(projected[token], image)
    return depends


def _input_of(
    model: nn.Module, path: str, inputs: Mapping[str, Tensor], tokens: int
) -> Float[Tensor, "1 tokens width"]:
    """Run a model up to the module at `path`, and return the first argument of this module."""

    def stop(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        tensors = [value for value in (*arguments, *named.values()) if isinstance(value, Tensor)]
        fitting = [tensor for tensor in tensors if tensor.ndim == 3 and tuple(tensor.shape[:2]) == (1, tokens)]
        if not fitting:
            raise InputError("model", expected=f"an input (1, {tokens}, width) of {path}", got="another")
        raise _Reached(fitting[0])

    hook = model.get_submodule(path).register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with torch.set_grad_enabled(inputs["pixel_values"].requires_grad):
            model(**inputs)
    except _Reached as reached:
        return reached.tokens
    finally:
        hook.remove()
    raise InputError("model", expected=f"the same modules in each call, with {path}", got="a call without it")


def _dependence(value: Float[Tensor, ""], pixels: Tensor) -> Bool[Tensor, "height width"]:
    """Return True at the pixels on which a number depends."""
    if not value.requires_grad:
        return torch.zeros(pixels.shape[2:], dtype=torch.bool)
    (gradient,) = torch.autograd.grad(value, pixels, retain_graph=True, allow_unused=True)
    if gradient is None:
        return torch.zeros(pixels.shape[2:], dtype=torch.bool)
    return (gradient[0] != 0).any(0).cpu()


def _box(is_inside: Bool[Tensor, "height width"]) -> Box | None:
    """Return the smallest rectangle around the pixels that are True; None if there are none."""
    if not is_inside.any():
        return None
    rows, columns = (is_inside.any(axis).nonzero()[:, 0] for axis in (1, 0))
    return Box(int(rows[0]), int(columns[0]), int(rows[-1]) + 1, int(columns[-1]) + 1)
