"""Calls of `memory_efficient_attention` of xformers (read off 0.0.31, `xformers/ops/fmha`).

Its masks are objects. They are known by the names of their classes, and read from their attributes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headwise.attention.masks.base import Mask
from headwise.intercept.adapters.engine import (
    Arguments,
    Engine,
    Lengths,
    UnreadableCall,
    band,
    packed_call,
    places_in_pages,
)
from headwise.intercept.attention_call import AttentionCall, OutputLayout
from headwise.intercept.trace.axes import OutputAxes

Rule = Callable[[Any], Mask | None]


def _everything(bias: Any) -> Mask | None:
    """Return None, which stands for a mask that hides no key of the query's own sequence."""
    return None


def _causal(bias: Any) -> Mask | None:
    """Return the causal mask for which `bias`, a mask object of xformers, stands."""
    return band(None, 0)


def _causal_window(bias: Any) -> Mask | None:
    """Return the causal window mask that `bias`, a mask object of xformers, states. Its window size counts the query's
    own key.
    """
    return band(bias._window_size - 1, 0)


def _window(bias: Any) -> Mask | None:
    """Return the window mask that `bias`, a mask object of xformers, states by its numbers of keys before and after the
    query's own.
    """
    return band(bias.window_left, bias.window_right)


TOP_LEFT: dict[str, Rule] = {
    "LowerTriangularMask": _causal,
    "LowerTriangularMaskWithTensorBias": _causal,
    "BlockDiagonalCausalMask": _causal,
    "BlockDiagonalCausalLocalAttentionMask": _causal_window,
}
"""Masks by which the first query of a sequence has the position of its first key."""

BOTTOM_RIGHT: dict[str, Rule] = {
    "LowerTriangularFromBottomRightMask": _causal,
    "LowerTriangularFromBottomRightLocalAttentionMask": _causal_window,
    "LocalAttentionFromBottomRightMask": _window,
    "BlockDiagonalMask": _everything,
    "BlockDiagonalCausalFromBottomRightMask": _causal,
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": _causal_window,
    "BlockDiagonalPaddedKeysMask": _everything,
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": _causal,
    "BlockDiagonalLocalAttentionPaddedKeysMask": _window,
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": _causal_window,
    "BlockDiagonalGappyKeysMask": _everything,
    "BlockDiagonalCausalWithOffsetGappyKeysMask": _causal,
    "PagedBlockDiagonalPaddedKeysMask": _everything,
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": _causal,
}
"""Masks by which the last query of a sequence has the position of its last key, or that hide none of its keys."""


def read(name: str, arguments: Arguments) -> AttentionCall:
    """Translate a call of xformers to an `AttentionCall` (headwise's form of a call). Queries, keys and values are
    `(batch, length, heads, features)`. They may have two axes of heads. If they have none, the heads may be in the axis
    of the batch.
    """
    if name == "memory_efficient_attention_partial":
        raise UnreadableCall("over a part of the keys")
    arguments.ignore("op", "output_dtype")
    q, k, v, bias = (arguments.take(each) for each in ("query", "key", "value", "attn_bias"))
    options = {"scale": arguments.take("scale"), "dropout": arguments.take("p") or 0.0}
    kind = "" if bias is None or type(bias) in (Tensor, torch.nn.Parameter) else type(bias).__name__
    if kind and kind not in TOP_LEFT and kind not in BOTTOM_RIGHT:
        raise UnreadableCall(f"with {kind}")
    is_top_left, rule = kind in TOP_LEFT, (TOP_LEFT | BOTTOM_RIGHT).get(kind, _everything)
    if "BlockDiagonal" in kind:
        return _read_blocks(q, k, v, bias, rule(bias), is_top_left, options)
    added = _added(bias, kind, q)
    if q.ndim == 3:
        if kind and (not is_top_left or added is not None):
            raise UnreadableCall(f"with {kind} and without an axis of heads")
        return AttentionCall(q, k, v, {"mask": rule(bias), **options}, added=added, is_top_left=is_top_left)
    layout, lengths = _layout(q), (q.shape[1], k.shape[1])
    q, k, v = (tensor.flatten(2, -2).transpose(1, 2) for tensor in (q, k, v))
    if is_top_left and lengths[0] != lengths[1]:
        places = (torch.arange(length, device=q.device) for length in lengths)
        options["query_positions"], options["key_positions"] = places
    return AttentionCall(q, k, v, {"mask": rule(bias), **options}, layout, added=added)


def _layout(q: Tensor) -> OutputLayout:
    """Return the layout (roles of the axes) of the output of an xformers call. Its axes of heads are those of the
    queries `q`.
    """
    return OutputLayout(
        OutputAxes(q.ndim - 1, (1,)),
        lambda out: out.flatten(2, -2).transpose(1, 2),
        lambda changed, out: changed.transpose(1, 2).reshape(out.shape),
    )


def _added(bias: Any, kind: str, q: Tensor) -> Any:
    """Return the tensor that a mask object of xformers adds to the scores, with one axis of heads; None if it adds
    none.
    """
    if kind == "LowerTriangularMaskWithTensorBias":
        bias = bias._subtensor
    elif kind or bias is None:
        return None
    if bias.ndim != q.ndim:
        raise UnreadableCall(f"with attn_bias of {bias.ndim} axes for queries of {q.ndim}")
    return bias.flatten(1, -3) if bias.ndim == 5 else bias


def _read_blocks(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, mask: Mask | None, is_top_left: bool, options: dict[str, Any]
) -> AttentionCall:
    """Translate a call of xformers with packed sequences, `(1, tokens, heads, features)`, to an `AttentionCall`
    (headwise's form of a call). Keys and values may be stored in pages.
    """
    if len(q) != 1 or q.ndim not in (4, 5):
        raise UnreadableCall(f"with packed sequences of shape {tuple(q.shape)}")
    heads, pages = q.shape[2:-1], None
    q, k, v = (tensor.flatten(2, -2)[0] for tensor in (q, k, v))
    of_queries = _intervals(bias.q_seqinfo, q.device)
    if hasattr(bias, "block_tables"):
        lengths = torch.tensor(list(bias.k_seqinfo.seqlen_py), device=q.device)
        pages = places_in_pages(bias.block_tables.to(q.device), bias.page_size, int(lengths.amax()))
        of_keys = torch.zeros_like(lengths), lengths
    else:
        of_keys = _intervals(bias.k_seqinfo, q.device)
    call = packed_call(
        *(q, k, v, of_queries, of_keys, mask), is_top_left=is_top_left, pages=pages, has_batch_axis=True, **options
    )
    if len(heads) == 1:
        return call
    flat = call.layout
    return replace(
        call,
        layout=OutputLayout(
            OutputAxes(4, (1,)),
            lambda out: flat.by_head(out.flatten(2, 3)),
            lambda changed, out: flat.written(changed, out.flatten(2, 3)).view(out.shape),
        ),
    )


def _intervals(info: Any, device: torch.device) -> tuple[Lengths, Lengths]:
    """Return start and length of each packed sequence, as stated by `info`, an object of xformers."""
    starts, stops = torch.tensor(list(info.intervals()), dtype=torch.int64, device=device).unbind(1)
    return starts, stops - starts


XFORMERS = Engine(
    modules=("xformers.ops.fmha",),
    functions=(
        "memory_efficient_attention",
        "memory_efficient_attention_forward",
        "memory_efficient_attention_forward_requires_grad",
        "memory_efficient_attention_partial",
    ),
    read=read,
)
"""Functions of xformers that compute attention, also of a part of the keys, which is refused."""
