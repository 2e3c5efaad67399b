"""Write docs/reports/findings.md and its pictures from research/findings/results/.

python -m research.findings.report
"""

import math
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path

import headwise as hw
from headwise.runs.rows import MeanEstimate
from headwise.show.scores import SURE, errors

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "research" / "findings" / "results"
PICTURES = ROOT / "docs" / "pictures"
MOST = 10
"""Heads in a table."""
SMALL = 0.01
"""Nats, or cosine distance, that count as little here."""

INTRODUCTION = """\
Written by `research/findings/report.py` from the tables that `make findings` measured.
Every number is a mean over sequences
with its standard error, of the same data for all heads; a difference is taken sequence by sequence first. What is said
is said of these models on this data: topics of the reference of Python's language, which come with Python. A head is
`layer.head`, zero-based; it is removed by a gate of zero on what it gives before the output projection, unless
something else is said."""


# -- how numbers are written ------------------------------------------------------------------------------------------


def with_error(measured: MeanEstimate, digits: int = 3) -> str:
    """`mean ± standard error`."""
    return f"{measured.value:.{digits}f} ± {measured.sem:.{digits}f}"


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table, with an empty line after it."""
    lines = [headers, ["---"] * len(headers), *rows]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def data_of(table: hw.Ablation | hw.SetAblation) -> str:
    """What it was measured on."""
    measured, versions = table.metadata["measured"], table.metadata["versions"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{measured['sequences']} sequences, {measured['tokens']:,} tokens; {packages}"


def chance(number: int, degrees: int) -> float:
    """How many of so many means of nothing lie above `SURE` standard errors, by Student's t with these degrees."""
    steps = 20_000  # of the density from SURE on, in u = 1 / (1 + x)
    log = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    top = 1 / (1 + SURE)
    total = 0.0
    for step in range(steps):
        u = top * (step + 0.5) / steps
        x = 1 / u - 1
        total += math.exp(log - (degrees + 1) / 2 * math.log1p(x * x / degrees)) / u**2
    return number * total * top / steps


def dearest(ablation: hw.Ablation) -> list:
    """The rows, the largest cost first."""
    return sorted(ablation.rows, key=lambda row: -row.statistics["cost"].value)


# -- SmolLM2 ----------------------------------------------------------------------------------------------------------


def smollm2() -> list[str]:
    """What its heads cost, what gradients foretell, and what the heads that copy do."""
    folder = RESULTS / "smollm2"
    ablation, importance = hw.Ablation.load(folder), hw.Importance.load(folder)
    profile = hw.load_profile(folder)
    costs = {row.name: row.statistics["cost"] for row in ablation.rows}
    dear = [name for name, cost in costs.items() if errors(cost) >= SURE]
    gain = [name for name, cost in costs.items() if errors(cost) <= -SURE]
    little = [name for name, cost in costs.items() if cost.value + SURE * cost.sem < SMALL]
    lines = [
        f"## {ablation.metadata['model']['name']}, {len(costs)} heads",
        "",
        f"Next-token loss, nats a token: {with_error(ablation.baseline)} of the whole model ({data_of(ablation)}).",
        "",
        "### Which heads matter, and how many can go one by one",
        "",
        f"The {MOST} heads that cost most alone:",
        "",
    ]
    rows = []
    for row in dearest(ablation)[:MOST]:
        head, foretold = profile.head(row.layer, row.head), importance.head(row.layer, row.head)
        cost = row.statistics["cost"]
        numbers = (with_error(cost), f"{errors(cost):+.1f}", with_error(foretold.statistics["first_order"]))
        rows.append((row.name, head.role, *numbers))
    lines += markdown(("head", "role", "cost", "in standard errors", "foretold to first order"), rows)
    above = chance(len(costs), ablation.baseline.n - 1)
    lines += [
        f"Of {len(costs)} heads, {len(dear)} cost {SURE:g} standard errors or more, where about {above:.0f} would by "
        f"chance if none cost anything; without {len(gain)} the loss is lower by as much, where chance again gives "
        f"about {above:.0f}. For {len(little)} heads, one at a time, cost and {SURE:g} standard errors stay below "
        f"{SMALL:g} nats. The mean over all heads is {statistics.fmean(each.value for each in costs.values()):.4f}; "
        f"the {MOST} dearest have {100 * _share(costs):.0f} % of the sum of all costs above zero. That each of many "
        "heads can go does not say that they can go together.",
        "",
        "![What each head costs](../pictures/findings-cost.png)",
        "",
        *agreement(importance, ablation),
        *copies(folder, profile),
    ]
    return lines


