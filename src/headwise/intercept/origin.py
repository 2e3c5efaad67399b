"""Sources of one tensor of a running model: the tensors that it depends on.

A source is a tensor that comes from outside, such as an input of the model, or the result of a mixing step: a product
of two activations, as in attention, a concatenation of different sources, or a selection of some of the tokens. Sets of
sources are the bits of whole numbers.
"""

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from headwise.intercept.compared_tokens import ComparedTokens


class Origin(NamedTuple):
    """Sources of one tensor: the tensors on which it depends. Sources of the input of the tensor's last linear map,
    such as the query projection, are stored apart from sources that were added after this map.

    Attributes:
        projected: sources of the input of the last linear map; 0 if there was none.
        joined: sources that were added, multiplied or concatenated after it, such as rotary tables and cached keys.
        maps: names of the weights of the last linear map, or of several whose results were joined.
        factors: origins of the two factors of each product of two activations that the tensor follows from without
            another linear map. Attention scores have the queries and the keys, and possibly the queries and positions.
    """

    projected: int = 0
    joined: int = 0
    maps: frozenset[Hashable] = frozenset()
    factors: "tuple[tuple[Origin, Origin], ...]" = ()

    @property
    def sources(self) -> int:
        """All sources of the tensor, from before and after its last linear map, as the bits of an int."""
        return self.projected | self.joined


class CallOrigins(NamedTuple):
    """Origins of the queries, keys and values of one attention call, that is the tensors on which each depends.

    Attributes:
        q: origin of the queries.
        k: origin of the keys; None if it is unknown.
        v: origin of the values.
        tokens: tokens of the queries, keys and values; None if they are unknown.
        are_moved: True if the model has moved queries or keys of the scores to other places, and their tokens there
            are unknown.
    """

    q: Origin
    k: Origin | None
    v: Origin
    tokens: ComparedTokens | None = None
    are_moved: bool = False


NO_ORIGIN = Origin()
"""Origin of no tensor."""


def union_of(origins: Iterable[Origin]) -> Origin:
    """Return the origin (sources) of a tensor computed element by element from tensors with these origins: the union of
    all their sources.
    """
    result = NO_ORIGIN
    for origin in origins:
        if result is NO_ORIGIN:
            result = origin
        elif origin is not NO_ORIGIN and origin is not result and origin != result:
            maps = result.maps | origin.maps if result.maps and origin.maps else result.maps or origin.maps
            factors = result.factors + tuple(each for each in origin.factors if each not in result.factors)
            result = Origin(result.projected | origin.projected, result.joined | origin.joined, maps, factors)
    return result
