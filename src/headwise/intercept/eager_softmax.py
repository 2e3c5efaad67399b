"""Attention that a module writes itself: its softmax gives the weights, whole, and a product with them the output.

What stands between the two is followed by identity: dropout that is off, a dtype that is the same and the like hand the
tensor on, or give one that is followed instead. A softmax without such a product is no attention over keys: it mixes
levels, points or streams.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.attention.masks.grid import Grid
from headwise.intercept.hf_calls import hides_all, with_infinite
from headwise.intercept.interceptor import Frame, meet, running
from headwise.shapes import Float

SOFTMAX, DROPOUT, BMM = F.softmax, F.dropout, torch.bmm
"""Torch's own, whatever stands in their place later."""

SOFTMAXES: frozenset[Callable[..., Any]] = frozenset({SOFTMAX, torch.softmax, Tensor.softmax})
"""By whatever name it is called."""

HANDED_ON: frozenset[Callable[..., Any]] = frozenset(
    {
        *(DROPOUT, torch.dropout, Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.half),
        *(Tensor.bfloat16, Tensor.contiguous, Tensor.view, Tensor.reshape, torch.reshape),
        *(Tensor.double, Tensor.clone, torch.clone, Tensor.flatten, torch.flatten),
    }
)
"""What leaves the weights what they are."""

FILLED: frozenset[Callable[..., Any]] = frozenset({torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_})
"""What gives the weights some other values, in the same places."""

PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    {torch.matmul, Tensor.matmul, Tensor.__matmul__, BMM, Tensor.bmm, torch.einsum}
)
"""What may make the output of them."""

HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads", "nhead", "num_heads_per_partition")
"""Under which name a module keeps the number of its heads."""


@dataclass(eq=False)
class _Waiting:
    """Weights whose product with the values has not come yet; None where it is not known which axis is which."""

    weights: Float[Tensor, "batch heads queries keys"] | None
    now: Tensor
    frames: list[Frame]
    scores: Tensor
    zeros: Tensor | None = None

    def fill(self, result: Tensor, mask: Tensor, value: Tensor | float) -> None:
        """The weights were given this value where the mask is True."""
        self.now, self.weights = result, _by_head(result, self.frames[-1].module)
        if not bool(value):
            self.zeros = mask if self.zeros is None else self.zeros | mask

    def even(self) -> Tensor:
        """Weights that are alike at all keys that a row sees: where scores hide them all, at all, as softmax makes
        them; and at none that is filled with zeros.
        """
        hidden = with_infinite(self.scores) == -torch.inf
        hidden = hidden & ~(hides_all(self.scores) & (self.scores.amax(-1, keepdim=True) > -torch.inf))
        hidden = hidden.reshape(self.now.shape)
        seen = (hidden if self.zeros is None else hidden | self.zeros).logical_not().to(self.now.dtype)
        return seen / seen.sum(-1, keepdim=True).clamp(min=1)


class _Softmaxes(threading.local):
    """Softmaxes of this thread that may be attention's, until their products come."""

    def __init__(self) -> None:
        self.waiting: list[_Waiting] = []


_softmaxes = _Softmaxes()


def meets(scores: Tensor, result: Tensor, dim: Any) -> None:
    """A softmax was computed, over this axis: it may be attention's in an attention module and over the last axis."""
    frames = running.frames[:-1] if isinstance(running.frames[-1].module, nn.Softmax) else running.frames[:]
    if not frames or dim not in (-1, result.ndim - 1) or result.ndim < 3 or not is_attention(frames[-1]):
        return
    shown = result
    if scores.is_floating_point() and bool((empty := hides_all(scores)).any()):
        shown = result.masked_fill(empty, 0.0)  # its weights are even
    _softmaxes.waiting.append(_Waiting(_by_head(shown, frames[-1].module), result, frames, scores))


def follow(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Something else was computed: perhaps of weights that wait. Its result, as visitors want it."""
    for waiting in _softmaxes.waiting:
        if any(argument is waiting.now for argument in _flat((*args, *kwargs.values()))):
            return _follow(waiting, function, args, kwargs, result)
    return result


def _follow(
    waiting: _Waiting, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Any:
    """Something was computed of these weights."""
    if function in HANDED_ON:
        waiting.now = result
    elif function in FILLED:
        waiting.fill(result, *_filling(*args, **kwargs))
    elif function in PRODUCTS and waiting.weights is not None:
        batch, heads, queries, keys = waiting.weights.shape
        order = list(range(result.ndim)) if function is not torch.einsum else _order(args, waiting.now)
        if order is None or result.permute(*order).shape[:-1] not in (
            (batch, heads, queries),
            (batch * heads, queries),
        ):
            return result
        _softmaxes.waiting.remove(waiting)

        def by_head(product: Tensor) -> Tensor:
            return product.permute(*order).reshape(batch, heads, queries, -1)

        out = by_head(result)
        met = meet(Grid(batch, heads, queries, keys, out.device), heads, out.shape[-1], waiting.frames)
        met.show(waiting.weights, out)
        if met.changes:

            def uniform_output() -> Tensor:
                even = waiting.even()
                return by_head(function(*_put(args, waiting.now, even), **_put(kwargs, waiting.now, even)))

            changed = met.changed(out, uniform_output)
            inverse = [order.index(axis) for axis in range(result.ndim)]
            return changed.reshape(result.permute(*order).shape).permute(*inverse)
    return result


def _filling(input: Tensor, mask: Tensor, value: Tensor | float) -> tuple[Tensor, Tensor | float]:  # noqa: A002
    """Where something is filled, and with what."""
    return mask, value


def _put(given: Any, out: Tensor, into: Tensor) -> Any:
    """Arguments, a tensor among them changed for another."""
    if isinstance(given, list | tuple):
        return [_put(each, out, into) for each in given]
    if isinstance(given, dict):
        return {name: _put(each, out, into) for name, each in given.items()}
    return into if given is out else given


def _flat(arguments: tuple[Any, ...]) -> Iterator[Any]:
    """The arguments, those in a list one by one."""
    for argument in arguments:
        if isinstance(argument, list | tuple):
            yield from argument
        else:
            yield argument


def _order(arguments: tuple[Any, ...], weights: Tensor) -> list[int] | None:
    """Which axes of an einsum's result are the weights', in their order, and then the new one; None of another kind."""
    equation, *operands = _flat(arguments)
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return None
    inputs, axes = equation.replace(" ", "").split("->")
    of_weights = next(letters for letters, each in zip(inputs.split(","), operands, strict=False) if each is weights)
    order = [letter for letter in of_weights if letter in axes] + [each for each in axes if each not in of_weights]
    return [axes.index(letter) for letter in order]


def ends(frame: Frame) -> None:
    """A module has ended: what still waits of it found no product, and its visitor is told."""
    for waiting in [each for each in _softmaxes.waiting if each.frames[-1] is frame]:
        _softmaxes.waiting.remove(waiting)
        for innermost in {id(each.visitor): each for each in waiting.frames}.values():
            innermost.visitor.on_unreadable(innermost.path)


def forget() -> None:
    """The model has ended, perhaps by an exception: nothing waits."""
    _softmaxes.waiting.clear()


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
