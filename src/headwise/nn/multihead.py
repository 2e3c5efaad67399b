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
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.attention import packed
from headwise.attention.attend import attend
from headwise.attention.caches import Cache
from headwise.attention.masks.base import Mask
from headwise.attention.masks.grid import require_broadcast
from headwise.attention.position_bias import PositionBias
from headwise.attention.prepare import AttentionInputs
from headwise.attention.problem import Backend, score_dtype
from headwise.attention.rotary import Rotary
from headwise.attention.tensors import Keys, Values
from headwise.checks import flag, float_dtype, probability, size_argument
from headwise.errors import InputError
from headwise.nn import layout
from headwise.nn.base import AttentionLayer, HeadsAndWeights, LayerCall, apply_norm
from headwise.nn.linear_engine import plain_parameters, project, projections
from headwise.nn.options import OutputGate, QKNorm, Scores
from headwise.shapes import Bool, Float, Int


class ProjectedContext(NamedTuple):
    """Keys and values of the second sequence in cross-attention (the context), projected and split into heads.
    `project_context` computes them once, and then many calls of the same layer can attend to them.

    Attributes:
        k: keys, normalised if the layer has a `qk_norm`.
        v: values.
    """

    k: Keys
    v: Values


class LayerInputs(NamedTuple):
    """Input tensors of one layer call, after they have been checked, all with a batch axis: `x` for the queries,
    `context` for the keys, and `value_context` for the values. In self-attention all three are `x`. `context` may also
    be a `ProjectedContext`, which has the keys and values already; `value_context` is None then.
    """

    x: Float[Tensor, "batch queries embed"]
    context: Float[Tensor, "batch keys context"] | ProjectedContext
    value_context: Float[Tensor, "batch keys value_context"] | None

    @property
    def num_keys(self) -> int:
        """Number of tokens from which the keys are computed in this layer call: in self-attention those of x, otherwise
        those of the context. Cached tokens are not counted.
        """
        return self.context.k.shape[2] if isinstance(self.context, ProjectedContext) else self.context.shape[1]


