"""Objections of a review to an earlier version of the report, and what is true now."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import headwise as hw
from research.findings.estimates import LEVEL, against_lowest, controls_of
from research.findings.report_words import by_effect, completeness, listed, percent, similarities, span, with_error
from research.markdown import markdown_table

Errors = Mapping[str, Mapping[str, Any]]

BEFORE = {
    "weights of SmolLM2": "4 bits (Q4_1), not mentioned",
    "documents of SmolLM2": "the first 16 of 30 long topics in the alphabet",
    "sentences of MiniLM": "from the first 71 % of the paragraphs; 5 of 128 repeat",
    "head 0.7": "leads with 0.271 ± 0.222, from one document (3.59; median 0.049)",
    "standard errors": "chunks of a document as independent, 1.5 times too small for entropies",
    "random sets on repeated tokens": "20 sets: mean 0.698 in one draw, 1.153 in another",
    "shuffle test": "an order of the two lowest heads, without a test",
    "many tests": "181 of 270 heads at 2 standard errors",
    "integrated gradients": "no measure of convergence",
    "confidence": "with special tokens, though Voita et al. leave out the end token",
    "CKA of random heads": "plain: 0.28 to 0.35",
}
"""Matters of the review, with what was true of the earlier version."""


def section(results: Path, errors: Errors) -> list[str]:
    """Write the table of matters before and now."""
    now = {**of_smollm2(results / "smollm2"), **of_minilm(results / "minilm"), **of_both(results, errors)}
    return [
        "## What a review objected to",
        "",
        "A reviewer of an earlier version of this report repeated its measurements, and rejected some of its "
        "conclusions. For each rejected conclusion, the table shows what the earlier version stated, and what this "
        "version states. This version uses other and shorter documents, so numbers also differ for that reason.",
        "",
        *markdown_table(("matter", "before", "now"), [(name, before, now[name]) for name, before in BEFORE.items()]),
    ]


def of_smollm2(folder: Path) -> dict[str, str]:
    """Return what is true now of the measurements on SmolLM2."""
    ablation, controls = hw.Ablation.load(folder / "heads"), hw.SetAblation.load(folder / "repeated-zero")
    first, effect = by_effect(ablation)[0].name, ablation.head(0, 7).statistics["cost"]
    rank = [row.name for row in by_effect(ablation)].index("0.7") + 1
    names = [row.name for row in ablation.rows]
    medians = dict(zip(names, ablation.summaries()["cost_median"], strict=True))
    values = zip(ablation.tests()["cost_q"], (row.statistics["cost"].value for row in ablation.rows), strict=True)
    rises = sum(q <= LEVEL and value > 0 for q, value in values)
    anywhere = controls_of(controls, "anywhere")
    return {
        "weights of SmolLM2": f"{ablation.metadata['model']['quantisation']}; said here and in the metadata of tables",
        "documents of SmolLM2": f"{effect.n} topics, drawn with a seed, without common passages",
        "head 0.7": (
            f"on new documents rank {rank}: {with_error(effect)}, median {medians['0.7']:.3f}; head {first} leads, "
            f"median {medians[first]:.3f}; outlying documents are named"
        ),
        "random sets on repeated tokens": (
            f"{anywhere.number} sets: mean {anywhere.mean:.3f} ({span(anywhere.interval)}); scores and losses on the "
            "same tokens"
        ),
        "many tests": f"{rises} heads at a false discovery rate of 5 % (Benjamini and Hochberg)",
    }


def of_minilm(folder: Path) -> dict[str, str]:
    """Return what is true now of the measurements on MiniLM."""
    order, profile = hw.Ablation.load(folder / "order"), hw.load_profile(folder / "profile")
    lowest, differences = against_lowest(order)
    shared = [lowest, *(each.name for each in differences if not each.q <= LEVEL)]
    place = f"heads {listed(shared, 8)} share the lowest place" if len(shared) > 1 else f"head {lowest} alone is lowest"
    confidence, content = (
        statistics.median(row.statistics[name].value for row in profile.rows)
        for name in ("confidence", "confidence_content")
    )
    cka = list(similarities(folder.parent / "noise").values())
    debiased, plain = (
        " and ".join(f"{statistics.median(each[kind]):z.2f}" for each in cka) for kind in ("debiased", "plain")
    )
    tokens = " and ".join(f"{each['tokens']:,}" for each in cka)
    documents = order.rows[0].statistics["cost"].n
    return {
        "sentences of MiniLM": f"{order.metadata['measured']['sequences']} different ones of {documents} topics, "
        "drawn with a seed",
        "shuffle test": place,
        "confidence": f"two statistics: medians {confidence:.3f} with special tokens, {content:.3f} without (MiniLM)",
        "CKA of random heads": f"debiased: median {debiased} on {tokens} tokens (plain: {plain})",
    }


def of_both(results: Path, errors: Errors) -> dict[str, str]:
    """Return what is true now of standard errors and of integrated gradients."""
    ratios = [ratio for entry in errors.values() for each in entry["ratios"].values() for ratio in (each[0], each[2])]
    clustered = errors["smollm2/profile"]["clustered over independent"]
    complete = {name: completeness(results / name / "integrated") for name in ("smollm2", "minilm")}
    gaps = {name: percent(found["gap_of_means"]) for name, found in complete.items()}
    return {
        "standard errors": (
            f"clustered by document: {clustered:.2f} times as large for entropies; all are {min(ratios):.2f} to "
            f"{max(ratios):.2f} of a bootstrap over documents"
        ),
        "integrated gradients": (
            f"completeness gap of the means {gaps['smollm2']} (SmolLM2, warned) and {gaps['minilm']} (MiniLM)"
        ),
    }
