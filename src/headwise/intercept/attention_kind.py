"""Kind of an attention call, self or cross, from the sources of its queries, keys and values."""

from headwise.intercept.lineage import Lineage
from headwise.intercept.origin import CallOrigins

UNKNOWN_KIND = (
    "it is unknown if queries and keys of these modules come from the same tokens, so they are reported as "
    "cross-attention, without statistics of positions; state kind= in hw.Site (see docs/watch.md)"
)
"""Reason for modules whose attention is neither known to be self-attention nor to be cross-attention."""


def is_cross_attention(origins: CallOrigins, lineage: Lineage) -> bool | None:
    """Return True for cross-attention, False for self-attention, and None if the sources do not decide.

    It is self-attention if queries and keys have the same content. Sources that only one of the two has are
    permitted, such as position embeddings, unless they come from a mixing step: the output of attention, or a
    concatenation with other tokens. Keys that an earlier layer used for self-attention may be shared by later layers.
    """
    if origins.k is None:
        return None
    q, k, v = (lineage.content(origin) for origin in (origins.q, origins.k, origins.v))
    if not q or not k:
        return None
    if not q & k:  # tensors that neither the model received nor a known function computed may have one source
        return True if origins.q.projected or not (q | k) & ~lineage.given else None
    is_shared = bool(origins.k.maps) and origins.k.maps in lineage.self_attention_keys
    if not is_shared and (q ^ k) & lineage.mixing:
        return True
    if q != k and not is_shared and v & ~(q & k):
        return True if q & ~k and k & ~q else None
    lineage.self_attention_keys.add(origins.k.maps)
    return False
