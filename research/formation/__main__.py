"""Train small decoders and measure every head; `research.formation.report` writes the page from the results.

    python -m research.formation [--force]

You can stop a run and start it again: each finished training has a file of results and is not repeated.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from research.claims.environment import describe_environment
from research.claims.result_files import write_json
from research.formation.decoder import Shape
from research.formation.growth import GrowthPlan, growing_training
from research.formation.text import VOCABULARY, Text, text
from research.formation.training import Plan, measured_training

RESULTS = Path(__file__).parent / "results"

TRAININGS = {"repeats": (5, 800), "quotes": (5, 1200), "plain": (2, 1200)}
"""Number of seeds and of steps, by the kind of the training rows."""

GROWTH_SEEDS = 3
"""Number of trainings with growing logits, each without and with QK-clip."""


def formation(results: Path, read_text: Callable[[], Text], shape: Shape, plan: Plan, *, force: bool = False) -> None:
    """Measure the trainings of which the folder has no results."""
    for kind, (seeds, steps) in TRAININGS.items():
        for seed in range(seeds):
            path = results / f"{kind}-{seed}.json"
            if force or not path.exists():
                _save(path, measured_training(read_text(), shape, replace(plan, steps=steps), seed, kind))


def growth(
    results: Path, read_text: Callable[[], Text], vocabulary: int, plan: GrowthPlan, *, force: bool = False
) -> None:
    """Measure the trainings with growing logits of which the folder has no results."""
    for seed in range(GROWTH_SEEDS):
        for is_clipped in (False, True):
            path = results / f"{'clipped' if is_clipped else 'growing'}-{seed}.json"
            if force or not path.exists():
                rows = read_text().training
                _save(path, growing_training(rows, vocabulary, plan, seed, is_clipped=is_clipped))


def _save(path: Path, result: dict[str, Any]) -> None:
    """Write a result with the environment, and print its name and its duration."""
    write_json(path, {"environment": describe_environment(), **result}, indent=None)
    print(f"{path.stem}: {result['seconds']:.0f} s, {result['processor_seconds']:.0f} s of processor time", flush=True)


def main() -> None:
    """Measure all trainings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--force", action="store_true", help="repeat trainings that already have results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    formation(RESULTS, text, Shape(VOCABULARY), Plan(), force=options.force)
    growth(RESULTS, text, VOCABULARY, GrowthPlan(), force=options.force)


if __name__ == "__main__":
    main()
