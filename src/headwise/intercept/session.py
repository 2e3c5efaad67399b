"""State of interception where code runs: running modules of intercepted models, and how calls in them are handled."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from threading import get_ident
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode

from headwise.intercept.attention_kind import query_and_key
from headwise.intercept.followed_attention import FollowedAttention
from headwise.intercept.interceptor import Interceptor
from headwise.intercept.lineage import Lineage
from headwise.intercept.module_call import ModuleCall, report_unreadable
from headwise.intercept.origin import CallOrigins, Origin
from headwise.intercept.plans import OTHER_WAY, CallFacts, Following, ModuleStates, Step
from headwise.intercept.unreadable_tensors import why_not_read


@runtime_checkable
class Interception(Protocol):
    """Context in which the attention calls of one model are reported to one interceptor. A context that is active may
    be entered again.
    """

    interceptor: Interceptor
    states: ModuleStates
    has_statements: bool

    def __enter__(self) -> object:
        """Install the hooks and patches, unless they are installed already."""

    def __exit__(self, *_: object) -> None:
        """Remove the hooks and patches, unless another user of this context needs them."""


class _Paused:
    """Context that pauses interception in a session. While it is open, the torch function mode that intercepts torch's
    functions is off, unless another mode was entered after that mode.
    """

    __slots__ = ("_before", "_mode", "_session")

    def __init__(self, session: "Session") -> None:
        self._session = session

    def __enter__(self) -> None:
        session = self._session
        self._before, session.is_paused = session.is_paused, True
        self._mode = session.torch_mode
        if self._mode is None or _get_current_function_mode() is not self._mode:  # type: ignore[no-untyped-call]
            self._mode = None
        else:
            _pop_mode()  # type: ignore[no-untyped-call]

    def __exit__(self, *_: object) -> None:
        self._session.is_paused = self._before
        if self._mode is not None and self._session.torch_mode is self._mode:
            _push_mode(self._mode)  # type: ignore[no-untyped-call]


class Session:
    """State of interception in one context of execution: the running module calls of intercepted models, what was
    derived from the functions that they called, and flags that pause or restrict interception. A call of a model has a
    session of its own (`for_model_call`). `current_session` returns the one that applies.

    Attributes:
        interceptions: the open interceptions of all threads, outermost first; shared by all sessions.
        module_calls: the running calls, outermost first.
        torch_mode: mode that intercepts torch's functions; None while no intercepted module runs.
        is_paused: True while an attention call is being answered, so that calls made for that are not intercepted.
        lineage: sources of the tensors that the running modules computed.
        torch_attention_heads: number of heads inside `F.multi_head_attention_forward`, where torch turns modes off;
            None elsewhere.
        torch_attention_origins: sources of the queries, keys and values there.
        attention: scores, weights and outputs of attention, from their computation to their use.
        appended_keys: number of keys without a token that it appends to its keys.
        only_interceptor: the one interceptor that calls are reported to; None for all.
        following: the plan that the running call of a model follows, without `torch_mode`; None while calls are traced.
        recomputed: while activation checkpointing repeats part of a forward pass, the interceptions of that forward
            pass, which are then the only ones; otherwise None.
    """

    interceptions: ClassVar[tuple[Interception, ...]] = ()
    _running: ClassVar[set["Session"]] = set()

    def __init__(self, before: "Session | None" = None) -> None:
        self.module_calls: list[ModuleCall] = []
        self.torch_mode: TorchFunctionMode | None = None
        self.is_paused: bool = False if before is None else before.is_paused
        self.lineage = Lineage(None if before is None else before.lineage)
        self.torch_attention_heads: int | None = None
        self.torch_attention_origins: CallOrigins | None = None
        self.attention = FollowedAttention()
        self.appended_keys = 0
        self.only_interceptor: Interceptor | None = None if before is None else before.only_interceptor
        self.following: Following | None = None
        self.recomputed: tuple[Interception, ...] | None = None if before is None else before.recomputed
        self._before, self._thread = before, get_ident()

    def for_model_call(self, mode: TorchFunctionMode) -> "Session":
        """Make a new session current, that of a model call which starts now, and return it. It has the flags of this
        session, which is current again when the call has ended. `mode` is the mode that intercepts torch's functions.
        """
        session = Session(self)
        _CURRENT.set(session)
        session._enter(mode)
        return session

    def snapshot(self) -> "Session":
        """Return a session with copies of the present module calls, to which the present interceptions apply whenever
        it is current, also if they have ended.
        """
        session = Session()
        session.recomputed, session.only_interceptor = self.current_interceptions, self.only_interceptor
        session.torch_mode = self.torch_mode
        session.module_calls = [replace(call, call_counts=Counter(call.call_counts)) for call in self.module_calls]
        return session

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Return a context in which a copy of this session, a snapshot, is current."""
        session = self.snapshot()
        before = _CURRENT.set(session)
        try:
            if self.torch_mode is not None:
                session._enter(type(self.torch_mode)())
            yield
        finally:
            session.end_module_calls()
            _CURRENT.reset(before)

    def _enter(self, mode: TorchFunctionMode) -> None:
        """Enter the mode that intercepts torch's functions while module calls run."""
        self.torch_mode = mode
        mode.__enter__()  # type: ignore[no-untyped-call]
        Session._running.add(self)

    @property
    def intercepts(self) -> bool:
        """True if attention calls are to be intercepted: a module of an intercepted model runs, and
        interception is not paused.
        """
        return bool(self.module_calls) and not self.is_paused

    def reports_unreadable(self, tensor: Tensor) -> bool:
        """Return True if a tensor of an attention call cannot be read. In this case, also report the running modules to
        the interceptors as unreadable.
        """
        reason = why_not_read(tensor)
        if reason is not None:
            report_unreadable(self.module_calls, reason)
        return reason is not None

    def step(self, function: str, q: Tensor, k: Tensor, v: Tensor) -> Step | None:
        """Return the attention call that happens now in the innermost running module, to be recorded for a plan, or as
        the plan states it that is followed. Return None if the plan states no such call; the interceptors are then
        notified that the module's attention is not read.

        Args:
            function: name of the function that computes the attention.
            q: queries `(batch, heads, queries, head_dim)`.
            k: keys `(batch, kv_heads, keys, head_dim)`.
            v: values `(batch, kv_heads, keys, value_dim)`.
        """
        facts, path, following = CallFacts.of(function, q, k, v), self.module_calls[-1].path, self.following
        planned = None if following is None else following.next_call(path, facts, (q, k, v))
        if self.following is None:  # also if the plan was left just now
            recording = self.module_calls[0].recording
            return Step(None if recording is None else recording.on_attention(path, facts, (q, k, v)), None)
        self.following.attended.append(self.module_calls[:])
        if planned is None:
            self.report_contradiction()
            return None
        return Step(None, planned)

    def report_contradiction(self) -> None:
        """Report to the interceptors that the modules which attended in the running call of the model are not read,
        since the call has contradicted the plan that it follows.
        """
        attended = [] if self.following is None else self.following.attended
        for module_calls in attended:
            report_unreadable(module_calls, OTHER_WAY)
        attended.clear()

    def origins_of(self, q: Tensor, k: Tensor, v: Tensor) -> CallOrigins | None:
        """Return the origins (tensors on which they depend) of the queries, keys and values of an attention call.
        Return None while a plan is followed, which states what would be derived from them.
        """
        if self.following is not None:
            return None
        if self.torch_attention_origins is not None:
            return self.torch_attention_origins
        of_q, of_k, of_v = (self.lineage.origin(tensor, self.module_calls) for tensor in (q, k, v))
        return CallOrigins(of_q, of_k, of_v, self.lineage.tokens.compared(q, k, v))

    def origin_of_scores(self, scores: Tensor) -> Origin:
        """Return the origin of attention scores: the tensors on which they depend. Its factors are the origins of the
        queries and the keys.
        """
        if self.torch_attention_origins is not None:
            return self.torch_attention_origins.q  # not used: `origins_of_product` returns all three
        return self.lineage.origin(scores, self.module_calls)

    def origins_of_product(self, scores: Origin, values: Tensor) -> CallOrigins:
        """Return the origins of the queries, keys and values of a call in which weights are multiplied with `values`.
        `scores` is the origin of the scores from which the weights were computed.
        """
        if self.torch_attention_origins is not None:
            return self.torch_attention_origins
        v = self.lineage.origin(values, self.module_calls)
        return CallOrigins(*query_and_key(scores, v, self.lineage), v)

    @property
    def current_interceptions(self) -> tuple[Interception, ...]:
        """Interceptions (contexts that intercept a model) that apply, outermost first. While activation
        checkpointing repeats a forward pass, they are those that applied in this forward pass; otherwise all open ones.
        """
        return self.interceptions if self.recomputed is None else self.recomputed

    @property
    def is_recomputing(self) -> bool:
        """True in a backward pass. Module calls there repeat module calls of a forward pass, by activation
        checkpointing.
        """
        return self.recomputed is not None or torch._C._current_graph_task_id() != -1

    def end_module_calls(self, interceptor: Interceptor | None = None) -> None:
        """Remove the module calls of `interceptor` (by default, of all interceptors), without reporting that they
        ended. If no other module call runs, the session has ended: turn off its mode, and make the session before it
        current.
        """
        kept = [call for call in self.module_calls if interceptor is not None and call.interceptor is not interceptor]
        self.module_calls[:] = kept
        if kept:
            return
        self.following = None
        if self.torch_mode is not None:
            Session._running.discard(self)
            self.lineage.restart()
            self.attention = FollowedAttention()  # an exception may have left some
            # A module call that was left by another thread's end of the context can have left the mode below others.
            if _get_current_function_mode() is self.torch_mode:  # type: ignore[no-untyped-call]
                self.torch_mode.__exit__(None, None, None)
            self.torch_mode = None
        if self._before is not None:
            self._before.lineage = self.lineage
            if _CURRENT.get() is self:
                _CURRENT.set(self._before)

    @staticmethod
    def end_calls_of(interceptor: Interceptor) -> None:
        """Remove the module calls of `interceptor`, whose context ends, from all sessions of this thread: torch calls
        no hook after what is not an Exception, such as KeyboardInterrupt.
        """
        for session in list(Session._running):
            if session._thread == get_ident():
                session.end_module_calls(interceptor)

    def paused(self) -> "_Paused":
        """Return a context in which attention calls are not intercepted."""
        return _Paused(self)

    @contextmanager
    def torch_attention(self, heads: int, origins: CallOrigins, appended_keys: int) -> Iterator[None]:
        """Return a context for the code inside torch's `F.multi_head_attention_forward`. It stores the number of heads,
        the `origins` of the queries, keys and values, and the number of keys that the function appends and that belong
        to no token.
        """
        self.torch_attention_heads, self.torch_attention_origins = heads, origins
        self.appended_keys = appended_keys
        try:
            yield
        finally:
            self.torch_attention_heads = self.torch_attention_origins = None
            self.appended_keys = 0

    @contextmanager
    def exclusive_to(self, interceptor: Interceptor) -> Iterator[None]:
        """Return a context in which attention calls are reported to `interceptor` alone, although other interceptors
        may be active.
        """
        before, self.only_interceptor = self.only_interceptor, interceptor
        try:
            yield
        finally:
            self.only_interceptor = before


_CURRENT: ContextVar[Session | None] = ContextVar("session of headwise", default=None)
"""Session of the running code. A new thread has none. A task of asyncio has that of the code which created the task; it
shares no model call that starts later, since each call of a model has a session of its own.
"""


def current_session() -> Session:
    """Return the session of the running code. A thread that runs in a copy of another thread's context gets its own."""
    session = _CURRENT.get()
    if session is None or session._thread != get_ident():
        session = Session()
        _CURRENT.set(session)
    return session
