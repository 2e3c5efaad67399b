"""`Problem`: the arguments of one attention call, checked and in the form that every backend reads."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from headwise.attention.masks.base import Mask
from headwise.attention.masks.factories import dense
from headwise.attention.masks.grid import Coverage, Grid, require_broadcast, with_four_axes
from headwise.attention.masks.kinds import HasPosition
from headwise.attention.tensors import (
    Bias,
    KeyPositions,
    Keys,
    Outputs,
    PerHead,
    PerRow,
    Queries,
    QueryPositions,
    Values,
    Weights,
)
from headwise.checks import finite_number, flag, float_tensor, positions_argument, probability, savable
from headwise.errors import InputError
from headwise.shapes import Float

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of queries, keys and values that attention supports."""


class Answer(NamedTuple):
    """Result of one attention call: the output, the log-sum-exp and the weights. The last two are None unless the
    caller asked for them.
    """

    out: Outputs
    lse: PerRow | None
    weights: Weights | None


class TalkingHeads(NamedTuple):
    """Two matrices of talking-heads attention: `before` mixes the scores of all heads, `after` mixes their weights.
    Mixed head h is the sum over heads g of `matrix[h, g]` times head g.
    """

    before: Float[Tensor, "heads heads"]
    after: Float[Tensor, "heads heads"]


@dataclass(frozen=True)
class Problem:
    """Tensors and options of one attention call, checked and converted to the one form that all backends read. Create
    it with `Problem.checked`.

    Sinks and a tensor that is the scale have the dtype of the scores.

    Attributes:
        mask: keys that each query may attend to; None if the mask hides nothing.
        bias: tensor that is added to the scores, in a dtype that the dtype of the scores can represent; None without.
            Backends convert the parts that they read: a copy of the whole takes memory and time.
        sinks: sink logit of each head; None without.
        talking: matrices that mix heads; None without.
        grid: sizes of the score matrix, and positions of queries and keys.
        gate: factor of the output, which `attend` applies and backends ignore; None without.
    """

    q: Queries
    k: Keys
    v: Values
    mask: Mask | None
    bias: Bias | None
    scale: float | Float[Tensor, "heads 1 1"]
    softcap: float | None
    sinks: Float[Tensor, "heads 1"] | None
    talking: TalkingHeads | None
    grid: Grid
    gate: Float[Tensor, "#batch heads #queries 1"] | None
    dropout: float
    return_lse: bool
    return_weights: bool

    @property
    def score_dtype(self) -> torch.dtype:
        """Dtype in which scores are accumulated: that of q, but float32 at least."""
        return score_dtype(self.q)

    @property
    def scale_is_positive(self) -> bool:
        """True if the scale is one number for all heads, not a tensor, and positive in float32, as kernels read it."""
        return not isinstance(self.scale, Tensor) and self.scale > torch.finfo(torch.float32).tiny

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors of the problem that may require a gradient: q, k, v and, if they are tensors, bias, sinks and
        scale.
        """
        of_problem = (self.q, self.k, self.v, self.bias, self.sinks, self.scale)
        return [each for each in of_problem if isinstance(each, Tensor)]

    @property
    def needs_grad(self) -> bool:
        """True if gradients are enabled and one of the tensors (q, k, v, bias, sinks or scale) requires one."""
        return torch.is_grad_enabled() and any(each.requires_grad for each in self.tensors)

    def without_dropout(self) -> "Problem":
        """Return a copy of the problem without dropout. The copy requests the output alone, without log-sum-exp and
        weights.
        """
        return replace(self, dropout=0.0, return_lse=False, return_weights=False)

    def with_uniform_weights(self) -> "Problem":
        """Return a copy of the problem with equal weights on all visible keys, without gate and dropout. The copy
        requests the output alone, without log-sum-exp and weights.
        """
        bias = self.bias
        if bias is not None:
            bias = torch.zeros_like(bias).masked_fill(bias == -torch.inf, -torch.inf)
        return replace(
            self,
            q=torch.zeros_like(self.q),
            bias=bias,
            scale=1.0,
            softcap=None,
            sinks=None,
            talking=None,
            gate=None,
            dropout=0.0,
            return_lse=False,
            return_weights=False,
        )

    @staticmethod
    def checked(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        bias: Tensor | None = None,
        scale: float | Tensor | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        talking_heads: tuple[Tensor, Tensor] | None = None,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        gate: Tensor | None = None,
        dropout: float = 0.0,
        return_lse: bool = False,
        return_weights: bool = False,
    ) -> "Problem":
        """Check the arguments of `attend`, and return them as a `Problem`, in the one form that backends read, with
        defaults filled in. Raise `InputError` for the first argument that is unusable or does not fit the others.
        """
        _check_tensors(q, k, v)
        mask, bias = mask_and_bias(mask, bias)
        positions = _positions(query_positions, key_positions, q, k)
        grid = Grid(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.device, *positions)
        if mask is not None:
            mask.check(grid)
            # A stored mask of more values than one score matrix would take long to read. While compiling, lengths may
            # be symbols, which `range` does not accept.
            if (
                not torch.compiler.is_compiling()
                and grid.uses_default_positions
                and mask.stored_values <= grid.queries * grid.keys
                and mask.coverage(grid, range(grid.queries), range(grid.keys)) is Coverage.FULL
            ):
                mask = None
        if not grid.uses_default_positions:
            mask = HasPosition() if mask is None else HasPosition() & mask
        if bias is not None:
            require_broadcast("bias", bias, grid)
            if torch.promote_types(bias.dtype, score_dtype(q)) != score_dtype(q):
                bias = bias.to(score_dtype(q))
        if isinstance(scale, Tensor):
            scale = _one_per_head("scale", scale, q)[:, None, None]
        else:
            scale = q.shape[-1] ** -0.5 if scale is None else finite_number("scale", scale)
        return Problem(
            q=q,
            k=k,
            v=v,
            mask=mask,
            bias=bias,
            scale=scale,
            softcap=None if softcap is None else finite_number("softcap", softcap, above=0.0),
            sinks=None if sinks is None else _one_per_head("sinks", sinks, q)[:, None],
            talking=None if talking_heads is None else _talking(talking_heads, q),
            grid=grid,
            gate=None if gate is None else gate_factor(gate, q),
            dropout=probability("dropout", dropout),
            return_lse=flag("return_lse", return_lse),
            return_weights=flag("return_weights", return_weights),
        )


@runtime_checkable
class Backend(Protocol):
    """Interface of an attention backend, such as `fused`, `blockwise` or `reference`. A backend is a module or an
    object that has the attributes of this class.
    """

    @property
    def name(self) -> str:
        """Name of the backend, as passed to `attend(backend=...)`."""

    def why_not(self, problem: Problem) -> str | None:
        """Return the reason that the backend cannot compute a problem (the tensors and options of one attention call),
        in one sentence; None if it can.
        """

    def run(self, problem: Problem) -> Answer:
        """Return the output of an attention problem for which `why_not` returns None, with the log-sum-exp and the
        weights if the problem asks for them.

        The gate is not applied.
        """


def score_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype in which the scores of queries `q` are accumulated: that of q, but float32 at least."""
    return torch.promote_types(q.dtype, torch.float32)


