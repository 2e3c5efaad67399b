"""Multi-head latent attention: keys and values of all heads are computed from one narrow latent per token.

x (batch, length, embed)
    | q_proj, or q_down, q_norm, q_up         | kv_down
(batch, heads, queries, head_dim + rotary_dim)  (batch, 1, keys, kv_rank + rotary_dim)
    | rotary, on the last rotary_dim            | kv_norm on the latent; rotary on the key that all heads share
    |                                           +--- cache: (batch, 1, length, rotary_dim + kv_rank)
    |
    |  expanded: kv_up computes keys and values of each head from the latents, and attention runs over those
    |  absorbed: kv_up is multiplied into queries and outputs, and attention runs over the latents themselves
    |
(batch, heads, queries, value_dim)
    | out_proj
(batch, queries, out)
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.caches import Cache
from headwise.attention.masks.base import Mask
from headwise.attention.prepare import AttentionInputs
from headwise.attention.problem import Backend
from headwise.attention.rotary import Rotary
from headwise.checks import finite_number, flag, float_dtype, probability, size_argument
from headwise.errors import InputError
from headwise.nn import layout
from headwise.nn.base import AttentionLayer, HeadsAndWeights, LayerCall, apply_norm
from headwise.nn.linear_engine import has_hooks, project
from headwise.nn.options import Scores
from headwise.shapes import Bool, Float, Int

INTERLEAVED = Rotary(interleaved=True)
"""Rotation of pairs of neighbouring features, as in DeepSeek's models."""


