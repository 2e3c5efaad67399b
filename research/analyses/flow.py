"""Norm-weighted attention and attention rollout of two published models, with findings by rules stated here.

    python -m research.analyses.flow PART FOLDER [--only minilm]

PART is "norms", "rollout", "findings" or "draw"; tables are saved in FOLDER. The data are the first 40 topics of the
language reference that comes with Python, one document each. For SmolLM2-135M-Instruct a document is its first 512
tokens; for all-MiniLM-L6-v2, which reads 256 tokens, it is cut into pieces of 256 tokens, of which the first 120 are
used. Standard errors are clustered by document.

The rules, written before the run:

1. A head differs in a column (a change, or the preference) if the adjusted p-value of Student's t-test of its mean over
   documents against zero is at most 0.05. Adjusted means Benjamini and Hochberg 1995 over all heads of the model, and
   each column is a family of tests of its own.
2. A finding counts the heads that differ, by sign, and states the median over all heads. It states no cause.
3. Kobayashi et al. find that heads give large weights to special tokens whose vectors are short. The claim holds in a
   model for the first token (decoder) or special tokens (encoder) if the change of that share is negative in more than
   half of the heads that differ, and at least half of all heads differ.
4. Rollout makes attention more uniform over tokens than the weights of a layer if the entropy of the rollout rises from
   each layer to the next, by more than two standard errors of the paired difference. Since the tables have no paired
   differences of layers, a rise must exceed two times the root of the sum of both squared errors, which is larger.
5. Heads of layer 0 are left out of tests of rollout, in which they cannot change.
"""

import argparse
import resource
import statistics
import time
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import headwise as hw
from headwise.data.models import load
from headwise.runs.significance import zero_tests
from research.markdown import markdown_table

PICTURES = Path(__file__).parent.parent.parent / "docs" / "pictures"
DOCUMENTS = 40
LEVEL = 0.05
TESTED = ("entropy", "first", "special", "self", "distance")


def texts(name: str, tokenizer: Any) -> hw.Texts:
    """Return the data for a model."""
    documents = [topics[key] for key in sorted(topics)][:DOCUMENTS]
    if name == "smollm2":
        return hw.Texts(documents, tokenizer, 512, "truncate", batch=4)
    return hw.Texts(documents, tokenizer, 256, "cut", batch=8, limit=120)


def measure(part: str, name: str, folder: Path) -> None:
    """Measure one part for a model, and print the time and the peak memory."""
    loaded = load(name)
    data = texts(name, loaded.tokenizer)
    start, processor = time.perf_counter(), time.process_time()
    if part == "norms":
        table: Any = hw.norm_weighted(loaded.model, data, title=loaded.title)
    else:
        table = hw.rollout(loaded.model, data, title=loaded.title)
    wall, used = time.perf_counter() - start, time.process_time() - processor
    table.save(folder / name / part, force=True)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    tokens = sum(map(len, data.sequences))
    print(f"{name} {part}: {len(data.sequences)} sequences, {tokens} tokens, {wall:.0f} s, {used:.0f} s of processor")
    print(f"{name} {part}: at most {memory:.1f} GiB", flush=True)


def tested(rows: Any, column: str) -> tuple[str, ...]:
    """Return a line of a table of findings: heads that differ, by sign, and the median."""
    measured = [row.statistics[column] for row in rows]
    values, q = [each.value for each in measured], zero_tests(column, measured)[f"{column}_q"]
    below, above = (
        sum(q_of <= LEVEL and sign * value > 0 for q_of, value in zip(q, values, strict=True)) for sign in (-1, 1)
    )
    return column, f"{statistics.median(values):+.3f}", str(below), str(above), str(len(values) - below - above)


def findings(name: str, folder: Path) -> None:
    """Print the findings of a model."""
    headers = ("column", "median", "heads below 0", "heads above 0", "neither")
    norms = hw.NormWeighted.load(folder / name / "norms")
    columns = [f"{each}_change" for each in TESTED if f"{each}_change" in norms.statistics]
    print(f"\n{name}, norms, {len(norms.rows)} heads")
    print("\n".join(markdown_table(headers, [tested(norms.rows, each) for each in (*columns, "norm_preference")])))
    moved = [row.statistics["moved"].value for row in norms.rows]
    print(f"moved: median {statistics.median(moved):.3f}, {min(moved):.3f} to {max(moved):.3f}")
    for column in ("moved", "norm_preference", "first_change"):
        ranked = sorted(norms.rows, key=lambda row: row.statistics[column].value)
        for row in (*ranked[:3], *ranked[-3:]):
            shown = {key: row.statistics[key] for key in ("moved", "norm_preference", "norm_first", "first_change")}
            print(column, row.name, *(f"{key} {each.value:.3f} ± {each.sem:.3f}" for key, each in shown.items()))
    rollout = hw.Rollout.load(folder / name / "rollout")
    upper = [row for row in rollout.rows if row.layer]
    columns = [f"{each}_change" for each in TESTED if f"{each}_change" in rollout.statistics]
    print(f"\n{name}, rollout, {len(upper)} heads above layer 0")
    print("\n".join(markdown_table(headers, [tested(upper, each) for each in columns])))
    names = rollout.layers.statistics
    lines = [
        (str(row.layer), *(f"{row.statistics[each].value:.3f} ± {row.statistics[each].sem:.3f}" for each in names))
        for row in rollout.layers.rows
    ]
    print("\n".join(markdown_table(("layer", *names), lines)))
    entropies = [row.statistics["entropy"] for row in rollout.layers.rows]
    rises = [b.value - a.value > 2 * (a.sem**2 + b.sem**2) ** 0.5 for a, b in pairwise(entropies)]
    print(f"the entropy rises in {sum(rises)} of {len(rises)} steps", flush=True)


def draw(folder: Path) -> None:
    """Draw the pictures of both pages."""
    from matplotlib import pyplot

    for part, name in (("norm-weighted", "norms"), ("rollout", "rollout")):
        figure, axes = pyplot.subplots(1, 2, figsize=(12.5, 4.6), layout="constrained")
        for ax, model in zip(axes, ("smollm2", "minilm"), strict=True):
            if name == "norms":
                table: Any = hw.NormWeighted.load(folder / model / name)
                table.plot("norm_preference", kind="scatter", against="norm_first", top=4, ax=ax)
            else:
                hw.Rollout.load(folder / model / name).layers.plot(ax=ax)
        figure.savefig(PICTURES / f"{part}.png", dpi=110)


def main() -> None:
    """Measure the models, print the findings, or draw the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("norms", "rollout", "findings", "draw"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=("minilm", "smollm2"))
    options = parser.parse_args()
    if options.part == "draw":
        draw(options.folder)
        return
    for name in [options.only] if options.only else ("minilm", "smollm2"):
        if options.part == "findings":
            findings(name, options.folder)
        else:
            measure(options.part, name, options.folder)


if __name__ == "__main__":
    main()
