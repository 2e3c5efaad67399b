"""`watch`: what every head of any model does while it runs, in numbers."""

import math
import threading
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.detail import Detail, Kept
from headwise.attention.known import Known
from headwise.attention.rows import Rows
from headwise.attention.statistics import Tally
from headwise.errors import InputError, MissingExtra
from headwise.models.intercept import intercepted
from headwise.models.layers import innermost, numbers, related
from headwise.models.projections import gram_of, output_projection
from headwise.models.running import Call, Change, Look
from headwise.shapes import Float


@dataclass
class Spread:
    """Number, mean and squared deviations of values that come in parts, and merge (Chan, Golub and LeVeque 1983)."""

    number: Float[Tensor, " heads"]
    mean: Float[Tensor, " heads"]
    deviations: Float[Tensor, " heads"]

    @staticmethod
    def of(values: Float[Tensor, "sequences heads"]) -> "Spread":
        """Of values some of which are NaN, which do not count."""
        there = ~values.isnan()
        number = there.sum(0).double()
        mean = values.nan_to_num(0.0).sum(0) / number.clamp(min=1)
        return Spread(number, mean, ((values - mean).masked_fill(~there, 0.0) ** 2).sum(0))

    def merge(self, other: "Spread") -> "Spread":
        """Of both parts together."""
        number = self.number + other.number
        share = other.number / number.clamp(min=1)
        apart = other.mean - self.mean
        deviations = self.deviations + other.deviations + apart**2 * self.number * share
        return Spread(number, self.mean + apart * share, deviations)

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
    statistics: dict[str, Spread] = field(default_factory=dict)

    def add(self, tally: Tally) -> None:
        """Take in a call."""
        for name, values in tally.means().items():
            self.merge({name: Spread.of(values.double().cpu())})

    def merge(self, statistics: Mapping[str, Spread]) -> None:
        """Take in other sequences."""
        for name, spread in statistics.items():
            mine = self.statistics.get(name)
            self.statistics[name] = spread if mine is None else mine.merge(spread)


