"""Train small decoders and measure every head; `research.formation.report` writes the page from the results.

    python -m research.formation [--force]

You can stop a run and start it again: each finished training has a file of results and is not repeated.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from research.claims.environment import describe_environment
from research.claims.result_files import write_json
from research.formation.decoder import Shape
from research.formation.text import VOCABULARY, Text, text
from research.formation.training import Plan, measured_training

RESULTS = Path(__file__).parent / "results"

SEEDS, PLAIN_SEEDS = 5, 2
"""Numbers of trainings on rows with quotes, and on unchanged rows."""


def formation(results: Path, read_text: Callable[[], Text], shape: Shape, plan: Plan, *, force: bool = False) -> None:
    """Measure the trainings of which the folder has no results."""
    for is_quoting, seeds in ((True, SEEDS), (False, PLAIN_SEEDS)):
        for seed in range(seeds):
            path = results / f"{'quotes' if is_quoting else 'plain'}-{seed}.json"
            if force or not path.exists():
                _save(path, measured_training(read_text(), shape, plan, seed, is_quoting=is_quoting))


def _save(path: Path, result: dict[str, Any]) -> None:
    """Write a result with the environment, and print its name and its duration."""
    write_json(path, {"environment": describe_environment(), **result}, indent=None)
    print(f"{path.stem}: {result['seconds']:.0f} s", flush=True)


def main() -> None:
    """Measure all trainings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--force", action="store_true", help="repeat trainings that already have results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    formation(RESULTS, text, Shape(VOCABULARY), Plan(), force=options.force)


if __name__ == "__main__":
    main()
