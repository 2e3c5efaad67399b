"""Options of one call of an attention layer, after they were checked."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from headwise.attention.caches.base import Cache
from headwise.attention.caches.static import StaticCache
from headwise.attention.masks.base import Mask
from headwise.attention.packed import Offsets
from headwise.shapes import Float, Int


class LayerCall(NamedTuple):
    """Checked options of one call of an attention layer: mask, bias, gate, positions, cache and the like, but not its
    input tensors.

    Attributes:
        mask: keys that each query may attend to, according to the layer, the cache and the caller together.
        bias: tensor added to the scores; the position bias of the layer is added later.
        gate: factor of each head's output, as the caller passed it; `attend` checks it.
        positions: positions of the tokens; None if the tokens stand in order.
        cache: keys and values of earlier tokens; None without a cache.
        lengths: number of tokens of each sequence that enter the cache; None if all do.
        offsets: start of each packed sequence among the queries and among the keys; None if each row of the batch is
            one sequence.
        return_weights: True if the caller wants the attention weights.
    """

    mask: Mask | None
    bias: Float[Tensor, "_ _ _ _"] | None
    gate: Tensor | None
    positions: Int[Tensor, "#batch queries"] | None
    cache: Cache | None
    lengths: Int[Tensor, " batch"] | Sequence[int] | None
    offsets: Offsets | None
    return_weights: bool

    @property
    def needs_full_capacity(self) -> bool:
        """True if attention must run over all slots (places for tokens) of the call's cache, not only over the stored
        tokens. That is so if there is a bias, if weights are returned, or if the mask prescribes a number of keys, as a
        mask tensor does. It is also so if the number of stored tokens is on a GPU, or the code is being compiled or
        transformed by `torch.func`. Always True without a `StaticCache`, since no other cache has empty slots.
        """
        if not isinstance(self.cache, StaticCache) or not self.cache.can_omit_empty_slots:
            return True
        mask_has_keys = self.mask is not None and self.mask.natural_grid().keys > 0
        return self.return_weights or self.bias is not None or mask_has_keys
