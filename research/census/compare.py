"""Definition of every statistic of every head, from whole matrices in float64, and its comparison with `hw.watch`.

The definitions are those of docs/watch.md. `truth` averages them as a watch does: each sequence of each call of a site
counts once, and sequences without a counted row do not count.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from research.census.reference import Weights

SHARES = (
    "evenness",
    "confidence",
    "self",
    "previous",
    "next",
    "first",
    "special",
    "duplicate",
    "induction",
    "received",
)
"""Statistics with absolute errors. Errors of other statistics are divided by 1 + |expected value|."""
OF_POSITIONS = ("distance", "self", "previous", "next", "duplicate", "induction")
"""Statistics that need positions of queries and keys in the same sequence. Cross-attention does not have them."""
BUDGET = 1e-5
"""Largest accepted error."""


def statistics(
    weights: Tensor,
    *,
    tokens: Tensor | None = None,
    special: Tensor | None = None,
    counts: Tensor | None = None,
    first: Tensor | None = None,
    real: Tensor | None = None,
    out: Tensor | None = None,
    projection: Tensor | None = None,
    cross: bool = False,
) -> dict[str, Tensor]:
    """Return every statistic of every head of every sequence, `(batch, heads)`; NaN where no row counts.

    Args:
        weights: `(batch, heads, queries, keys)`; a key with weight 0 counts as hidden.
        tokens: token ids of the keys, `(batch, keys)`.
        special: True at keys that are special tokens, `(batch, keys)`.
        counts: True at rows that count, `(batch or 1, heads or 1, queries)`; by default rows with a visible key.
        first: index of the key of the first token, `(batch,)`; 0 by default.
        real: True at keys that are not padding, `(batch, keys)`; all by default.
        out: the output of every head, `(batch, heads, queries, value_dim)`.
        projection: of the heads' concatenated outputs, `(heads * value_dim, width)`.
        cross: whether the keys are another sequence than the queries, so that statistics of positions do not exist.
    """
    a = weights.double()
    batch, heads, queries, keys = a.shape
    i, j = torch.arange(queries)[:, None], torch.arange(keys)[None]
    p = i + keys - queries
    counted = a.sum(-1) != 0
    if counts is not None:
        counted = counted & counts
    visible_keys = (a > 0).sum(-1)
    is_near = torch.ones(batch, queries, keys, dtype=torch.bool) if queries != keys or cross else _documents(a > 0)
    is_near = is_near if real is None else is_near & real[:, None]
    result: dict[str, Tensor] = {}

    def mean(name: str, value: Tensor, where: Tensor | None = None) -> None:
        """Store the mean of `value` over the counted rows of each head, restricted to the rows in `where`."""
        rows = counted if where is None else counted & where
        row_count = rows.sum(-1)
        total = value.masked_fill(~rows, 0.0).sum(-1)
        result[name] = (total / row_count).masked_fill(row_count == 0, math.nan)

    entropy = -(a * a.clamp(min=1e-300).log()).sum(-1)
    mean("entropy", entropy)
    mean("evenness", entropy / visible_keys.double().clamp(min=2).log(), visible_keys > 1)
    mean("confidence", a.amax(-1))
    mean("distance", (a * (p - j).abs()).sum(-1))
    for name, offset in (("self", 0), ("previous", 1), ("next", -1)):
        key = (p - offset)[:, 0]
        is_key = (key >= 0) & (key < keys) & is_near[:, i[:, 0], key.clamp(0, keys - 1)][:, None]
        weight_of_key = a.gather(-1, key.clamp(0, keys - 1).view(1, 1, -1, 1).expand(batch, heads, -1, 1))[..., 0]
        mean(name, weight_of_key, is_key)
    start = torch.zeros(batch, dtype=torch.int64) if first is None else first
    start = (is_near & (j >= start[:, None, None])).int().argmax(-1)
    mean("first", a.gather(-1, start[:, None, :, None].expand(-1, heads, -1, 1))[..., 0])
    if special is not None:
        mean("special", (a * special[:, None, None]).sum(-1))
    if tokens is not None and not cross:
        query_tokens = tokens.gather(1, p[:, 0].clamp(min=0).expand(batch, -1))
        is_copy = (query_tokens[..., None] == tokens[:, None]) & (j < p) & (p >= 0) & is_near  # (batch, queries, keys)
        mean("duplicate", (a * is_copy[:, None]).sum(-1), is_copy.any(-1)[:, None])
        # The key after an earlier copy; the last key has none after it, and a copy at p - 1 is followed by p itself.
        after_copy = torch.zeros_like(is_copy)
        after_copy[..., 1:] = is_copy[..., :-1]
        mean("induction", (a * after_copy[:, None]).sum(-1), after_copy.any(-1)[:, None])
    result["received"] = _received(a, counted)
    if out is not None:
        mean("output_norm", out.double().norm(dim=-1))
    if out is not None and projection is not None:
        written = out.double() @ projection.double().unflatten(0, (heads, -1))
        mean("written_norm", written.norm(dim=-1))
    return {name: value for name, value in result.items() if not (cross and name in OF_POSITIONS)}


def _received(weights: Tensor, counted: Tensor) -> Tensor:
    """Return the largest mean weight of a key over the counted rows that may see it, `(batch, heads)`. Keys that few
    rows see do not count.
    """
    received = (weights * counted[..., None]).sum(-2)
    visible_rows = ((weights > 0) & counted[..., None]).sum(-2)
    most_rows = visible_rows.amax(-1, keepdim=True)
    is_seen_by_few = (2 * visible_rows < most_rows) | (visible_rows == 0)
    share = (received / visible_rows).masked_fill(is_seen_by_few, -torch.inf).amax(-1)
    return share.masked_fill(most_rows[..., 0] == 0, math.nan)


def _documents(visible: Tensor) -> Tensor:
    """Return True where two tokens are in one document, `(batch, tokens, tokens)`: a chain of queries that attend to
    keys in any head of `visible (batch, heads, tokens, tokens)` connects them.
    """
    reach = visible.any(1)
    reach = reach | reach.mT | torch.eye(reach.shape[-1], dtype=torch.bool)
    for _ in range(reach.shape[-1].bit_length()):
        reach = (reach.double() @ reach.double()) > 0
    return reach


@dataclass
class SiteStatistics:
    """Reference statistics of one attention site, the module path and whether it is cross-attention.

    Attributes:
        path: the module path.
        cross: whether the site is cross-attention.
        route: how the module computes attention, such as "sdpa".
        heads: number of heads.
        values: by statistic, one tensor `(batch, heads)` for each call.
        calls: number of calls so far.
    """

    path: str
    cross: bool
    route: str
    heads: int
    values: dict[str, list[Tensor]] = field(default_factory=dict)
    calls: int = 0

    def add(self, statistics_of_call: dict[str, Tensor]) -> None:
        """Store the statistics of one call."""
        self.calls += 1
        for name, value in statistics_of_call.items():
            self.values.setdefault(name, []).append(value)

    def means(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return, by statistic, the mean over sequences and the number of sequences that have a value, both
        `(heads,)`.
        """
        result = {}
        for name, parts in self.values.items():
            values = torch.cat(parts)
            result[name] = values.nanmean(0), (~values.isnan()).sum(0)
        return result


