"""Check the standard errors of the findings by a bootstrap over documents. Imports nothing of headwise.

    python research/findings/check_errors.py [FOLDER]    writes FOLDER/errors.json

Every table in FOLDER with effects of single documents is read as Parquet. Means, medians, trimmed means, outliers,
p-values and q-values are computed again from these effects by definitions of this file. Each standard error is divided
by that of the bootstrap. The same is done for the entropies of profiles. The script fails if a ratio is below 0.9 or
above 1.1, or if a number differs.
"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import scipy.stats

DRAWS, SEED = 4000, 0
ALLOWED = (0.9, 1.1)
"""Allowed ratios of a standard error to that of the bootstrap."""

SAME = 1e-9
"""Largest difference, relative to the largest number of a column, of numbers that are computed again."""

SAME_ENTROPY = 1e-5
"""The same for entropies, which were measured in float32 and in other batches."""


def bootstrap_errors(values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the standard error of the mean over sequences, for each column of `values`, by drawing documents with
    replacement `DRAWS` times.

    Args:
        values: mean of each document in each column, `(documents, columns)`.
        sizes: number of sequences of each document.
    """
    generator = np.random.default_rng(SEED)
    times = generator.multinomial(len(sizes), np.full(len(sizes), 1 / len(sizes)), size=DRAWS)
    weights = times * sizes
    return np.asarray((weights @ values / weights.sum(1, keepdims=True)).std(0, ddof=1))


def degrees_of_freedom(sizes: np.ndarray) -> float:
    """Return one less than the effective number of documents (Kish 1992), from their numbers of sequences."""
    return float(sizes.sum() ** 2 / np.square(sizes).sum()) - 1


def adjusted(p: Sequence[float]) -> np.ndarray:
    """Return the p-values, adjusted by Benjamini and Hochberg (1995): for the rank i of m ascending values, the least
    of p_j m / j over all j from i on.
    """
    order = np.argsort(p)
    ranked = np.asarray(p)[order] * len(p) / np.arange(1, len(p) + 1)
    found = np.empty(len(p))
    found[order] = np.minimum.accumulate(ranked[::-1])[::-1]
    return found


def trimmed(values: np.ndarray) -> float:
    """Return the mean of the values without a fifth of them at each end, rounded down."""
    cut = len(values) // 5
    return float(np.sort(values)[cut : len(values) - cut].mean())


def outliers(values: np.ndarray) -> int:
    """Return the number of values with a modified z-score above 3.5 (Iglewicz and Hoaglin 1993, section 3.3)."""
    away = np.abs(values - np.median(values))
    scale = np.median(away) / 0.6744897501960817 or away.mean() * math.sqrt(math.pi / 2)
    return int((away > 3.5 * scale).sum()) if scale else 0


def check_ablation(path: Path) -> dict[str, Any]:
    """Return what `errors.json` has on a table of ablation effects: the ratios, and the columns that differ."""
    table = pyarrow.parquet.read_table(path)
    columns, shared = table.to_pydict(), json.loads(table.schema.metadata[b"headwise_samples"])
    baseline = json.loads(table.schema.metadata[b"headwise"])["baseline"]
    values, sizes = np.array(columns["samples"]).T, np.array(shared["sequences"])
    losses = np.array(shared["losses"])[:, None]
    ratios = {
        "cost": np.array(columns["cost_sem"]) / bootstrap_errors(values, sizes),
        "loss": np.array(columns["loss_sem"]) / bootstrap_errors(values + losses, sizes),
    }
    if abs(baseline["value"]) > SAME:
        ratios["baseline"] = baseline["sem"] / bootstrap_errors(losses, sizes)
    expected = {
        "cost": sizes @ values / sizes.sum(),
        "cost_n": [len(sizes)] * len(values.T),
        "cost_df": [degrees_of_freedom(sizes)] * len(values.T),
        "cost_median": [np.median(row) for row in values.T],
        "cost_trimmed": [trimmed(row) for row in values.T],
        "cost_outliers": [outliers(row) for row in values.T],
    }
    if "cost_p" in columns:
        statistic = np.abs(expected["cost"]) / np.array(columns["cost_sem"])
        expected["cost_p"] = 2 * scipy.stats.t.sf(statistic, degrees_of_freedom(sizes))
        expected["cost_q"] = adjusted(expected["cost_p"])
    return summary(ratios, len(sizes), differing(columns, expected, SAME))


