"""The layer: project, place, attend, gate, project.

x (batch, queries, embed)      context (batch, keys, context)     values' own context, or the same
    | q_proj, q_norm               | k_proj, k_norm                   | v_proj
(batch, heads, queries, head_dim)  (batch, kv_heads, keys, head_dim)  (batch, kv_heads, keys, value_dim)
    | rotary                       | rotary                           |
    |                              +------------- cache --------------+
    +------- attend, one matrix a head ----------+
    |
(batch, heads, queries, value_dim)    x gate, one number a head    x output gate, from x
    | heads side by side
(batch, queries, heads * value_dim)
    | out_proj
(batch, queries, out)
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from headwise.attention import packed
from headwise.attention.attend import attend
from headwise.attention.backends.blockwise.backend import Blockwise
from headwise.attention.caches.base import Cache
from headwise.attention.masks.base import Mask
from headwise.attention.masks.factories import padding
from headwise.attention.masks.grid import require_broadcast
from headwise.attention.position_bias import PositionBias
from headwise.attention.prepare import AttentionInputs, prepare_qkv
from headwise.attention.problem import score_dtype
from headwise.attention.rotary import Rotary
from headwise.checks import float_tensor, probability, whole_number
from headwise.errors import InputError
from headwise.nn.base import AttentionLayer, needs_full_capacity
from headwise.nn.options import OutputGate, QKNorm, Scores
from headwise.nn.projections import apply_norm, reset_linear
from headwise.shapes import Bool, Float, Int


class ProjectedContext(NamedTuple):
    """A context as the keys and values of one layer: made once by `project_context`, attended to many times."""

    k: Float[Tensor, "batch kv_heads keys head_dim"]
    v: Float[Tensor, "batch kv_heads keys value_dim"]


class MultiHeadAttention(AttentionLayer):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2), self or cross, with every width free.

    Args:
        embed_dim: width of the input.
        num_heads: query heads.
        num_kv_heads: key/value heads, each shared by `num_heads / num_kv_heads` consecutive query heads
            (grouped-query attention, Ainslie et al. 2023; 1 is multi-query, Shazeer 2019). Default `num_heads`.
        head_dim: width of a head's queries and keys; default `embed_dim / num_heads`.
        value_dim: width of a head's values; default `head_dim`.
        context_dim: width of the context in cross attention; default `embed_dim`.
        value_context_dim: width of the context that values come from; default `context_dim`.
        out_dim: width of the output; default `embed_dim`.
        bias: whether the query, key and value projections add a bias.
        out_bias: whether the output projection does; default `bias`.
        fused_qkv: one projection, `qkv_proj`, for queries, keys and values; for self-attention only.
        rotary: turns queries and keys by their positions.
        position_bias: adds to the scores by distance: `ALiBi()`, or a `RelativeBias`, which layers may share.
        scores: scale, softcap, sinks, temperature, talking heads: see `Scores`.
        qk_norm: normalises queries and keys: see `QKNorm`.
        output_gate: multiplies the heads' output by the sigmoid of a projection of x, one number for each "head" or
            each "element" (Qiu et al. 2025).
        mask: a `Mask` that always holds; a mask given to `forward` is added to it with `&`.
        dropout: probability of leaving out an attention weight, in training only.
        backend: see `attend`.

    Raises:
        InputError: sizes that are not positive, heads that do not divide, options of another kind.
    """

    maps: ClassVar[int] = 1
    """Score maps of each head, each with queries and keys of its own; more than 1 in derived layers alone."""

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
        backend: str | Blockwise | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        _check_sizes(
            embed_dim=embed_dim,
            num_heads=num_heads,
            maps=self.maps,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            context_dim=context_dim,
            value_context_dim=value_context_dim,
            out_dim=out_dim,
        )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_dim = head_dim or embed_dim // (self.maps * num_heads)
        self.value_dim = value_dim or self.maps * self.head_dim
        self.context_dim = context_dim or embed_dim
        self.value_context_dim = value_context_dim or self.context_dim
        self.out_dim = out_dim or embed_dim
        self.fused_qkv = fused_qkv
        self.rotary = rotary
        self.position_bias = position_bias
        self.scores = scores
        self.qk_norm = qk_norm
        self.output_gate = output_gate
        self.mask = mask
        self.dropout = probability("dropout", dropout)
        self.backend = backend
        self._check_options()

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        if fused_qkv:
            self.qkv_proj = nn.Linear(embed_dim, sum(self.qkv_widths), bias=bias, **factory)
        else:
            queries, keys, values = self.qkv_widths
            self.q_proj = nn.Linear(embed_dim, queries, bias=bias, **factory)
            self.k_proj = nn.Linear(self.context_dim, keys, bias=bias, **factory)
            self.v_proj = nn.Linear(self.value_context_dim, values, bias=bias, **factory)
        self.q_norm = qk_norm.module(self.maps * self.num_heads, self.head_dim, **factory) if qk_norm else None
        self.k_norm = qk_norm.module(self.maps * self.num_kv_heads, self.head_dim, **factory) if qk_norm else None
        if output_gate is not None:
            gates = self.num_heads * (self.value_dim if output_gate == "element" else 1)
            self.gate_proj = nn.Linear(embed_dim, gates, bias=bias, **factory)
        out_bias = bias if out_bias is None else out_bias
        self.out_proj = nn.Linear(self.num_heads * self.value_dim, self.out_dim, bias=out_bias, **factory)
        self._register_scores(self.maps * num_heads, **factory)
        self.reset_parameters()

    @property
    def qkv_widths(self) -> tuple[int, int, int]:
        """Widths of the projected queries, keys and values."""
        return (
            self.maps * self.num_heads * self.head_dim,
            self.maps * self.num_kv_heads * self.head_dim,
            self.num_kv_heads * self.value_dim,
        )

    def reset_parameters(self) -> None:
        """Weights of projections uniform after Glorot and Bengio 2010, biases zero; options as if they were not there.

        A `position_bias` may belong to several layers and is left alone.
        """
        for name, module in self.named_children():
            if isinstance(module, nn.Linear):
                reset_linear(module, self.qkv_widths if name == "qkv_proj" else (module.out_features,))
            elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
                module.reset_parameters()
        self._reset_scores()

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
        """Attend from `x` to `context`, or to itself.

        Args:
            x: `(batch, queries, embed_dim)`, or `(queries, embed_dim)` for one sequence; or nested (jagged), and
                then so is the output.
            context: `(batch, keys, context_dim)` or `(keys, context_dim)`; None attends to `x`. Or what
                `project_context` made of one, where the same context is attended to again and again.
            value_context: `(batch, keys, value_context_dim)`, where values come from; None takes the context.
            mask: see `attend`; it joins the layer's own.
            bias: see `attend`; it is added to the layer's own.
            gate: multiplies each head's output before the output projection: `(heads,)`, `(batch, heads)` or
                `(batch, heads, queries)`.
            positions: where the tokens of x stand, `(queries,)` or `(batch, queries)`, for `rotary` and
                `position_bias`; masks keep to the order of the tokens. Self-attention only. Unless given, the last
                query stands at the last key.
            cache: what the layer has seen before x; x is added to it. Self-attention only.
            lengths: `(batch,)`, how many tokens of each sequence are real, the first ones; beside no cache or a
                `StaticCache`. Without a cache nothing attends to the others or from them: their output and weights
                are 0, and where they are many nothing is computed for them. Self-attention only.
            offsets: `(sequences + 1,)` whole numbers: x is several sequences end to end, `(tokens, embed_dim)`, and
                sequence s is `x[offsets[s] : offsets[s + 1]]`. A sequence sees nothing of another.
            context_offsets: the same for the context.
            return_weights: also return every head's weights, before dropout.

        Returns:
            `(batch, queries, out_dim)`; with `return_weights`, that and `(batch, heads, queries, keys)`. Without
            the batch axis where `x` came without.

        Raises:
            InputError: inputs that do not fit the layer or each other.
        """
        if isinstance(x, Tensor) and x.is_nested:
            return self._nested(
                x=x,
                context=context,
                value_context=value_context,
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
        if lengths is not None and cache is None and context is None and offsets is None:
            given = {"mask": mask, "bias": bias, "gate": gate, "positions": positions}
            return self._padded(x, lengths, **given, return_weights=return_weights)
        batched, cross = isinstance(x, Tensor) and x.ndim == 3, context is not None
        if isinstance(context, ProjectedContext):
            x = self._beside(context, x, value_context)
            q, (k, v) = self._queries(self.q_proj(x)), context
        else:
            x, context, value_context = self._inputs(x, context, value_context)
            q, k, v = self._project(x, context, value_context)
        packing = self._packing(x, k.shape[2] if cross else None, offsets, context_offsets, batched=batched)
        positions = self._positions(x, positions, cache, lengths, cross=cross, packed=packing is not None)

        mask, bias = self._mask_and_bias(mask, bias, cache)
        call: dict[str, Any] = {"mask": mask, "bias": bias, "gate": gate, "return_weights": return_weights}
        where: dict[str, Any] = {"positions": positions, "cache": cache, "lengths": lengths, "offsets": packing}
        full_capacity = needs_full_capacity(cache, mask, bias, return_weights=return_weights)
        inputs = prepare_qkv(q, k, v, rotary=self.rotary, full_capacity=full_capacity, **where)
        if packing is None:
            heads, *weights = self._attend(inputs, **call)
        else:
            heads, weights = self._attend_packed(inputs, packing, **call), []
        if cache is not None and inputs.cache_update is not None:
            cache.commit(inputs.cache_update)

        if self.output_gate is not None:
            heads = heads * torch.sigmoid(self._split(self.gate_proj(x), self.num_heads))
        y = self.out_proj(heads.transpose(1, 2).flatten(2))  # (batch, queries, out_dim)
        results = [result if batched else result.squeeze(0) for result in (y, *weights)]
        return tuple(results) if return_weights else results[0]

    def _project(
        self,
        x: Float[Tensor, "batch queries embed"],
        context: Float[Tensor, "batch keys context"],
        value_context: Float[Tensor, "batch keys value_context"],
    ) -> tuple[
        Float[Tensor, "batch maps_heads queries head_dim"],
        Float[Tensor, "batch maps_kv_heads keys head_dim"],
        Float[Tensor, "batch kv_heads keys value_dim"],
    ]:
        """Queries, keys and values, normalised and cut into heads."""
        if self.fused_qkv:
            q, k, v = self.qkv_proj(x).split(self.qkv_widths, dim=-1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(context), self.v_proj(value_context)
        return self._queries(q), self._keys(k), self._split(v, self.num_kv_heads)

    def project_context(
        self,
        context: Float[Tensor, "*batch keys context"],
        value_context: Float[Tensor, "*batch keys value_context"] | None = None,
    ) -> ProjectedContext:
        """The keys and values of a context that many calls attend to, as a decoder does to its encoder's output.

        Args:
            context: `(batch, keys, context_dim)` or `(keys, context_dim)`.
            value_context: see `forward`.

        Raises:
            InputError: inputs that do not fit the layer; `fused_qkv`, which projects x alone.
        """
        context, value_context = self._contexts(context, value_context)
        return ProjectedContext(
            self._keys(self.k_proj(context)), self._split(self.v_proj(value_context), self.num_kv_heads)
        )

    def _queries(
        self, projected: Float[Tensor, "batch queries width"]
    ) -> Float[Tensor, "batch maps_heads queries head_dim"]:
        return self._normed_heads(projected, self.maps * self.num_heads, self.q_norm)

    def _keys(self, projected: Float[Tensor, "batch keys width"]) -> Float[Tensor, "batch maps_kv_heads keys head_dim"]:
        return self._normed_heads(projected, self.maps * self.num_kv_heads, self.k_norm)

    def _normed_heads(
        self, projected: Float[Tensor, "batch length width"], heads: int, norm: nn.Module | None
    ) -> Float[Tensor, "batch {heads} length head_dim"]:
        """Cut into heads, and normalised before or after, as `qk_norm` says."""
        if self.qk_norm is None or norm is None:
            return self._split(projected, heads)
        if self.qk_norm.over == "heads":
            return self._split(apply_norm(norm, projected), heads)
        return apply_norm(norm, self._split(projected, heads))

    def _attend(
        self,
        inputs: AttentionInputs,
        *,
        mask: Mask | None,
        bias: Tensor | None,
        gate: Tensor | None,
        return_weights: bool,
    ) -> tuple[Tensor, ...]:
        """Each head's output, and its weights where they are asked for."""
        bias = self._with_position_bias(inputs, bias)
        return self._attend_map(slice(None), inputs, mask=mask, bias=bias, gate=gate, return_weights=return_weights)

    def _with_position_bias(self, inputs: AttentionInputs, bias: Tensor | None) -> Tensor | None:
        """What is added to the scores, by distance and by the call."""
        if self.position_bias is None:
            return bias
        if bias is not None:
            require_broadcast("bias", bias, inputs.grid)
        positions = inputs.query_positions, inputs.key_positions
        by_distance = self.position_bias.values(self.num_heads, *positions, score_dtype(inputs.q))
        return by_distance if bias is None else by_distance + bias

    def _attend_map(
        self,
        heads: slice,
        inputs: AttentionInputs,
        *,
        mask: Mask | None,
        bias: Tensor | None,
        gate: Tensor | None,
        return_weights: bool,
    ) -> tuple[Tensor, ...]:
        """One map of scores a head, whose own parameters are those of `heads`."""
        attended = attend(
            inputs.q,
            inputs.k,
            inputs.v,
            mask=mask,
            bias=bias,
            gate=gate,
            return_weights=return_weights,
            **inputs.mask_positions,
            **self._score_options(self.head_dim, heads),
        )
        return attended if isinstance(attended, tuple) else (attended,)

    def _attend_packed(
        self,
        inputs: AttentionInputs,
        offsets: packed.Offsets,
        *,
        mask: Mask | None,
        bias: Tensor | None,
        gate: Tensor | None,
        return_weights: bool,
    ) -> Float[Tensor, "1 heads queries value_dim"]:
        """Each packed sequence by itself, so that nothing is computed between two of them."""
        if bias is not None:
            raise InputError("bias", expected="none beside packed sequences", got=f"shape {tuple(bias.shape)}")
        if return_weights:
            raise InputError("return_weights", expected="False beside packed sequences", got="True")
        sequences = len(offsets[0]) - 1
        if gate is not None and float_tensor("gate", gate, like=inputs.q).shape not in (
            (self.num_heads,),
            (sequences, self.num_heads),
        ):
            expected = f"shape ({self.num_heads},) or {(sequences, self.num_heads)} beside packed sequences"
            raise InputError("gate", expected=expected, got=tuple(gate.shape))
        if mask is not None and mask.natural_grid().batch not in (0, sequences):
            expected = f"one for all sequences or for each of {sequences}"
            raise InputError("mask", expected=expected, got=f"one for each of {mask.natural_grid().batch}")
        heads: list[Tensor] = [inputs.q.new_zeros(1, 0, self.num_heads, self.value_dim)]
        for index, (of_queries, of_keys) in enumerate(zip(*map(packed.sequence_slices, offsets), strict=True)):
            one = inputs._replace(
                q=inputs.q[:, :, of_queries],
                k=inputs.k[:, :, of_keys],
                v=inputs.v[:, :, of_keys],
                query_positions=inputs.query_positions[:, of_queries],
                explicit_key_positions=inputs.key_positions[:, of_keys],
            )
            own_mask = None if mask is None else mask.for_sequence(index)
            own_gate = gate if gate is None or gate.ndim == 1 else gate[index : index + 1]
            attended = self._attend(one, mask=own_mask, bias=None, gate=own_gate, return_weights=False)
            heads.append(attended[0].transpose(1, 2))  # the heads side by side, as the output projection reads them
        return torch.cat(heads, dim=1).transpose(1, 2)

    def _padded(
        self, x: Any, lengths: Any, *, mask: Any, bias: Any, gate: Any, positions: Any, return_weights: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The same for a batch padded on the right: packed where that saves work and is possible, otherwise masked."""
        self._check_input("x", x, self.embed_dim)
        padded = packed.PaddedBatch.from_lengths(lengths, x)
        positions = self._positions(x, positions, None, None)
        every, bias = self._mask_and_bias(mask, bias, None)
        fits = every is None or every.natural_grid().queries == every.natural_grid().keys == 0
        fits = fits and bias is None and not return_weights and (gate is None or gate.ndim < 3)
        if fits and padded.should_pack:
            if positions is not None:
                positions = positions.expand(x.shape[:2])[padded.is_real]
            y = self(padded.pack(x), mask=mask, gate=gate, positions=positions, offsets=padded.offsets)
            return padded.unpack(y)
        real, there = padded.is_real, padding(padded.lengths)
        mask = there if every is None else there & every
        answer = self(x, mask=mask, bias=bias, gate=gate, positions=positions, return_weights=return_weights)
        y, *weights = answer if return_weights else (answer,)
        y = y.masked_fill(~real[..., None], 0.0)
        return (y, weights[0].masked_fill(~real[:, None, :, None], 0.0)) if return_weights else y

    def _nested(self, *, offsets: Any, context_offsets: Any, **options: Any) -> Float[Tensor, "batch _ out"]:
        """The same for jagged nested tensors, whose sequences lie end to end already."""
        for name, given in (("offsets", offsets), ("context_offsets", context_offsets)):
            if given is not None:
                raise InputError(name, expected="none beside a nested x, which has its own", got="some")
        inputs = {name: options.pop(name) for name in ("x", "context", "value_context")}
        values, own = packed.from_nested({name: tensor for name, tensor in inputs.items() if tensor is not None})
        y = self(**values, offsets=own["x"], context_offsets=own.get("context"), **options)
        return torch.nested.nested_tensor_from_jagged(y, own["x"])

    # -- what may be asked for --------------------------------------------------------------------------------

    @property
    def _kept_sizes(self) -> list[tuple[int, int]]:
        """Heads and width of the keys, and of the values."""
        return [(self.maps * self.num_kv_heads, self.head_dim), (self.num_kv_heads, self.value_dim)]

    def _check_options(self) -> None:
        """Kinds of the options, and what they ask of the sizes."""
        self._check_kinds()
        if self.output_gate not in (None, "head", "element"):
            raise InputError("output_gate", expected="'head', 'element' or None", got=repr(self.output_gate))
        if self.rotary is not None:
            self.rotary.check(self.head_dim)
        widths = (self.context_dim, self.value_context_dim)
        if self.fused_qkv and widths != (self.embed_dim, self.embed_dim):
            raise InputError("fused_qkv", expected=f"contexts of width {self.embed_dim} like x", got=f"widths {widths}")

    def _inputs(self, x: Any, context: Any, value_context: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The three inputs with a batch axis; one that is None is the one before."""
        self._check_input("x", x, self.embed_dim)
        if context is None:
            if value_context is not None:
                raise InputError("context", expected="a tensor beside value_context", got="none")
            for name, width in (("context", self.context_dim), ("value_context", self.value_context_dim)):
                if width != self.embed_dim:
                    raise InputError(name, expected=f"a tensor of width {width}, the layer's", got="none")
            x = _with_batch(x)
            return x, x, x
        contexts = self._contexts(context, value_context)
        if context.shape[:-2] != x.shape[:-2]:
            expected = f"the batch of x, {tuple(x.shape[:-2])}"
            raise InputError("context", expected=expected, got=tuple(context.shape[:-2]))
        return _with_batch(x), *contexts

    def _contexts(self, context: Any, value_context: Any) -> tuple[Tensor, Tensor]:
        """What keys and values come from, with a batch axis."""
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
        if self.fused_qkv:
            raise InputError(
                "context",
                expected="none, since qkv_proj projects x alone",
                got="some",
                remedy="separate_projections(layer) gives a layer that takes one",
            )

    def _beside(self, context: ProjectedContext, x: Any, value_context: Any) -> Tensor:
        """X with a batch axis, beside a context that was projected before."""
        self._check_takes_context()
        self._check_input("x", x, self.embed_dim)
        if value_context is not None:
            raise InputError("value_context", expected="none beside a projected context", got="some")
        sizes = [(tensor.shape[1], tensor.shape[3]) for tensor in context]
        if sizes != self._kept_sizes:
            expected = f"heads and widths {self._kept_sizes}, as project_context of this layer makes them"
            raise InputError("context", expected=expected, got=sizes)
        batched = _with_batch(x)
        if len(context.k) != len(batched):
            raise InputError("context", expected=f"the batch of x, {len(batched)}", got=len(context.k))
        return batched

    def _packing(
        self, x: Tensor, keys: int | None, offsets: Any, context_offsets: Any, *, batched: bool
    ) -> packed.Offsets | None:
        """The offsets of the queries and of the `keys` of a context, checked; None where nothing is packed."""
        if (context_offsets is not None) != (keys is not None and offsets is not None):
            expected = "offsets of x and of a context, where both hold several sequences"
            raise InputError("context_offsets", expected=expected, got="one without the other")
        if offsets is None:
            return None
        if batched:
            expected = f"x of shape (tokens, {self.embed_dim}), its sequences end to end"
            raise InputError("offsets", expected=expected, got=f"x of shape {tuple(x.shape)}")
        of_queries = packed.checked_offsets("offsets", offsets, x.shape[1])
        if keys is None:
            return of_queries, of_queries
        of_keys = packed.checked_offsets("context_offsets", context_offsets, keys)
        if len(of_keys) != len(of_queries):
            raise InputError("context_offsets", expected=f"{len(of_queries)} numbers like offsets", got=len(of_keys))
        return of_queries, of_keys

    def extra_repr(self) -> str:
        sizes = {"num_heads": self.num_heads}
        if self.num_kv_heads != self.num_heads:
            sizes["num_kv_heads"] = self.num_kv_heads
        sizes |= {"head_dim": self.head_dim, "value_dim": self.value_dim}
        options = {name: getattr(self, name) for name in ("rotary", "position_bias", "scores", "output_gate", "mask")}
        shown = {name: each for name, each in options.items() if each is not None and not isinstance(each, nn.Module)}
        return ", ".join(f"{name}={value!r}" for name, value in (sizes | shown).items())


def _with_batch(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 3 else tensor.unsqueeze(0)


def _check_sizes(*, embed_dim: int, num_heads: int, maps: int, **more: int | None) -> None:
    """Sizes are positive, and heads divide what they must."""
    for name, size in {"embed_dim": embed_dim, "num_heads": num_heads, **more}.items():
        if size is not None:
            whole_number(name, size, least=1)
    if more["head_dim"] is None and embed_dim % (maps * num_heads):
        shared = "" if maps == 1 else f" / {maps} = {embed_dim / maps:g}"
        expected = f"a number that divides embed_dim {embed_dim}{shared}"
        raise InputError("num_heads", expected=expected, got=num_heads, remedy="or give head_dim")
    kv_heads = more["num_kv_heads"]
    if kv_heads is not None and num_heads % kv_heads:
        raise InputError("num_kv_heads", expected=f"a number that divides num_heads {num_heads}", got=kv_heads)
