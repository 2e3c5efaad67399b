"""Several attention layers in one module, distinguished by the weights that compute their queries."""

from collections import defaultdict
from collections.abc import Hashable

from headwise.intercept.trace.lineage import CallOrigins

OTHER_AXIS: frozenset[Hashable] = frozenset({"other axis"})
"""Names for queries that no weights project, in a softmax over the other axis of the scores of layer 0."""


class SiteParts:
    """List of the attention layers that one module computes itself, without a submodule for each. Two calls belong to
    the same layer if their queries are projected by the same weights. The order is that of the first calls.
    """

    def __init__(self) -> None:
        self._weights: dict[bool, list[frozenset[Hashable]]] = defaultdict(list)
        self._of_self_attention: set[frozenset[Hashable]] = set()

    def was_self_attention(self, origins: CallOrigins) -> bool:
        """Return True if, in an earlier call of self-attention, the keys were projected by the same weights as in this
        call. `origins` states the weights.
        """
        return origins.k is not None and origins.k.maps in self._of_self_attention

    def add_self_attention(self, key_maps: frozenset[Hashable]) -> None:
        """Record that the weights with these names, which project the keys of a call, were used in self-attention."""
        if key_maps:
            self._of_self_attention.add(key_maps)

    def index(self, cross: bool, origins: CallOrigins | None) -> int:
        """Return the number of the attention layer that a call belongs to. Layers of the same kind (self or cross) in
        the module are numbered from 0. A call whose queries and keys are not projected by weights belongs to layer 0.

        Args:
            cross: True for cross-attention.
            origins: sources of the call's queries, keys and values.
        """
        return self.index_of(cross, names_of_layer(origins))

    def index_of(self, cross: bool, weights: frozenset[Hashable]) -> int:
        """Return the number of the attention layer whose queries are projected by the weights with these names."""
        if not weights:
            return 0
        layers = self._weights[cross]
        if weights == OTHER_AXIS and not layers:
            layers.append(frozenset())
        for index, others in enumerate(layers):
            if weights & others:
                layers[index] = weights | others
                return index
        layers.append(weights)
        return len(layers) - 1


def names_of_layer(origins: CallOrigins | None) -> frozenset[Hashable]:
    """Return the names of the weights in which layers of one module differ: those that compute the queries of a call,
    or else its keys.
    """
    if origins is None:
        return frozenset()
    return origins.q.maps or (frozenset() if origins.k is None else origins.k.maps)
