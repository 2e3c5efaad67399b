"""Write docs/pruning.md and its pictures from research/pruning/results/.

python -m research.pruning.report
"""

import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import scipy.stats

from headwise.runs.rows import MeanEstimate
from research.claims.result_files import read_json
from research.markdown import markdown_table
from research.pruning.__main__ import RESULTS, SERIES
from research.pruning.merging import RESULTS as MERGING

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "pruning.md"
PICTURES = ROOT / "docs" / "pictures"

COMPARED, BASE = "least squares, iterative", "magnitude, one-shot"
"""The series that is compared with another one at each point."""

SCORES = list(dict.fromkeys(each.name for each in SERIES))
"""Names of the scores."""

KEYS = sorted((each.key for each in SERIES), key=lambda key: SCORES.index(key.rpartition(", ")[0]))
"""Series, those of the same scores one after the other."""

NEARLY = 0.02
"""Difference between two shares of heads that is not worth a sentence."""

LEVEL = 0.05
"""Level of the tests, over all points of a model together (Holm 1979)."""

MODELS = {"smollm2": "SmolLM2-135M-Instruct", "minilm": "all-MiniLM-L6-v2"}
"""Names of the models, by those of their results."""

NOTES = {"smollm2": "Its weights were dequantised from 4 bits (Q4_1)."}
"""A sentence about a model, by its name."""

INTRODUCTION = """\
This report shows how much the errors of {models} grow when 10 to 70 % of the attention heads are removed. The models
are not trained again. `research/pruning/report.py` writes it from the results of `make pruning`.

The rules of this paragraph were stated before the runs. Heads are chosen and output projections are fitted on the
calibration documents, docstrings of Python's standard library ({calibration} modules). All errors of this report are
measured on the test documents, docstrings of NetworkX and SymPy ({test} modules), the first 256 tokens of each. Of the
pieces of 64 characters of the test documents, {overlap:.1%} also occur in a calibration document.

The scores of heads, the fits of output projections and the rules were final before anything was measured on the test
documents. Some defects that concern other kinds of inputs were corrected after the runs had begun; 54 results of
MiniLM were measured again after that, and were the same. Scores and fits were developed with the topics of Python's
language reference. A first version of this report was then measured on docstrings of pandas and SciPy, and led to
three changes. First, cross-validation chooses the damping of the fits (the strength of their regularisation), because
fits with a fixed damping overfitted to the calibration documents. Second, least-squares scores assume what is done
after the removal of heads: a fit, or no fit. Third, if the same number of heads is removed in each layer,
least-squares scores do not use the loss of the model, as in `headwise prune`. After these changes, all results were
measured on the test documents.

Two changes came later. Fits, and scores by least squares without a loss, weight each token by its effect on the output
of the model, and held-out calibration documents decide between three plans of least squares (see
[pruning](prune.md#plans)). The rule was written down before its points were measured on the test documents. It was
chosen on the calibration documents, with plans and fits from 24 of them, and SmolLM2 without a third of its groups: on
the other 8, the loss by fitted scores was 0.079 ± 0.024 above that by scores without a fit and with equal weights. Only
the points of least squares under "as many heads in each layer" were measured again, on 2026-11-27;
empty cells were not. In all other fitted points, all tokens have equal weights in the fit. Before these changes,
fitted SmolLM2 by least squares (iterative) had 3.317 ± 0.078 without a third of its groups, and 4.626 ± 0.062 without
two thirds (one-shot: 4.537 ± 0.063). At two thirds the changes are a loss: 0.102 ± 0.016 (one-shot: 0.192 ± 0.023). It
is not known how much of it comes from the choice of groups and how much from the weights in the fit.

In the tables, each number is a mean over documents ± its standard error. The comparison of two ways to choose heads is
paired by document, and tested by Student's t, with Holm's correction for all points of a model (shares of
removed heads, with and without a fit) at the level of {level:.0%}."""

