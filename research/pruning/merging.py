"""Measure two real or trained models with fewer key/value heads, merged in all ways of `hw.merge_kv`.

    python -m research.pruning.merging

SmolLM2 has 3 key/value heads in each layer. The other model has one for each of its 8 heads; `headwise study` trains it
on docstrings that are neither calibration nor test documents. You can stop a run and start it again: it resumes. On 2
cores it takes about half an hour.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import headwise as hw
from headwise.settings import MergeMethod
from research.claims.environment import describe_environment
from research.claims.result_files import read_json, work_folder, write_json
from research.pruning.data import training
from research.pruning.measured_models import MeasuredModel, decoder, smollm2

RESULTS = Path(__file__).parent / "results" / "merging.json"

METHODS: tuple[MergeMethod, ...] = ("mean", "weighted_mean", "procrustes")
"""Ways in which heads become one."""

TRAINED_HEADS, TRAINED_WIDTH = 8, 32
"""Heads of the model that is trained, and their width."""

TOKENS = "2M"
"""Tokens of the training."""


def trained() -> MeasuredModel:
    """Return the trained model; it is trained first unless a run did so before."""
    folder = work_folder(RESULTS.parent) / "study"
    folder.mkdir(exist_ok=True)
    corpus = folder / "corpus.txt"
    corpus.write_text("\n\n".join(training()), encoding="utf-8")
    sizes = {"heads": TRAINED_HEADS, "embed-dim": TRAINED_HEADS * TRAINED_WIDTH, "layers": 4, "params": "4M"}
    numbers = {"context": 256, "tokens": TOKENS, "trials": 1, "seeds": 1, "vocabulary": 2048}
    options = [f"--{name}={value}" for name, value in (sizes | numbers).items()]
    command = [sys.executable, "-m", "headwise", "study", f"--data={corpus}", f"--out={folder / 'study'}", *options]
    subprocess.run(command, check=True)
    (model,) = (folder / "study" / "models").iterdir()
    return decoder(str(model), f"A decoder with {TRAINED_HEADS} heads, trained by `headwise study`")


MODELS = {"trained": (trained, (4, 2, 1)), "smollm2": (smollm2, (1,))}
"""The models by name, each with the numbers of key/value heads that it gets."""


def ways(num_kv_heads: int) -> Iterator[dict[str, Any]]:
    """Yield the options of `hw.merge_kv`. If one key/value head remains, there is one way to group the heads."""
    for method in METHODS:
        for grouping in ("adjacent", "similarity") if num_kv_heads > 1 else ("adjacent",):
            for is_fitted in (False, True):
                yield {"method": method, "grouping": grouping, "reconstruct": is_fitted}


def measure(name: str, saved: dict[str, Any]) -> None:
    """Measure all ways for a model that have no result yet."""
    make, numbers = MODELS[name]
    measured = make()
    own = saved.setdefault(name, {"points": {}})
    if "dense" not in own:
        config: Any = measured.model.config
        own |= {"dense": measured.errors_of(measured.model), "title": measured.title}
        own["kv_heads"] = config.num_key_value_heads
    for number in numbers:
        for way in ways(number):
            key = f"{number}, {way['method']}, {way['grouping']}, {'fitted' if way['reconstruct'] else 'as it is'}"
            if key in own["points"]:
                continue
            merged = hw.merge_kv(measured.model, num_kv_heads=number, calibration=measured.calibration, **way)
            errors = measured.errors_of(merged)
            own["points"][key] = {"num_kv_heads": number, **way, "errors": errors}
            saved["about"] = describe_environment()
            write_json(RESULTS, saved)
            print(name, key, round(sum(errors) / len(errors), 4), flush=True)


def main() -> None:
    """Measure both models."""
    torch.manual_seed(0)
    saved: dict[str, Any] = read_json(RESULTS) if RESULTS.is_file() else {}
    for name in MODELS:
        measure(name, saved)


if __name__ == "__main__":
    main()