class LatentAttention(AttentionLayer):
    """Self-attention in which the keys and values of all heads are computed from one small latent vector per token.
    Only this vector and a small rotated key are cached. This is multi-head latent attention (DeepSeek-AI 2024,
    DeepSeek-V2, section 2.1).

    Each token has one latent of width `kv_rank` and one rotated key of width `rotary_dim`, both shared by all heads,
    and a cache holds nothing else. With c_j the latent of token j, head h attends with

        k_j = [W_uk,h c_j, rotated key of j]    v_j = W_uv,h c_j

    Weights have the order of DeepSeek's models: queries `[head_dim | rotary_dim]` per head, `kv_down`
    `[kv_rank | rotary_dim]`, `kv_up` `[head_dim | value_dim]` per head. `q_up` and `kv_up` have no bias. A linear
    module in place of `kv_up`, such as a LoRA adapter, works in both forms of `forward`.

    Example:
        >>> layer = LatentAttention(512, num_heads=8, kv_rank=64, head_dim=32, rotary_dim=16, mask=causal())
        >>> layer(torch.randn(2, 10, 512)).shape
        torch.Size([2, 10, 512])

    Args:
        embed_dim: width of x.
        num_heads: number of heads.
        kv_rank: width of the latent that keys and values are computed from.
        q_rank: width of the latent that queries are computed from; None projects them from x.
        head_dim: width of the part of a head's queries and keys that is not rotated.
        rotary_dim: width of the part that is rotated; all heads share one such key.
        value_dim: width of a head's values. Default `head_dim`.
        out_dim: width of the output. Default `embed_dim`.
        bias: True for projections of x with a bias.
        out_bias: True for an output projection with a bias. Default `bias`.
        rotary: rotation by position; None rotates nothing.
        scores: scale, softcap, sinks, temperature and talking heads, see `Scores`. The default scale is
            `(head_dim + rotary_dim) ** -0.5`.
        norm_eps: added under the root of the norms of the latents.
        mask: `Mask` of every call; a mask passed to `forward` is combined with it by `&`.
        dropout: probability of dropping an attention weight, in training only.
        backend: backend of `attend`; None selects the fastest.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        InputError: sizes that are not positive, options of the wrong type.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kv_rank: int,
        q_rank: int | None = None,
        head_dim: int,
        rotary_dim: int,
        value_dim: int | None = None,
        out_dim: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        rotary: Rotary | None = INTERLEAVED,
        scores: Scores | None = None,
        norm_eps: float = 1e-6,
        mask: Mask | None = None,
        dropout: float = 0.0,
        backend: str | Backend | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.embed_dim = size_argument("embed_dim", embed_dim)
        self.num_heads = size_argument("num_heads", num_heads)
        self.kv_rank = size_argument("kv_rank", kv_rank)
        self.q_rank = None if q_rank is None else size_argument("q_rank", q_rank)
        self.head_dim = size_argument("head_dim", head_dim)
        self.rotary_dim = size_argument("rotary_dim", rotary_dim)
        self.value_dim = self.head_dim if value_dim is None else size_argument("value_dim", value_dim)
        self.out_dim = self.embed_dim if out_dim is None else size_argument("out_dim", out_dim)
        self.rotary = rotary
        self.position_bias = None
        self.scores = scores
        self.mask = mask
        self.dropout = probability("dropout", dropout)
        self.backend = backend
        self._check_option_types()
        if self.rotary is not None:
            self.rotary.check(self.rotary_dim, "rotary_dim")

        factory: dict[str, Any] = {"device": device, "dtype": float_dtype("dtype", dtype)}
        bias = flag("bias", bias)
        eps = finite_number("norm_eps", norm_eps, above=0.0)
        queries = self.num_heads * (self.head_dim + self.rotary_dim)
        if q_rank is None:
            self.q_proj = nn.Linear(embed_dim, queries, bias=bias, **factory)
        else:
            self.q_down = nn.Linear(embed_dim, q_rank, bias=bias, **factory)
            self.q_norm = nn.RMSNorm(q_rank, eps=eps, **factory)
            self.q_up = nn.Linear(q_rank, queries, bias=False, **factory)
        self.kv_down = nn.Linear(embed_dim, kv_rank + rotary_dim, bias=bias, **factory)
        self.kv_norm = nn.RMSNorm(kv_rank, eps=eps, **factory)
        self.kv_up = nn.Linear(kv_rank, self.num_heads * (self.head_dim + self.value_dim), bias=False, **factory)
        out_bias = bias if out_bias is None else flag("out_bias", out_bias)
        self.out_proj = nn.Linear(self.num_heads * self.value_dim, self.out_dim, bias=out_bias, **factory)
        self._register_score_parameters(num_heads, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise weights uniformly by the method of Glorot and Bengio (2010), and biases and sinks with 0. Norm
        weights and temperatures are initialised with 1, and talking-heads matrices with the identity.
        """
        self._reset_all("kv_down", (self.kv_rank, self.rotary_dim))

    # -- from x to the output ---------------------------------------------------------------------------------

    def forward(
        self,
        x: Float[Tensor, "*batch queries embed"],
        *,
        mask: Mask | Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
        bias: Float[Tensor, "..."] | None = None,
        gate: Float[Tensor, "..."] | None = None,
        positions: Int[Tensor, "... queries"] | None = None,
        cache: Cache | None = None,
        lengths: Int[Tensor, " batch"] | Sequence[int] | None = None,
        absorbed: bool | None = None,
        return_weights: bool = False,
    ) -> (
        Float[Tensor, "*batch queries out"]
        | tuple[Float[Tensor, "*batch queries out"], Float[Tensor, "*batch heads queries keys"]]
    ):
        """Compute self-attention of x, and of the cached tokens if there is a cache. Return the output after the output
        projection and, with `return_weights`, the attention weights of each head. `absorbed` selects one of two
        equivalent computations: True attends to the latent vectors themselves, False to keys and values computed from
        them.

        Args:
            x: `(batch, queries, embed_dim)`, or `(queries, embed_dim)` for one sequence.
            mask: keys that each query may attend to, see `attend`; combined with the layer's own mask.
            bias: added to the scores, see `attend`.
            gate: factor of each head's output before the output projection: `(heads,)`, `(batch, heads)` or
                `(batch, heads, queries)`.
            positions: for the rotation only, `(queries,)` or `(batch, queries)`; by default tokens are in order.
            cache: latents and rotated keys of earlier tokens, to which those of x are appended.
            lengths: number of real tokens at the start of each sequence, `(batch,)`; only those enter the
                `StaticCache` that must be passed with them.
            absorbed: True attends to the latents themselves (section 2.1.2), False to keys and values of each head.
                Results differ by rounding. None selects the form with fewer multiplications.
            return_weights: True to return the attention weights too, before dropout.

        Returns:
            Output `(batch, queries, out_dim)`. With `return_weights` a tuple of the output and the weights
            `(batch, heads, queries, keys)`. Without the batch axis if x has none.

        Raises:
            InputError: inputs that do not fit the layer or each other; `absorbed=True` with a `kv_up` that has a bias.
        """
        self._check_input("x", x, self.embed_dim)
        has_batch = x.ndim == 3
        x = x if has_batch else x.unsqueeze(0)
        self._check_cache(cache, lengths)
        positions = self._checked_positions(x, positions, cache)
        mask, bias = self._mask_and_bias(mask, bias, cache)
        call = LayerCall(mask, bias, gate, positions, cache, lengths, None, flag("return_weights", return_weights))

        if self.q_rank is None:
            q = project(self.q_proj, x)
        else:
            q = project(self.q_up, apply_norm(self.q_norm, project(self.q_down, x)))
        content, rotated = torch.split(self._split_heads(q, self.num_heads), [self.head_dim, self.rotary_dim], dim=-1)
        q = torch.cat((rotated, content), dim=-1)  # in the order of `Rotary`
        latent, rotated = torch.split(project(self.kv_down, x), [self.kv_rank, self.rotary_dim], dim=-1)
        latents = torch.cat((rotated, apply_norm(self.kv_norm, latent).to(rotated.dtype)), dim=-1).unsqueeze(1)
        # q (batch, heads, queries, rotary_dim + head_dim), latents (batch, 1, keys, rotary_dim + kv_rank)
        rotary = self.rotary and replace(self.rotary, width=self.rotary.width or self.rotary_dim)
        prepared = self._prepare(q, latents, None, call, rotary)
        # the same, rotated by position; latents begin with the cached tokens
        is_absorbed = self._is_absorbed(absorbed, queries=prepared.q.shape[2], keys=prepared.k.shape[2])
        heads, weights = (self._attend_absorbed if is_absorbed else self._attend_expanded)(prepared, call)
        # heads (batch, heads, queries, value_dim), weights (batch, heads, queries, keys) or None
        y = project(self.out_proj, heads.transpose(1, 2).flatten(2))  # (batch, queries, out_dim)
        self._commit(prepared, call)
        return layout.output_and_weights(y, weights, has_batch=has_batch)

    # -- the two forms ----------------------------------------------------------------------------------------

    def _attend_expanded(self, inputs: AttentionInputs, call: LayerCall) -> HeadsAndWeights:
        """Attend to separate keys and values for each head. The projection `kv_up` computes them from the latent
        vectors (DeepSeek-V2, equations 9 to 11 and 16 to 19). Return the head outputs, and the attention weights, or
        None if the layer call does not request them.
        """
        rotated, latent = torch.split(inputs.k, [self.rotary_dim, self.kv_rank], dim=-1)
        expanded = self._split_heads(project(self.kv_up, latent.squeeze(1)), self.num_heads)
        content, v = torch.split(expanded, [self.head_dim, self.value_dim], dim=-1)
        k = torch.cat((rotated.to(content.dtype).expand(-1, self.num_heads, -1, -1), content), dim=-1)
        parameters = self._score_parameters(self.head_dim + self.rotary_dim)
        return self._call_attend(inputs._replace(k=k, v=v), call, parameters)

    def _attend_absorbed(self, inputs: AttentionInputs, call: LayerCall) -> HeadsAndWeights:
        """Attend to the latent vectors c of the tokens, without computing keys K c and values V c. K and V are the two
        parts of the projection `kv_up`. They multiply queries and outputs instead: q . (K c) = (q K) . c and sum_j A_j
        (V c_j) = V sum_j A_j c_j. Return the head outputs, and the attention weights, or None if the layer call does
        not request them.
        """
        rotated, content = torch.split(inputs.q, [self.rotary_dim, self.head_dim], dim=-1)
        if type(self.kv_up) is nn.Linear and not has_hooks(self.kv_up):
            matrix: Tensor = self.kv_up.weight
        else:  # the matrix of another module is computed from unit vectors
            matrix = self.kv_up(torch.eye(self.kv_rank, dtype=inputs.k.dtype, device=inputs.k.device)).mT
        matrix = matrix.reshape(self.num_heads, self.head_dim + self.value_dim, self.kv_rank)
        keys_up, values_up = torch.split(matrix, [self.head_dim, self.value_dim], dim=1)
        q = torch.cat((rotated, (content @ keys_up).to(rotated.dtype)), dim=-1)
        latent_inputs = inputs._replace(q=q, v=inputs.k[..., self.rotary_dim :])
        parameters = self._score_parameters(self.head_dim + self.rotary_dim)
        latent_outputs, weights = self._call_attend(latent_inputs, call, parameters)
        return latent_outputs @ values_up.mT, weights

    def _is_absorbed(self, absorbed: bool | None, *, queries: int, keys: int) -> bool:
        """Return True to attend to the latent vectors themselves, and False to attend to keys and values computed from
        them. The caller's `absorbed` decides. If it is None, the choice with fewer multiplications is returned. If the
        projection `kv_up` has a bias, return False, or raise `InputError` if `absorbed` is True.
        """
        if absorbed is not None and not isinstance(absorbed, bool):
            raise InputError("absorbed", expected="True, False or None", got=repr(absorbed))
        if any(getattr(module, "bias", None) is not None for module in self.kv_up.modules()):
            if absorbed:
                raise InputError("absorbed", expected="False, since kv_up has a bias", got="True")
            return False
        if absorbed is not None:
            return absorbed
        per_token = self.kv_rank * (self.head_dim + self.value_dim)
        expanded = keys * per_token + queries * keys * (self.rotary_dim + self.head_dim + self.value_dim)
        return queries * per_token + queries * keys * (self.rotary_dim + 2 * self.kv_rank) < expanded

    # -- cache and checks -------------------------------------------------------------------------------------

    @property
    def _cached_sizes(self) -> list[tuple[int, int]]:
        """Number of heads and width of the one tensor that a cache stores for this layer. The tensor contains the
        rotated key and the latent vector of each token. The number of heads is 1, since all heads share it.
        """
        return [(1, self.rotary_dim + self.kv_rank)]

    def extra_repr(self) -> str:
        """Return the sizes and options of the layer as text, for `repr`."""
        sizes = ("num_heads", "kv_rank", "q_rank", "head_dim", "rotary_dim", "value_dim")
        return self._shown(*sizes, "rotary", "scores", "mask")
