"""Kind of an attention call, self or cross, from the sources of its queries, keys and values."""

from headwise.intercept.lineage import Lineage
from headwise.intercept.origin import CallOrigins, Origin

UNKNOWN_KIND = (
    "it is unknown if queries and keys of these modules come from the same tokens, so they are reported as "
    "cross-attention, without statistics of positions; state kind= in hw.Site (see docs/watch.md)"
)
"""Reason for modules whose attention is neither known to be self-attention nor to be cross-attention."""


def is_cross_attention(origins: CallOrigins, lineage: Lineage) -> bool | None:
    """Return True for cross-attention, False for self-attention. The kind is derived from the sources of the queries,
    keys and values (tensors on which they depend). Return None if the sources do not determine the kind.

    It is self-attention if queries and keys have the same content. Sources that only one of the two has are
    permitted, such as position embeddings, unless they come from a mixing step: the output of attention, or a
    concatenation with other tokens. Keys that an earlier layer used for self-attention may be shared by later layers,
    and keys of earlier tokens may be concatenated with those of the queries.
    """
    if origins.k is None:
        return None
    is_cross = _is_cross(origins.q, origins.k, origins.v, lineage)
    if is_cross is False:
        keys = origins.k.maps, lineage.content(origins.k)
        if attends_to_earlier_calls(origins.q, origins.k, lineage):
            lineage.recurrent_keys.add(keys)
        lineage.self_attention_keys.add(keys)
    return is_cross


def attends_to_earlier_calls(query: Origin, key: Origin | None, lineage: Lineage) -> bool:
    """Return True if a call attends to its own tokens and, concatenated with them, to keys of earlier self-attention
    calls in the same run of the model. The earlier keys must come from the same projection weights as the call's own
    keys. Recurrent models attend to one block of tokens after the other in this way.
    """
    if key is None:
        return False
    q, k = lineage.content(query), lineage.content(key)
    if (key.maps, k) in lineage.self_attention_keys:
        return (key.maps, k) in lineage.recurrent_keys
    added, earlier = k & ~q, 0
    for maps, content in lineage.self_attention_keys:
        earlier |= content if maps == key.maps else 0
    is_known = not added & ~(earlier | lineage.concatenations | lineage.selections)
    return is_known and not q & ~k and bool(added & lineage.concatenations) and bool(added & earlier)


def query_and_key(scores: Origin, value: Origin, lineage: Lineage) -> tuple[Origin, Origin | None]:
    """Return the origins (sources) of the queries and the keys that were multiplied to compute scores with the origin
    `scores`. If no product is known, return `scores` and None. Scores may be a sum of products, for example of queries
    with keys and of queries with position embeddings. Then return the factors of the product that has both factors from
    the same tokens, else of the product with most sources in common with the values.
    """

    def rank(factors: tuple[Origin, Origin]) -> tuple[bool, int]:
        left, right = factors
        common = (lineage.content(left) | lineage.content(right)) & lineage.content(value)
        return bool(common) and _is_cross(left, right, value, lineage) is False, common.bit_count()

    if len(scores.factors) < 2:
        return scores.factors[0] if scores.factors else (scores, None)
    return max(scores.factors, key=rank)


def may_be_cached(origins: CallOrigins, lineage: Lineage) -> bool:
    """Return True if some keys of a call may come from a cache. That is possible if the keys depend on all sources of
    the queries, and on no other sources except tensors from outside of the model call.
    """
    if origins.k is None:
        return False
    q, k = lineage.content(origins.q), lineage.content(origins.k)
    return not q & ~k and not k & ~q & ~lineage.outside


def _is_cross(query: Origin, key: Origin, value: Origin, lineage: Lineage) -> bool | None:
    """Return True for cross-attention, False for self-attention, None if unknown, from the origins (sources) of the
    queries, keys and values of a call. Unlike `is_cross_attention`, record nothing in `lineage`.
    """
    q, k, v = (lineage.content(origin) for origin in (query, key, value))
    if not q or not k:
        return None
    if not q & k:  # tensors that neither the model received nor a known function computed may have one source
        is_learned = not q & ~lineage.state
        return True if query.projected or is_learned or not (q | k) & ~lineage.given else None
    is_shared = bool(key.maps) and (key.maps, k) in lineage.self_attention_keys
    is_shared = is_shared or attends_to_earlier_calls(query, key, lineage)
    mixed = (q ^ k) & lineage.mixing & ~lineage.outside
    if not is_shared and mixed:
        return None if (query.sources ^ key.sources) & lineage.placed or not mixed & ~lineage.weighted else True
    if q != k and not is_shared and v & ~(q & k):
        return True if q & ~k and k & ~q else None
    return False
