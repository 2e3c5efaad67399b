"""Mean output of each head over the tokens of a data set."""

from collections.abc import Collection

import torch
from torch import Tensor

from headwise.analysis.recording import OutputReader
from headwise.errors import InputError
from headwise.intercept.call_contexts import CallContexts
from headwise.intercept.interceptor import Call, Change, SiteKey
from headwise.shapes import Bool, Float


class MeanOutputs(OutputReader):
    """Interceptor that averages the output of each head over all tokens of a data set that are not padding. If a module
    attends several times in a run of the model, each of these calls has means of its own.

    The sums are in float64.
    """

    def __init__(self, modules: Collection[str] | None = None) -> None:
        super().__init__(modules)
        self._sums: dict[tuple[SiteKey, int], tuple[Float[Tensor, "heads value_dim"], float]] = {}
        self._contexts = CallContexts()
        self._real_queries: dict[int, Bool[Tensor, "batch queries"] | None] = {}

    def on_model_call(self) -> None:
        """Discard the padding of the previous call of the model."""
        self._contexts.on_model_call()
        self._real_queries = {}

    def change(self, call: Call) -> Change | None:
        """Return the function that reads the head outputs of an attention call, as the base class does. Read the
        padding of all calls, since that of cross-attention follows from the self-attention before it.
        """
        if not call.is_recomputation:
            self._real_queries[id(call)] = self._contexts.read(call).context.real_queries
        return super().change(call)

    def read(self, call: Call, out: Float[Tensor, "batch heads queries value_dim"]) -> None:
        """Add the head outputs of one attention call, summed over tokens that are not padding, to running sums. Calls
        are added to the same sums if they are of the same site (a module's self- or cross-attention) and have the same
        number within a run of the model.
        """
        batch, _, queries, _ = out.shape
        out, tokens = out.detach(), float(batch * queries)
        is_real = self._real_queries.pop(id(call))
        if is_real is not None:
            out, tokens = out.masked_fill(~is_real[:, None, :, None], 0.0), float(is_real.sum())
        total, key = out.sum((0, 2), dtype=torch.float64), (call.site, call.index)
        earlier_total, earlier_tokens = self._sums.get(key, (torch.zeros_like(total), 0.0))
        self._sums[key] = earlier_total + total, earlier_tokens + tokens

    def mean_of_call(self, site: SiteKey, index: int) -> Float[Tensor, "heads value_dim"]:
        """Return the mean output of each head in one attention call, over all tokens of the data set that are not
        padding. The call is number `index`, from 0, of those that `site` (a module's self- or cross-attention) makes in
        a run of the model.

        Raises:
            InputError: the site made fewer calls on the data set.
        """
        if (site, index) not in self._sums:
            expected = f"batches in which {site.path} attends {index + 1} times"
            raise InputError("dataset", expected=expected, got="none")
        total, tokens = self._sums[site, index]
        return total / max(tokens, 1.0)
