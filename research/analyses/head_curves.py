"""Measure the results of the pages about positions, distances and in-context learning, and draw their pictures.

    python -m research.analyses.head_curves PART FOLDER

PART is "positions", "distances", "in-context" (some heads, 8 sequences), "in-context-all" (all heads, the default of 3
sequences) or "draw"; results are saved in FOLDER, from which a stopped run resumes.
The data are the topics of the language reference that comes with Python, one document each.
"""

import random
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import headwise as hw

PICTURES = Path(__file__).parent.parent.parent / "docs" / "pictures"
HEADS, SEQUENCES = 12, 8
"""Number of heads that copy most on repeated random tokens and of other heads, and of sequences, for in-context."""

SHOWN = [(0, 6), (2, 1), (7, 2), (18, 6), (19, 0), (18, 8)]
"""Heads in the picture of entropy against position."""


def documents() -> list[str]:
    """Return all topics, in alphabetical order."""
    return [topics[name] for name in sorted(topics)]


def measure(part: str, folder: Path) -> None:
    """Measure one part for SmolLM2, and print the processor time."""
    start, processor = time.monotonic(), time.process_time()
    model, tokenizer = hw.load("smollm2", "causal" if part.startswith("in-context") else None)
    title = "SmolLM2-135M-Instruct"
    if part == "positions":
        texts = hw.Texts(documents(), tokenizer, 2048, "truncate", batch=4)
        hw.position_curves(model, texts, out=folder / part, title=title)
    elif part == "distances":
        texts = hw.Texts(documents(), tokenizer, 1024, "truncate", batch=4, limit=40)
        hw.attention_distances(model, texts, out=folder / part, title=title)
    else:
        texts = hw.Texts(documents(), tokenizer, 512, "truncate")
        options: dict[str, Any] = {} if part == "in-context-all" else _some_heads(model, tokenizer)
        scores = hw.in_context_score(model, texts, out=folder / part, title=title, **options)
        scores.save(folder / part, force=True)
    seconds, of_processor = time.monotonic() - start, time.process_time() - processor
    print(f"{part}: {seconds:.0f} s, {of_processor:.0f} s of processor time")


def _some_heads(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Return the options that measure the heads that copy most, as many others, and more sequences."""
    heads = hw.profile(model, hw.Texts(["a b"], tokenizer), repeats=True).heads
    order = sorted(heads, key=lambda head: -head.statistics["induction_random"].value)
    pairs = [(head.layer, head.head) for head in order]
    chosen = pairs[:HEADS] + random.Random(0).sample(pairs[HEADS:], HEADS)
    return {"heads": chosen, "sequences": SEQUENCES}


def draw(folder: Path) -> None:
    """Draw the pictures of all parts."""
    axes: dict[str, Any] = {
        "position-curves": hw.PositionCurves.load(folder / "positions").plot("entropy", heads=SHOWN),
        "attention-distances": hw.AttentionDistances.load(folder / "distances").curve.plot("within_with_first"),
        "in-context": hw.InContextScores.load(folder / "in-context").plot(
            "change_zero", kind="scatter", against="induction_random", errors=1.96, top=5
        ),
    }
    for name, each in axes.items():
        each.figure.savefig(PICTURES / f"{name}.png", dpi=110)


if __name__ == "__main__":
    chosen_part, chosen_folder = sys.argv[1], Path(sys.argv[2])
    draw(chosen_folder) if chosen_part == "draw" else measure(chosen_part, chosen_folder)