class MultiHeadAttention(AttentionLayer):
    """Multi-head attention layer for self-attention, or for cross-attention to a second sequence (Vaswani et al. 2017,
    section 3.2.2).

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

    Attributes:
        maps: score maps per head, each with its own queries and keys; more than 1 only in derived layers.

    Raises:
        InputError: sizes that are not positive or do not divide each other, options of the wrong type.
    """

    maps: ClassVar[int] = 1

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
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        sizes |= {"value_dim": value_dim, "context_dim": context_dim, "value_context_dim": value_context_dim}
        for name, number in (sizes | {"out_dim": out_dim}).items():
            if number is not None or name in ("embed_dim", "num_heads"):
                size_argument(name, number)
        if head_dim is None and embed_dim % (self.maps * num_heads):
            per_map = "" if self.maps == 1 else f" / {self.maps} = {embed_dim / self.maps:g}"
            expected = f"a number that divides embed_dim {embed_dim}{per_map}"
            raise InputError("num_heads", expected=expected, got=num_heads, remedy="or give head_dim")
        if num_kv_heads is not None and num_heads % num_kv_heads:
            raise InputError("num_kv_heads", expected=f"a number that divides num_heads {num_heads}", got=num_kv_heads)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_dim = head_dim or embed_dim // (self.maps * num_heads)
        self.value_dim = value_dim or self.maps * self.head_dim
        self.context_dim = context_dim or embed_dim
        self.value_context_dim = value_context_dim or self.context_dim
        self.out_dim = out_dim or embed_dim
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
        flag("bias", bias)
        queries, keys, values = self.qkv_widths
        if self.fused_qkv:
            self.qkv_proj = nn.Linear(self.embed_dim, queries + keys + values, bias=bias, **factory)
        else:
            self.q_proj = nn.Linear(self.embed_dim, queries, bias=bias, **factory)
            self.k_proj = nn.Linear(self.context_dim, keys, bias=bias, **factory)
            self.v_proj = nn.Linear(self.value_context_dim, values, bias=bias, **factory)
        query_heads, key_heads = self.maps * self.num_heads, self.maps * self.num_kv_heads
        self.q_norm = qk_norm.module(query_heads, self.head_dim, **factory) if qk_norm else None
        self.k_norm = qk_norm.module(key_heads, self.head_dim, **factory) if qk_norm else None
        if output_gate is not None:
            gates = self.num_heads * (self.value_dim if output_gate == "element" else 1)
            self.gate_proj = nn.Linear(embed_dim, gates, bias=bias, **factory)
        out_bias = bias if out_bias is None else flag("out_bias", out_bias)
        self.out_proj = nn.Linear(self.num_heads * self.value_dim, self.out_dim, bias=out_bias, **factory)
        self._register_score_parameters(query_heads, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise weights uniformly by the method of Glorot and Bengio (2010), and biases and sinks with 0. Norm
        weights and temperatures are initialised with 1, and talking-heads matrices with the identity.

        A `position_bias` may be shared by several layers and is not changed.
        """
        self._reset_all("qkv_proj", self.qkv_widths)

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
        """Attend from each token of x to the tokens of `context`. Without a context, attend to the tokens of x and,
        with a cache, to the cached ones. Return the output after the output projection and, with `return_weights`, the
        attention weights of each head.

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
        starts: dict[str, Tensor] = {}  # offsets of nested tensors
        if isinstance(x, Tensor) and x.is_nested:
            for name, value in (("offsets", offsets), ("context_offsets", context_offsets)):
                if value is not None:
                    raise InputError(name, expected="none with a nested x, which has its own", got="some")
            values, starts = packed.from_nested({"x": x, "context": context, "value_context": value_context})
            x, context, value_context = values["x"], values.get("context"), values.get("value_context")
            offsets, context_offsets = starts["x"], starts.get("context")
        cross = context is not None
        inputs = self._checked_inputs(x, context, value_context)
        packing = layout.query_and_key_offsets(x, inputs.num_keys, offsets, context_offsets, cross=cross)
        padded = None
        if lengths is not None and cache is None and not cross and offsets is None:
            padded, lengths = layout.padded_lengths(lengths, x), None
        self._check_cache(cache, lengths, cross=cross, packed=packing is not None)
        positions = self._checked_positions(inputs.x, positions, cache, cross=cross)
        mask, bias = self._mask_and_bias(mask, bias, cache)
        call = LayerCall(mask, bias, gate, positions, cache, lengths, packing, flag("return_weights", return_weights))
        if padded is not None:
            real, call, is_real = layout.without_padding(inputs.x, padded, call)
            inputs = LayerInputs(real, real, real)
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
        if starts:
            return torch.nested.nested_tensor_from_jagged(y.squeeze(0), starts["x"])
        if padded is not None:
            y, weights = layout.with_padding(y, weights, is_real, is_packed=call.offsets is not None)
        return layout.output_and_weights(y, weights, has_batch=x.ndim == 3)

    def _short_call(self, x: Any, mask: Any, cache: Any) -> Float[Tensor, "batch queries out"] | None:
        """Return the output of `forward` by a shorter path, with less overhead per layer call. It covers self-attention
        on the CPU that needs only projections, rotation, cache and attention. Return None for all other calls, and if
        another library than torch may be faster for the projections.
        """
        if not (
            type(self) is MultiHeadAttention
            and not self.fused_qkv
            and self.qk_norm is None
            and self.position_bias is None
            and self.output_gate is None
            and type(x) is Tensor
            and not x.is_nested
            and x.ndim == 3
            and x.numel() > 0  # so that `view` can infer the width of a head
            and x.shape[2] == self.embed_dim == self.context_dim == self.value_context_dim
            and (mask is None or isinstance(mask, Mask))
            and (cache is None or isinstance(cache, Cache))
        ):
            return None
        modules: Any = self._modules  # reading a module from here takes less time than as an attribute
        parameters = plain_parameters(x, modules["q_proj"], modules["k_proj"], modules["v_proj"], modules["out_proj"])
        if parameters is None:
            return None
        (q_weight, q_bias), (k_weight, k_bias), (v_weight, v_bias), (out_weight, out_bias) = parameters
        if x.dtype is not q_weight.dtype or not q_weight.is_cpu:
            return None
        batch, length, _ = x.shape
        q = F.linear(x, q_weight, q_bias).view(batch, length, self.num_heads, -1).transpose(1, 2)
        k = F.linear(x, k_weight, k_bias).view(batch, length, self.num_kv_heads, -1).transpose(1, 2)
        v = F.linear(x, v_weight, v_bias).view(batch, length, self.num_kv_heads, -1).transpose(1, 2)
        mask = self.mask if mask is None and cache is None else self._mask_and_bias(mask, None, cache)[0]
        query_positions = key_positions = update = None
        if cache is not None or self.rotary is not None:
            call = LayerCall(mask, None, None, None, cache, None, None, False)
            q, k, v, _, _, query_positions, key_positions, update = self._prepare(q, k, v, call, self.rotary)
        scale, softcap, sinks, talking_heads = self._score_parameters(self.head_dim)
        heads: Any = attend(
            q,
            k,
            v,
            mask=mask,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            talking_heads=talking_heads,
            query_positions=query_positions,
            key_positions=key_positions,
            dropout=self.dropout if self.training else 0.0,
            backend=self.backend,
        )
        y = F.linear(heads.transpose(1, 2).flatten(2), out_weight, out_bias)
        if update is not None:
            cache.commit(update)
        return y

    @property
    def qkv_widths(self) -> tuple[int, int, int]:
        """Total widths, over all heads, of the projected queries, keys and values."""
        return (
            self.maps * self.num_heads * self.head_dim,
            self.maps * self.num_kv_heads * self.head_dim,
            self.num_kv_heads * self.value_dim,
        )

    def project_context(
        self,
        context: Float[Tensor, "*batch keys context"],
        value_context: Float[Tensor, "*batch keys value_context"] | None = None,
    ) -> ProjectedContext:
        """Return the keys and values of a context (the second sequence in cross-attention), projected and split into
        heads. They can be passed to many calls of `forward` that attend to this context.

        A decoder attends to the same encoder output in every step. `layer(x, layer.project_context(context))` equals
        `layer(x, context)`, and the projection is computed once.

        Args:
            context: `(batch, keys, context_dim)` or `(keys, context_dim)`.
            value_context: `(batch, keys, value_context_dim)`, the source of the values; by default the context.

        Raises:
            InputError: inputs that do not fit the layer; a layer with `fused_qkv`, which projects x alone.
        """
        context, value_context = self._checked_contexts(context, value_context)
        k, v = project(self.k_proj, context), project(self.v_proj, value_context)
        k = self._normalised_heads(k, self.maps * self.num_kv_heads, self.k_norm)
        return ProjectedContext(k, self._split_heads(v, self.num_kv_heads))

    def _project(
        self, inputs: LayerInputs
    ) -> tuple[
        Float[Tensor, "batch maps_heads queries head_dim"], Float[Tensor, "batch maps_kv_heads keys head_dim"], Values
    ]:
        """Return the queries, keys and values of a layer call, projected and split into heads. Queries and keys are
        normalised as the option `qk_norm` states. The keys and values of a `ProjectedContext` are returned unchanged.
        """
        x, context, value_context = inputs
        query_heads, key_heads = self.maps * self.num_heads, self.maps * self.num_kv_heads
        modules: Any = self._modules  # reading a module from here takes less time than as an attribute
        if isinstance(context, ProjectedContext):
            q = project(modules["q_proj"], x)
            return self._normalised_heads(q, query_heads, self.q_norm), context.k, context.v
        if self.fused_qkv:
            q, k, v = torch.split(project(modules["qkv_proj"], x), list(self.qkv_widths), dim=-1)
        elif context is x and value_context is x:
            q, k, v = projections(x, modules["q_proj"], modules["k_proj"], modules["v_proj"])
        else:
            q = project(modules["q_proj"], x)
            assert value_context is not None
            k, v = project(modules["k_proj"], context), project(modules["v_proj"], value_context)
        q, k = self._normalised_heads(q, query_heads, self.q_norm), self._normalised_heads(k, key_heads, self.k_norm)
        return q, k, self._split_heads(v, self.num_kv_heads)

    def _normalised_heads(
        self, projected: Float[Tensor, "batch length width"], heads: int, norm: nn.Module | None
    ) -> Float[Tensor, "batch {heads} length head_dim"]:
        """Return projected queries or keys, split into heads and normalised as the layer's option `qk_norm` states."""
        if self.qk_norm is None or norm is None:
            return self._split_heads(projected, heads)
        if self.qk_norm.over == "heads":
            return self._split_heads(apply_norm(norm, projected), heads)
        return apply_norm(norm, self._split_heads(projected, heads))

    def _attend(self, inputs: AttentionInputs, call: LayerCall) -> HeadsAndWeights:
        """Compute attention with the layer's position bias added to the scores. Return each head's output times the
        gate that the layer call passes, if any. Also return the attention weights, or None if the layer call does not
        request them.
        """
        call = self._with_position_bias(inputs, call)
        return self._call_attend(inputs, call, self._score_parameters(self.head_dim))

    def _with_position_bias(self, inputs: AttentionInputs, call: LayerCall) -> LayerCall:
        """Return the options of a layer call with the layer's position bias added to the bias that the caller passed.
        If the layer has no position bias, return the options unchanged.
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
        """Return each head's output for packed sequences, and None in place of the attention weights. In self-attention
        each sequence attends to itself, and in cross-attention to the sequence of the context with the same index.
        """
        layout.check_packed_options(call, sequences=len(offsets.queries) - 1, num_heads=self.num_heads, like=inputs.q)
        heads: list[Tensor] = [inputs.q.new_zeros(1, 0, self.num_heads, self.value_dim)]
        for sequence, options in layout.each_sequence(inputs, call, offsets):
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

    def _checked_inputs(self, x: Any, context: Any, value_context: Any) -> LayerInputs:
        """Return the input tensors of a layer call with a batch axis. Raise `InputError` if they do not fit the layer
        or each other. If `context` is None, the tensor x takes its place.
        """
        if isinstance(context, ProjectedContext):
            self._check_takes_context()
            self._check_input("x", x, self.embed_dim)
            if value_context is not None:
                raise InputError("value_context", expected="none with a projected context", got="some")
            sizes = [(tensor.shape[1], tensor.shape[3]) for tensor in context]
            if sizes != self._cached_sizes:
                expected = f"heads and widths {self._cached_sizes}, as project_context of this layer makes them"
                raise InputError("context", expected=expected, got=sizes)
            batched = _with_batch(x)
            if len(context.k) != len(batched):
                raise InputError("context", expected=f"the batch of x, {len(batched)}", got=len(context.k))
            return LayerInputs(batched, context, None)
        self._check_input("x", x, self.embed_dim)
        if context is None:
            if value_context is not None:
                raise InputError("context", expected="a tensor with value_context", got="none")
            for name, width in (("context", self.context_dim), ("value_context", self.value_context_dim)):
                if width != self.embed_dim:
                    raise InputError(name, expected=f"a tensor of width {width}, the layer's", got="none")
            x = _with_batch(x)
            return LayerInputs(x, x, x)
        contexts = self._checked_contexts(context, value_context)
        if context.shape[:-2] != x.shape[:-2]:
            expected = f"the batch of x, {tuple(x.shape[:-2])}"
            raise InputError("context", expected=expected, got=tuple(context.shape[:-2]))
        return LayerInputs(_with_batch(x), *contexts)

    def _checked_contexts(
        self, context: Any, value_context: Any
    ) -> tuple[Float[Tensor, "batch keys context"], Float[Tensor, "batch keys value_context"]]:
        """Return the two tensors from which keys and values are computed, with a batch axis. Without a `value_context`,
        both are the context. Raise `InputError` if they do not fit the layer or each other.
        """
        self._check_takes_context()
        self._check_input("context", context, self.context_dim)
        if value_context is None:
            if self.value_context_dim != self.context_dim:
                expected = f"a tensor of width {self.value_context_dim}, the layer's"
                raise InputError("value_context", expected=expected, got="none")
            return _with_batch(context), _with_batch(context)
        self._check_input("value_context", value_context, self.value_context_dim)
        if value_context.shape[:-1] != context.shape[:-1]:
            expected = f"batch and length {tuple(context.shape[:-1])} like context"
            raise InputError("value_context", expected=expected, got=tuple(value_context.shape[:-1]))
        return _with_batch(context), _with_batch(value_context)

    def _check_takes_context(self) -> None:
        """Raise `InputError` if the layer cannot attend to a context, because its fused projection `qkv_proj` computes
        queries, keys and values from x alone.
        """
        if self.fused_qkv:
            raise InputError(
                "context",
                expected="none, since qkv_proj projects x alone",
                got="some",
                remedy="separate_projections(layer) gives a layer that takes one",
            )

    @property
    def _cached_sizes(self) -> list[tuple[int, int]]:
        """Number of heads and width of each of the two tensors that a cache stores for this layer: the keys and the
        values.
        """
        return [(self.maps * self.num_kv_heads, self.head_dim), (self.num_kv_heads, self.value_dim)]

    def extra_repr(self) -> str:
        """Return the sizes and options of the layer as text, for `repr`."""
        sizes = ["num_heads", "num_kv_heads", "head_dim", "value_dim"]
        if self.num_kv_heads == self.num_heads:
            sizes.remove("num_kv_heads")
        return self._shown(*sizes, "rotary", "position_bias", "scores", "output_gate", "mask")


def _with_batch(tensor: Float[Tensor, "*batch length width"]) -> Float[Tensor, "batch length width"]:
    """Return a tensor `(batch, length, width)` unchanged, and `(length, width)` as a batch of one."""
    return tensor if tensor.ndim == 3 else tensor.unsqueeze(0)
