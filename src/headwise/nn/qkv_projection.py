"""Queries, keys and values of all heads, projected from x and from a context."""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from headwise.checks import size_argument
from headwise.errors import InputError
from headwise.nn.base import AttentionLayer
from headwise.nn.linear_engine import project, projections
from headwise.nn.options import QKNorm
from headwise.nn.projections import apply_norm
from headwise.shapes import Float


class ProjectedContext(NamedTuple):
    """Keys and values of a context, split into heads. `project_context` computes them once, for many calls of the same
    layer that attend to this context.

    Attributes:
        k: keys, normalised if the layer has a `qk_norm`.
        v: values.
    """

    k: Float[Tensor, "batch kv_heads keys head_dim"]
    v: Float[Tensor, "batch kv_heads keys value_dim"]


class LayerInputs(NamedTuple):
    """Checked input tensors of one call of a layer, all with a batch axis: x, from which queries are projected, and the
    tensors from which keys and values are projected, or these keys and values themselves.

    Attributes:
        x: source of the queries.
        context: source of the keys, or keys and values themselves; x in self-attention.
        value_context: source of the values; None with a projected context.
    """

    x: Float[Tensor, "batch queries embed"]
    context: Float[Tensor, "batch keys context"] | ProjectedContext
    value_context: Float[Tensor, "batch keys value_context"] | None

    @property
    def num_keys(self) -> int:
        """Number of tokens in the layer's context (x itself in self-attention), cached tokens not included."""
        return self.context.k.shape[2] if isinstance(self.context, ProjectedContext) else self.context.shape[1]


