"""Drop-in replacement for `torch.nn.MultiheadAttention` that computes with `attend`.

    from headwise.compat import MultiheadAttention

The class derives from torch's layer and replaces only `forward`. Constructor, parameters, their names and their
initialisation are torch's, and `isinstance(layer, nn.MultiheadAttention)` is True. docs/reports/torch-differences.md
lists every case in which the results differ, and why.
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
from headwise.nn.linear_engine import project
from headwise.shapes import Float


class MultiheadAttention(nn.MultiheadAttention):
    """Drop-in replacement for `torch.nn.MultiheadAttention` that computes with `headwise.attend`. It has the same
    arguments and state dict, and returns the same results with three exceptions. First, for a query that may attend to
    no key, the output is `out_proj.bias` and the weights are 0, where torch returns NaN. Second, the returned weights
    are those before dropout. Third, `out_proj` is called as a module, so an adapter or hook on it has an effect.

    In a boolean mask True means *ignored*, as in torch's layer and unlike in the rest of headwise. The additional child
    module `calls_forward` has no parameters; it makes `nn.TransformerEncoderLayer` call this layer in evaluation.

    Example:
        >>> layer = MultiheadAttention(512, num_heads=8, batch_first=True)
        >>> x = torch.randn(2, 10, 512)
        >>> y, weights = layer(x, x, x)

    Args:
        embed_dim: width of the queries and of the output.
        num_heads: number of heads, each `embed_dim / num_heads` wide.
        dropout: probability of dropping an attention weight, in training only.
        bias: True for input and output projections with a bias.
        add_bias_kv: True to append a learned key and a learned value to the sequence.
        add_zero_attn: True to append a key and a value of zeros to the sequence.
        kdim: width of the keys' input. Default `embed_dim`.
        vdim: width of the values' input. Default `embed_dim`.
        batch_first: True for inputs `(batch, length, width)`, False for `(length, batch, width)`.
        device: device of the parameters.
        dtype: dtype of the parameters.

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
        # In evaluation, nn.TransformerEncoderLayer computes attention itself from the parameters and does not call
        # `forward`, unless a module inside has a hook. A hook of this module would slow down each of its calls.
        self.calls_forward = nn.Identity()
        self.calls_forward.register_forward_pre_hook(_do_nothing)

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
        """Attend from each token of `query` to the tokens of `key`. Return the output after the output projection and
        the attention weights (averaged over heads with `average_attn_weights`; None if `need_weights` is False).

        Args:
            query: `(batch, queries, embed_dim)` with `batch_first`, `(queries, batch, embed_dim)` without, or
                `(queries, embed_dim)` for one sequence.
            key: likewise, `(batch, keys, kdim)`.
            value: likewise, `(batch, keys, vdim)`.
            key_padding_mask: `(batch, keys)`, or `(keys,)` for one sequence. Boolean, True = ignored, or float, added
                to the scores.
            need_weights: True to return the attention weights too; the score matrix is stored then.
            attn_mask: `(queries, keys)` or `(batch * num_heads, queries, keys)`. Boolean, True = ignored, or float,
                added to the scores.
            average_attn_weights: True for weights averaged over the heads, False for those of each head.
            is_causal: True if `attn_mask` is the causal mask, which must be passed too; a faster kernel may be used.

        Returns:
            Output, shaped as `query`, and the weights before dropout: `(batch, queries, keys)` if averaged, otherwise
            `(batch, num_heads, queries, keys)`, without the batch axis if `query` has none. Appended keys come last.
            None in place of weights that are not needed.

        Raises:
            InputError: inputs and masks that do not fit the layer or each other.
        """
        if isinstance(query, Tensor) and query.is_nested:
            self._check_nested(query, key, value, key_padding_mask, attn_mask, is_causal)
            return self._attend_nested(query, need_weights, average_attn_weights)
        if not self._is_plain_self_attention(query, key, value):
            self._check_inputs(query, key, value)
        if key_padding_mask is not None or attn_mask is not None or is_causal:
            self._check_masks(query, key, key_padding_mask, attn_mask, is_causal)

        q, k, v = map(self._split_heads, self._project(query, key, value))
        # q (batch, heads, queries, head_dim), k and v (batch, heads, keys, head_dim)
        if self.add_zero_attn or self.bias_k is not None:
            k, v = self._append_learned(k, self.bias_k), self._append_learned(v, self.bias_v)
        mask, bias = None, None
        if key_padding_mask is not None or attn_mask is not None:
            mask, bias = self._mask_and_bias(q, k, key_padding_mask, attn_mask, is_causal and not need_weights)
        dropout = self.dropout if self.training else 0.0
        attended = attend(q, k, v, mask=mask, bias=bias, dropout=dropout, return_weights=bool(need_weights))
        heads, *weights = attended if isinstance(attended, tuple) else (attended,)
        # heads (batch, heads, queries, head_dim), weights[0] (batch, heads, queries, keys)
        if query.ndim == 2:
            joined = heads.squeeze(0).transpose(0, 1).flatten(1)
        else:
            joined = (heads.transpose(1, 2) if self.batch_first else heads.permute(2, 0, 1, 3)).flatten(2)
        y = project(self.out_proj, joined)
        if not need_weights:
            return y, None
        returned = weights[0].mean(1) if average_attn_weights else weights[0]
        return y, returned if query.ndim == 3 else returned.squeeze(0)

    # -- projections and heads ------------------------------------------------------------------------------------

    def _project(
        self,
        query: Float[Tensor, "*queries embed"],
        key: Float[Tensor, "*keys kdim"],
        value: Float[Tensor, "*keys vdim"],
    ) -> tuple[Tensor, ...]:
        """Return the queries, keys and values after the input projections. They have the same axes as `query`, `key`
        and `value`, and the last one has the size `embed_dim`. Each parameter is read only once, because a
        parametrization recomputes it at every read.
        """
        packed: Tensor | None = self._parameters.get("in_proj_weight")  # takes less time than reading an attribute
        bias: Tensor | None = self._parameters.get("in_proj_bias")
        packed = self.in_proj_weight if packed is None else packed
        bias = self.in_proj_bias if bias is None else bias
        if bias is not None:
            like = self.q_proj_weight if packed is None else packed
            bias = bias if bias.dtype is like.dtype else bias.to(like.dtype)  # torch's layer also adds another dtype
        if packed is not None and query is key and key is value:
            return F.linear(query, packed, bias).chunk(3, dim=-1)
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if packed is None else packed.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        inputs = (query, key, value)
        return tuple(F.linear(x, weight, add) for x, weight, add in zip(inputs, weights, biases, strict=True))

    def _split_heads(self, projected: Float[Tensor, "*any embed"]) -> Float[Tensor, "batch heads length head_dim"]:
        """Return a view of projected queries, keys or values as `(batch, heads, length, head_dim)`."""
        heads = projected.view(*projected.shape[:-1], self.num_heads, self.head_dim)
        if heads.ndim == 3:
            return heads.transpose(0, 1).unsqueeze(0)
        return heads.transpose(1, 2) if self.batch_first else heads.permute(1, 2, 0, 3)

    def _append_learned(
        self, heads: Float[Tensor, "batch heads keys head_dim"], learned: Float[Tensor, "1 1 embed"] | None
    ) -> Float[Tensor, "batch heads more_keys head_dim"]:
        """Return the keys or values with up to two more tokens at the end. The first is the learned token `learned`
        (option `add_bias_kv`), unless it is None. The second is a token of zeros, if `add_zero_attn` is True.
        """
        batch, num_heads, _, head_dim = heads.shape
        appended = []
        if learned is not None:
            appended.append(learned.view(1, num_heads, 1, head_dim).expand(batch, -1, -1, -1))
        if self.add_zero_attn:
            appended.append(heads.new_zeros(batch, num_heads, 1, head_dim))
        return torch.cat([heads, *appended], dim=2) if appended else heads

    # -- masks ----------------------------------------------------------------------------------------------------

    def _mask_and_bias(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> tuple[Mask | None, Float[Tensor, "#batch #heads #queries keys"] | None]:
        """Convert `key_padding_mask` and `attn_mask` to the arguments `mask` and `bias` of `attend`. Return the causal
        mask and no bias if `is_causal` is True, `key_padding_mask` is None, and there are as many keys as queries
        (except in `torch.export`). In all other cases return no mask, and the sum of `key_padding_mask` and `attn_mask`
        as a bias. The bias is None if both are None.

        The masks become a bias because `attend` reads the values of boolean masks, which waits for a GPU and is
        forbidden under `vmap`. Appended keys are visible to all queries.
        """
        batch, heads, queries, _ = q.shape
        square = queries == k.shape[2]  # the flag of torch's kernels is aligned top-left and ignores appended keys
        # In an exported graph, `causal()` would fix the lengths.
        if is_causal and key_padding_mask is None and square and not torch.compiler.is_exporting():
            return causal(), None
        bias: Tensor | None = None
        if attn_mask is not None:
            bias = _as_bias(attn_mask, q.dtype)
            bias = bias if bias.ndim == 2 else bias.view(batch, heads, queries, bias.shape[-1])
        if key_padding_mask is not None:
            padding = _as_bias(key_padding_mask, q.dtype)[..., None, None, :]  # (batch, 1, 1, keys), or (1, 1, keys)
            bias = padding if bias is None else bias + padding
        if bias is None:
            return None, None
        appended = k.shape[2] - bias.shape[-1]
        return None, F.pad(bias[(None,) * (4 - bias.ndim)], (0, appended))

    # -- nested input ---------------------------------------------------------------------------------------------

    def _attend_nested(self, x: Tensor, need_weights: bool, average: bool) -> tuple[Tensor, Tensor | None]:
        """Return self-attention over a nested tensor, such as `nn.TransformerEncoder` passes, as a nested tensor. Also
        return the attention weights as a padded tensor with 0 at padding, or None if `need_weights` is False.
        """
        lengths = [len(sequence) for sequence in x.unbind()]
        padded = x.to_padded_tensor(0.0)  # (batch, length, embed)
        position = torch.arange(padded.shape[1], device=padded.device)
        is_padding = position >= torch.tensor(lengths).to(padded.device, non_blocking=True)[:, None]  # (batch, length)
        y, weights = self.forward(padded, padded, padded, is_padding, need_weights, None, average)
        if weights is not None:
            weights = weights.masked_fill(is_padding[:, :, None] if average else is_padding[:, None, :, None], 0.0)
        rows = [row[:length] for row, length in zip(y, lengths, strict=True)]
        return torch.nested.as_nested_tensor(rows), weights

    # -- checks ---------------------------------------------------------------------------------------------------

    def _check_nested(self, query: Tensor, key: Any, value: Any, *masks: Any) -> None:
        """Raise `InputError` for a nested `query` in the cases that torch's layer refuses too: another layout than
        strided, no `batch_first`, a `key` or `value` that is not `query` itself, or a mask.
        """
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
                "query", expected="a tensor with a mask", got="a nested tensor", remedy="its lengths are its mask"
            )

    def _is_plain_self_attention(self, query: Any, key: Any, value: Any) -> bool:
        """Return True for self-attention over one ordinary CPU tensor: query, key and value are the same object, and
        its axes, width and dtype fit the layer. `_check_inputs` can be skipped then.
        """
        weight = self._parameters.get("in_proj_weight")
        return (
            query is key is value
            and type(query) is Tensor
            and weight is not None
            and query.ndim == 3
            and query.shape[2] == self.embed_dim
            and query.dtype is weight.dtype
            and query.is_cpu
            and weight.is_cpu
        )

    def _check_inputs(self, query: Any, key: Any, value: Any) -> None:
        """Raise `InputError` unless query, key and value have the axes, widths, device and dtype that the layer
        expects. Their batch sizes must be equal, and so must the lengths of key and value.
        """
        widths = (self.embed_dim, self.kdim, self.vdim)
        for name, tensor, width in zip(("query", "key", "value"), (query, key, value), widths, strict=True):
            if not isinstance(tensor, Tensor) or tensor.is_nested:
                got = "a nested tensor" if isinstance(tensor, Tensor) else type(tensor).__name__
                raise InputError(name, expected="a tensor", got=got)
            batched = f"(batch, length, {width})" if self.batch_first else f"(length, batch, {width})"
            forms = {3: batched, 2: f"(length, {width})"}
            if tensor.ndim not in forms:
                raise InputError(name, expected=" or ".join(forms.values()), got=tuple(tensor.shape))
            if tensor.ndim != query.ndim:
                raise InputError(name, expected=f"{forms[query.ndim]}, as many axes as query", got=tuple(tensor.shape))
            if tensor.shape[-1] != width:
                raise InputError(name, expected=f"width {width} on the last axis", got=tuple(tensor.shape))
            check_like_layer(name, tensor, self)
        batch, key_batch = self._batch_and_length(query)[0], self._batch_and_length(key)[0]
        if key_batch != batch:
            raise InputError("key", expected=f"batch {batch} like query", got=f"batch {key_batch}")
        if value.shape[:-1] != key.shape[:-1]:
            expected = f"{tuple(key.shape[:-1])} before the width, like key"
            raise InputError("value", expected=expected, got=tuple(value.shape[:-1]))

    def _check_masks(self, query: Tensor, key: Tensor, key_padding_mask: Any, attn_mask: Any, is_causal: bool) -> None:
        """Raise `InputError` for a mask of the wrong type, device or shape, and for `is_causal` without `attn_mask`."""
        (batch, queries), (_, keys) = self._batch_and_length(query), self._batch_and_length(key)
        if key_padding_mask is not None:
            _check_mask("key_padding_mask", key_padding_mask, query, (batch, keys) if query.ndim == 3 else (keys,))
        if attn_mask is not None:
            per_head = (batch * self.num_heads, queries, keys)
            _check_mask("attn_mask", attn_mask, query, (queries, keys), per_head)
        elif is_causal:
            raise InputError(
                "attn_mask",
                expected=f"the causal mask ({queries}, {keys}) that is_causal=True refers to",
                got="none",
                remedy="nn.Transformer.generate_square_subsequent_mask makes it",
            )

    def _batch_and_length(self, x: Tensor) -> tuple[int, int]:
        """Return the batch size and the number of tokens of `x`; the batch size is 1 without a batch axis."""
        if x.ndim == 2:
            return 1, x.shape[0]
        return (x.shape[0], x.shape[1]) if self.batch_first else (x.shape[1], x.shape[0])


def _do_nothing(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Forward pre-hook without an effect. `nn.TransformerEncoderLayer` has a fused implementation that does not call
    the `forward` of its attention layer. A hook on any module inside disables it, so `MultiheadAttention` registers
    this one.
    """


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Float[Tensor, "..."]:
    """Return a mask in torch's convention as a bias to add to the scores. A boolean mask, in which True hides a key,
    becomes -inf at True and 0 elsewhere; a float mask is returned unchanged.
    """
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)


def _check_mask(name: str, mask: Any, query: Tensor, *shapes: tuple[int, ...]) -> None:
    """Raise `InputError` unless `mask` is a boolean or float tensor on the device of `query` with one of the given
    `shapes`.
    """
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(
            name, expected="a boolean tensor, True = ignored, or a float one, added to the scores", got=got
        )
    if mask.device != query.device:
        raise InputError(name, expected=f"a tensor on {query.device} like query", got=mask.device)
    if tuple(mask.shape) not in shapes:
        raise InputError(name, expected=f"a shape of {' or '.join(map(str, shapes))}", got=tuple(mask.shape))
