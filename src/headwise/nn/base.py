"""Base class of the attention layers: options of a call, parameters of the scores, the call of `attend`, caches and
checks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.attention.attend import attend, backend_named
from headwise.attention.autocast import AUTOCAST_DTYPES, autocast_dtype
from headwise.attention.caches import Cache, StaticCache
from headwise.attention.masks.base import Mask
from headwise.attention.packed import Offsets
from headwise.attention.position_bias import PositionBias
from headwise.attention.prepare import AttentionInputs, prepare_qkv
from headwise.attention.problem import Backend, mask_and_bias
from headwise.attention.rotary import Rotary
from headwise.attention.tensors import Outputs, Queries, QueryPositions, Weights
from headwise.checks import float_dtype, positions_argument
from headwise.errors import InputError
from headwise.nn.linear_engine import reset_linear
from headwise.nn.options import QKNorm, Scores
from headwise.shapes import Float, Int

OPTION_TYPES: dict[str, tuple[type, str]] = {
    "rotary": (Rotary, "a Rotary, such as Rotary(theta=10_000)"),
    "position_bias": (PositionBias, "ALiBi() or a RelativeBias"),
    "scores": (Scores, "a Scores, such as Scores(softcap=30.0)"),
    "qk_norm": (QKNorm, "a QKNorm, such as QKNorm('rms')"),
    "mask": (Mask, "a headwise Mask, such as causal()"),
}
"""Type of each option that a layer may have, and its description in error messages."""

INPUT_PROJECTIONS = ("qkv_proj", "q_proj", "q_down")
"""Names of the projections that x goes into, of which each layer has one."""


PLAIN_SCORES = Scores()
"""Options of the scores of a layer without any."""


HeadsAndWeights = tuple[Outputs, Weights | None]
"""Output of each head before the output projection, and the attention weights or None."""


class LayerCall(NamedTuple):
    """Options of one call of an attention layer, after they have been checked: mask, bias, gate, positions, cache and
    others. The layer's input tensors are not included.

    Attributes:
        mask: keys that each query may attend to, according to the layer, the cache and the caller together.
        bias: tensor added to the scores; the position bias of the layer is added later.
        gate: factor of each head's output, as the caller passed it; `attend` checks it.
        positions: positions of the tokens; None if the tokens stand in order.
        cache: keys and values of earlier tokens; None without a cache.
        lengths: number of tokens of each sequence that enter the cache; None if all do.
        offsets: start of each packed sequence among the queries and among the keys; None if each row of the batch is
            one sequence.
    """

    mask: Mask | None
    bias: Float[Tensor, "_ _ _ _"] | None
    gate: Tensor | None
    positions: QueryPositions | None
    cache: Cache | None
    lengths: Int[Tensor, " batch"] | Sequence[int] | None
    offsets: Offsets | None
    return_weights: bool

    @property
    def needs_full_capacity(self) -> bool:
        """True if attention must run over all slots of a `StaticCache` (a cache of fixed size), not only over those
        with tokens. That is so with a bias, with returned weights, with a mask for a certain number of keys, and if
        Python cannot read the number of stored tokens. Also True for any other cache, and without one.
        """
        if not isinstance(self.cache, StaticCache) or not self.cache.can_omit_empty_slots:
            return True
        mask_has_keys = self.mask is not None and self.mask.natural_grid().keys > 0
        return self.return_weights or self.bias is not None or mask_has_keys


class ScoreParameters(NamedTuple):
    """Arguments of `attend` that change the scores of one layer call: scale, softcap, sink logits and talking-heads
    matrices. A score map is the scores of all queries and keys; a head has one, or two in differential attention. Sink
    logits have one entry per score map, and so does a scale that is a tensor.
    """

    scale: float | Float[Tensor, " maps"]
    softcap: float | None
    sinks: Float[Tensor, " maps"] | None
    talking_heads: tuple[Float[Tensor, "heads heads"], Float[Tensor, "heads heads"]] | None


class AttentionLayer(nn.Module):
    """Base class of the attention layers. It registers the learned parameters that act on attention scores (sinks,
    temperature, talking-heads matrices), calls `attend`, creates and updates caches, and checks options and inputs.

    Attributes:
        rotary: rotation of queries and keys by position.
        position_bias: addition to the scores by distance.
        scores: scale, softcap, sinks, temperature and talking heads.
        mask: mask of every call.
        dropout: probability of dropping an attention weight in training.
        backend: backend of `attend`; None for the fastest.
        sinks: learned logit of each head's attention sink.
        temperature: learned divisor of each head's scores.
        talking_before: learned matrix that mixes the heads' scores before the softmax.
        talking_after: learned matrix that mixes the heads' weights after the softmax.
    """

    rotary: Rotary | None
    position_bias: PositionBias | None
    scores: Scores | None
    mask: Mask | None
    dropout: float
    backend: str | Backend | None

    sinks: nn.Parameter | None
    temperature: nn.Parameter | None
    talking_before: nn.Parameter | None
    talking_after: nn.Parameter | None

    # -- parameters of the scores -----------------------------------------------------------------------------

    def _register_score_parameters(self, maps: int, **factory: Any) -> None:
        """Register the learned parameters that the layer's option `scores` switches on, and None for those that it
        switches off. `maps` is the number of score maps, matrices of attention scores: one or two per head.
        """
        for name, shape in (self.scores or PLAIN_SCORES).parameter_shapes(maps).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, **factory)) if shape else None)

    def _reset_all(self, stacked: str, widths: tuple[int, ...]) -> None:
        """Initialise all parameters of the layer. The projection called `stacked` is a fused one: its weight consists
        of several matrices, one below the other, with `widths` rows. Each of these matrices is initialised by itself.
        """
        for name, module in self.named_children():
            if isinstance(module, nn.Linear):
                reset_linear(module, widths if name == stacked else (module.out_features,))
            elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
                module.reset_parameters()
        for parameter, initialise in (
            (self.sinks, nn.init.zeros_),
            (self.temperature, nn.init.ones_),
            (self.talking_before, nn.init.eye_),
            (self.talking_after, nn.init.eye_),
        ):
            if parameter is not None:
                initialise(parameter)

    def _shown(self, *names: str) -> str:
        """Return the attributes called `names` as text such as "num_heads=8, value_dim=64", for `extra_repr`.
        Attributes that are None or modules are left out, because `repr` shows modules anyway.
        """
        values = {name: getattr(self, name) for name in names}
        shown = {name: value for name, value in values.items() if not isinstance(value, nn.Module | None)}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())

    def _score_parameters(self, head_dim: int) -> ScoreParameters:
        """Return the scale, softcap, sinks and talking-heads matrices for one call of the layer. The scale is `head_dim
        ** -0.5`, or the one that the layer's options state. It is divided by the learned temperature if there is one.
        """
        parameters = self._parameters  # reading None from here takes less time than as an attribute
        if (
            self.scores is None
            and parameters.get("sinks", self) is None
            and parameters.get("temperature", self) is None
            and parameters.get("talking_before", self) is None
        ):
            return ScoreParameters(head_dim**-0.5, None, None, None)
        scores = self.scores or PLAIN_SCORES
        scale: float | Tensor = head_dim**-0.5 if scores.scale is None else scores.scale
        if self.temperature is not None:
            scale = scale / self.temperature
        talking_heads = None
        if self.talking_before is not None and self.talking_after is not None:
            talking_heads = (self.talking_before, self.talking_after)
        return ScoreParameters(scale, scores.softcap, self.sinks, talking_heads)

    # -- steps of a call --------------------------------------------------------------------------------------

    def _split_heads(
        self, projected: Float[Tensor, "batch length width"], heads: int
    ) -> Float[Tensor, "batch {heads} length head_width"]:
        """Return projected queries, keys or values, split into heads: a view `(batch, heads, length, head_width)`."""
        batch, length, width = projected.shape
        return projected.view(batch, length, heads, width // heads).transpose(1, 2)

    def _prepare(
        self,
        q: Queries,
        k: Float[Tensor, "batch kv_heads new key_dim"],
        v: Float[Tensor, "batch value_heads new value_dim"] | None,
        call: LayerCall,
        rotary: Rotary | None,
    ) -> AttentionInputs:
        """Return the queries, keys and values for `attend`: queries and keys rotated by position, and cached keys and
        values placed before the new ones. `v` is None if the values are part of the keys, as in latent attention.
        """
        if rotary is None and call.cache is None and call.positions is None and call.offsets is None:
            return AttentionInputs(q, k, k if v is None else v)
        _, _, _, positions, cache, lengths, offsets, _ = call
        return prepare_qkv(q, k, v, rotary, positions, cache, lengths, call.needs_full_capacity, offsets)

    def _call_attend(self, inputs: AttentionInputs, call: LayerCall, parameters: ScoreParameters) -> HeadsAndWeights:
        """Call `attend`, and return the output of each head. It is multiplied by the gate that the layer call passes,
        if any. Also return the attention weights, or None if the layer call does not request them.
        """
        attended = attend(
            inputs.q,
            inputs.k,
            inputs.v,
            mask=call.mask,
            bias=call.bias,
            scale=parameters.scale,
            softcap=parameters.softcap,
            sinks=parameters.sinks,
            talking_heads=parameters.talking_heads,
            query_positions=inputs.mask_query_positions,
            key_positions=inputs.mask_key_positions,
            gate=call.gate,
            dropout=self.dropout if self.training else 0.0,
            return_weights=call.return_weights,
            backend=self.backend,
        )
        if isinstance(attended, tuple):
            heads, weights = attended
            return heads, weights
        return attended, None

    def _commit(self, inputs: AttentionInputs, call: LayerCall) -> None:
        """Write the keys and values of the new tokens to the cache. This is the last step of a layer call, so that a
        call that fails leaves the cache unchanged.
        """
        if call.cache is not None and inputs.cache_update is not None:
            call.cache.commit(inputs.cache_update)

    # -- cache ------------------------------------------------------------------------------------------------

    @property
    def _cached_sizes(self) -> list[tuple[int, int]]:
        """Number of heads and width of each tensor that a cache stores for this layer, such as those of the keys and of
        the values.
        """
        raise NotImplementedError

    def static_cache(self, batch: int, capacity: int, *, dtype: torch.dtype | None = None) -> StaticCache:
        """Return an empty `StaticCache` (a cache of fixed size) for the tensors that this layer caches: `batch`
        sequences with room for `capacity` tokens each.

        Args:
            batch: number of sequences.
            capacity: number of tokens that each sequence has room for.
            dtype: dtype of the cached tensors; by default that of the layer's parameters. Under autocast, pass the
                dtype of autocast.
        """
        dtype = float_dtype("dtype", dtype)
        like = self._input_parameter()
        if like is None:  # quantised projections hold no parameters, and compute float32 on their device
            device = next((tensor.device for tensor in (*self.parameters(), *self.buffers())), torch.device("cpu"))
            like = torch.empty(0, device=device, dtype=torch.float32)
        return StaticCache(batch, capacity, self._cached_sizes, device=like.device, dtype=dtype or like.dtype)

    # -- checks -----------------------------------------------------------------------------------------------

    def _check_option_types(self) -> None:
        """Raise `InputError` if an option of the layer has the wrong type, or if its backend does not exist."""
        for name, (kind, expected) in OPTION_TYPES.items():
            option = getattr(self, name, None)
            if option is not None and (not isinstance(option, kind) or isinstance(option, Tensor | type)):
                raise InputError(name, expected=expected, got=type(option).__name__)
        if self.backend is not None:
            backend_named(self.backend)

    def _check_input(self, name: str, tensor: Any, width: int) -> None:
        """Raise `InputError` unless an input tensor has 2 or 3 axes, the last of size `width`, and the device and dtype
        of the layer.
        """
        if not isinstance(tensor, Tensor) or tensor.is_nested:
            got = "a nested tensor" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InputError(name, expected="a tensor", got=got)
        if tensor.ndim not in (2, 3):
            raise InputError(name, expected=f"(batch, length, {width}) or (length, {width})", got=tuple(tensor.shape))
        if tensor.shape[-1] != width:
            raise InputError(name, expected=f"width {width} on the last axis", got=tuple(tensor.shape))
        check_like_layer(name, tensor, self)

    def _input_parameter(self) -> Tensor | None:
        """Return a floating-point parameter of the projection that reads x. Inputs must have its device and dtype.
        Return None if the projection has no such parameter, as when it is quantised.
        """
        modules = self._modules
        for name in INPUT_PROJECTIONS:
            if name in modules:
                break
        projection = modules[name]
        assert projection is not None
        if type(projection) is nn.Linear:
            return projection.weight
        return next((parameter for parameter in projection.parameters() if parameter.is_floating_point()), None)

    def _mask_and_bias(self, mask: Any, bias: Any, cache: Cache | None) -> tuple[Mask | None, Tensor | None]:
        """Return the mask and the bias of a layer call. The masks of the caller, of the cache and of the layer are
        combined by `&`. A float tensor that the caller passes as `mask` becomes the bias.
        """
        mask, bias = mask_and_bias(mask, bias)
        for other in (cache and cache.mask, self.mask):
            if other is not None:
                mask = other if mask is None else other & mask
        return mask, bias

    def _check_cache(self, cache: Any, lengths: Any, *, cross: bool = False, packed: bool = False) -> None:
        """Raise `InputError` for a `cache` that is not a `Cache`, and for `lengths` without a cache. Any cache is
        refused in cross-attention (`cross`) and with packed sequences (`packed`).
        """
        if cache is None:
            if lengths is not None:
                remedy = "mask=padding(lengths) hides padding"
                raise InputError("lengths", expected="a StaticCache with them", got="none", remedy=remedy)
            return
        if not isinstance(cache, Cache):
            raise InputError("cache", expected="a headwise Cache, such as DynamicCache()", got=type(cache).__name__)
        if cross or packed:
            got = "a context" if cross else "packed sequences"
            raise InputError("cache", expected="self-attention, one sequence a row", got=got)

    def _checked_positions(
        self, x: Float[Tensor, "batch queries embed"], positions: Any, cache: Cache | None, *, cross: bool = False
    ) -> QueryPositions | None:
        """Return the positions that the caller passed for the tokens of x, with shape `(batch, queries)` or `(1,
        queries)`, or None. Raise `InputError` for positions in cross-attention. With a cache, also raise it if the
        layer's position bias or rotation would need new positions of the cached keys.
        """
        if positions is None:
            return None
        if cross:
            raise InputError("positions", expected="none with a context, which has positions too", got="some")
        if cache is not None and (
            self.position_bias is not None or (self.rotary is not None and self.rotary.depends_on_length)
        ):
            expected = "none with a cache, where cached keys get new positions in every call"
            raise InputError("positions", expected=expected, got="some")
        return positions_argument("positions", positions, batch=x.shape[0], length=x.shape[1], device=x.device)


def check_like_layer(name: str, tensor: Tensor, layer: nn.Module) -> None:
    """Raise `InputError` unless a tensor is on the device of the layer's parameters and has their dtype. Another dtype
    is accepted if autocast converts both dtypes. Nothing is checked for a layer without parameters, such as a quantised
    one.
    """
    parameter = layer._input_parameter() if isinstance(layer, AttentionLayer) else next(layer.parameters(), None)
    if parameter is None:
        return
    if tensor.device != parameter.device:
        raise InputError(name, expected=f"a tensor on {parameter.device} like the layer", got=tensor.device)
    converted = autocast_dtype(tensor.device) is not None and {tensor.dtype, parameter.dtype} <= AUTOCAST_DTYPES
    if tensor.dtype != parameter.dtype and not converted:
        expected = f"{parameter.dtype} like the layer"
        raise InputError(name, expected=expected, got=tensor.dtype, remedy="cast one to the other")


def apply_norm(norm: nn.Module, x: Float[Tensor, "*axes width"]) -> Float[Tensor, "*axes width"]:
    """Return `norm(x)` in the dtype of x. The norm is computed in the dtype of its weight, which has more precision
    than x under autocast.
    """
    weight = next(norm.parameters(), None)
    normalised: Tensor = norm(x if weight is None else x.to(weight.dtype))
    return normalised.to(x.dtype)
