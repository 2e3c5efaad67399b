"""Thresholds, tasks and words of the rules in `rules.md`."""

LEVEL = 0.05
"""Level of all tests, and one minus that of all intervals."""

DRAWS = 4000
"""Number of draws of each bootstrap."""

FREE, ROUNDS = 1.1, 0.75
"""Largest ratio of the time with several heads to the time with one head at which several heads count as free, and the
share of the rounds that must agree on this.
"""

GOOD, MARGIN, LEAST = 8, 0.01, 0.01
"""The number of heads of claim 7, and the margin of a loss: a share of the best loss, or nats, whichever is more."""

ENTROPY_MISSED = 0.05
"""Largest relative difference between the entropies of a layer and of its untrained control."""

SOURCES = ("python", "bible", "lookup", "relations")
"""Tasks that count, one for each source of data."""

FEW, ROBUST = ("python-few", "bible-few"), ("python", "bible")
"""Tasks of claim 4, and of claim 5."""

SCHEMES = ("none", "learned", "rotary", "spread")
"""Position schemes."""

EXPECTED = {
    **dict.fromkeys(SOURCES, SCHEMES),
    "relations": SCHEMES[1:],  # no model can solve it without positions
    "masked": ("learned", "spread"),
    **dict.fromkeys(FEW, ("learned", "spread")),
    "bible-large": ("rotary", "spread"),
}
"""Position schemes of every task that is judged. A verdict that a missing setting could change is not given."""

PUBLISHED = ("minilm", "smollm2")
"""Published models of claim 1."""

ILLUSTRATIONS = ("relations-places", "relations-mlp")
"""Tasks that illustrate the argument about one head, and are not judged."""

SEEDS = {**dict.fromkeys((*EXPECTED, *ILLUSTRATIONS), 6), "bible-large": 4}
"""Number of reported models of each task, for each number of heads."""

ROUNDING = 1e-4
"""Largest accepted difference between a loss and the same loss computed from numbers with six digits."""

HOWS = ("half", "least")
"""Half of the heads that is removed: the mean over all halves, or the least important half."""

SHAPES = {
    (True, True): "rises and falls",
    (True, False): "rises",
    (False, True): "falls",
    (False, False): "flat",
}
"""Shape of the shares against the number of heads, by whether one is significantly larger, and one smaller."""

HELD, NOT, DEPENDS, OPEN = "held", "did not hold", "depends", "not measured"
"""Outcomes."""
