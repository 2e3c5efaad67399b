"""Sequences of the attention calls in one call of the model: calls that attend to keys of earlier calls, calls with
parts of the same queries, and clusters of the sequences of which a module has several values.
"""

import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from headwise.intercept.compared_tokens import ComparedTokens
from headwise.intercept.interceptor import Call, SiteKey
from headwise.statistics.moments import Clusters, separate_clusters


class Recurrence(threading.local):
    """Calls that began the sequences of the later calls of the same site in one call of the model, in one thread."""

    def __init__(self) -> None:
        self._first_calls: dict[SiteKey, int] = {}

    def on_model_call(self) -> None:
        """Forget the calls of the previous call of the model."""
        self._first_calls = {}

    def with_first_call(self, call: Call) -> Call:
        """Return an attention call with the number of the call at its site that began its sequences: an earlier one if
        it attends to keys of earlier calls, otherwise its own.
        """
        if not call.sources.is_recurrent:
            self._first_calls[call.site] = call.index
        return replace(call, index=self._first_calls.get(call.site, call.index))


class _Queries(NamedTuple):
    """Queries of a call and of the later calls with other parts of them.

    Attributes:
        site: where in the model.
        first_call: number of the first of these calls.
        sizes: numbers of sequences and heads.
        tokens: tokens of the first call, with the queries of all these calls.
    """

    site: SiteKey
    first_call: int
    sizes: tuple[int, int]
    tokens: ComparedTokens


class QueryParts(threading.local):
    """Parts of the queries in the attention calls of one call of the model, in one thread. A model that computes
    attention in parts to save memory calls it in a loop over the queries, with the same keys.
    """

    def __init__(self) -> None:
        self._so_far: list[_Queries] = []

    def on_model_call(self) -> None:
        """Forget the calls of the previous call of the model."""
        self._so_far = []

    def attends_again(self, call: Call) -> bool:
        """Return True if some queries of an attention call have attended before in the same call of the model, at the
        same site.
        """
        tokens, sizes = call.sources.tokens, (call.grid.batch, call.grid.heads)
        return tokens is not None and any(
            (whole.site, whole.sizes) == (call.site, sizes) and tokens.has_queries_of(whole.tokens)
            for whole in self._so_far
        )

    def sequences_of(self, call: Call, continues: bool) -> tuple[int, bool]:
        """Return the index of the first call at this site on the same sequences, by default that of this call. Also
        return True if this call continues that first call: with the same keys, and other queries of the same
        projection. If the tokens of the call are unknown, return its own index and `continues`.

        Args:
            call: the call.
            continues: True if this call continues the sequences of an earlier call of the model.
        """
        tokens, sizes = call.sources.tokens, (call.grid.batch, call.grid.heads)
        if tokens is None:
            return call.index, continues
        for place, whole in enumerate(self._so_far):
            if (whole.site, whole.sizes) == (call.site, sizes) and tokens.is_other_part(whole.tokens):
                of_both = torch.cat([whole.tokens.queries.numbers, tokens.queries.numbers], -1)
                queries = tokens.queries._replace(numbers=of_both)
                self._so_far[place] = whole._replace(tokens=whole.tokens._replace(queries=queries))
                return whole.first_call, True
        self._so_far.append(_Queries(call.site, call.index, sizes, tokens))
        return call.index, continues


@dataclass
class _SiteCalls:
    """Clusters of the sequences at one site (a place in the model that computes attention) in one call of the model,
    and the attention calls that began them.

    Attributes:
        clusters: clusters of all sequences of the call of the model.
        indices: numbers of the attention calls that began sequences.
        has_part: True if one of them has only some of the sequences.
    """

    clusters: Clusters
    indices: set[int] = field(default_factory=set)
    has_part: bool = False


class _ModelCall(threading.local):
    """The current call of the model in one thread.

    Attributes:
        sites: its attention calls so far, by site.
    """

    def __init__(self) -> None:
        self.sites: dict[SiteKey, _SiteCalls] = {}


class SequenceClusters:
    """Clusters of the sequences of the attention calls of a model. Several calls of a site (attention module, self or
    cross) in one call of the model have several values of the same sequences, which depend on each other.

    A call that has only some of the sequences does not show which. Their values are independent if it is the only call
    of its site in the call of the model, and if all sequences of the data are independent. Otherwise their clusters are
    unknown.
    """

    def __init__(self) -> None:
        self._model_call = _ModelCall()
        self._numbered: Counter[SiteKey] = Counter()
        self._lock = threading.Lock()

    def on_model_call(self) -> None:
        """Forget the attention calls of the previous call of the model in this thread."""
        self._model_call.sites = {}

    def of_call(self, site: SiteKey, index: int, sequences: int, of_data: Clusters | None) -> Clusters | None:
        """Return the clusters of the sequences of an attention call; None if they are unknown. Then they are also
        unknown for the earlier calls of the site in this call of the model.

        Args:
            site: where in the model.
            index: number of the attention call at the site that began the sequences, in this call of the model.
            sequences: number of sequences of the attention call.
            of_data: clusters of the sequences of this call of the model. By default they are independent, and those of
                the first attention call of the site.
        """
        calls = self._model_call.sites.get(site)
        if calls is None:
            clusters = self._next_clusters(site, sequences) if of_data is None else of_data
            calls = self._model_call.sites[site] = _SiteCalls(clusters)
        is_part = sequences < len(calls.clusters)
        calls.indices.add(index)
        calls.has_part |= is_part
        is_unknown_part = is_part and not bool((calls.clusters < 0).all())
        if sequences > len(calls.clusters) or is_unknown_part or (calls.has_part and len(calls.indices) > 1):
            return None
        return calls.clusters[:sequences]

    def _next_clusters(self, site: SiteKey, sequences: int) -> Clusters:
        """Return clusters of one sequence each, for the next sequences at a site."""
        with self._lock:
            start = self._numbered[site]
            self._numbered[site] += sequences
        return separate_clusters(range(start, start + sequences))
