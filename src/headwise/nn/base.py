"""What layers of attention share: parameters of the scores, heads cut from a width, checks of what a call is given."""

from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.attend import backend_named
from headwise.attention.autocast import AUTOCAST_DTYPES, autocast_dtype
from headwise.attention.backends.blockwise.backend import Blockwise
from headwise.attention.caches.base import Cache
from headwise.attention.caches.static import StaticCache
from headwise.attention.masks.base import Mask
from headwise.attention.position_bias import PositionBias
from headwise.attention.problem import mask_and_bias
from headwise.attention.rotary import Rotary
from headwise.checks import positions_argument
from headwise.errors import InputError
from headwise.nn.options import QKNorm, Scores
from headwise.shapes import Float, Int

KINDS: dict[str, tuple[type, str]] = {
    "rotary": (Rotary, "a Rotary, such as Rotary(theta=10_000)"),
    "position_bias": (PositionBias, "ALiBi() or a RelativeBias"),
    "scores": (Scores, "a Scores, such as Scores(softcap=30.0)"),
    "qk_norm": (QKNorm, "a QKNorm, such as QKNorm('rms')"),
    "mask": (Mask, "a headwise Mask, such as causal()"),
}
"""What an option must be, where a layer has it."""


class AttentionLayer(nn.Module):
    """A layer that attends; its subclasses say from what."""

    rotary: Rotary | None
    position_bias: PositionBias | None
    scores: Scores | None
    mask: Mask | None
    dropout: float
    backend: str | Blockwise | None

    sinks: nn.Parameter | None
    temperature: nn.Parameter | None
    talking_before: nn.Parameter | None
    talking_after: nn.Parameter | None

    # -- scores -----------------------------------------------------------------------------------------------

    def _register_scores(self, heads: int, **factory: Any) -> None:
        """The learned parameters of `scores`, None where there is none."""
        for name, shape in (self.scores or Scores()).learned(heads).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, **factory)) if shape else None)

    def _reset_scores(self) -> None:
        """The parameters of `scores` as if they were not there."""
        for parameter, start in (
            (self.sinks, nn.init.zeros_),
            (self.temperature, nn.init.ones_),
            (self.talking_before, nn.init.eye_),
            (self.talking_after, nn.init.eye_),
        ):
            if parameter is not None:
                start(parameter)

    def _score_options(self, head_dim: int, heads: slice = slice(None)) -> dict[str, Any]:
        """What `attend` must be told of the scores of `heads`, some of those that the parameters count."""
        scores = self.scores or Scores()
        scale = head_dim**-0.5 if scores.scale is None else scores.scale
        talking = None
        if self.talking_before is not None and self.talking_after is not None:
            talking = (self.talking_before[heads, heads], self.talking_after[heads, heads])
        return {
            "scale": scale if self.temperature is None else scale / self.temperature[heads],
            "softcap": scores.softcap,
            "sinks": None if self.sinks is None else self.sinks[heads],
            "talking_heads": talking,
            "dropout": self.dropout if self.training else 0.0,
            "backend": self.backend,
        }

    # -- shapes -----------------------------------------------------------------------------------------------

    def _split(
        self, projected: Float[Tensor, "batch length width"], heads: int
    ) -> Float[Tensor, "batch {heads} length head_width"]:
        """The width cut into heads, and the heads brought before the length; a view, no copy."""
        return projected.view(*projected.shape[:-1], heads, projected.shape[-1] // heads).transpose(1, 2)

    def _mask_and_bias(self, mask: Any, bias: Any, cache: Cache | None) -> tuple[Mask | None, Tensor | None]:
        """What the call says of the scores, with the masks of layer and cache."""
        mask, bias = mask_and_bias(mask, bias)
        for more in (cache and cache.mask, self.mask):
            if more is not None:
                mask = more if mask is None else more & mask
        return mask, bias

    def _input_parameter(self) -> Tensor | None:
        """A parameter of the projection that x goes into, which inputs are to be like; None where none is of floats."""
        first = next(module for name, module in self.named_children() if name in ("qkv_proj", "q_proj", "q_down"))
        return next((each for each in first.parameters() if each.is_floating_point()), None)

    # -- cache ------------------------------------------------------------------------------------------------

    @property
    def _kept_sizes(self) -> list[tuple[int, int]]:
        """Heads and width of each tensor that a cache keeps."""
        raise NotImplementedError

    def static_cache(self, batch: int, capacity: int, *, dtype: torch.dtype | None = None) -> StaticCache:
        """An empty cache that fits this layer, with room for `capacity` tokens of each sequence.

        Its dtype is that of the parameters unless given; under autocast what is kept has autocast's.
        """
        like = self._input_parameter()
        like = torch.empty(0, device=next(self.parameters()).device) if like is None else like
        return StaticCache(batch, capacity, self._kept_sizes, device=like.device, dtype=dtype or like.dtype)

    # -- checks -----------------------------------------------------------------------------------------------

    def _check_kinds(self) -> None:
        """Kinds of the options, and that the backend exists."""
        for name, (kind, expected) in KINDS.items():
            option = getattr(self, name, None)
            if option is not None and (not isinstance(option, kind) or isinstance(option, Tensor | type)):
                raise InputError(name, expected=expected, got=type(option).__name__)
        if self.backend is not None:
            backend_named(self.backend)

    def _check_input(self, name: str, tensor: Any, width: int) -> None:
        """Rank, width, device and dtype of an input."""
        if not isinstance(tensor, Tensor) or tensor.is_nested:
            got = "a nested tensor" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InputError(name, expected="a tensor", got=got)
        if tensor.ndim not in (2, 3):
            raise InputError(name, expected=f"(batch, length, {width}) or (length, {width})", got=tuple(tensor.shape))
        if tensor.shape[-1] != width:
            raise InputError(name, expected=f"width {width} on the last axis", got=tuple(tensor.shape))
        check_like_layer(name, tensor, self)

    def _positions(
        self, x: Tensor, positions: Any, cache: Any, lengths: Any, *, cross: bool = False, packed: bool = False
    ) -> Int[Tensor, "#batch queries"] | None:
        """The positions with a batch axis, once what is said of places fits together."""
        if cache is not None and not isinstance(cache, Cache):
            raise InputError("cache", expected="a headwise Cache, such as DynamicCache()", got=type(cache).__name__)
        if cache is not None and (cross or packed):
            got = "a context" if cross else "packed sequences"
            raise InputError("cache", expected="self-attention, one sequence a row", got=got)
        if lengths is not None and cache is None:
            remedy = "mask=padding(lengths) leaves padding out"
            raise InputError("lengths", expected="a StaticCache beside them", got="none", remedy=remedy)
        if positions is None:
            return None
        if cross:
            raise InputError("positions", expected="none beside a context, which has positions too", got="some")
        if cache is not None and (
            self.position_bias is not None or (self.rotary is not None and self.rotary.depends_on_length)
        ):
            expected = "none beside a cache, where cached keys are placed anew in every call"
            raise InputError("positions", expected=expected, got="some")
        return positions_argument("positions", positions, batch=x.shape[0], length=x.shape[1], device=x.device)


def check_like_layer(name: str, tensor: Tensor, layer: nn.Module) -> None:
    """Raise `InputError` unless the device and dtype are those of the layer's parameters, or autocast makes them so."""
    parameter = layer._input_parameter() if isinstance(layer, AttentionLayer) else next(layer.parameters(), None)
    if parameter is None:
        return  # quantised away; the projections know what they take
    if tensor.device != parameter.device:
        raise InputError(name, expected=f"a tensor on {parameter.device} like the layer", got=tensor.device)
    cast = autocast_dtype(tensor.device) is not None and {tensor.dtype, parameter.dtype} <= AUTOCAST_DTYPES
    if tensor.dtype != parameter.dtype and not cast:
        expected = f"{parameter.dtype} like the layer"
        raise InputError(name, expected=expected, got=tensor.dtype, remedy="cast one to the other")


def needs_full_capacity(cache: Cache | None, mask: Mask | None, bias: Tensor | None, *, return_weights: bool) -> bool:
    """Whether a call has or wants a tensor with an axis of keys, which is to be as long as its cache has room.

    It is asked only where a cache could show less.
    """
    if not isinstance(cache, StaticCache) or not cache.can_omit_empty_slots:
        return True
    return return_weights or bias is not None or (mask is not None and mask.natural_grid().keys > 0)