class _OfThread(threading.local):
    """What is known of the calls that a model makes in this thread, by the tensors that say it."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], tuple[Known, object]] = {}


class Heads:
    """Every head of a model that was watched, once it has run. Sequences count alike, and calls add up."""

    def __init__(self, model: nn.Module, special: Collection[int], detail: Detail | None = None) -> None:
        self._modules = dict(model.named_modules())
        self._special = torch.tensor(sorted(special), dtype=torch.int64)
        self._sites: dict[tuple[str, bool], Site] = {}
        self._ran: set[str] = set()
        self._unread: set[str] = set()
        self._detail = detail
        self._kept: dict[tuple[str, bool], Kept] = {}
        self._projections: dict[str, nn.Module | None] = {}
        self._of_thread, self._lock = _OfThread(), threading.Lock()

    # -- what is told while it runs -----------------------------------------------------------------------------------

    def starts(self) -> None:
        """See `Visitor`: what is known of the calls of another run is forgotten."""
        self._of_thread.known = {}

    def runs(self, path: str) -> None:
        """See `Visitor`."""
        self._ran.add(path)

    def misses(self, path: str) -> None:
        """See `Visitor`."""
        self._unread.add(path)

    def sees(self, call: Call) -> Look:
        """See `Visitor`."""
        heads, kv_heads = call.grid.heads, call.kv_heads
        site = self._sites.setdefault((call.path, call.cross), Site(call.path, call.layer, heads, kv_heads, call.cross))
        if (site.heads, site.kv_heads) != (heads, kv_heads):
            raise InputError("model", expected=f"{site.heads} heads in every call of {call.path}", got=heads)
        tally, kept = Tally(self._gram(call)), None if self._detail is None else Kept(self._detail, call.grid)

        def observer(rows: Rows) -> None:
            tally.add(rows)
            if kept is not None:
                kept.add(rows)

        def ends() -> None:
            with self._lock:
                site.add(tally)
                if kept is not None:
                    self._kept[call.path, call.cross] = kept

        return Look(observer, self._known(call), ends)

    def changes(self, call: Call) -> Change | None:
        """See `Visitor`."""
        return None

    def _gram(self, call: Call) -> Float[Tensor, "heads value_dim value_dim"] | None:
        """What says how much of a head's output is written, where the output projection is found."""
        heads, width = call.grid.heads, call.value_dim
        if width is None:
            return None
        if call.path not in self._projections:
            self._projections[call.path] = output_projection(self._modules[""], call.path, heads * width)
        found = self._projections[call.path]
        return None if found is None else gram_of(found, heads, width)

    def _known(self, call: Call) -> Known:
        """What the inputs say of a call of self-attention over all of them: the same object in every layer."""
        grid, shape = call.grid, (call.grid.batch, call.grid.keys)
        is_own = not call.cross and grid.queries == grid.keys
        tokens, padding = (
            each if is_own and each is not None and each.shape == shape else None
            for each in (call.tokens, call.padding)
        )
        kept, question = self._of_thread.known, (id(tokens), id(padding))
        if question not in kept:
            special = None
            if tokens is not None and len(self._special):
                special = torch.isin(tokens, self._special.to(tokens.device))
            real = None if padding is None or bool(padding.all()) else padding.bool()
            kept[question] = Known(tokens, special, real), (tokens, padding)  # which keep their identities
        return kept[question][0]

    def merge(self, sites: Iterable[Site]) -> None:
        """Take in what was seen elsewhere of the same model: before, or by another process."""
        for other in sites:
            site = self._sites.setdefault((other.path, other.cross), replace(other, statistics={}))
            site.merge(other.statistics)

    # -- what is asked afterwards -------------------------------------------------------------------------------------

    @property
    def sites(self) -> list[Site]:
        """Where attention was computed, in the order of the model's modules."""
        order = {path: place for place, path in enumerate(self._modules)}
        return sorted(self._sites.values(), key=lambda site: (order[site.path], site.cross))

    @property
    def details(self) -> dict[str, Kept]:
        """What was kept of the last call of each module, by its path; `path, cross` where it attends in both ways."""
        found = {}
        for site in self.sites:
            both = (site.path, not site.cross) in self._sites
            kept = self._kept.get((site.path, site.cross))
            if kept is not None:
                found[f"{site.path}, cross" if both and site.cross else site.path] = kept
        return found

    @property
    def layers(self) -> list[int]:
        """The number of each site's layer: the model's own where no two are alike, and otherwise in order."""
        return numbers([site.layer for site in self.sites])

    @property
    def missed(self) -> list[str]:
        """Modules that ran, are called attention, and computed some that was not seen."""
        inner = innermost(self._modules, self._ran)
        seen = [site.path for site in self._sites.values()]
        return sorted(self._unread.union(path for path in inner if not any(related(path, other) for other in seen)))

    def rows(self) -> list[dict[str, Any]]:
        """One row a head: layer, head, kv_head, module, kind, and the mean of every statistic over the sequences."""
        self._require_some()
        rows = []
        for layer, site in zip(self.layers, self.sites, strict=True):
            values = {name: spread.value.tolist() for name, spread in site.statistics.items()}
            for head in range(site.heads):
                rows.append(
                    {
                        "layer": layer,
                        "head": head,
                        "kv_head": head * site.kv_heads // site.heads,
                        "module": site.path,
                        "kind": "cross" if site.cross else "self",
                        **{name: of_heads[head] for name, of_heads in values.items()},
                    }
                )
        return rows

    def table(self) -> Any:
        """The rows as a pandas DataFrame; see `rows`.

        Raises:
            InputError: nothing was seen.
            MissingExtra: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise MissingExtra("pandas", extra="tables", purpose="a table") from error
        return pandas.DataFrame(self.rows())

    def _require_some(self) -> None:
        if not self._ran:
            raise InputError("model", expected="a model that ran while it was watched", got="none", remedy="call it")
        if not self._sites:
            names = ", ".join(self.missed) or type(self._modules[""]).__name__
            raise InputError("model", expected="attention in a way that can be seen", got=f"none in {names}")


@contextmanager
def watch(model: Any, *, special: Collection[int] = (), detail: Any = None) -> Iterator[Heads]:
    """Within the context, every attention call of the model adds to the statistics of its heads.

    Args:
        model: any module, of torch, `transformers` or one's own. It computes what it did, but for rounding.
        special: ids of the tokens that count as special, such as `tokenizer.all_special_ids`.
        detail: a `Detail`: what to keep of the weights of the last call of each module, for `Heads.details`.

    Raises:
        InputError: when the context ends, if the model ran and nothing was seen; no module; a compiled one; an
            attention implementation of `transformers` whose masks cannot be read.

    Warns:
        UserWarning: when the context ends, of modules that ran and are called attention, but were not seen to compute
            any.
    """
    if not isinstance(model, nn.Module):
        raise InputError("model", expected="a torch module", got=type(model).__name__)
    if detail is not None and not isinstance(detail, Detail):
        raise InputError("detail", expected="a headwise Detail or None", got=type(detail).__name__)
    heads = Heads(model, special, detail)
    with intercepted(model, heads):
        yield heads
    if heads._ran:
        heads._require_some()
    if heads.missed:
        warnings.warn(f"attention of these modules was not seen: {', '.join(heads.missed)}", stacklevel=3)
