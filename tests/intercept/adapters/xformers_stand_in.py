"""Stand-in for `xformers.ops.fmha` of xformers 0.0.31: its function, and its masks with their names and attributes.

Every mask states by `sees` which keys of its sequence a query sees. Matrices are computed entry by entry.
"""

import torch


class Spans:
    """Places of sequences among packed tokens.

    Attributes:
        seqstart_py: index of the first token of each sequence, and the end of the last one.
        seqlen_py: number of tokens of each sequence that count.
    """

    def __init__(self, starts, lengths):
        self.seqstart_py, self.seqlen_py = list(starts), list(lengths)

    def intervals(self):
        for start, length in zip(self.seqstart_py[: len(self.seqlen_py)], self.seqlen_py, strict=True):
            yield start, start + length


class AttentionBias:
    """Base class: a query sees every key."""

    def sees(self, i, j, queries, keys):
        return True


class LowerTriangularMask(AttentionBias):
    def sees(self, i, j, queries, keys):
        return j <= i


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    def __init__(self, bias):
        self._subtensor = bias


class LowerTriangularFromBottomRightMask(AttentionBias):
    def sees(self, i, j, queries, keys):
        return j <= i + keys - queries


class LowerTriangularFromBottomRightLocalAttentionMask(AttentionBias):
    def __init__(self, window_size):
        self._window_size = window_size

    def sees(self, i, j, queries, keys):
        return 0 <= i + keys - queries - j < self._window_size


class LocalAttentionFromBottomRightMask(AttentionBias):
    def __init__(self, window_left, window_right):
        self.window_left, self.window_right = window_left, window_right

    def sees(self, i, j, queries, keys):
        return -self.window_right <= i + keys - queries - j <= self.window_left


class BlockDiagonalMask(AttentionBias):
    def __init__(self, q_seqinfo, k_seqinfo, **options):
        self.q_seqinfo, self.k_seqinfo = q_seqinfo, k_seqinfo
        vars(self).update(options)


class BlockDiagonalCausalMask(BlockDiagonalMask, LowerTriangularMask):
    sees = LowerTriangularMask.sees


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    sees = LowerTriangularFromBottomRightMask.sees


class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalMask):
    def sees(self, i, j, queries, keys):
        return 0 <= i - j < self._window_size


class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalMask):
    sees = LowerTriangularFromBottomRightLocalAttentionMask.sees


class BlockDiagonalPaddedKeysMask(BlockDiagonalMask):
    pass


class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalMask):
    sees = LowerTriangularFromBottomRightMask.sees


class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalMask):
    sees = LocalAttentionFromBottomRightMask.sees


class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalMask):
    sees = LowerTriangularFromBottomRightLocalAttentionMask.sees


class BlockDiagonalGappyKeysMask(BlockDiagonalMask):
    pass


class PagedBlockDiagonalPaddedKeysMask(BlockDiagonalMask):
    pass


class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalMask):
    sees = LowerTriangularFromBottomRightMask.sees


class PagedBlockDiagonalGappyKeysMask(BlockDiagonalMask):
    pass


def attended(q, k, v, bias, added, scale, p=0.0):
    """Return output `(queries, heads, value_dim)` and weights `(heads, queries, keys)` of one sequence."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if added is None else scores + added
    sees = AttentionBias().sees if bias is None or isinstance(bias, torch.Tensor) else bias.sees
    visible = [[sees(i, j, len(q), len(k)) for j in range(len(k))] for i in range(len(q))]
    weights = scores.masked_fill(~torch.tensor(visible), -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", torch.nn.functional.dropout(weights, p), v), weights


def sequences_of(q, k, v, bias):
    """Yield the queries, keys and values of each packed sequence; heads are one axis."""
    spans = zip(bias.q_seqinfo.intervals(), bias.k_seqinfo.intervals(), strict=True)
    for b, ((first, stop), span_of_keys) in enumerate(spans):
        keys, values = k[0], v[0]
        first_key, stop_key = span_of_keys
        if hasattr(bias, "block_tables"):
            pages = bias.block_tables[b].long()
            keys, values = (t[0].unflatten(0, (-1, bias.page_size))[pages].flatten(0, 1) for t in (k, v))
            first_key, stop_key = 0, bias.k_seqinfo.seqlen_py[b]
        yield q[0, first:stop], keys[first_key:stop_key], values[first_key:stop_key]


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None):
    q, k, v = query, key, value
    if q.ndim == 3:
        q, k, v = q[:, :, None], k[:, :, None], v[:, :, None]
    q, k, v = (tensor.flatten(2, -2) for tensor in (q, k, v))
    if isinstance(attn_bias, BlockDiagonalMask):
        parts = sequences_of(q, k, v, attn_bias)
        out = torch.cat([attended(*each, attn_bias, None, scale, p)[0] for each in parts])[None]
    else:
        added = attn_bias if isinstance(attn_bias, torch.Tensor) else getattr(attn_bias, "_subtensor", None)
        if added is not None:
            added = added[:, None] if query.ndim == 3 else added.flatten(1, -3)
            added = added.expand(len(q), -1, -1, -1)
        outs = [
            attended(*each, attn_bias, None if added is None else added[b], scale, p)[0]
            for b, each in enumerate(zip(q, k, v, strict=True))
        ]
        out = torch.stack(outs)
    return out.reshape(*query.shape[:-1], value.shape[-1])


def memory_efficient_attention_forward(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None):
    return memory_efficient_attention(query, key, value, attn_bias, p, scale, op=op)
