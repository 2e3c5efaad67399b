"""Every statistic of every head by its definition, from whole matrices in float64, compared with `hw.watch`.

The definitions are those of docs/watch.md. `Truth` averages them as a watch does: each sequence of each call of a
place counts once, those in which no row counts do not.
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
"""Statistics whose error is absolute; that of others is relative as well."""
BUDGET = 1e-5


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
) -> dict[str, Tensor]:
    """Every statistic of every head of every sequence, `(batch, heads)`; NaN where no row counts.

    Args:
        weights: `(batch, heads, queries, keys)`; a key with weight 0 is out of sight.
        tokens: of the keys, `(batch, keys)`.
        special: keys that are special tokens, `(batch, keys)`.
        counts: rows that count, `(batch or 1, heads or 1, queries)`; those with a key, unless given.
        first: the key of the first token, `(batch,)`; 0 unless given.
        real: keys that are no padding, `(batch, keys)`; all unless given.
        out: the output of every head, `(batch, heads, queries, value_dim)`.
        projection: of the heads' outputs side by side, `(heads * value_dim, width)`.
    """
    a = weights.double()
    batch, heads, queries, keys = a.shape
    i, j = torch.arange(queries)[:, None], torch.arange(keys)[None]
    p = i + keys - queries
    counted = a.sum(-1) != 0
    if counts is not None:
        counted = counted & counts
    seen = (a > 0).sum(-1)
    found: dict[str, Tensor] = {}

    def mean(name: str, value: Tensor, where: Tensor | None = None) -> None:
        here = counted if where is None else counted & where
        number = here.sum(-1)
        total = value.masked_fill(~here, 0.0).sum(-1)
        found[name] = (total / number).masked_fill(number == 0, math.nan)

    entropy = -(a * a.clamp(min=1e-300).log()).sum(-1)
    mean("entropy", entropy)
    mean("evenness", entropy / seen.double().clamp(min=2).log(), seen > 1)
    mean("confidence", a.amax(-1))
    mean("distance", (a * (p - j).abs()).sum(-1))
    for name, back in (("self", 0), ("previous", 1), ("next", -1)):
        key = (p - back)[:, 0]
        there = (key >= 0) & (key < keys)
        if real is not None:
            there = there & real[:, key.clamp(0, keys - 1)][:, None]
        at = a.gather(-1, key.clamp(0, keys - 1).view(1, 1, -1, 1).expand(batch, heads, -1, 1))[..., 0]
        mean(name, at, there)
    start = torch.zeros(batch, dtype=torch.int64) if first is None else first
    mean("first", a.gather(-1, start.view(-1, 1, 1, 1).expand(-1, heads, queries, 1))[..., 0])
    if special is not None:
        mean("special", (a * special[:, None, None]).sum(-1))
    if tokens is not None:
        own = tokens.gather(1, p[:, 0].clamp(min=0).expand(batch, -1))
        alike = (own[..., None] == tokens[:, None]) & (j < p) & (p >= 0)  # (batch, queries, keys)
        mean("duplicate", (a * alike[:, None]).sum(-1), alike.any(-1)[:, None])
        # The key after an earlier copy; the last key has none after it, and a copy at p - 1 is followed by p itself.
        after = torch.zeros_like(alike)
        after[..., 1:] = alike[..., :-1]
        mean("induction", (a * after[:, None]).sum(-1), after.any(-1)[:, None])
    got = (a * counted[..., None]).sum(-2)
    seen_by = ((a > 0) & counted[..., None]).sum(-2)
    most = seen_by.amax(-1, keepdim=True)
    share = (got / seen_by).masked_fill((2 * seen_by < most) | (seen_by == 0), -torch.inf).amax(-1)
    found["received"] = share.masked_fill(most[..., 0] == 0, math.nan)
    if out is not None:
        mean("output_norm", out.double().norm(dim=-1))
    if out is not None and projection is not None:
        written = out.double() @ projection.double().unflatten(0, (heads, -1))
        mean("written_norm", written.norm(dim=-1))
    return found


@dataclass
class Place:
    """What was computed at one place: values of every sequence of every call."""

    path: str
    cross: bool
    route: str
    heads: int
    values: dict[str, list[Tensor]] = field(default_factory=dict)
    calls: int = 0

    def add(self, found: dict[str, Tensor]) -> None:
        """Take in a call."""
        self.calls += 1
        for name, value in found.items():
            self.values.setdefault(name, []).append(value)

    def means(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The mean over sequences and their number, by statistic and head."""
        result = {}
        for name, parts in self.values.items():
            values = torch.cat(parts)
            result[name] = values.nanmean(0), (~values.isnan()).sum(0)
        return result