def mask_and_bias(mask: Any, bias: Any) -> tuple[Mask | None, Float[Tensor, "_ _ _ _"] | None]:
    """Return a user's `mask=` as a `Mask` or None, and `bias=` as a tensor of four axes or None. A boolean tensor
    passed as mask becomes a `Mask`, and a float tensor passed as mask becomes the bias.
    """
    if isinstance(mask, Tensor) and mask.is_floating_point():
        if bias is not None:
            raise InputError(
                "mask",
                expected="a boolean tensor or a Mask together with bias=",
                got=f"a second tensor to add, of {mask.dtype}",
                remedy="pass the sum of the two as bias=",
            )
        mask, bias = None, mask
    if isinstance(mask, Tensor):
        mask = dense(mask)
    if mask is not None and not isinstance(mask, Mask):
        raise InputError(
            "mask", expected="a headwise Mask, a boolean or float tensor, or None", got=type(mask).__name__
        )
    if bias is None:
        return mask, None
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        got = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        raise InputError("bias", expected="a float tensor, added to the scores", got=got)
    return mask, with_four_axes("bias", savable(bias))


def _positions(
    of_queries: Any, of_keys: Any, q: Tensor, k: Tensor
) -> tuple[QueryPositions | None, KeyPositions | None]:
    """Check the caller's positions of queries and of keys, and return both as `(batch or 1, length)`. Return None twice
    if none were passed.
    """
    if of_queries is None and of_keys is None:
        return None, None
    if of_queries is None or of_keys is None:
        missing = "query_positions" if of_queries is None else "key_positions"
        raise InputError(missing, expected="positions of queries and of keys, or of neither", got="one of the two")
    return (
        positions_argument("query_positions", of_queries, batch=q.shape[0], length=q.shape[2], device=q.device),
        positions_argument("key_positions", of_keys, batch=q.shape[0], length=k.shape[2], device=q.device),
    )


