"""Tables of docs/reports/claims.md: one function for the section of each claim."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from research.claims.corpora import SYMBOLS
from research.claims.estimates import Estimate
from research.claims.report_text import EXAMPLE, MIXES, ONE_HEAD
from research.claims.result_files import FEW_DATA, MAIN, RANKED, Results
from research.claims.study_results import (
    Study,
    cost_of_all,
    cost_of_half,
    gaps,
    is_good,
    is_good_in_pairs,
    share_of_half,
    time_ratios,
)
from research.claims.verdicts import GOOD
from research.markdown import markdown_table, picture


def over_seeds(study: Study, name: str) -> dict[int, Estimate]:
    """Return the mean of a measured value over seeds, by number of heads."""
    return {heads: Estimate.of(list(by_seed.values())) for heads, by_seed in study.values(name).items()}


# -- one section a claim ----------------------------------------------------------------------------------------------


def distances(results: Results) -> list[str]:
    """Write the distances between heads, trained and untrained."""
    rows = [
        (layer.model, layer.heads or "all", layer.layer, layer.trained, layer.untrained, layer.as_sharp)
        for layer in results.layers
    ]
    headers = ("model", "heads", "layer", "trained", "untrained", "untrained, equally sharp")
    lines = [
        "The table shows the mean Jensen-Shannon distance between the attention weights of two heads of a layer, in "
        "the models "
        "trained here, as means over seeds:",
        "",
        *markdown_table(headers, rows),
    ]
    real_rows = []
    for saved in results.real.values():
        layers = results.layers_by_real_model[saved["title"]]
        means = (
            Estimate.of([getattr(layer, name).mean for layer in layers])
            for name in ("trained", "untrained", "as_sharp")
        )
        signs = [layer.over_as_sharp.sign for layer in layers]
        above, below = signs.count(1), signs.count(-1)
        real_rows.append((saved["title"], len(layers), *(f"{mean.mean:.3f}" for mean in means), above, below))
    real_headers = ("model", "layers", "trained", "untrained", "equally sharp", "layers above equally sharp", "below")
    sequences = {f"{saved['sequences']} sequences of {saved['tokens']} tokens" for saved in results.real.values()}
    lines += [
        "The table shows the mean Jensen-Shannon distance between the attention weights of two heads of a layer, in "
        "two "
        f"published models. The text is {' and '.join(sequences)}. Each model is compared with two untrained models "
        "of the same architecture. "
        "Distances are means over layers. The last two columns count the layers whose heads are significantly farther "
        "apart, or closer together, than untrained heads of equal sharpness (attention entropy):",
        "",
    ]
    return (
        lines
        + markdown_table(real_headers, real_rows)
        + picture("claims-distances", "Distances between heads by layer")
    )


def loss_table(studies: Sequence[Study]) -> list[str]:
    """Write the held-out loss of every setting, and which numbers of heads differ significantly."""
    heads = sorted({number for study in studies for number in study.heads})
    rows = []
    for study in studies:
        losses = study.losses()
        cells = [str(losses[number]) if number in losses else "" for number in heads]
        seeds = losses[study.heads[0]].number
        rows.append((study.title, seeds, *cells, f"{study.margin:.3f}", ", ".join(map(str, study.not_worse))))
    return markdown_table(
        ("setting", "seeds", *map(str, heads), "significant difference", "not significantly worse than the best"), rows
    )


def relations(results: Results) -> list[str]:
    """Write the argument that one head serves one slot, and the results of the task of several relations."""
    rows = []
    for study in results.studies.values():
        for heads, runs in study.runs.items() if "accuracy" in study.runs[study.heads[0]][0] else ():
            slots = [Estimate.of([run["accuracy"][slot] for run in runs]) for slot in range(len(runs[0]["accuracy"]))]
            cells = [f"{share.mean:.3f}" for share in slots]
            largest = max(share.error for share in slots)
            rows.append((study.saved["task"], heads, study.losses()[heads], *cells, f"{largest:.3f}"))
    headers = ("model", "heads", "loss", "1 before", "2 before", "3 before", "4 before", "largest standard error")
    lines = ["### Four relations at once", "", *ONE_HEAD, "", example(), "", *markdown_table(headers, rows)]
    lines += picture("claims-relations", "Right answers in each slot, against heads")
    study = results.studies["relations-places"]
    rows = []
    for heads in (number for number in study.heads if number <= 4):
        for head, weights in enumerate(study.runs[heads][0]["weights"]):
            rows.append((heads, head, *(f"{weight:.2f}" for weight in weights)))
    lines += [
        "Attention weights on the four previous symbols, of models whose weights depend on position alone (first "
        "seed):",
        "",
    ]
    return lines + markdown_table(("heads", "head", "1 before", "2 before", "3 before", "4 before"), rows)


def example() -> str:
    """Return the paragraph on how often two heads are right, counted over all words of four symbols."""
    shares = right_of_all()
    heads = " and ".join(f"({', '.join(f'{weight:.2f}' for weight in head)})" for head in EXAMPLE)
    mixes = ", ".join(f"{a:+.2f} and {b:+.2f}" for a, b in MIXES)
    percent = ", ".join(f"{100 * share:.1f} %" for share in shares)
    return (
        "Take a model in which attention weights depend on position alone, and logits are linear in the head outputs. "
        "With fewer than four heads, it cannot name the four previous symbols (tokens) right in every sequence. But "
        f"each answer can be right in most sequences. Take two heads with the attention weights {heads} on the "
        "symbols 1, 2, 3 and 4 positions before. The logits of the answers for these four positions are sums of the "
        f"two head outputs with the factors {mixes}. The four answers are then right in {percent} of all sequences of "
        f"four symbols from an alphabet of {SYMBOLS}; the script of this page counts them. An answer is wrong only if "
        "its right symbol occurs more than once in the sequence. So when a model has fewer heads than answers, it need "
        "not lose a whole answer for each missing head."
    )


def right_of_all() -> list[float]:
    """Return the share of all words on which the two heads of the example are right, by slot."""
    words = torch.cartesian_prod(*[torch.arange(SYMBOLS)] * len(MIXES))  # (words, positions)
    weights = torch.tensor(MIXES) @ torch.tensor(EXAMPLE)  # (slots, positions)
    shares = []
    for slot, of_slot in enumerate(weights):
        logits = torch.zeros(len(words), SYMBOLS).index_put_(
            (torch.arange(len(words))[:, None], words), of_slot.expand(len(words), -1), accumulate=True
        )
        of_right = logits.gather(1, words[:, slot, None])
        right = (logits >= of_right - 1e-6).sum(1) == 1  # no other symbol has a logit as large
        shares.append(right.double().mean().item())
    return shares


def ranks(results: Results) -> list[str]:
    """Write the ranks of scores and weights, by head_dim."""
    rows = []
    for study in (results.studies[name] for name in RANKED):
        for heads, runs in study.runs.items():
            means = [Estimate.of([run["ranks"][name] for run in runs]) for name in runs[0]["ranks"]]
            rows.append((study.title, heads, study.saved["width"] // heads, *(f"{mean.mean:.1f}" for mean in means)))
    headers = ("setting", "heads", "head_dim", "rank of the scores", "99 % of the scores", "99 % of the weights")
    words = (
        "More heads at equal model width make each head narrower. The attention scores of a head are a matrix of all "
        "queries and all keys, before mask and softmax. The rank of this matrix is at most head_dim, the number of "
        "features of a head (Bhojanapalli et al. 2020, who therefore fix head_dim). The table shows means over layers, "
        "heads, sequences and seeds. The last two columns of the table count the largest singular values that together "
        "carry 99 % "
        "of the sum of squares: first of the scores, then of the attention weights:"
    )
    return ["### The rank of the scores", "", words, "", *markdown_table(headers, rows)]


def timing(results: Results) -> list[str]:
    """Write the times of more heads, and of a list of heads, as ratios."""
    rows = []
    fused = time_ratios(results.clock, "fused {n}", "fused 1")
    for one, other in zip(fused, time_ratios(results.clock, "list {n}", "fused {n}"), strict=True):
        cells = (f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" for ratio in (one, other))
        rows.append((one.regime, one.what, one.heads, *cells))
    headers = ("regime", "pass", "heads", "fused, relative to one head", "list of heads, relative to fused")
    rounds = len(next(iter(results.clock[0]["seconds"].values())))
    words = (
        f"Two implementations of attention of width {results.clock[0]['width']}, in float32 and with a causal mask, "
        "were timed: a fused layer, which computes all heads together, and a list of heads, in which each head is a "
        "module and the modules run one after the other. The table shows two ratios. The first is the time of the "
        "fused layer divided by its time with one head. The second is the time of the list of heads divided by the "
        "time of the fused layer with the same number of heads. "
        f"Each cell is the median of one ratio over {rounds} rounds, with the quartiles in brackets. Both times of a "
        "ratio come from the same round:"
    )
    return [words, "", *markdown_table(headers, rows), *picture("claims-times", "Time against the number of heads")]


def small(results: Results) -> list[str]:
    """Write the generalisation gap of the study on little data."""
    study = results.studies[FEW_DATA]
    gap, train = gaps(study), over_seeds(study, "train_loss")
    rows = [
        (heads, study.runs[heads][0]["rate"], train[heads], loss, Estimate.of(list(gap[heads].values())))
        for heads, loss in study.losses().items()
    ]
    batches, steps = study.saved["training"]["batches"], study.saved["steps"]
    words = (
        f"The table shows, for each number of heads, the training loss, the held-out loss and the generalisation gap "
        f"(held-out loss minus training loss), in nats a byte. The models train on {batches} batches, each used about "
        f"{steps / batches:.0f} times. Values are means over "
        f"{len(study.runs[study.heads[0]])} seeds:"
    )
    headers = ("heads", "learning rate", "training loss", "held-out loss", "gap")
    return [words, "", *markdown_table(headers, rows), *picture("claims-gap", "The gap against heads")]


def without(results: Results) -> list[str]:
    """Write the loss without half of the heads, and without all of them."""
    study = results.studies[MAIN]
    rows = []
    for heads, runs in study.runs.items():
        increases = [Estimate.of(list(cost_of_half(study, how)[heads].values())) for how in ("random", "least")]
        total = runs[0]["removed"]["heads"]
        parts = [Estimate.of(list(share_of_half(study, how)[heads].values())) for how in ("random", "least")]
        every = Estimate.of(list(cost_of_all(study)[heads].values()))
        whole = Estimate.of([run["removed"]["whole"] for run in runs])
        rows.append((heads, total, whole, every, *increases, *parts))
    halves = ("random half", "least important half", "random half / all", "least important half / all")
    headers = ("heads", "in all layers", "loss of the whole model", "all", *halves)
    draws = len(next(iter(study.runs[study.heads[0]][0]["removed"]["random"].values())))
    words = (
        "The table shows the increase of the held-out loss, in nats a byte, when heads are removed from trained "
        "models "
        f"({study.title}). Removed are all "
        "heads, "
        f"a random half, or the least important half. The effect of a random half is the mean over {draws} random "
        "draws "
        "from the heads of all layers. The importance of a head is measured on training data. It is the mean absolute "
        "derivative of the loss with respect to the head's gate, the factor of its output (Michel et al. 2019). The "
        "last "
        "two columns are the increase for half of the heads divided by the increase for all heads:"
    )
    return [
        words,
        "",
        *markdown_table(headers, rows),
        *picture("claims-removed", "Loss against the share of heads removed"),
    ]


def turns(results: Results) -> list[str]:
    """Write the number of heads with the lowest loss, and how much worse the largest number is."""
    rows = []
    for study in results.settings:
        losses, most = study.losses(), study.heads[-1]
        above = losses[most].mean - losses[study.best].mean
        worse = "yes" if study.is_worse(most) else "no"
        head_dim = study.saved["width"] // most
        rows.append((study.title, study.best, most, head_dim, f"{above:.3f}", f"{study.margin:.3f}", worse))
    headers = (
        "setting",
        "lowest mean loss at",
        "largest number",
        "head_dim",
        "above the best by",
        "significant difference",
        "worse",
    )
    return [*markdown_table(headers, rows), *picture("claims-losses", "Held-out loss against heads in every setting")]


def good(results: Results) -> list[str]:
    """Write in how many settings each number of heads is good."""
    every = sorted({heads for study in results.settings for heads in study.heads})
    rows = []
    for heads in every:
        studies = [study for study in results.settings if heads in study.heads]
        by_means, by_pairs = (sum(test(study, heads) for study in studies) for test in (is_good, is_good_in_pairs))
        rows.append((heads, len(studies), by_means, by_pairs, sum(heads in study.not_worse for study in studies)))
    headers = ("heads", "settings", "within one standard error", "the same, seed by seed", "not significantly worse")
    lines = markdown_table(headers, rows)
    of_settings = [
        (study.title, study.best, *("yes" if test(study, GOOD) else "no" for test in (is_good, is_good_in_pairs)))
        for study in results.settings
    ]
    return lines + markdown_table(
        ("setting", "lowest mean loss at", f"{GOOD} within one standard error", "seed by seed"), of_settings
    )


def machine(results: Results) -> list[str]:
    """Write the dates, the machines and the sizes of the trainings."""
    runs = [
        f"{what} {_environment(results.about[name])}."
        for what, name in (("The timings of layers were made on", "clock"), ("The models were trained on", MAIN))
    ]
    rows = []
    for study in results.studies.values():
        saved = study.saved
        sizes = f"{next(iter(saved['parameters'].values())):,.0f}", f"{saved['held out']:,}"
        rows.append((study.title, saved["steps"], saved["training"]["tokens a batch"], saved["trials"], *sizes))
    headers = ("study", "steps", "tokens a step", "learning rates tried", "parameters", "held-out tokens")
    return [
        "## How it was measured",
        "",
        *(line for text in runs for line in (text, "")),
        *markdown_table(headers, rows),
    ]


def _environment(about: Mapping[str, Any]) -> str:
    """Return the date, the machine, the versions and the size of the runs in words."""
    processes, threads = about["processes"], about["threads"]
    work = f"{processes} process{'es' * (processes > 1)} of {threads} thread{'s' * (threads > 1)}"
    machine = f"{about['cpu']}, {about['cores']} cores, {about['gpu'] or 'no GPU'}"
    versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
    amount = (
        "`python -m research.claims` can measure at three sizes (tiny, default and full), with different amounts of "
        f"training, data and timing; these results have the size {about['size']}"
    )
    return f"{about['date']} on {machine}, in {work}, with {versions}. {amount}"
