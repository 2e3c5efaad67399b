"""Integrated gradients of gates: importance scores that add up to the effect of removing all heads."""

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from headwise.analysis.importance.gate_gradients import GateTensors, ImportanceTask
from headwise.analysis.importance.gradients import GradientMethod, GradientProgress, constant_gates
from headwise.analysis.quadrature import gauss_legendre
from headwise.checks import whole_number
from headwise.intercept.interceptor import SiteKey
from headwise.runs.distributed import gather_from_ranks
from headwise.shapes import Bool, Float

LARGEST_GAP = 0.05
"""Largest completeness gap that counts as converged."""

MOST_STEPS = 64
"""Default of the largest number of points."""


@dataclass(frozen=True)
class Integrated(GradientMethod):
    """Importance method that scores each head by integrated gradients: -dL/dg of its gate g (factor of its output),
    integrated over the common value of all gates from 0 to 1. For each example, the scores of all heads add up to the
    effect of removing all heads, up to the error of the quadrature (the axiom of completeness).

    The completeness gap is the sum over examples of the absolute difference between the two, divided by the sum of the
    absolute effects. So errors of opposite sign do not cancel. For each batch, the number of points is doubled until
    the gap is at most 5 %. In some models the loss varies so fast along this path that no affordable number of points
    is enough: the gap is in the metadata of the table, and a warning names one above 5 %.

    Source: Sundararajan, Taly and Yan 2017.

    Attributes:
        steps: number of points of the Gauss-Legendre quadrature at first.
        most_steps: largest number of points; by default 64, or `steps` if that is more.
    """

    steps: int = 16
    most_steps: int | None = None
    only_at_one: ClassVar[bool] = False

    def __post_init__(self) -> None:
        whole_number("steps", self.steps, least=1)
        if self.most_steps is not None:
            whole_number("most_steps", self.most_steps, least=self.steps)

    def differentiate(
        self, task: ImportanceTask, gates: GateTensors, batch: dict[str, Any], progress: GradientProgress
    ) -> tuple[dict[SiteKey, Float[Tensor, "examples heads"]], Bool[Tensor, " examples"]]:
        """Return the derivatives of each example's loss, integrated over gate values from 0 to 1, and which examples
        have a loss. `progress` gets sums over examples of the scores, of the effects of removing all heads, of absolute
        effects, and of absolute differences between scores and effects.
        """
        effects, steps = self._effects_of_all(task, gates, batch), self.steps
        most = max(MOST_STEPS, steps) if self.most_steps is None else self.most_steps
        while True:
            gradients, has_loss = self.gradients_at(task, gates, batch, gauss_legendre(steps))
            scores = sum((-gradient.sum(1) for gradient in gradients.values()), torch.zeros_like(effects))
            sums = _sums_over(scores[has_loss], effects[has_loss])
            if sums["differences"] <= LARGEST_GAP * sums["effects"] or 2 * steps > most:
                break
            steps *= 2
        for name, value in sums.items():
            progress.totals[name] = progress.totals.get(name, 0.0) + value
        progress.totals["steps"] = max(progress.totals.get("steps", 0.0), float(steps))
        return gradients, has_loss

    def _effects_of_all(
        self, task: ImportanceTask, gates: GateTensors, batch: dict[str, Any]
    ) -> Float[Tensor, " examples"]:
        """Return the increase of each example's loss when all heads are removed."""
        batch, examples = task.start_batch(gates, batch)
        without, whole = (
            task.gated_losses(gates, constant_gates(examples, value), batch).detach().double().cpu()
            for value in (0.0, 1.0)
        )
        return without - whole

    def report(self, progress: GradientProgress) -> dict[str, Any]:
        """Return the completeness of the scores: means over examples of the sum of all scores and of the effect of
        removing all heads, the relative difference of these means, the completeness gap, and the largest number of
        steps. Warn if the gap is above 5 %.
        """
        parts = gather_from_ranks((progress.totals, int(progress.counted.count)))
        examples = sum(count for _, count in parts)
        scores, effect, effects, differences = (
            sum(totals.get(name, 0.0) for totals, _ in parts) / examples
            for name in ("scores", "effect", "effects", "differences")
        )
        gap, mean_gap = _relative(differences, effects), _relative(abs(scores - effect), abs(effect))
        steps = int(max(totals.get("steps", 0.0) for totals, _ in parts))
        if gap > LARGEST_GAP:
            warnings.warn(
                f"integrated gradients did not converge: for each example, the sum of all scores differs by "
                f"{differences:.4g} from the effect of removing all heads, which is {effects:.4g} (means of absolute "
                f"values; completeness gap {gap:.0%} after {steps} steps)",
                stacklevel=4,
            )
        completeness = {"scores": scores, "effect": effect, "gap": gap, "gap_of_means": mean_gap, "steps": steps}
        return {"completeness": completeness}

    def statistics(self, gradient: Float[Tensor, "examples heads"]) -> dict[str, Float[Tensor, "examples heads"]]:
        """Return one statistic for each example and head, `integrated`: the negative of `gradient`, which is already
        integrated over gate values from 0 to 1.
        """
        return {"integrated": -gradient}


def _sums_over(scores: Float[Tensor, " examples"], effects: Float[Tensor, " examples"]) -> dict[str, float]:
    """Return sums over examples of the sum of all scores, of the effect of removing all heads, of absolute effects, and
    of absolute differences between scores and effects.
    """
    sums = {"scores": scores, "effect": effects, "effects": effects.abs(), "differences": (scores - effects).abs()}
    return {name: float(values.nansum()) for name, values in sums.items()}


def _relative(difference: float, effect: float) -> float:
    """Return a difference divided by an effect, neither of them negative; infinite if the effect alone is 0."""
    return difference / effect if effect else float("inf") if difference else 0.0
