"""Differential attention: a head's weights are the difference of two maps, so that what both attend to cancels.

q, k (batch, 2 * heads, length, head_dim)    the first maps of all heads, then the second maps
    | A1 V - lambda A2 V: two calls of `attend`, over the same values
(batch, heads, queries, value_dim)
    | RMS norm of each head, times 1 - lambda_init
    | gate, output projection, as in every layer
(batch, queries, out)
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headwise.attention.masks.base import Mask
from headwise.attention.prepare import AttentionInputs
from headwise.attention.problem import gate_factor
from headwise.checks import finite_number, whole_number
from headwise.errors import InputError
from headwise.nn.multihead import MultiHeadAttention
from headwise.nn.options import Scores
from headwise.nn.projections import apply_norm
from headwise.shapes import Float


class DifferentialAttention(MultiHeadAttention):
    """Differential attention (Ye et al. 2024, Differential Transformer, section 2.1).

    A head gives `(1 - lambda_init) * RMSNorm((A1 - lambda A2) V)`, where A1 and A2 are softmaxes of two maps of scores
    and `lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init`, one number for the layer.

    Queries lie as the first maps of all heads, then the second maps of all heads, `2 * num_heads * head_dim` wide in
    all, and so do keys, learned sinks and temperatures. That is the order of DiffLlama in transformers, whose two
    halves of value heads are here the two halves of each value: row `(half, kv_head, feature)` of its value
    projection is row `(kv_head, half, feature)` of this one, and every other weight is the same.

    With dropout, each map leaves out weights of its own. A gate multiplies after the norm, which would undo it.

    Args:
        embed_dim: width of the input.
        num_heads: heads; each has two maps, so a model of as many parameters has half as many as usual.
        lambda_init: share of the second map at first, 0 or more and less than 1; default 0.8.
        depth: in place of `lambda_init`, the layer's place in its model, counted from 0:
            `lambda_init = 0.8 - 0.6 exp(-0.3 depth)`.
        norm_eps: added under the root of the norm.
        norm_weight: whether the norm multiplies by a learned weight, `(value_dim,)`, one for all heads.
        **options: those of `MultiHeadAttention`. Here `head_dim` is `embed_dim / num_heads / 2` unless given, and
            `value_dim` is `2 * head_dim`. Talking heads are not to be had.

    Raises:
        InputError: as `MultiHeadAttention`; a lambda_init outside its range, both it and a depth, talking heads.
    """

    maps: ClassVar[int] = 2

    lambda_q1: nn.Parameter
    lambda_k1: nn.Parameter
    lambda_q2: nn.Parameter
    lambda_k2: nn.Parameter

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        lambda_init: float | None = None,
        depth: int | None = None,
        norm_eps: float = 1e-5,
        norm_weight: bool = False,
        **options: Any,
    ):
        scores = options.get("scores")
        if isinstance(scores, Scores) and scores.talking_heads:
            expected = "no talking heads, since the two maps of a head are attended to one by one"
            raise InputError("scores", expected=expected, got="talking_heads=True")
        super().__init__(embed_dim, num_heads, **options)
        self.lambda_init = _lambda_init(lambda_init, depth)
        factory: dict[str, Any] = {"device": options.get("device"), "dtype": options.get("dtype")}
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            self.register_parameter(name, nn.Parameter(torch.empty(self.head_dim, **factory)))
        eps = finite_number("norm_eps", norm_eps, above=0.0)
        self.head_norm = nn.RMSNorm(self.value_dim, eps=eps, elementwise_affine=norm_weight, **factory)
        self._reset_lambdas()

    def reset_parameters(self) -> None:
        """As in `MultiHeadAttention`; what makes up lambda normal, with standard deviation 0.1 (Ye et al. 2024)."""
        super().reset_parameters()
        self._reset_lambdas()

    def _reset_lambdas(self) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith("lambda_"):
                nn.init.normal_(parameter, std=0.1)

    def second_share(self) -> Float[Tensor, ""]:
        """lambda, what the second map is multiplied by; in float32 at least."""
        wide = torch.promote_types(self.lambda_q1.dtype, torch.float32)
        first = (self.lambda_q1.to(wide) * self.lambda_k1.to(wide)).sum().exp()
        second = (self.lambda_q2.to(wide) * self.lambda_k2.to(wide)).sum().exp()
        return first - second + self.lambda_init

    def _attend(
        self,
        inputs: AttentionInputs,
        *,
        mask: Mask | None,
        bias: Tensor | None,
        gate: Tensor | None,
        return_weights: bool,
    ) -> tuple[Tensor, ...]:
        """Each head's output, and the difference of its two maps, which has both signs, where weights are asked for."""
        maps = self._maps(inputs)
        bias = self._with_position_bias(maps[0][1], bias)
        factor = None if gate is None else gate_factor(gate, maps[0][1].q)
        first, second = (
            self._attend_map(heads, one, mask=mask, bias=bias, gate=None, return_weights=return_weights)
            for heads, one in maps
        )
        share = self.second_share()
        heads, *weights = (one - share.to(one.dtype) * other for one, other in zip(first, second, strict=True))
        heads = apply_norm(self.head_norm, heads) * (1 - self.lambda_init)
        return (heads if factor is None else heads * factor, *weights)

    def _maps(self, inputs: AttentionInputs) -> list[tuple[slice, AttentionInputs]]:
        """Queries and keys of each map, over the same values, with the heads they are."""
        queries = [slice(start, start + self.num_heads) for start in (0, self.num_heads)]
        keys = [slice(start, start + self.num_kv_heads) for start in (0, self.num_kv_heads)]
        return [
            (heads, inputs._replace(q=inputs.q[:, heads], k=inputs.k[:, kv_heads]))
            for heads, kv_heads in zip(queries, keys, strict=True)
        ]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, lambda_init={self.lambda_init:g}"


def _lambda_init(lambda_init: float | None, depth: int | None) -> float:
    """The share given, or the one of the depth."""
    if depth is not None:
        if lambda_init is not None:
            raise InputError("lambda_init", expected="one of lambda_init and depth", got="both")
        return 0.8 - 0.6 * math.exp(-0.3 * whole_number("depth", depth, least=0))
    share = 0.8 if lambda_init is None else finite_number("lambda_init", lambda_init)
    if not 0.0 <= share < 1.0:
        raise InputError("lambda_init", expected="a number of 0 or more and less than 1", got=repr(lambda_init))
    return share
