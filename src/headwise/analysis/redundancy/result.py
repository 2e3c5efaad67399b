"""Result of a redundancy analysis: similarity of every two heads, clusters, and the cost of removing clusters."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from headwise.errors import require
from headwise.intercept.model_name import short_name
from headwise.plots.kinds import require_name
from headwise.plots.matrices import draw_similarity
from headwise.runs.rows import MeanEstimate
from headwise.shapes import Float
from headwise.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURES = ("cosine", "cka", "distance")


class ClusterCost(NamedTuple):
    """Ablation effects of a cluster of similar heads: the increase of the loss without each head alone, and without all
    of them together.

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
        """Ablation effect of all heads of the cluster together, divided by the sum of the effects of each head alone;
        NaN if that sum is 0.

        A ratio above 1 means that heads of the cluster compensate for the loss of one of them.
        """
        total = sum(effect.value for effect in self.alone)
        return self.together.value / total if total else float("nan")


@dataclass(frozen=True, eq=False)
class Redundancy:
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
        heads: labels of each head: layer, head, kv_head, module, kind ("self" or "cross").
        cosine: mean cosine of the vectors that two heads write into the residual stream, -1 to 1.
        cka: debiased linear centred kernel alignment of two heads' outputs, at most 1.
        distance: mean Jensen-Shannon distance of two heads' attention weights, 0 to sqrt(ln 2). NaN for heads of
            different layers, and for heads of one layer whose masks differ so much that they are computed separately.
        clusters: sets of at least two heads `(layer, head)`, all pairs of which have a `cka` of the threshold or more.
        cluster_costs: ablation effects of each cluster; empty without a loss.
        metadata: model, data, versions and settings.
    """

    heads: tuple[Mapping[str, Any], ...]
    cosine: Float[Tensor, "heads heads"]
    cka: Float[Tensor, "heads heads"]
    distance: Float[Tensor, "heads heads"]
    clusters: tuple[tuple[tuple[int, int], ...], ...]
    cluster_costs: tuple[ClusterCost, ...]
    metadata: Mapping[str, Any]

    def __repr__(self) -> str:
        model = short_name(self.metadata["model"]["name"])
        clusters = counted(len(self.clusters), "cluster")
        return f"Redundancy({counted(len(self.heads), 'head')} of {model}, {clusters} of similar heads)"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all heads as "layer.head", zero-based, in the order of the rows and columns of the similarity
        matrices.
        """
        return tuple(f"{head['layer']}.{head['head']}" for head in self.heads)

    def table(self) -> Any:
        """Return a pandas DataFrame with one row per compared pair of heads: their names `a` and `b`, and the measures
        of their similarity, `cosine`, `cka` and `distance`.

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
        """Draw one measure of similarity as a matrix of heads by heads, and return the matplotlib axes. Pairs of heads
        that were not compared are grey.

        Args:
            statistic: the measure: "cosine", "cka" or "distance".
            ax: matplotlib axes to draw on; those of a new figure by default.

        Raises:
            InputError: there is no such measure, or `ax` is not axes.
            MissingExtra: matplotlib is not installed.

        Example:
            >>> hw.redundancy(model, texts).plot("cosine").figure.savefig("cosine.png")  # doctest: +SKIP
        """
        measure = require_name("statistic", statistic, dict.fromkeys(MEASURES))
        layers, title = [head["layer"] for head in self.heads], short_name(self.metadata["model"]["name"])
        is_centred = measure == "cosine"
        return draw_similarity(getattr(self, measure), layers, measure=measure, title=title, centred=is_centred, ax=ax)
