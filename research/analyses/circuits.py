"""Circuits of two published models: findings and picture of docs/circuits.md.

    python -m research.analyses.circuits FOLDER [--draw]

The rules, written before the run:

1. Induction heads are those of docs/reports/findings.md: heads of SmolLM2 that put at least half of their attention on
   the token after an earlier copy, on repeated random tokens. Scores by weights have no standard errors, so layers are
   the samples of tests.
2. Do induction heads compose with earlier heads, and do they copy? In each layer that has induction heads, take the
   mean score of these minus the mean score of the other heads. Student's t over these layers tests it against 0, for
   the largest Q-, K- and V-composition with an earlier head, and for the copying score.
3. Do scores by weights predict the ablation effect? In each layer, take Spearman's correlation over heads between a
   score and the effect, which docs/reports/findings.md measured on text. Student's t over layers tests the mean.
4. The p-values of all tests of a model are corrected together (Benjamini and Hochberg 1995). A finding has q <= 0.05.

A table that is in FOLDER is not computed again. `--draw` draws the picture.
"""

import argparse
import math
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import scipy.stats

import headwise as hw
from headwise.data.models import load
from headwise.runs.head_table import HeadTable
from research.markdown import markdown_table

ROOT = Path(__file__).parent.parent.parent
PICTURES, FINDINGS = ROOT / "docs" / "pictures", ROOT / "research" / "findings" / "results"
COPIES = 0.5
"""Attention to the token after an earlier copy from which a head is an induction head."""

Numbers = Mapping[tuple[int, int], float]
"""A number for each head, `(layer, head)`."""


def measure(name: str, folder: Path) -> None:
    """Compute the tables of a model that are not in the folder yet, and print the time."""
    if (folder / name).exists():
        return
    loaded = load(name, "causal" if name == "smollm2" else None)
    start, processor = time.monotonic(), time.process_time()
    circuits = hw.circuits(loaded.model, title=loaded.title)
    circuits.scores().save(folder / name / "scores")
    if circuits.has_linear_stream:
        circuits.composition().save(folder / name / "composition")
    print(f"{name}: {time.monotonic() - start:.0f} s, {time.process_time() - processor:.0f} s of processor time")


def scores_of(name: str, folder: Path) -> dict[str, Numbers]:
    """Return the scores of all heads by weights, by name: those of the heads, and the largest compositions."""
    table = hw.CircuitScores.load(folder / name / "scores")
    scores = {each: numbers(table, each) for each in table.statistics}
    if (folder / name / "composition").exists():
        summary = hw.Composition.load(folder / name / "composition").summary()
        scores |= {each: numbers(summary, each) for each in ("q_in", "k_in", "v_in")}
    return scores


def numbers(table: HeadTable[Any], statistic: str) -> Numbers:
    """Return the number of each head that has one."""
    values = {(row.layer, row.head): row.statistics[statistic].value for row in table.rows}
    return {head: value for head, value in values.items() if not math.isnan(value)}


def by_layer(scores: Numbers) -> dict[int, list[tuple[int, int]]]:
    """Return the heads of each layer that have a score."""
    layers: dict[int, list[tuple[int, int]]] = {}
    for head in scores:
        layers.setdefault(head[0], []).append(head)
    return layers


def excesses(scores: Numbers, chosen: set[tuple[int, int]]) -> list[float]:
    """Return the mean score of chosen heads minus that of the others, in each layer that has both."""
    return [
        fmean(scores[head] for head in heads if head in chosen)
        - fmean(scores[head] for head in heads if head not in chosen)
        for heads in by_layer(scores).values()
        if 0 < len(chosen & set(heads)) < len(heads)
    ]


def correlations(scores: Numbers, effects: Numbers) -> list[float]:
    """Return Spearman's correlation over the heads of each layer."""
    return [
        float(scipy.stats.spearmanr([scores[head] for head in heads], [effects[head] for head in heads]).statistic)
        for heads in by_layer(scores).values()
    ]


def findings(name: str, folder: Path) -> list[tuple[str, ...]]:
    """Return a row for each test of a model: what is tested, its mean over layers, and the corrected p-value."""
    scores = scores_of(name, folder)
    tested: dict[str, list[float]] = {}
    if name == "smollm2":
        repeats = numbers(hw.load_profile(FINDINGS / name / "profile"), "induction_random")
        induction = {head for head, share in repeats.items() if share >= COPIES}
        for score in ("q_in", "k_in", "v_in", "copying"):
            tested[f"{score} of {len(induction)} induction heads, minus others"] = excesses(scores[score], induction)
    effects = numbers(hw.Ablation.load(FINDINGS / name / "heads"), "cost")
    for score in scores:
        tested[f"{score} and ablation effect, correlation"] = correlations(scores[score], effects)
    p_values = [scipy.stats.ttest_1samp(each, 0).pvalue for each in tested.values()]
    adjusted = scipy.stats.false_discovery_control(p_values)
    return [
        (words, str(len(each)), f"{fmean(each):+.3f} ± {stdev(each) / len(each) ** 0.5:.3f}", f"{q:.2g}")
        for (words, each), q in zip(tested.items(), adjusted, strict=True)
    ]


def draw(folder: Path) -> None:
    """Draw the K-composition of all pairs of SmolLM2, and the pairs with the largest scores."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12.5, 5.2), layout="constrained")
    composition = hw.Composition.load(folder / "smollm2" / "composition")
    composition.plot("k", ax=axes[0])
    composition.plot("k", kind="ranking", top=12, ax=axes[1])
    figure.savefig(PICTURES / "circuits.png", dpi=110)


def main() -> None:
    """Compute the tables, print the findings, and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    for name in ("minilm", "smollm2"):
        measure(name, options.folder)
        print(f"\n{name}")
        headers = ("test", "layers", "mean over layers", "q")
        print("\n".join(markdown_table(headers, findings(name, options.folder))))
    if options.draw:
        draw(options.folder)


if __name__ == "__main__":
    main()
