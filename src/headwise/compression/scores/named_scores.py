"""Scores of heads by name, for the command line and recipes."""

from typing import Any

from torch import nn

from headwise.analysis.causality import require_causal
from headwise.analysis.losses import Loss
from headwise.checks import require_one_of
from headwise.compression.pruning.plan_pruning import plan_pruning
from headwise.compression.pruning.pruning_plan import PruningPlan
from headwise.compression.scores.least_squares import LeastSquaresScores
from headwise.compression.scores.measured import AblationScores, ImportanceScores, MagnitudeScores
from headwise.data.batches import device_of, to_device
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.settings import CONSTRAINTS, PRUNING_SCORES


def plan_by_name(
    name: str,
    model: nn.Module,
    texts: Texts,
    loss: Loss,
    *,
    keep: float,
    constraint: str,
    fitted: bool = True,
    rounds: int | None = None,
    progress: bool = False,
) -> PruningPlan:
    """Score the heads of a model by the method `name`, one of `PRUNING_SCORES`, and return a pruning plan. The loss is
    used for importance, for ablation, and for least squares with the constraint "free". For least squares, `fitted`
    states that output projections will be fitted after pruning. If `rounds` is None, ablation scores the heads in one
    round, and other methods in as many as `plan_pruning` chooses.
    """
    require_scores(name, constraint, loss)
    if uses_loss(name, constraint):
        require_causal(loss, model, [to_device(batch, device_of(model)) for batch in texts])
    scores: Any
    if name == "magnitude":
        scores = MagnitudeScores(model, next(iter(texts)))
    elif name == "least-squares":
        needed = loss if uses_loss(name, constraint) else None
        scores = LeastSquaresScores(model, texts, needed, fitted=fitted, progress=progress)
    else:
        measured = ImportanceScores if name == "importance" else AblationScores
        scores = measured(model, texts, loss, progress=progress)
    if name == "ablation" and rounds is None:
        rounds = 1
    return plan_pruning(scores, keep=keep, constraint=constraint, rounds=rounds, model=model, progress=progress)


def uses_loss(name: str, constraint: str) -> bool:
    """Return True if the pruning scores with this name are computed from a loss. Least-squares scores use a loss only
    under the constraint "free", under which heads of different layers compete.
    """
    return constraint == "free" if name == "least-squares" else name != "magnitude"


def require_scores(name: str, constraint: str, loss: Any) -> None:
    """Raise `InputError` if the pruning scores with this name need gradients of the loss, and the loss is a distance
    from the outputs of the unchanged model. In that model, the gradient of such a distance is 0.
    """
    require_one_of("scores", name, PRUNING_SCORES)
    require_one_of("constraint", constraint, CONSTRAINTS)
    if name != "ablation" and uses_loss(name, constraint) and hasattr(loss, "prepare"):
        expected = "ablation or magnitude for a model without a language-model head"
        raise InputError("scores", expected=expected, got=f"{name} with the constraint {constraint}")
