"""Sequences of the attention calls in one call of the model: calls that attend to keys of earlier calls, calls with
parts of the same queries, and clusters of the sequences of which a module has several values.
"""

import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from headwise.intercept.interceptor import Call, SiteKey
from headwise.intercept.trace.tokens import ComparedTokens
from headwise.statistics.moments import Clusters, separate_clusters


class Recurrence(threading.local):
    """Record of the attention call that began the sequences at each site (attention module, self or cross), in one call
    of the model and one thread. Later attention calls at the site may continue these sequences.
    """

    def __init__(self) -> None:
        self._first_calls: dict[SiteKey, int] = {}

    def on_model_call(self) -> None:
        """Discard the attention calls recorded in the previous call of the model, because a new call starts."""
        self._first_calls = {}

    def with_first_call(self, call: Call) -> Call:
        """Return a copy of `call`, an attention call, with the index of the attention call that began its sequences.
        That is an earlier call at the same site if `call` attends to keys of earlier calls; otherwise it is `call`
        itself.
        """
        if not call.sources.is_recurrent:
            self._first_calls[call.site] = call.index
        first = self._first_calls.get(call.site, call.index)
        return call if first == call.index else replace(call, index=first)


class _Queries(NamedTuple):
    """Queries of a group of attention calls, each of which computes attention for a different part of these queries.

    Attributes:
        first_call: number of the first of these calls.
        tokens: tokens of the first call, with the queries of all these calls.
    """

    first_call: int
    tokens: ComparedTokens


class QueryParts(threading.local):
    """Record of the attention calls that each compute a part of the same queries, in one call of the model and one
    thread. To save memory, some models compute attention in a loop over parts of the queries, with the same keys.
    """

    def __init__(self) -> None:
        self._so_far: defaultdict[tuple[SiteKey, int, int], list[_Queries]] = defaultdict(list)

    def on_model_call(self) -> None:
        """Discard the attention calls recorded in the previous call of the model, because a new call starts."""
        self._so_far.clear()

    def attends_again(self, call: Call) -> bool:
        """Return True if an attention call contains queries for which attention was already computed at the same site
        (attention module, self or cross) in this call of the model.
        """
        tokens, before = call.sources.tokens, self._so_far.get((call.site, call.grid.batch, call.grid.heads))
        return tokens is not None and before is not None and any(tokens.has_queries_of(each.tokens) for each in before)

    def sequences_of(self, call: Call, continues: bool) -> tuple[int, bool]:
        """Return two results: the index of the attention call with which the sequences of `call` began, and True if
        `call` continues sequences. If `call` computes another part of the queries of an earlier call (with the same
        keys, and queries from the same projection), return the index of the first such call, and True. Otherwise, or if
        the tokens of `call` are unknown, return its own index and `continues`.

        Args:
            call: the call.
            continues: True if this call continues the sequences of an earlier call of the model.
        """
        tokens = call.sources.tokens
        if tokens is None:
            return call.index, continues
        before = self._so_far[call.site, call.grid.batch, call.grid.heads]
        for place, whole in enumerate(before):
            if tokens.is_other_part(whole.tokens):
                of_both = torch.cat([whole.tokens.queries.numbers, tokens.queries.numbers], -1)
                queries = tokens.queries._replace(numbers=of_both)
                before[place] = whole._replace(tokens=whole.tokens._replace(queries=queries))
                return whole.first_call, True
        before.append(_Queries(call.index, tokens))
        return call.index, continues


@dataclass
class _SiteCalls:
    """Attention calls at one site (attention module, self or cross) in one call of the model, and the clusters of their
    sequences. Sequences in one cluster are not statistically independent.

    Attributes:
        clusters: clusters of all sequences of the call of the model.
        indices: numbers of the attention calls that began sequences.
        has_part: True if one of them has only some of the sequences.
    """

    clusters: Clusters
    indices: set[int] = field(default_factory=set)
    has_part: bool = False


class _ModelCall(threading.local):
    """Attention calls that the current call of the model has made so far in one thread, by site (attention module, self
    or cross).

    Attributes:
        sites: its attention calls so far, by site.
    """

    def __init__(self) -> None:
        self.sites: dict[SiteKey, _SiteCalls] = {}


class SequenceClusters:
    """Clusters of the sequences in a model's attention calls, for standard errors: sequences of one cluster are not
    statistically independent. If a site (attention module, self or cross) attends several times in one call of the
    model, each sequence has several values of a statistic. These values depend on each other, so all values of a
    sequence get the same cluster.

    An attention call may have only some of the sequences of the call of the model, and does not show which ones. The
    clusters of such a part are known only if the attention call is the only one of its site in the call of the model,
    and if all sequences of the data are independent: then each sequence is a cluster of its own. Otherwise the clusters
    are unknown, and standard errors cannot be computed.
    """

    def __init__(self) -> None:
        self._model_call = _ModelCall()
        self._numbered: Counter[SiteKey] = Counter()
        self._lock = threading.Lock()

    def on_model_call(self) -> None:
        """Discard the attention calls recorded in the previous call of the model in this thread, because a new one
        starts.
        """
        self._model_call.sites = {}

    def of_call(self, site: SiteKey, index: int, sequences: int, of_data: Clusters | None) -> Clusters | None:
        """Return the cluster of each sequence of an attention call. Sequences in one cluster are not statistically
        independent. Return None if the clusters are unknown. The clusters of earlier attention calls at the site
        (attention module, self or cross) in this call of the model are then unknown, too.

        Args:
            site: where in the model.
            index: number of the attention call at the site that began the sequences, in this call of the model.
            sequences: number of sequences of the attention call.
            of_data: cluster of each sequence in this call of the model, as the data set states it. If it is None, each
                sequence of the first attention call at the site becomes a cluster of its own.
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
        """Return a new cluster (a group of dependent sequences) for each of the next `sequences` sequences at a site
        (attention module, self or cross).
        """
        with self._lock:
            start = self._numbered[site]
            self._numbered[site] += sequences
        return separate_clusters(range(start, start + sequences))
