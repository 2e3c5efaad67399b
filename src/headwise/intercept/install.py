"""Interception of a model: hooks on its modules keep the running calls, and patches intercept attention calls in them.

Nothing changes at import. Nothing is intercepted outside of the modules of an intercepted model.
"""

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from headwise.errors import InputError
from headwise.intercept.interceptor import Interceptor
from headwise.intercept.layer_index import is_inside
from headwise.intercept.module_hooks import ModuleHooks
from headwise.intercept.opaque_modules import kind_of_opaque, may_attend
from headwise.intercept.plans import ModuleStates
from headwise.intercept.session import Session
from headwise.intercept.site import Site, sites_by_path
from headwise.intercept.torch_patches import function_patches

_lock = threading.Lock()


@contextmanager
def intercepted(
    model: nn.Module,
    interceptor: Interceptor,
    sites: Iterable[Any] = (),
    context: str = "an analysis of headwise",
    *,
    runs_eagerly: bool = False,
) -> Iterator[None]:
    """Return a context in which every attention call of `model`, in any thread, is reported to `interceptor`, which may
    observe or change it.

    Hooks and patches are removed when the context ends, also after an exception. Contexts may be nested, for one model
    or several. What activation checkpointing repeats in a backward pass, also after the context, is changed by
    `interceptor` in the same way as the forward pass was, and not reported again.

    Args:
        model: the model.
        interceptor: object that observes or changes the attention calls.
        sites: statements of the user about the attention of modules, as `headwise.Site` objects.
        context: name of the context in messages, such as "hw.gate".
        runs_eagerly: True if the caller ensures that compiled modules run without compilation.

    Raises:
        InputError: the model, or a module of it that may attend, is compiled or scripted, so that its calls do not
            pass through Python; a statement is not about a module of the model, or contradicts what is derived.
    """
    opaque = [] if runs_eagerly else require_uncompiled(model, without_attention=True)
    interception = HooksAndPatches(model, interceptor, sites_by_path(model, sites), context, opaque)
    with interception:
        with _lock:
            Session.interceptions = (*Session.interceptions, interception)
        try:
            yield
        finally:
            with _lock:
                others = [other for other in Session.interceptions if other is not interception]
                Session.interceptions = tuple(others)
            Session.end_calls_of(interceptor)


def require_uncompiled(model: nn.Module, *, without_attention: bool = False) -> list[str]:
    """Raise `InputError` if a module of the model is compiled or scripted. Calls of such modules do not pass through
    Python, so they cannot be intercepted. `without_attention` permits those inside of the model that cannot attend;
    their paths are returned.
    """
    permitted: list[str] = []
    for path, module in model.named_modules():
        kind, remedy = kind_of_opaque(module), None
        if kind is None or any(is_inside(path, other) for other in permitted):
            continue
        if path and without_attention and not may_attend(module):
            permitted.append(path)
            continue
        if hasattr(module, "_orig_mod"):
            remedy = f"put {path}._orig_mod in its place" if path else "pass model._orig_mod, and call that"
        elif kind == "compiled":
            remedy = "pass a model on which compile() was not called"
        got = f"a {kind} one at {path}" if path else f"a {kind} one"
        raise InputError("model", expected="modules that run in Python", got=got, remedy=remedy)
    return permitted


class HooksAndPatches:
    """Context that intercepts one model: hooks on its modules report to one interceptor, and functions of torch are
    replaced. A context that is active may be entered again; the last exit removes hooks and replacements.

    Args:
        model: the model.
        interceptor: the interceptor.
        sites: statements of the user, by module path.
        context: name of the context in messages.
        opaque: paths of compiled or scripted modules, in which no hooks are set.

    Attributes:
        interceptor: the interceptor.
        states: reader of the state of the model's modules.
        has_statements: True if the user has stated something about the model's attention.
    """

    def __init__(
        self,
        model: nn.Module,
        interceptor: Interceptor,
        sites: Mapping[str, Site],
        context: str,
        opaque: Collection[str] = (),
    ) -> None:
        self.interceptor, self.states, self.has_statements = interceptor, ModuleStates(model), bool(sites)
        self._hooks = [
            ModuleHooks(interceptor, path, module, sites.get(path), context)
            for path, module in model.named_modules()
            # A wrapper by `torch.compile` has its hooks outside of the compiled module, others inside.
            if not any(is_inside(path, other) for other in opaque)
            and (path not in opaque or hasattr(module, "_orig_mod"))
        ]
        self._lock, self._depth, self._installed = threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._depth:
                with ExitStack() as stack:
                    stack.enter_context(function_patches)
                    for hooks in self._hooks:
                        for handle in hooks.register():
                            stack.callback(handle.remove)
                    self._installed = stack.pop_all()
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                self._installed.close()
