"""The interceptor of `watch`: it adds the statistics of every attention call to the heads' results."""

import threading
from collections.abc import Collection

import torch
from torch import Tensor, nn

from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.intercept.heads import Heads
from headwise.intercept.interceptor import NO_EFFECT, Call, Interceptor, Observation
from headwise.intercept.output_projection import gram_of, output_projection
from headwise.shapes import Float
from headwise.statistics.tally import Tally
from headwise.statistics.weight_capture import CapturedWeights, WeightCapture


class _ThreadContexts(threading.local):
    """Call contexts (tokens and padding of attention calls) created in this thread during the current model call, for
    reuse by all layers with the same inputs.

    Attributes:
        by_inputs: call context and its two input tensors, by the identities of token ids and padding. The tensors are
            stored so that their identities stay theirs.
    """

    def __init__(self) -> None:
        self.by_inputs: dict[tuple[int, int], tuple[CallContext, object]] = {}


class StatisticsObserver(Interceptor):
    """Interceptor that computes the statistics of every attention call of a model and adds them to `heads`, the result
    of `watch`. If `capture`, a choice of attention weights, is not None, it also stores these weights of the last call
    at each site (attention module, self or cross).

    Args:
        model: the intercepted model.
        heads: results to add to.
        special: ids of special tokens.
        capture: weights to keep of each site's last call; None for none.
    """

    def __init__(self, model: nn.Module, heads: Heads, special: Collection[int], capture: WeightCapture | None) -> None:
        self._model, self._heads, self._capture = model, heads, capture
        self._special = torch.tensor(sorted(special), dtype=torch.int64)
        self._projections: dict[str, nn.Module | None] = {}
        self._contexts, self._lock = _ThreadContexts(), threading.Lock()

    def on_model_call(self) -> None:
        """Discard the cached call contexts (tokens and padding) of the previous call of the model in this thread."""
        self._contexts.by_inputs = {}

    def on_module_call(self, path: str) -> None:
        """Record in the result of `watch` that the module at `path` ran."""
        self._heads.on_module_call(path)

    def on_unreadable(self, path: str, reason: str) -> None:
        """Record in the result of `watch` that the module at `path` computed something like attention, but that it is
        not in the result, for `reason`.
        """
        self._heads.on_unreadable(path, reason)

    def on_left_out(self, path: str, reason: str) -> None:
        """Record in the result of `watch` that some statistics of the module at `path` are left out, for `reason`."""
        self._heads.on_left_out(path, reason)

    def observe(self, call: Call) -> Observation:
        """Return the functions that observe `call`, with the call's tokens and padding. One function adds up statistics
        of the attention weights during the call and, if a capture was requested, copies the chosen weights. The other
        adds the statistics to the result of `watch` at the end of the call, and stores the copied weights there.
        """
        if call.is_recomputation:
            return NO_EFFECT
        record, tally = self._heads.register(call), Tally(self._gram(call))
        captured = None if self._capture is None else CapturedWeights(self._capture, call.grid)

        def observer(row_block: RowBlock) -> None:
            tally.add(row_block)
            if captured is not None:
                captured.add(row_block)

        def on_end() -> None:
            with self._lock:
                record.add(tally)
                if captured is not None:
                    self._heads.set_captured(call.site, captured)

        return Observation(observer, self._call_context(call), on_end)

    def _gram(self, call: Call) -> Float[Tensor, "heads value_dim value_dim"] | None:
        """Return `W_h^T W_h` for each head's slice `W_h` of the output projection of the module that `call` runs in.
        Return None if that projection is not found, or if the call's value_dim is unknown. It is not found for further
        layers that one module computes.
        """
        heads, value_dim, path = call.grid.heads, call.value_dim, call.site.path
        if value_dim is None or call.site.part:
            return None
        if path not in self._projections:
            self._projections[path] = output_projection(self._model, path, heads * value_dim)
        projection = self._projections[path]
        return None if projection is None else gram_of(projection, heads, value_dim)

    def _call_context(self, call: Call) -> CallContext:
        """Return the token ids, special tokens and padding of a call as a `CallContext`: the same object for all layers
        with the same inputs, so that data derived from it are computed once. Token ids and padding are None if unknown.

        Both are unknown for cross-attention, and for attention over other lengths than the model's input.
        """
        grid, shape = call.grid, (call.grid.batch, call.grid.keys)
        is_over_input = not call.site.cross and grid.queries == grid.keys
        tokens, padding = (
            tensor if is_over_input and tensor is not None and tensor.shape == shape else None
            for tensor in (call.tokens, call.padding)
        )
        by_inputs, key = self._contexts.by_inputs, (id(tokens), id(padding))
        if key not in by_inputs:
            is_special = None
            if tokens is not None and len(self._special):
                is_special = torch.isin(tokens, self._special.to(tokens.device))
            is_real = None if padding is None or bool(padding.all()) else padding.bool()
            by_inputs[key] = CallContext(tokens, is_special, is_real), (tokens, padding)
        return by_inputs[key][0]
