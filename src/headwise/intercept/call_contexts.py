"""Tokens, padding and positions of each attention call of a model, as `CallContext`."""

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.intercept.documents import first_tokens_of_documents, ids_by_document
from headwise.intercept.hidden_keys import selects_keys, shaped_as_padding, without_unselected
from headwise.intercept.interceptor import Call, SiteKey
from headwise.intercept.observed_call import ObservedCall
from headwise.intercept.padding import (
    RealTokens,
    argument_of_keys,
    both,
    has_gap,
    meanings_of_argument,
    none_if_all,
    real_by_causal_mask,
    real_by_mask,
    require_hidden,
)
from headwise.intercept.positions import FIRST_UNKNOWN, lacks_first_token, own_key_of_first_query
from headwise.intercept.received_mask import MaskFacts, ReceivedMask
from headwise.intercept.sequence_positions import positions_in_sequences, separates_documents, stated_positions
from headwise.intercept.sequences import EMPTY, NO_TOKEN, Continuation, History, SiteMemory, padded_to
from headwise.intercept.shared_results import SharedResults
from headwise.intercept.stated_padding import NOTHING_STATED, StatedPadding
from headwise.intercept.streams import (
    PADDED_QUERIES_UNKNOWN,
    Stream,
    has_unknown_padding,
    stream_of_keys,
    stream_of_queries,
)
from headwise.intercept.trace.tokens import TOKENS_UNKNOWN
from headwise.shapes import Bool, Int

OF_COMMON_POSITIONS = frozenset({"distance", "self", "previous", "next", "duplicate", "induction"})
"""Statistics that are defined only where queries and keys have positions in the same sequence."""

NO_POSITIONS = (
    "positions of queries among the keys could not be established, so statistics that need them are left out "
    "(see docs/watch.md)"
)
"""Reason for modules whose statistics of positions are left out."""

UNKNOWN_SEQUENCES = (
    "it is unknown which sequences some calls with cached keys continue, so all statistics of these modules are left "
    "out; watch one cache at a time (see docs/watch.md)"
)
"""Reason for modules with calls that neither start sequences nor continue those of the call before."""


@dataclass(eq=False)
class _ModelCall:
    """Data that is stored during one call of a model: the first self-attention call of each module, and results that
    are reused for all attention calls with the same inputs.

    Attributes:
        streams: its self-attention calls so far, the first one of each module.
        results: results that calls with the same inputs share.
    """

    streams: dict[SiteKey, Stream] = field(default_factory=dict)
    results: SharedResults = field(default_factory=SharedResults)


class _Located(NamedTuple):
    """Tokens, padding and positions of a self-attention call for which it is known which key belongs to each query's
    token.

    Attributes:
        first: index of the key that belongs to the first query's token.
        continuation: earlier sequences that the call continues; None if it starts new ones.
        real: which of its tokens are not padding.
        history: tokens of the sequences at the end of the call.
        context: the same for the statistics.
        has_documents: True if the mask separates documents in some sequence.
        lacks_sequences: True if it is unknown which earlier sequences the call continues.
    """

    first: int
    continuation: Continuation | None
    real: RealTokens
    history: History
    context: CallContext
    has_documents: bool
    lacks_sequences: bool


