"""Reading of the attention weights of the layers of a model in their order, as for products over layers."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.data.batches import call_model
from headwise.errors import InputError
from headwise.intercept.call_contexts import CallContexts
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, Observation
from headwise.intercept.observed_call import ObservedCall
from headwise.intercept.sites import SiteRegistry
from headwise.intercept.trace.refusals import NEVER_CHANGED, NOT_LINEAR, NOT_OVER_KEYS
from headwise.shapes import Float

IGNORED = frozenset((NOT_OVER_KEYS, NOT_LINEAR, NEVER_CHANGED))
"""Reasons that do not concern the attention weights of a layer."""

LARGEST_LOSS = 1e-3
"""Largest difference of the sum of shares from 1 that counts as rounding in float32."""


class LayerReader(SiteRegistry):
    """Base class of interceptors that read the attention weights of each layer during one run of a model. Subclasses
    multiply the attention matrices of successive layers, for example. Batches may have padding. Every layer must run
    self-attention over all tokens exactly once; otherwise an `InputError` is raised that names the module.

    Attributes:
        sizes: numbers of sequences and tokens of the first layer; None before it.
    """

    def __init__(self, model: nn.Module, special: Collection[int] = ()) -> None:
        super().__init__(model)
        self.model = model
        self._contexts = CallContexts(special)
        self.sizes: tuple[int, int] | None = None

    def on_model_call(self) -> None:
        self._contexts.on_model_call()

    def observe(self, call: Call) -> Observation | None:
        """Return an `Observation`, which receives the attention weights, for the next layer's attention call. Raise
        `InputError` unless the call is self-attention over as many sequences and tokens as the calls of earlier layers.
        Also raise it for a second call of the same module.
        """
        grid, path = call.grid, call.site.label
        if call.is_recomputation:
            raise InputError("model", expected="a run without gradients", got=f"a repeated call of {path}")
        if call.site in self._records:
            raise InputError("model", expected="modules that attend once in a run", got=f"several calls of {path}")
        if call.site.cross:
            raise InputError("model", expected="self-attention in every layer", got=f"cross-attention in {path}")
        batch, length = self.sizes or (grid.batch, grid.queries)
        if (grid.batch, grid.queries, grid.keys) != (batch, length, length):
            raise InputError(
                "model",
                expected=f"self-attention over {batch} x {length} tokens in every layer",
                got=f"{grid.batch} x {grid.queries} queries and {grid.keys} keys in {path}",
            )
        self.sizes = batch, length
        number = len(self._records)
        self.register(call)
        observed = self._contexts.read(call)
        if observed.lacks_positions or observed.lacks_rows or observed.continues:
            expected = "calls whose tokens and padding can be established"
            raise InputError("model", expected=expected, got=f"another call of {path}")
        return self.read_layer(number, call, observed)

    def read_layer(self, number: int, call: Call, observed: ObservedCall) -> Observation | None:
        """Return an `Observation`, which receives the attention weights, for layer `number`. Layers are numbered from 0
        in the order in which they run. Return None if the weights of this layer are not needed. Subclasses override
        this method.
        """
        return None

    def run(self, batch: dict[str, Any]) -> None:
        """Run the model on a batch. Raise `InputError` unless each layer has one attention module whose attention was
        observed, and the layers ran in the order of their numbers.
        """
        with intercepted(self.model, self):
            call_model(self.model, batch)
        self.require_attention()
        for reason, paths in self._paths_by_reason().items():
            if reason not in IGNORED:
                got = f"{', '.join(sorted(paths))} ({reason})"
                raise InputError("model", expected="attention that can be read in every layer", got=got)
        numbers = [record.layer for record in self._records.values()]
        known = [number for number in numbers if number is not None]
        if len(known) < len(numbers):
            return  # the order of the run is all that is known
        paths_of = {number: [r.site.label for r in self._records.values() if r.layer == number] for number in known}
        if several := [number for number, paths in paths_of.items() if len(paths) > 1]:
            got = f"{' and '.join(paths_of[several[0]])} in layer {several[0]}"
            raise InputError("model", expected="one attention module in each layer", got=got)
        if missing := sorted(set(range(max(known) + 1)) - set(known)):
            got = f"none in layer {', '.join(map(str, missing))}"
            raise InputError("model", expected="attention in every layer", got=got)
        if known != sorted(known):
            order = ", ".join(map(str, known))
            raise InputError("model", expected="layers that run in their order", got=f"the order {order}")


def require_whole(sums: Float[Tensor, "*queries"], path: str, eps: float) -> None:
    """Raise `InputError` unless all `sums` are 1 up to rounding. Each is the sum over input tokens of a query's shares
    in the rollout (attention multiplied over layers). It is below 1 if a learned sink receives attention, or if an
    attended token attends to nothing itself. `eps` is the machine epsilon of the model's dtype.
    """
    loss = (sums - 1).abs()
    if bool((loss > max(LARGEST_LOSS, 4 * eps)).any()):  # NaN is reported elsewhere
        got = f"a sum that differs by {float(loss.max()):.2g} in {path}"
        raise InputError("model", expected="attention weights with the sum 1", got=got)


def eps_of(row_block: RowBlock) -> float:
    """Return the machine epsilon of an attention call. It is the epsilon of the dtype of the value vectors or, if the
    values are unknown, of the dtype of the attention weights.
    """
    return torch.finfo(row_block.powers.dtype if row_block.values is None else row_block.values.dtype).eps
