"""Pruning curves of two published models: the loss without heads in three orders, and without random ones.

    python -m research.analyses.pruning_curves FOLDER [--only minilm]

Importance and ablation effects, which order the heads, are measured on other documents than the curves. The order of a
score is better than random at a share if the loss lies below the prediction interval of the random orders there
(Student's t with the standard deviation over orders), at a false discovery rate of 5 % over all orders and shares of a
model. A stopped run resumes. Prints the table of docs/importance.md and draws its picture.
"""

import argparse
import math
import random
import statistics
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import scipy.stats

import headwise as hw
from headwise.data.models import load
from research.markdown import markdown_table

PICTURES = Path(__file__).parent.parent.parent / "docs" / "pictures"
DOCUMENTS, TOKENS, RANDOM = 12, 96, 15
LEAST = 1500
"""Smallest number of characters of a document."""

SHARES = (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)


def documents(seed: int = 0) -> tuple[list[str], list[str]]:
    """Return topics of Python's language reference, drawn with a seed: those for scores and those for curves."""
    long = [topics[name] for name in sorted(topics) if len(topics[name]) >= LEAST]
    drawn = random.Random(seed).sample(long, 2 * DOCUMENTS)
    return drawn[:DOCUMENTS], drawn[DOCUMENTS:]


def measure(name: str, folder: Path) -> hw.PruningCurve:
    """Measure scores and curves of a model, and print the processor time."""
    start = time.process_time()
    loaded = load(name, "causal" if name == "smollm2" else None)
    loss: Any = hw.next_token_loss if name == "smollm2" else hw.EmbeddingDistance()
    scored, judged = (hw.Texts(each, loaded.tokenizer, TOKENS, "truncate", batch=4) for each in documents())
    options: dict[str, Any] = {"title": loaded.title, "progress": True}
    orders: dict[str, Any] = {"ablation": hw.ablate(loaded.model, scored, loss, out=folder / "scores", **options)}
    if name == "smollm2":  # the gradient of a distance is 0 at the unchanged model
        orders["importance"] = hw.importance(loaded.model, scored, loss, out=folder / "scores", force=True, **options)
    curve = hw.pruning_curve(
        loaded.model, judged, loss, orders, shares=SHARES, random=RANDOM, out=folder / "curve", **options
    )
    curve.save(folder / "curve", force=True)
    print(f"{name}: {time.process_time() - start:.0f} s of processor time")
    return curve


def comparison(curve: hw.PruningCurve) -> list[tuple[str, ...]]:
    """Return one row for each order and share: its loss, that of the random orders, and the corrected p-value."""
    drawn: dict[int, list[float]] = {}
    for row in curve.rows:
        if row.order == "random":
            drawn.setdefault(row.removed, []).append(row.statistics["loss"].value)
    points = [row for row in curve.rows if row.order != "random"]
    p_values = []
    for point in points:
        losses = drawn[point.removed]
        spread = statistics.stdev(losses) * math.sqrt(1 + 1 / len(losses))
        t = (point.statistics["loss"].value - statistics.fmean(losses)) / spread
        p_values.append(2 * scipy.stats.t.sf(abs(t), len(losses) - 1))
    adjusted = scipy.stats.false_discovery_control(p_values)
    return [
        (
            point.order,
            f"{point.share:.0%}",
            f"{point.statistics['loss'].value:.3f} ± {point.statistics['loss'].sem:.3f}",
            f"{statistics.fmean(drawn[point.removed]):.3f}",
            f"{min(drawn[point.removed]):.3f} to {max(drawn[point.removed]):.3f}",
            f"{q:.2g}",
        )
        for point, q in zip(points, adjusted, strict=True)
    ]


def main() -> None:
    """Measure the models, print their tables and draw their curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=("minilm", "smollm2"))
    options = parser.parse_args()
    headers = ("order", "removed", "loss", "random orders, mean", "smallest to largest", "q")
    for name in [options.only] if options.only else ("minilm", "smollm2"):
        curve = measure(name, options.folder / name)
        print("\n".join(markdown_table(headers, comparison(curve))))
        figure: Any = curve.plot().figure
        figure.savefig(PICTURES / f"pruning-curve-{name}.png", dpi=110)


if __name__ == "__main__":
    main()
