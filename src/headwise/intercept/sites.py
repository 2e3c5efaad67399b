"""Sites where a model attends, as recorded while it runs, and labels of their heads."""

import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.intercept.interceptor import Call, Interceptor, SiteKey
from headwise.intercept.layer_index import innermost_attention_modules, is_inside, is_related, layer_numbers
from headwise.intercept.trace.refusals import NOT_FOLLOWED, NOT_SEEN, REASONS_BESIDE_ATTENTION
from headwise.shapes import Float
from headwise.statistics.moments import Clusters, RunningLargest, RunningMoments, with_several_values
from headwise.statistics.registry import LARGEST
from headwise.statistics.tally import Tally

MOST_CALLS = 256
"""Largest number of attention calls of a site whose statistics wait to be merged."""

MOST_SUMS = 2**17
"""Largest number of sums of a site that wait to be merged, together with those of one further call: 1 MiB."""


@dataclass
class SiteRecord:
    """Data about one site (an attention module, in self- or cross-attention): its layer number and its numbers of
    heads. For each statistic and head, it has the count, mean and squared deviations of the values over all observed
    sequences.

    Attributes:
        site: where in the model.
        layer: number of the layer in the model's own count; None where the model does not number it.
        heads: number of query heads.
        kv_heads: number of key/value heads.
        completed: moments of each statistic over the sequences that no later call continues, by the statistic's name.
        nonfinite_rows: number of query rows whose attention weights or head output were NaN or infinite.
        has_unknown_documents: True if it is unknown which sequences of this site, of all calls, depend on each other:
            its statistics have no standard errors then.
    """

    site: SiteKey
    layer: int | None
    heads: int
    kv_heads: int
    completed: dict[str, RunningMoments] = field(default_factory=dict)
    nonfinite_rows: int = 0
    _latest: dict[Hashable, "_LatestCall"] = field(default_factory=dict, repr=False, compare=False)
    _finished: list["_LatestCall"] = field(default_factory=list, repr=False, compare=False)
    _discarded: set[str] = field(default_factory=set, repr=False, compare=False)
    has_unknown_documents: bool = field(default=False, repr=False, compare=False)

    def add(
        self,
        tally: Tally,
        source: Hashable = None,
        continues: bool = False,
        clusters: Clusters | None = None,
        *,
        may_wait: bool = False,
    ) -> None:
        """Add the statistics of one attention call to those of this site (attention module, self or cross). Each
        statistic has one value for each head and sequence.

        Args:
            tally: sums over the query rows of the call.
            source: the thread and the number of the call in the model call; only calls with the same one can continue
                each other.
            continues: True if the rows of the call are further rows of the sequences of the latest call.
            clusters: number of the cluster of each sequence; by default all are independent.
            may_wait: True if the statistics may be merged together with those of later calls. The last bits of means
                then depend on which calls were merged together, so that a run would not resume to the same bits.
        """
        self.nonfinite_rows += int(tally.nonfinite_rows)
        latest = self._latest.get(source)
        if continues and latest is not None:
            latest.tally.merge(tally)
            return
        if latest is not None:
            self._finished.append(latest.finished(attends_again=len(self._latest) > 1))
            is_full = len(self._finished) * latest.tally.size > MOST_SUMS or len(self._finished) == MOST_CALLS
            if is_full or not may_wait:
                self._merge_finished()
        self._latest[source] = _LatestCall(replace(tally, gram=None), clusters)

    def _merge_finished(self) -> None:
        """Merge the statistics of finished attention calls, which no later call continues, into the moments (count,
        mean and squared deviations) of this site. Calls with the same statistics are merged together, since one
        operation costs about as much for one call as for many.
        """
        groups: dict[Hashable, list[_LatestCall]] = {}
        finished, self._finished = self._finished, []
        for number, call in enumerate(finished):
            groups.setdefault(call.kind or number, []).append(call)
        for calls in groups.values():
            self.merge(_LatestCall.joined(calls).moments())

    def merge(self, statistics: Mapping[str, RunningMoments]) -> None:
        """Merge `statistics` into the statistics of this site (attention module, self or cross), in place. They are
        moments (count, mean and squared deviations) of each statistic over other sequences.
        """
        self.completed = merged_moments(self.completed, statistics)

    @property
    def statistics(self) -> dict[str, RunningMoments]:
        """Count, mean and squared deviations of each statistic over all observed sequences, by the statistic's name. A
        sequence that may be continued later counts with its query rows so far.
        """
        self._merge_finished()
        moments = self.completed
        for latest in self._latest.values():
            moments = merged_moments(moments, latest.finished(attends_again=len(self._latest) > 1).moments())
        return {
            name: replace(values, is_clustered=False) if self.has_unknown_documents else values
            for name, values in moments.items()
            # A further statistic, such as `entropy by position`, is left out with the statistic before the space.
            if self._discarded.isdisjoint((name, name.partition(" ")[0]))
        }

    def are_without_rows(self) -> list[bool]:
        """Return, for each head, True if no query in the observed sequences attends to any key. Such a head has no
        query row with an entropy. Return an empty list if the entropy was not measured or was left out.
        """
        tallies = [call.tally for call in (*self._finished, *self._latest.values())]
        counts = [tally.counts()["entropy"].sum(0) for tally in tallies if "entropy" in tally.mean_names]
        counts += [self.completed["entropy"].count] if "entropy" in self.completed else []
        if not counts or "entropy" in self._discarded:
            return []
        return [not any(of_head) for of_head in zip(*(each.tolist() for each in counts), strict=True)]

    def latest_tallies(self) -> list[Tally]:
        """Return, for each of the module's latest attention calls, the sums of statistics over its query rows. There
        are several calls if the module attends several times in one call of the model. Calls that continue each other,
        as in generation, count as one.
        """
        return [call.tally for call in self._latest.values()]

    def latest_received(self) -> Float[Tensor, "heads keys"] | None:
        """Return the mean attention weight that each key received in the latest attention calls. It is the mean over
        the query rows that may attend to the key, averaged over sequences, or NaN if no row may attend to the key.
        Return None if there was no call, or if the statistic `received` is left out.
        """
        tallies = [call.tally for call in self._latest.values() if "received" in call.tally.other_sums]
        if not tallies or "received" in self._discarded:
            return None
        stop = max(tally.first_token + tally.other_sums["received"][0].shape[-1] for tally in tallies)
        of_sequences = []
        for tally in tallies:
            received, seen_by = tally.other_sums["received"]
            means = (received / seen_by).double().cpu()  # 0 / 0 is NaN
            padding = tally.first_token, stop - tally.first_token - means.shape[-1]
            of_sequences.append(nn.functional.pad(means, padding, value=torch.nan))
        return torch.cat(of_sequences).nanmean(0)

    def discard(self, *names: str) -> None:
        """Remove the statistics with these names from the results of this site."""
        self._discarded.update(names)


