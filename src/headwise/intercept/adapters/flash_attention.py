"""Calls of FlashAttention: the package `flash_attn`, and FlashAttention 3 and 4.

Read off flash-attn 2.8.3 (`flash_attn/flash_attn_interface.py`), and FlashAttention 3 and 4 of the same repository
(`hopper/flash_attn_interface.py`, `flash_attn/cute/interface.py`). The masks are aligned with the bottom right: the
last query of a sequence has the position of its last key.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headwise.attention.masks.base import Mask
from headwise.attention.masks.grid import Grid
from headwise.intercept.adapters.engine import (
    Arguments,
    Engine,
    Lengths,
    UnreadableCall,
    alibi_bias,
    band,
    offsets,
    packed_call,
    places_in_pages,
)
from headwise.intercept.attention_call import TOKENS_FIRST, AttentionCall

WITHOUT_EFFECT = (
    *("deterministic", "return_attn_probs", "return_softmax_lse", "return_lse", "num_splits", "pack_gqa", "sm_margin"),
    *(
        "scheduler_metadata",
        "max_seqlen",
        "max_seqlen_q",
        "max_seqlen_k",
        "m_block_size",
        "n_block_size",
        "num_threads",
    ),
)
"""Arguments that change neither attention weights nor outputs."""


def read(name: str, arguments: Arguments) -> AttentionCall:
    """Translate a call of one of FlashAttention's functions to an `AttentionCall` (headwise's form of a call). The
    functions differ in how queries, keys and values are passed.
    """
    arguments.ignore(*WITHOUT_EFFECT)
    mask, options = _mask(arguments), _options(arguments)
    slopes = arguments.take("alibi_slopes")
    if name == "flash_attn_with_kvcache":
        return _read_cached(arguments, mask, slopes, options)
    q, k, v = _tensors(name, arguments)
    if "varlen" in name:
        return _read_varlen(name, arguments, (q, k, v), mask, slopes, options)
    if slopes is not None:
        options["bias"] = alibi_bias(slopes, Grid(len(q), q.shape[2], q.shape[1], k.shape[1], q.device))
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return AttentionCall(q, k, v, {"mask": mask, **options})


def _mask(arguments: Arguments) -> Mask | None:
    """Return the mask that the arguments of a FlashAttention call state: `causal` and `window_size`. A window size of
    -1 or None stands for any number of keys.
    """
    if not arguments.has("window_size"):
        raise UnreadableCall("of a version before 2.3, whose masks may be aligned with the first key,")
    window = arguments.take("window_size") or (-1, -1)
    if any(side is not None and side < -1 for side in window):
        raise UnreadableCall(f"with window_size={window}")
    left, right = window
    return band(left, 0 if arguments.take("causal") else right)


def _options(arguments: Arguments) -> dict[str, Any]:
    """Return scale, softcap, dropout and sinks of a FlashAttention call, as arguments of `Problem.checked`."""
    sinks = [arguments.take(name) for name in ("learnable_sink", "s_aux", "sinks")]
    return {
        "scale": arguments.take("softmax_scale"),
        "softcap": arguments.take("softcap") or None,
        "dropout": arguments.take("dropout_p") or 0.0,
        "sinks": next((each for each in sinks if each is not None), None),
    }


def _tensors(name: str, arguments: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries, keys and values of a FlashAttention call, in the layout of its function:
    `(..., heads, features)`.
    """
    if "qkvpacked" in name:
        qkv, heads = arguments.take("qkv"), arguments.take("num_heads_q")
        if heads is None:
            q, k, v = qkv.unbind(-3)
        else:  # FlashAttention 3 also concatenates the heads
            of_keys = (qkv.shape[-2] - heads) // 2
            q, k, v = qkv.split([heads, of_keys, of_keys], -2)
        return q, k, v
    if "kvpacked" in name:
        k, v = arguments.take("kv").unbind(-3)
        return arguments.take("q"), k, v
    return arguments.take("q"), arguments.take("k"), arguments.take("v")


def _read_varlen(
    name: str,
    arguments: Arguments,
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Mask | None,
    slopes: Tensor | None,
    options: dict[str, Any],
) -> AttentionCall:
    """Translate a call of FlashAttention with packed sequences to an `AttentionCall` (headwise's form of a call). Keys
    and values may be stored in pages.
    """
    q, k, v = tensors
    names = ("cu_seqlens", "cu_seqlens") if "qkvpacked" in name else ("cu_seqlens_q", "cu_seqlens_k")
    table = arguments.take("block_table")
    table = arguments.take("page_table") if table is None else table
    cumulative = [arguments.take(each) for each in names]
    used = [arguments.take(each) for each in ("seqused_q", "seqused_k")]
    of_queries = lengths_of(names[0], cumulative[0], used[0], q)
    if table is None:
        of_keys, pages = lengths_of(names[1], cumulative[1], used[1], k), None
    else:
        lengths = used[1] if cumulative[1] is None else cumulative[1].diff()
        if lengths is None:
            raise UnreadableCall(f"without {names[1]}")
        of_keys, pages, k, v = paged(k, v, table, lengths)
    return packed_call(
        *(q, k, v, of_queries, of_keys, mask),
        slopes=slopes,
        pages=pages,
        mask_origin=("flash_attn", repr(mask), *cumulative, *used, table, slopes),
        **options,
    )