def _share(costs: dict[str, MeanEstimate]) -> float:
    positive = sorted((cost.value for cost in costs.values() if cost.value > 0), reverse=True)
    return sum(positive[:MOST]) / sum(positive)


def agreement(importance: hw.Importance, ablation: hw.Ablation) -> list[str]:
    """The gradient of the gate against what was measured."""
    found = hw.agreement(importance, ablation)
    absolute = hw.agreement(importance, ablation, ("gradient", "cost"))
    first = {f"{layer}.{head}" for layer, head in importance.ranking()[:MOST]}
    both = first & {row.name for row in dearest(ablation)[:MOST]}
    return [
        "### What the gradient of the gate foretells",
        "",
        "One backward pass gives all heads at once: removing a head changes the loss by minus the derivative in its "
        "gate, to first order. Against the measured cost of all heads: "
        f"Spearman {found.spearman:.2f}, Pearson {found.pearson:.2f}. The prediction is "
        f"{_mean(found.predicted):.4f} nats in the mean over heads, the measured cost {_mean(found.measured):.4f}: "
        "what lies between is not of first order. The mean absolute derivative of Michel, Levy and "
        f"Neubig (2019), which has no sign: Spearman {absolute.spearman:.2f}, Pearson {absolute.pearson:.2f}; "
        f"{len(both)} of its first {MOST} heads are among the {MOST} that cost most.",
        "",
        "![First order prediction against measured cost](../pictures/findings-first-order.png)",
        "",
    ]


def _mean(values: Sequence[MeanEstimate]) -> float:
    return statistics.fmean(each.value for each in values)


def copies(folder: Path, profile: hw.Profile) -> list[str]:
    """The loss without the induction heads, against as many others."""
    heads = profile.roles()["induction"]
    shares = (
        f"{layer}.{head} ({profile.head(layer, head).statistics['induction_random'].value:.2f})"
        for layer, head in heads
    )
    lines = [
        "### The induction heads",
        "",
        f"On random tokens that repeat (25 of them, 4 times, 10 samples; Olsson et al. 2022) {len(heads)} heads give "
        f"half of their attention or more to what followed an earlier copy: {', '.join(shares)}. The loss of those "
        "tokens that come after one that was there before, and the loss on the text, without these heads and without "
        "as many others: drawn from all other heads, and drawn layer by layer as these stand, 20 sets of each. Of the "
        "controls: the mean of the sets, and the lowest and highest set.",
        "",
    ]
    rows = []
    measured = (
        ("repeated-zero", "random tokens that repeat", "0"),
        ("repeated-mean", "random tokens that repeat", "their mean on the text"),
        ("text-zero", "the text", "0"),
    )
    for name, on, how in measured:
        found = hw.SetAblation.load(folder / name)
        cost = {row.name: row.statistics["cost"] for row in found.rows}
        controls = (_range(cost, kind) for kind in ("anywhere", "same layers"))
        rows.append((on, how, with_error(found.baseline), with_error(cost["induction"]), *controls))
    headers = (
        "loss on",
        "heads become",
        "whole model",
        "cost of the induction heads",
        "of others",
        "of others in the same layers",
    )
    return lines + markdown(headers, rows)


def _range(costs: dict[str, MeanEstimate], kind: str) -> str:
    values = [cost.value for name, cost in costs.items() if name.startswith(kind)]
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


# -- MiniLM -----------------------------------------------------------------------------------------------------------