class CallContexts(threading.local):
    """Reader that derives the tokens, padding and positions of every attention call of one model, in one thread. Layers
    whose calls have the same inputs get the same `CallContext` object.

    Args:
        special: ids of the special tokens.
        stated: padding that the user states.
        on_left_out: function that is called with a module path and the reason if some statistics are left out; by
            default one that does nothing.
    """

    def __init__(
        self,
        special: Collection[int] = (),
        stated: StatedPadding = NOTHING_STATED,
        on_left_out: Callable[[str, str], None] = lambda path, reason: None,
    ) -> None:
        self._special, self._stated = torch.tensor(sorted(special), dtype=torch.int64), stated
        self._on_left_out = on_left_out
        self._model_call = _ModelCall()
        self._memories: dict[tuple[SiteKey, int], SiteMemory] = {}

    def on_model_call(self) -> None:
        """Start a new call of the model: discard the data of the previous one. Keep the sequences by which calls with
        cached keys are recognised.
        """
        self._model_call = _ModelCall()

    def read(self, call: Call) -> ObservedCall:
        """Return the tokens, padding and positions of an attention call, and whether it continues the sequences of an
        earlier call.
        """
        results, mask_inputs = self._model_call.results, ("mask", call.grid, *call.mask_source.origin)
        received = results.of(call.mask, *mask_inputs) if call.mask_source.origin else results.latest_of(call.mask())
        facts = None
        if received is not None:
            facts, may_select = results.of(lambda: _facts_of(call, received), "facts", received, call.grid.keys)
            if facts is not None and may_select:
                paddings = shaped_as_padding(call.module_arguments, call.grid.batch, call.grid.keys)
                seen, batch = facts, call.grid.batch
                facts = results.of(lambda: without_unselected(seen, paddings, batch), "selected", facts, *paddings)
        with torch.no_grad():
            if call.site.cross:
                return self._read_cross(call, received, facts)
            return self._read_self(call, received, facts)

    def _read_self(self, call: Call, received: ReceivedMask | None, facts: MaskFacts | None) -> ObservedCall:
        """Return for a self-attention call which tokens its queries and keys stand for, which of these are padding, and
        their positions. Also return whether the call continues the sequences of an earlier call, as a decoding step
        with a cache does.
        """
        grid = call.grid
        are_new = call.sources.are_in_order and not call.sources.is_recurrent
        memory = None if are_new or call.sources.has_new_keys else self._memories.get((call.site, call.index))
        if not grid.uses_default_positions:
            return self._read_with_positions(call, memory)
        if are_new and not self._stated.by_path:  # the result depends on nothing else of this layer
            inputs = (received, facts, *call.tokens, call.padding, grid, call.appended_keys)
            located = self._model_call.results.of(
                lambda: self._located(call, received, facts, None), "located", *inputs
            )
        else:
            located = self._located(call, received, facts, memory)
        if located is None:
            return self._read_without_positions(call, facts, memory)
        if located.lacks_sequences:
            self._on_left_out(call.site.path, UNKNOWN_SEQUENCES)
        real, history, context, continuation = located.real, located.history, located.context, located.continuation
        if not real.is_known:
            self._on_left_out(call.site.path, PADDED_QUERIES_UNKNOWN)
        dropped = 0 if continuation is None else continuation.dropped
        given = located.first if continuation is None or memory is None else memory.given
        remembered = replace(history, has_documents=True) if located.has_documents else history
        self._memories[call.site, call.index] = SiteMemory.of(grid, call.keys, remembered, dropped, given)
        self._add_stream(call, real, history, continuation is not None, context.query_positions)
        lacks_rows = located.lacks_sequences or not real.is_known
        lacks_tokens = call.tokens.are_unknown or (call.tokens.ids is not None and history.token_ids is None)
        if lacks_tokens:
            self._on_left_out(call.site.path, TOKENS_UNKNOWN)
        continues = continuation is not None
        return ObservedCall(context, continues, dropped, lacks_rows=lacks_rows, lacks_tokens=lacks_tokens)

    def _located(
        self, call: Call, received: ReceivedMask | None, facts: MaskFacts | None, memory: SiteMemory | None
    ) -> "_Located | None":
        """Return the tokens, padding and positions of a self-attention call. Return None if its queries cannot be
        located among its keys. `memory` is the latest call of the same site, which this call may continue.
        """
        grid = call.grid
        first, continuation = own_key_of_first_query(call, received, facts, memory)
        if first is None:
            return None
        starts = not first or memory is None or call.is_aligned or memory.starts_again(first, call.keys)
        before = continuation or Continuation(EMPTY, 0)
        stated = self._stated.of_call(call.site.path, grid, before.dropped + first)
        real = self._model_call.results.of(
            lambda: self._real_tokens(call, received, facts, before.dropped, first, stated),
            *("real", facts, received, call.padding, call.tokens.are_moved, grid, before.dropped, first, stated),
        )
        history = self._model_call.results.of(
            lambda: self._history(call, before, first, real.keys),
            *("history", before.history, before.dropped, first, call.tokens.ids, real.keys, grid),
        )
        context = self._model_call.results.of(
            lambda: self._context(call, received, facts, history, before.dropped, first, real.queries),
            *("context", facts, history, before.dropped, first, real.queries, grid, call.appended_keys),
        )
        has_documents, lacks_sequences = separates_documents(context, grid), continuation is None and not starts
        return _Located(first, continuation, real, history, context, has_documents, lacks_sequences)

    def _read_without_positions(self, call: Call, facts: MaskFacts | None, memory: SiteMemory | None) -> ObservedCall:
        """Return the padding of a self-attention call whose queries cannot be located among its keys. Report that
        statistics of positions are left out for its module. Also return whether the call continues earlier sequences,
        even if their cached keys are now in another order.
        """
        grid = call.grid
        self._on_left_out(call.site.path, NO_POSITIONS)
        real = RealTokens(both(self._stated.of_call(call.site.path, grid, None), call.real_queries), None)
        if real.queries is None and facts is not None:
            real = real_by_causal_mask(facts, grid.queries, grid.batch)
        if not real.is_known:
            self._on_left_out(call.site.path, PADDED_QUERIES_UNKNOWN)
        is_newest = None if memory is None else memory.new_keys(grid.queries, call.keys)
        continues = is_newest is not None
        is_cached = memory is not None and grid.queries < grid.keys and call.sources.may_be_cached
        lacks_sequences = is_cached and not continues
        if lacks_sequences:
            self._on_left_out(call.site.path, UNKNOWN_SEQUENCES)
        self._memories[call.site, call.index] = SiteMemory.without_positions(grid, call.keys, is_newest)
        self._add_stream(call, real, History(grid.queries, None, None), continues)
        left_out = OF_COMMON_POSITIONS | {"first"} | ({"received"} if continues else set())
        context = CallContext(real_queries=real.queries, left_out=left_out)
        return ObservedCall(context, continues, lacks_positions=True, lacks_rows=lacks_sequences or not real.is_known)

    def _add_stream(
        self, call: Call, real: RealTokens, history: History, continues: bool, positions: Tensor | None = None
    ) -> None:
        """Store the padding and the tokens of a self-attention call, for later calls of cross-attention over the same
        tokens.
        """
        sizes = call.grid.batch, call.grid.queries
        stream = Stream(call.site.path, *sizes, call.sources.of_queries, real, history, continues, positions)
        self._model_call.streams.setdefault(call.site, stream)

    def _read_with_positions(self, call: Call, memory: SiteMemory | None) -> ObservedCall:
        """Return the padding and positions of a self-attention call whose positions are passed explicitly to
        `headwise.attend`. Position -1 marks padding.
        """
        grid = call.grid
        real_queries, real_keys = (
            None if positions is None else none_if_all(positions >= 0, grid.batch)
            for positions in (grid.query_positions, grid.key_positions)
        )
        stated = self._stated.of_call(call.site.path, grid, None)
        context = CallContext(
            real_queries=both(real_queries, stated), real_keys=real_keys, query_positions=stated_positions(grid)
        )
        continuation = None
        if memory is not None:
            continuation = memory.continuation(grid.batch, min(memory.history.length, grid.keys), call.keys)
        self._memories[call.site, call.index] = SiteMemory.of(grid, call.keys, History(grid.keys, None, None))
        return ObservedCall(context, continuation is not None)

    def _read_cross(self, call: Call, received: ReceivedMask | None, facts: MaskFacts | None) -> ObservedCall:
        """Return the tokens and padding of a cross-attention call, and whether it continues the sequences of an earlier
        call. The self-attention call over the same tokens as the queries shows whether it does, and which queries are
        padding.
        """
        grid, streams = call.grid, list(self._model_call.streams.values())
        of_queries, of_keys = stream_of_queries(call, streams), stream_of_keys(call, streams)
        first = None if of_queries is None else of_queries.history.length - grid.queries
        real = both(self._stated.of_call(call.site.path, grid, first), call.real_queries)
        lacks_rows = real is None and has_unknown_padding(call, facts, of_queries, streams)
        if lacks_rows:
            self._on_left_out(call.site.path, PADDED_QUERIES_UNKNOWN)
        if real is None and of_queries is not None:
            real = of_queries.real.queries
        tokens = None if of_keys is None else of_keys.history.token_ids
        positions = None if of_queries is None else of_queries.positions
        left_out = OF_COMMON_POSITIONS | ({"first"} if lacks_first_token(call, facts) else set())
        if "first" in left_out:
            self._on_left_out(call.site.path, FIRST_UNKNOWN)
        context = self._model_call.results.of(
            lambda: replace(
                self._context_of_cross(call, received, facts, real, tokens),
                left_out=left_out,
                query_positions=positions,
            ),
            *("cross", real, facts, tokens, grid, "first" in left_out, positions),
        )
        return ObservedCall(context, of_queries is not None and of_queries.continues, lacks_rows=lacks_rows)

    def _context_of_cross(
        self,
        call: Call,
        received: ReceivedMask | None,
        facts: MaskFacts | None,
        real: Bool[Tensor, "batch queries"] | None,
        tokens: Int[Tensor, "batch keys"] | None,
    ) -> CallContext:
        """Return a `CallContext` with the tokens and the padding of a cross-attention call."""
        grid, first_keys, real_keys = call.grid, None, call.real_keys
        if real_keys is None and facts is not None:
            real_keys = facts.is_seen
        if facts is not None and received is not None and call.real_queries is None:
            first_keys = first_tokens_of_documents(received, facts, real, grid.keys)
        return CallContext(
            token_ids=tokens,
            is_special=self._is_special(tokens),
            real_queries=real,
            real_keys=none_if_all(real_keys, grid.batch),
            first_keys=None if first_keys is None else first_keys.expand(grid.batch, -1),
        )

    def _real_tokens(
        self,
        call: Call,
        received: ReceivedMask | None,
        facts: MaskFacts | None,
        dropped: int,
        first: int,
        stated: Bool[Tensor, "batch queries"] | None,
    ) -> RealTokens:
        """Return which queries of a self-attention call are tokens, and which are padding. This follows from the user's
        statement, from the mask of the call, and from the padding mask that the module received.
        """
        grid = call.grid
        real = RealTokens(None, None) if facts is None else real_by_mask(facts, first, grid.queries, grid.batch)
        if stated is not None:
            require_hidden(stated, received, first, call.site.path)
            sees_any = None if facts is None else facts.sees_any
            return RealTokens(both(stated, sees_any), both(stated, real.keys))
        if call.padding is None or len(call.padding) != grid.batch or bool((call.padding == 1).all()):
            return real
        if call.tokens.are_moved:
            return real._replace(is_known=real.queries is not None)
        argument = argument_of_keys(call.padding, dropped, first, grid.queries)
        if argument is None:
            return real._replace(is_known=real.queries is not None)
        meanings = [argument.bool()] if received is None else meanings_of_argument(argument, received, real, first)
        if len(meanings) != 1:
            selects_keys = facts is not None and facts.selects_keys and bool(facts.is_seen.all())
            return real._replace(is_known=not selects_keys and (not meanings or real.queries is not None))
        own = none_if_all(meanings[0][:, first:], grid.batch)
        return RealTokens(both(real.queries, own), both(real.keys, own))

    def _history(
        self, call: Call, before: Continuation, first: int, real: Bool[Tensor, "batch queries"] | None
    ) -> History:
        """Return the tokens of each sequence up to the end of a self-attention call: those from before the call, and
        the tokens of its queries.
        """
        grid, tokens = call.grid, call.tokens.ids
        history = before.history
        if not history.length and first:
            history = History(first, None, None)  # cached by a call that was not observed
        if tokens is None or len(tokens) != grid.batch or tokens.shape[1] not in (grid.queries, first + grid.queries):
            return history.extended(grid.queries, None, real)
        if history.token_ids is None and first and tokens.shape[1] == first + grid.queries and not before.dropped:
            history = replace(history, token_ids=tokens[:, :first].clone())
        return history.extended(grid.queries, tokens[:, -grid.queries :].clone(), real)

    def _context(
        self,
        call: Call,
        received: ReceivedMask | None,
        facts: MaskFacts | None,
        history: History,
        dropped: int,
        first: int,
        real: Bool[Tensor, "batch queries"] | None,
    ) -> CallContext:
        """Return a `CallContext` with the tokens, padding and positions of a self-attention call whose queries could be
        located among its keys.
        """
        grid, keys = call.grid, first + call.grid.queries
        tokens, is_real, is_same_grid = history.token_ids, history.is_real, keys == grid.keys
        positions = None if is_same_grid else replace(grid, keys=keys)
        real_keys = None if is_real is None else padded_to(is_real[:, dropped:], grid.keys, 0)
        is_torn = is_real is not None and has_gap(is_real)
        first_keys = None
        if is_real is not None and is_torn:
            of_tokens = (is_real.cumsum(1) - 1).masked_fill(~is_real, -1)[:, dropped:]
            of_keys = padded_to(of_tokens, grid.keys, -1)
            positions = replace(grid, query_positions=of_tokens[:, first:], key_positions=of_keys)
        if dropped or is_torn:
            start = torch.zeros(1, 1, dtype=torch.int64, device=grid.device)
            start = start if is_real is None else is_real.int().argmax(1, keepdim=True)
            first_keys = (start - dropped).clamp(min=-1).expand(grid.batch, 1)
        elif facts is not None and received is not None and call.real_queries is None and grid.queries == keys:
            first_keys = first_tokens_of_documents(received, facts, real, keys)
            first_keys = None if first_keys is None else first_keys.expand(grid.batch, -1)
        key_tokens = None
        if tokens is not None:
            key_tokens = padded_to(tokens[:, dropped:], grid.keys, NO_TOKEN)
        return CallContext(
            token_ids=ids_by_document(key_tokens, first_keys),
            is_special=self._is_special(key_tokens),
            real_queries=real,
            real_keys=real_keys,
            positions=positions,
            first_keys=first_keys,
            left_out=frozenset({"duplicate", "induction"}) if is_torn or dropped else frozenset(),
            query_positions=positions_in_sequences(history, grid, real, first_keys),
        )

    def _is_special(self, tokens: Int[Tensor, "batch keys"] | None) -> Bool[Tensor, "batch keys"] | None:
        """Return a mask that is True at special tokens, such as [CLS]. Return None if the token ids are unknown, or if
        no ids are defined as special.
        """
        if tokens is None or not len(self._special):
            return None
        return torch.isin(tokens, self._special.to(tokens.device))


def _facts_of(call: Call, received: ReceivedMask) -> tuple[MaskFacts | None, bool]:
    """Return facts about the mask of an attention call, such as which keys are seen by query rows, and True if a key
    that no row sees may be one that the model has not selected, as in top-k attention.
    """
    facts = MaskFacts.of(received, call.grid.keys)
    return facts, facts is not None and selects_keys(facts, received)
