"""Several attention layers in one module, distinguished by the weights that compute their queries."""

from collections import defaultdict
from collections.abc import Hashable

from headwise.intercept.origin import CallOrigins


class SiteParts:
    """Attention layers that one module computes itself, without modules of their own, in the order of their first
    calls. Calls whose queries come from the same weights are of the same layer.
    """

    def __init__(self) -> None:
        self._weights: dict[bool, list[frozenset[Hashable]]] = defaultdict(list)
        self._of_self_attention: set[frozenset[Hashable]] = set()

    def was_self_attention(self, origins: CallOrigins) -> bool:
        """Return True if the weights that compute the keys of a call have computed the keys of self-attention in an
        earlier call.
        """
        return origins.k is not None and origins.k.maps in self._of_self_attention

    def add_self_attention(self, origins: CallOrigins) -> None:
        """Record a call of self-attention."""
        if origins.k is not None and origins.k.maps:
            self._of_self_attention.add(origins.k.maps)

    def index(self, cross: bool, origins: CallOrigins | None) -> int:
        """Return the number of the layer of a call, among those of the same kind. Calls whose queries and keys are not
        projected by weights are of the first layer.

        Args:
            cross: True for cross-attention.
            origins: sources of the call's queries, keys and values.
        """
        weights: frozenset[Hashable] = frozenset()
        if origins is not None:
            weights = origins.q.maps or (frozenset() if origins.k is None else origins.k.maps)
        if not weights:
            return 0
        layers = self._weights[cross]
        for index, others in enumerate(layers):
            if weights & others:
                layers[index] = weights | others
                return index
        layers.append(weights)
        return len(layers) - 1