def merged_moments(
    statistics: Mapping[str, RunningMoments], others: Mapping[str, RunningMoments]
) -> dict[str, RunningMoments]:
    """Combine the moments (count, mean and squared deviations) of each statistic over two separate sets of sequences.
    Return the moments over both sets together.
    """
    merged_statistics = dict(statistics)
    for name, moments in others.items():
        merged_statistics[name] = merged_statistics[name].merge(moments) if name in merged_statistics else moments
    return merged_statistics


class _LatestCall(NamedTuple):
    """Sums of the statistics over the query rows of the latest attention call at one site (attention module, self or
    cross). Rows of later calls that continue the same sequences are added to them.

    Attributes:
        tally: sums over its query rows.
        clusters: number of the cluster of each of its sequences; None if all are independent.
    """

    tally: Tally
    clusters: Clusters | None

    def finished(self, *, attends_again: bool) -> "_LatestCall":
        """Return this attention call with the final clusters of its sequences (groups of dependent sequences). If
        `attends_again`, other attention calls may have values of the same sequences. The values of one sequence then
        count as dependent on each other.
        """
        if not attends_again or self.clusters is None:
            return self
        return self._replace(clusters=with_several_values(self.clusters))

    @property
    def kind(self) -> Hashable:
        """Key by which attention calls are grouped: the names and sizes of their sums, apart from the number of
        sequences. Calls with equal keys can be joined. The key is None if this call can be joined with no other.
        """
        tally = self.tally
        if tally.row_sums is None or tally.further is not None:
            return None
        if self.clusters is not None and len(self.clusters) != tally.row_sums.shape[2]:
            return None
        others = tuple((name, *(part.shape[1:] for part in sums)) for name, sums in tally.other_sums.items())
        return tally.mean_names, tally.row_sums.device, others, self.clusters is None

    @staticmethod
    def joined(calls: "Sequence[_LatestCall]") -> "_LatestCall":
        """Combine attention calls with the same statistics into one call with the sequences of all, and return it."""
        if len(calls) == 1:
            return calls[0]
        known = [each.clusters for each in calls if each.clusters is not None]
        clusters = torch.cat(known) if known else None
        return _LatestCall(Tally.joined([each.tally for each in calls]), clusters)

    def moments(self) -> dict[str, RunningMoments]:
        """Return the moments (count, mean and squared deviations) of each statistic over the sequences of this
        attention call. The value of a sequence is its mean over the query rows.
        """
        clusters = self.clusters
        has_value = self.tally.has_value()
        values = {name: (means, has_value[name]) for name, means in self.tally.means().items()}
        values |= {} if self.tally.further is None else self.tally.further.values()
        if not values:
            return {}
        numbers, is_value = (
            torch.cat(each, 1).cpu()
            for each in ([mean.double() for mean, _ in values.values()], [has for _, has in values.values()])
        )
        widths = [mean.shape[1] for mean, _ in values.values()]
        of_all = RunningMoments.from_values(numbers, is_value, clusters).parts(widths)
        parts = zip(values, of_all, numbers.split(widths, 1), is_value.split(widths, 1), strict=True)  # type: ignore[no-untyped-call]
        return {
            name: RunningLargest.of_moments(moments, part, is_value_of_part) if name in LARGEST else moments
            for name, moments, part, is_value_of_part in parts
        }