def _talking(matrices: Any, q: Tensor) -> TalkingHeads:
    """Check the caller's two matrices `(heads, heads)` of talking-heads attention, and return them in the dtype of the
    scores.
    """
    heads = q.shape[1]
    if not isinstance(matrices, tuple | list) or len(matrices) != 2:
        got = type(matrices).__name__
        raise InputError("talking_heads", expected="two matrices, before and after the softmax", got=got)
    before, after = (float_tensor("talking_heads", matrix, like=q) for matrix in matrices)
    for matrix in (before, after):
        if matrix.shape != (heads, heads):
            raise InputError("talking_heads", expected=f"two matrices {(heads, heads)}", got=tuple(matrix.shape))
    return TalkingHeads(before.to(score_dtype(q)), after.to(score_dtype(q)))


def _one_per_head(name: str, values: Any, q: Tensor) -> PerHead:
    """Check that `values`, the argument called `name`, has one number for each query head. Return it in the dtype of
    the scores.
    """
    tensor = float_tensor(name, values, like=q)
    if tensor.shape != q.shape[1:2]:
        got = f"shape {tuple(tensor.shape)}"
        raise InputError(name, expected=f"one number for each of {q.shape[1]} heads", got=got)
    return tensor.to(score_dtype(q))


def gate_factor(gate: Any, q: Tensor) -> Float[Tensor, "#batch heads #queries 1"]:
    """Check the caller's gate, a factor of each head's output, and return it in the dtype of q. Axes of size 1 are
    added, so that it multiplies head outputs `(batch, heads, queries, value_dim)`.
    """
    factor = float_tensor("gate", gate, like=q)
    batch, heads, queries, _ = q.shape
    forms = ((heads,), (batch, heads), (batch, heads, queries))
    if all(factor.shape != form for form in forms):
        raise InputError(
            "gate",
            expected=f"a shape of (heads), (batch, heads) or (batch, heads, queries) = {', '.join(map(str, forms))}",
            got=tuple(factor.shape),
        )
    factor = factor.to(q.dtype)
    factor = factor[None] if factor.ndim == 1 else factor
    return factor[..., None, None] if factor.ndim == 2 else factor[..., None]


def _check_tensors(q: Any, k: Any, v: Any) -> None:
    """Raise `InputError` unless q, k and v are tensors of four axes whose dtypes, devices and sizes fit each other."""
    for name, tensor in {"q": q, "k": k, "v": v}.items():
        if not isinstance(tensor, Tensor) or tensor.is_nested:
            got = "a nested tensor" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InputError(name, expected="a tensor", got=got)
        if tensor.ndim != 4:
            raise InputError(
                name,
                expected="4 dimensions (batch, heads, length, head_dim)",
                got=f"{tensor.ndim} dimensions {tuple(tensor.shape)}",
                remedy=f"use {name}.unsqueeze(0) for a batch of one" if tensor.ndim == 3 else None,
            )
        if tensor.dtype not in DTYPES:
            raise InputError(name, expected="float16, bfloat16, float32 or float64", got=tensor.dtype)
        if tensor.dtype != q.dtype:
            raise InputError(name, expected=f"{q.dtype} like q", got=tensor.dtype)
        if tensor.device != q.device:
            raise InputError(name, expected=f"a tensor on {q.device} like q", got=tensor.device)
        if tensor.shape[0] != q.shape[0]:
            raise InputError(name, expected=f"batch {q.shape[0]} like q", got=f"batch {tensor.shape[0]}")
        if tensor.shape[3] < 1:
            raise InputError(name, expected="a width of 1 or more", got="width 0")
    if k.shape[3] != q.shape[3]:
        raise InputError("k", expected=f"head_dim {q.shape[3]} like q", got=f"head_dim {k.shape[3]}")
    if v.shape[1:3] != k.shape[1:3]:
        raise InputError("v", expected=f"(kv_heads, length) = {tuple(k.shape[1:3])} like k", got=tuple(v.shape[1:3]))
    heads, kv_heads = q.shape[1], k.shape[1]
    if kv_heads < 1 or heads % kv_heads:
        raise InputError("k", expected=f"a number of kv_heads that divides the {heads} heads of q", got=kv_heads)
