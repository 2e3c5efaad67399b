"""Multi-head latent attention: keys and values of all heads are read from one narrow latent, which is all that is kept.

x (batch, length, embed)
    | q_proj, or q_down, q_norm, q_up         | kv_down
(batch, heads, queries, head_dim + rotary_dim)  (batch, 1, keys, kv_rank + rotary_dim)
    | rotary, on the last rotary_dim            | kv_norm, on the latent; rotary, on the key that all heads share
    |                                           +--- cache: (batch, 1, length, rotary_dim + kv_rank)
    |
    |  expanded: kv_up makes keys and values of every head from the latents, and each head attends to its own
    |  absorbed: kv_up is multiplied into queries and outputs, and all heads attend to the latents themselves
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

from headwise.attention.attend import attend
from headwise.attention.backends.blockwise.backend import Blockwise
from headwise.attention.caches.base import Cache
from headwise.attention.masks.base import Mask
from headwise.attention.prepare import prepare_qkv
from headwise.attention.rotary import Rotary
from headwise.checks import finite_number, probability, whole_number
from headwise.errors import InputError
from headwise.nn.base import AttentionLayer, needs_full_capacity
from headwise.nn.options import Scores
from headwise.nn.projections import apply_norm, is_plain_linear, reset_linear
from headwise.shapes import Bool, Float, Int

INTERLEAVED = Rotary(interleaved=True)
"""Pairs of neighbouring features, as DeepSeek turns them."""


class LatentAttention(AttentionLayer):
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1); self-attention.

    Weights lie as in DeepSeek's models: queries as `[head_dim | rotary_dim]` for each head, `kv_down` as
    `[kv_rank | rotary_dim]`, `kv_up` as `[head_dim | value_dim]` for each head. `q_up` and `kv_up` have no bias.

    Both forms take what was put in the place of `kv_up`, such as a LoRA adapter, as long as it is linear.

    Args:
        embed_dim: width of the input.
        num_heads: heads.
        kv_rank: width of the latent that keys and values are made from.
        q_rank: width of the latent that queries are made from; None projects them from x.
        head_dim: width of a head's queries and keys without position.
        rotary_dim: width of the part with position; one key of this width serves all heads.
        value_dim: width of a head's values; default `head_dim`.
        out_dim: width of the output; default `embed_dim`.
        bias: whether the projections that x goes into add a bias.
        out_bias: whether the output projection does; default `bias`.
        rotary: turns the part with position; None leaves it as it is.
        scores: see `Scores`; the scale is `(head_dim + rotary_dim) ** -0.5` unless given.
        norm_eps: added under the root of the norms of the latents.
        mask: a `Mask` that always holds; a mask given to `forward` is added to it with `&`.
        dropout: probability of leaving out an attention weight, in training only.
        backend: see `attend`.

    Raises:
        InputError: sizes that are not positive, options of another kind.
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
        backend: str | Blockwise | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.embed_dim = whole_number("embed_dim", embed_dim, least=1)
        self.num_heads = whole_number("num_heads", num_heads, least=1)
        self.kv_rank = whole_number("kv_rank", kv_rank, least=1)
        self.q_rank = None if q_rank is None else whole_number("q_rank", q_rank, least=1)
        self.head_dim = whole_number("head_dim", head_dim, least=1)
        self.rotary_dim = whole_number("rotary_dim", rotary_dim, least=1)
        self.value_dim = self.head_dim if value_dim is None else whole_number("value_dim", value_dim, least=1)
        self.out_dim = self.embed_dim if out_dim is None else whole_number("out_dim", out_dim, least=1)
        self.rotary = rotary
        self.position_bias = None
        self.scores = scores
        self.mask = mask
        self.dropout = probability("dropout", dropout)
        self.backend = backend
        self._check_kinds()
        self._check_rotary()

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
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
        out_bias = bias if out_bias is None else out_bias
        self.out_proj = nn.Linear(self.num_heads * self.value_dim, self.out_dim, bias=out_bias, **factory)
        self._register_scores(num_heads, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights of projections uniform after Glorot and Bengio 2010, biases zero, norms and options as if absent."""
        for name, module in self.named_children():
            if isinstance(module, nn.Linear):
                widths = (self.kv_rank, self.rotary_dim) if name == "kv_down" else (module.out_features,)
                reset_linear(module, widths)
            elif isinstance(module, nn.RMSNorm):
                module.reset_parameters()
        self._reset_scores()

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
        """Attend from `x` to itself, and to what the cache has seen.

        Args:
            x: `(batch, queries, embed_dim)`, or `(queries, embed_dim)` for one sequence.
            mask: see `attend`; it joins the layer's own.
            bias: see `attend`.
            gate: multiplies each head's output before the output projection: `(heads,)`, `(batch, heads)` or
                `(batch, heads, queries)`.
            positions: where the tokens stand, `(queries,)` or `(batch, queries)`, for the rotation; masks keep to
                the order of the tokens.
            cache: what the layer has seen before x; x is added to it. It keeps latents, not keys and values.
            lengths: `(batch,)`, how many tokens of each sequence are real, the first ones; with a `StaticCache`.
            absorbed: True attends to the latents, with nothing per head made of them (section 2.1.2); False makes
                each head's keys and values first. The results differ by rounding. None takes the one of fewer
                multiplications: as a rule True for a few tokens after many, and False for many at once.
            return_weights: also return every head's weights, before dropout.

        Returns:
            `(batch, queries, out_dim)`; with `return_weights`, that and `(batch, heads, queries, keys)`. Without
            the batch axis where `x` came without.

        Raises:
            InputError: inputs that do not fit the layer or each other; `absorbed=True` where a `kv_up` put in this
                one's place has a bias.
        """
        self._check_input("x", x, self.embed_dim)
        batched = x.ndim == 3
        x = x if batched else x.unsqueeze(0)
        positions = self._positions(x, positions, cache, lengths)
        rotary = self.rotary and replace(self.rotary, width=self.rotary.width or self.rotary_dim)
        mask, bias = self._mask_and_bias(mask, bias, cache)
        full_capacity = needs_full_capacity(cache, mask, bias, return_weights=return_weights)
        where: dict[str, Any] = {"positions": positions, "cache": cache, "lengths": lengths}
        inputs = prepare_qkv(
            self._queries(x), self._latents(x), None, rotary=rotary, full_capacity=full_capacity, **where
        )
        options = {"mask": mask, "bias": bias, "gate": gate, "return_weights": return_weights, **inputs.mask_positions}
        options |= self._score_options(self.head_dim + self.rotary_dim)
        if self._absorbed(absorbed, queries=inputs.q.shape[2], keys=inputs.k.shape[2]):
            heads, *weights = self._attend_absorbed(inputs.q, inputs.k, **options)
        else:
            heads, *weights = self._attend_expanded(inputs.q, inputs.k, **options)
        if cache is not None and inputs.cache_update is not None:
            cache.commit(inputs.cache_update)

        y = self.out_proj(heads.transpose(1, 2).flatten(2))  # (batch, queries, out_dim)
        results = [result if batched else result.squeeze(0) for result in (y, *weights)]
        return tuple(results) if return_weights else results[0]

    def _queries(self, x: Float[Tensor, "batch queries embed"]) -> Float[Tensor, "batch heads queries width"]:
        """Each head's query, the part with position first, where the rotation is."""
        q = self.q_proj(x) if self.q_rank is None else self.q_up(apply_norm(self.q_norm, self.q_down(x)))
        content, turned = torch.split(self._split(q, self.num_heads), [self.head_dim, self.rotary_dim], dim=-1)
        return torch.cat((turned, content), dim=-1)

    def _latents(self, x: Float[Tensor, "batch new embed"]) -> Float[Tensor, "batch 1 new width"]:
        """The shared key, and after it the latent: all that is to be kept of x."""
        latent, turned = torch.split(self.kv_down(x), [self.kv_rank, self.rotary_dim], dim=-1)
        return torch.cat((turned, apply_norm(self.kv_norm, latent).to(turned.dtype)), dim=-1).unsqueeze(1)

    # -- the two forms ----------------------------------------------------------------------------------------

    def _attend_expanded(
        self, q: Float[Tensor, "batch heads queries width"], kept: Float[Tensor, "batch 1 keys kept"], **options: Any
    ) -> tuple[Tensor, ...]:
        """Each head attends to keys and values of its own (equations 9 to 11 and 16 to 19)."""
        turned, latent = torch.split(kept, [self.rotary_dim, self.kv_rank], dim=-1)
        expanded = self._split(self.kv_up(latent.squeeze(1)), self.num_heads)
        content, v = torch.split(expanded, [self.head_dim, self.value_dim], dim=-1)
        k = torch.cat((turned.to(content.dtype).expand(-1, self.num_heads, -1, -1), content), dim=-1)
        attended = attend(q, k, v, **options)
        return attended if isinstance(attended, tuple) else (attended,)

    def _attend_absorbed(
        self, q: Float[Tensor, "batch heads queries width"], kept: Float[Tensor, "batch 1 keys kept"], **options: Any
    ) -> tuple[Tensor, ...]:
        """All heads attend to the latents: q . (K c) = (q K) . c, and sum_j A_j (V c_j) = V (sum_j A_j c_j)."""
        turned, content = torch.split(q, [self.rotary_dim, self.head_dim], dim=-1)
        keys_up, values_up = torch.split(self._up_matrix(kept), [self.head_dim, self.value_dim], dim=1)
        in_latents = torch.cat((turned, (content @ keys_up).to(turned.dtype)), dim=-1)
        attended = attend(in_latents, kept, kept[..., self.rotary_dim :], **options)
        heads, *weights = attended if isinstance(attended, tuple) else (attended,)
        return heads @ values_up.mT, *weights

    def _up_matrix(self, like: Tensor) -> Float[Tensor, "heads head_dim_value_dim kv_rank"]:
        """The matrix of `kv_up`. What is not plain, adapted or parametrised say, is asked what it does to a basis."""
        matrix: Tensor
        if is_plain_linear(self.kv_up):
            matrix = self.kv_up.weight
        else:
            matrix = self.kv_up(torch.eye(self.kv_rank, dtype=like.dtype, device=like.device)).mT
        return matrix.reshape(self.num_heads, self.head_dim + self.value_dim, self.kv_rank)

    def _absorbed(self, asked: bool | None, *, queries: int, keys: int) -> bool:
        """Whether to attend to the latents: as asked, or where that takes fewer multiplications."""
        if asked is not None and not isinstance(asked, bool):
            raise InputError("absorbed", expected="True, False or None", got=repr(asked))
        if any(getattr(module, "bias", None) is not None for module in self.kv_up.modules()):
            if asked:
                raise InputError("absorbed", expected="False, since kv_up has a bias", got="True")
            return False
        if asked is not None:
            return asked
        per_token = self.kv_rank * (self.head_dim + self.value_dim)
        expanded = keys * per_token + queries * keys * (self.rotary_dim + self.head_dim + self.value_dim)
        return queries * per_token + queries * keys * (self.rotary_dim + 2 * self.kv_rank) < expanded

    # -- what may be asked for --------------------------------------------------------------------------------

    @property
    def _kept_sizes(self) -> list[tuple[int, int]]:
        """One head: the rotated key, then the latent."""
        return [(1, self.rotary_dim + self.kv_rank)]

    def _check_rotary(self) -> None:
        """The rotation fits the part with position."""
        if self.rotary is None:
            return
        if self.rotary.width is None and self.rotary_dim % 2:
            expected = "an even number, since Rotary turns pairs of features"
            raise InputError("rotary_dim", expected=expected, got=self.rotary_dim)
        if self.rotary.width is not None and self.rotary.width > self.rotary_dim:
            expected = f"at most the rotary_dim, {self.rotary_dim}"
            raise InputError("Rotary(width)", expected=expected, got=self.rotary.width)

    def extra_repr(self) -> str:
        sizes: dict[str, Any] = {"num_heads": self.num_heads, "kv_rank": self.kv_rank}
        if self.q_rank is not None:
            sizes["q_rank"] = self.q_rank
        sizes |= {"head_dim": self.head_dim, "rotary_dim": self.rotary_dim, "value_dim": self.value_dim}
        options = {name: getattr(self, name) for name in ("rotary", "scores", "mask")}
        sizes |= {name: value for name, value in options.items() if value is not None}
        return ", ".join(f"{name}={value!r}" for name, value in sizes.items())
