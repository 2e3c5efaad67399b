"""Reading of attention weights of chosen query rows while a model runs over sequences without padding."""

from functools import partial

from torch import nn

from headwise.analysis.viewer import require_agreement
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.errors import InputError
from headwise.intercept.interceptor import NO_EFFECT, Call, Observation, SiteKey
from headwise.intercept.sites import SiteRegistry


class WeightReader(SiteRegistry):
    """Base class of interceptors that read attention weights over sequences of the same length, block by block. Each
    attention module must attend once, from all tokens of these sequences to all, or the model is refused by name.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._shape = (0, 0, 0)
        self._read: set[SiteKey] = set()
        self._context = CallContext()

    def begin(self, batch: int, length: int) -> None:
        """Expect a run of the model over `batch` sequences of `length` tokens, none of which is padding."""
        self._shape, self._context = (batch, length, length), CallContext()
        self._read.clear()

    def observe(self, call: Call) -> Observation:
        """Return an observation that passes the row blocks of an attention call to `read`, and compares the observed
        weights times the values with the outputs of the heads.
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
        if call.site in self._read:
            raise InputError("model", expected="modules that attend once in a run", got=f"several calls of {path}")
        self._read.add(call.site)
        return Observation(partial(self.read, call.site), self._context, lambda: None, partial(require_agreement, path))

    def read(self, site: SiteKey, block: RowBlock) -> None:
        """Read some query rows of some heads of a site. The tensors of the block are overwritten later. Subclasses
        override this method; here it does nothing.
        """