WAYS = """\
A head is chosen for removal by its *score*: magnitude (norm of all its weights), gradient importance (mean absolute
derivative of the loss with respect to the head's gate), measured ablation (rise of the loss, on a quarter of the
calibration documents), or least squares (second-order rise of the loss; with as many heads in each layer, the error
of the module's output, and a choice between three plans on held-out calibration documents). With grouped queries, a
key/value head and its query heads are removed together. Least squares scores heads for what is done next: the
projection is fitted again, or keeps its weights (`fitted=False`).
*One-shot* scores all heads once. *Iterative* scores the remaining ones again: twice for each tenth of the heads
(gradient importance), once for each tenth (ablation), or after each removal (least squares). Magnitudes, and scores
by least squares with a loss but without a fit, do not depend on the other heads. *Fitted* models have their output
projections fitted to the dense model by least squares, on the calibration documents, with a damping that
cross-validation chooses."""


MERGED = """\
`hw.merge_kv` replaces several key/value heads of a layer by one, which the query heads of all of them then use. The
error is the next-token loss in nats, on the documents of NetworkX and SymPy. *Adjacent* grouping merges consecutive
heads, and *similarity* grouping merges heads whose keys and values differ least. The columns state the number of
key/value heads that remain in each layer, and whether the output projections were fitted."""


@dataclass(frozen=True)
class Point:
    """Pruned model.

    Attributes:
        series: how its heads were chosen.
        share: share of the heads that should be removed.
        is_fitted: True if the output projections were fitted.
        removed: share of the heads that was removed.
        errors: error of each test document.
    """

    series: str
    share: float
    is_fitted: bool
    removed: float
    errors: Sequence[float]

    @property
    def mean(self) -> MeanEstimate:
        """Mean error over the documents."""
        return MeanEstimate.of(self.errors)


def points_of(saved: dict[str, Any]) -> list[Point]:
    """Return the points of a file of results."""
    return [
        Point(each["series"], each["share"], each["reconstructed"], each["removed"], each["errors"])
        for each in saved["points"].values()
    ]


def table_of(points: Sequence[Point], *, is_fitted: bool) -> list[str]:
    """Return a table with a row for each way to choose heads, and a column for each share."""
    shares = sorted({point.share for point in points})
    at = {(point.series, point.share): point for point in points if point.is_fitted == is_fitted}
    rows = []
    for series in KEYS:
        cells = [at.get((series, share)) for share in shares]
        if any(cells):
            rows.append([series, *("" if cell is None else _with_error(cell.mean) for cell in cells)])
    return markdown_table(["heads chosen by", *(f"{share:.0%} removed" for share in shares)], rows)


def comparison(points: Sequence[Point]) -> tuple[list[str], str]:
    """Return a table of the paired differences between least squares and magnitude, and a sentence about them."""
    at = {(point.series, point.share, point.is_fitted): point for point in points}
    rows, values = [], []
    for share in sorted({point.share for point in points}):
        cells = []
        for is_fitted in (False, True):
            pair = [at.get((series, share, is_fitted)) for series in (COMPARED, BASE)]
            if None in pair:
                cells.append("")
                continue
            new, old = (point.errors for point in pair if point is not None)
            differences = [after - before for after, before in zip(new, old, strict=True)]
            cells.append(_with_error(MeanEstimate.of(differences), sign="+"))
            values.append((statistics.fmean(differences), float(scipy.stats.ttest_1samp(differences, 0.0).pvalue)))
        rows.append([f"{share:.0%}", *cells])
    better = sum(mean < 0 for mean, _ in values)
    sure = sum(mean < 0 and is_sure for (mean, _), is_sure in zip(values, _holm([p for _, p in values]), strict=True))
    sentence = f"Least squares is better than magnitude at {better} of {len(values)} points, at {sure} beyond chance."
    return markdown_table(["removed", "as it is", "fitted"], rows), sentence


