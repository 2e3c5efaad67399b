"""Differential attention: each head subtracts a second attention map from its first, which cancels common noise.

q, k (batch, 2 * heads, length, head_dim)    the first maps of all heads, then the second maps
    | A1 V - lambda A2 V: two calls of `attend` with the same values
(batch, heads, queries, value_dim)
    | RMS norm of each head, times 1 - lambda_init
    | gate and output projection as in every layer
(batch, queries, out)
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headwise.attention.prepare import AttentionInputs
from headwise.attention.problem import gate_factor
from headwise.checks import finite_number, flag, whole_number
from headwise.errors import InputError
from headwise.nn.base import HeadsAndWeights, LayerCall, ScoreParameters, apply_norm
from headwise.nn.multihead import MultiHeadAttention
from headwise.nn.options import Scores
from headwise.shapes import Float


class DifferentialAttention(MultiHeadAttention):
    """Multi-head attention in which each head computes two softmax attention maps. The second map is multiplied by a
    learned number lambda and subtracted from the first (Ye et al. 2024, Differential Transformer, section 2.1).

    Each head computes two softmax maps A1 and A2 of the same keys and values, and its output is

        (1 - lambda_init) * RMSNorm((A1 - lambda A2) V)
        lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init

    with one lambda for the layer. `return_weights` returns A1 - lambda A2, whose entries can be negative. Each map has
    its own dropout. A gate multiplies the output after the norm, because the norm would undo a factor before it.

    Queries hold the first maps of all heads, then the second maps of all heads, and are `2 * num_heads * head_dim`
    wide. Keys, learned sinks and temperatures have the same order. That is also the order of DiffLlama in
    transformers, except for the values: row `(half, kv_head, feature)` of its value projection is row
    `(kv_head, half, feature)` here.

    Example:
        >>> layer = DifferentialAttention(512, num_heads=4, depth=3, mask=causal())
        >>> layer(torch.randn(2, 10, 512)).shape
        torch.Size([2, 10, 512])

    Args:
        embed_dim: width of x.
        num_heads: number of heads. Each has two maps, so a layer with as many parameters as usual has half as many
            heads.
        lambda_init: initial share of the second map, in [0, 1). Default 0.8.
        depth: index of the layer in its model, from 0. It sets `lambda_init = 0.8 - 0.6 exp(-0.3 depth)`.
        norm_eps: added under the root of the norm.
        norm_weight: True if the norm multiplies by a learned weight `(value_dim,)`, shared by all heads.
        **options: options of `MultiHeadAttention`. Here `head_dim` is `embed_dim / num_heads / 2` by default,
            `value_dim` is `2 * head_dim`, and talking heads are refused.

    Attributes:
        lambda_q1: learned vector of the first exponent, `(head_dim,)`; likewise `lambda_k1`.
        lambda_q2: learned vector of the second exponent, `(head_dim,)`; likewise `lambda_k2`.
        head_norm: RMS norm of each head's output.

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
        flag("norm_weight", norm_weight)
        scores = options.get("scores")
        if isinstance(scores, Scores) and scores.talking_heads:
            expected = "no talking heads, since the two maps of a head are computed separately"
            raise InputError("scores", expected=expected, got="talking_heads=True")
        super().__init__(embed_dim, num_heads, **options)
        self.lambda_init = _checked_lambda_init(lambda_init, depth)
        factory: dict[str, Any] = {"device": options.get("device"), "dtype": options.get("dtype")}
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            self.register_parameter(name, nn.Parameter(torch.empty(self.head_dim, **factory)))
        eps = finite_number("norm_eps", norm_eps, above=0.0)
        self.head_norm = nn.RMSNorm(self.value_dim, eps=eps, elementwise_affine=norm_weight, **factory)
        self._reset_lambdas()

    def reset_parameters(self) -> None:
        """Initialise the parameters as `MultiHeadAttention` does. In addition, draw the four learned vectors that
        determine lambda, the factor of the second attention maps. Their entries are from a normal distribution with
        mean 0 and standard deviation 0.1 (Ye et al. 2024).
        """
        super().reset_parameters()
        self._reset_lambdas()

    def _reset_lambdas(self) -> None:
        """Initialise the four learned vectors that determine lambda, the factor of each head's second attention map.
        They are drawn from a normal distribution with standard deviation 0.1 (Ye et al. 2024).
        """
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith("lambda_"):
                nn.init.normal_(parameter, std=0.1)

    def lambda_value(self) -> Float[Tensor, ""]:
        """Return the current value of lambda, the factor of the second of the two softmax maps that each head computes.
        It is one number for all heads of the layer, in float32 or a more precise dtype.
        """
        wide = torch.promote_types(self.lambda_q1.dtype, torch.float32)
        first = (self.lambda_q1.to(wide) * self.lambda_k1.to(wide)).sum().exp()
        second = (self.lambda_q2.to(wide) * self.lambda_k2.to(wide)).sum().exp()
        return first - second + self.lambda_init

    def _attend(self, inputs: AttentionInputs, call: LayerCall) -> HeadsAndWeights:
        """Return the output of each head: attention by the difference A1 - lambda A2 of its two softmax maps,
        normalised, and multiplied by 1 - lambda_init and by the gate. Here lambda_init is the initial value of lambda.
        Also return A1 - lambda A2 as the weights, or None if the layer call does not request them.
        """
        scale, softcap, sinks, _ = self._score_parameters(self.head_dim)
        factor, maps = None, []
        for index in range(2):  # the first maps of all heads, then the second maps
            heads = slice(index * self.num_heads, (index + 1) * self.num_heads)
            kv_heads = slice(index * self.num_kv_heads, (index + 1) * self.num_kv_heads)
            of_map = inputs._replace(q=inputs.q[:, heads], k=inputs.k[:, kv_heads])
            if index == 0:
                call = self._with_position_bias(of_map, call)
                factor = None if call.gate is None else gate_factor(call.gate, of_map.q)
                call = call._replace(gate=None)
            scale_of_map = scale[heads] if isinstance(scale, Tensor) else scale
            parameters = ScoreParameters(scale_of_map, softcap, None if sinks is None else sinks[heads], None)
            maps.append(self._call_attend(of_map, call, parameters))

        (first, first_weights), (second, second_weights) = maps
        lambda_ = self.lambda_value()
        out = first - lambda_.to(first.dtype) * second
        weights = None
        if first_weights is not None and second_weights is not None:
            weights = first_weights - lambda_.to(first_weights.dtype) * second_weights
        out = apply_norm(self.head_norm, out) * (1 - self.lambda_init)
        return out if factor is None else out * factor, weights

    def extra_repr(self) -> str:
        """Return the sizes and options of the layer as text, for `repr`."""
        return f"{super().extra_repr()}, lambda_init={self.lambda_init:g}"


def _checked_lambda_init(lambda_init: float | None, depth: int | None) -> float:
    """Return the initial value of lambda: `lambda_init` if it is passed, 0.8 - 0.6 exp(-0.3 depth) for a layer index
    `depth`, and 0.8 if both are None. Raise `InputError` if both are passed.
    """
    if depth is not None:
        if lambda_init is not None:
            raise InputError("lambda_init", expected="one of lambda_init and depth", got="both")
        return 0.8 - 0.6 * math.exp(-0.3 * whole_number("depth", depth, least=0))
    share = 0.8 if lambda_init is None else finite_number("lambda_init", lambda_init)
    if not 0.0 <= share < 1.0:
        raise InputError("lambda_init", expected="a number of 0 or more and less than 1", got=repr(lambda_init))
    return share
