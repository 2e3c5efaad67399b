"""Tables of the scores of heads and of pairs of heads, from their OV and QK matrices.

Composition scores are computed from the factors of these matrices. With the QR decompositions `B^T = Q S` and
`D^T = P T`, the norm of `B^T (A C) D` is that of `S (A C) T^T`, a matrix of head_dim by head_dim.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from headwise.checks import head_pair, require_one_of, whole_number
from headwise.errors import InputError
from headwise.plots.grids import draw_similarity
from headwise.plots.kinds import Kind, plot_kind
from headwise.plots.points import PlottedNumbers, draw_ranking
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import NO_ESTIMATE, HeadRow, MeanEstimate, Row
from headwise.runs.table import Table
from headwise.shapes import Float
from headwise.statistics.columns import Column

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DRAWS = 64
"""Number of pairs of random matrices whose scores give the standard deviation of random scores."""


class CircuitScores(HeadTable[HeadRow]):
    """Table of scores of each head, one row per head. The scores are computed from the weights of its QK matrix (which
    determines attention scores) and its OV matrix (which maps an attended token to the head's output). Examples are
    norms and the copying score.

    E is what each token adds to the residual stream, U is the output embedding times the linear part of the final norm,
    and l are the eigenvalues of a matrix of vocabulary by vocabulary:

        copying     sum(l).real / sum(|l|) for U OV E^T: the logit that the head adds to each token, for each token that
                    it attends to. 1 if attending to a token only raises the logit of that token (and of others like
                    it), -1 if it only lowers it (Elhage et al. 2021, section "Detecting copying behavior").
        matching    the same for E QK E^T: the score of each token as query and each as key. It is 1 if the head attends
                    to tokens that are equal (or alike), -1 if to tokens that are not.
        ov_norm     Frobenius norm of OV.
        ov_largest  largest singular value of OV.
        qk_norm     Frobenius norm of QK.
        qk_largest  largest singular value of QK.

    The eigenvalues are exact: all of them but head_dim are 0, and the others are those of a matrix of head_dim by
    head_dim. Weights are not a sample: scores have no standard error, which is NaN.
    """

    NAME = "circuits"
    COLUMNS = (
        Column(
            "copying",
            "Share of positive eigenvalues of the effect of tokens on logits through the head's OV matrix, -1 to 1.",
            is_signed=True,
        ),
        Column(
            "matching",
            "Share of positive eigenvalues of the scores of tokens by the head's QK matrix, -1 to 1.",
            is_signed=True,
        ),
        Column("ov_norm", "Frobenius norm of the head's OV matrix."),
        Column("ov_largest", "Largest singular value of the head's OV matrix."),
        Column("qk_norm", "Frobenius norm of the head's QK matrix."),
        Column("qk_largest", "Largest singular value of the head's QK matrix."),
    )
    SAMPLES = "model"


@dataclass(frozen=True, kw_only=True, repr=False)
class HeadPair(Row):
    """Row of a table of composition scores, which state how strongly a head reads the output of a head of an earlier
    layer: both heads, and their scores.

    Attributes:
        layer: layer of the later head, zero-based.
        head: the later head in its layer.
        earlier_layer: layer of the earlier head.
        earlier_head: the earlier head in its layer.
    """

    layer: int
    head: int
    earlier_layer: int
    earlier_head: int

    @property
    def name(self) -> str:
        """Names of the two heads of the pair as "layer.head", the earlier one first, such as `1.3>5.0`."""
        return f"{self.earlier_layer}.{self.earlier_head}>{self.layer}.{self.head}"

    def _described(self) -> list[str]:
        return [self.name]


class CompositionSummary(HeadTable[HeadRow]):
    """Table of the largest composition scores of each head, one row per head. A composition score states how strongly a
    head's queries (`q`), keys (`k`) or values (`v`) read the output of an earlier head. `k_in` is the largest score of
    this head's keys with an earlier head, and `k_out` the largest score of a later head's keys with this head. The
    columns for `q` and `v` are named in the same way. A column is NaN if the model has no earlier or later head, or if
    the OV or QK matrix of this head is 0.
    """

    NAME = "composition-summary"
    SAMPLES = "model"


class Composition(Table[HeadPair]):
    """Table of composition scores, one row per pair of heads. A score states how strongly one head (head 2) reads what
    a head of an earlier layer (head 1) writes into the residual stream.

    The scores are, with |.| for the Frobenius norm:

        q  |QK2^T OV1| / (|QK2| |OV1|)    head 1 writes what the queries of head 2 read
        k  |QK2 OV1| / (|QK2| |OV1|)      head 1 writes what its keys read
        v  |OV2 OV1| / (|OV2| |OV1|)      head 1 writes what its values read

    (Elhage et al. 2021, section "Composition scores"). A score is from 0 to 1. For matrices with independent Gaussian
    numbers it is close to `expected`, 1 / sqrt(width): with a rotation of one matrix by chance, the expectation of the
    squared score is exactly 1 / width, whatever the ranks. Scores of trained models are mostly above this number, so
    compare a pair with other pairs too.
    """

    NAME = "composition"
    ROW_TYPE = HeadPair
    UNIT: ClassVar[str] = "pair"
    SAMPLES: ClassVar[str] = "model"

    @property
    def expected(self) -> float:
        """Composition score to expect of two random matrices: the root mean square of such scores, 1 / sqrt(width)."""
        return float(self.metadata["measured"]["expected"])

    @property
    def random_sd(self) -> float:
        """Standard deviation of the composition scores of random Gaussian matrices, estimated by simulation. The
        matrices have the shapes of those in the model's first two layers.
        """
        return float(self.metadata["measured"]["random_sd"])

    def pair(self, earlier: tuple[int, int], later: tuple[int, int]) -> HeadPair:
        """Return the row of the table for the heads `earlier` and `later`, each as `(layer, head)`, zero-based.

        Raises:
            InputError: the table has no such pair.
        """
        heads = tuple(head_pair("pair", head, of="two heads (layer, head)") for head in (earlier, later))
        for row in self.rows:
            if ((row.earlier_layer, row.earlier_head), (row.layer, row.head)) == heads:
                return row
        raise InputError("pair", expected="a head of an earlier layer and a later one", got=(earlier, later))

    def largest(self, kind: str, top: int = 20) -> list[HeadPair]:
        """Return the `top` rows with the largest scores of a kind of composition ("q", "k" or "v"), largest first. A
        pair of heads is left out if its score is NaN, because the OV or QK matrix of one of its heads is 0.

        Raises:
            InputError: the table has no such kind, or `top` is not a whole number of 1 or more.
        """
        name, top = require_one_of("kind", kind, self.statistics), whole_number("top", top, least=1)
        scored = [row for row in self.rows if not math.isnan(row.statistics[name].value)]
        return sorted(scored, key=lambda row: -row.statistics[name].value)[:top]

    def summary(self) -> CompositionSummary:
        """Return a table with one row per head and the largest composition scores of this head. A column such as `k_in`
        is the largest score of the head with any earlier head, and `k_out` the largest one with any later head.
        """
        largest: dict[tuple[int, int, str], float] = {}
        for row in self.rows:
            for kind, estimate in row.statistics.items():
                ends = (row.layer, row.head, f"{kind}_in"), (row.earlier_layer, row.earlier_head, f"{kind}_out")
                for key in ends if not math.isnan(estimate.value) else ():
                    largest[key] = max(estimate.value, largest.get(key, -math.inf))
        names = [f"{kind}_{end}" for kind in self.statistics for end in ("in", "out")]
        rows = []
        for labels in self.metadata["measured"]["heads"]:
            keys = {name: (labels["layer"], labels["head"], name) for name in names}
            statistics = {
                name: MeanEstimate.exact(largest[key]) if key in largest else NO_ESTIMATE for name, key in keys.items()
            }
            rows.append(HeadRow(**labels, statistics=statistics))
        return CompositionSummary(tuple(rows), self.metadata)

    def plot(
        self, statistic: str | None = None, *, kind: str = "heatmap", top: int | None = None, ax: Any = None
    ) -> "Axes":
        """Draw the composition scores of all pairs of heads as a heatmap or a ranking, and return the matplotlib axes.

        | kind      | plot                                                                                |
        | --------- | ----------------------------------------------------------------------------------- |
        | "heatmap" | the score of every pair: the later head is the row, and the earlier one the column  |
        | "ranking" | pairs in descending order, with a line at `expected`                                |

        Args:
            statistic: "q", "k" or "v"; "k" by default, if the table has it.
            kind: the kind of plot.
            top: number of pairs that "ranking" names, 10 by default.
            ax: matplotlib axes to draw on; those of a new figure by default.

        Raises:
            InputError: the table has no such score or kind, the kind has no such option, or `ax` is not axes.
            MissingExtra: matplotlib is not installed.

        Example:
            >>> composition.plot("k").figure.savefig("composition.svg")  # doctest: +SKIP
        """
        kinds = {"heatmap": Kind(self._heatmap, ("statistic",)), "ranking": Kind(self._ranking, ("statistic", "top"))}
        return plot_kind(kinds, kind, ax, statistic=statistic, top=top)

    def _plotted(self, statistic: str | None) -> str:
        """Return the name of the score to plot: `statistic`, or by default "k" if the table has it, else "v"."""
        default = "k" if "k" in self.statistics else "v"
        return require_one_of("statistic", statistic or default, self.statistics)

    def _heatmap(self, statistic: str | None = None, ax: Any = None) -> "Axes":
        """Draw a matrix of composition scores, with the later head as the row and the earlier head as the column."""
        name, heads = self._plotted(statistic), self.metadata["measured"]["heads"]
        places = {(labels["layer"], labels["head"]): index for index, labels in enumerate(heads)}
        values = torch.full((len(heads), len(heads)), torch.nan)
        for row in self.rows:
            place = places[row.layer, row.head], places[row.earlier_layer, row.earlier_head]
            values[place] = row.statistics[name].value
        layers = [labels["layer"] for labels in heads]
        measure = f"{name.upper()}-composition"
        axes = draw_similarity(values, layers, measure=measure, title=self.model_name, ax=ax)
        axes.set(xlabel="layer of the earlier head", ylabel="layer of the later head")
        return axes

    def _ranking(self, statistic: str | None = None, top: int = 10, ax: Any = None) -> "Axes":
        """Draw the composition scores of all pairs of heads in descending order, with a line at the score to expect of
        random matrices.
        """
        name = self._plotted(statistic)
        values = [row.statistics[name].value for row in self.rows]
        numbers = PlottedNumbers(f"{name.upper()}-composition", values, [math.nan] * len(values))
        names = [row.name for row in self.rows]
        axes = draw_ranking(numbers, names, title=self.model_name, noun="pair", errors=0, top=top, ax=ax)
        axes.axhline(self.expected, color="grey", linewidth=0.8, linestyle="--")
        return axes


def reading_factor(
    left: Float[Tensor, "heads width rank"], right: Float[Tensor, "heads rank width"]
) -> Float[Tensor, "heads rank width"]:
    """Return, for each head's matrix M = `left @ right`, a matrix F that has only `rank` rows. F can replace M in norms
    of products: for every matrix X, F @ X has the same Frobenius norm as M @ X.
    """
    factor: Tensor = torch.linalg.qr(left, mode="r").R @ right
    return factor


def writing_factor(
    left: Float[Tensor, "heads width rank"], right: Float[Tensor, "heads rank width"]
) -> Float[Tensor, "heads width rank"]:
    """Return, for each head's matrix M = `left @ right`, a matrix F that has only `rank` columns. F can replace M in
    norms of products: for every matrix X, X @ F has the same Frobenius norm as X @ M.
    """
    factor: Tensor = left @ torch.linalg.qr(right.mT, mode="r").R.mT
    return factor


def composition_scores(
    later: Float[Tensor, "later rank width"], written: Float[Tensor, "earlier width rank"]
) -> Float[Tensor, "later earlier"]:
    """Return the composition score of every later head with every earlier head. The score is |R W| / (|R| |W|), with
    Frobenius norms, for the `reading_factor` R of the later head and the `writing_factor` W of the earlier one.
    """
    flat = later.flatten(0, 1) @ written.movedim(0, 1).flatten(1)
    squares = flat.square().view(*later.shape[:2], written.shape[0], written.shape[2]).sum((1, 3))
    norms = later.flatten(1).norm(dim=1)[:, None] * written.flatten(1).norm(dim=1)
    scores: Tensor = squares.sqrt() / norms
    return scores


def random_sd(reading_rank: int, writing_rank: int, width: int) -> float:
    """Return the standard deviation of the composition score of two random `(width, width)` matrices of ranks
    `reading_rank` and `writing_rank`. Each matrix is the product of two factors with independent Gaussian entries.
    """
    generator = torch.Generator().manual_seed(0)

    def factors(rank: int) -> tuple[Tensor, Tensor]:
        draws = torch.randn(2, DRAWS, width, rank, generator=generator, dtype=torch.float64)
        return draws[0], draws[1].mT

    later, earlier = reading_factor(*factors(reading_rank)), writing_factor(*factors(writing_rank))
    scores = torch.cat([composition_scores(later[i : i + 1], earlier[i : i + 1]) for i in range(DRAWS)])
    return float(scores.std())
