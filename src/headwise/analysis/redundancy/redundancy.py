"""Redundancy: similarity of every two heads, clusters of similar heads, and the cost of removing a cluster."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.analysis.ablate import ablate
from headwise.analysis.head_pass import PassData, head_rows, require_finite_outputs, table_of_pass
from headwise.analysis.losses import Loss, name_of_loss, options_of_loss
from headwise.analysis.redundancy.comparison import MEASURES, ComparisonProgress, HeadComparison
from headwise.checks import finite_number, require_module, require_one_of
from headwise.data.batches import call_model, device_of, to_device
from headwise.data.texts import Texts
from headwise.errors import InputError, require
from headwise.intercept.install import intercepted
from headwise.plots.grids import draw_similarity
from headwise.runs.data_pass import Pass, prepare_texts
from headwise.runs.distributed import broadcast_from_rank0
from headwise.runs.rows import HeadRow, MeanEstimate
from headwise.runs.table import Table
from headwise.shapes import Float
from headwise.statistics.moments import Clusters
from headwise.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class ClusterCost(NamedTuple):
    """Ablation effects of a cluster of similar heads: the increase of the loss without each single head of the cluster,
    and the increase without all of these heads together.

    Attributes:
        heads: `(layer, head)` of each head.
        alone: increase of the loss without each head.
        together: increase of the loss without all of them.
    """

    heads: tuple[tuple[int, int], ...]
    alone: tuple[MeanEstimate, ...]
    together: MeanEstimate

    @property
    def ratio(self) -> float:
        """Increase of the loss without all heads of the cluster, divided by the sum of the increases without each
        single head. NaN if this sum is 0.

        A ratio above 1 means that heads of the cluster compensate for the loss of one of them.
        """
        total = sum(effect.value for effect in self.alone)
        return self.together.value / total if total else float("nan")


@dataclass(frozen=True, eq=False, repr=False)
class Redundancy(Table[HeadRow]):
    """Similarity of every two heads of a model, clusters of similar heads, and the ablation effects of the clusters.

    The matrices have heads in the order of the model along both axes, and NaN for pairs that were not compared. The
    measures are over the tokens that are not padding:

        cosine    Mean over tokens of the cosine between the vectors that both heads write into the residual stream:
                  their outputs after their slices of the output projection. If no projection is found, the outputs are
                  compared as they are.
        cka       Linear centred kernel alignment of the outputs x and y (Kornblith et al. 2019, section 3), the
                  dependence of x and y divided by the root of that of x on itself and of y on itself, with the unbiased
                  estimate of dependence (Song et al. 2012, equation 5; Murphy et al. 2024). It is 1 if y is x, rotated
                  and scaled. Around 0 it may be negative. The estimate is unbiased for independent tokens; the plain
                  one is large for unrelated heads if there are not many more tokens than features. For n independent
                  tokens and unrelated heads, its standard deviation is sqrt(2 / (n (n - 3))). It is NaN for a head
                  whose outputs are the same for all tokens, up to rounding.
        distance  Mean over rows of the Jensen-Shannon distance between the attention weights p and q,
                  sqrt(sum_j (p ln(p/m) + q ln(q/m)) / 2) with m = (p + q) / 2: from 0 to sqrt(ln 2) = 0.83.

    Attributes:
        rows: a row for each head, without statistics.
        metadata: model, data, versions and settings.
        cosine: mean cosine of the vectors that two heads write into the residual stream, -1 to 1.
        cka: debiased linear centred kernel alignment of two heads' outputs, at most 1.
        distance: mean Jensen-Shannon distance of two heads' attention weights, 0 to sqrt(ln 2). NaN for heads of
            different layers, and for heads of one layer whose masks differ so much that they are computed separately.
        clusters: sets of at least two heads `(layer, head)`, all pairs of which have a `cka` of the threshold or more.
        cluster_costs: ablation effects of each cluster; empty without a loss.
    """

    NAME = "redundancy"
    ROW_TYPE = HeadRow

    cosine: Float[Tensor, "heads heads"]
    cka: Float[Tensor, "heads heads"]
    distance: Float[Tensor, "heads heads"]
    clusters: tuple[tuple[tuple[int, int], ...], ...]
    cluster_costs: tuple[ClusterCost, ...] = ()

    def __repr__(self) -> str:
        clusters = counted(len(self.clusters), "cluster")
        return f"Redundancy({counted(len(self.rows), 'head')} of {self.model_name}, {clusters} of similar heads)"

    @property
    def heads(self) -> tuple[Mapping[str, Any], ...]:
        """Labels of each head, in the order of the model. They are the layer, the head in the layer, its key/value
        head, the path of its module, and the kind of attention ("self" or "cross").
        """
        return tuple(row.identifiers for row in self.rows)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all heads as "layer.head", zero-based, in the order of the rows and columns of the similarity
        matrices.
        """
        return tuple(row.name for row in self.rows)

    def table(self) -> Any:
        """Return a pandas DataFrame with one row per compared pair of heads. The columns are the names of the two
        heads, `a` and `b`, and the measures of their similarity, `cosine`, `cka` and `distance`.

        Raises:
            MissingExtra: pandas is not installed.
        """
        pandas = require("pandas", purpose="a table", extra="tables")
        names, matrices = self.names, {name: getattr(self, name) for name in MEASURES}
        return pandas.DataFrame(
            [
                {"a": names[a], "b": names[b], **{name: matrix[a, b].item() for name, matrix in matrices.items()}}
                for a, b in combinations(range(len(names)), 2)
                if not all(matrix[a, b].isnan() for matrix in matrices.values())
            ],
            columns=["a", "b", *MEASURES],
        )

    def plot(self, statistic: str = "cka", *, ax: Any = None) -> "Axes":
        """Draw a matrix of heads by heads, coloured by one measure of their similarity, and return the matplotlib axes.
        Pairs of heads that were not compared are grey.

        Args:
            statistic: the measure: "cosine", "cka" or "distance".
            ax: matplotlib axes to draw on; those of a new figure by default.

        Raises:
            InputError: there is no such measure, or `ax` is not axes.
            MissingExtra: matplotlib is not installed.

        Example:
            >>> hw.redundancy(model, texts).plot("cosine").figure.savefig("cosine.png")  # doctest: +SKIP
        """
        measure = require_one_of("statistic", statistic, MEASURES)
        layers, is_centred = [row.layer for row in self.rows], measure == "cosine"
        return draw_similarity(
            getattr(self, measure), layers, measure=measure, title=self.model_name, centred=is_centred, ax=ax
        )

    def _samples(self) -> tuple[list[Any], str]:
        """Return the data to store in a file, in two parts. The first part has one list per head: its rows of the three
        similarity matrices, one after the other. The second part is the clusters and their ablation effects as JSON.
        """
        matrices = torch.cat([getattr(self, name) for name in MEASURES], 1)
        return matrices.tolist(), json.dumps({"clusters": self.clusters, "cluster_costs": self.cluster_costs})

    @classmethod
    def _from_samples(cls, lists: list[Any], shared: str) -> dict[str, Any]:
        matrices = torch.split(torch.tensor(lists, dtype=torch.float64), len(lists), 1)
        parts = json.loads(shared)
        clusters = tuple(tuple(map(tuple, cluster)) for cluster in parts["clusters"])
        costs = tuple(
            ClusterCost(tuple(map(tuple, heads)), tuple(MeanEstimate(*each) for each in alone), MeanEstimate(*together))
            for heads, alone, together in parts["cluster_costs"]
        )
        return dict(zip(MEASURES, matrices, strict=True)) | {"clusters": clusters, "cluster_costs": costs}