def truth(calls: Iterable[Weights], special: Iterable[int]) -> dict[tuple[str, bool], SiteStatistics]:
    """Return the reference statistics of every site of the recorded calls, by module path and whether it is
    cross-attention.
    """
    sites: dict[tuple[str, bool], SiteStatistics] = {}
    for call in calls:
        batch, heads, queries, keys = call.weights.shape
        real, tokens = (
            tensor if queries == keys and tensor is not None and tensor.shape == (batch, keys) else None
            for tensor in (call.padding, call.tokens)
        )
        real_queries = real
        if call.cross:
            # Padding of the decoder; that of the encoder follows from the keys that no row sees.
            is_of_queries = call.padding is not None and call.padding.shape == (batch, queries) and queries != keys
            real_queries = call.padding if is_of_queries else None
            tokens = call.key_tokens
        counts = torch.ones(1, 1, queries, dtype=torch.bool)
        if real_queries is not None:
            counts = counts & real_queries[:, None]
        if call.hidden is not None:
            counts = counts & ~call.hidden
        if call.cross:
            real = ((call.weights > 0) & counts[..., None]).any(2).any(1)
        out = call.out
        if out is not None and out.shape[:3] != call.weights.shape[:3]:
            out = None
        call_statistics = statistics(
            call.weights,
            tokens=tokens,
            special=None if tokens is None else torch.isin(tokens, torch.tensor(list(special))),
            counts=counts,
            first=None if real is None else real.int().argmax(-1),
            real=real,
            out=out,
            projection=None if out is None else call.projection,
            cross=call.cross,
        )
        site = sites.setdefault((call.path, call.cross), SiteStatistics(call.path, call.cross, call.route, heads))
        site.add(call_statistics)
    return sites


