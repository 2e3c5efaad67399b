"""Result of `watch`: the statistics of every head of a model."""

from typing import Any

from torch import nn

from headwise.errors import require
from headwise.intercept.interceptor import SiteKey
from headwise.intercept.sites import SiteRegistry
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