def truth(calls: Iterable[Weights], special: Iterable[int]) -> dict[tuple[str, bool], Place]:
    """Return the expected statistics, by path and whether it is cross-attention."""
    places: dict[tuple[str, bool], Place] = {}
    for call in calls:
        batch, heads, queries, keys = call.weights.shape
        known = not call.cross and queries == keys
        real, tokens = (
            each if known and each is not None and each.shape == (batch, keys) else None
            for each in (call.padding, call.tokens)
        )
        counts = torch.ones(1, 1, queries, dtype=torch.bool)
        if real is not None:
            counts = counts & real[:, None]
        if call.hidden is not None:
            counts = counts & ~call.hidden
        out = call.out
        if out is not None and out.shape[:3] != call.weights.shape[:3]:
            out = None
        found = statistics(
            call.weights,
            tokens=tokens,
            special=None if tokens is None else torch.isin(tokens, torch.tensor(list(special))),
            counts=counts,
            first=None if real is None else real.int().argmax(-1),
            real=real,
            out=out,
            projection=None if out is None else call.projection,
        )
        place = places.setdefault((call.path, call.cross), Place(call.path, call.cross, call.route, heads))
        place.add(found)
    return places


@dataclass
class Difference:
    """A statistic of one head that differs from its definition."""

    path: str
    statistic: str
    head: int
    got: float
    expected: float
    error: float


@dataclass
class Comparison:
    """What a watch found, beside what it should have found.

    Attributes:
        missed, beyond: places that it did not see, and that the reference does not know.
        differences: the largest of every place and statistic that is over the budget.
        absent: statistics that the watch did not have.
        unchecked: statistics that the reference did not have.
        worst: the largest error, in parts of which 1e-5 is the budget.
    """

    missed: list[str] = field(default_factory=list)
    beyond: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    worst: float = 0.0
    worst_at: str = ""
    compared: int = 0


def compare(sites: Iterable[Any], places: dict[tuple[str, bool], Place]) -> Comparison:
    """Compare every statistic of every head with its definition."""
    found, sites = Comparison(), {record.site: record for record in sites}
    sites = _joined(sites, places)
    found.missed = [f"{path}{' (cross)' * cross}" for path, cross in places if (path, cross) not in sites]
    found.beyond = [f"{path}{' (cross)' * cross}" for path, cross in sites if (path, cross) not in places]
    for key, place in places.items():
        if key not in sites:
            continue
        site = sites[key]
        if site.heads != place.heads:
            found.differences.append(Difference(place.path, "heads", 0, site.heads, place.heads, math.inf))
            continue
        means = place.means()
        found.unchecked += [f"{place.path}: {name}" for name in site.statistics if name not in means]
        for name, (expected, number) in means.items():
            spread = site.statistics.get(name)
            if spread is None:
                found.absent.append(f"{place.path}: {name}")
                continue
            got = spread.value
            found.compared += got.numel()
            if spread.count.long().tolist() != number.tolist():
                found.differences.append(
                    Difference(place.path, f"number of {name}", 0, float(spread.count[0]), float(number[0]), math.inf)
                )
                continue
            error = (got - expected).abs().nan_to_num(0.0)
            if (got.isnan() != expected.isnan()).any():
                error = torch.full_like(error, math.inf)
            if name not in SHARES:
                error = error / (1 + expected.abs().nan_to_num(0.0))
            head = int(error.argmax())
            largest = float(error[head])
            if largest > found.worst:
                found.worst, found.worst_at = largest, f"{place.path} {name} head {head}"
            if not largest <= BUDGET:
                found.differences.append(
                    Difference(place.path, name, head, float(got[head]), float(expected[head]), largest)
                )
    return found


def _joined(sites: dict, places: dict) -> dict:
    """Sites under the reference's paths: a softmax that is a module of its own counts as the module around it."""
    found = {}
    for (path, cross), site in sites.items():
        for other in (path, path.rpartition(".")[0]):
            if (other, cross) in places:
                found[other, cross] = site
                break
        else:
            inside = [key for key in places if key[0].rpartition(".")[0] == path and key[1] == cross]
            found[inside[0] if len(inside) == 1 else (path, cross)] = site
    return found
