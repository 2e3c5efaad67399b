"""Steps at which the curves of one training change, by the rules in `research.formation.rules`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from research.formation.rules import LAST, half_step, steepest_step

AFTER = 100
"""Step after which the loss on copied tokens may change. Before it, the model learns how frequent tokens are, and all
losses fall."""

FORMED = 0.2
"""Least final score of an induction head. Without one, a training has no steps of change."""


@dataclass(frozen=True)
class Changes:
    """Changes in one training. A step is None where a curve does not rise.

    Attributes:
        seed: seed of the training.
        head: head with the largest final induction score.
        score: its final score.
        score_half: step at which the largest score of all heads reaches half of its final value.
        gain_half: the same of the gain from copies: the loss on new tokens minus the loss on copied tokens.
        previous_half: the same of the largest attention to the previous token in the first layer.
        score_steepest: middle of the 100 steps in which the largest score rises most.
        gain_steepest: the same of the gain.
        loss_steepest: middle of the 100 steps in which the loss on copied tokens falls most, after step 100.
        previous_head: head of the first layer that attends most to the previous token at the end.
        previous: its final attention to the previous token.
        cost: rise of the loss on copied tokens without `head`, in nats.
    """

    seed: int
    head: str
    score: float
    score_half: float | None
    gain_half: float | None
    previous_half: float | None
    score_steepest: float | None
    gain_steepest: float | None
    loss_steepest: float | None
    previous_head: str
    previous: float
    cost: float

    @property
    def is_formed(self) -> bool:
        """True if an induction head formed."""
        return self.score >= FORMED


def changes(result: Mapping[str, Any]) -> Changes:
    """Return the changes in a training, from its saved result."""
    steps, loss, induction = result["steps"], result["loss"], result["induction"]
    first_layer = {name: curve for name, curve in result["monitor"]["previous"].items() if name.startswith("0.")}
    score, previous, gain = largest(induction), largest(first_layer), gain_of(loss)
    head, previous_head = (max(curves, key=lambda name: final(curves[name])) for curves in (induction, first_layer))
    return Changes(
        result["seed"],
        head,
        final(induction[head]),
        half_step(steps, score),
        half_step(steps, gain),
        half_step(steps, previous),
        steepest_step(steps, score),
        steepest_step(steps, gain),
        steepest_step(steps, [-value for value in loss["copied"]], start=AFTER),
        previous_head,
        final(first_layer[previous_head]),
        result["costs"][head],
    )


def gain_of(loss: Mapping[str, Sequence[float]]) -> list[float]:
    """Return the gain from copies at each measurement."""
    return [new - copied for new, copied in zip(loss["new"], loss["copied"], strict=True)]


def largest(curves: Mapping[str, Sequence[float]]) -> list[float]:
    """Return the largest value of all heads at each measurement."""
    return [max(values) for values in zip(*curves.values(), strict=True)]


def final(values: Sequence[float]) -> float:
    """Return the final value of a curve."""
    return sum(values[-LAST:]) / len(values[-LAST:])
