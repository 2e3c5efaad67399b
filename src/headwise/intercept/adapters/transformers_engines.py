"""Calls of the attention functions of `transformers` for FlashAttention and FlexAttention (read off 5.23).

They are read where the library dispatches them: these functions receive the padding mask and the options of the model,
whichever package or kernel computes the attention.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.masks.base import Mask
from headwise.attention.masks.kinds import Dense
from headwise.intercept.adapters.engine import UnreadableCall, band, offsets, packed_call
from headwise.intercept.adapters.torch_flex import mask_of
from headwise.intercept.attention_call import AttentionCall, both
from headwise.intercept.padding import has_gap
from headwise.shapes import Bool

Read = Callable[[nn.Module, Tensor, Tensor, Tensor, Any, dict[str, Any]], AttentionCall]
"""Function of a module, its queries, keys, values and mask, and further arguments, which reads a call."""


def reader_of(attention: Callable[..., Any], implementation: str) -> Read | None:
    """Return the function that translates calls of `attention`, an attention function of `transformers`, to an
    `AttentionCall` (headwise's form of a call). Return None if headwise has no such function.
    """
    while isinstance(attention, partial):
        attention = attention.func
    name = getattr(attention, "__name__", "")
    if getattr(attention, "__module__", "") == f"transformers.integrations.{name.removesuffix('_forward')}":
        if name == "flash_attention_forward":
            return partial(_read_flash, implementation)
        return _read_flex if name == "flex_attention_forward" else None
    return None


def _read_flash(
    implementation: str, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]
) -> AttentionCall:
    """Translate a call that `transformers` computes by FlashAttention to an `AttentionCall` (headwise's form of a
    call). FlashAttention aligns its masks with the last key. Before the call, `transformers` removes the padding from
    queries and keys.
    """
    for name in ("cache", "block_table", "k_cache", "v_cache"):
        if options.get(name) is not None:
            raise UnreadableCall(f"with {name}")
    if getattr(sys.modules["transformers.integrations.flash_attention"], "_use_top_left_mask", False):
        raise UnreadableCall("of a version whose masks are aligned with the first key")
    causal = options.get("is_causal")
    causal = module.is_causal if causal is None else causal
    size = options.get("sliding_window")
    if size is not None and (k.shape[2] <= size or not _supports(implementation, module, "window_size")):
        size = None
    side = None if size is None else size - 1
    window = band(side, 0 if causal else side)
    sinks = options.get("s_aux")
    if sinks is not None and not any(_supports(implementation, module, name) for name in ("s_aux", "learnable_sink")):
        sinks = None  # transformers leaves them out
    scores: dict[str, Any] = {
        "scale": options.get("scaling"),
        "softcap": options.get("softcap") or None,
        "dropout": options.get("dropout") or 0.0,
        "sinks": sinks,
    }
    origin: tuple[Any, ...] = (implementation, mask, repr(window), options.get("position_ids"))
    if mask is not None:
        return _read_padded(q, k, v, mask, window, scores, origin)
    cumulative = _cumulative(len(q), options)
    if cumulative is None:
        return AttentionCall(q, k, v, {"mask": window, **scores}, mask_origin=origin)
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (q, k, v))
    of_queries, of_keys = (
        offsets(name, each, len(tensor))
        for name, each, tensor in zip(("cu_seq_lens_q", "cu_seq_lens_k"), cumulative, (q, k), strict=True)
    )
    origin = (*origin, *cumulative)
    return packed_call(q, k, v, of_queries, of_keys, window, has_batch_axis=True, mask_origin=origin, **scores)


def _supports(implementation: str, module: nn.Module, option: str) -> bool:
    """Return True if the kernel of a FlashAttention `implementation` supports this `option`. `transformers` does not
    pass options that the kernel does not support.

    Raises:
        UnreadableCall: this is unknown.
    """
    library = sys.modules["transformers.modeling_flash_attention_utils"]
    name = getattr(getattr(module, "config", None), "_attn_implementation", implementation)
    try:
        supported = library.lazy_import_flash_attention(name)[1][0].keywords["supports_mapping"]
        return bool(supported[option])
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise UnreadableCall(f"since it is unknown if its kernel has {option}") from error


def _cumulative(batch: int, options: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return the offsets at which packed sequences start, for queries and for keys. They are passed by the model, or
    follow from positions that start again. Return None if no sequences are packed.
    """
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    if all(options.get(name) is not None for name in names):
        return options["cu_seq_lens_q"], options["cu_seq_lens_k"]
    positions = options.get("position_ids")
    if positions is None or batch != 1 or positions.shape[-1] == 1:
        return None
    first, length = positions.min(), positions.shape[1]
    if bool((positions == first + torch.arange(length, device=positions.device)).all()):
        return None
    flat = positions.reshape(-1)
    starts = (flat == first).nonzero().view(-1)
    cumulative = torch.cat([starts, starts.new_tensor([len(flat)])])
    return cumulative, cumulative


def _read_padded(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, window: Mask | None, scores: dict[str, Any], origin: tuple[Any, ...]
) -> AttentionCall:
    """Translate a call of FlashAttention with a padding mask `(batch, keys)` to an `AttentionCall` (headwise's form of
    a call).
    """
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        raise UnreadableCall("with an attention_mask of another form than (batch, keys)")
    queries, keys = q.shape[2], mask.shape[1]
    k, v = k[:, :, :keys], v[:, :, :keys]  # further places of a static cache are empty
    real = mask.bool()
    if queries == 1 != keys:
        visible: Mask = Dense(_last(real, window)[:, None, None, :])
        return AttentionCall(q, k, v, {"mask": visible, **scores}, mask_origin=origin)
    if window is not None and repr(window) != "causal()" and has_gap(real):
        raise UnreadableCall("with a sliding window and padding between tokens")
    of_queries = Dense(real[:, None, -queries:, None])
    visible = Dense(real[:, None, None, :]) & of_queries
    return AttentionCall(q, k, v, {"mask": both(window, visible), **scores}, mask_origin=origin)


def _last(real: Bool[Tensor, "batch keys"], window: Any) -> Bool[Tensor, "batch keys"]:
    """Return a mask that is True at the keys to which a sequence's only query attends. The query has the position of
    the last key that is not padding.
    """
    width = getattr(window, "width", None)
    from_the_end = real.flip(1).cumsum(1).flip(1)
    return real if width is None else real & (from_the_end <= width)


def _read_flex(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]) -> AttentionCall:
    """Translate a call of FlexAttention to an `AttentionCall` (headwise's form of a call). Its mask is a `BlockMask` or
    a tensor that is added to the scores.
    """
    scores = {"scale": options.get("scaling"), "softcap": options.get("softcap"), "sinks": options.get("s_aux")}
    added = rule = None
    if isinstance(mask, Tensor):
        if not mask.is_floating_point():
            raise UnreadableCall("with an attention_mask that is no BlockMask or tensor of numbers")
        added = mask[:, :1, :, : k.shape[2]]  # the same for all heads
    else:
        rule = mask_of(mask, q, k)
    bias = options.get("position_bias")
    origin = ("flex_attention", mask, bias)
    return AttentionCall(q, k, v, {"mask": rule, "bias": bias, **scores}, added=added, mask_origin=origin)
