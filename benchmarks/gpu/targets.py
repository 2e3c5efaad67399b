"""Targets of the GPU benchmark, and the rows that each covers."""

from collections.abc import Sequence

from benchmarks.gpu.observing import CALL, EXTRA, MEMORY, PLAIN
from benchmarks.measure import Row
from benchmarks.targets import Target

ATTENTION, LAYER, OBSERVING = "attention", "layer", "observing"
"""Names of the parts that time something."""

LEAST = 0.97
"""Smallest accepted ratio of the time of the best contestant to that of headwise."""

TARGETS = (
    Target("attention, against the best contestant, every regime", LEAST, lambda part, _: part == ATTENTION),
    Target("layer, against `nn.MultiheadAttention`, every regime", LEAST, lambda part, _: part == LAYER),
    Target(
        "statistics of one attention call, over the attention it observes",
        1.5,
        lambda part, row: (part, row.against) == (OBSERVING, CALL),
        at_most=True,
    ),
    Target(
        "a whole model observed, over its plain forward pass",
        1.15,
        lambda part, row: (part, row.against) == (OBSERVING, PLAIN),
        at_most=True,
    ),
    Target(
        f"peak memory of observing 131,072 tokens beyond a plain forward pass, over {EXTRA / 1e6:.0f} MB",
        1.0,
        lambda part, row: (part, row.against) == (OBSERVING, MEMORY),
        at_most=True,
    ),
)


def lines(rows: dict[str, list[Row]]) -> list[tuple[str, ...]]:
    """Return for each target its description, bound, worst median, spread, regime, number of regimes that meet it, and
    the verdict. Without rows the verdict is "not yet run".

    Args:
        rows: of each part, by its name.
    """
    named = [(part, row) for part, of_part in rows.items() for row in of_part]
    return [_line(target, [row for part, row in named if target.covers(part, row)]) for target in TARGETS]


def _line(target: Target, rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the line of one target and its rows."""
    bound = f"{'at most' if target.at_most else 'at least'} {target.bound:g}"
    if not rows:
        return target.description, bound, "", "", "", "", "not yet run"
    worst, met = target.worst(rows), sum(map(target.met, rows))
    spread = f"{worst.ratio.lowest:.2f} to {worst.ratio.highest:.2f}"
    where = f"{worst.regime.name}, {worst.against} {worst.note}".strip()
    verdict = "met" if met == len(rows) else "**missed**"
    return target.description, bound, f"{worst.ratio.median:.2f}", spread, where, f"{met} of {len(rows)}", verdict
