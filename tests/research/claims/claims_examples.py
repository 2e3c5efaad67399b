"""Invented study results shared by the tests of research.claims."""

import math

from research.claims.study_results import Study

HELD, NOT, UNDECIDED = "held", "did not hold", "undecided"

HEADS = (1, 2, 4, 8)


def study_of(losses, margin=0.1, **more):
    """Return a study. `losses` lists, by number of heads, the losses of seeds 1, 2, ...; `more` lists other measures in
    the same way.
    """
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
"""Losses by number of heads. With one head and with eight they are above those with two by more than 0.125; with four
they are not.
"""

ALIKE = {heads: [1.125, 1.125] if heads != 2 else [1.0, 1.0] for heads in WORSE}
"""Losses by number of heads that differ from the best by exactly 0.125, which is not more than 0.125."""


def lines_of(at_one, slopes):
    """Return values by number of heads, one for each seed: a straight line over doublings of the heads, with one slope
    per seed.
    """
    return {heads: [at_one + slope * math.log2(heads) for slope in slopes] for heads in HEADS}


def regime_of(times):
    """Return timings of five rounds in which a list of heads takes three times as long as the layer. `times` are those
    of 2, 4 and 8 heads relative to one head, first forward, then training.
    """
    seconds = {}
    for phase, relative_times in (("forward", times[:3]), ("training", times[3:])):
        for heads, time in zip(HEADS, (1.0, *relative_times), strict=True):
            rounds = time if isinstance(time, list) else [time] * 5
            seconds |= {f"{phase} fused {heads}": rounds, f"{phase} list {heads}": [3 * seconds for seconds in rounds]}
    return {"device": "cpu", "batch": 2, "length": 16, "width": 64, "seconds": seconds}


ASTRIDE = [1.0, 1.05, 1.1, 1.2, 1.3]
"""Relative times of which a quarter is below the border and a quarter above it."""
