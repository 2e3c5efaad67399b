"""Attention that a module writes itself: its softmax gives the weights, whole, and a product with them the output.

What stands between the two is followed by identity: dropout that is off, a dtype that is the same and the like hand the
tensor on, or give one that is followed instead. A softmax without such a product is no attention over keys: it mixes
levels, points or streams.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.models.running import Frame, running, show
from headwise.models.transformers import hides_all
from headwise.shapes import Float

SOFTMAX, BMM = F.softmax, torch.bmm
"""Torch's own, whatever stands in their place later."""

SOFTMAXES: frozenset[Callable[..., Any]] = frozenset({SOFTMAX, torch.softmax, Tensor.softmax})
"""By whatever name it is called."""

HANDED_ON: frozenset[Callable[..., Any]] = frozenset(
    {
        *(F.dropout, torch.dropout, Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.half),
        *(Tensor.bfloat16, Tensor.contiguous, Tensor.view, Tensor.reshape, torch.reshape),
    }
)
"""What leaves the weights what they are."""

PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    {torch.matmul, Tensor.matmul, Tensor.__matmul__, BMM, Tensor.bmm, torch.einsum}
)
"""What may make the output of them."""

HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads", "nhead", "num_heads_per_partition")
"""Under which name a module keeps the number of its heads."""


@dataclass
class _Waiting:
    """Weights whose product with the values has not come yet."""

    weights: Float[Tensor, "batch heads queries keys"]
    now: Tensor
    frames: list[Frame]


class _Softmaxes(threading.local):
    """The last softmax of this thread that may be attention's, until its product comes."""

    def __init__(self) -> None:
        self.waiting: _Waiting | None = None


_softmaxes = _Softmaxes()


def meets(scores: Tensor, result: Tensor, dim: Any) -> None:
    """A softmax was computed, over this axis: it may be attention's in an attention module and over the last axis."""
    forget()
    frames = running.frames[:-1] if isinstance(running.frames[-1].module, nn.Softmax) else running.frames[:]
    if not frames or dim not in (-1, result.ndim - 1) or not is_attention(frames[-1]):
        return
    shown = result
    if scores.is_floating_point() and bool((empty := hides_all(scores)).any()):
        shown = result.masked_fill(empty, 0.0)  # its weights are even
    weights = _by_head(shown, frames[-1].module)
    if weights is not None and weights.numel():
        _softmaxes.waiting = _Waiting(weights, result, frames)


def follow(function: Callable[..., Any], arguments: tuple[Any, ...], result: Any) -> None:
    """Something else was computed: perhaps of the weights that wait."""
    waiting = _softmaxes.waiting
    if waiting is None or not any(argument is waiting.now for argument in arguments):
        return
    if function in HANDED_ON:
        waiting.now = result
    elif function in PRODUCTS:
        batch, heads, queries, _ = waiting.weights.shape
        if function is torch.einsum:
            result = _as_weights(arguments, waiting.now, result)
        if result is not None and result.shape[:-1] in ((batch, heads, queries), (batch * heads, queries)):
            forget()
            show(waiting.weights, result.reshape(batch, heads, queries, -1), heads, waiting.frames)


def _as_weights(arguments: tuple[Any, ...], weights: Tensor, result: Tensor) -> Tensor | None:
    """The result of an einsum, its axes in the order of the weights' and the new one last; None of another kind."""
    equation, *operands = arguments
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return None
    inputs, axes = equation.replace(" ", "").split("->")
    of_weights = next(letters for letters, each in zip(inputs.split(","), operands, strict=False) if each is weights)
    order = [letter for letter in of_weights if letter in axes] + [each for each in axes if each not in of_weights]
    return result.permute([axes.index(letter) for letter in order])


def forget() -> None:
    """No product of the weights that wait will come."""
    _softmaxes.waiting = None


def is_attention(frame: Frame) -> bool:
    """Whether a module is called attention, by its class or where it stands in its model."""
    kind = type(frame.module).__name__.lower()
    return "attention" in kind or "attn" in kind or frame.path.lower().endswith(("attention", "attn"))


def _by_head(result: Tensor, module: nn.Module) -> Float[Tensor, "batch heads queries keys"] | None:
    """The weights with an axis of heads; None where it is not known which that is."""
    numbers = [getattr(module, name, None) for name in HEADS]
    heads = [number for number in numbers if isinstance(number, int) and number > 0]
    if result.ndim == 4:
        return result if not heads or result.shape[1] in heads else None
    if result.ndim != 3 or not heads or len(result) % heads[0]:
        return None
    return result.view(-1, heads[0], *result.shape[1:])
