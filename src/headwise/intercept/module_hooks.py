"""Hooks on the modules of an intercepted model, which keep the running calls of each session."""

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.hooks import RemovableHandle

from headwise.intercept import eager_softmax
from headwise.intercept.interceptor import Interceptor
from headwise.intercept.module_call import ModuleCall, must_trace
from headwise.intercept.plans import Following, PlanKey, Recording, Steps
from headwise.intercept.session import current_session
from headwise.intercept.site import Site
from headwise.intercept.torch_patches import TorchCalls, trace_from_log
from headwise.intercept.trace import outputs
from headwise.intercept.trace.functions import tensors_among
from headwise.intercept.trace.lineage import SiteParts
from headwise.intercept.trace.unread import report_new
from headwise.intercept.uncopied_hooks import UncopiedHooks
from headwise.nn.linear_engine import FOLLOWING


class ModuleHooks(UncopiedHooks):
    """Forward hooks of one module of an intercepted model. When a call of the module starts, they append it to the
    session's list of running module calls; when it ends, they remove it.
    """

    def __init__(
        self,
        interceptor: Interceptor,
        path: str,
        module: nn.Module,
        stated: Site | None,
        context: str,
    ) -> None:
        self._context = context
        self._interceptor, self._path, self._module = interceptor, path, module
        self._stated, self._parts = stated, SiteParts()
        self._argument_names = _names_of(module)

    @property
    def context(self) -> str:
        """Name of the context that intercepts the module, such as "hw.watch", for error messages."""
        return self._context

    def register(self) -> Iterator[RemovableHandle]:
        """Register a forward pre-hook that runs before the module's other hooks, and a forward hook that runs after
        them. Yield, for each of the two, the handle that removes it.
        """
        yield self._module.register_forward_pre_hook(self.on_start, prepend=True, with_kwargs=True)
        yield self._module.register_forward_hook(self.on_end, always_call=True)

    def on_start(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Forward pre-hook: add this call of `module` to the session's running module calls, and report its start to
        the interceptor. If no other module of the same model is running, first report that a call of the model starts.
        Report nothing if activation checkpointing repeats the call. If arguments contain attention outputs that
        interceptors change, return the changed arguments; otherwise return None.
        """
        session = current_session()
        following = session.following
        if following is not None and self._path in following.skipped and not self._interceptor.needs_end_of(self._path):
            return None
        interceptors = [interception.interceptor for interception in session.current_interceptions]
        if self.is_copy or self._interceptor not in interceptors:
            return None
        changed: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        if session.attention.may_change:
            with session.paused():
                changed = outputs.with_changes((args, kwargs))
        args, kwargs = changed or (args, kwargs)
        is_outermost = all(call.interceptor is not self._interceptor for call in session.module_calls)
        names = self._argument_names
        if len(args) > len(names):
            names = (*names, *map(str, range(len(names), len(args))))
        arguments = dict(zip(names, args, strict=False)) | kwargs
        _push(ModuleCall(self._interceptor, self._path, module, arguments, self._stated, self._parts), interceptors)
        if session.is_recomputing:
            return changed
        if is_outermost:
            self._interceptor.on_model_call()
        self._interceptor.on_module_call(self._path)
        return changed

    def on_end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Forward hook: remove the module call from the session's running module calls. Return the module's `output`
        with the interceptors' changes, or None if they do not change it. Do nothing if `on_start` never added the call,
        because another hook failed first.
        """
        session = current_session()
        innermost = session.module_calls[-1] if session.module_calls and not self.is_copy else None
        if innermost is not None and innermost.module is module and innermost.interceptor is self._interceptor:
            if session.following is None:
                if innermost.projected:
                    report_new(innermost, tensors_among((output,)))
                session.lineage.record_module(innermost.arguments.values(), output, session.module_calls)
            if not session.is_recomputing:
                with session.paused():
                    self._interceptor.on_module_end(self._path, innermost.arguments, output)
            return _pop(output)
        return None


FOLLOWING.add(ModuleHooks)

_NAMES: WeakKeyDictionary[Any, tuple[str, ...]] = WeakKeyDictionary()
"""Names of the arguments of the methods `forward` of classes, each read once, as reading a signature is slow."""


def _names_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments that a module's method `forward` accepts by position."""
    if "forward" in vars(module):
        return _argument_names(module.forward)
    function = type(module).forward
    if function not in _NAMES:
        _NAMES[function] = _argument_names(module.forward)
    return _NAMES[function]


def _argument_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the arguments that a function accepts by position. Return no names if the function has no
    signature, as some functions written in C.
    """
    try:
        parameters = inspect.signature(forward).parameters.values()
    except ValueError:
        return ()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind in positional)


def has_foreign_hooks(module: nn.Module) -> bool:
    """Return True if a module has forward hooks or forward pre-hooks that headwise's interception did not register.
    Such a hook may read or change the module's output.
    """
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return any(not isinstance(getattr(hook, "__self__", None), ModuleHooks) for hook in hooks)


def _push(module_call: ModuleCall, interceptors: list[Interceptor]) -> None:
    """Add a module call that starts now to the running module calls of the current session. If none is running, begin a
    session, and decide whether the model's call follows a plan (facts about its attention stored by an earlier call).
    `interceptors` are those that apply now.
    """
    session = current_session()
    for interceptor in {call.interceptor for call in session.module_calls}.difference(interceptors):
        session.end_module_calls(interceptor)  # its context was closed by another thread during the call
    if not session.module_calls:
        session = current_session()  # the one before, if the calls have ended just now
        key, given = _key_of(module_call), list(module_call.arguments.values())
        states, plans = session.current_interceptions[0].states, [] if key is None else key.plans()
        session = session.for_model_call(TorchCalls())
        if key is not None and plans:
            session.following = Following(key, states, plans, given, trace_from_log)
        else:
            module_call.recording = (
                None if key is None else Recording(key, states, Steps(given, with_sizes=key.cached > 0))
            )
            session.lineage.restart(given)
    session.module_calls.append(module_call)
    recording, following = session.module_calls[0].recording, session.following
    if following is not None:
        following.on_module(module_call.path)
    elif recording is not None:
        recording.on_module(module_call.path)


def _is_in_compiled_code() -> bool:
    """Return True if a function that `torch.compile` has compiled is running in this thread."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    frame = None if compiler is None else sys._getframe()
    while frame is not None and compiler is not None:
        if frame.f_code.co_filename == compiler.__file__:
            return True
        frame = frame.f_back
    return False


def _key_of(module_call: ModuleCall) -> PlanKey | None:
    """Return the key of the plans (stored facts about a model's attention) for a call of the model that starts now.
    Return None if no plan is possible: several models are intercepted, the user has stated facts about the model's
    attention, activation checkpointing repeats the call, or a function compiled by `torch.compile` makes the call.
    """
    session = current_session()
    interceptions = session.current_interceptions
    if (
        session.is_recomputing
        or _is_in_compiled_code()
        or any(each.states.model is not interceptions[0].states.model or each.has_statements for each in interceptions)
    ):
        return None
    changes = [type(each.interceptor).change is not Interceptor.change for each in interceptions]
    state = interceptions[0].states.read(), any(changes), module_call.path
    may_grow = interceptions[0].states.may_grow
    return PlanKey.of(module_call.module, state, module_call.arguments, may_grow=may_grow)


def _pop(output: Any) -> Any:
    """Remove the innermost module call, which has returned `output`, from the running module calls. Report its
    attention calls to the interceptors, or report that its attention cannot be read. If interceptors change attention
    outputs in `output`, return the changed output; otherwise return None. If no module call is left, end the session.
    """
    session = current_session()
    module_call, following, changed = session.module_calls.pop(), session.following, None
    has_failed = sys.exc_info()[0] is not None
    if following is None:
        with session.paused():
            eager_softmax.on_module_end(module_call)
            changed = outputs.on_module_end(output)
    is_pending = any(each.module_calls[-1] is module_call for each in session.attention.pending)
    if module_call.unfollowed and not is_pending:
        must_trace([*session.module_calls, module_call])
        module_call.interceptor.on_unreadable(module_call.path, module_call.unfollowed[0])
    if not session.module_calls:
        if following is not None and not has_failed and not following.is_complete():
            session.report_contradiction()
        if following is not None:
            for interception in session.current_interceptions:
                for path in following.plan.other_paths:  # their calls were not reported one by one
                    interception.interceptor.on_module_call(path)
        if session.lineage.depends_on_indices:
            must_trace([module_call])
        session.end_module_calls()
        if module_call.recording is not None and not has_failed:
            module_call.recording.store()
    return changed
