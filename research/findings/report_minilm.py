"""The sections of the report on MiniLM, and on the similarity of heads."""

import statistics
from pathlib import Path

import numpy as np

import headwise as hw
from research.findings.estimates import LEVEL, against_lowest
from research.findings.report_words import (
    MOST,
    SMALL,
    SURE,
    by_effect,
    data_of,
    gap_of,
    listed,
    probability,
    ranks_of_medians,
    similarities,
    small_effects,
    th,
    with_error,
)
from research.markdown import markdown_table


def section(folder: Path) -> list[str]:
    """Write the section on MiniLM: the effect of its heads on sentence embeddings, and the previous-token head."""
    ablation, profile = hw.Ablation.load(folder / "heads"), hw.load_profile(folder / "profile")
    model = ablation.metadata["model"]["name"]
    ranks, records = ranks_of_medians(ablation), {(row["layer"], row["head"]): row for row in ablation.records()}
    rows = []
    for row in by_effect(ablation)[:MOST]:
        record = records[row.layer, row.head]
        numbers = (f"{record['cost_median']:.4f}", f"{record['cost_trimmed']:.4f}", record["cost_outliers"])
        role = profile.head(row.layer, row.head).role
        rows.append((row.name, role, with_error(row.statistics["cost"], 4), *numbers, ranks[row.name]))
    by_layer = []
    for layer in sorted({row.layer for row in ablation.rows}):
        values = [row.statistics["cost"].value for row in ablation.rows if row.layer == layer]
        by_layer.append((str(layer), f"{statistics.median(values):.4f}", f"{max(values):.4f}"))
    return [
        f"## {model}, {len(ablation.rows)} heads",
        "",
        f"For {model}, the effect of a head is a distance: 1 - cosine between the embeddings of a sentence that the "
        f"model computes with and without that head ({data_of(ablation)}). A distance cannot be negative. So the "
        "standard error of a distance can show that two heads differ, but not that a head has an effect. In the model "
        "with all heads the distance has its minimum, 0, so gradients do not predict distances. The table shows the "
        "heads with the largest mean distances. Median, trimmed mean and outliers are those over documents.",
        "",
        *markdown_table(("head", "role", "mean", "median", "trimmed mean", "outliers", "rank by median"), rows),
        "The effect of removing a head is measured by a distance: 1 - cosine between sentence embeddings with and "
        "without the head. For "
        f"{small_effects(ablation)} of {len(ablation.rows)} heads, the mean distance plus {SURE:g} standard errors "
        f"is below {SMALL:g}. The table shows the median and the largest of the mean distances of the heads of each "
        "layer:",
        "",
        *markdown_table(("layer", "median distance", "largest distance"), by_layer),
        "In the model with all heads, the distance of sentence embeddings has its minimum, so its derivative is 0. The "
        "method of integrated gradients also uses derivatives where the outputs of all heads are scaled down. These "
        "derivatives need not be 0. " + gap_of(folder / "integrated"),
        "",
        *previous_token_head(ablation, hw.Ablation.load(folder / "order"), profile),
        *confidence(profile),
    ]


