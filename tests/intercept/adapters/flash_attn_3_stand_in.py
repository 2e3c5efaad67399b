"""Stand-in for `flash_attn_interface` of FlashAttention 3: its public signatures, computed in plain torch.

Options that change attention, and that headwise refuses to read, change the output here as well.
"""

import torch
from flash_attn_stand_in import one_sequence


def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    changed = qv is not None or q_descale is not None or attention_chunk or window_size[0] < -1
    window_size = (0, 0) if changed else window_size
    outs = [
        one_sequence(*tensors, 0.0, softmax_scale, causal, window_size, softcap)[0]
        for tensors in zip(q, k, v, strict=True)
    ]
    return (torch.stack(outs), None) if return_attn_probs else torch.stack(outs)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    outs, starts = [], cu_seqlens_q[:-1].tolist()
    for b, (start, stop) in enumerate(zip(starts, cu_seqlens_q[1:].tolist(), strict=True)):
        first, last = cu_seqlens_k[b : b + 2].tolist()
        last = last if seqused_k is None else first + int(seqused_k[b])
        parts = q[start:stop], k[first:last], v[first:last]
        outs.append(one_sequence(*parts, 0.0, softmax_scale, causal, window_size, softcap)[0])
    return (torch.cat(outs), None) if return_attn_probs else torch.cat(outs)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    return flash_attn_func(q, k_cache, v_cache, softmax_scale, causal)