class SiteRegistry(Interceptor):
    """Interceptor that records the sites (attention modules, in self- or cross-attention) at which a model attends
    while it runs, and the modules whose attention could not be read.

    Subclasses override `observe` or `change` and call `register` in them.

    Attributes:
        clusters: number of the cluster of each sequence of the next call of the model; None if all are independent.
    """

    clusters: Clusters | None = None

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._records: dict[SiteKey, SiteRecord] = {}
        self._ran: set[str] = set()
        self._unreadable: dict[str, set[str]] = {}
        self._withdrawn: set[str] = set()
        self._left_out: dict[str, set[str]] = {}

    def on_module_call(self, path: str) -> None:
        """Record that the module at `path` ran."""
        self._ran.add(path)

    def on_unreadable(self, path: str, reason: str) -> None:
        """Record that the module at `path` computed something like attention that could not be observed, and the
        `reason`. If it is really attention, the results leave out the whole module, since statistics of only some of
        its attention would be misleading.
        """
        self._unreadable.setdefault(reason, set()).add(path)
        if reason not in REASONS_BESIDE_ATTENTION:
            self._withdrawn.add(path)

    def on_left_out(self, path: str, reason: str) -> None:
        """Record that some statistics of the module at `path` are left out of the results, and the reason."""
        self._left_out.setdefault(reason, set()).add(path)

    def register(self, call: Call) -> SiteRecord:
        """Return the record of the site (attention module, self or cross) where an attention call happens. At the
        site's first call, the record is created.

        Raises:
            InputError: the module has another number of heads than in an earlier call.
        """
        heads, kv_heads = call.grid.heads, call.kv_heads
        record = self._records.get(call.site)
        if record is None:
            record = self._records.setdefault(call.site, SiteRecord(call.site, call.layer, heads, kv_heads))
        if (record.heads, record.kv_heads) != (heads, kv_heads):
            expected = f"{record.heads} heads, {record.kv_heads} of keys and values, in every call of {call.site.path}"
            raise InputError("model", expected=expected, got=f"{heads}, {kv_heads} of keys and values")
        return record

    def merge(self, records: Iterable[SiteRecord]) -> None:
        """Merge the site records of another run or process of the same model into this registry, in place. New sites
        (attention modules, self or cross) are added, and the statistics of known sites are combined.
        """
        for other in records:
            record = self._records.setdefault(
                other.site, SiteRecord(other.site, other.layer, other.heads, other.kv_heads)
            )
            record.merge(other.statistics)
            record.nonfinite_rows += other.nonfinite_rows

    @property
    def ran(self) -> bool:
        """True once the model or one of its modules was called."""
        return bool(self._ran)

    @property
    def records(self) -> list[SiteRecord]:
        """Records of all sites (attention modules, self or cross) where the model attended, in the order of the model's
        modules.
        """
        order = {path: index for index, path in enumerate(self._modules)}
        records = [record for record in self._records.values() if record.site.path not in self._withdrawn]
        return sorted(records, key=lambda record: (order[record.site.path], *record.site[1:]))

    @property
    def layers(self) -> list[int]:
        """Layer number of each element of `records`. If the modules store a number for every element, and no two are
        equal, these numbers are used. Otherwise the attention modules of the model are numbered in order.
        """
        return layer_numbers(self._modules, {record.site: record.layer for record in self.records})

    def head_labels(self) -> Iterator[tuple[SiteRecord, dict[str, Any]]]:
        """Yield, for every head of the model, the record of its site (attention module, self or cross) and a dict of
        its labels: layer, head, kv_head (the key/value head that this head uses), module (path), kind ("self" or
        "cross").
        """
        for layer, record in zip(self.layers, self.records, strict=True):
            module, kind = record.site.label, "cross" if record.site.cross else "self"
            for head in range(record.heads):
                kv_head = head * record.kv_heads // record.heads
                yield record, {"layer": layer, "head": head, "kv_head": kv_head, "module": module, "kind": kind}

    @property
    def nonfinite(self) -> dict[str, int]:
        """Number of query rows in which attention weights or head outputs are NaN or infinite, by module path. The rows
        of all heads and sequences are counted. Modules are in the order in which they first attended.
        """
        rows: dict[str, int] = {}
        for site, record in self._records.items():
            if record.nonfinite_rows and site.path not in self._withdrawn:
                rows[site.path] = rows.get(site.path, 0) + record.nonfinite_rows
        return rows

    @property
    def unread(self) -> list[str]:
        """Paths of the modules that ran and seem to compute attention, by their class name or their computation, but
        whose attention could not be observed.
        """
        return sorted(set().union(*self._paths_by_reason().values()))

    def _paths_by_reason(self) -> dict[str, set[str]]:
        """Return the paths of the modules whose attention is missing in the results, grouped by the reason. The reason
        `NOT_SEEN` applies to modules that ran and are called attention, but in which no attention was found.
        """
        recorded = [*(site.path for site in self._records), *set().union(*self._unreadable.values())]
        innermost = innermost_attention_modules(self._modules, self._ran)
        not_seen = {path for path in innermost if not any(is_related(path, other) for other in recorded)}
        paths = {reason: set(paths) for reason, paths in self._unreadable.items()}
        seen = [site.path for site in self._records]
        not_followed = {
            path for path in paths.pop(NOT_FOLLOWED, ()) if not any(is_related(path, other) for other in seen)
        }
        if not_followed:
            paths[NOT_FOLLOWED] = not_followed
        if not_seen:
            paths[NOT_SEEN] = paths.get(NOT_SEEN, set()) | not_seen
        return paths

    def require_stated(self, paths: Iterable[str]) -> None:
        """Raise `InputError` if the model ran, but no attention was found in one of the modules at `paths`: those
        that the user has named in the argument `sites` of `watch`.
        """
        seen = [*(site.path for site in self._records), *set().union(*self._unreadable.values())]
        for path in paths if self.ran else ():
            if not any(path == other or is_inside(other, path) for other in seen):
                raise InputError("sites", expected="modules in which attention is seen", got=f"none in {path}")

    def require_attention(self) -> None:
        """Raise `InputError` if the model did not run while it was observed, or if no attention was found in it."""
        if not self.ran:
            raise InputError("model", expected="a model that ran while it was watched", got="none", remedy="call it")
        if not self.records:
            names = self._names(self.unread) or self._names([""])
            reasons = sorted(self._paths_by_reason().keys() - {NOT_SEEN})
            got = "; ".join([f"none in {names}", *reasons])
            raise InputError("model", expected="attention in a way that can be seen", got=got)

    def _names(self, paths: Iterable[str]) -> str:
        """Return module paths as one text for messages, sorted and joined by commas. The empty path, which is the path
        of the model itself, is replaced by the name of the model's class.
        """
        return ", ".join(path or type(self._modules[""]).__name__ for path in sorted(paths))

    def warn_of_unread(self, stacklevel: int = 4) -> None:
        """Warn about modules that are missing in the results or lack some statistics: one warning for each reason, with
        the modules' paths. `stacklevel` selects the calling frame that the warning names, as in `warnings.warn`.

        Args:
            stacklevel: frame that the warning names; by default the caller of a context manager that ends with it.
        """
        for paths_by_reason in (self._paths_by_reason(), self._left_out):
            for reason, paths in sorted(paths_by_reason.items()):
                warnings.warn(f"{reason}: {self._names(paths)}", stacklevel=stacklevel)

    def warn_of_nonfinite(self, stacklevel: int = 4) -> None:
        """Issue up to two warnings. The first names the modules in which attention weights or head outputs were NaN or
        infinite, with the number of such query rows in each. The second names the heads in which no query attends to a
        key.

        Args:
            stacklevel: frame that the warnings name, as in `warnings.warn`.
        """
        if self.nonfinite:
            modules = ", ".join(f"{self._names([path])} ({rows} rows)" for path, rows in self.nonfinite.items())
            reason = "attention weights or head outputs are NaN or infinite, so statistics of their heads are NaN"
            warnings.warn(f"{reason}: {modules}", stacklevel=stacklevel)
        reason = "no query of some heads attends to a key, so the statistics of these heads are NaN"
        without = [f"{self._names([record.site.path])} (heads {heads})" for record, heads in self._heads_without_rows()]
        if without:
            warnings.warn(f"{reason}: {', '.join(without)}", stacklevel=stacklevel)

    def _heads_without_rows(self) -> Iterator[tuple[SiteRecord, str]]:
        """Yield the record of each attention module in which some heads attend to no key in any query, while other
        heads do attend. With the record, yield the indices of the heads that do not attend, as text such as "0, 3". An
        example is a head whose attention weights the model multiplies by 0.
        """
        for record in self.records:
            is_empty = record.are_without_rows()
            if any(is_empty) and not all(is_empty):
                yield record, ", ".join(str(head) for head, is_without in enumerate(is_empty) if is_without)
