"""Redundancy: similarity of heads, clusters of similar heads, and the cost of removing a cluster."""

from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch import nn

from headwise.analysis.ablate import ablate
from headwise.analysis.head_pass import require_finite_outputs
from headwise.analysis.losses import Loss
from headwise.analysis.redundancy.clusters import find_clusters, require_linkage
from headwise.analysis.redundancy.comparison import HeadComparison
from headwise.analysis.redundancy.result import ClusterCost, Redundancy
from headwise.checks import finite_number, require_module
from headwise.data.batches import (
    call_model,
    count_sequences_and_tokens,
    device_of,
    evaluation_mode,
    iterate_batches,
    to_device,
)
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.intercept.install import intercepted
from headwise.progress import progress_bar
from headwise.runs.fingerprint import run_settings


def redundancy(
    model: nn.Module,
    dataset: Texts | Iterable[Any],
    *,
    pairs: str = "layer",
    threshold: float = 0.9,
    loss: Loss | None = None,
    progress: bool = False,
) -> Redundancy:
    """Measure the similarity of every two heads of each layer (or of the model), and group similar heads into clusters.
    With `loss`, measure also its increase if each head of a cluster is ablated alone, and if all are ablated together.

    The measures over tokens are the cosine and the centred kernel alignment (`cka`) of two heads' outputs, and the
    Jensen-Shannon distance of their attention weights; `Redundancy` has the definitions. Clusters are complete-linkage
    clusters of `cka`. If a cluster costs more than the sum of its heads alone, these heads compensate for each other.

        similar = hw.redundancy(model, texts, loss=hw.next_token_loss)
        similar.table()                                 # one row per pair: a, b, cosine, cka, distance
        [(cost.heads, cost.ratio) for cost in similar.cluster_costs]

    The model runs in evaluation mode, without gradients, and is unchanged afterwards.

    Args:
        model: any module that `watch` supports.
        dataset: `Texts`, or an iterable of batches, each a tensor or a mapping of the model's arguments. With a loss it
            has to be readable more than once.
        pairs: "layer" compares the heads of each layer with each other. "all" also compares the outputs of heads of
            different layers that read the same tokens; attention weights are compared within a layer only. With D the
            number of output features of a layer's heads, "layer" needs `8 D^2` bytes per layer. "all" needs half as
            much with D for the whole model: 1.2 GB for 270 heads of 64 features.
        threshold: least `cka` of every two heads of a cluster.
        loss: function `(model, batch) -> (batch,)`; None to skip the ablation of clusters.
        progress: show a progress bar on standard error.

    Raises:
        InputError: the data cannot be used, or cannot be read twice and a loss is given; there is no batch; `pairs` is
            unknown; no attention of the model is intercepted; head outputs are NaN or infinite.
        MissingExtra: scipy is not installed, or rich and `progress` is set.

    Warns:
        UserWarning: of modules that are not compared, and of modules that are compared over so few tokens that some
            unrelated heads may have a `cka` of `threshold` by chance.
    """
    threshold = _checked_threshold(model, dataset, pairs, threshold, loss)
    dataset = dataset.within(model) if isinstance(dataset, Texts) else dataset
    comparison = HeadComparison(model, across_layers=pairs == "all")
    sequences, tokens = _run_over(model, dataset, comparison, show_progress=progress)
    comparison.name_few_tokens(threshold)
    comparison.warn_of_unread(stacklevel=3)
    heads = tuple(labels for _, labels in comparison.head_labels())
    layer_heads = [(labels["layer"], labels["head"]) for labels in heads]
    cka = comparison.cka()
    clusters = tuple(tuple(layer_heads[head] for head in cluster) for cluster in find_clusters(cka, threshold))
    costs = () if loss is None or not clusters else tuple(_cluster_costs(model, dataset, loss, clusters))
    texts = dataset if isinstance(dataset, Texts) else None
    settings = run_settings(model, texts, None, pairs=pairs, threshold=threshold)
    metadata = {**settings, "measured": {"sequences": sequences, "tokens": tokens}}
    return Redundancy(heads, comparison.cosine(), cka, comparison.distance(), clusters, costs, metadata)


def _checked_threshold(model: Any, dataset: Any, pairs: Any, threshold: Any, loss: Loss | None) -> float:
    """Raise `InputError` for unusable arguments of `redundancy`, and `MissingExtra` if scipy is not installed. Return
    the threshold as a number.
    """
    require_module(model)
    if pairs not in ("layer", "all"):
        raise InputError("pairs", expected="'layer' or 'all'", got=repr(pairs))
    checked = finite_number("threshold", threshold, above=0.0)
    if loss is not None and isinstance(dataset, Iterator):
        expected = "batches that can be read twice"
        raise InputError("dataset", expected=expected, got="an iterator", remedy="list(batches)")
    require_linkage()
    return checked


def _run_over(
    model: nn.Module, dataset: Texts | Iterable[Any], comparison: HeadComparison, *, show_progress: bool
) -> tuple[int, int]:
    """Run the model on all batches of a data set while the interceptor `comparison` compares the heads of the model;
    return the number of sequences and the number of tokens that are not padding.
    """
    sequences, tokens, device = 0, 0, device_of(model)
    total = len(dataset) if isinstance(dataset, Sized) else None
    shown_bar = progress_bar("redundancy", total, "batches", shown=show_progress)
    with evaluation_mode(model), torch.no_grad(), shown_bar as bar, intercepted(model, comparison):
        for batch in bar.track(iterate_batches(dataset), step=1):
            on_device = to_device(batch, device)
            call_model(model, on_device)
            require_finite_outputs(comparison.nonfinite_modules, model, on_device)
            comparison.finish_batch()
            batch_sequences, batch_tokens = count_sequences_and_tokens(batch)
            sequences, tokens = sequences + batch_sequences, tokens + batch_tokens
    if not sequences:
        raise InputError("dataset", expected="at least one batch", got="none")
    comparison.require_attention()
    return sequences, tokens


def _cluster_costs(
    model: nn.Module, dataset: Any, loss: Loss, clusters: tuple[tuple[tuple[int, int], ...], ...]
) -> Iterator[ClusterCost]:
    """Yield the ablation effects (increases of the loss) of each cluster of similar heads: the effect of removing each
    head of the cluster alone, and of removing all its heads together.
    """
    sets = {f"{layer}.{head}": [(layer, head)] for heads in clusters for layer, head in heads}
    sets |= {f"cluster {index}": list(heads) for index, heads in enumerate(clusters)}
    rows = ablate(model, dataset, loss, units=sets).rows
    costs = {name: row.statistics["cost"] for name, row in zip(sets, rows, strict=True)}
    for index, heads in enumerate(clusters):
        alone = tuple(costs[f"{layer}.{head}"] for layer, head in heads)
        yield ClusterCost(heads, alone, costs[f"cluster {index}"])
