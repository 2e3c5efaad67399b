"""Interceptor that compares heads with each other while a model runs."""

import math
from dataclasses import dataclass, field
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.redundancy.similarity import OutputProducts, WeightDistances, chance_of
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.intercept.call_contexts import CallContexts
from headwise.intercept.interceptor import Call, Change, HeadOutput, Observation, SiteKey
from headwise.intercept.sites import SiteRegistry
from headwise.intercept.streams import PADDED_QUERIES_UNKNOWN
from headwise.intercept.trace.projection import output_projection
from headwise.runs.checkpoint import storable
from headwise.runs.data_pass import SiteProgress
from headwise.shapes import Float

MEASURES = ("cosine", "cka", "distance")
"""Measures of similarity, which `Redundancy` defines."""

TOKENS_AT_ONCE = 256
"""Number of tokens whose written vectors are in memory at a time."""

PADDING_IS_COMPARED = (
    "a mask shows padding, but it could not be established which queries of these modules are padding, so that their "
    "heads may be compared at padding, too"
)
"""Reason for modules whose padded queries are unknown."""

SMALLEST_NORM = 1e-30
"""Norm below which a vector is treated as 0, without a direction."""

LEAST_TOKENS = 4
"""Number of tokens from which on there is an unbiased estimate of dependence."""

LARGEST_EXPECTATION = 0.05
"""Largest expected number of pairs of unrelated heads at the threshold that is not named."""


@storable
@dataclass
class ComparisonProgress(SiteProgress):
    """Partial results of one process that compares heads. For each pair of attention modules, `products` are running
    sums that compare the outputs of their heads. For each module, `distances` are running means of the distances
    between the attention weights of its heads. For each module, `rounding` is the squared relative difference up to
    which outputs of one head at two tokens count as equal.
    """

    products: dict[tuple[SiteKey, SiteKey], OutputProducts] = field(default_factory=dict)
    distances: dict[SiteKey, WeightDistances] = field(default_factory=dict)
    rounding: dict[SiteKey, float] = field(default_factory=dict)


