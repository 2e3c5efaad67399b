"""Made-up study results that the tests of research.claims share."""

import math

from research.claims.study_results import Study

HELD, NOT, UNDECIDED = "held", "did not hold", "undecided"

HEADS = (1, 2, 4, 8)


def study_of(losses, margin=0.1, **more):
    """By heads the losses of seeds 1, 2, ...; `more`: the same of other numbers."""
    runs = {
        str(heads): [
            {"seed": seed, "loss": loss, **{name: of[heads][seed - 1] for name, of in more.items()}}
            for seed, loss in enumerate(values, 1)
        ]
        for heads, values in losses.items()
    }
    saved = {"data": "text", "task": "next byte", "width": 64, "depth": 2, "margin": margin, "runs": runs}
    return Study("made up", saved)


WORSE = {1: [2.0, 2.0], 2: [1.0, 1.0], 4: [1.0625, 1.0625], 8: [1.25, 1.25]}
"""One head and eight are worse than two, by more than 0.125; four are not."""

ALIKE = {heads: [1.125, 1.125] if heads != 2 else [1.0, 1.0] for heads in WORSE}
"""By 0.125, which is not more."""


def lines_of(at_one, slopes):
    """By heads, of each seed: a straight line over doublings."""
    return {heads: [at_one + each * math.log2(heads) for each in slopes] for heads in HEADS}


def regime_of(times):
    """Five rounds in which a list takes three times as long; `times` of 2, 4 and 8 heads, forward then training."""
    seconds = {}
    for what, given in (("forward", times[:3]), ("training", times[3:])):
        for heads, each in zip(HEADS, (1.0, *given), strict=True):
            rounds = each if isinstance(each, list) else [each] * 5
            seconds |= {f"{what} fused {heads}": rounds, f"{what} list {heads}": [3 * one for one in rounds]}
    return {"device": "cpu", "batch": 2, "length": 16, "width": 64, "seconds": seconds}


ASTRIDE = [1.0, 1.05, 1.1, 1.2, 1.3]
"""A quarter of the rounds below the border, a quarter above."""
