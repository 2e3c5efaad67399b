"""A stand-in for `torch.nn.MultiheadAttention`: replace the import, and `attend` computes.

    from headwise.compat import MultiheadAttention

It derives from torch's layer. The constructor, the parameters, their names and how they begin are therefore torch's,
and what asks `isinstance(layer, nn.MultiheadAttention)` is told the truth. Only `forward` is ours. Where the two
differ, and why, is measured in docs/reports/torch-differences.md.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.attention.attend import attend
from headwise.attention.masks.base import Mask
from headwise.attention.masks.factories import causal
from headwise.errors import InputError
from headwise.nn.base import check_like_layer
from headwise.shapes import Float


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with a `forward` of ours: the same arguments, results and state dict.

    In a boolean mask True means *ignored*, as in torch's layer and unlike in the rest of headwise. What differs is
    where a query has no key left: its heads give 0 and its weights are 0, where torch gives NaN. The weights are those
    before dropout. `out_proj` is called, so that whatever stands in its place (a low-rank adapter, a hook) acts.

    Args:
        embed_dim: width of the queries and of the output.
        num_heads: heads, each `embed_dim / num_heads` wide.
        dropout: probability of leaving out an attention weight, in training only.
        bias: whether the input and output projections add a bias.
        add_bias_kv: append a key and a value that are learned.
        add_zero_attn: append a key and a value of zeros.
        kdim: width of the keys; default `embed_dim`.
        vdim: width of the values; default `embed_dim`.
        batch_first: whether inputs are `(batch, length, width)`; otherwise they are `(length, batch, width)`.
        device: where the parameters are made.
        dtype: what they are.

    Raises:
        ValueError, AssertionError: sizes that torch's constructor refuses.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        # In evaluation nn.TransformerEncoderLayer computes attention itself from our parameters and calls no forward,
        # unless a module in it has a hook, which only a call can run.
        self.register_forward_pre_hook(_wants_to_be_called)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from `query` to `key`.

        Args:
            query: `(batch, queries, embed_dim)` with `batch_first`, `(queries, batch, embed_dim)` without, or
                `(queries, embed_dim)` for one sequence.
            key: likewise, `(batch, keys, kdim)`.
            value: likewise, `(batch, keys, vdim)`.
            key_padding_mask: `(batch, keys)`, or `(keys,)` for one sequence: boolean, True = ignored, or float, added
                to the scores.
            need_weights: also return the weights. The matrix exists then.
            attn_mask: `(queries, keys)` or `(batch * num_heads, queries, keys)`: boolean, True = ignored, or float,
                added to the scores.
            average_attn_weights: the weights averaged over the heads, or those of every head.
            is_causal: says that `attn_mask` is the causal mask, which must be given all the same. Without a padding
                mask and weights, the kernel's own causal mask is taken instead.

        Returns:
            The output, shaped as `query`, and the weights before dropout: `(batch, queries, keys)`, or
            `(batch, num_heads, queries, keys)` when not averaged, without the batch axis where `query` came without.
            Keys that the layer appends come last. None in place of the weights that are not needed.

        Raises:
            InputError: inputs and masks that do not fit the layer or each other.
        """
        if isinstance(query, Tensor) and query.is_nested:
            self._check_nested(query, key, value, key_padding_mask, attn_mask, is_causal)
            return self._attend_nested(query, need_weights, average_attn_weights)
        self._check_inputs(query, key, value)
        self._check_masks(query, key, key_padding_mask, attn_mask, is_causal)

        q, k, v = (self._split(each) for each in self._project(query, key, value))
        k, v = self._append(k, self.bias_k), self._append(v, self.bias_v)
        mask, bias = self._mask_and_bias(q, k, key_padding_mask, attn_mask, is_causal and not need_weights)
        attended = attend(
            q,
            k,
            v,
            mask=mask,
            bias=bias,
            dropout=self.dropout if self.training else 0.0,
            return_weights=need_weights,
        )
        heads, *weights = attended if isinstance(attended, tuple) else (attended,)  # (batch, heads, queries, head_dim)
        y: Tensor = self.out_proj(self._join(heads, batched=query.ndim == 3))
        if not need_weights:
            return y, None
        shown = weights[0].mean(1) if average_attn_weights else weights[0]
        return y, shown if query.ndim == 3 else shown.squeeze(0)

    # -- projections and heads ------------------------------------------------------------------------------------

    def _project(
        self,
        query: Float[Tensor, "*queries embed"],
        key: Float[Tensor, "*keys kdim"],
        value: Float[Tensor, "*keys vdim"],
    ) -> tuple[Tensor, ...]:
        """The three inputs projected to `embed_dim`, otherwise shaped as they came.

        Each parameter is read once: under a parametrization, reading computes it.
        """
        packed: Tensor | None = self.in_proj_weight
        bias: Tensor | None = self.in_proj_bias
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if packed is None else packed.chunk(3)
        if bias is not None:
            bias = bias.to(weights[0].dtype)  # torch's layer also adds a bias of another dtype
        if packed is not None and query is key and key is value:
            return F.linear(query, packed, bias).chunk(3, dim=-1)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        inputs = (query, key, value)
        return tuple(F.linear(x, weight, add) for x, weight, add in zip(inputs, weights, biases, strict=True))

    def _split(self, projected: Float[Tensor, "*any embed"]) -> Float[Tensor, "batch heads length head_dim"]:
        """The width cut into heads, from whichever order of axes the inputs have; a view, no copy."""
        heads = projected.view(*projected.shape[:-1], self.num_heads, self.head_dim)
        if heads.ndim == 3:
            return heads.transpose(0, 1).unsqueeze(0)
        return heads.transpose(1, 2) if self.batch_first else heads.permute(1, 2, 0, 3)

    def _join(
        self, heads: Float[Tensor, "batch heads queries head_dim"], *, batched: bool
    ) -> Float[Tensor, "*any embed"]:
        """Heads side by side, in the order of axes that `_split` took them from."""
        if not batched:
            return heads.squeeze(0).transpose(0, 1).flatten(1)
        return (heads.transpose(1, 2) if self.batch_first else heads.permute(2, 0, 1, 3)).flatten(2)

    def _append(
        self, heads: Float[Tensor, "batch heads keys head_dim"], learned: Float[Tensor, "1 1 embed"] | None
    ) -> Float[Tensor, "batch heads more_keys head_dim"]:
        """The keys, or values, and after them the learned one and the one of zeros, where the layer has them."""
        batch, num_heads, _, head_dim = heads.shape
        more = []
        if learned is not None:
            more.append(learned.view(1, num_heads, 1, head_dim).expand(batch, -1, -1, -1))
        if self.add_zero_attn:
            more.append(heads.new_zeros(batch, num_heads, 1, head_dim))
        return torch.cat([heads, *more], dim=2) if more else heads

    # -- masks ----------------------------------------------------------------------------------------------------

    def _mask_and_bias(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> tuple[Mask | None, Float[Tensor, "#batch #heads #queries keys"] | None]:
        """The masks as `attend` takes them. Both as numbers to add: a boolean mask would be looked into, and that
        waits for a GPU and is forbidden under `vmap`. Every query sees the keys that the layer appends.
        """
        batch, heads, queries, _ = q.shape
        square = queries == k.shape[2]  # the flag of torch's kernels is aligned top-left, and knows no appended keys
        # A rule asks for lengths, and so would fix those of an exported graph.
        if is_causal and key_padding_mask is None and square and not torch.compiler.is_exporting():
            return causal(), None
        bias: Tensor | None = None
        if attn_mask is not None:
            added = _as_added(attn_mask, q.dtype)
            bias = added if added.ndim == 2 else added.view(batch, heads, queries, added.shape[-1])
        if key_padding_mask is not None:
            padding = _as_added(key_padding_mask, q.dtype)[..., None, None, :]  # (batch, 1, 1, keys), or (1, 1, keys)
            bias = padding if bias is None else bias + padding
        if bias is None:
            return None, None
        appended = k.shape[2] - bias.shape[-1]
        return None, F.pad(bias[(None,) * (4 - bias.ndim)], (0, appended))

    # -- nested input ---------------------------------------------------------------------------------------------

    def _attend_nested(self, x: Tensor, need_weights: bool, average: bool) -> tuple[Tensor, Tensor | None]:
        """Self-attention of sequences of several lengths, which nn.TransformerEncoder makes of padded ones.

        The weights come padded with zeros, as torch's do.
        """
        lengths = [len(sequence) for sequence in x.unbind()]
        padded = x.to_padded_tensor(0.0)  # (batch, length, embed)
        position = torch.arange(padded.shape[1], device=padded.device)
        beyond = position >= torch.tensor(lengths, device=padded.device)[:, None]  # (batch, length)
        y, weights = self.forward(padded, padded, padded, beyond, need_weights, None, average)
        if weights is not None:
            weights = weights.masked_fill(beyond[:, :, None] if average else beyond[:, None, :, None], 0.0)
        rows = [row[:length] for row, length in zip(y, lengths, strict=True)]
        return torch.nested.as_nested_tensor(rows), weights

    # -- checks ---------------------------------------------------------------------------------------------------

    def _check_nested(self, query: Tensor, key: Any, value: Any, *masks: Any) -> None:
        """Nested tensors go where they go in torch's layer: batch first, to themselves, without a mask."""
        if query.layout is not torch.strided or not self.batch_first:
            raise InputError(
                "query",
                expected="a strided nested tensor and batch_first=True",
                got=f"{query.layout} and batch_first={self.batch_first}",
            )
        if query is not key or key is not value:
            raise InputError("key", expected="query itself, and value too, when query is nested", got="another object")
        if any(mask is not None and mask is not False for mask in masks):
            raise InputError(
                "query", expected="a tensor beside a mask", got="a nested tensor", remedy="its lengths are its mask"
            )

    def _check_inputs(self, query: Any, key: Any, value: Any) -> None:
        """Ranks, widths, dtypes, devices, and lengths that fit each other."""
        widths = (self.embed_dim, self.kdim, self.vdim)
        for name, tensor, width in zip(("query", "key", "value"), (query, key, value), widths, strict=True):
            _check_tensor(name, tensor, width, query, batch_first=self.batch_first)
            check_like_layer(name, tensor, self)
        batch, key_batch = self._batch_and_length(query)[0], self._batch_and_length(key)[0]
        if key_batch != batch:
            raise InputError("key", expected=f"batch {batch} like query", got=f"batch {key_batch}")
        if value.shape[:-1] != key.shape[:-1]:
            expected = f"{tuple(key.shape[:-1])} before the width, like key"
            raise InputError("value", expected=expected, got=tuple(value.shape[:-1]))

    def _check_masks(self, query: Tensor, key: Tensor, key_padding_mask: Any, attn_mask: Any, is_causal: bool) -> None:
        """Dtypes, devices and shapes of the masks, and that the causal one is there."""
        (batch, queries), (_, keys) = self._batch_and_length(query), self._batch_and_length(key)
        if key_padding_mask is not None:
            _check_mask("key_padding_mask", key_padding_mask, query, (batch, keys) if query.ndim == 3 else (keys,))
        if attn_mask is not None:
            per_head = (batch * self.num_heads, queries, keys)
            _check_mask("attn_mask", attn_mask, query, (queries, keys), per_head)
        elif is_causal:
            raise InputError(
                "attn_mask",
                expected=f"the causal mask ({queries}, {keys}) that is_causal=True speaks of",
                got="none",
                remedy="nn.Transformer.generate_square_subsequent_mask makes it",
            )

    def _batch_and_length(self, x: Tensor) -> tuple[int, int]:
        """Both sizes, from whichever order of axes `x` has; a batch of 1 where it has none."""
        if x.ndim == 2:
            return 1, x.shape[0]
        return (x.shape[0], x.shape[1]) if self.batch_first else (x.shape[1], x.shape[0])


def _wants_to_be_called(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    """A hook that does nothing: that it is there is what it is for."""


def _as_added(mask: Tensor, dtype: torch.dtype) -> Float[Tensor, "..."]:
    """A mask as torch's layer takes it, in numbers to add to the scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)


def _check_tensor(name: str, tensor: Any, width: int, query: Any, *, batch_first: bool) -> None:
    """Rank, that of the query, and width."""
    if not isinstance(tensor, Tensor) or tensor.is_nested:
        got = "a nested tensor" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise InputError(name, expected="a tensor", got=got)
    batched = f"(batch, length, {width})" if batch_first else f"(length, batch, {width})"
    forms = {3: batched, 2: f"(length, {width})"}
    if tensor.ndim not in forms:
        raise InputError(name, expected=" or ".join(forms.values()), got=tuple(tensor.shape))
    if tensor.ndim != query.ndim:
        raise InputError(name, expected=f"{forms[query.ndim]}, as many axes as query", got=tuple(tensor.shape))
    if tensor.shape[-1] != width:
        raise InputError(name, expected=f"width {width} on the last axis", got=tuple(tensor.shape))


def _check_mask(name: str, mask: Any, query: Tensor, *shapes: tuple[int, ...]) -> None:
    """Boolean or float, on the query's device, of one of the shapes."""
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(
            name, expected="a boolean tensor, True = ignored, or a float one, added to the scores", got=got
        )
    if mask.device != query.device:
        raise InputError(name, expected=f"a tensor on {query.device} like query", got=mask.device)
    if tuple(mask.shape) not in shapes:
        raise InputError(name, expected=f"a shape of {' or '.join(map(str, shapes))}", got=tuple(mask.shape))
