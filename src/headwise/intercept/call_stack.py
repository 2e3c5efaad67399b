"""State of interception in each thread: running modules of intercepted models, and how calls in them are handled."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.overrides import TorchFunctionMode

from headwise.intercept.interceptor import Interceptor
from headwise.intercept.lineage import CallOrigins, Lineage, Origin
from headwise.intercept.module_call import ModuleCall
from headwise.intercept.pending_softmax import PendingSoftmax


class CallStack(threading.local):
    """State of interception in one thread: the running module calls of intercepted models, softmax results that the
    model has not multiplied with the values yet, and flags that pause or restrict interception.

    Attributes:
        module_calls: the running calls, outermost first.
        pending_softmaxes: softmaxes in attention modules whose product with the values has not come yet.
        torch_mode: mode that intercepts torch's functions in this thread; None while no intercepted module runs.
        is_paused: True while an attention call is being answered, so that calls made for that are not intercepted.
        lineage: sources of the tensors that the running modules computed.
        in_torch_attention: True inside `F.multi_head_attention_forward`, where torch turns modes off.
        torch_attention_origins: sources of the queries, keys and values there.
        only_interceptor: the one interceptor that calls are reported to; None for all.
    """

    def __init__(self) -> None:
        self.module_calls: list[ModuleCall] = []
        self.pending_softmaxes: list[PendingSoftmax] = []
        self.torch_mode: TorchFunctionMode | None = None
        self.is_paused = False
        self.lineage = Lineage()
        self.in_torch_attention = False
        self.torch_attention_origins: CallOrigins | None = None
        self.only_interceptor: Interceptor | None = None

    @property
    def intercepts(self) -> bool:
        """True if attention calls in this thread are to be intercepted: a module of an intercepted model runs, and
        interception is not paused.
        """
        return bool(self.module_calls) and not self.is_paused

    def origins_of(self, q: Tensor, k: Tensor, v: Tensor) -> CallOrigins:
        """Return the sources of the queries, keys and values of an attention call."""
        if self.in_torch_attention and self.torch_attention_origins is not None:
            return self.torch_attention_origins
        return CallOrigins(*(self.lineage.origin(tensor, self.module_calls) for tensor in (q, k, v)))

    def origin_of_scores(self, scores: Tensor) -> Origin:
        """Return the origin of attention scores, whose factors are the queries and the keys."""
        if self.in_torch_attention and self.torch_attention_origins is not None:
            return self.torch_attention_origins.q  # not used: `origins_of_product` returns all three
        return self.lineage.origin(scores, self.module_calls)

    def origins_of_product(self, scores: Origin, values: Tensor) -> CallOrigins:
        """Return the sources of queries, keys and values of a call whose scores have the origin `scores`."""
        if self.in_torch_attention and self.torch_attention_origins is not None:
            return self.torch_attention_origins
        q, k = scores.factors or (scores, None)
        return CallOrigins(q, k, self.lineage.origin(values, self.module_calls))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the interception of attention calls in this thread within the context."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    @contextmanager
    def torch_attention(self, origins: CallOrigins) -> Iterator[None]:
        """Mark the code within the context as running inside `F.multi_head_attention_forward`: `in_torch_attention` is
        True there, and False afterwards. `origins` are the sources of the queries, keys and values there.
        """
        self.in_torch_attention, self.torch_attention_origins = True, origins
        try:
            yield
        finally:
            self.in_torch_attention = False

    @contextmanager
    def exclusive_to(self, interceptor: Interceptor) -> Iterator[None]:
        """Report attention calls of this thread within the context to `interceptor` only, although other interceptors
        may also be active.
        """
        before, self.only_interceptor = self.only_interceptor, interceptor
        try:
            yield
        finally:
            self.only_interceptor = before


call_stack = CallStack()
"""State of interception; each thread has its own."""
