"""Interceptor that compares heads with each other while a model runs."""

import math
from collections.abc import Callable
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.redundancy.few_tokens import chance_reason
from headwise.analysis.redundancy.output_products import OutputProducts, TokenOutputs
from headwise.analysis.redundancy.weight_distance import WeightDistances
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.intercept.call_contexts import CallContexts
from headwise.intercept.interceptor import Call, Change, HeadOutput, Observation, SiteKey
from headwise.intercept.output_projection import output_projection
from headwise.intercept.sites import SiteRegistry
from headwise.intercept.streams import PADDED_QUERIES_UNKNOWN
from headwise.shapes import Bool, Float

TOKENS_AT_ONCE = 256
"""Number of tokens whose written vectors are in memory at a time."""

PADDING_IS_COMPARED = (
    "a mask shows padding, but it could not be established which queries of these modules are padding, so that their "
    "heads may be compared at padding, too"
)
"""Reason for modules whose padded queries are unknown."""

SMALLEST_NORM = 1e-30
"""Norm below which a vector is treated as 0, without a direction."""


class HeadComparison(SiteRegistry):
    """Interceptor that measures the similarity of every two heads while a model runs: of their attention weights within
    a layer, and of their outputs within a layer or, with `across_layers`, in the whole model.

    Outputs of different layers are compared if the layers attend from the same tokens.

    Args:
        model: the model that is intercepted.
        across_layers: compare the outputs of heads of different sites too.

    Attributes:
        nonfinite_modules: paths of the modules in which a head output was NaN or infinite, as keys.
    """

    def __init__(self, model: nn.Module, across_layers: bool) -> None:
        super().__init__(model)
        self.nonfinite_modules: dict[str, None] = {}
        self._across_layers = across_layers
        self._weight_distances: dict[SiteKey, WeightDistances] = {}
        self._products: dict[tuple[SiteKey, SiteKey], OutputProducts] = {}
        self._rounding: dict[SiteKey, float] = {}
        self._projection_slices: dict[SiteKey, Float[Tensor, "heads value_dim width"] | None] = {}
        self._pending_outputs: dict[Any, list[tuple[Call, Tensor]]] = {}
        self._contexts = CallContexts(on_left_out=self._name_unknown_padding)
        self._latest: tuple[Call | None, CallContext] = None, CallContext()

    def on_model_call(self) -> None:
        """At the start of a model call, release the data of the previous model call: head outputs that wait for
        comparison, and call contexts (cached padding and visible keys).
        """
        self._pending_outputs = {}
        self._contexts.on_model_call()

    def observe(self, call: Call) -> Observation | None:
        """Register the site (a module's self- or cross-attention) of an attention call. Return the observation that
        adds the call's attention weights to the running distances between the heads of that site.
        """
        heads = self.register(call).heads
        distances = self._weight_distances.setdefault(call.site, WeightDistances(heads, call.grid.device))
        return Observation(distances.add, self._call_context(call), distances.finish_call)

    def change(self, call: Call) -> Change | None:
        """Return a function that leaves the head outputs of an attention call unchanged. It compares the outputs of the
        heads with each other or, if heads are compared across layers, stores them for `finish_batch`.
        """
        is_real = self._call_context(call).real_queries

        def compare_and_return(attended: HeadOutput) -> Tensor:
            self._compare_or_keep(call, attended.out, is_real)
            return attended.out

        return compare_and_return

    def _call_context(self, call: Call) -> CallContext:
        """Return the padding of an attention call, which is read once."""
        if self._latest[0] is not call:
            self._latest = call, self._contexts.read(call).context
        return self._latest[1]

    def _name_unknown_padding(self, path: str, reason: str) -> None:
        """Record that the padded queries of a module are unknown. Other statistics that may be left out are not needed
        for comparisons.
        """
        if reason == PADDED_QUERIES_UNKNOWN:
            self.on_left_out(path, PADDING_IS_COMPARED)

    def _compare_or_keep(
        self,
        call: Call,
        out: Float[Tensor, "batch heads queries value_dim"],
        is_real: Bool[Tensor, "batch queries"] | None,
    ) -> None:
        """Compare the outputs of the heads of one attention call with each other, at tokens that are not padding, where
        `is_real` is True. If heads are compared across layers, only store the outputs, which `finish_batch` compares.
        """
        of_tokens = out.detach().transpose(1, 2)
        of_tokens = of_tokens.flatten(0, 1) if is_real is None else of_tokens[is_real]
        of_tokens = of_tokens.to(torch.promote_types(out.dtype, torch.float32))
        self._rounding[call.site] = max(self._rounding.get(call.site, 0.0), _squared_rounding(out, call.grid.keys))
        if not bool(of_tokens.isfinite().all()):
            self.nonfinite_modules.setdefault(call.site.path)
        if not self._across_layers:
            self._compare([(call, of_tokens)])
            return
        # A module that attends to the same tokens several times is compared call by call.
        index, same_tokens = 0, (id(call.tokens), *out.shape[::2])
        while any(other.site == call.site for other, _ in self._pending_outputs.get((*same_tokens, index), ())):
            index += 1
        self._pending_outputs.setdefault((*same_tokens, index), []).append((call, of_tokens))

    def finish_batch(self) -> None:
        """Compare, across layers, the head outputs that were stored from attention calls over the same tokens during
        the last model call, and release them.
        """
        for outputs in self._pending_outputs.values():
            self._compare(outputs)
        self._pending_outputs = {}

    def _compare(self, outputs: list[tuple[Call, Tensor]]) -> None:
        """Update the running similarities between the heads of every two attention calls in `outputs`, and between the
        heads within each call. `outputs` pairs each call with its head outputs `(tokens, heads, value_dim)`; the tokens
        are the same for all calls.
        """
        order = list(self._records)
        outputs = sorted(outputs, key=lambda call_and_out: order.index(call_and_out[0].site))
        calls = [call for call, _ in outputs]
        for parts in zip(*(torch.split(out, TOKENS_AT_ONCE) for _, out in outputs), strict=True):
            of_sites = [
                (call.site, TokenOutputs(part, self._written_directions(call, part)))
                for call, part in zip(calls, parts, strict=True)
            ]
            for (site, first), (other_site, second) in combinations_with_replacement(of_sites, 2):
                if (site, other_site) not in self._products:
                    self._products[site, other_site] = OutputProducts(first, second)
                self._products[site, other_site].add(first, second)

    def _written_directions(
        self, call: Call, out: Float[Tensor, "tokens heads value_dim"]
    ) -> Float[Tensor, "heads tokens width"]:
        """Return, for each head and token, the unit vector in the direction of what the head writes into the residual
        stream: its output times its slice of the output projection, or its output itself if no projection is found. A
        vector of zeros stays 0.
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

    def cosine(self) -> Float[Tensor, "heads heads"]:
        """Return a matrix over all heads: the cosine between the vectors that two heads write into the residual stream,
        averaged over the tokens at which both write. It is NaN for pairs of heads that were not compared.
        """
        return self._fill(lambda site, other: self._products[site, other].mean_cosine)

    def cka(self) -> Float[Tensor, "heads heads"]:
        """Return a matrix over all heads: the debiased linear centred kernel alignment of the outputs of two heads,
        over tokens. It is NaN for pairs of heads that were not compared, and for heads whose outputs do not vary by
        more than rounding.
        """
        own = {}
        for site in self._records:
            if (site, site) in self._products:
                products = self._products[site, site]
                dependence = products.dependence.diagonal()
                has_variation = products.varies(self._rounding[site]) & (dependence > 0)
                own[site] = dependence.masked_fill(~has_variation, torch.nan)
        return self._fill(
            lambda site, other: self._products[site, other].dependence / (own[site][:, None] * own[other]).sqrt()
        )

    def name_few_tokens(self, threshold: float) -> None:
        """Record the modules whose outputs were compared over so few tokens that unrelated heads may have a `cka` of
        `threshold` by chance.
        """
        pairs = 0
        for (site, other), products in self._products.items():
            pairs += products.dependence.numel() if site != other else math.comb(len(products.dependence), 2)
        for (site, other), products in self._products.items():
            if site == other and (reason := chance_reason(products.tokens, pairs, threshold)) is not None:
                self.on_left_out(site.path, reason)

    def distance(self) -> Float[Tensor, "heads heads"]:
        """Return a matrix over all heads: the Jensen-Shannon distance between the attention weights of two heads,
        averaged over query rows. It is NaN for two heads of different attention sites, where a site is a module's self-
        or cross-attention.
        """
        matrix, columns = self._empty_matrix()
        for site, distances in self._weight_distances.items():
            matrix[columns[site], columns[site]] = distances.mean.cpu()
        return matrix

    def _fill(self, of_sites: Callable[[SiteKey, SiteKey], Tensor]) -> Float[Tensor, "heads heads"]:
        """Return a symmetric matrix over all heads of the model. For every two attention sites (a site is a module's
        self- or cross-attention) whose heads were compared, it contains the block `of_sites(site, other)`; elsewhere it
        is NaN.

        A block has a row for each head of the first attention site and a column for each of the second.
        """
        matrix, columns = self._empty_matrix()
        for site, other in self._products:
            part = of_sites(site, other)
            matrix[columns[site], columns[other]] = part.cpu()
            matrix[columns[other], columns[site]] = part.mT.cpu()
        return matrix

    def _empty_matrix(self) -> tuple[Float[Tensor, "heads heads"], dict[SiteKey, slice]]:
        """Return a square matrix of NaN with a row and a column for each head in the order of the model. Return also,
        for each attention site (a module's self- or cross-attention), the range of rows (and of columns) of the site's
        heads.
        """
        columns, start = {}, 0
        for record in self.records:
            columns[record.site] = slice(start, start + record.heads)
            start += record.heads
        return torch.full((start, start), torch.nan, dtype=torch.float64), columns


def _squared_rounding(out: Tensor, keys: int) -> float:
    """Return the square of the relative difference of two head outputs that counts as rounding, if both are the mean of
    the same value vector by other attention weights.

    Values, weights and outputs are rounded to the dtype of the outputs. Sums over keys are rounded at each key, in
    float32 or better. The roundings are independent, so their squares add up (Higham and Mary 2019).
    """
    eps = torch.finfo(out.dtype).eps
    eps_of_sums = torch.finfo(torch.promote_types(out.dtype, torch.float32)).eps
    return eps**2 + keys * eps_of_sums**2
