"""The tables of docs/reports/claims.md, one function a claim, from what was measured."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from research.claims.claims_text import EXAMPLE, MIXES, ONE_HEAD
from research.claims.compared import (
    Study,
    cost_of_all,
    cost_of_half,
    costs,
    gaps,
    is_good,
    is_good_in_pairs,
    share_of_half,
)
from research.claims.corpora import SYMBOLS
from research.claims.found import FEW_DATA, MAIN, RANKED, Results, markdown, numbers, picture
from research.claims.spread import Estimate
from research.claims.verdicts import GOOD


def over_seeds(study: Study, name: str) -> dict[int, Estimate]:
    """What was measured, by heads."""
    return {heads: Estimate.of(list(each.values())) for heads, each in study.values(name).items()}


# -- one section a claim ----------------------------------------------------------------------------------------------


def distances(results: Results) -> list[str]:
    """How far apart heads are."""
    rows = [
        (each.model, each.heads or "all", each.layer, each.trained, each.untrained, each.as_sharp)
        for each in results.layers
    ]
    headers = ("model", "heads", "layer", "trained", "untrained", "untrained, as sharp")
    lines = ["Models trained here, over seeds:", "", *markdown(headers, rows)]
    rows = []
    for saved in results.real.values():
        layers = results.of_real[saved["title"]]
        means = (
            Estimate.of([getattr(each, name).mean for each in layers]) for name in ("trained", "untrained", "as_sharp")
        )
        signs = [each.over_as_sharp.sign for each in layers]
        above, below = signs.count(1), signs.count(-1)
        rows.append((saved["title"], len(layers), *(f"{each.mean:.3f}" for each in means), above, below))
    headers = ("model", "layers", "trained", "untrained", "as sharp", "layers above as sharp", "below")
    sequences = {f"{each['sequences']} sequences of {each['tokens']} tokens" for each in results.real.values()}
    lines += [f"The real models, means over layers; {' and '.join(sequences)}, untrained twice:", ""]
    return lines + markdown(headers, rows) + picture("distances", "Distances between heads by layer")


def loss_table(studies: Sequence[Study]) -> list[str]:
    """Held-out loss of every setting, and what can be told of it."""
    heads = sorted({number for study in studies for number in study.heads})
    rows = []
    for study in studies:
        losses = study.losses()
        cells = [str(losses[number]) if number in losses else "" for number in heads]
        seeds = losses[study.heads[0]].number
        rows.append((study.title, seeds, *cells, f"{study.margin:.3f}", numbers(study.alike)))
    return markdown(("setting", "seeds", *map(str, heads), "can be told", "not told from the best"), rows)


def relations(results: Results) -> list[str]:
    """The argument, and what came out."""
    rows = []
    for study in results.studies.values():
        for heads, runs in study.runs.items() if "accuracy" in study.runs[study.heads[0]][0] else ():
            slots = [Estimate.of([run["accuracy"][slot] for run in runs]) for slot in range(len(runs[0]["accuracy"]))]
            cells = [f"{each.mean:.3f}" for each in slots]
            most = max(each.error for each in slots)
            rows.append((study.saved["task"], heads, study.losses()[heads], *cells, f"{most:.3f}"))
    headers = ("model", "heads", "loss", "1 before", "2 before", "3 before", "4 before", "largest standard error")
    lines = ["### Four relations at once", "", *ONE_HEAD, "", example(), "", *markdown(headers, rows)]
    lines += picture("relations", "Right answers in each slot, against heads")
    study = results.studies["relations-places"]
    rows = []
    for heads in (number for number in study.heads if number <= 4):
        for head, given in enumerate(study.runs[heads][0]["weights"]):
            rows.append((heads, head, *(f"{each:.2f}" for each in given)))
    lines += ["Where the heads look whose weights are decided by place alone, first seed:", ""]
    return lines + markdown(("heads", "head", "1 before", "2 before", "3 before", "4 before"), rows)


def example() -> str:
    """How far two heads get, over all words of four symbols."""
    shares = right_of_all()
    heads = " and ".join(f"({', '.join(f'{each:.2f}' for each in head)})" for head in EXAMPLE)
    mixes = ", ".join(f"{a:+.2f} and {b:+.2f}" for a, b in MIXES)
    told = ", ".join(f"{100 * share:.1f} %" for share in shares)
    return (
        "To be always right is much to ask: fewer heads may be right nearly always. Two with the weights "
        f"{heads} on the four places, read out with the factors {mixes}, name the symbol of the four slots in {told} "
        f"of all words of {SYMBOLS} symbols (counted when this page is made): they fail only where the symbol that is "
        "asked for stands there more than once. So accuracy need not fall by a slot for each head that is missing."
    )


def right_of_all() -> list[float]:
    """The share of all words on which the two heads of the example are right, by slot."""
    words = torch.cartesian_prod(*[torch.arange(SYMBOLS)] * len(MIXES))  # (words, places)
    given = torch.tensor(MIXES) @ torch.tensor(EXAMPLE)  # (slots, places)
    shares = []
    for slot, of_place in enumerate(given):
        logits = torch.zeros(len(words), SYMBOLS).index_put_(
            (torch.arange(len(words))[:, None], words), of_place.expand(len(words), -1), accumulate=True
        )
        own = logits.gather(1, words[:, slot, None])
        better = (logits >= own - 1e-6).sum(1) == 1  # it alone is so large
        shares.append(better.double().mean().item())
    return shares


def ranks(results: Results) -> list[str]:
    """Of the scores, by head_dim."""
    rows = []
    for study in (results.studies[name] for name in RANKED):
        for heads, runs in study.runs.items():
            found = [Estimate.of([run["ranks"][name] for run in runs]) for name in runs[0]["ranks"]]
            rows.append((study.title, heads, study.saved["width"] // heads, *(f"{each.mean:.1f}" for each in found)))
    headers = ("setting", "heads", "head_dim", "rank of the scores", "99 % of the scores", "99 % of the weights")
    words = (
        "What more heads at equal width take away: a head's scores, the matrix of all queries with all keys before "
        "mask and softmax, can have no higher rank than head_dim (Bhojanapalli et al. 2020, who therefore fix "
        "head_dim). Means over layers, heads, sequences and seeds; and how many singular values hold 99 % of the "
        "squares of the scores and of the weights:"
    )
    return ["### The rank of the scores", "", words, "", *markdown(headers, rows)]


def timing(results: Results) -> list[str]:
    """Of more heads, and of a list of them."""
    rows = []
    fused = costs(results.clock, "fused {n}", "fused 1")
    for one, other in zip(fused, costs(results.clock, "list {n}", "fused {n}"), strict=True):
        cells = (f"{each.median:.2f} ({each.low:.2f} to {each.high:.2f})" for each in (one, other))
        rows.append((one.regime, one.what, one.heads, *cells))
    headers = ("regime", "what", "heads", "fused, over one head", "list of heads, over fused")
    rounds = len(next(iter(results.clock[0]["seconds"].values())))
    words = (
        f"Width {results.clock[0]['width']}, float32, causal; medians of the ratios of pairs taken in the same round, "
        f"and their quartiles, over {rounds} rounds:"
    )
    return [words, "", *markdown(headers, rows), *picture("times", "Time against the number of heads")]


def small(results: Results) -> list[str]:
    """The gap of little data."""
    study = results.studies[FEW_DATA]
    apart, train = gaps(study), over_seeds(study, "train_loss")
    rows = [
        (heads, study.runs[heads][0]["rate"], train[heads], loss, Estimate.of(list(apart[heads].values())))
        for heads, loss in study.losses().items()
    ]
    batches, steps = study.saved["training"]["batches"], study.saved["steps"]
    words = f"{batches} batches, each seen about {steps / batches:.0f} times; {len(study.runs[study.heads[0]])} seeds:"
    headers = ("heads", "learning rate", "training loss", "held-out loss", "gap")
    return [words, "", *markdown(headers, rows), *picture("gap", "The gap against heads")]


def without(results: Results) -> list[str]:
    """What half of the heads cost."""
    study = results.studies[MAIN]
    rows = []
    for heads, runs in study.runs.items():
        of = [Estimate.of(list(cost_of_half(study, how)[heads].values())) for how in ("random", "least")]
        total = runs[0]["removed"]["heads"]
        parts = [Estimate.of(list(share_of_half(study, how)[heads].values())) for how in ("random", "least")]
        every = Estimate.of(list(cost_of_all(study)[heads].values()))
        whole = Estimate.of([run["removed"]["whole"] for run in runs])
        rows.append((heads, total, whole, every, *of, *parts))
    halves = ("half, at random", "half, the least important", "part of all, at random", "the least important")
    headers = ("heads", "in all layers", "loss, whole", "all", *halves)
    draws = len(next(iter(study.runs[study.heads[0]][0]["removed"]["random"].values())))
    words = (
        f"{study.title}: what the held-out loss rises by without some heads. At random is the mean of {draws} draws "
        "from all layers; importance is the mean absolute derivative in a head's gate (Michel et al. 2019) on training "
        "data:"
    )
    return [words, "", *markdown(headers, rows), *picture("removed", "Loss against the share of heads removed")]


def turns(results: Results) -> list[str]:
    """Where the loss is least, and how far above it the largest number of heads is."""
    rows = []
    for study in results.settings:
        losses, most = study.losses(), study.heads[-1]
        above = losses[most].mean - losses[study.best].mean
        told = "yes" if study.is_worse(most) else "no"
        head_dim = study.saved["width"] // most
        rows.append((study.title, study.best, most, head_dim, f"{above:.3f}", f"{study.margin:.3f}", told))
    headers = ("setting", "least mean loss at", "most heads", "head_dim", "above the best by", "can be told", "worse")
    return [*markdown(headers, rows), *picture("losses", "Held-out loss against heads in every setting")]


def good(results: Results) -> list[str]:
    """How often each number is good."""
    every = sorted({heads for study in results.settings for heads in study.heads})
    rows = []
    for heads in every:
        there = [study for study in results.settings if heads in study.heads]
        literal, pairs = (sum(test(each, heads) for each in there) for test in (is_good, is_good_in_pairs))
        told = sum(heads in study.alike for study in there)
        rows.append((heads, len(there), literal, pairs, told))
    headers = ("heads", "settings", "within one standard error", "the same, seed by seed", "not told from the best")
    lines = markdown(headers, rows)
    rows = [
        (study.title, study.best, *("yes" if test(study, GOOD) else "no" for test in (is_good, is_good_in_pairs)))
        for study in results.settings
    ]
    return lines + markdown(("setting", "least mean loss at", f"{GOOD} within", "seed by seed"), rows)


def machine(results: Results) -> list[str]:
    """On what, when and how long each was trained."""
    said = [f"{what}: {_place(results.about[name])}." for what, name in (("The clock", "clock"), ("Trainings", MAIN))]
    rows = []
    for study in results.studies.values():
        saved = study.saved
        sizes = f"{next(iter(saved['parameters'].values())):,.0f}", f"{saved['held out']:,}"
        rows.append((study.title, saved["steps"], saved["training"]["tokens a batch"], saved["trials"], *sizes))
    headers = ("study", "steps", "tokens a step", "learning rates tried", "parameters", "held-out tokens")
    return ["## How it was measured", "", *(line for each in said for line in (each, "")), *markdown(headers, rows)]


def _place(about: Mapping[str, Any]) -> str:
    """The day, the machine, the versions."""
    processes, threads = about["processes"], about["threads"]
    work = f"{processes} process{'es' * (processes > 1)} of {threads} thread{'s' * (threads > 1)}"
    machine = f"{about['cpu']}, {about['cores']} cores, {about['gpu'] or 'no GPU'}"
    versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
    return f"{about['date']}, {machine}, {work}; {versions}; size {about['size']}"
