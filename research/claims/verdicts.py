"""The rule of each claim, which turns results into a verdict. docs/reports/claims.md states the same rules in words.

A claim about many settings (or layers, or cases) holds if it is true in more than `MOST` of them. It does not hold if
it is true in fewer than `FEW`. Otherwise it is undecided.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median_high
from typing import Any

from research.claims.report_text import TITLES
from research.claims.study_results import Layer, Study, gaps, is_good, share_of_half, slopes, time_ratios

HELD, NOT, UNDECIDED = "held", "did not hold", "undecided"
MOST, FEW = 2 / 3, 1 / 3
FREE = 1.1
"""Ratio to the time of one head up to which more heads count as free."""
SETTING = "A setting is a combination of data, task, width and number of layers."
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


def stated(outcome: str, claim: str, reason: str) -> str:
    """Return the sentences of a verdict: its outcome, the title of the claim in `TITLES`, and the reason."""
    return f'{outcome}: the claim "{TITLES[claim]}". {reason}'


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
    reason = (
        f"In {more} of {len(layers)} layers, the attention weights of two heads are on average significantly farther "
        "apart (in Jensen-Shannon distance) in the trained model than in the untrained model. Compared with an "
        f"untrained model of equal attention entropy, the heads of {sharp} trained layers are significantly farther "
        f"apart, and those of {below} trained layers are significantly closer together"
    )
    return Verdict(outcome, figure, stated(outcome, "different", reason))


# -- capacity, more, eight --------------------------------------------------------------------------------------------


def capacity(studies: Sequence[Study]) -> Verdict:
    """Judge whether one head is worse than the best number of heads at equal parameters, by the share of settings."""
    worse = [study for study in studies if study.is_worse(1)]
    outcome = by_share(len(worse), len(studies))
    gains = sorted(study.losses()[1].mean - study.losses()[study.best].mean for study in studies)
    figure = f"one head is significantly worse than the best number of heads in {len(worse)} of {len(studies)} settings"
    span = f"by {gains[0]:.3f} to {gains[-1]:.3f} nats"
    reason = (
        f"{SETTING} In {len(worse)} of {len(studies)} settings, one head has a significantly higher held-out loss than "
        "the best number of heads, at equal numbers of parameters. Depending on the setting, the mean held-out loss of "
        f"one head is higher than that of the best number of heads {span}"
    )
    return Verdict(outcome, figure, stated(outcome, "capacity", reason))


def turning(studies: Sequence[Study]) -> Verdict:
    """Judge whether the largest number of heads is worse than the best in at least two settings; one may be chance."""
    worse = [study for study in studies if study.is_worse(study.heads[-1])]
    outcome = HELD if len(worse) > 1 else UNDECIDED if worse else NOT
    bests = [study.best for study in studies]
    figure = (
        f"the largest number of heads is significantly worse than the best in {len(worse)} of {len(studies)} settings"
    )
    reason = (
        f"{SETTING} In {len(worse)} of {len(studies)} settings, the largest number of heads has a significantly higher "
        "held-out loss than the best number of heads. Depending on the setting, the lowest mean held-out loss is at "
        f"{min(bests)} to {max(bests)} heads, median {median_high(bests)}"
    )
    return Verdict(outcome, figure, stated(outcome, "more", reason))


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
    reason = (
        f"{SETTING} In {good} of {len(studies)} settings (in {min(counts)} to {max(counts)} if one seed is left out), "
        "the mean held-out loss of 8 heads is at most one standard error above the lowest mean loss of any number of "
        f"heads. Counting such settings for every number of heads gives the largest count, {most}, for {leaders} heads"
    )
    return Verdict(outcome, figure, stated(outcome, "eight", reason))


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
    reason = (
        "With each doubling of the number of heads, the generalisation gap (held-out loss minus training loss) changes "
        f"by {gap.mean:+.3f} ± {gap.error:.3f} nats; a regularising effect would make it shrink. The held-out loss "
        f"changes by {loss.mean:+.3f} ± {loss.error:.3f} nats. Both changes are means over {gap.number} seeds. The gap "
        f"counts as unchanged if the 95 % interval of its change is between -{slight:.3f} and +{slight:.3f} nats"
    )
    return Verdict(outcome, figure, stated(outcome, "regularises", reason))


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
    reason = (
        "The measured share is the increase of the held-out loss when half of the heads are removed, divided by the "
        "increase when all heads are removed. With each doubling of the number of heads, this share changes by "
        f"{random.mean:+.3f} ± {random.error:.3f} if the half is random. It changes by {least.mean:+.3f} ± "
        f"{least.error:.3f} if the half is the least important one. The changes are means over {random.number} seeds. "
        "The claim holds if both changes are significantly below 0"
    )
    return Verdict(outcome, figure, stated(outcome, "robust", reason))


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
    reason = (
        f"The fused layer with several heads takes at most {FREE:g} times its time with one head in {len(free)} of "
        f"{len(cases)} cases (batch size, length, pass and number of heads). In {len(slower)} cases it takes more, "
        f"and {len(cases) - len(free) - len(slower)} cases are open, because the timing rounds disagree. With "
        f"{largest} heads the fused layer takes {medians[0]:.2f} to {medians[-1]:.2f} times the time that it takes "
        "with one. A list of "
        f"{largest} separate heads takes {lists[0]:.2f} to {lists[-1]:.2f} times the time of the fused layer with "
        f"{largest} heads"
    )
    return Verdict(outcome, figure, stated(outcome, "parallel", reason))