def lengths_of(name: str, cumulative: Any, used: Tensor | None, tokens: Tensor) -> tuple[Lengths, Lengths]:
    """Return start and length of each packed sequence among `tokens`. If `used` is passed, it has a length for each
    sequence, and only so many tokens count, from the start of the sequence.
    """
    starts, lengths = offsets(name, cumulative, len(tokens))
    return starts, lengths if used is None else torch.minimum(used.long(), lengths)


def paged(
    k: Tensor, v: Tensor, table: Tensor, lengths: Tensor
) -> tuple[tuple[Lengths, Lengths], Tensor, Tensor, Tensor]:
    """Return four items for keys and values that are stored in pages. `table` lists the pages of each sequence. The
    items are the start and length of each sequence, the index of each key among the keys of all pages, all keys, and
    all values, one page after the other.
    """
    lengths = lengths.long()
    longest = int(lengths.amax()) if len(lengths) else 0
    pages = places_in_pages(table, k.shape[1], longest)
    return (torch.zeros_like(lengths), lengths), pages, k.flatten(0, 1), v.flatten(0, 1)


def _read_cached(
    arguments: Arguments, mask: Mask | None, slopes: Tensor | None, options: dict[str, Any]
) -> AttentionCall:
    """Translate a call of FlashAttention with a key/value cache to an `AttentionCall` (headwise's form of a call).
    FlashAttention has already written the new keys and values to the cache.
    """
    arguments.ignore("rotary_interleaved")  # without rotary_cos, which is refused, it has no effect
    q, k, v = (arguments.take(name) for name in ("q", "k_cache", "v_cache"))
    new, new_values = arguments.take("k"), arguments.take("v")
    table, rows = arguments.take("block_table"), arguments.take("cache_batch_idx")
    table = arguments.take("page_table") if table is None else table
    cached, cumulative = arguments.take("cache_seqlens"), arguments.take("cu_seqlens_q")
    sequences = len(q) if cumulative is None else len(cumulative) - 1
    if cached is None:
        cached = k.shape[1] if table is None else table.shape[1] * k.shape[1]
        new = None  # without lengths, the cache is full
    if not isinstance(cached, Tensor):
        cached = torch.full((sequences,), int(cached), device=q.device)
    sources = None
    if new is not None:
        sources = _with_cached(new, k), _with_cached(new_values, v)
    lengths = cached.long() + (0 if new is None else new.shape[1])
    if cumulative is not None:
        of_queries = offsets("cu_seqlens_q", cumulative, len(q))
    else:
        starts = torch.arange(sequences, device=q.device) * q.shape[1]
        of_queries = starts, torch.full_like(starts, q.shape[1])
    if table is None:
        rows = torch.arange(sequences, device=q.device) if rows is None else rows.long()
        of_keys, pages = (rows * k.shape[1], lengths), None
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    elif rows is None:
        of_keys, pages, k, v = paged(k, v, table, lengths)
    else:
        raise UnreadableCall("with both cache_batch_idx and block_table")
    queries = q if cumulative is not None else q.flatten(0, 1)
    call = packed_call(queries, k, v, of_queries, of_keys, mask, slopes=slopes, pages=pages, **options)
    if cumulative is not None:
        return replace(call, sources=sources)
    return replace(call, sources=sources, layout=TOKENS_FIRST, packed=None)  # queries of equal length, in rows


def _with_cached(new: Tensor, cache: Tensor) -> Tensor:
    """Return one cached key or value followed by the new ones, `(batch, kv_heads, keys, features)`, as a tensor that
    depends on both.
    """
    return torch.cat([cache[:1, :1].expand(len(new), -1, -1, -1), new], 1).transpose(1, 2)


FLASH_ATTENTION = Engine(
    modules=("flash_attn_interface", "flash_attn.cute.interface"),
    functions=(
        "flash_attn_func",
        "flash_attn_qkvpacked_func",
        "flash_attn_kvpacked_func",
        "flash_attn_varlen_func",
        "flash_attn_varlen_qkvpacked_func",
        "flash_attn_varlen_kvpacked_func",
        "flash_attn_with_kvcache",
    ),
    read=read,
)
"""Functions of `flash_attn` and of FlashAttention 3 and 4."""
