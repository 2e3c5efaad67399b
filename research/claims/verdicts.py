"""From measured numbers to a verdict: the rule of each claim, in code. docs/reports/claims.md states the same in words.

Where a claim is about many settings (or layers, or regimes), it holds if it does in more than `MOST` of them, and does
not hold if it does in fewer than `FEW`; between, it is undecided.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median_high
from typing import Any

from research.claims.compared import Layer, Study, costs, gaps, is_good, share_of_half, slopes

HELD, NOT, UNDECIDED = "held", "did not hold", "undecided"
MOST, FEW = 2 / 3, 1 / 3
FREE = 1.1
"""Times the time of one head that count as no cost."""
SLIGHT = 0.01
"""Share of the loss below which a change for each doubling of the heads counts as none."""
GOOD = 8


@dataclass(frozen=True)
class Verdict:
    """What became of a claim: `figure` in a few words, `sentence` in full."""

    outcome: str
    figure: str
    sentence: str


def by_share(number: int, of: int) -> str:
    """See the module."""
    if not of:
        return UNDECIDED
    return HELD if number > MOST * of else NOT if number < FEW * of else UNDECIDED


# -- different heads see different things -----------------------------------------------------------------------------


def different(layers: Sequence[Layer]) -> Verdict:
    """More different than untrained heads; and beside that, than untrained heads that are as sharp."""
    more = sum(each.over_untrained.sign > 0 for each in layers)
    sharp = sum(each.over_as_sharp.sign > 0 for each in layers)
    below = sum(each.over_as_sharp.sign < 0 for each in layers)
    outcome = by_share(more, len(layers))
    figure = f"{more} of {len(layers)} layers above untrained; {below} below untrained heads that are as sharp"
    sentence = (
        f"{outcome}: trained heads are farther apart than untrained ones in {more} of {len(layers)} layers; but "
        f"against untrained heads made as sharp they are farther apart in {sharp} and nearer to each other in {below}"
    )
    return Verdict(outcome, figure, sentence)


# -- capacity, more, eight --------------------------------------------------------------------------------------------


def capacity(studies: Sequence[Study]) -> Verdict:
    """One head is worse than the best number, at equal parameters."""
    worse = [study for study in studies if study.is_worse(1)]
    outcome = by_share(len(worse), len(studies))
    gains = sorted(study.losses()[1].mean - study.losses()[study.best].mean for study in studies)
    figure = f"one head is worse than the best number in {len(worse)} of {len(studies)} settings"
    span = f"by {gains[0]:.3f} to {gains[-1]:.3f} nats"
    return Verdict(
        outcome, figure, f"{outcome}: at equal parameters {figure}; its mean loss is above the best's {span}"
    )


def turning(studies: Sequence[Study]) -> Verdict:
    """The most heads are worse than the best number, somewhere: in two settings, since one may be chance."""
    worse = [study for study in studies if study.is_worse(study.heads[-1])]
    outcome = HELD if len(worse) > 1 else UNDECIDED if worse else NOT
    bests = [study.best for study in studies]
    figure = f"the most heads are worse than the best number in {len(worse)} of {len(studies)} settings"
    turns = f"the least mean loss is at {min(bests)} to {max(bests)} heads, the median {median_high(bests)}"
    return Verdict(outcome, figure, f"{outcome}: {figure}; {turns}")


def eight(studies: Sequence[Study]) -> Verdict:
    """The share of settings in which 8 is good; undecided where leaving out a seed would change the outcome."""
    good = sum(is_good(study, GOOD) for study in studies)
    seeds = sorted(set.union(*(set(study.values()[study.heads[0]]) for study in studies)))
    counts = [sum(is_good(study, GOOD, without=seed) for study in studies) for seed in seeds]
    outcomes = {by_share(count, len(studies)) for count in (good, *counts)}
    outcome = outcomes.pop() if len(outcomes) == 1 else UNDECIDED
    others = {heads: sum(is_good(study, heads) for study in studies) for study in studies for heads in study.heads}
    most = max(others.values())
    leaders = " and ".join(str(heads) for heads in sorted(others) if others[heads] == most)
    figure = f"within one standard error of the best in {good} of {len(studies)} settings"
    sentence = (
        f"{outcome}: 8 heads are {figure}, and in {min(counts)} to {max(counts)} where one seed is left out; "
        f"most often, in {most}, are {leaders}"
    )
    return Verdict(outcome, figure, sentence)


# -- regularises, robust ----------------------------------------------------------------------------------------------


def regularises(study: Study) -> Verdict:
    """The gap falls with heads, and the held-out loss does not rise."""
    gap, loss = slopes(gaps(study)), slopes(study.values())
    slight = SLIGHT * min(each.mean for each in study.losses().values())
    if gap.sign < 0 and loss.sign <= 0 and not gap.within(slight):
        outcome = HELD
    elif gap.sign > 0 or (gap.sign < 0 and loss.sign > 0) or gap.within(slight):
        outcome = NOT
    else:
        outcome = UNDECIDED
    figure = f"gap {gap.mean:+.3f} ± {gap.error:.3f} nats for each doubling"
    sentence = (
        f"{outcome}: with each doubling of the heads the gap changes by {gap.mean:+.3f} ± {gap.error:.3f} nats and the "
        f"held-out loss by {loss.mean:+.3f} ± {loss.error:.3f}, {gap.number} seeds, where {slight:.3f} counts as none"
    )
    return Verdict(outcome, figure, sentence)


def robust(study: Study) -> Verdict:
    """Half of the heads are a smaller part of what all are worth, the more there are."""
    random, least = (slopes(share_of_half(study, how)) for how in ("random", "least"))
    outcome = HELD if random.sign < 0 and least.sign < 0 else NOT if random.sign > 0 else UNDECIDED
    shares = {how: [fmean(each.values()) for each in share_of_half(study, how).values()] for how in ("random", "least")}
    first, *_, last = study.heads
    figure = (
        f"half of the heads at random cost {shares['random'][0]:.0%} of what all do with {first} head, "
        f"{shares['random'][-1]:.0%} with {last}"
    )
    sentence = (
        f"{outcome}: with each doubling of the heads, the part of all heads' worth that half of them cost changes by "
        f"{random.mean:+.3f} ± {random.error:.3f} when they are drawn at random and by {least.mean:+.3f} ± "
        f"{least.error:.3f} when the least important go first, {random.number} seeds"
    )
    return Verdict(outcome, figure, sentence)


# -- parallel at no cost ----------------------------------------------------------------------------------------------


def parallel(regimes: Sequence[Mapping[str, Any]]) -> Verdict:
    """The fused layer takes no longer with more heads than with one, in every case that is measured."""
    cases = [cost for cost in costs(regimes, "fused {n}", "fused 1") if cost.heads > 1]
    dear = [cost for cost in cases if cost.low > FREE]
    free = [cost for cost in cases if cost.high <= FREE]
    outcome = NOT if len(dear) > FEW * len(cases) else HELD if len(free) > MOST * len(cases) else UNDECIDED
    most = [cost for cost in cases if cost.heads == max(each.heads for each in cases)]
    medians = sorted(cost.median for cost in most)
    lists = sorted(cost.median for cost in costs(regimes, "list {n}", "fused {n}") if cost.heads == most[0].heads)
    figure = f"{most[0].heads} heads take {medians[0]:.2f} to {medians[-1]:.2f} of the time of one"
    sentence = (
        f"{outcome}: in {len(free)} of {len(cases)} cases more heads take no more than {FREE:g} of the time of one, in "
        f"{len(dear)} they take more; {figure}, and a list of as many heads {lists[0]:.2f} to {lists[-1]:.2f} of the "
        "fused layer's"
    )
    return Verdict(outcome, figure, sentence)
