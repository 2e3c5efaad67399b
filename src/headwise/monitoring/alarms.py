"""Alarms of a monitored training: heads whose statistics are outside of stated limits."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple


class Alarm(NamedTuple):
    """Alarm of a monitored training: a statistic of one attention head was outside of its limit in one step.

    Attributes:
        step: number of the step.
        kind: "high logit", "low entropy", "dead head" or "non-finite".
        layer: number of the layer.
        head: number of the head.
        module: path of the attention module.
        statistic: name of the statistic.
        value: its value.
        limit: the limit; NaN for non-finite values.
    """

    step: int
    kind: str
    layer: int
    head: int
    module: str
    statistic: str
    value: float
    limit: float


@dataclass(frozen=True)
class AlarmLimits:
    """Limits of the statistics of a head during training. A head outside of a limit causes an alarm. A limit of None is
    switched off.

    Attributes:
        max_logit: largest accepted attention logit, before a softcap; 100 is the threshold of QK-clip (Kimi Team 2025).
        entropy: smallest accepted mean entropy, in nats. Low entropy precedes instability (Zhai et al. 2023).
        output_share: smallest accepted norm of a head's output, as a share of the median norm in its layer. A head
            below is named dead.
    """

    max_logit: float | None = 100.0
    entropy: float | None = 0.01
    output_share: float | None = 0.001

    def __post_init__(self) -> None:
        from headwise.checks import finite_number  # imports torch

        for name, limit in vars(self).items():
            if limit is not None:
                finite_number(name, limit, above=0.0)

    def alarms(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[Alarm]:
        """Yield an alarm for each statistic of a head that is outside of these limits, in each step that `rows`
        contain.

        Args:
            rows: one dict for each head and step, as `History.rows`.
        """
        rows = list(rows)
        norms: dict[tuple[Any, ...], list[float]] = {}
        for row in rows:
            norms.setdefault((row["step"], row["module"], row.get("kind")), []).append(row.get("output_norm", math.nan))
        for row in rows:
            of_layer = norms[row["step"], row["module"], row.get("kind")]
            usual_norm = median([norm for norm in of_layer if math.isfinite(norm)] or [math.nan])
            for kind, statistic, limit in self._exceeded(row, usual_norm):
                place = row["layer"], row["head"], row["module"]
                yield Alarm(row["step"], kind, *place, statistic, float(row[statistic]), limit)

    def _exceeded(self, row: Mapping[str, Any], usual_norm: float) -> Iterator[tuple[str, str, float]]:
        """Yield the kind, statistic and limit of each alarm of one head in one step. `usual_norm` is the median norm of
        the outputs of the heads in its layer.
        """
        if row["nonfinite_rows"]:
            yield "non-finite", "nonfinite_rows", math.nan
        for name in ("max_logit_uncapped", "max_logit"):
            if self.max_logit is not None and row.get(name, -math.inf) > self.max_logit:
                yield "high logit", name, self.max_logit
                break
        if self.entropy is not None and row.get("entropy", math.inf) < self.entropy:
            yield "low entropy", "entropy", self.entropy
        if self.output_share is not None and row.get("output_norm", math.inf) <= self.output_share * usual_norm:
            yield "dead head", "output_norm", self.output_share * usual_norm
