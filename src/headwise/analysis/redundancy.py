"""`redundancy`: how alike heads are, which of them form clusters, and whether those of a cluster cover for each other.

Three measures of two heads, over the tokens of a data set that are no padding:

    cosine    the mean over tokens of the cosine of what both write into the stream: their outputs, after their slices
              of the output projection. Each head's output has a basis of its own, so that only there can they be held
              against each other; where no projection is found it is that of the outputs as they are.
    cka       linear centred kernel alignment of the outputs x and y (Kornblith et al. 2019, section 3),
              |C_xy|^2 / (|C_xx| |C_yy|), with C the cross-covariance over tokens and | | the Frobenius norm: 1 where
              one is the other turned and scaled, whatever the projection makes of it. Of few tokens, not many
              more than heads are wide, it is large whatever they give.
    distance  the mean over rows of the Jensen-Shannon distance of the weights p and q, the root of
              sum_j (p ln(p/m) + q ln(q/m)) / 2 with m = (p + q) / 2: in nats, so from 0 to sqrt(ln 2) = 0.83.

Sums are updated batch by batch (Chan, Golub and LeVeque 1983), so that no token is kept.
"""

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from itertools import combinations, combinations_with_replacement
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.analysis.ablate import ablate
from headwise.analysis.losses import Loss
from headwise.analysis.recording import require_module
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.checks import finite_number
from headwise.data.batches import (
    call_model,
    count_sequences_and_tokens,
    device_of,
    evaluation_mode,
    iterate_batches,
    to_device,
)
from headwise.data.texts import Texts
from headwise.errors import InputError, require
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, Change, Observation, Site
from headwise.intercept.output_projection import output_projection, weight_of
from headwise.intercept.sites import SiteRegistry
from headwise.runs.fingerprint import run_settings
from headwise.runs.progress import progress_bar
from headwise.runs.rows import MeanEstimate
from headwise.shapes import Bool, Float

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOKENS = 256
"""How many are compared at a time: what their heads write is in memory."""

MEASURES = ("cosine", "cka", "distance")

TINY = 1e-30
"""The shortest vector that has a direction."""

Matrix = Float[Tensor, "heads heads"]


class Cover(NamedTuple):
    """What the heads of a cluster cost, alone and together.

    Attributes:
        heads: `(layer, head)` of each.
        alone: how much more the loss is without one of them.
        together: without all of them.
    """

    heads: tuple[tuple[int, int], ...]
    alone: tuple[MeanEstimate, ...]
    together: MeanEstimate

    @property
    def ratio(self) -> float:
        """Together, over the sum of those alone: above 1 where the loss of one is caught by the others."""
        total = sum(each.value for each in self.alone)
        return self.together.value / total if total else float("nan")


