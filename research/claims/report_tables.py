"""Tables of docs/reports/claims.md: one function for the section of each claim."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from research.claims.estimates import of_runs, shown
from research.claims.generated_tasks import SYMBOLS
from research.claims.report_text import EXAMPLE, MIXES, ONE_HEAD
from research.claims.result_files import Results
from research.markdown import markdown_table, picture

LEAST_P = 1e-6
"""Smallest p-value that is shown as a number."""


def title(cell: Any) -> str:
    """Return task and position scheme of a cell in words."""
    depth = cell["depth"]
    return f"{cell['words']}, width {cell['width']}, {depth} layer{'s' * (depth > 1)}, {cell['scheme']}"


def interval(row: Any) -> str:
    """Return a mean with its 95 % interval."""
    return f"{row['mean']:+.3f} ({row['low']:+.3f} to {row['high']:+.3f})"


def first(cells: dict[int, Any]) -> Any:
    """Return the cell with the smallest number of heads."""
    return next(iter(cells.values()))


def distances(results: Results) -> list[str]:
    """Write the distances between heads beyond those of untrained heads of equal entropy."""
    verdict = results.verdicts["different"]
    rows = []
    for (task, scheme), cells in results.settings.items():
        runs = cells[8]["runs"] if 8 in cells else []
        if not runs or "distance" not in runs[0]:
            continue
        means = {
            name: [float(np.mean(list(run["distance"][name].values()))) for run in runs]
            for name in ("trained", "untrained", "as sharp")
        }
        effect = verdict["effects"].get(f"{task}, {scheme}")
        rows.append((title(cells[8]), *(shown(each) for each in means.values()), *_effect(effect)))
    for saved in results.published.get("measured", {}).values():
        means = {
            name: [float(np.mean([list(document.values()) for document in each])) for each in seeds]
            for name, seeds in (("untrained", saved["untrained"]), ("as sharp", saved["as sharp"]))
        }
        trained = float(np.mean([list(document.values()) for document in saved["trained"]]))
        controls = (f"{np.mean(each):.3f}" for each in means.values())
        effect = verdict["effects"].get(saved["title"])
        rows.append((saved["title"], f"{trained:.3f}", *controls, *_effect(effect)))
    headers = ("model", "trained", "untrained", "untrained, equally sharp", "trained minus equally sharp", "heads are")
    words = (
        "The table shows the mean distance between the attention weights of two heads of a layer, in models with 8 "
        "heads and in two published models. ± is the standard error over seeds. The 95 % intervals (Student's t) are "
        "over seeds, and for published models over documents:"
    )
    table = markdown_table(headers, rows)
    return [words, "", *table, *mixed_model(verdict), *picture("claims-distances", "Distances between heads")]


def _effect(effect: Any) -> tuple[str, str]:
    """Return an effect with its interval, and what it means; nothing if no layer could be compared."""
    if effect is None:
        return "", "not compared"
    return interval(effect), {1: "farther apart", 0: "undecided", -1: "closer together"}[effect["sign"]]


def mixed_model(verdict: Any) -> list[str]:
    """Write the layers that are left out, the count without further tasks, and the mixed model over all settings."""
    few = verdict["without further tasks"]
    text = (
        f"In the comparison of distances between heads, {verdict['layers left out']} layers are left out, because the "
        "entropy of their control (scaled untrained heads) differs from that of the trained layer by more than 5 %. "
        "Without the further tasks, trained heads are "
        f"farther apart than the control in {few['farther']} of {few['of']} settings and published models, and closer "
        f"together in {few['closer']}. The verdict would then be: {few['outcome']}. "
    )
    mixed = verdict["mixed model"]
    if mixed is not None and mixed["error"] is not None:
        text += (
            "A linear mixed model of the layers of the models trained here, with random intercepts for the setting and "
            f"for the model within it, has the mean {interval(mixed)} for the distance of trained heads minus that of "
            "the control. Its standard deviations are "
            f"{mixed['variance of settings'] ** 0.5:.3f} between settings, {mixed['variance of models'] ** 0.5:.3f} "
            f"between models and {mixed['variance of layers'] ** 0.5:.3f} between layers."
        )
    elif mixed is not None:
        text += "The linear mixed model did not converge."
    return [text.rstrip(), ""]


def loss_table(results: Results) -> list[str]:
    """Write the test loss of every setting."""
    settings = [cells for cells in results.settings.values() if first(cells)["is_setting"]]
    heads = sorted({number for cells in settings for number in cells})
    rows = []
    for cells in settings:
        validation = {number: np.mean(of_runs(cell, "validation")) for number, cell in cells.items()}
        losses = [shown(of_runs(cells[number], "test")) if number in cells else "" for number in heads]
        rows.append((title(first(cells)), *losses, min(validation, key=lambda number: validation[number])))
    words = "Test loss in nats by number of heads, and the best number by validation loss:"
    return [words, "", *markdown_table(("setting", *map(str, heads), "best"), rows)]


def _p_value(p: float) -> str:
    """Return a p-value in two digits, or a bound where no more digits are known."""
    return f"{p:.2g}" if p >= LEAST_P else f"< {LEAST_P:g}"


def compared(results: Results, claim: str) -> list[str]:
    """Write the comparison that decides a claim in every setting."""
    rows = []
    for kind in ("settings", "further"):
        for row in results.verdicts[claim][kind].values():
            cells = results.settings[row["task"], row["scheme"]]
            bootstrap = "" if row["bootstrap"] is None else "{:+.3f} to {:+.3f}".format(*row["bootstrap"])
            counted = "" if kind == "settings" else "no"
            significant = {1: "yes", 0: "no", -1: "better"}[row["sign"]]
            heads = "{} and {}".format(*row["heads"])
            figures = (f"{row['difference']:+.3f}", _p_value(row["holm"]), bootstrap)
            rows.append((title(first(cells)), heads, *figures, significant, counted))
    headers = (
        "setting",
        "heads compared",
        "difference, nats",
        "p (Games-Howell, Holm)",
        "bootstrap interval",
        "significantly worse",
        "counts",
    )
    return markdown_table(headers, rows)


def penalties(results: Results) -> list[str]:
    """Write how the penalty of the largest number of heads differs between position schemes."""
    rows = [
        (row["task"], " minus ".join(row["schemes"]), f"{row['difference']:+.3f} ± {row['error']:.3f}")
        for row in results.verdicts["more"]["between schemes"]
    ]
    words = "Difference of the penalty between position schemes, in nats:"
    return [words, "", *markdown_table(("task", "schemes", "difference of the penalty"), rows)]


def relations(results: Results) -> list[str]:
    """Write the argument that one head serves one slot, and the results of the task of several relations."""
    rows = []
    for (task, _), cells in results.settings.items():
        for heads, cell in cells.items() if task.startswith("relations") else ():
            slots = np.mean([run["accuracy"] for run in cell["runs"]], 0)
            model = f"{cell['words']}, {cell['scheme']}"
            rows.append((model, heads, shown(of_runs(cell, "test")), *(f"{share:.3f}" for share in slots)))
    headers = ("model", "heads", "loss", "1 before", "2 before", "3 before", "4 before")
    lines = ["### Four relations at once", "", *ONE_HEAD, "", example(), "", *markdown_table(headers, rows)]
    return lines + picture("claims-relations", "Right answers in each slot, against heads")


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
    for cells in results.settings.values():
        for heads, cell in cells.items():
            if "ranks" in cell["runs"][0]:
                names = cell["runs"][0]["ranks"]
                means = [np.mean([run["ranks"][name] for run in cell["runs"]]) for name in names]
                rows.append((title(cell), heads, cell["width"] // heads, *(f"{mean:.1f}" for mean in means)))
    headers = ("setting", "heads", "head_dim", "rank of the scores", "99 % of the scores", "99 % of the weights")
    words = (
        "The attention scores of a head are a matrix of all queries and all keys, before mask and softmax. Its rank is "
        "at most head_dim (Bhojanapalli et al. 2020, who therefore fix head_dim). The table shows means over layers, "
        "heads, sequences and seeds. The last two columns count the largest singular values that together carry 99 % "
        "of the sum of squares: first of the scores, then of the attention weights:"
    )
    return ["### The rank of the scores", "", words, "", *markdown_table(headers, rows)]


def timing(results: Results) -> list[str]:
    """Write the times of more heads, and of a list of heads, as ratios."""
    if results.timings is None:
        return ["Not measured.", ""]
    rows = []
    for regime in results.timings["measured"]:
        seconds = {name: np.array(each) for name, each in regime["seconds"].items()}
        words = f"{regime['device']}, batch {regime['batch']}, length {regime['length']}"
        for name, taken in seconds.items():
            what, kind, heads = name.split()
            if kind == "fused":
                fused = taken / seconds[f"{what} fused 1"]
                separate = seconds[f"{what} list {heads}"] / taken
                rows.append((words, what, int(heads), _quartiles(fused), _quartiles(separate)))
    measured, threads = results.timings["measured"][0], results.timings["about"]["threads"]
    rounds = len(next(iter(measured["seconds"].values())))
    text = (
        f"The table compares times of attention layers of width {measured['width']} in float32 with a causal mask, on "
        f"{threads} CPU threads where the device is cpu. A cell has the median of a ratio of two times over {rounds} "
        "rounds, and its quartiles. Both times come from the same round:"
    )
    headers = ("regime", "pass", "heads", "fused, relative to one head", "list of heads, relative to fused")
    rows.sort(key=lambda row: row[:3])
    return [text, "", *markdown_table(headers, rows), *picture("claims-times", "Time against the number of heads")]


def _quartiles(ratios: Any) -> str:
    low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def few(results: Results) -> list[str]:
    """Write losses and gaps of the tasks with little data."""
    rows = []
    for (task, scheme), cells in results.settings.items():
        for heads, cell in cells.items() if task.endswith("-few") else ():
            figures = (shown(of_runs(cell, name)) for name in ("training", "test", "gap"))
            name = f"{task}, {scheme}"
            signs = ["", ""]
            if heads > 1:
                judged = results.verdicts["regularises"]
                found = [judged[what].get(str(heads), {}).get(name) for what in ("gaps", "losses")]
                signs = [
                    "not compared" if row is None else {1: "smaller", 0: "no difference", -1: "larger"}[row["sign"]]
                    for row in found
                ]
            rows.append((title(cell), heads, f"{cell['rate']:.4g}", *figures, *signs))
    headers = (
        "setting",
        "heads",
        "learning rate",
        "training loss",
        "test loss",
        "gap",
        "gap, against one head",
        "test loss, against one head",
    )
    return [*markdown_table(headers, rows), *picture("claims-gap", "The gap against heads")]


def removed(results: Results) -> list[str]:
    """Write the loss without half of the heads as a share of the loss without any."""
    rows = []
    for row in results.verdicts["robust"]["settings"].values():
        cells = results.settings[row["task"], row["scheme"]]
        for heads, cell in cells.items():
            sets = cell["runs"][0]["removed"]
            total = shown([run["removed"]["all"] - run["removed"]["whole"] for run in cell["runs"]])
            if str(heads) not in row["half"]:
                continue
            shares = ["{:.3f} ± {:.3f}".format(*row[how][str(heads)]) for how in ("half", "least")]
            against = [_direction(row[f"{how} steps"].get(f"1 to {heads}")) for how in ("half", "least")]
            count = f"{len(sets['half'])} of {sets['halves']:,}"
            rows.append((title(cell), heads, count, total, shares[0], against[0], shares[1], against[1]))
    headers = (
        "setting",
        "heads",
        "halves measured",
        "effect of all, nats",
        "share of half",
        "against one head",
        "share of the least important half",
        "against one head",
    )
    settings = results.verdicts["robust"]["settings"]
    shapes = [(name, row["half shape"], row["least shape"]) for name, row in settings.items()]
    lines = [*markdown_table(headers, rows), "Shape of the shares against the number of heads:", ""]
    lines += markdown_table(("setting", "half of the heads", "the least important half"), shapes)
    return lines + (picture("claims-removed", "Share of half of the heads, against heads") if rows else [])


def _direction(sign: int | None) -> str:
    return "" if sign is None else {1: "larger", 0: "no difference", -1: "smaller"}[sign]


def grades(results: Results) -> list[str]:
    """Write in which settings each number of heads is good."""
    rows = []
    every = sorted({int(heads) for row in results.verdicts["eight"]["settings"].values() for heads in row["heads"]})
    for row in results.verdicts["eight"]["settings"].values():
        cells = results.settings[row["task"], row["scheme"]]
        marks = [row["heads"].get(str(heads), {"grade": ""})["grade"] for heads in every]
        eight = row["heads"].get("8")
        difference = "" if eight is None else "the best" if row["best"] == 8 else interval(eight)
        rows.append((title(first(cells)), row["best"], *marks, difference))
    headers = ("setting", "best", *(f"{heads} heads" for heads in every), "8 minus best, nats")
    good = results.verdicts["eight"]["settings by grade"]["good"]
    counts = ", ".join(f"{heads} heads in {number}" for heads, number in good.items())
    words = f"Good, of the {results.verdicts['eight']['of']} settings that count: {counts or 'not measured'}."
    return [*markdown_table(headers, rows), words, ""]


def schemes_of(verdict: Any) -> Sequence[str]:
    """Return the outcome of a claim under each position scheme, such as `rotary: held`."""
    return [f"{scheme}: {row['outcome']}" for scheme, row in verdict.get("schemes", {}).items()]
