"""The layer: project, attend, gate, project.

x (batch, queries, embed)      context (batch, keys, context)
    | q_proj                       | k_proj        | v_proj
(batch, heads, queries, head_dim)  (batch, kv_heads, keys, head_dim | value_dim)
    |                              |               |
    +----------- attend, one matrix a head --------+
    |
(batch, heads, queries, value_dim)    x gate, one number a head
    | heads side by side
(batch, queries, heads * value_dim)
    | out_proj
(batch, queries, out)
"""

from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.attend import attend, backend_named
from headwise.attention.autocast import NARROW, autocast_dtype
from headwise.attention.masks import Mask
from headwise.attention.problem import mask_and_bias
from headwise.checks import finite_number, probability, whole_number
from headwise.errors import InputError
from headwise.shapes import Bool, Float


class MultiHeadAttention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2), self or cross, with every width free.

    Args:
        embed_dim: width of the input.
        num_heads: query heads.
        num_kv_heads: key/value heads, each shared by `num_heads / num_kv_heads` consecutive query heads
            (grouped-query attention, Ainslie et al. 2023; 1 is multi-query, Shazeer 2019). Default `num_heads`.
        head_dim: width of a head's queries and keys; default `embed_dim / num_heads`.
        value_dim: width of a head's values; default `head_dim`.
        context_dim: width of the context in cross attention; default `embed_dim`.
        out_dim: width of the output; default `embed_dim`.
        bias: whether the query, key and value projections add a bias.
        out_bias: whether the output projection does; default `bias`.
        dropout: probability of leaving out an attention weight, in training only.
        mask: a `Mask` that always holds; a mask given to `forward` is added to it with `&`.
        scale: multiplies the scores; default `head_dim ** -0.5`.
        backend: see `attend`.

    Raises:
        InputError: sizes that are not positive, heads that do not divide, a mask that is not a `Mask`.
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
        out_dim: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        dropout: float = 0.0,
        mask: Mask | None = None,
        scale: float | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        sizes = {
            "embed_dim": embed_dim,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "value_dim": value_dim,
            "context_dim": context_dim,
            "out_dim": out_dim,
        }
        for name, size in sizes.items():
            if size is not None:
                whole_number(name, size, least=1)
        if head_dim is None and embed_dim % num_heads:
            raise InputError(
                "num_heads",
                expected=f"a number that divides embed_dim {embed_dim}",
                got=num_heads,
                remedy="or give head_dim",
            )
        if num_kv_heads is not None and num_heads % num_kv_heads:
            raise InputError("num_kv_heads", expected=f"a number that divides num_heads {num_heads}", got=num_kv_heads)
        if mask is not None and not isinstance(mask, Mask):
            raise InputError("mask", expected="a headwise Mask, such as causal()", got=type(mask).__name__)
        if scale is not None:
            finite_number("scale", scale)
        if backend is not None:
            backend_named(backend)

        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_dim = head_dim or embed_dim // num_heads
        self.value_dim = value_dim or self.head_dim
        self.context_dim = context_dim or embed_dim
        self.out_dim = out_dim or embed_dim
        self.dropout = probability("dropout", dropout)
        self.mask = mask
        self.scale = scale
        self.backend = backend

        made = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, self.num_heads * self.head_dim, bias=bias, **made)
        self.k_proj = nn.Linear(self.context_dim, self.num_kv_heads * self.head_dim, bias=bias, **made)
        self.v_proj = nn.Linear(self.context_dim, self.num_kv_heads * self.value_dim, bias=bias, **made)
        out_bias = bias if out_bias is None else out_bias
        self.out_proj = nn.Linear(self.num_heads * self.value_dim, self.out_dim, bias=out_bias, **made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights uniform after Glorot and Bengio 2010, biases zero."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            nn.init.xavier_uniform_(projection.weight)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def forward(
        self,
        x: Float[Tensor, "*batch queries embed"],
        context: Float[Tensor, "*batch keys context"] | None = None,
        *,
        mask: Mask | Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
        bias: Float[Tensor, "..."] | None = None,
        gate: Float[Tensor, "..."] | None = None,
        return_weights: bool = False,
    ) -> (
        Float[Tensor, "*batch queries out"]
        | tuple[Float[Tensor, "*batch queries out"], Float[Tensor, "*batch heads queries keys"]]
    ):
        """Attend from `x` to `context`, or to itself.

        Args:
            x: `(batch, queries, embed_dim)`, or `(queries, embed_dim)` for one sequence.
            context: `(batch, keys, context_dim)` or `(keys, context_dim)`; None attends to `x`.
            mask: see `attend`; it joins the layer's own.
            bias: see `attend`.
            gate: multiplies each head's output before the output projection: `(heads,)`, `(batch, heads)` or
                `(batch, heads, queries)`.
            return_weights: also return every head's weights, before dropout.

        Returns:
            `(batch, queries, out_dim)`; with `return_weights`, that and `(batch, heads, queries, keys)`. Without
            the batch axis where `x` came without.

        Raises:
            InputError: inputs that do not fit the layer or each other.
        """
        self._check("x", x, self.embed_dim)
        if context is not None:
            self._check("context", context, self.context_dim)
        elif self.context_dim != self.embed_dim:
            raise InputError("context", expected=f"a tensor of width {self.context_dim}, the layer's", got="none")
        context = x if context is None else context
        if x.shape[:-2] != context.shape[:-2]:
            raise InputError(
                "context", expected=f"the batch of x, {tuple(x.shape[:-2])}", got=tuple(context.shape[:-2])
            )
        batched = x.ndim == 3
        if not batched:
            x, context = x.unsqueeze(0), context.unsqueeze(0)

        q = self._split(self.q_proj(x), self.num_heads)  # (batch, heads, queries, head_dim)
        k = self._split(self.k_proj(context), self.num_kv_heads)  # (batch, kv_heads, keys, head_dim)
        v = self._split(self.v_proj(context), self.num_kv_heads)  # (batch, kv_heads, keys, value_dim)

        mask, bias = mask_and_bias(mask, bias)
        if self.mask is not None:
            mask = self.mask if mask is None else self.mask & mask
        attended = attend(
            q,
            k,
            v,
            mask=mask,
            bias=bias,
            scale=self.scale,
            gate=gate,
            dropout=self.dropout if self.training else 0.0,
            return_weights=return_weights,
            backend=self.backend,
        )
        heads, *weights = attended if isinstance(attended, tuple) else (attended,)  # (batch, heads, queries, value_dim)
        y = self.out_proj(heads.transpose(1, 2).flatten(2))  # (batch, queries, out_dim)

        results = [result if batched else result.squeeze(0) for result in (y, *weights)]
        return tuple(results) if return_weights else results[0]

    def _split(
        self, projected: Float[Tensor, "batch length width"], heads: int
    ) -> Float[Tensor, "batch {heads} length head_width"]:
        """The width cut into heads, and the heads brought before the length; a view, no copy."""
        return projected.view(*projected.shape[:-1], heads, projected.shape[-1] // heads).transpose(1, 2)

    def _check(self, name: str, tensor: Any, width: int) -> None:
        """Rank, width, device and dtype of an input."""
        if not isinstance(tensor, Tensor):
            raise InputError(name, expected="a tensor", got=type(tensor).__name__)
        if tensor.ndim not in (2, 3):
            raise InputError(name, expected=f"(batch, length, {width}) or (length, {width})", got=tuple(tensor.shape))
        if tensor.shape[-1] != width:
            raise InputError(name, expected=f"width {width} on the last axis", got=tuple(tensor.shape))
        parameter = next(self.parameters(), None)
        if parameter is None:
            return  # quantised away; the projections know what they take
        if tensor.device != parameter.device:
            raise InputError(name, expected=f"a tensor on {parameter.device} like the layer", got=tensor.device)
        cast = autocast_dtype(tensor.device) is not None and {tensor.dtype, parameter.dtype} <= NARROW
        if tensor.dtype != parameter.dtype and not cast:
            raise InputError(
                name, expected=f"{parameter.dtype} like the layer", got=tensor.dtype, remedy="cast one to the other"
            )

    def extra_repr(self) -> str:
        kv = f", num_kv_heads={self.num_kv_heads}" if self.num_kv_heads != self.num_heads else ""
        mask = f", mask={self.mask!r}" if self.mask is not None else ""
        return f"num_heads={self.num_heads}{kv}, head_dim={self.head_dim}, value_dim={self.value_dim}{mask}"