@dataclass(frozen=True, eq=False)
class Redundancy:
    """How alike heads are.

    Attributes:
        heads: what each is, in the order of the model: layer, head, kv_head, module, kind.
        cosine, cka, distance: of every two of them; NaN where they were not compared. Weights are not of heads of two
            layers, nor of heads of one whose masks are so unlike that they are computed apart.
        clusters: of heads every two of which have a `cka` of the threshold or more, two heads at least, as
            `(layer, head)`.
        cover: what each of the clusters costs, if a loss was given.
        metadata: model, data, versions and settings.
    """

    heads: tuple[Mapping[str, Any], ...]
    cosine: Matrix
    cka: Matrix
    distance: Matrix
    clusters: tuple[tuple[tuple[int, int], ...], ...]
    cover: tuple[Cover, ...]
    metadata: Mapping[str, Any]

    @property
    def names(self) -> tuple[str, ...]:
        """`layer.head` of each, zero-based."""
        return tuple(f"{head['layer']}.{head['head']}" for head in self.heads)

    def table(self) -> Any:
        """A pandas DataFrame, one row for every two heads that were compared: `a`, `b` and the three measures.

        Raises:
            MissingExtra: pandas is not installed.
        """
        pandas = require("pandas", purpose="a table", extra="tables")
        names, of_pairs = self.names, {name: getattr(self, name) for name in MEASURES}
        return pandas.DataFrame(
            [
                {"a": names[a], "b": names[b], **{name: each[a, b].item() for name, each in of_pairs.items()}}
                for a, b in combinations(range(len(names)), 2)
                if not all(each[a, b].isnan() for each in of_pairs.values())
            ],
            columns=["a", "b", *MEASURES],
        )

    def plot(self, measure: str = "cka") -> "Figure":
        """A matplotlib figure: heads down and across, one measure as colour; pairs that were not compared stay blank.

        Raises:
            InputError: another measure.
            MissingExtra: matplotlib is not installed.
        """
        if measure not in MEASURES:
            raise InputError("measure", expected=f"one of {', '.join(MEASURES)}", got=repr(measure))
        matplotlib_figure = require("matplotlib.figure", purpose="drawing heads", extra="plot")
        side, layers = len(self.heads), [head["layer"] for head in self.heads]
        figure: Figure = matplotlib_figure.Figure(figsize=(2.0 + 0.06 * side, 1.4 + 0.06 * side), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(getattr(self, measure).tolist())
        first = [number for number in range(side) if not number or layers[number] != layers[number - 1]]
        axes.set_xticks(first, [str(layers[number]) for number in first])
        axes.set_yticks(first, [str(layers[number]) for number in first])
        axes.set(title=f"{measure}, {self.metadata['model']['name']}", xlabel="layer", ylabel="layer")
        axes.tick_params(labelsize=7)
        figure.colorbar(image)
        return figure


def redundancy(
    model: nn.Module,
    dataset: Texts | Iterable[Any],
    *,
    pairs: str = "layer",
    threshold: float = 0.9,
    loss: Loss | None = None,
    progress: bool = False,
) -> Redundancy:
    """Compare heads with each other over a data set: what they give, what they write, where they look.

    Clusters are of complete linkage: the two nearest are joined as long as every two heads of both have a `cka` of the
    threshold or more. The model runs in evaluation mode and without gradients, and is left as it was.

    Args:
        model: any module that `watch` can see into.
        dataset: `Texts`, or batches as the model takes them; with a loss, such as can be read twice.
        pairs: "layer", the heads of each layer with each other, or "all", any two that read the same tokens; weights
            are compared in a layer in any case. Of heads of widths d, "layer" takes 8 (sum d)^2 bytes a layer, and
            "all" half as many over the whole model: 1.2 GB for 270 heads of 64.
        threshold: the least `cka` of every two heads of a cluster.
        loss: `(model, batch) -> (batch,)`; if given, the clusters' heads are removed, alone and together.
        progress: show a bar on standard error.

    Raises:
        InputError: data that cannot be used, or read but once where a loss is given; no batch; other pairs; a model in
            which no attention is seen.
        MissingExtra: a bar, and rich is not installed.
    """
    require_module(model)
    if pairs not in ("layer", "all"):
        raise InputError("pairs", expected="'layer' or 'all'", got=repr(pairs))
    threshold = finite_number("threshold", threshold, above=0.0)
    if loss is not None and isinstance(dataset, Iterator):
        raise InputError(
            "dataset", expected="batches that can be read twice", got="an iterator", remedy="list(batches)"
        )
    texts = dataset.within(model) if isinstance(dataset, Texts) else None
    dataset = dataset if texts is None else texts
    seen, device, sequences, tokens = _Compared(model, pairs == "all"), device_of(model), 0, 0
    total = len(dataset) if isinstance(dataset, Sized) else None
    shown = progress_bar("redundancy", total, "batches", shown=progress)
    with evaluation_mode(model), torch.no_grad(), shown as advance, intercepted(model, seen):
        for batch in iterate_batches(dataset):
            call_model(model, to_device(batch, device))
            seen.ends()
            sequences, tokens = (
                a + b for a, b in zip((sequences, tokens), count_sequences_and_tokens(batch), strict=True)
            )
            advance(1, False)
    if not sequences:
        raise InputError("dataset", expected="at least one batch", got="none")
    seen.require_attention()
    heads = tuple(place for _, place in seen.head_labels())
    found = {name: seen.matrix(name) for name in MEASURES}
    keys = [(head["layer"], head["head"]) for head in heads]
    clusters = tuple(tuple(keys[each] for each in cluster) for cluster in clusters_of(found["cka"], threshold))
    cover = () if loss is None or not clusters else tuple(_cover(model, dataset, loss, clusters))
    settings = run_settings(model, texts, None, pairs=pairs, threshold=threshold)
    metadata = {**settings, "measured": {"sequences": sequences, "tokens": tokens}}
    return Redundancy(heads, **found, clusters=clusters, cover=cover, metadata=metadata)


def clusters_of(similarity: Matrix, threshold: float) -> list[list[int]]:
    """Sets of two and more of which every two are that similar: the nearest two sets are joined, by complete linkage.

    Args:
        similarity: of every two; NaN, which is not known, counts as none.
        threshold: the least in a set.
    """
    near = similarity.nan_to_num(-torch.inf).fill_diagonal_(-torch.inf)
    found = {number: [number] for number in range(len(near))}
    while len(near) and near.max() >= threshold:
        one, other = sorted(divmod(int(near.argmax()), len(near)))
        found[one] += found.pop(other)
        near[one] = near[:, one] = torch.minimum(near[one], near[other])
        near[other] = near[:, other] = near[one, one] = -torch.inf
    return sorted(sorted(cluster) for cluster in found.values() if len(cluster) > 1)


def _cover(
    model: nn.Module, dataset: Any, loss: Loss, clusters: Iterable[tuple[tuple[int, int], ...]]
) -> Iterator[Cover]:
    """What the clusters cost."""
    clusters = list(clusters)
    sets = {f"{layer}.{head}": [(layer, head)] for heads in clusters for layer, head in heads}
    sets |= {f"cluster {number}": list(heads) for number, heads in enumerate(clusters)}
    rows = ablate(model, dataset, loss, units=sets).rows
    costs = {name: row.statistics["cost"] for name, row in zip(sets, rows, strict=True)}
    for number, heads in enumerate(clusters):
        alone = tuple(costs[f"{layer}.{head}"] for layer, head in heads)
        yield Cover(heads, alone, costs[f"cluster {number}"])


# -- sums over tokens and rows ----------------------------------------------------------------------------------------


class _Given(NamedTuple):
    """What the heads of a site gave at some tokens, and the directions in which they write; 0 where they do not."""

    out: Float[Tensor, "tokens heads value_dim"]
    written: Float[Tensor, "heads tokens width"]


class _Products:
    """Products of what the heads of two sites gave, summed over tokens."""

    def __init__(self, one: _Given, other: _Given) -> None:
        self._number, self._shape = 0, (*one.out.shape[1:], *other.out.shape[1:])
        zeros = partial(torch.zeros, dtype=torch.float64, device=one.out.device)
        self._means = [zeros(each.out.shape[1:].numel()) for each in (one, other)]
        self._product = zeros(len(self._means[0]), len(self._means[1]))
        self._cosines, self._counts = zeros(2, one.out.shape[1], other.out.shape[1])

    def add(self, one: _Given, other: _Given) -> None:
        """Take in some tokens."""
        flat = [each.out.flatten(1) for each in (one, other)]
        means = [each.mean(0) for each in flat]
        here, total = len(flat[0]), self._number + len(flat[0])
        apart = [mean - before for mean, before in zip(means, self._means, strict=True)]
        self._product += (flat[0] - means[0]).mT @ (flat[1] - means[1])
        self._product += torch.outer(*apart) * (self._number * here / total)
        self._means = [before + each * (here / total) for before, each in zip(self._means, apart, strict=True)]
        self._number = total
        if one.written.shape[-1] == other.written.shape[-1]:
            self._cosines += one.written.flatten(1) @ other.written.flatten(1).mT
            wrote = [(each.written != 0).any(-1).to(each.out.dtype) for each in (one, other)]
            self._counts += wrote[0] @ wrote[1].mT

    @property
    def cosine(self) -> Float[Tensor, "heads others"]:
        """The mean over the tokens at which both write."""
        found: Tensor = self._cosines / self._counts
        return found

    @property
    def alignment(self) -> Float[Tensor, "heads others"]:
        """The squared norm of the cross-covariance of every two, up to the number of tokens."""
        found: Tensor = self._product.view(self._shape).square().sum((1, 3))
        return found


class _Shown(NamedTuple):
    """Rows of some heads."""

    heads: slice
    weights: Float[Tensor, "batch heads rows columns"]
    counts: Bool[Tensor, "batch heads rows"]


class _Distances:
    """Jensen-Shannon distances of the weights of every two heads of a site, summed over rows.

    A tile may hold some of the heads: those of the same rows are kept until all have been shown.
    """

    def __init__(self, heads: int, device: torch.device) -> None:
        self._sums, self._counts = torch.zeros(2, heads, heads, dtype=torch.float64, device=device)
        self._where: Any = None
        self._shown: list[_Shown] = []

    def add(self, rows: RowBlock) -> None:
        """Take in some rows."""
        tile = rows.tile
        where = (tile.block.rows, tuple(tile.block.spans), tile.sequences.start, tile.sequences.stop)
        if where != self._where:
            self._where, self._shown = where, []
        shown = _Shown(tile.heads, rows.weights, rows.visibility.counted_rows.expand(tile.shape))
        for number in range(shown.weights.shape[1]):
            for other in self._shown:
                self._compare(shown, number, other)
            self._compare(shown, number, _Shown(*(_from(each, number + 1) for each in shown)))
        self._shown.append(shown)

    def ends(self) -> None:
        """All rows of a call have been shown."""
        self._where, self._shown = None, []

    def _compare(self, shown: _Shown, number: int, others: _Shown) -> None:
        """One head with others."""
        p, q = shown.weights[:, number, None], others.weights
        # With p = m (1 + t) and q = m (1 - t), no two numbers that are nearly the same are subtracted.
        both = p + q
        most = 1.0 - torch.finfo(both.dtype).eps
        t = ((p - q) / both).nan_to_num_(0.0).clamp_(-most, most)
        divergence = ((1 + t) * t.log1p() + (1 - t) * t.neg().log1p()).mul_(both).sum(-1) / 4
        counts = shown.counts[:, number, None] & others.counts
        where = shown.heads.start + number, others.heads
        self._sums[where] += divergence.clamp_(min=0.0).sqrt_().masked_fill_(~counts, 0.0).double().sum((0, 2))
        self._counts[where] += counts.sum((0, 2))

    @property
    def distance(self) -> Float[Tensor, "heads heads"]:
        """The mean over rows."""
        found: Tensor = (self._sums + self._sums.mT) / (self._counts + self._counts.mT)
        return found.fill_diagonal_(0.0)


def _from(part: slice | Tensor, start: int) -> Any:
    """The heads of a part from one on."""
    return slice(part.start + start, part.stop) if isinstance(part, slice) else part[:, start:]


class _Compared(SiteRegistry):
    """A visitor that compares heads with each other: of each site, or of all that read the same tokens."""

    def __init__(self, model: nn.Module, across: bool) -> None:
        super().__init__(model)
        self._across = across
        self._distances: dict[Site, _Distances] = {}
        self._products: dict[tuple[Site, Site], _Products] = {}
        self._slices: dict[Site, Float[Tensor, "heads value_dim width"] | None] = {}
        self._given: dict[Any, list[tuple[Call, Tensor]]] = {}
        self._known: dict[int, tuple[CallContext, Tensor | None]] = {}

    def on_model_call(self) -> None:
        """See `Interceptor`."""
        self._given, self._known = {}, {}

    def observe(self, call: Call) -> Observation | None:
        """See `Interceptor`."""
        heads = self.register(call).heads
        distances = self._distances.setdefault(call.site, _Distances(heads, call.grid.device))
        real = _real(call)
        known, _ = self._known.setdefault(
            id(call.padding) if real is not None else 0, (CallContext(is_real=real), call.padding)
        )
        return Observation(distances.add, known, distances.ends)

    def change(self, call: Call) -> Change | None:
        """See `Interceptor`."""
        return lambda attended: self._keep(call, attended.out)

    def _keep(self, call: Call, out: Float[Tensor, "batch heads queries value_dim"]) -> Tensor:
        """What heads gave, until all with which it is compared have come."""
        real, of_tokens = _real(call), out.detach().transpose(1, 2)
        of_tokens = of_tokens.flatten(0, 1) if real is None else of_tokens[real]
        of_tokens = of_tokens.to(torch.promote_types(out.dtype, torch.float32))
        if self._across:
            alike = (id(call.tokens), *out.shape[::2])
            number = sum(other.site == call.site for other, _ in self._given.get(alike, ()))
            self._given.setdefault((*alike, number), []).append((call, of_tokens))
        else:
            self._compare([(call, of_tokens)])
        return out

    def ends(self) -> None:
        """All of a batch has come."""
        for given in self._given.values():
            self._compare(given)
        self._given = {}

    def _compare(self, given: list[tuple[Call, Tensor]]) -> None:
        """Compare what heads gave at the same tokens."""
        order = list(self._records)
        given = sorted(given, key=lambda each: order.index(each[0].site))
        sites = [call.site for call, _ in given]
        for some in zip(*(torch.split(out, TOKENS) for _, out in given), strict=True):
            parts = [_Given(out, self._written(call, out)) for (call, _), out in zip(given, some, strict=True)]
            for (site, one), (other_site, other) in combinations_with_replacement(zip(sites, parts, strict=True), 2):
                if (site, other_site) not in self._products:
                    self._products[site, other_site] = _Products(one, other)
                self._products[site, other_site].add(one, other)

    def _written(self, call: Call, out: Float[Tensor, "tokens heads value_dim"]) -> Float[Tensor, "heads tokens width"]:
        """The directions in which the heads of a site write."""
        heads, width = out.shape[1:]
        if call.site not in self._slices:
            found = output_projection(self._modules[""], call.site.path, heads * width)
            weight = None if found is None else weight_of(found, heads * width)
            slices = None if weight is None else weight.detach().view(-1, heads, width).permute(1, 2, 0)
            self._slices[call.site] = slices
        slices, written = self._slices[call.site], out.transpose(0, 1)
        return nn.functional.normalize(written if slices is None else written @ slices.to(out.dtype), dim=-1, eps=TINY)

    def matrix(self, measure: str) -> Float[Tensor, "heads heads"]:
        """A measure of every two heads, in the order of the model."""
        places, start = {}, 0
        for record in self.records:
            places[record.site] = slice(start, start + record.heads)
            start += record.heads
        found = torch.full((start, start), torch.nan, dtype=torch.float64)
        if measure == "distance":
            for one, distances in self._distances.items():
                found[places[one], places[one]] = distances.distance.cpu()
            return found
        own = {one: each.alignment.diagonal() for (one, other), each in self._products.items() if one == other}
        for (one, other), products in self._products.items():
            alike = products.cosine if measure == "cosine" else products.alignment
            alike = alike if measure == "cosine" else alike / (own[one][:, None] * own[other]).sqrt()
            found[places[one], places[other]] = alike.cpu()
            found[places[other], places[one]] = alike.mT.cpu()
        return found


def _real(call: Call) -> Bool[Tensor, "batch queries"] | None:
    """Which queries of a call are no padding; None where that is not known."""
    padding = call.padding
    if padding is None or padding.shape != (call.grid.batch, call.grid.queries):
        return None
    return padding.bool()
