"""State of interception where code runs: running modules of intercepted models, and how calls in them are handled."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import get_ident, local
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode

from headwise.attention.masks.grid import Grid
from headwise.intercept.interceptor import Interceptor, SiteKey
from headwise.intercept.module_call import ModuleCall, innermost_calls, must_trace, report_unreadable
from headwise.intercept.plans import OTHER_WAY, CallFacts, Following, ModuleStates, Step
from headwise.intercept.site import Site
from headwise.intercept.trace.lineage import UNKNOWN_KIND, CallOrigins, is_cross_attention, may_be_cached
from headwise.intercept.trace.modules import RunningModule
from headwise.intercept.trace.state import CURRENT, FollowedAttention, Trace
from headwise.intercept.unreadable_tensors import why_not_read


@runtime_checkable
class Interception(Protocol):
    """Context in which the attention calls of one model are reported to one interceptor, an object that observes or
    changes attention. An active context may be entered again.
    """

    interceptor: Interceptor
    states: ModuleStates
    has_statements: bool

    def __enter__(self) -> object:
        """Install the hooks and patches, unless they are installed already."""

    def __exit__(self, *_: object) -> None:
        """Remove the hooks and patches, unless another user of this context needs them."""


class _Paused:
    """Context in which attention calls are not intercepted. While it is open, the torch function mode that intercepts
    torch's functions is off. If another mode was entered after it, it stays on, but lets all calls pass.
    """

    __slots__ = ("_before", "_mode", "_session")

    def __init__(self, session: "Session") -> None:
        self._session = session

    def __enter__(self) -> None:
        session = self._session
        self._before, session.is_paused = session.is_paused, True
        self._mode = None if self._before else session.torch_mode
        if self._mode is None or _get_current_function_mode() is not self._mode:  # type: ignore[no-untyped-call]
            self._mode = None
        else:
            _pop_mode()  # type: ignore[no-untyped-call]

    def __exit__(self, *_: object) -> None:
        self._session.is_paused = self._before
        if self._mode is not None and self._session.torch_mode is self._mode:
            _push_mode(self._mode)  # type: ignore[no-untyped-call]


class Session(Trace):
    """State of interception in the running code: the running module calls of intercepted models, the facts derived from
    the torch functions that they called, and flags that pause or restrict interception. Each call of a model has its
    own session (`for_model_call`). `current_session` returns the one that applies.

    Attributes:
        interceptions: the open interceptions of all threads, outermost first; shared by all sessions.
        module_calls: the running calls, outermost first.
        torch_mode: mode that intercepts torch's functions; None while no intercepted module runs.
        is_paused: True while an attention call is being answered, so that calls made for that are not intercepted.
        only_interceptor: the one interceptor that calls are reported to; None for all.
        following: the plan that the running call of a model follows, without `torch_mode`; None while calls are traced.
        attended: running module calls at each attention call so far of a call that follows a plan.
        recomputed: while activation checkpointing repeats part of a forward pass, the interceptions of that forward
            pass, which are then the only ones; otherwise None.
    """

    interceptions: ClassVar[tuple[Interception, ...]] = ()

    def __init__(self, before: "Session | None" = None) -> None:
        super().__init__(before)
        self.module_calls: list[ModuleCall] = []
        self.torch_mode: TorchFunctionMode | None = None
        self.is_paused: bool = False if before is None else before.is_paused
        self.only_interceptor: Interceptor | None = None if before is None else before.only_interceptor
        self.following: Following | None = None
        self.attended: list[list[ModuleCall]] = []
        self.recomputed: tuple[Interception, ...] | None = None if before is None else before.recomputed
        self._before = before

    def for_model_call(self, mode: TorchFunctionMode) -> "Session":
        """Begin a session (state of interception) for a call of a model that starts now, and return it as the current
        one. It has the flags of this session, which is current again when the call has ended. `mode` is the torch
        function mode that intercepts torch's functions.
        """
        session = Session(self)
        CURRENT.set(session)
        session._enter(mode)
        return session

    def snapshot(self) -> "Session":
        """Return a session with copies of the running module calls, for a backward pass that repeats a part of the
        model. While the returned session is current, the interceptions that apply now apply again, even if their
        contexts have ended.
        """
        session = Session()
        session.recomputed, session.only_interceptor = self.current_interceptions, self.only_interceptor
        session.torch_mode = self.torch_mode
        session.module_calls = [replace(call, call_counts=Counter(call.call_counts)) for call in self.module_calls]
        return session

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Return a context in which a copy of this session is current, for a part of the model that a backward pass
        repeats.
        """
        session = self.snapshot()
        before = CURRENT.set(session)
        try:
            if self.torch_mode is not None:
                session._enter(type(self.torch_mode)())
            yield
        finally:
            session.end_module_calls()
            CURRENT.reset(before)

    def _enter(self, mode: TorchFunctionMode) -> None:
        """Enter `mode`, the torch function mode that intercepts torch's functions while module calls run."""
        self.torch_mode = mode
        mode.__enter__()  # type: ignore[no-untyped-call]
        RUNNING.sessions.add(self)

    @property
    def intercepts(self) -> bool:
        """True if attention is intercepted now: a module of an intercepted model is running, and interception is not
        paused.
        """
        return bool(self.module_calls) and not self.is_paused

    def reports_unreadable(self, tensor: Tensor) -> bool:
        """Return True if `tensor`, which an attention call uses, cannot be read. In this case, also report to the
        interceptors that the attention of the running modules cannot be read.
        """
        reason = why_not_read(tensor)
        if reason is not None:
            report_unreadable(self.module_calls, reason)
        return reason is not None

    def step(self, function: str, q: Tensor, k: Tensor, v: Tensor) -> Step | None:
        """Return a description of the attention call that happens now in the innermost running module. If the model's
        call follows a plan (stored facts about its attention), include the facts in the plan. If the plan contains no
        such attention call, notify the interceptors that the module's attention is not read, and return None.

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
        self.attended.append(self.module_calls[:])
        if planned is None:
            self.report_contradiction()
            return None
        return Step(None, planned)

    def report_contradiction(self) -> None:
        """Report to the interceptors that attention is not read in the modules that attended in the running call of the
        model. The reason is that this call has contradicted its plan (facts about the attention of an earlier call).
        """
        for module_calls in self.attended:
            report_unreadable(module_calls, OTHER_WAY)
        self.attended.clear()

    def origins_of(self, q: Tensor, k: Tensor, v: Tensor) -> CallOrigins | None:
        """Return the origins of the queries, keys and values of an attention call: the tensors on which they depend.
        Return None while the model's call follows a plan, which already contains what the origins would show.
        """
        if self.following is not None:
            return None
        if self.torch_attention_origins is not None:
            return self.torch_attention_origins
        of_q, of_k, of_v = (self.lineage.origin(tensor, self.module_calls) for tensor in (q, k, v))
        return CallOrigins(of_q, of_k, of_v, self.lineage.tokens.compared(q, k, v))

    @property
    def current_interceptions(self) -> tuple[Interception, ...]:
        """Interceptions that apply now, outermost first. While activation checkpointing repeats a forward pass, these
        are the interceptions that applied in the original forward pass; otherwise all open ones.
        """
        return self.interceptions if self.recomputed is None else self.recomputed

    @property
    def is_recomputing(self) -> bool:
        """True in a backward pass. Module calls in a backward pass are repetitions of those of a forward pass, by
        activation checkpointing.
        """
        return self.recomputed is not None or torch._C._current_graph_task_id() != -1

    def end_module_calls(self, interceptor: Interceptor | None = None) -> None:
        """Remove the running module calls of `interceptor` (by default, of all interceptors) without reporting that
        they ended. If no other module call is running, end the session: turn off its torch function mode, and make the
        previous session current.
        """
        kept = [call for call in self.module_calls if interceptor is not None and call.interceptor is not interceptor]
        self.module_calls[:] = kept
        if kept:
            return
        self.following = None
        if self.torch_mode is not None:
            RUNNING.sessions.discard(self)
            self.lineage.restart()
            self.attention = FollowedAttention()  # an exception may have left some
            # A module call that was left by another thread's end of the context can have left the mode below others.
            if _get_current_function_mode() is self.torch_mode:  # type: ignore[no-untyped-call]
                self.torch_mode.__exit__(None, None, None)
            self.torch_mode = None
        if self._before is not None:
            self._before.lineage = self.lineage
            if CURRENT.get() is self:
                CURRENT.set(self._before)

    @staticmethod
    def end_calls_of(interceptor: Interceptor) -> None:
        """Remove the module calls of `interceptor`, whose context ends, from all sessions of this thread. Such calls
        are left after an exception that is no instance of `Exception`, such as `KeyboardInterrupt`: torch then calls no
        hook.
        """
        for session in list(RUNNING.sessions):
            session.end_module_calls(interceptor)

    def on_attention_found(self, module_calls: Sequence[RunningModule], origins: CallOrigins) -> tuple[bool, bool]:
        """Number the layer of an attention call if its module computes several layers itself. Layers are numbered in
        the order in which they attend. Return two values: True if an interceptor observes attention weights, and True
        if an interceptor may change the output.
        """
        own = _own(module_calls)
        for innermost in innermost_calls(own):
            innermost.parts.index(self._is_cross(innermost, origins) is not False, origins)
        interceptors = {id(call.interceptor): call.interceptor for call in own}.values()
        classes = [type(each) for each in interceptors if self.only_interceptor in (None, each)]
        is_observed = any(each.observe is not Interceptor.observe for each in classes)
        return is_observed, any(each.change is not Interceptor.change for each in classes)

    def report_unreadable(self, module_calls: Sequence[RunningModule], reason: str) -> None:
        report_unreadable(_own(module_calls), reason)

    def report_projected(
        self, module_calls: Sequence[RunningModule], number: int | None, weights: Sequence[Tensor]
    ) -> None:
        own = _own(module_calls)
        if number is not None and own[0].recording is not None:
            own[0].recording.on_projected(number, weights)
        for innermost in innermost_calls(own):
            innermost.interceptor.on_projected(innermost.path, weights)

    def on_replaced(self, tensor: Tensor, other: Tensor) -> None:
        if self.module_calls and self.module_calls[0].recording is not None:
            self.module_calls[0].recording.on_replaced(tensor, other)

    def stated_sites(self, module_calls: Sequence[RunningModule]) -> list[Site]:
        return [each.stated for each in innermost_calls(_own(module_calls)) if each.stated is not None]

    def site_of_call(self, module_call: ModuleCall, grid: Grid, origins: CallOrigins | None) -> SiteKey:
        """Return the site of an attention call: the path of its module, the kind (self- or cross-attention), and the
        number of the layer in the module. If the kind is unknown (neither derived nor stated by the user), the call
        counts as cross-attention, and the interceptor is notified.

        Raises:
            InputError: the user stated another kind or number of heads.
        """
        if module_call.stated is not None:
            module_call.stated.require_heads(grid.heads)
        is_cross = self._is_cross(module_call, origins)
        if is_cross is None and not self.is_recomputing:
            must_trace(self.module_calls)
            module_call.interceptor.on_left_out(module_call.path, UNKNOWN_KIND)
        cross = is_cross is not False
        return SiteKey(module_call.path, cross, module_call.parts.index(cross, origins))

    def _is_cross(self, module_call: ModuleCall, origins: CallOrigins | None) -> bool | None:
        """Return True for cross-attention, False for self-attention, and None if the kind is unknown. The kind is
        derived from the tensors on which queries and keys depend, or stated by the user.
        """
        is_cross = None if origins is None else is_cross_attention(origins, self.lineage)
        if is_cross is None and origins is not None and may_be_cached(origins, self.lineage):
            is_cross = False if module_call.parts.was_self_attention(origins) else None
        if is_cross is False and origins is not None and origins.k is not None:
            module_call.parts.add_self_attention(origins.k.maps)
        return is_cross if module_call.stated is None else module_call.stated.resolved_cross(is_cross)

    def paused(self) -> "_Paused":
        """Return a context in which attention calls are not intercepted."""
        return _Paused(self)

    @contextmanager
    def torch_attention(self, heads: int, origins: CallOrigins, appended_keys: int) -> Iterator[None]:
        """Return a context for the code inside torch's `F.multi_head_attention_forward`. It stores the number of heads,
        the `origins` of the queries, keys and values (tensors on which they depend), and the number of keys that the
        function appends and that belong to no token.
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


class _RunningSessions(local):
    """For each thread, the sessions (states of interception) in which module calls run. An exception may end a task
    while module calls of its session still count as running; the session then stays in this list.
    """

    def __init__(self) -> None:
        self.sessions: set[Session] = set()


RUNNING = _RunningSessions()


def current_session() -> Session:
    """Return the session (state of interception) of the running code. Each thread has a session of its own, also if it
    runs in a copy of another thread's context.
    """
    session = CURRENT.get()
    if not isinstance(session, Session) or session.thread != get_ident():
        session = Session()
        CURRENT.set(session)
    return session


def _own(module_calls: Sequence[RunningModule]) -> list[ModuleCall]:
    """Return running module calls as a list of `ModuleCall` objects, the only kind that a session contains."""
    return [each for each in module_calls if isinstance(each, ModuleCall)]
