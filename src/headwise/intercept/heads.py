"""Result of `watch`: the statistics of every head of a model."""

import math
from typing import Any

from torch import nn

from headwise.errors import require
from headwise.intercept.interceptor import SiteKey
from headwise.intercept.sites import SiteRecord, SiteRegistry
from headwise.page.columns import Columns, HeadPlace, estimates_of
from headwise.page.notebook import notebook_html
from headwise.statistics.meanings import page_statistic
from headwise.statistics.weight_capture import CapturedWeights


class Heads(SiteRegistry):
    """Result of `watch`, a context that observes the attention calls of a model: statistics of every attention head.
    Each statistic is averaged over all sequences of all observed calls.

    Each sequence has the same weight in the means, and further calls of the model add to them.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._captured: dict[SiteKey, CapturedWeights] = {}

    def set_captured(self, site: SiteKey, captured: CapturedWeights) -> None:
        """Store `captured`, attention weights from the latest call at `site` (an attention module, self or cross), in
        place of those from an earlier call at this site.
        """
        self._captured[site] = captured

    @property
    def details(self) -> dict[str, CapturedWeights]:
        """Captured attention weights of the last call at each site (an attention module, self or cross), by module
        path. If a module computes several layers itself, the keys of the others are the path with their number, such
        as `blocks[1]`. If a module has both kinds, the key of its cross-attention is followed by `", cross"`. The dict
        is empty if no capture was requested.
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
        """Return the statistics of each head as columns of a page.

        Raises:
            InputError: the model did not run, or no attention was intercepted.
        """
        self.require_attention()
        names = list(dict.fromkeys(name for record in self.records for name in record.statistics))
        labels = list(self.head_labels())
        places = tuple(HeadPlace(each["layer"], each["head"], each["kind"], each["module"]) for _, each in labels)
        table = [[_estimate(record, name, each["head"]) for record, each in labels] for name in names]
        statistics = tuple(page_statistic(name, "watched calls") for name in names)
        model = type(self._modules[""]).__name__
        return Columns(model, "watched calls", places, statistics, estimates_of(table), (None,) * len(places))

    def _repr_html_(self) -> str:
        """Return the statistics of each head and their page for a notebook."""
        if not self.ran or not self.records:
            return "<p>The model did not run while it was watched, or no attention was intercepted.</p>"
        columns = self.columns()
        return notebook_html(f"{len(columns.places)} heads of {columns.model}", columns, columns.contents())


def _estimate(record: SiteRecord, name: str, head: int) -> tuple[float, float, int]:
    """Return mean, standard error and number of sequences of a statistic of one head; NaN if it was not measured."""
    moments = record.statistics.get(name)
    if moments is None:
        return math.nan, math.nan, 0
    return float(moments.value[head]), float(moments.standard_error[head]), int(moments.count[head])