def against_others(points: Sequence[Point]) -> list[str]:
    """Return a table of the paired differences between least squares and each other way to choose heads."""
    at = {(point.series, point.share, point.is_fitted): point.errors for point in points}
    columns = [(share, is_fitted) for is_fitted in (False, True) for share in sorted({point.share for point in points})]
    rows = []
    for series in (key for key in KEYS if not key.startswith("least squares")):
        pairs = ((at.get((COMPARED, *column)), at.get((series, *column))) for column in columns)
        rows.append(
            [series, *("" if not new or not old else _with_error(_paired(new, old), "+") for new, old in pairs)]
        )
    names = [f"{share:.0%}, {'fitted' if is_fitted else 'as it is'}" for share, is_fitted in columns]
    return markdown_table(["other heads chosen by", *names], rows)


def _paired(new: Sequence[float], old: Sequence[float]) -> MeanEstimate:
    """Return the mean over documents of a difference of errors."""
    return MeanEstimate.of([after - before for after, before in zip(new, old, strict=True)])


def _holm(p_values: Sequence[float]) -> list[bool]:
    """Return for each p-value whether its hypothesis is rejected at `LEVEL` by the procedure of Holm (1979)."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    rejected = [False] * len(p_values)
    for rank, index in enumerate(order):
        if p_values[index] > LEVEL / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def _with_error(mean: MeanEstimate, sign: str = "") -> str:
    """Return `mean ± standard error` as text."""
    return f"{mean.value:{sign}.3f} ± {mean.sem:.3f}"


def fewer_removed(points: Sequence[Point]) -> list[str]:
    """Return a paragraph about the shares of heads that could not be removed; none if all could."""
    pairs = sorted({(point.share, point.removed) for point in points if point.removed < point.share - NEARLY})
    texts = [f"At {share:.0%}, {removed:.0%} were removed" for share, removed in pairs]
    return [*_paragraph(f"{', '.join(texts)}: a key/value head remains in each layer."), ""] if texts else []


def draw(name: str, title: str, unit: str, points: Sequence[Point], dense: float) -> str:
    """Draw the errors of a model against the share of removed heads, and return the name of the picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for ax, is_fitted in zip(axes, (False, True), strict=True):
        for key in KEYS:
            own = sorted((p for p in points if p.series == key and p.is_fitted == is_fitted), key=lambda p: p.share)
            score, _, way = key.rpartition(", ")
            style = "--" if way == "one-shot" and score != "magnitude" else "-"
            ax.errorbar(
                [100 * point.removed for point in own],
                [point.mean.value for point in own],
                [point.mean.sem for point in own],
                linestyle=style, marker="o", markersize=3, color=f"C{SCORES.index(score)}", label=key, capsize=2,
            )  # fmt: skip
        ax.axhline(dense, color="0.6", linewidth=1)
        ax.set_title("output projections fitted" if is_fitted else "weights as they are", fontsize="medium")
        ax.set_xlabel("heads removed (%)")
    axes[0].set_ylabel(unit)
    axes[1].legend(fontsize="x-small", loc="upper left")
    figure.suptitle(f"{title}: bars are standard errors over documents, the grey line is the dense model")
    figure.savefig(PICTURES / f"pruning-{name}.png", dpi=110)
    return f"pruning-{name}"


