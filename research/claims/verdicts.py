"""The rule of each claim, which turns results into a verdict. docs/reports/claims.md states the same rules in words.

A claim about many settings (or layers, or cases) holds if it is true in more than `MOST` of them. It does not hold if
it is true in fewer than `FEW`. Otherwise it is undecided.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median_high
from typing import Any

from research.claims.study_results import Layer, Study, gaps, is_good, share_of_half, slopes, time_ratios

HELD, NOT, UNDECIDED = "held", "did not hold", "undecided"
MOST, FEW = 2 / 3, 1 / 3
FREE = 1.1
"""Ratio to the time of one head up to which more heads count as free."""
SLIGHT = 0.01
"""Share of the loss. A smaller change for each doubling of the heads counts as no change."""
GOOD = 8
"""Number of heads that is said to be a good choice."""


@dataclass(frozen=True)
class Verdict:
    """Outcome of a claim.

    Attributes:
        outcome: held, did not hold, or undecided.
        figure: the decisive number in a few words.
        sentence: the outcome with all numbers.
    """

    outcome: str
    figure: str
    sentence: str


def by_share(number: int, total: int) -> str:
    """Return the outcome of a claim that is true in `number` of `total` settings, by the shares `MOST` and `FEW`."""
    if not total:
        return UNDECIDED
    return HELD if number > MOST * total else NOT if number < FEW * total else UNDECIDED


# -- different heads see different things -----------------------------------------------------------------------------


def different(layers: Sequence[Layer]) -> Verdict:
    """Judge whether trained heads differ more than untrained ones, by the share of layers.

    The comparison with equally sharp untrained heads is reported and does not decide.
    """
    more = sum(layer.over_untrained.sign > 0 for layer in layers)
    sharp = sum(layer.over_as_sharp.sign > 0 for layer in layers)
    below = sum(layer.over_as_sharp.sign < 0 for layer in layers)
    outcome = by_share(more, len(layers))
    figure = f"{more} of {len(layers)} layers above untrained; {below} below equally sharp untrained heads"
    sentence = (
        f"{outcome}: the attention weights of two heads of a layer are farther apart in a trained model than in an "
        f"untrained one, in {more} of {len(layers)} layers. Compared with an untrained model of equal entropy, the "
        "heads "
        f"of {sharp} trained layers are significantly farther apart, and those of {below} layers significantly closer "
        "together"
    )
    return Verdict(outcome, figure, sentence)


# -- capacity, more, eight --------------------------------------------------------------------------------------------


def capacity(studies: Sequence[Study]) -> Verdict:
    """Judge whether one head is worse than the best number of heads at equal parameters, by the share of settings."""
    worse = [study for study in studies if study.is_worse(1)]
    outcome = by_share(len(worse), len(studies))
    gains = sorted(study.losses()[1].mean - study.losses()[study.best].mean for study in studies)
    figure = f"one head is significantly worse than the best number of heads in {len(worse)} of {len(studies)} settings"
    span = f"by {gains[0]:.3f} to {gains[-1]:.3f} nats"
    return Verdict(
        outcome,
        figure,
        f"{outcome}: at equal numbers of parameters, {figure}. "
        f"The mean loss of one head is higher than that of the best number {span}",
    )


def turning(studies: Sequence[Study]) -> Verdict:
    """Judge whether the largest number of heads is worse than the best in at least two settings; one may be chance."""
    worse = [study for study in studies if study.is_worse(study.heads[-1])]
    outcome = HELD if len(worse) > 1 else UNDECIDED if worse else NOT
    bests = [study.best for study in studies]
    figure = (
        f"the largest number of heads is significantly worse than the best in {len(worse)} of {len(studies)} settings"
    )
    turns = f"the lowest mean loss is at {min(bests)} to {max(bests)} heads, median {median_high(bests)}"
    return Verdict(outcome, figure, f"{outcome}: {figure}. Depending on the setting, {turns}")


def eight(studies: Sequence[Study]) -> Verdict:
    """Judge whether 8 heads are good, by the share of settings.

    The claim is undecided if leaving out one seed changes the outcome.
    """
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
        f"{outcome}: the mean loss of 8 heads is {figure}. It is so in {min(counts)} to {max(counts)} if one seed is "
        "left "
        f"out. The number of heads that is within one standard error in most settings is {leaders}, in {most} settings"
    )
    return Verdict(outcome, figure, sentence)


# -- regularises, robust ----------------------------------------------------------------------------------------------


def regularises(study: Study) -> Verdict:
    """Judge whether the generalisation gap shrinks with more heads while the held-out loss does not rise."""
    gap, loss = slopes(gaps(study)), slopes(study.values())
    slight = SLIGHT * min(loss.mean for loss in study.losses().values())
    if gap.sign < 0 and loss.sign <= 0 and not gap.within(slight):
        outcome = HELD
    elif gap.sign > 0 or (gap.sign < 0 and loss.sign > 0) or gap.within(slight):
        outcome = NOT
    else:
        outcome = UNDECIDED
    figure = f"gap {gap.mean:+.3f} ± {gap.error:.3f} nats for each doubling"
    sentence = (
        f"{outcome}: with each doubling of the number of heads, the generalisation gap (held-out loss minus training "
        f"loss) changes by {gap.mean:+.3f} ± {gap.error:.3f} nats. The held-out loss changes by {loss.mean:+.3f} ± "
        f"{loss.error:.3f} nats. Both are means over {gap.number} seeds; up to {slight:.3f} nats count as no change"
    )
    return Verdict(outcome, figure, sentence)


def robust(study: Study) -> Verdict:
    """Judge whether removing half of the heads costs a smaller share of the total effect if there are more heads."""
    random, least = (slopes(share_of_half(study, how)) for how in ("random", "least"))
    outcome = HELD if random.sign < 0 and least.sign < 0 else NOT if random.sign > 0 else UNDECIDED
    shares = [fmean(by_seed.values()) for by_seed in share_of_half(study, "random").values()]
    first, *_, last = study.heads
    figure = (
        f"removing a random half costs {shares[0]:.0%} of the effect of removing all with {first} head, "
        f"{shares[-1]:.0%} with {last}"
    )
    sentence = (
        f"{outcome}: the measured share is the effect on the loss of removing half of the heads, divided by the "
        "effect of "
        "removing all heads. With each doubling of the number of heads, this share changes by "
        f"{random.mean:+.3f} ± {random.error:.3f} for random halves. It changes by {least.mean:+.3f} ± "
        f"{least.error:.3f} "
        f"for the least important half. The changes are means over {random.number} seeds"
    )
    return Verdict(outcome, figure, sentence)


# -- parallel at no cost ----------------------------------------------------------------------------------------------


def parallel(regimes: Sequence[Mapping[str, Any]]) -> Verdict:
    """Judge whether the fused layer takes no longer with more heads than with one, by the share of cases."""
    cases = [ratio for ratio in time_ratios(regimes, "fused {n}", "fused 1") if ratio.heads > 1]
    slower = [ratio for ratio in cases if ratio.low > FREE]
    free = [ratio for ratio in cases if ratio.high <= FREE]
    outcome = NOT if len(slower) > FEW * len(cases) else HELD if len(free) > MOST * len(cases) else UNDECIDED
    largest = max(ratio.heads for ratio in cases)
    medians = sorted(ratio.median for ratio in cases if ratio.heads == largest)
    of_lists = time_ratios(regimes, "list {n}", "fused {n}")
    lists = sorted(ratio.median for ratio in of_lists if ratio.heads == largest)
    figure = f"{largest} heads take {medians[0]:.2f} to {medians[-1]:.2f} times the time of one"
    sentence = (
        f"{outcome}: in {len(free)} of {len(cases)} cases (batch, length, pass and number of heads) the fused layer "
        "takes "
        f"at most {FREE:g} times the time of one head. In {len(slower)} cases it takes more, and "
        f"{len(cases) - len(free) - len(slower)} cases are open, because the timing rounds disagree. With {largest} "
        "heads "
        f"the fused layer takes {medians[0]:.2f} to {medians[-1]:.2f} times the time that it takes with one. A list of "
        f"{largest} separate heads takes {lists[0]:.2f} to {lists[-1]:.2f} times the time of the fused layer with "
        f"{largest} heads"
    )
    return Verdict(outcome, figure, sentence)
