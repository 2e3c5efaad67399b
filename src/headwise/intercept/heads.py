"""Result of `watch`: the statistics of every head of a model."""

import math
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from headwise.errors import InputError, require
from headwise.intercept.interceptor import SiteKey
from headwise.intercept.model_name import model_name
from headwise.intercept.sites import SiteRecord, SiteRegistry
from headwise.page.columns import Columns, HeadPlace, estimates_of
from headwise.page.write import notebook_html
from headwise.plots.curves import chosen_heads, draw_received
from headwise.plots.kinds import HeadNumbers, Kind, plot_kind
from headwise.shapes import Float
from headwise.statistics.columns import column_named
from headwise.statistics.weight_capture import CapturedWeights
from headwise.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Heads(SiteRegistry):
    """Result of `watch`, a context that observes the attention calls of a model: statistics of every attention head.
    Each statistic is averaged over all sequences of all observed calls.

    Each sequence has the same weight in the means, and further calls of the model add to them.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._captured: dict[SiteKey, CapturedWeights] = {}

    def __repr__(self) -> str:
        model, records = model_name(self._modules[""]), self.records
        if not records:
            return f"Heads(no attention of {model} was observed yet)"
        samples = max((int(m.documents.max()) for each in records for m in each.statistics.values()), default=0)
        statistics = counted(len({name for record in records for name in record.statistics}), "statistic")
        heads = counted(sum(record.heads for record in records), "head")
        return f"Heads({heads} of {model}, {statistics} over {counted(samples, 'sequence')})"

    def set_captured(self, site: SiteKey, captured: CapturedWeights) -> None:
        """Store `captured`, attention weights from the latest call at `site` (an attention module, self or cross), in
        place of those from an earlier call at this site.
        """
        self._captured[site] = captured

    @property
    def details(self) -> dict[str, CapturedWeights]:
        """Attention weights captured in the last call at each site (attention module, self or cross), by module path.
        If a module computes several layers itself, the keys of its further layers have a number, such as `blocks[1]`.
        If a module computes self- and cross-attention, the key of the latter ends with `", cross"`. The dict is empty
        if no capture was requested.
        """
        details = {}
        for record in self.records:
            site = record.site
            has_both = site._replace(cross=not site.cross) in self._records
            if site in self._captured:
                details[f"{site.label}, cross" if has_both and site.cross else site.label] = self._captured[site]
        return details

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict per head: layer, head, kv_head (the key/value head that this head uses), module path, kind
        ("self" or "cross"), and the mean of every statistic over all observed sequences.

        Raises:
            InputError: the model did not run, or no attention was intercepted.
        """
        self.require_attention()
        means = {
            record.site: {name: moments.value.tolist() for name, moments in record.statistics.items()}
            for record in self.records
        }
        return [
            {**labels, **{name: by_head[labels["head"]] for name, by_head in means[record.site].items()}}
            for record, labels in self.head_labels()
        ]

    def table(self) -> Any:
        """Return a pandas DataFrame with one row per head: layer, head, kv_head (the key/value head that this head
        uses), module path, kind ("self" or "cross"), and the mean of every statistic over all observed sequences.

        Raises:
            InputError: the model did not run, or no attention was intercepted.
            MissingExtra: pandas is not installed.
        """
        return require("pandas", purpose="a table", extra="tables").DataFrame(self.rows())

    def columns(self) -> Columns:
        """Return the statistics of all heads as a `Columns` object, from which headwise draws pages and plots.

        Raises:
            InputError: the model did not run, or no attention was intercepted.
        """
        self.require_attention()
        names = list(dict.fromkeys(name for record in self.records for name in record.statistics))
        labels = (labels for _, labels in self.head_labels())
        places = tuple(HeadPlace(each["layer"], each["head"], each["kind"], each["module"]) for each in labels)
        table = [[each for record in self.records for each in _estimates(record, name)] for name in names]
        statistics = tuple(column_named(name).on_page("watched calls") for name in names)
        model = model_name(self._modules[""])
        return Columns(model, "watched calls", places, statistics, estimates_of(table), (None,) * len(places))

    def _repr_html_(self) -> str:
        """Return HTML that shows the statistics of all heads in a notebook."""
        if not self.ran or not self.records:
            return "<p>The model did not run while it was watched, or no attention was intercepted.</p>"
        columns = self.columns()
        return notebook_html(f"{len(columns.places)} heads of {columns.model}", columns, columns.contents())

    def received(self) -> dict[tuple[int, int], Float[Tensor, " keys"]]:
        """Return the mean attention weight that each key position received, as one tensor per head, by `(layer, head)`.

        Positions are those of the keys of the latest call at the head's module, with calls that continued each other
        counted as one. For a sequence, the number is the mean weight of a key over the query rows that may attend to it
        (Gu et al. 2024, equation 7), in float64, from 0 to 1. It is averaged over the sequences of the call. It is NaN
        at a position that no query may attend to, such as that of padding. Heads of modules without the statistic
        `received` are missing.

        Raises:
            InputError: the model did not run, or no attention was intercepted.

        Example:
            >>> heads.received()[0, 3]  # head 3 of layer 0  # doctest: +SKIP
        """
        self.require_attention()
        by_site = {record.site: record.latest_received() for record in self.records}
        received = {}
        for record, labels in self.head_labels():
            means = by_site[record.site]
            if means is not None:
                received[labels["layer"], labels["head"]] = means[labels["head"]]
        return received

    def plot(
        self,
        statistic: str | None = None,
        *,
        kind: str = "heatmap",
        against: str | None = None,
        heads: Collection[tuple[int, int]] | None = None,
        errors: float | None = None,
        top: int | None = None,
        ax: Any = None,
    ) -> "Axes":
        """Draw a plot of statistics of the observed heads, and return its matplotlib axes. Notebooks show the plot;
        `ax.figure.savefig("x.svg")` saves it as SVG, PDF or PNG.

        | kind       | plot                                                                                     |
        | ---------- | ---------------------------------------------------------------------------------------- |
        | "heatmap"  | the mean of `statistic` for every head, layers down and heads across                     |
        | "ranking"  | heads in descending order of `statistic`, with error bars                                |
        | "scatter"  | one point per head, `statistic` against another one, coloured by layer                   |
        | "received" | the attention that each position received, one line per head (see the method `received`) |

        Args:
            statistic: name of a statistic, such as "entropy", which is the default; "distance" for "scatter".
            kind: the kind of plot.
            against: statistic along the x-axis of "scatter"; by default "entropy", or the first other one.
            heads: the `(layer, head)` that "received" shows, zero-based; all by default.
            errors: length of error bars to each side, in standard errors over sequences: 1.96 by default for "ranking",
                0 for "scatter".
            top: number of heads that "ranking" (10 by default) and "scatter" (0) name.
            ax: matplotlib axes to draw on; those of a new figure by default, which pyplot does not keep in memory.

        Raises:
            InputError: the model did not run; there is no such statistic, kind or head; or there is nothing to draw.
            MissingExtra: matplotlib is not installed.

        Example:
            >>> with headwise.watch(model) as heads:  # doctest: +SKIP
            ...     model(**inputs)
            >>> heads.plot("entropy").figure.savefig("entropy.svg")  # doctest: +SKIP
            >>> heads.plot(kind="received", heads=[(0, 2), (5, 11)])  # doctest: +SKIP
        """
        self.require_attention()
        numbers = replace(HeadNumbers.of_columns(self.columns()), meanings={})
        kinds = numbers.kinds() | {"received": Kind(self._draw_received, ("heads",))}
        return plot_kind(kinds, kind, ax, statistic=statistic, against=against, heads=heads, errors=errors, top=top)

    def _draw_received(self, heads: Any = None, *, ax: Any = None) -> "Axes":
        """Draw, for all or some heads, the mean attention weight that each key position received in the latest call.
        Return the matplotlib axes.
        """
        received = {head: means.tolist() for head, means in self.received().items()}
        if not received:
            raise InputError("kind", expected="modules with the statistic received", got="none")
        return draw_received(chosen_heads(received, heads), title=model_name(self._modules[""]), ax=ax)


def _estimates(record: SiteRecord, name: str) -> list[tuple[float, float, float]]:
    """Return, for each head of a site (attention module, self or cross), the mean and standard error of the statistic
    `name`, and the number of sequences. Mean and error are NaN if the statistic was not measured. A sequence to which
    the module attended several times counts once.
    """
    moments = record.statistics.get(name)
    if moments is None:
        return [(math.nan, math.nan, 0)] * record.heads
    parts = (moments.value, moments.standard_error, moments.documents)
    return list(zip(*(part.tolist() for part in parts), strict=True))
