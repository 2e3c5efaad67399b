"""Clusters of the sequences of each attention call: which calls of a module have values of the same sequences."""

import threading
from collections import Counter
from dataclasses import dataclass, field

from headwise.intercept.interceptor import SiteKey
from headwise.statistics.moments import Clusters, separate_clusters


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