def redundancy(
    model: nn.Module,
    dataset: Texts | Iterable[Any],
    *,
    pairs: str = "layer",
    threshold: float = 0.9,
    loss: Loss | None = None,
    out: str | Path | None = None,
    force: bool = False,
    progress: bool = False,
    title: str | None = None,
) -> Redundancy:
    """Measure the similarity of every two heads of each layer, and group similar heads into clusters. With
    `pairs="all"`, also compare the outputs of heads in different layers. If a loss is given, also measure how much it
    increases without each single head of a cluster, and without all heads of the cluster.

    The measures over tokens are the cosine and the centred kernel alignment (`cka`) of two heads' outputs, and the
    Jensen-Shannon distance of their attention weights; `Redundancy` has the definitions. Clusters are complete-linkage
    clusters of `cka`. If a cluster costs more than the sum of its heads alone, these heads compensate for each other.

        similar = hw.redundancy(model, texts, loss=hw.next_token_loss)
        similar.table()                                 # one row per pair: a, b, cosine, cka, distance
        [(cost.heads, cost.ratio) for cost in similar.cluster_costs]

    The model runs in evaluation mode, without gradients, and is unchanged afterwards. With torch.distributed, the
    processes share the batches.

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
        out: folder for the result; an interrupted run resumes there with the same arguments.
        force: replace another run in that folder.
        progress: show a progress bar on standard error.
        title: the model's name for display.

    Raises:
        InputError: the data cannot be used, or cannot be read twice and a loss is given; there is no batch; `pairs` is
            unknown; no attention of the model is intercepted; head outputs are NaN or infinite.
        MissingExtra: scipy is not installed, or a package that `out` or `progress` needs.

    Warns:
        UserWarning: of modules that are not compared, and of modules that are compared over so few tokens that some
            unrelated heads may have a `cka` of `threshold` by chance.
    """
    require_module(model)
    if pairs not in ("layer", "all"):
        raise InputError("pairs", expected="'layer' or 'all'", got=repr(pairs))
    threshold = finite_number("threshold", threshold, above=0.0)
    if loss is not None and isinstance(dataset, Iterator):
        expected = "batches that can be read twice"
        raise InputError("dataset", expected=expected, got="an iterator", remedy="list(batches)")
    _require_clustering()
    data = PassData(model, prepare_texts(dataset, model, out, shown=progress), [])
    comparison = HeadComparison(model, across_layers=pairs == "all")

    def measure(data_pass: Pass[ComparisonProgress]) -> ComparisonProgress:
        comparison.add(data_pass.resumed)
        compared, device = comparison.progress, device_of(model)

        def process_batch(batch: dict[str, Any], _clusters: Clusters) -> None:
            batch = to_device(batch, device)
            call_model(model, batch)
            require_finite_outputs(comparison.nonfinite_modules, model, batch)
            comparison.finish_batch()
            compared.records = comparison.records

        with intercepted(model, comparison):
            data_pass.over(data.dataset, process_batch, compared)
        if comparison.ran:
            comparison.require_attention()
        return compared

    def make_table(parts: list[ComparisonProgress], metadata: dict[str, Any]) -> Redundancy:
        for part in parts[1:]:
            comparison.add(part)
        comparison.name_few_tokens(threshold)
        similarity: Any = comparison.similarity()
        rows = head_rows(comparison, {})
        clusters = tuple(
            tuple((rows[head].layer, rows[head].head) for head in cluster)
            for cluster in find_clusters(similarity["cka"], threshold)
        )
        return Redundancy(rows, metadata, **similarity, clusters=clusters)

    options: dict[str, Any] = {"out": out, "force": force, "progress": progress, "title": title}
    table = table_of_pass(
        data,
        Redundancy,
        ComparisonProgress,
        measure,
        make_table,
        pairs=pairs,
        threshold=threshold,
        loss=None if loss is None else name_of_loss(loss),
        loss_options=options_of_loss(loss),
        **options,
    )
    comparison.warn_of_unread(stacklevel=3)
    if loss is None or not table.clusters or table.cluster_costs:
        return table
    sets = {f"{layer}.{head}": [(layer, head)] for heads in table.clusters for layer, head in heads}
    sets |= {f"cluster {index}": list(heads) for index, heads in enumerate(table.clusters)}
    options["out"] = None if out is None else Path(out) / "clusters"
    effects = ablate(model, data.dataset, loss, units=sets, **options).rows
    costs = {name: row.statistics["cost"] for name, row in zip(sets, effects, strict=True)}
    cluster_costs = tuple(
        ClusterCost(heads, tuple(costs[f"{layer}.{head}"] for layer, head in heads), costs[f"cluster {index}"])
        for index, heads in enumerate(table.clusters)
    )
    table = replace(table, cluster_costs=cluster_costs)
    if out is not None:
        result, path = table, out
        broadcast_from_rank0(lambda: result.save(path, force=True))
    return table