class QKVProjection(AttentionLayer):
    """Base class of attention layers that project queries from x, and keys and values from x or from a context.

    Attributes:
        maps: score maps per head, each with its own queries and keys; more than 1 only in derived layers.
        embed_dim: width of x.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads.
        head_dim: width of a head's queries and keys.
        value_dim: width of a head's values.
        context_dim: width of the context of the keys.
        value_context_dim: width of the context of the values.
        out_dim: width of the output.
        fused_qkv: True if `qkv_proj` takes the place of `q_proj`, `k_proj` and `v_proj`.
        qk_norm: normalisation of queries and keys, by `q_norm` and `k_norm`.
    """

    maps: ClassVar[int] = 1

    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    context_dim: int
    value_context_dim: int
    out_dim: int
    fused_qkv: bool
    qk_norm: QKNorm | None

    def _set_sizes(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None,
        head_dim: int | None,
        value_dim: int | None,
        context_dim: int | None,
        value_context_dim: int | None,
        out_dim: int | None,
    ) -> None:
        """Check the sizes passed to the constructor and store them as attributes, with None replaced by the default of
        each.

        Raises:
            InputError: a size that is not positive, or heads that do not divide what they share.
        """
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

    def _make_projections(self, bias: bool, **factory: Any) -> None:
        """Create the linear projections of queries, keys and values, as three modules or as one fused `qkv_proj`, with
        biases if `bias` is True. Also create the norms of queries and keys; both are None without `qk_norm`.

        Args:
            bias: True for projections with a bias.
            **factory: device and dtype of the parameters.
        """
        queries, keys, values = self.qkv_widths
        if self.fused_qkv:
            self.qkv_proj = nn.Linear(self.embed_dim, queries + keys + values, bias=bias, **factory)
        else:
            self.q_proj = nn.Linear(self.embed_dim, queries, bias=bias, **factory)
            self.k_proj = nn.Linear(self.context_dim, keys, bias=bias, **factory)
            self.v_proj = nn.Linear(self.value_context_dim, values, bias=bias, **factory)
        norm, head_dim = self.qk_norm, self.head_dim
        self.q_norm = norm.module(self.maps * self.num_heads, head_dim, **factory) if norm else None
        self.k_norm = norm.module(self.maps * self.num_kv_heads, head_dim, **factory) if norm else None

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
        """Return the projected keys and values of a context, for use in many calls that attend to it.

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
        return ProjectedContext(self._key_heads(k), self._split_heads(v, self.num_kv_heads))

    def _project(
        self, inputs: LayerInputs
    ) -> tuple[
        Float[Tensor, "batch maps_heads queries head_dim"],
        Float[Tensor, "batch maps_kv_heads keys head_dim"],
        Float[Tensor, "batch kv_heads keys value_dim"],
    ]:
        """Return the queries, keys and values of a call, projected and split into heads, with queries and keys
        normalised if the layer has a `qk_norm`. Keys and values of a `ProjectedContext` are returned unchanged.
        """
        x, context, value_context = inputs
        modules: Any = self._modules  # reading a module from here takes less time than as an attribute
        if isinstance(context, ProjectedContext):
            return self._query_heads(project(modules["q_proj"], x)), context.k, context.v
        if self.fused_qkv:
            q, k, v = torch.split(project(modules["qkv_proj"], x), list(self.qkv_widths), dim=-1)
        elif context is x and value_context is x:
            q, k, v = projections(x, modules["q_proj"], modules["k_proj"], modules["v_proj"])
        else:
            q = project(modules["q_proj"], x)
            assert value_context is not None
            k, v = project(modules["k_proj"], context), project(modules["v_proj"], value_context)
        return self._query_heads(q), self._key_heads(k), self._split_heads(v, self.num_kv_heads)

    def _query_heads(
        self, projected: Float[Tensor, "batch queries width"]
    ) -> Float[Tensor, "batch maps_heads queries head_dim"]:
        """Return projected queries split into heads, and normalised if the layer has a `qk_norm`."""
        return self._normalised_heads(projected, self.maps * self.num_heads, self.q_norm)

    def _key_heads(
        self, projected: Float[Tensor, "batch keys width"]
    ) -> Float[Tensor, "batch maps_kv_heads keys head_dim"]:
        """Return projected keys split into heads, and normalised if the layer has a `qk_norm`."""
        return self._normalised_heads(projected, self.maps * self.num_kv_heads, self.k_norm)

    def _normalised_heads(
        self, projected: Float[Tensor, "batch length width"], heads: int, norm: nn.Module | None
    ) -> Float[Tensor, "batch {heads} length head_dim"]:
        """Return projected queries or keys split into heads, and normalised by `norm`, per head or over all heads
        together as `qk_norm` states. Without a norm they are only split.
        """
        if self.qk_norm is None or norm is None:
            return self._split_heads(projected, heads)
        if self.qk_norm.over == "heads":
            return self._split_heads(apply_norm(norm, projected), heads)
        return apply_norm(norm, self._split_heads(projected, heads))

    # -- checks -----------------------------------------------------------------------------------------------

    def _checked_inputs(self, x: Any, context: Any, value_context: Any) -> LayerInputs:
        """Check the inputs of a call and return them, with a batch axis added where it is missing. Without a context, x
        is also the source of keys and values.

        Raises:
            InputError: inputs that do not fit the layer or each other.
        """
        if isinstance(context, ProjectedContext):
            return LayerInputs(self._checked_x_for(context, x, value_context), context, None)
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
        """Check a context and a value context, and return them as the sources of keys and of values, with a batch axis.
        Without a value context, the context is the source of both.

        Raises:
            InputError: contexts that do not fit the layer or each other.
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
        """Raise `InputError` if the layer cannot attend to a context, because its fused `qkv_proj` projects queries,
        keys and values from x alone.
        """
        if self.fused_qkv:
            raise InputError(
                "context",
                expected="none, since qkv_proj projects x alone",
                got="some",
                remedy="separate_projections(layer) gives a layer that takes one",
            )

    def _checked_x_for(
        self, context: ProjectedContext, x: Any, value_context: Any
    ) -> Float[Tensor, "batch queries embed"]:
        """Check that x and a projected context (keys and values) fit the layer and each other, and return x with a
        batch axis.

        Raises:
            InputError: a context of another layer or batch, or a value context in addition.
        """
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
        return batched

    @property
    def _cached_sizes(self) -> list[tuple[int, int]]:
        """Number of heads and width of the two tensors that a cache stores: the keys, and the values."""
        return [(self.maps * self.num_kv_heads, self.head_dim), (self.num_kv_heads, self.value_dim)]


def _with_batch(tensor: Float[Tensor, "*batch length width"]) -> Float[Tensor, "batch length width"]:
    """Return the tensor with a batch axis: unchanged if it has one, otherwise with an axis of size 1 in front."""
    return tensor if tensor.ndim == 3 else tensor.unsqueeze(0)