def previous_token_head(ablation: hw.Ablation, order: hw.Ablation, profile: hw.Profile) -> list[str]:
    """Write the effect of the previous-token head on embeddings, and on their sensitivity to word order."""
    (layer, head), *others = profile.roles()["previous token"]
    name, share = f"{layer}.{head}", profile.head(layer, head).statistics["previous"]
    rank = [row.name for row in by_effect(ablation)].index(name) + 1
    lowest, differences = against_lowest(order)
    values = {row.name: row.statistics["cost"] for row in order.rows}
    medians = dict(zip([row.name for row in order.rows], order.summaries()["cost_median"], strict=True))
    more = "" if not others else f" ({len(others)} more have that role)"
    place = sorted(values, key=lambda each: values[each].value).index(name) + 1
    rows = [(lowest, with_error(values[lowest], 4), f"{medians[lowest]:.4f}", "", "")]
    for each in differences[:4]:
        numbers = (with_error(values[each.name], 4), f"{medians[each.name]:.4f}", with_error(each.difference, 4))
        rows.append((each.name, *numbers, probability(each.q)))
    shared = [each.name for each in differences if each.q > LEVEL]
    place_of = f"{th(place)} lowest change of {len(values)} heads"
    if name in shared:
        place_of += f", and cannot be distinguished from the lowest, that of head {lowest}"
    same = listed([lowest, *shared])
    return [
        "### The previous-token head",
        "",
        f"Head {head} of layer {layer} puts {with_error(share, 4)} of its attention on the previous token{more}. "
        "Removing this head moves "
        f"sentence embeddings by a distance of {with_error(ablation.head(layer, head).statistics['cost'], 4)}, the "
        f"{th(rank)} largest of {len(ablation.rows)} heads.",
        "",
        "A head that attends to the previous token could encode word order. In the model with all heads, the "
        "distance between the embeddings of a sentence and of the same sentence with shuffled tokens is "
        f"{with_error(order.baseline, 4)}. Removing head {name} changes this distance by "
        f"{with_error(values[name], 4)}. This is the {place_of}. The table shows the lowest changes. It also tests the "
        "difference of each from the lowest one, paired and clustered by document, with q-values over all other heads.",
        "",
        *markdown_table(("head", "mean change", "median", "minus the lowest", "q"), rows),
        f"{len(shared) + 1} of {len(values)} heads cannot be distinguished from the lowest change, itself included: "
        f"{same}."
        if shared
        else f"All other heads can be distinguished from head {lowest}.",
        "",
    ]


def confidence(profile: hw.Profile) -> list[str]:
    """Write both statistics of confidence."""
    columns = {
        name: [head.statistics[name].value for head in profile.heads]
        for name in ("confidence", "confidence_content", "special")
    }
    medians = {name: statistics.median(values) for name, values in columns.items()}
    first, other = (set(np.argsort(columns[name])[-MOST:].tolist()) for name in ("confidence", "confidence_content"))
    common = len(first & other)
    return [
        "### Confidence with and without special tokens",
        "",
        "The confidence of a head is the mean of the largest attention weight of each query. Voita et al. (2019) "
        "leave out the weight on the token at the end of the sentence. Over the heads of all-MiniLM-L6-v2, the "
        "median of `confidence`, which includes all keys, is "
        f"{medians['confidence']:.3f}. The median of `confidence_content`, which leaves out special tokens, is "
        f"{medians['confidence_content']:.3f}; the median of the attention on special tokens is "
        f"{medians['special']:.3f}. Of the {MOST} heads with the largest `confidence`, {common} are also among the "
        f"{MOST} with the largest `confidence_content`.",
        "",
    ]


def similarity(results: Path) -> list[str]:
    """Write the similarity of heads: debiased and plain CKA, of trained weights, random weights and noise."""
    rows = []
    for model, found in ((name, similarities(results / name.lower())) for name in ("MiniLM", "SmolLM2", "noise")):
        for name, values in found.items():
            label = "MiniLM with random weights" if name.startswith("random") else model
            plain = f"{statistics.median(values['plain']):.3f}" if "plain" in values else ""
            shares = values["debiased"]
            median = f"{statistics.median(shares):z.3f}"
            rows.append((label, f"{values['tokens']:,}", plain, median, f"{max(shares):.3f}"))
    headers = ("heads of", "tokens", "plain CKA, median", "debiased CKA, median", "debiased CKA, largest")
    return [
        "## Similarity of heads",
        "",
        "The table shows the centred kernel alignment (CKA) between the outputs of every two heads of a layer. The "
        "plain estimate of the CKA is too large if there are few tokens. `hw.redundancy` uses the debiased estimate "
        "(Murphy et al. "
        "2024), which is near 0 for heads whose outputs are independent noise. The outputs of heads with random "
        "weights are not independent, because the heads read the same tokens.",
        "",
        *markdown_table(headers, rows),
    ]
