"""Functions that make masks, to be combined with `&`, `|` and `~`.

>>> print(causal() & (window(2) | prefix(1)))
■ · · · · ·
■ ■ · · · ·
■ ■ ■ · · ·
■ · ■ ■ · ·
■ · · ■ ■ ·
■ · · · ■ ■
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from headwise.attention.masks.base import Mask, PerHead
from headwise.attention.masks.grid import with_four_axes
from headwise.attention.masks.kinds import (
    Band,
    Chunked,
    Dense,
    MaskRule,
    Padding,
    Prefix,
    Segments,
    are_one_piece_each,
    extremes_of,
)
from headwise.checks import may_read_once, whole_number, whole_numbers
from headwise.errors import InputError
from headwise.shapes import Int

RULE = "a function (batch, head, query, key) -> bool"
"""Expected argument of `mask_rule`, for its errors."""


def causal() -> Mask:
    """Return the causal mask: the query at position p attends to the keys `{0, ..., p}`.

    The last query is aligned with the last key, so that the mask is right with and without a cache.

        ■ · · ·
        ■ ■ · ·
        ■ ■ ■ ·
        ■ ■ ■ ■
    """
    return Band(width=None, ahead=0)


def window(width: int | Sequence[int | None], *, ahead: int = 0, dilation: int = 1) -> Mask:
    """Return a sliding-window mask: the query at position p attends to the keys `{p - width + 1, ..., p + ahead}`. A
    sequence of widths has one width for each head; None means all keys up to `p + ahead`. With a `dilation` d above 1,
    the window has the same number of keys, d positions apart.

    `window(3)` is a causal window of 3 keys:

        ■ · · · ·
        ■ ■ · · ·
        ■ ■ ■ · ·
        · ■ ■ ■ ·
        · · ■ ■ ■

    Args:
        width: number of keys up to the query's own, which is among them; or one number for each head, None for a
            head that attends to all keys before the query.
        ahead: number of keys after the query that it also attends to. `window(w, ahead=w - 1)` is symmetric.
        dilation: distance between neighbouring keys, in both directions (Beltagy et al. 2020, dilated window).

    Raises:
        InputError: numbers that are not whole, a width or dilation below 1, a negative `ahead`.
    """
    ahead = whole_number("window(ahead)", ahead, least=0)
    dilation = whole_number("window(dilation)", dilation, least=1)
    if not isinstance(width, Sequence):
        return Band(whole_number("window(width)", width, least=1), ahead, dilation)
    if not width:
        raise InputError("window(width)", expected="a number of keys for each head", got="none")
    widths = [
        None if head_width is None else whole_number("window(width)", head_width, least=1) for head_width in width
    ]
    return per_head([Band(head_width, ahead, dilation) for head_width in widths])


def prefix(length: int | Sequence[int] | Tensor) -> Mask:
    """Return a mask of the first keys: every query attends to the keys `{0, ..., length - 1}`. `length` is one number
    for all sequences of the batch, or one number for each.

    `causal() | prefix(2)` is the mask of a prefix language model. `causal() & (window(w) | prefix(4))` keeps four
    attention sinks in addition to a window (Xiao et al. 2023).

    Args:
        length: number of keys for all sequences, or one number for each sequence. A tensor is copied; one on a GPU is
            read once.

    Raises:
        InputError: lengths that are not whole numbers of 0 or more.
    """
    if not isinstance(length, Sequence | Tensor):
        return Prefix(whole_number("prefix(length)", length, least=0))
    lengths, extremes = _lengths("prefix(length)", length)
    return Padding(lengths, "right", bounded=False, known_extremes=extremes)


def padding(lengths: Sequence[int] | Tensor, side: Literal["right", "left"] = "right") -> Mask:
    """Return a padding mask: every query of sequence b attends to the `lengths[b]` real keys of that sequence. The real
    keys are the first ones with `side="right"`, where the padding comes last, and the last ones with `side="left"`.

    Args:
        lengths: number of real keys of each sequence, `(batch,)`. They are copied; a tensor on a GPU is read once.
        side: of the padding: the real keys are the first ones with "right", the last ones with "left".

    Raises:
        InputError: lengths that are not whole numbers of 0 or more in one dimension, another side.
    """
    if side not in ("right", "left"):
        raise InputError("padding(side)", expected="'right' or 'left', where the padding is", got=repr(side))
    numbers, extremes = _lengths("padding(lengths)", lengths)
    return Padding(numbers, side, known_extremes=extremes)


def segments(ids: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> Mask:
    """Return a mask of packed documents: the query at position p attends to the keys k of its own document, those with
    `ids[k] == ids[p]`. `ids` has the number of the document at each position.

    `segments([0, 0, 1, 1, 1])`:

        ■ ■ · · ·
        ■ ■ · · ·
        · · ■ ■ ■
        · · ■ ■ ■
        · · ■ ■ ■

    Args:
        ids: whole numbers, the document of each key, `(batch, keys)`; or `(keys,)` for the same documents in every
            sequence. They are copied; a tensor on a GPU is read once.

    Raises:
        InputError: ids that are not whole numbers in one or two dimensions.
    """
    ids = whole_numbers("segments(ids)", ids, dimensions=(1, 2), shape="(keys,) or (batch, keys)")
    ids = ids if ids.ndim == 2 else ids[None]
    return Segments(ids, are_one_piece_each(ids) if may_read_once(ids) else None)


def chunked(size: int) -> Mask:
    """Return a mask of equal chunks: the query at position p attends to the keys k with `k // size == p // size`.

    `chunked(2)`:

        ■ ■ · · ·
        ■ ■ · · ·
        · · ■ ■ ·
        · · ■ ■ ·
        · · · · ■
    """
    return Chunked(whole_number("chunked(size)", size, least=1))


def per_head(masks: Sequence[Mask]) -> Mask:
    """Return a mask with one rule for each head: a query of head h attends to the keys that `masks[h]` allows."""
    if not isinstance(masks, Sequence) or not masks or not all(isinstance(mask, Mask) for mask in masks):
        raise InputError("per_head(masks)", expected="one Mask for each head", got=repr(masks))
    return PerHead(tuple(masks))


def mask_rule(rule: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Mask:
    """Return a mask computed by a function: the query at position q attends to the key at position k where `rule(batch,
    head, q, k)` is True. `batch` and `head` are indices.

    Args:
        rule: function of four index tensors, which broadcast to the shape of one block of scores. It returns a
            boolean tensor of that shape, or one that broadcasts to it. `q` and `k` are positions, so
            `lambda b, h, q, k: q >= k` is causal with a cache too.

    Raises:
        InputError: a rule that cannot be called with four arguments.
    """
    if not callable(rule):
        raise InputError("mask_rule(rule)", expected=RULE, got=repr(rule))
    _require_four_arguments(rule)
    return MaskRule(rule)


def dense(values: Tensor) -> Mask:
    """Return a mask stored as a boolean tensor: in sequence b and head h, query i attends to key j where `values[b, h,
    i, j]` is True.

    Args:
        values: `(queries, keys)`, or `(batch, heads, queries, keys)` with 1 on an axis along which it is constant.

    Raises:
        InputError: another dtype or number of dimensions.
    """
    if not isinstance(values, Tensor) or values.dtype != torch.bool:
        got = str(values.dtype) if isinstance(values, Tensor) else type(values).__name__
        is_bias = isinstance(values, Tensor) and values.is_floating_point()
        remedy = "pass it as bias= to have it added to the scores" if is_bias else "make it one with .bool()"
        raise InputError("mask", expected="a boolean tensor, True where a query attends", got=got, remedy=remedy)
    return Dense(with_four_axes("mask", values))


def _require_four_arguments(rule: Callable[..., Any]) -> None:
    """Raise `InputError` if a mask rule, a function, has a signature that does not accept four positional arguments. A
    function whose signature cannot be read is accepted.
    """
    if torch.compiler.is_compiling():
        return
    try:
        signature = inspect.signature(rule)
    except (TypeError, ValueError):  # functions written in C may have no signature
        return
    try:
        signature.bind(0, 0, 0, 0)
    except TypeError:
        raise InputError("mask_rule(rule)", expected=RULE, got=f"a function {signature}") from None


def _lengths(argument: str, lengths: Any) -> tuple[Int[Tensor, " batch"], tuple[int, int] | None]:
    """Return `lengths`, one number for each sequence, as an int64 tensor, with the smallest and the largest of them.
    Return None in place of these two if the lengths cannot be read, as while compiling. Raise `InputError` for lengths
    that are negative or not whole.
    """
    tensor = whole_numbers(argument, lengths, dimensions=(1,), shape="one for each sequence")
    if not may_read_once(tensor):
        return tensor, None
    extremes = extremes_of(tensor)
    if extremes[0] < 0:
        raise InputError(argument, expected="lengths of 0 or more", got=extremes[0])
    return tensor, extremes
