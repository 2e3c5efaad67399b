"""Part of an image that each token of a vision model stands for, derived from the gradients of the tokens."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.shapes import Bool, Float


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
    attention; None for a token that depends on no pixel.

    Args:
        model: the model.
        path: path of the module with the first attention.
        inputs: arguments of the model, with `pixel_values` `(1, channels, height, width)`.
        tokens: number of tokens.

    Raises:
        InputError: the input of the module has another form; every token depends on the whole image; tokens differ
            from call to call.
    """
    pixels = inputs["pixel_values"].detach().clone().requires_grad_()
    embedded = _input_of(model, path, {**inputs, "pixel_values": pixels}, tokens)
    with torch.no_grad():
        again = _input_of(model, path, inputs, tokens)
    if not torch.allclose(embedded, again, rtol=1e-4, atol=1e-6):
        got = "other tokens in a second call, as of a model that masks patches at random"
        raise InputError("model", expected="the same tokens for the same image", got=got)
    # With random factors, contributions of a pixel do not cancel.
    factors = torch.rand(embedded.shape[-1], generator=torch.Generator().manual_seed(0)).to(embedded) + 0.5
    projected = embedded[0] @ factors
    boxes = [_box(_dependence(projected[token], pixels)) for token in range(tokens)]
    height, width = pixels.shape[2:]
    known = [box for box in boxes if box is not None]
    if not known or all(box == (0, 0, height, width) for box in known):
        got = "tokens that depend on no pixel" if not known else "tokens that depend on the whole image"
        raise InputError("model", expected="tokens that each depend on a part of the image", got=f"{got} in {path}")
    return boxes


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