@dataclass
class Difference:
    """A statistic of one head whose watched value differs from its definition.

    Attributes:
        path: the module path of the site.
        statistic: name of the statistic, "heads", or "number of ..." for a different count.
        head: index of the head.
        got: the watched value.
        expected: the value by definition.
        error: the error that exceeds the budget.
    """

    path: str
    statistic: str
    head: int
    got: float
    expected: float
    error: float


@dataclass
class Comparison:
    """Differences between the statistics of a watch and the reference.

    Attributes:
        missed: sites of the reference that the watch did not observe.
        beyond: sites that the watch observed and the reference does not have.
        differences: for each site and statistic over the budget, the head with the largest error.
        absent: statistics of the reference that the watch did not measure.
        unchecked: statistics of the watch that the reference does not have.
        worst: the largest error; the budget is 1e-5.
        worst_at: site, statistic and head of the largest error.
        compared: number of compared values.
    """

    missed: list[str] = field(default_factory=list)
    beyond: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    worst: float = 0.0
    worst_at: str = ""
    compared: int = 0


def compare(records: Iterable[Any], reference: dict[tuple[str, bool], SiteStatistics]) -> Comparison:
    """Compare every statistic of every head in the watched records with the reference statistics of its site."""
    comparison = Comparison()
    sites = _joined({(record.site.label, record.site.cross): record for record in records}, reference)
    comparison.missed = [f"{path}{' (cross)' * cross}" for path, cross in reference if (path, cross) not in sites]
    comparison.beyond = [f"{path}{' (cross)' * cross}" for path, cross in sites if (path, cross) not in reference]
    for key, expected_site in reference.items():
        if key not in sites:
            continue
        record = sites[key]
        if record.heads != expected_site.heads:
            comparison.differences.append(
                Difference(expected_site.path, "heads", 0, record.heads, expected_site.heads, math.inf)
            )
            continue
        means = expected_site.means()
        comparison.unchecked += [f"{expected_site.path}: {name}" for name in record.statistics if name not in means]
        for name, (expected, count) in means.items():
            moments = record.statistics.get(name)
            if moments is None:
                comparison.absent.append(f"{expected_site.path}: {name}")
                continue
            got = moments.value
            comparison.compared += got.numel()
            if moments.count.long().tolist() != count.tolist():
                comparison.differences.append(
                    Difference(
                        expected_site.path, f"number of {name}", 0, float(moments.count[0]), float(count[0]), math.inf
                    )
                )
                continue
            error = (got - expected).abs().nan_to_num(0.0)
            if (got.isnan() != expected.isnan()).any():
                error = torch.full_like(error, math.inf)
            if name not in SHARES:
                error = error / (1 + expected.abs().nan_to_num(0.0))
            head = int(error.argmax())
            largest = float(error[head])
            if largest > comparison.worst:
                comparison.worst, comparison.worst_at = largest, f"{expected_site.path} {name} head {head}"
            if not largest <= BUDGET:
                comparison.differences.append(
                    Difference(expected_site.path, name, head, float(got[head]), float(expected[head]), largest)
                )
    return comparison


def _joined(sites: dict, places: dict) -> dict:
    """Return watched records by the reference's sites. A softmax module inside of an attention module counts as that
    attention module, and the reverse.
    """
    joined = {}
    for (path, cross), site in sites.items():
        for candidate in (path, path.rpartition(".")[0]):
            if (candidate, cross) in places:
                joined[candidate, cross] = site
                break
        else:
            inside = [key for key in places if key[0].rpartition(".")[0] == path and key[1] == cross]
            joined[inside[0] if len(inside) == 1 else (path, cross)] = site
    return joined