def _require_clustering() -> Any:
    """Import and return `scipy.cluster.hierarchy`; raise `MissingExtra` if scipy is not installed."""
    return require("scipy.cluster.hierarchy", purpose="clusters of heads", extra="tables")


def find_clusters(similarity: Float[Tensor, "heads heads"], threshold: float) -> list[list[int]]:
    """Group heads into clusters in which every two heads have a similarity of at least `threshold`. Return the clusters
    of two or more heads, each as a list of head indices.

    Complete-linkage clustering: the two most similar sets are joined first, where the similarity of two sets is that of
    their least similar pair. SciPy decides the order of equally similar pairs. Similarities are at most 1; NaN, of a
    pair that was not compared, is below every threshold.
    """
    hierarchy = _require_clustering()
    if len(similarity) < 2:
        return []
    # In the matrix's dtype, so that a similarity that equals the threshold is not below it by rounding.
    largest_distance = 1 - torch.tensor(threshold, dtype=similarity.dtype)
    if largest_distance < 0:
        return []
    distances = (1 - similarity).nan_to_num(nan=2.0).clamp(0.0, 2.0)
    above_diagonal = tuple(torch.triu_indices(len(similarity), len(similarity), offset=1))
    tree = hierarchy.linkage(distances[above_diagonal].double().numpy(), method="complete")
    clusters: dict[int, list[int]] = {}
    for head, cluster in enumerate(hierarchy.fcluster(tree, t=largest_distance.item(), criterion="distance")):
        clusters.setdefault(int(cluster), []).append(head)
    return sorted(heads for heads in clusters.values() if len(heads) > 1)