def section(name: str) -> list[str]:
    """Return the lines about one model; none if it was not measured."""
    file = RESULTS / f"{name}-free.json"
    if not file.is_file():
        return []
    saved = read_json(file)
    points, dense = points_of(saved), MeanEstimate.of(saved["dense"])
    value = f" The dense model has {_with_error(dense)}." if abs(dense.value) > 1e-6 else ""
    lines = [f"## {MODELS[name]}", "", *_paragraph(f"The error is {saved['unit']}.{value} {NOTES.get(name, '')}"), ""]
    image = draw(name, MODELS[name], saved["unit"], points, dense.value)
    lines += [f"![Error of {MODELS[name]} against the share of removed heads](pictures/{image}.png)", ""]
    lines += ["### Heads of all layers compete", "", *fewer_removed(points)]
    lines += ["Weights as they are:", "", *table_of(points, is_fitted=False)]
    lines += ["Output projections fitted:", "", *table_of(points, is_fitted=True)]
    table, sentence = comparison(points)
    lines += ["Error by least squares (iterative) minus error by magnitude:", "", *table, *_paragraph(sentence), ""]
    groups = RESULTS / f"{name}-groups.json"
    if groups.is_file():
        points = points_of(read_json(groups))
        lines += ["### As many heads in each layer", "", "Weights as they are:", "", *table_of(points, is_fitted=False)]
        lines += ["Output projections fitted:", "", *table_of(points, is_fitted=True)]
        lines += ["Error by least squares (iterative) minus error by another choice:", "", *against_others(points)]
    return [*lines, *_measured_on(saved["about"])]


def merging_section() -> list[str]:
    """Return the lines about merged key/value heads; none if they were not measured."""
    if not MERGING.is_file():
        return []
    saved = read_json(MERGING)
    lines = ["## Merged key/value heads", "", *_paragraph(MERGED), ""]
    kept = []
    for own in (each for name, each in saved.items() if name != "about"):
        points = list(own["points"].values())
        numbers = sorted({point["num_kv_heads"] for point in points}, reverse=True)
        columns = [(number, is_fitted) for number in numbers for is_fitted in (False, True)]
        errors = {
            (point["method"], point["grouping"], point["num_kv_heads"], point["reconstruct"]): point["errors"]
            for point in points
        }
        rows = []
        for method, grouping in dict.fromkeys(key[:2] for key in errors):
            cells = [errors.get((method, grouping, *column)) for column in columns]
            texts = ["" if each is None else _with_error(MeanEstimate.of(each)) for each in cells]
            rows.append([f"{method}, {grouping}", *texts])
        heads = [f"{number}, {'fitted' if is_fitted else 'as it is'}" for number, is_fitted in columns]
        lines += [f"### {own['title']}, {own['kv_heads']} key/value heads", ""]
        lines += [*_paragraph(f"The dense model has {_with_error(MeanEstimate.of(own['dense']))}."), ""]
        lines += markdown_table(["method, grouping", *heads], rows)
        kept += [
            statistics.fmean(errors["procrustes", *key]) <= statistics.fmean(errors["mean", *key])
            for key in (each[1:] for each in errors if each[0] == "mean")
            if ("procrustes", *key) in errors
        ]
    sentence = f"Alignment (procrustes) is at least as good as the mean in {sum(kept)} of {len(kept)} cells."
    return [*lines, *_paragraph(sentence), "", *_measured_on(saved["about"])]


def _measured_on(about: dict[str, Any]) -> list[str]:
    """Return the lines that state when, and with which versions, results were measured."""
    versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
    return [*_paragraph(f"Measured on {about['date']} with {versions}."), ""]


def _paragraph(text: str) -> list[str]:
    """Return a text as lines of a Markdown file."""
    return textwrap.wrap(" ".join(text.split()), 120)


def main() -> None:
    """Write the page and its pictures."""
    from research.pruning.data import CALIBRATION, TEST, overlap

    measured = " and ".join(title for name, title in MODELS.items() if (RESULTS / f"{name}-free.json").is_file())
    introduction = INTRODUCTION.format(
        models=measured, calibration=CALIBRATION, test=TEST, overlap=overlap(), level=LEVEL
    )
    lines = ["# What models lose without heads", ""]
    for paragraph in (*introduction.split("\n\n"), WAYS):
        lines += [*_paragraph(paragraph), ""]
    for name in MODELS:
        lines += section(name)
    lines += merging_section()
    PAGE.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
