"""Stand-in for `flash_attn.flash_attn_interface`: the public signatures of flash-attn 2.8.3, computed in plain torch.

Every sequence is computed alone, entry by entry of its matrix of visible keys.
"""

import torch

FULL = (-1, -1)


def visible_keys(queries, keys, causal=False, window=FULL):
    """Return True where a query sees a key, aligned with the last key."""
    visible = torch.zeros(queries, keys, dtype=torch.bool)
    for i in range(queries):
        own = i + keys - queries
        for j in range(keys):
            after_left = window[0] is None or window[0] < 0 or j >= own - window[0]
            before_right = window[1] is None or window[1] < 0 or j <= own + window[1]
            visible[i, j] = after_left and before_right and (not causal or j <= own)
    return visible


def one_sequence(
    q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes=None, sinks=None, visible=None
):
    """Return the output `(queries, heads, value_dim)` and the weights `(heads, queries, keys)` of one sequence."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.stack([q[:, h] @ k[:, h].T * scale for h in range(q.shape[1])])
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if alibi_slopes is not None:
        at_q = torch.arange(len(q)) + len(k) - len(q)
        scores = scores - alibi_slopes[:, None, None] * (at_q[:, None] - torch.arange(len(k))).abs()
    visible = visible_keys(len(q), len(k), causal, window_size) if visible is None else visible
    scores = scores.masked_fill(~visible, -torch.inf)
    columns = scores if sinks is None else torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1)
    is_empty = (columns == -torch.inf).all(-1, keepdim=True)
    weights = columns.masked_fill(is_empty, 0.0).softmax(-1).masked_fill(is_empty, 0.0)[..., : len(k)]
    dropped = torch.nn.functional.dropout(weights, dropout_p) if dropout_p else weights
    return torch.einsum("hqk,khd->qhd", dropped, v), weights


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    slopes = [None] * len(q) if alibi_slopes is None else alibi_slopes.expand(len(q), -1)
    outs = [
        one_sequence(*tensors, dropout_p, softmax_scale, causal, window_size, softcap, of_heads)[0]
        for *tensors, of_heads in zip(q, k, v, slopes, strict=True)
    ]
    return (torch.stack(outs), None, None) if return_attn_probs else torch.stack(outs)


def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    return flash_attn_func(
        *qkv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    return flash_attn_func(q, *kv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    outs, q_ends, k_ends = [], cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(q_ends) - 1):
        keys, values = (
            tensor[k_ends[b] : k_ends[b + 1]]
            if block_table is None
            else tensor[block_table[b].long()].flatten(0, 1)[: k_ends[b + 1] - k_ends[b]]
            for tensor in (k, v)
        )
        slopes = None if alibi_slopes is None else alibi_slopes.expand(len(q_ends) - 1, -1)[b]
        queries = q[q_ends[b] : q_ends[b + 1]]
        outs.append(
            one_sequence(queries, keys, values, dropout_p, softmax_scale, causal, window_size, softcap, slopes)[0]
        )
    out = torch.cat([*outs, q.new_zeros(len(q) - q_ends[-1], q.shape[1], v.shape[-1])])
    return (out, None, None) if return_attn_probs else out


def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    sizes = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(*qkv.unbind(1), *sizes, dropout_p, softmax_scale, causal, window_size, softcap)


def flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    sizes = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return flash_attn_varlen_func(q, *kv.unbind(1), *sizes, dropout_p, softmax_scale, causal, window_size, softcap)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    rows = torch.arange(len(q)) if cache_batch_idx is None else cache_batch_idx
    length = k_cache.shape[1] if cache_seqlens is None else cache_seqlens
    lengths = torch.as_tensor(length).expand(len(q)).tolist()
    outs = []
    for b, (row, before) in enumerate(zip(rows.tolist(), lengths, strict=True)):
        after = before
        if k is not None:
            after = before + k.shape[1]
            k_cache[row, before:after], v_cache[row, before:after] = k[b], v[b]
        keys, values = (
            tensor[row, :after] if block_table is None else tensor[block_table[b].long()].flatten(0, 1)[:after]
            for tensor in (k_cache, v_cache)
        )
        outs.append(one_sequence(q[b], keys, values, 0.0, softmax_scale, causal, window_size, softcap)[0])
    return torch.stack(outs)