def check_profile(folder: Path) -> dict[str, Any]:
    """Return what `errors.json` has on the entropies of a profile; and the median, over heads, of the clustered
    standard error divided by the one that treats all sequences as independent.
    """
    columns = pyarrow.parquet.read_table(folder / "profile.parquet").to_pydict()
    raw = json.loads((folder / "entropies.json").read_text())
    documents, sizes = np.unique(raw["documents"], return_counts=True)
    names = [f"{layer}.{head}" for layer, head in zip(columns["layer"], columns["head"], strict=True)]
    sequences = np.array([raw["values"][name] for name in names]).T
    of_documents = np.array(raw["documents"])
    values = np.array([sequences[of_documents == document].mean(0) for document in documents])
    errors = np.array(columns["entropy_sem"])
    naive = sequences.std(0, ddof=1) / math.sqrt(len(sequences))
    expected = {
        "entropy": sequences.mean(0),
        "entropy_n": [len(documents)] * len(names),
        "entropy_df": [degrees_of_freedom(sizes)] * len(names),
    }
    found = summary(
        {"entropy": errors / bootstrap_errors(values, sizes)}, len(sizes), differing(columns, expected, SAME_ENTROPY)
    )
    return {**found, "sequences": len(sequences), "clustered over independent": float(np.median(errors / naive))}


def differing(columns: dict[str, list[float]], expected: dict[str, Any], tolerance: float) -> list[str]:
    """Return the names of the columns that differ from what is expected."""
    return [
        name
        for name, numbers in expected.items()
        if np.abs(np.array(columns[name]) - np.array(numbers)).max() > tolerance * max(1e-300, np.abs(numbers).max())
    ]


def summary(ratios: dict[str, np.ndarray], documents: int, different: list[str]) -> dict[str, Any]:
    """Return the least, median and largest ratio of each column, the number of documents, and what differs."""
    return {
        "documents": documents,
        "ratios": {
            name: [float(of(numbers)) for of in (np.min, np.median, np.max)] for name, numbers in ratios.items()
        },
        "differs": different,
    }


def check(folder: Path) -> dict[str, Any]:
    """Return the results of all tables below a folder, by their path."""
    found = {}
    for path in sorted(folder.rglob("ablation.parquet")):
        found[str(path.parent.relative_to(folder))] = check_ablation(path)
    for path in sorted(folder.rglob("entropies.json")):
        found[str(path.parent.relative_to(folder))] = check_profile(path.parent)
    return found


def is_right(entry: dict[str, Any]) -> bool:
    """Return whether all ratios of an entry are allowed, and nothing differs."""
    within = all(low >= ALLOWED[0] and high <= ALLOWED[1] for low, _, high in entry["ratios"].values())
    return within and not entry["differs"]


def main() -> int:
    """Check a folder, write the file and print a line for each column; return 1 if a check fails."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results"
    found = check(folder)
    (folder / "errors.json").write_text(json.dumps(found, indent=1) + "\n")
    for name, entry in found.items():
        for column, (least, median, most) in entry["ratios"].items():
            print(f"{name}, {column}, {entry['documents']} documents: {median:.3f} ({least:.3f} to {most:.3f})")
        if not is_right(entry):
            print(f"{name}: a ratio is not allowed, or these columns differ: {entry['differs']}")
    return 0 if found and all(map(is_right, found.values())) else 1


if __name__ == "__main__":
    sys.exit(main())
