"""Reading of attention weights of chosen query rows while a model runs over sequences without padding."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.viewer import require_agreement
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.data.batches import call_model, device_of, with_cache_disabled
from headwise.errors import InputError
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import NO_EFFECT, Call, Observation, SiteKey
from headwise.intercept.sites import SiteRegistry
from headwise.shapes import Int


def batch_of_ids(model: nn.Module, ids: Int[Tensor, "batch length"]) -> dict[str, Any]:
    """Return token ids as a dictionary of a model's arguments, on the device of the model: `input_ids`, and an
    attention mask of ones, as the sequences have no padding.
    """
    ids = ids.to(device_of(model))
    return with_cache_disabled(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})


class WeightReader(SiteRegistry):
    """Base class of interceptors that read the attention weights of a model, one block of query rows at a time, for
    sequences of equal length. Each attention module must run self-attention over all tokens exactly once; otherwise an
    `InputError` is raised that names the module.

    Attributes:
        found: for each site, what `read` stored in the last run.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.found: dict[SiteKey, Tensor] = {}
        self._shape = (0, 0, 0)
        self._context = CallContext()

    def run(self, ids: Int[Tensor, "batch length"]) -> Any:
        """Run the model on sequences of token ids without padding, pass the attention weights of every module to
        `read`, and return the model's output.
        """
        model = self._modules[""]
        self._shape = len(ids), ids.shape[1], ids.shape[1]
        self._context, self.found = CallContext(), {}
        with intercepted(model, self):
            output = call_model(model, batch_of_ids(model, ids))
        self.require_attention()
        if missing := [record.site.label for record in self.records if record.site not in self.found]:
            raise InputError("model", expected="attention in the same modules in each run", got=f"none in {missing[0]}")
        return output

    def observe(self, call: Call) -> Observation:
        """Return an `Observation` that passes each block of attention weights of a call to `read`. It also checks the
        weights: multiplied by the values, they must reproduce the outputs that the model computes.
        """
        if call.is_recomputation:
            return NO_EFFECT
        self.register(call)
        grid, path = call.grid, call.site.label
        if call.site.cross or (grid.batch, grid.queries, grid.keys) != self._shape:
            batch, length, _ = self._shape
            kind = "cross-attention of " if call.site.cross else ""
            raise InputError(
                "model",
                expected=f"self-attention over {batch} x {length} tokens",
                got=f"{kind}{grid.batch} x {grid.queries} queries and {grid.keys} keys in {path}",
            )
        if call.site in self.found:
            raise InputError("model", expected="modules that attend once in a run", got=f"several calls of {path}")
        self.found[call.site] = self.start(call)
        return Observation(partial(self.read, call.site), self._context, lambda: None, partial(require_agreement, path))

    def start(self, call: Call) -> Tensor:
        """Return the tensor in which `read` stores the results for one attention module. Subclasses override this
        method.
        """
        raise NotImplementedError

    def read(self, site: SiteKey, block: RowBlock) -> None:
        """Receive the attention weights of a block of query rows, for some heads of one attention module, and store
        results. Subclasses override this method. They must copy the weights that they keep, as the tensors of the block
        are overwritten later.
        """
        raise NotImplementedError


def require_finite_weights(site: SiteKey, weights: Tensor) -> None:
    """Raise `InputError`, with the name of the attention module, if attention weights are NaN or infinite. The weights
    may be unnormalised.
    """
    if not bool(weights.isfinite().all()):
        raise InputError("model", expected="finite attention weights", got=f"NaN or infinity in {site.label}")