def minilm() -> list[str]:
    """What its heads do to the embeddings of sentences, and the head of the previous token."""
    folder = RESULTS / "minilm"
    ablation, profile = hw.Ablation.load(folder), hw.load_profile(folder)
    order = hw.Ablation.load(folder / "order")
    distances = {row.name: row.statistics["cost"] for row in ablation.rows}
    little = [name for name, each in distances.items() if each.value + SURE * each.sem < SMALL]
    lines = [
        f"## {ablation.metadata['model']['name']}, {len(distances)} heads",
        "",
        "How far the embedding of a sentence is from the whole model's when a head is removed: 1 - cosine "
        f"({data_of(ablation)}). It is never below 0, so its standard error tells heads apart from each other and not "
        "from nothing; and its derivative in a gate is 0 at the whole model, so that gradients say nothing here.",
        "",
    ]
    rows = [
        (row.name, profile.head(row.layer, row.head).role, with_error(row.statistics["cost"], 4))
        for row in dearest(ablation)[:MOST]
    ]
    lines += markdown(("head", "role", "distance"), rows)
    by_layer = []
    for layer in sorted({row.layer for row in ablation.rows}):
        values = [row.statistics["cost"].value for row in ablation.rows if row.layer == layer]
        by_layer.append((str(layer), f"{statistics.median(values):.4f}", f"{max(values):.4f}"))
    lines += [
        f"For {len(little)} of {len(distances)} heads, one at a time, distance and {SURE:g} standard errors stay below "
        f"{SMALL:g}. By layer:",
        "",
        *markdown(("layer", "median distance", "largest"), by_layer),
        *previous(ablation, order, profile),
    ]
    return lines


def previous(ablation: hw.Ablation, order: hw.Ablation, profile: hw.Profile) -> list[str]:
    """The head that attends to the token before: what it does to embeddings, and to what word order does to them."""
    (layer, head), *others = profile.roles()["previous token"]
    share = profile.head(layer, head).statistics["previous"]
    rank = [row.name for row in dearest(ablation)].index(f"{layer}.{head}") + 1
    changes = sorted((row.statistics["cost"].value, row.name) for row in order.rows)
    place = [name for _, name in changes].index(f"{layer}.{head}") + 1
    beside = [row.statistics["cost"].value for row in order.rows if row.layer == layer and row.head != head]
    more = "" if not others else f" ({len(others)} more have that role)"
    lowest = ", ".join(f"{name} ({change:+.4f})" for change, name in changes[:3])
    return [
        "### The previous-token head",
        "",
        f"Head {layer}.{head} gives {with_error(share, 4)} of its attention to the token before{more}. Without it "
        f"embeddings move by {with_error(ablation.head(layer, head).statistics['cost'], 4)}, which is the {_th(rank)} "
        f"most of {len(ablation.rows)} heads.",
        "",
        "Who knows which token came before may know the order of words. The same sentences with their tokens shuffled "
        f"are {with_error(order.baseline, 4)} away from themselves in the whole model. Without head {layer}.{head} "
        f"that changes by {with_error(order.head(layer, head).statistics['cost'], 4)}, the {_th(place)} lowest change "
        f"of {len(order.rows)} heads; without another head of its layer, by {min(beside):+.4f} to {max(beside):+.4f}. "
        f"The lowest: {lowest}.",
        "",
    ]


def _th(rank: int) -> str:
    ending = "th" if 10 <= rank % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(rank % 10, "th")
    return f"{rank}{ending}"


def draw() -> None:
    """The pictures."""
    folder = RESULTS / "smollm2"
    ablation, importance = hw.Ablation.load(folder), hw.Importance.load(folder)
    ablation.plot("cost").savefig(PICTURES / "findings-cost.png", dpi=110)
    hw.agreement(importance, ablation).plot().savefig(PICTURES / "findings-first-order.png", dpi=110)


def document() -> str:
    """The whole text, its paragraphs wrapped."""
    lines = ["# Findings", "", INTRODUCTION, "", *smollm2(), *minilm()]
    wrapped = (line if line.startswith(("|", "#", "!")) else textwrap.fill(line, 120) for line in lines)
    return "\n".join(wrapped).rstrip() + "\n"


def main() -> None:
    (ROOT / "docs" / "reports" / "findings.md").write_text(document(), encoding="utf-8")
    draw()


if __name__ == "__main__":
    main()
