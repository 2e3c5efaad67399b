"""Multi-head attention: project, split into heads, prepare, attend, gate, project out.

x (batch, queries, embed)      context (batch, keys, context)     value context, by default the same
    | q_proj, q_norm               | k_proj, k_norm                   | v_proj
(batch, heads, queries, head_dim)  (batch, kv_heads, keys, head_dim)  (batch, kv_heads, keys, value_dim)
    | rotary                       | rotary                           |
    |                              +--- cache: earlier tokens first --+
    +--------------- attend: softmax(q k^T * scale + bias) v ---------+
    |
(batch, heads, queries, value_dim)    * gate of the call    * output gate, computed from x
    | heads side by side
(batch, queries, heads * value_dim)
    | out_proj
(batch, queries, out)

Inputs in another layout (unbatched, padded, packed, nested) are brought to these shapes first: see `layout.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.attention import packed
from headwise.attention.attend import attend
from headwise.attention.caches.base import Cache
from headwise.attention.masks.base import Mask
from headwise.attention.masks.grid import require_broadcast
from headwise.attention.position_bias import PositionBias
from headwise.attention.prepare import AttentionInputs
from headwise.attention.problem import Backend, score_dtype
from headwise.attention.rotary import Rotary
from headwise.checks import flag, float_dtype, probability
from headwise.errors import InputError
from headwise.nn import layout
from headwise.nn.call import LayerCall
from headwise.nn.linear_engine import plain_parameters, project
from headwise.nn.options import OutputGate, QKNorm, Scores
from headwise.nn.packed_sequences import check_packed_options, each_sequence, query_and_key_offsets
from headwise.nn.projections import reset_linear
from headwise.nn.qkv_projection import LayerInputs, ProjectedContext, QKVProjection
from headwise.shapes import Bool, Float, Int


class MultiHeadAttention(QKVProjection):
    """Multi-head attention over a sequence, or from one sequence to another (Vaswani et al. 2017, section 3.2.2).

    For each head h, with projections `W` of the layer,

        q_h = x W_q,h    k_h = context W_k,h    v_h = context W_v,h
        head_h = softmax(q_h k_h^T / sqrt(head_dim)) v_h
        y = [head_1 ... head_H] W_out

    In self-attention the context is x. By default no key is hidden: pass `mask=causal()` for a decoder. Every width
    is free, and each option below changes one step of the formula.

    Example:
        >>> layer = MultiHeadAttention(512, num_heads=8)
        >>> layer(torch.randn(2, 10, 512)).shape
        torch.Size([2, 10, 512])
        >>> y, weights = layer(torch.randn(2, 10, 512), return_weights=True)
        >>> weights.shape  # batch, heads, queries, keys
        torch.Size([2, 8, 10, 10])

    Args:
        embed_dim: width of x.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads, each shared by `num_heads / num_kv_heads` consecutive query heads
            (grouped-query attention, Ainslie et al. 2023; 1 is multi-query attention, Shazeer 2019). Default
            `num_heads`.
        head_dim: width of a head's queries and keys. Default `embed_dim / num_heads`.
        value_dim: width of a head's values. Default `head_dim`.
        context_dim: width of the context in cross-attention. Default `embed_dim`.
        value_context_dim: width of the context that the values are projected from. Default `context_dim`.
        out_dim: width of the output. Default `embed_dim`.
        bias: True for query, key, value and gate projections with a bias.
        out_bias: True for an output projection with a bias. Default `bias`.
        fused_qkv: True for a single projection `qkv_proj` of queries, keys and values; self-attention only.
        rotary: rotates queries and keys by their positions, see `Rotary`.
        position_bias: adds to the scores by distance: `ALiBi()`, or a `RelativeBias`, which layers may share.
        scores: scale, softcap, sinks, temperature and talking heads, see `Scores`.
        qk_norm: normalises queries and keys, see `QKNorm`.
        output_gate: multiplies the head outputs by the sigmoid of a projection of x, with one factor per "head" or
            per "element" of a head's output (Qiu et al. 2025).
        mask: `Mask` of every call; a mask passed to `forward` is combined with it by `&`.
        dropout: probability of dropping an attention weight, in training only.
        backend: backend of `attend`; None selects the fastest.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        InputError: sizes that are not positive or do not divide each other, options of the wrong type.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        context_dim: int | None = None,
        value_context_dim: int | None = None,
        out_dim: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        fused_qkv: bool = False,
        rotary: Rotary | None = None,
        position_bias: PositionBias | None = None,
        scores: Scores | None = None,
        qk_norm: QKNorm | None = None,
        output_gate: OutputGate | None = None,
        mask: Mask | None = None,
        dropout: float = 0.0,
        backend: str | Backend | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self._set_sizes(
            embed_dim, num_heads, num_kv_heads, head_dim, value_dim, context_dim, value_context_dim, out_dim
        )
        self.fused_qkv = flag("fused_qkv", fused_qkv)
        self.rotary = rotary
        self.position_bias = position_bias
        self.scores = scores
        self.qk_norm = qk_norm
        self.output_gate = output_gate
        self.mask = mask
        self.dropout = probability("dropout", dropout)
        self.backend = backend
        self._check_options()

        factory: dict[str, Any] = {"device": device, "dtype": float_dtype("dtype", dtype)}
        self._make_projections(flag("bias", bias), **factory)
        if output_gate is not None:
            gates = self.num_heads * (self.value_dim if output_gate == "element" else 1)
            self.gate_proj = nn.Linear(embed_dim, gates, bias=bias, **factory)
        out_bias = bias if out_bias is None else flag("out_bias", out_bias)
        self.out_proj = nn.Linear(self.num_heads * self.value_dim, self.out_dim, bias=out_bias, **factory)
        self._register_score_parameters(self.maps * num_heads, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise weights uniformly after Glorot and Bengio 2010, biases and sinks with 0, norm weights and
        temperatures with 1, and talking-heads matrices with the identity.

        A `position_bias` may be shared by several layers and is not changed.
        """
        for name, module in self.named_children():
            if isinstance(module, nn.Linear):
                reset_linear(module, self.qkv_widths if name == "qkv_proj" else (module.out_features,))
            elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
                module.reset_parameters()
        self._reset_score_parameters()

    # -- from x to the output ---------------------------------------------------------------------------------

    def forward(
        self,
        x: Float[Tensor, "*batch queries embed"],
        context: Float[Tensor, "*batch keys context"] | ProjectedContext | None = None,
        value_context: Float[Tensor, "*batch keys value_context"] | None = None,
        *,
        mask: Mask | Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
        bias: Float[Tensor, "..."] | None = None,
        gate: Float[Tensor, "..."] | None = None,
        positions: Int[Tensor, "... queries"] | None = None,
        cache: Cache | None = None,
        lengths: Int[Tensor, " batch"] | Sequence[int] | None = None,
        offsets: Int[Tensor, " sequences_and_1"] | Sequence[int] | None = None,
        context_offsets: Int[Tensor, " sequences_and_1"] | Sequence[int] | None = None,
        return_weights: bool = False,
    ) -> (
        Float[Tensor, "*batch queries out"]
        | tuple[Float[Tensor, "*batch queries out"], Float[Tensor, "*batch heads queries keys"]]
    ):
        """Attend from each token of x to the tokens of `context`; without a context, to those of x and of the cache.
        Return the output after the output projection and, with `return_weights`, the attention weights of each head.

        Example:
            >>> layer = MultiHeadAttention(512, num_heads=8, mask=causal())
            >>> x = torch.randn(2, 10, 512)
            >>> y = layer(x, lengths=[10, 4])  # the last 6 tokens of the second sequence are padding
            >>> y[1, 4:].any()
            tensor(False)

        Args:
            x: `(batch, queries, embed_dim)`, or `(queries, embed_dim)` for one sequence. If it is a jagged nested
                tensor, so is the output.
            context: source of the keys, `(batch, keys, context_dim)` or `(keys, context_dim)`; by default x. Where
                many calls attend to the same context, pass the result of `project_context`.
            value_context: source of the values, `(batch, keys, value_context_dim)`; by default the context.
            mask: keys that each query may attend to, see `attend`; combined with the layer's own mask.
            bias: added to the scores, see `attend`, in addition to the layer's `position_bias`.
            gate: factor of each head's output before the output projection: `(heads,)`, `(batch, heads)` or
                `(batch, heads, queries)`.
            positions: positions of the tokens of x for `rotary` and `position_bias`, `(queries,)` or
                `(batch, queries)`; self-attention only. Masks follow the order of the tokens instead. By default
                tokens stand in order, and the last query is aligned with the last key.
            cache: keys and values of earlier tokens, to which those of x are appended; self-attention only.
            lengths: number of real tokens at the start of each sequence, `(batch,)`; the others are padding.
                Self-attention only. Without a cache, padding is hidden: its output and weights are 0, its input has
                no effect, and it is not computed where it is much. With a `StaticCache`, only real tokens enter it.
            offsets: start of each packed sequence, then the number of tokens, `(sequences + 1,)`. Sequence s is
                `x[offsets[s] : offsets[s + 1]]` of an x of shape `(tokens, embed_dim)`, and attends to itself alone.
            context_offsets: the same for the packed sequences of the context.
            return_weights: True to return the attention weights too, before dropout.

        Returns:
            Output `(batch, queries, out_dim)`. With `return_weights` a tuple of the output and the weights
            `(batch, heads, queries, keys)`. Without the batch axis if x has none.

        Raises:
            InputError: inputs that do not fit the layer or each other.
        """
        if (
            context is None
            and value_context is None
            and bias is None
            and gate is None
            and positions is None
            and lengths is None
            and offsets is None
            and context_offsets is None
            and return_weights is False
        ):
            y = self._short_call(x, mask, cache)
            if y is not None:
                return y
        inputs, call, layout_of_x = self._unpack(
            x,
            context,
            value_context,
            mask=mask,
            bias=bias,
            gate=gate,
            positions=positions,
            cache=cache,
            lengths=lengths,
            offsets=offsets,
            context_offsets=context_offsets,
            return_weights=return_weights,
        )
        q, k, v = self._project(inputs)
        # q (batch, heads, queries, head_dim), k (batch, kv_heads, keys, head_dim), v (batch, kv_heads, keys, value_dim)
        prepared = self._prepare(q, k, v, call, self.rotary)
        # the same, rotated by position; k and v begin with the cached tokens
        if call.offsets is None:
            heads, weights = self._attend(prepared, call)
        else:
            heads, weights = self._attend_packed(prepared, call, call.offsets)
        # heads (batch, heads, queries, value_dim), weights (batch, heads, queries, keys) or None
        if self.output_gate is not None:
            heads = heads * torch.sigmoid(self._split_heads(project(self.gate_proj, inputs.x), self.num_heads))
        out_proj: Any = self._modules["out_proj"]
        y = project(out_proj, heads.transpose(1, 2).flatten(2))  # (batch, queries, out_dim)
        self._commit(prepared, call)
        return layout_of_x.restore(y, weights)

    def _short_call(self, x: Any, mask: Any, cache: Any) -> Float[Tensor, "batch queries out"] | None:
        """Return the output of `forward` for self-attention on the CPU, with or without a cache, of a layer without
        options but rotary positions and a mask. It takes few more steps than the same layer written by hand. Return
        None for other calls, and where another engine than `F.linear` may compute the projections.
        """
        modules: Any = self._modules  # reading a module from here takes less time than as an attribute
        scores = self._parameters
        if not (
            type(self) is MultiHeadAttention
            and not self.fused_qkv
            and self.qk_norm is None
            and self.position_bias is None
            and self.scores is None
            and scores.get("sinks") is None
            and scores.get("temperature") is None
            and scores.get("talking_before") is None
            and self.output_gate is None
            and (self.dropout == 0.0 or not self.training)
            and type(x) is Tensor
            and not x.is_nested
            and x.ndim == 3
            and x.shape[2] == self.embed_dim == self.context_dim == self.value_context_dim
            and (mask is None or isinstance(mask, Mask))
            and (cache is None or isinstance(cache, Cache))
        ):
            return None
        parameters = plain_parameters(x, modules["q_proj"], modules["k_proj"], modules["v_proj"], modules["out_proj"])
        if parameters is None:
            return None
        (q_weight, q_bias), (k_weight, k_bias), (v_weight, v_bias), (out_weight, out_bias) = parameters
        if x.dtype is not q_weight.dtype or not q_weight.is_cpu:
            return None
        q = self._split_heads(F.linear(x, q_weight, q_bias), self.num_heads)
        k = self._split_heads(F.linear(x, k_weight, k_bias), self.num_kv_heads)
        v = self._split_heads(F.linear(x, v_weight, v_bias), self.num_kv_heads)
        mask = self.mask if mask is None and cache is None else self._mask_and_bias(mask, None, cache)[0]
        query_positions = key_positions = update = None
        if cache is not None or self.rotary is not None:
            call = LayerCall(mask, None, None, None, cache, None, None, False)
            q, k, v, _, _, query_positions, key_positions, update = self._prepare(q, k, v, call, self.rotary)
        heads: Any = attend(
            q,
            k,
            v,
            mask=mask,
            scale=self.head_dim**-0.5,
            query_positions=query_positions,
            key_positions=key_positions,
            backend=self.backend,
        )
        y = F.linear(heads.transpose(1, 2).flatten(2), out_weight, out_bias)
        if update is not None:
            cache.commit(update)
        return y

    def _unpack(
        self,
        x: Any,
        context: Any,
        value_context: Any,
        *,
        mask: Any,
        bias: Any,
        gate: Any,
        positions: Any,
        cache: Any,
        lengths: Any,
        offsets: Any,
        context_offsets: Any,
        return_weights: bool,
    ) -> tuple[LayerInputs, LayerCall, layout.Layout]:
        """Check the arguments of `forward`. Return the input tensors as `(batch, length, width)`, the options of the
        call, and the layout of x, which converts the output back.

        The arguments are those of `forward`.
        """
        layout_of_x: layout.Layout
        if isinstance(x, Tensor) and x.is_nested:
            values, starts = layout.unpack_nested(x, context, value_context, offsets, context_offsets)
            x, context, value_context = (values.get(name) for name in ("x", "context", "value_context"))
            offsets, context_offsets = starts["x"], starts.get("context")
            layout_of_x = layout.Nested(offsets)
        else:
            layout_of_x = layout.BATCH if isinstance(x, Tensor) and x.ndim == 3 else layout.SingleRow()
        cross = context is not None
        inputs = self._checked_inputs(x, context, value_context)
        packing = query_and_key_offsets(x, inputs.num_keys, offsets, context_offsets, cross=cross)
        padded = None
        if lengths is not None and cache is None and not cross and offsets is None:
            padded = packed.PaddedBatch.from_lengths(lengths, x)
            lengths = None
        self._check_cache(cache, lengths, cross=cross, packed=packing is not None)
        positions = self._checked_positions(inputs.x, positions, cache, cross=cross)
        mask, bias = self._mask_and_bias(mask, bias, cache)
        call = LayerCall(mask, bias, gate, positions, cache, lengths, packing, flag("return_weights", return_weights))
        if padded is not None:
            x, call, layout_of_x = layout.unpack_padded(inputs.x, padded, call)
            inputs = LayerInputs(x, x, x)
        return inputs, call, layout_of_x

    def _attend(
        self, inputs: AttentionInputs, call: LayerCall
    ) -> tuple[Float[Tensor, "batch heads queries value_dim"], Float[Tensor, "batch heads queries keys"] | None]:
        """Compute attention with the layer's position bias added to the scores. Return each head's output times its
        factor in the call's gate; and the attention weights, or None if the call does not request them.
        """
        call = self._with_position_bias(inputs, call)
        return self._call_attend(inputs, call, self._score_parameters(self.head_dim))

    def _with_position_bias(self, inputs: AttentionInputs, call: LayerCall) -> LayerCall:
        """Return the options of the call with the layer's position bias added to the bias of the call; unchanged if the
        layer has no position bias.
        """
        if self.position_bias is None:
            return call
        if call.bias is not None:
            require_broadcast("bias", call.bias, inputs.grid)
        positions = inputs.query_positions, inputs.key_positions
        bias = self.position_bias.values(self.num_heads, *positions, score_dtype(inputs.q))
        return call._replace(bias=bias if call.bias is None else bias + call.bias)

    def _attend_packed(
        self, inputs: AttentionInputs, call: LayerCall, offsets: packed.Offsets
    ) -> tuple[Float[Tensor, "1 heads queries value_dim"], None]:
        """Return each head's output for packed sequences, and None in place of weights. Each sequence attends to itself
        alone, or in cross-attention to the context sequence of the same index.
        """
        check_packed_options(call, sequences=len(offsets.queries) - 1, num_heads=self.num_heads, like=inputs.q)
        heads: list[Tensor] = [inputs.q.new_zeros(1, 0, self.num_heads, self.value_dim)]
        for sequence, options in each_sequence(inputs, call, offsets):
            head_outputs, _ = self._attend(sequence, options)
            heads.append(head_outputs.transpose(1, 2))  # heads side by side, as the output projection reads them
        return torch.cat(heads, dim=1).transpose(1, 2), None

    # -- checks -----------------------------------------------------------------------------------------------

    def _check_options(self) -> None:
        """Raise `InputError` for options that have the wrong type or do not fit the sizes of the layer."""
        self._check_option_types()
        if self.output_gate not in (None, "head", "element"):
            raise InputError("output_gate", expected="'head', 'element' or None", got=repr(self.output_gate))
        if self.rotary is not None:
            self.rotary.check(self.head_dim)
        widths = (self.context_dim, self.value_context_dim)
        if self.fused_qkv and widths != (self.embed_dim, self.embed_dim):
            raise InputError("fused_qkv", expected=f"contexts of width {self.embed_dim} like x", got=f"widths {widths}")

    def extra_repr(self) -> str:
        """Return the sizes and options of the layer as text, for `repr`."""
        sizes = {"num_heads": self.num_heads}
        if self.num_kv_heads != self.num_heads:
            sizes["num_kv_heads"] = self.num_kv_heads
        sizes |= {"head_dim": self.head_dim, "value_dim": self.value_dim}
        options = {name: getattr(self, name) for name in ("rotary", "position_bias", "scores", "output_gate", "mask")}
        shown = {name: option for name, option in options.items() if option is not None}
        shown = {name: option for name, option in shown.items() if not isinstance(option, nn.Module)}
        return ", ".join(f"{name}={value!r}" for name, value in (sizes | shown).items())
