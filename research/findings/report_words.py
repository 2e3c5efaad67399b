"""Words and numbers of the report on the findings."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import headwise as hw
from headwise.runs.rows import MeanEstimate
from headwise.runs.significance import in_errors

MOST = 10
"""Number of heads in a table."""

SMALL = 0.01
"""Effect in nats, or cosine distance, that counts as small."""

SURE = 2.0
"""Number of standard errors that an effect may be larger than it was measured."""


def with_error(measured: MeanEstimate, digits: int = 3) -> str:
    """Return `mean ± standard error` as text."""
    return f"{measured.value:.{digits}f} ± {measured.sem:.{digits}f}"


def probability(q: float) -> str:
    """Return a p- or q-value as text."""
    return f"{q:.3f}" if q >= 0.001 else "< 0.001"


def percent(share: float) -> str:
    """Return a share in percent."""
    return f"{100 * share:.0f} %"


def span(interval: tuple[float, float], digits: int = 3) -> str:
    """Return both ends of an interval as text."""
    return f"{interval[0]:.{digits}f} to {interval[1]:.{digits}f}"


def data_of(table: hw.Ablation | hw.SetAblation) -> str:
    """Return the numbers of documents, sequences and tokens, and the versions, as text."""
    measured, versions = table.metadata["measured"], table.metadata["versions"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    documents = f"{table.rows[0].statistics['cost'].n} documents, {measured['sequences']} sequences"
    return f"{documents}, {measured['tokens']:,} tokens; {packages}"


def by_effect(ablation: hw.Ablation) -> list[Any]:
    """Return the rows in order of the ablation effect, the largest first."""
    return sorted(ablation.rows, key=lambda row: -row.statistics["cost"].value)


def ranks_of_medians(ablation: hw.Ablation) -> dict[str, int]:
    """Return the rank of each head by the median of its effects on documents, from 1, by its name."""
    names = [row.name for row in ablation.rows]
    medians = ablation.summaries()["cost_median"]
    order = sorted(range(len(names)), key=lambda index: -medians[index])
    return {names[index]: rank for rank, index in enumerate(order, 1)}


def small_effects(ablation: hw.Ablation) -> int:
    """Return the number of heads whose effect plus `SURE` standard errors is small."""
    effects = (row.statistics["cost"] for row in ablation.rows)
    return sum(effect.value + SURE * effect.sem < SMALL for effect in effects)


def completeness(folder: Path) -> dict[str, Any]:
    """Return the completeness of the integrated gradients in a folder: means of the sum of scores and of the effect,
    their relative difference, and the numbers of steps and sequences.
    """
    measured: Any = hw.Importance.load(folder).metadata["measured"]
    found = measured["completeness"]
    gap_of_means = abs(found["scores"] - found["effect"]) / abs(found["effect"])
    return {**found, "gap_of_means": gap_of_means, "sequences": measured["sequences"]}


def gap_of(folder: Path) -> str:
    """Return the completeness of the integrated gradients in a folder in a sentence."""
    found = completeness(folder)
    verdict = (
        "So the scores are not used, and the library warns"
        if found["gap_of_means"] > 0.05
        else "So the scores converged"
    )
    return (
        f"On {found['sequences']} sequences and with up to {found['steps']} steps, the scores add up to "
        f"{found['scores']:.3f}, and removing all heads changes the loss by {found['effect']:.3f}, on average over the "
        f"sequences. The difference of these two means is {percent(found['gap_of_means'])} of the second one (the "
        f"completeness gap of the means). {verdict}."
    )


def similarities(folder: Path) -> dict[str, Any]:
    """Return the similarities of heads in a folder."""
    found: dict[str, Any] = json.loads((folder / "similarities.json").read_text())
    return found


def errors_away(measured: MeanEstimate) -> str:
    """Return the distance from zero in standard errors, with its sign."""
    return f"{in_errors(measured):+.1f}"


def th(rank: int) -> str:
    """Return a rank as an ordinal number, such as 1st or 12th."""
    ending = "th" if 10 <= rank % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(rank % 10, "th")
    return f"{rank}{ending}"


def listed(names: Sequence[str], most: int = 20) -> str:
    """Return names as a list in words, at most `most` of them."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
