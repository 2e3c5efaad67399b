"""Calls of torch's `varlen_attn`, attention of packed sequences (read off torch 2.13)."""

from headwise.intercept.adapters.engine import Arguments, Engine, UnreadableCall, band, packed_call
from headwise.intercept.adapters.flash_attention import lengths_of, paged
from headwise.intercept.attention_call import AttentionCall


def read(name: str, arguments: Arguments) -> AttentionCall:
    """Translate a call of torch's `varlen_attn` to an `AttentionCall` (headwise's form of a call). Its masks are those
    of FlashAttention, by which torch computes the call.
    """
    arguments.ignore("max_q", "max_k", "return_aux", "num_splits", "enable_gqa")
    q, k, v = (arguments.take(each) for each in ("query", "key", "value"))
    cumulative = [arguments.take(each) for each in ("cu_seq_q", "cu_seq_k")]
    used, table = arguments.take("seqused_k"), arguments.take("block_table")
    left, right = arguments.take("window_size", (-1, -1))
    mask = band(left, 0 if arguments.take("is_causal") else right)
    of_queries, pages = lengths_of("cu_seq_q", cumulative[0], None, q), None
    if table is not None:
        if used is None:
            raise UnreadableCall("with block_table but without seqused_k")
        of_keys, pages, k, v = paged(k, v, table, used)
    else:
        of_keys = lengths_of("cu_seq_k", cumulative[1], used, k)
    return packed_call(
        *(q, k, v, of_queries, of_keys, mask),
        pages=pages,
        mask_origin=("varlen_attn", repr(mask), *cumulative, used, table),
        scale=arguments.take("scale"),
    )


VARLEN = Engine(modules=("torch.nn.attention.varlen",), functions=("varlen_attn",), read=read)
"""Torch's function. Calls of `varlen_attn_out`, which writes to a tensor of the model, are named as unreadable."""
