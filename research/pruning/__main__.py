"""Measure two real models without 10 to 70 % of their heads; `research.pruning.report` writes the report from it.

    python -m research.pruning [--only smollm2] [--only minilm]

You can stop a run and start it again: it resumes. On 2 cores SmolLM2 takes some three hours, and MiniLM ten minutes.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import headwise as hw
from headwise.compression.pruning.plan_pruning import UnitScores
from headwise.compression.pruning.pruning_plan import Head
from headwise.compression.scores.named_scores import uses_loss
from research.claims.environment import describe_environment
from research.claims.result_files import read_json, work_folder, write_json
from research.pruning.data import overlap
from research.pruning.measured_models import MODELS, MeasuredModel

RESULTS = Path(__file__).parent / "results"

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
"""Shares of the heads that are removed."""


@dataclass(frozen=True)
class Series:
    """Way to choose the heads that remain.

    Attributes:
        name: name of the scores.
        scores: function of a model, whether output projections are fitted after the removal, and a constraint; returns
            the scores.
        rounds_per_tenth: number of times that heads are scored while a tenth of all heads is removed; 0 for a single
            time at the start, None for once per removal.
    """

    name: str
    scores: Callable[[MeasuredModel, bool, str], UnitScores]
    rounds_per_tenth: int | None

    @property
    def key(self) -> str:
        """Name of the series in the results."""
        return f"{self.name}, {'one-shot' if self.rounds_per_tenth == 0 else 'iterative'}"

    def rounds(self, share: float) -> int | None:
        """Return the number of times that heads are scored while `share` of them is removed."""
        return None if self.rounds_per_tenth is None else max(1, round(10 * share) * self.rounds_per_tenth)


def magnitude(measured: MeasuredModel, is_fitted: bool, constraint: str) -> UnitScores:
    """Return the scores by weights."""
    return hw.MagnitudeScores(measured.model, measured.calibration[0])


def importance(measured: MeasuredModel, is_fitted: bool, constraint: str) -> UnitScores:
    """Return the scores by gradients."""
    return hw.ImportanceScores(measured.model, measured.calibration, measured.slope_loss)


def ablation(measured: MeasuredModel, is_fitted: bool, constraint: str) -> UnitScores:
    """Return the scores by measured ablation, on a quarter of the calibration data: it takes a run for each head."""
    return hw.AblationScores(measured.model, measured.calibration[: len(measured.calibration) // 4], measured.loss)


def least_squares(measured: MeasuredModel, is_fitted: bool, constraint: str) -> UnitScores:
    """Return the scores by least squares, with a loss only where heads of different layers compete, as the command
    `headwise prune` does.
    """
    loss = measured.slope_loss if uses_loss("least-squares", constraint) else None
    return hw.LeastSquaresScores(measured.model, measured.calibration, loss, fitted=is_fitted)


SERIES = (
    Series("magnitude", magnitude, 0),
    Series("least squares", least_squares, None),
    Series("gradient importance", importance, 0),
    Series("gradient importance", importance, 2),
    Series("least squares", least_squares, 0),
    Series("measured ablation", ablation, 0),
    Series("measured ablation", ablation, 1),
)
"""All ways, in the order in which they are measured. Magnitudes do not depend on the heads that were removed."""


class RememberedScores:
    """Scores that are stored in a file, so that each is measured once.

    Args:
        scores: the scores.
        file: a JSON file, which may exist.
    """

    def __init__(self, scores: UnitScores, file: Path) -> None:
        self._scores, self._file = scores, file
        self._known: dict[str, list[float]] = read_json(file) if file.is_file() else {}
        self.name, self.rows, self.identity = scores.name, scores.rows, scores.identity
        self.rounds, self.is_comparable = scores.rounds, scores.is_comparable

    def of(self, units: Sequence[tuple[Head, ...]], removed: frozenset[Head]) -> list[float]:
        """Return the score of each unit, given that some heads were removed before."""
        key = json.dumps([sorted(removed), [list(unit) for unit in units]])
        if key not in self._known:
            self._known[key] = self._scores.of(units, removed)
            self._file.write_text(json.dumps(self._known))
        return self._known[key]


def points(constraint: str) -> Iterator[tuple[Series, float, bool]]:
    """Yield all combinations of a way to choose heads, a share of removed heads, and reconstruction or none."""
    shares = SHARES if constraint == "free" else (1 / 3, 2 / 3)
    for series in SERIES:
        for share in shares:
            for is_reconstructed in (False, True):
                yield series, share, is_reconstructed


def measure(name: str, constraint: str) -> None:
    """Measure all points of a model and a constraint that have no result yet."""
    file = RESULTS / f"{name}-{constraint}.json"
    saved: dict[str, Any] = read_json(file) if file.is_file() else {"points": {}}
    measured = MODELS[name]()
    scores: dict[str, UnitScores] = {}
    plans: dict[str, hw.PruningPlan] = {}
    if "dense" not in saved:
        saved["dense"] = measured.errors_of(measured.model)
        saved |= {"title": measured.title, "unit": measured.unit, "overlap": overlap()}
    for series, share, is_reconstructed in points(constraint):
        key = f"{series.key}, {share:.0%}, {'reconstructed' if is_reconstructed else 'as it is'}"
        if key in saved["points"]:
            continue
        scored = f"{series.name}{'' if is_reconstructed or series.scores is not least_squares else ' without a fit'}"
        if scored not in scores:
            work = work_folder(RESULTS) / f"{name}-{constraint}-{scored.replace(' ', '-')}.json"
            found = series.scores(measured, is_reconstructed, constraint)
            is_chosen = isinstance(found, hw.LeastSquaresScores)  # held-out data decide between several scores
            scores[scored] = found if is_chosen else RememberedScores(found, work)
        plan_key = f"{scored}, {series.key}, {share:.0%}"
        if plan_key not in plans:
            rounds = series.rounds(share)
            plans[plan_key] = hw.plan_pruning(scores[scored], keep=1 - share, constraint=constraint, rounds=rounds)
        plan = plans[plan_key]
        calibration = measured.calibration if is_reconstructed else None
        errors = measured.errors_of(hw.prune(measured.model, plan, calibration=calibration))
        removed = 1 - plan.kept_heads / plan.heads
        saved["points"][key] = {
            **{"series": series.key, "share": share, "reconstructed": is_reconstructed},
            **{"removed": removed, "rounds": plan.rounds, "errors": errors},
        }
        saved["about"] = describe_environment()
        write_json(file, saved)
        print(name, constraint, key, round(sum(errors) / len(errors), 4), flush=True)


def main() -> None:
    """Measure both models, or those that `--only` names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, action="append", help="measure only this model; may be repeated")
    options = parser.parse_args()
    torch.manual_seed(0)
    for name in options.only or MODELS:
        for constraint in ("free", "groups"):
            measure(name, constraint)


if __name__ == "__main__":
    main()
