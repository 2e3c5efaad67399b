"""Where a model was seen to attend, and numbers of the heads that stand there."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from headwise.errors import InputError
from headwise.intercept.interceptor import Call
from headwise.intercept.layer_index import innermost, numbers, related
from headwise.shapes import Float
from headwise.statistics.registry import Tally


@dataclass
class RunningMoments:
    """Number, mean and squared deviations of values that come in parts, and merge (Chan, Golub and LeVeque 1983)."""

    number: Float[Tensor, " heads"]
    mean: Float[Tensor, " heads"]
    deviations: Float[Tensor, " heads"]

    @staticmethod
    def of(values: Float[Tensor, "sequences heads"]) -> "RunningMoments":
        """Of values some of which are NaN, which do not count."""
        there = ~values.isnan()
        number = there.sum(0).double()
        mean = values.nan_to_num(0.0).sum(0) / number.clamp(min=1)
        return RunningMoments(number, mean, ((values - mean).masked_fill(~there, 0.0) ** 2).sum(0))

    def merge(self, other: "RunningMoments") -> "RunningMoments":
        """Of both parts together."""
        number = self.number + other.number
        share = other.number / number.clamp(min=1)
        apart = other.mean - self.mean
        deviations = self.deviations + other.deviations + apart**2 * self.number * share
        return RunningMoments(number, self.mean + apart * share, deviations)

    @property
    def value(self) -> Float[Tensor, " heads"]:
        """The mean; NaN of nothing."""
        return self.mean.masked_fill(self.number == 0, math.nan)

    @property
    def standard_error(self) -> Float[Tensor, " heads"]:
        """Of the mean; NaN of fewer than two."""
        variance = self.deviations / (self.number - 1).clamp(min=1)
        return (variance / self.number.clamp(min=1)).sqrt().masked_fill(self.number < 2, math.nan)


@dataclass
class Site:
    """A place in a model where attention is computed.

    Attributes:
        path: the module.
        layer: the number the model gives it, if any.
        heads, kv_heads: how many there are.
        cross: whether it attends to something else than its own input.
        statistics: over the sequences seen, by name.
    """

    path: str
    layer: int | None
    heads: int
    kv_heads: int
    cross: bool
    statistics: dict[str, RunningMoments] = field(default_factory=dict)

    def add(self, tally: Tally) -> None:
        """Take in a call."""
        for name, values in tally.means().items():
            self.merge({name: RunningMoments.of(values.double().cpu())})

    def merge(self, statistics: Mapping[str, RunningMoments]) -> None:
        """Take in other sequences."""
        for name, spread in statistics.items():
            mine = self.statistics.get(name)
            self.statistics[name] = spread if mine is None else mine.merge(spread)


class SiteRegistry:
    """Where a model was seen to attend, and where it was not."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._sites: dict[tuple[str, bool], Site] = {}
        self._ran: set[str] = set()
        self._unread: set[str] = set()

    def runs(self, path: str) -> None:
        """See `Interceptor`."""
        self._ran.add(path)

    def misses(self, path: str) -> None:
        """See `Interceptor`."""
        self._unread.add(path)

    @property
    def ran(self) -> bool:
        """Whether the model was called."""
        return bool(self._ran)

    def site(self, call: Call) -> Site:
        """That of a call. `InputError` where the module has other heads than before."""
        heads, kv_heads = call.grid.heads, call.kv_heads
        site = self._sites.setdefault((call.path, call.cross), Site(call.path, call.layer, heads, kv_heads, call.cross))
        if (site.heads, site.kv_heads) != (heads, kv_heads):
            raise InputError("model", expected=f"{site.heads} heads in every call of {call.path}", got=heads)
        return site

    def merge(self, sites: Iterable[Site]) -> None:
        """Take in what was seen elsewhere of the same model: before, or by another process."""
        for other in sites:
            site = self._sites.setdefault((other.path, other.cross), replace(other, statistics={}))
            site.merge(other.statistics)

    @property
    def sites(self) -> list[Site]:
        """Where attention was computed, in the order of the model's modules."""
        order = {path: place for place, path in enumerate(self._modules)}
        return sorted(self._sites.values(), key=lambda site: (order[site.path], site.cross))

    @property
    def layers(self) -> list[int]:
        """The number of each site's layer: the model's own where no two are alike, and otherwise in order."""
        return numbers([site.layer for site in self.sites])

    def places(self) -> Iterator[tuple[Site, dict[str, Any]]]:
        """Every head's site, and what it is in words: layer, head, kv_head, module, kind."""
        for layer, site in zip(self.layers, self.sites, strict=True):
            for head in range(site.heads):
                kv_head, kind = head * site.kv_heads // site.heads, "cross" if site.cross else "self"
                yield site, {"layer": layer, "head": head, "kv_head": kv_head, "module": site.path, "kind": kind}

    @property
    def missed(self) -> list[str]:
        """Modules that ran, are called attention, and computed some that was not seen."""
        inner = innermost(self._modules, self._ran)
        seen = [site.path for site in self._sites.values()]
        return sorted(self._unread.union(path for path in inner if not any(related(path, other) for other in seen)))

    def require_some(self) -> None:
        """Refuse a model that did not run, or in which no attention was seen."""
        if not self.ran:
            raise InputError("model", expected="a model that ran while it was watched", got="none", remedy="call it")
        if not self._sites:
            names = ", ".join(self.missed) or type(self._modules[""]).__name__
            raise InputError("model", expected="attention in a way that can be seen", got=f"none in {names}")

    def warn_of_missed(self) -> None:
        """Name the modules that were missed, if there are any, to who called the context that ends."""
        if self.missed:
            warnings.warn(f"attention of these modules was not seen: {', '.join(self.missed)}", stacklevel=4)