class HeadComparison(SiteRegistry):
    """Interceptor that measures the similarity of every two heads while a model runs. Attention weights are compared
    between heads of the same layer. Head outputs are compared between heads of the same layer or, with `across_layers`,
    between all heads of the model.

    Outputs of different layers are compared if the layers attend from the same tokens.

    Attributes:
        progress: running sums over all runs of the model.
        nonfinite_modules: paths of the modules in which a head output was NaN or infinite, as keys.
    """

    def __init__(self, model: nn.Module, across_layers: bool) -> None:
        super().__init__(model)
        self.progress = ComparisonProgress()
        self.nonfinite_modules: dict[str, None] = {}
        self._across_layers = across_layers
        self._order = {path: index for index, path in enumerate(self._modules)}
        self._projection_slices: dict[SiteKey, Float[Tensor, "heads value_dim width"] | None] = {}
        self._pending_outputs: dict[Any, list[tuple[Call, Tensor]]] = {}
        self._contexts = CallContexts(on_left_out=self._name_unknown_padding)
        self._latest: tuple[Call | None, CallContext] = None, CallContext()

    def on_model_call(self) -> None:
        """Delete the head outputs that are stored from the previous call of the model."""
        self._pending_outputs = {}
        self._contexts.on_model_call()

    def observe(self, call: Call) -> Observation | None:
        """Return an `Observation`, which receives the attention weights of a call. It compares the weights of every two
        heads, and adds their distances to the running sums.
        """
        heads = self.register(call).heads
        distances = self.progress.distances.setdefault(call.site, WeightDistances(heads, call.grid.device))
        return Observation(distances.add, self._call_context(call), distances.finish_call)

    def change(self, call: Call) -> Change | None:
        """Return a function that receives the head outputs of an attention call and returns them unchanged. It compares
        the outputs of the heads with each other. If heads are compared across layers, it stores the outputs for
        `finish_batch` instead.
        """
        is_real = self._call_context(call).real_queries

        def compare_or_store(attended: HeadOutput) -> Tensor:
            out = attended.out
            of_tokens = out.detach().transpose(1, 2)
            of_tokens = of_tokens.flatten(0, 1) if is_real is None else of_tokens[is_real]
            of_tokens = of_tokens.to(torch.promote_types(out.dtype, torch.float32))
            self.progress.rounding[call.site] = max(
                self.progress.rounding.get(call.site, 0.0), _squared_rounding(out, call.grid.keys)
            )
            if not bool(of_tokens.isfinite().all()):
                self.nonfinite_modules.setdefault(call.site.path)
            if not self._across_layers:
                self._compare([(call, of_tokens)])
                return out
            # A module that attends to the same tokens several times is compared call by call.
            index, same_tokens = 0, (id(call.tokens.ids), *out.shape[::2])
            while any(other.site == call.site for other, _ in self._pending_outputs.get((*same_tokens, index), ())):
                index += 1
            self._pending_outputs.setdefault((*same_tokens, index), []).append((call, of_tokens))
            return out

        return compare_or_store

    def _call_context(self, call: Call) -> CallContext:
        """Return a `CallContext`, which has the tokens, padding and positions of an attention call. The result for the
        latest call is cached.
        """
        if self._latest[0] is not call:
            self._latest = call, self._contexts.read(call).context
        return self._latest[1]

    def _name_unknown_padding(self, path: str, reason: str) -> None:
        """Record a warning for the module at `path` if `reason` states that the padding among its queries is unknown.
        Ignore other reasons, since they do not affect comparisons of heads.
        """
        if reason == PADDED_QUERIES_UNKNOWN:
            self.on_left_out(path, PADDING_IS_COMPARED)

    def finish_batch(self) -> None:
        """Compare the head outputs that were stored during the last call of the model, within each layer and between
        layers. Then delete the stored outputs.
        """
        for outputs in self._pending_outputs.values():
            self._compare(outputs)
        self._pending_outputs = {}

    def add(self, progress: ComparisonProgress) -> None:
        """Add the running sums in `progress`, which are from an interrupted run or another process, to the sums of this
        object.
        """
        self.merge(progress.records)
        self.progress.records = self.records
        own: Any
        for own, theirs in (
            (self.progress.products, progress.products),
            (self.progress.distances, progress.distances),
        ):
            for key, sums in theirs.items():
                if key in own:
                    own[key].merge(sums)
                else:
                    own[key] = sums
        for site, rounding in progress.rounding.items():
            self.progress.rounding[site] = max(self.progress.rounding.get(site, 0.0), rounding)

    def _compare(self, outputs: list[tuple[Call, Tensor]]) -> None:
        """Compare the heads of every two attention calls in `outputs`, including the heads within each call, and add
        the results to the running sums. `outputs` are pairs of a call and its head outputs `(tokens, heads,
        value_dim)`, for the same tokens in all calls.
        """
        outputs = sorted(outputs, key=lambda output: (self._order[output[0].site.path], *output[0].site[1:]))
        for parts in zip(*(torch.split(out, TOKENS_AT_ONCE) for _, out in outputs), strict=True):
            of_sites = [
                (call.site, part, self._written_directions(call, part))
                for (call, _), part in zip(outputs, parts, strict=True)
            ]
            for (site, *first), (other, *second) in combinations_with_replacement(of_sites, 2):
                outs, directions = zip(first, second, strict=True)
                if (site, other) not in self.progress.products:
                    self.progress.products[site, other] = OutputProducts(outs)
                self.progress.products[site, other].add(outs, directions)

    def _written_directions(
        self, call: Call, out: Float[Tensor, "tokens heads value_dim"]
    ) -> Float[Tensor, "heads tokens width"]:
        """Return what each head writes into the residual stream at each token, as unit vectors. A head writes its
        output multiplied by its slice of the output projection. If the projection is unknown, the head output itself is
        used. Vectors of zeros remain 0.
        """
        heads, value_dim = out.shape[1:]
        if call.site not in self._projection_slices:
            projection = output_projection(self._modules, call.site.path, heads * value_dim)
            weight = None if projection is None else projection.map.weight.detach()
            slices = None if weight is None else weight.reshape(-1, heads, value_dim).permute(1, 2, 0)
            self._projection_slices[call.site] = slices
        slices, written = self._projection_slices[call.site], out.transpose(0, 1)
        written = written if slices is None else written @ slices.to(out.dtype)
        return nn.functional.normalize(written, dim=-1, eps=SMALLEST_NORM)

    def name_few_tokens(self, threshold: float) -> None:
        """Record a warning for each module whose head outputs were compared over too few tokens. In this case the
        similarity `cka` (centred kernel alignment) is undefined, or may be `threshold` or more by chance for unrelated
        heads.
        """
        heads, pairs = {site: record.heads for site, record in self._records.items()}, 0
        for site, other in self.progress.products:
            pairs += heads[site] * heads[other] if site != other else math.comb(heads[site], 2)
        for (site, other), products in self.progress.products.items():
            if site != other:
                continue
            if products.tokens < LEAST_TOKENS:
                means = f"fewer than {LEAST_TOKENS} tokens, so cka is NaN for these modules"
            elif pairs * chance_of(threshold, products.tokens) > LARGEST_EXPECTATION:
                means = (
                    f"only {products.tokens} tokens, so that some of {pairs} pairs of unrelated heads may have a cka "
                    f"of {threshold:g} or more by chance, and cka and clusters mean nothing for these modules"
                )
            else:
                continue
            self.on_left_out(site.path, f"outputs of heads were compared over {means}")

    def similarity(self) -> dict[str, Float[Tensor, "heads heads"]]:
        """Return one symmetric matrix of heads by heads for each measure of similarity: "cosine", "cka" and "distance".
        Pairs that were not compared are NaN. `cka` is also NaN for a head with the same output at all tokens, up to
        rounding.
        """
        columns, total = {}, 0
        for record in self.records:
            columns[record.site] = slice(total, total + record.heads)
            total += record.heads
        matrices = {name: torch.full((total, total), torch.nan, dtype=torch.float64) for name in MEASURES}
        own = {}
        for (site, other), products in self.progress.products.items():
            if site == other:
                dependence = products.dependence.diagonal()
                has_variation = products.varies(self.progress.rounding[site]) & (dependence > 0)
                own[site] = dependence.masked_fill(~has_variation, torch.nan)
        for (site, other), products in self.progress.products.items():
            cka = products.dependence / (own[site][:, None] * own[other]).sqrt()
            for name, block in (("cosine", products.mean_cosine), ("cka", cka)):
                matrices[name][columns[site], columns[other]] = block.cpu()
                matrices[name][columns[other], columns[site]] = block.mT.cpu()
        for site, distances in self.progress.distances.items():
            matrices["distance"][columns[site], columns[site]] = distances.mean.cpu()
        return matrices


def _squared_rounding(out: Tensor, keys: int) -> float:
    """Return the square of a bound on the relative rounding error of head outputs `out`, which are sums over `keys`
    keys. If all keys have the same value vector, head outputs are equal up to this error, whatever the attention
    weights.

    Values, weights and outputs are rounded to the dtype of the outputs. Sums over keys are rounded at each key, in
    float32 or better. The roundings are independent, so their squares add up (Higham and Mary 2019).
    """
    eps = torch.finfo(out.dtype).eps
    eps_of_sums = torch.finfo(torch.promote_types(out.dtype, torch.float32)).eps
    return eps**2 + keys * eps_of_sums**2
