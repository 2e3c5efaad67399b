"""The masks a user writes: one rule each, to be combined with `&`, `|` and `~`.

>>> print(causal() & (window(2) | prefix(1)))
■ · · · · ·
■ ■ · · · ·
■ ■ ■ · · ·
■ · ■ ■ · ·
■ · · ■ ■ ·
■ · · · ■ ■
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from headwise.attention.masks.base import Mask, PerHead, can_be_read, four_dimensional
from headwise.attention.masks.by_position import Band, Chunked, Prefix
from headwise.attention.masks.by_sequence import Dense, MaskRule, Padding, Segments
from headwise.checks import whole_number, whole_numbers
from headwise.errors import InputError
from headwise.shapes import Int


def causal() -> Mask:
    """Each query attends to its own position and those before it, aligned so that the last query sees all."""
    return Band(width=None, ahead=0)


def window(width: int | Sequence[int | None], *, ahead: int = 0, dilation: int = 1) -> Mask:
    """Each query attends to itself and the `width` - 1 keys before it: `width` keys.

    Args:
        width: keys, the query's own among them; or one number for each head, None for a head that sees all
            keys before it.
        ahead: keys after the query that it attends to as well; `window(w, ahead=w - 1)` looks as far both ways.
        dilation: distance between the keys that are seen, both ways (Beltagy et al. 2020, dilated window).

    Raises:
        InputError: numbers that are not whole, a width or dilation below 1, a negative `ahead`.
    """
    ahead = whole_number("window(ahead)", ahead, least=0)
    dilation = whole_number("window(dilation)", dilation, least=1)
    if not isinstance(width, Sequence):
        return Band(whole_number("window(width)", width, least=1), ahead, dilation)
    if not width:
        raise InputError("window(width)", expected="a number of keys for each head", got="none")
    widths = [None if each is None else whole_number("window(width)", each, least=1) for each in width]
    return per_head([Band(each, ahead, dilation) for each in widths])


def prefix(length: int | Sequence[int] | Tensor) -> Mask:
    """The first keys, for every query: `length` of them, or one number for each sequence.

    `causal() | prefix(n)` is the mask of a prefix language model; `causal() & (window(w) | prefix(4))` keeps four
    sink tokens beside a window (Xiao et al. 2023).
    """
    if not isinstance(length, Sequence | Tensor):
        return Prefix(whole_number("prefix(length)", length, least=0))
    return Padding(_lengths("prefix(length)", length), "right", bounded=False)


def padding(lengths: Sequence[int] | Tensor, side: Literal["right", "left"] = "right") -> Mask:
    """Sequence b of the batch holds `lengths[b]` keys; the rest, on `side`, is padding nobody attends to.

    Raises `InputError` when the lengths are not whole numbers of 0 or more in one dimension.
    """
    if side not in ("right", "left"):
        raise InputError("padding(side)", expected="'right' or 'left', where the padding is", got=repr(side))
    return Padding(_lengths("padding(lengths)", lengths), side)


def segments(ids: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> Mask:
    """Keys of the query's own segment: several documents packed into one row, none sees another.

    Args:
        ids: whole numbers, one for each key, `(batch, keys)`, or `(keys,)` where all sequences are cut alike. A
            query belongs to the segment of the key at its position.
    """
    ids = whole_numbers("segments(ids)", ids, dimensions=(1, 2), shape="(keys,) or (batch, keys)")
    return Segments(ids if ids.ndim == 2 else ids[None])


def chunked(size: int) -> Mask:
    """Keys of the query's own chunk, where the positions are cut into chunks of `size`."""
    return Chunked(whole_number("chunked(size)", size, least=1))


def per_head(masks: Sequence[Mask]) -> Mask:
    """A mask of its own for each head, in order."""
    if not isinstance(masks, Sequence) or not masks or not all(isinstance(mask, Mask) for mask in masks):
        raise InputError("per_head(masks)", expected="one Mask for each head", got=repr(masks))
    return PerHead(tuple(masks))


def mask_rule(rule: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Mask:
    """Any rule: `rule(batch, head, query, key) -> bool`, asked for one block at a time.

    It is called with index tensors that broadcast against each other, and answers for all their combinations.
    `query` is the position of the query among the keys, so `query >= key` is causal with a cache too.
    """
    if not callable(rule):
        raise InputError("mask_rule(rule)", expected="a function (batch, head, query, key) -> bool", got=repr(rule))
    return MaskRule(rule)


def dense(values: Tensor) -> Mask:
    """A boolean mask given whole: `(queries, keys)` or `(batch, heads, queries, keys)`, 1 where all are alike.

    Raises `InputError` for another dtype or number of dimensions.
    """
    if not isinstance(values, Tensor) or values.dtype != torch.bool:
        got = str(values.dtype) if isinstance(values, Tensor) else type(values).__name__
        added = isinstance(values, Tensor) and values.is_floating_point()
        remedy = "pass it as bias= to have it added to the scores" if added else "make it one with .bool()"
        raise InputError("mask", expected="a boolean tensor, True where a query attends", got=got, remedy=remedy)
    return Dense(four_dimensional("mask", values))


# -- checks of what a user writes -----------------------------------------------------------------------------


def _lengths(argument: str, lengths: Any) -> Int[Tensor, " batch"]:
    tensor = whole_numbers(argument, lengths, dimensions=(1,), shape="one for each sequence")
    if can_be_read(tensor) and (tensor < 0).any():
        raise InputError(argument, expected="lengths of 0 or more", got=int(tensor.min()))
    return tensor
