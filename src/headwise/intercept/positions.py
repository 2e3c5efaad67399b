"""Position of a self-attention call's queries among its keys, derived from mask, caches and position arguments."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from headwise.intercept.interceptor import Call
from headwise.intercept.received_mask import MaskFacts, ReceivedMask
from headwise.intercept.sequences import Continuation, SiteMemory
from headwise.intercept.trace.tokens import ComparedTokens

FIRST_UNKNOWN = (
    "the first keys of these modules are not known to be tokens, so the statistic first is left out (see docs/watch.md)"
)
"""Reason for cross-attention whose first keys may be learned ones."""


def lacks_first_token(call: Call, facts: MaskFacts | None) -> bool:
    """Return True if the first key of an attention call may be a learned key in front of the tokens. That is the case
    if some query may attend to this key, and it belongs to no known token, while other keys do.

    Args:
        call: the call.
        facts: facts about its mask; None if it hides nothing, or hides keys by distance alone.
    """
    numbers = None if call.sources.tokens is None else call.sources.tokens.keys.numbers
    if numbers is None or not bool((numbers[..., 0] == 0).any()) or not bool((numbers > 0).any()):
        return False
    return facts is None or bool(facts.is_seen[:, 0].any())


def own_key_of_first_query(
    call: Call, received: ReceivedMask | None, facts: MaskFacts | None, memory: SiteMemory | None
) -> tuple[int | None, Continuation | None]:
    """Find out which keys of a self-attention call belong to its queries. The first result is the index of the key that
    belongs to the first query's token, or None if it is not certain. Each further query belongs to the next key. The
    second result is the earlier sequences that the call continues, or None if it starts new ones.

    With cached keys, the index follows from the mask: the last key that a causal row sees is its own. Without such a
    mask the last key belongs to the last query. It is established if the keys in front of it are those of an earlier
    call, or if a cache or a position that the model was called with has the same length.

    It cannot be established if the queries are known to be in another order than their tokens, or if the model has
    moved queries or keys of the scores, and their tokens there are unknown. With as many keys as queries, it cannot be
    established if these are known to be other tokens, or the same in another order. If queries are known to be some of
    the tokens of the keys, it is established if no later key is visible.

    Args:
        call: the call.
        received: the mask of the call; None if unknown.
        facts: facts about this mask; None if it hides nothing, or hides keys by distance alone.
        memory: the latest call of the same site.
    """
    queries, batch = call.grid.queries, call.grid.batch
    keys = call.grid.keys - call.appended_keys
    if received is not None and facts is None:
        keys = min(keys, received.grid.keys)
    tokens = call.sources.tokens
    if queries > keys or call.sources.are_moved or (tokens is not None and _are_reordered(call, tokens, keys)):
        return None, None
    has_own_keys_only = queries == call.grid.keys - call.appended_keys
    own_key = None if tokens is None or has_own_keys_only else tokens.own_key_of_first_query()
    first, is_causal = keys - queries, False
    if facts is not None:
        first_by_mask, is_causal = facts.own_key_of_first_row()
        if queries != keys:
            if first_by_mask is None or not 0 <= first_by_mask <= keys - queries:
                return None, None
            first = first_by_mask
            if first != keys - queries and _is_appended(call, memory, keys - queries):
                return None, None  # the mask is aligned with the first key, although it is not the first query's
    if own_key is not None:  # the running call of the model computed all keys
        is_last = own_key == first and (is_causal or first == keys - queries)
        return (first, None) if is_last else (None, None)
    continuation = None
    if memory is not None and not memory.starts_again(first, call.keys):
        continuation = memory.continuation(batch, first, call.keys)
    is_established = (
        (first == 0 and (queries == keys or is_causal))
        or continuation is not None
        or call.is_aligned
        or _is_confirmed(call.module_arguments, first, queries, keys, call.layer)
    )
    return (first, continuation) if is_established else (None, None)


def _are_reordered(call: Call, tokens: ComparedTokens, keys: int) -> bool:
    """Return True if the queries of an attention call are known to be in another order than their tokens. Also return
    True if there are as many queries as `keys`, but their tokens are known to differ from those of the keys. Calls that
    state positions themselves count as in order.
    """
    queries = call.grid.queries
    has_own_axis = tokens.queries.numbers.shape[-1] == queries  # otherwise the queries of several heads share an axis
    is_reordered = (has_own_axis and tokens.has_reordered_queries) or (queries == keys and tokens.differ)
    return is_reordered and not call.is_aligned


def _is_appended(call: Call, memory: SiteMemory | None, cached: int) -> bool:
    """Return True if the first `cached` keys of an attention call are known to be keys of the previous attention call
    at the same site (attention module, self or cross).
    """
    if memory is None or call.keys is None:
        return False
    return memory.continuation(call.grid.batch, cached, call.keys) is not None


def _is_confirmed(
    arguments: Iterable[Mapping[str, Any]], first: int, queries: int, keys: int, layer: int | None
) -> bool:
    """Return True if an argument of the running modules confirms that the first query of an attention call is token
    number `first` of its sequence. Such an argument is a tensor of the queries' positions, or a cache that states
    `first + queries` tokens. If the last query belongs to the last key, the cache may state more tokens, since it may
    have dropped old keys.
    """
    for value in (value for module_arguments in arguments for value in module_arguments.values()):
        length_of = getattr(value, "get_seq_length", None)
        if callable(length_of):
            length = _cached_length(value, layer)
            if length == first + queries or (length is not None and length > keys == first + queries):
                return True
        elif _are_positions(value, first, queries):
            return True
    return False


def _cached_length(cache: Any, layer: int | None) -> int | None:
    """Return the number of tokens in a key/value cache of `transformers` for the layer with number `layer`. Return None
    if the cache does not state it.
    """
    try:
        return int(cache.get_seq_length(*([] if layer is None else [layer])))
    except (TypeError, ValueError, IndexError, KeyError, AttributeError):
        return None


def _are_positions(value: Any, first: int, queries: int) -> bool:
    """Return True if `value` is an integer tensor with the positions `first`, `first + 1`, ... of all queries."""
    if not isinstance(value, Tensor) or value.dtype not in (torch.int64, torch.int32):
        return False
    if value.shape not in ((queries,), (1, queries)):
        return False
    return torch.equal(value.flatten().long(), torch.arange(first, first + queries, device=value.device))
