"""Interception of a model: hooks on its modules keep the running calls, and patches intercept attention calls in them.

Nothing changes at import. Nothing is intercepted outside of the modules of an intercepted model.
"""

import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from headwise.errors import InputError
from headwise.intercept.adapters.all_adapters import function_patches
from headwise.intercept.interceptor import Interceptor
from headwise.intercept.layer_index import is_inside
from headwise.intercept.module_hooks import ModuleHooks, has_foreign_hooks
from headwise.intercept.plans import ModuleStates
from headwise.intercept.session import Session
from headwise.intercept.site import Site, sites_by_path

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
    """Context in which the attention calls of one model are intercepted: hooks on its modules report to one interceptor
    (an object that observes or changes attention), and functions of torch are replaced. An active context may be
    entered again; the last exit removes hooks and replacements.

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
        has_other_hooks = any(map(has_foreign_hooks, model.modules()))
        self.states = ModuleStates(model, has_other_hooks=has_other_hooks)
        self.interceptor, self.has_statements = interceptor, bool(sites)
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
                    handles: list[RemovableHandle] = []
                    stack.callback(_remove, handles)
                    for hooks in self._hooks:
                        handles.extend(hooks.register())
                    self._installed = stack.pop_all()
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                self._installed.close()


def _remove(handles: list[RemovableHandle]) -> None:
    """Remove hooks from their modules."""
    for handle in handles:
        handle.remove()


_OF_ATTENTION = re.compile(r"softm|attention|attn|scaled_dot|sdpa|exp\b|exp2|exp_|flex", re.IGNORECASE)
"""Names of functions and classes that may compute attention: without an exponential there is no softmax."""


def kind_of_opaque(module: nn.Module) -> str | None:
    """Return "compiled" or "scripted" for a module whose calls do not pass through Python; None for any other one."""
    if isinstance(module, torch.jit.ScriptModule):
        return "scripted"
    is_compiled = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
    return "compiled" if is_compiled else None


def may_attend(module: nn.Module) -> bool:
    """Return True if a compiled or scripted module may compute attention. Return False only if this is excluded by the
    graph of a scripted module, or by the names in the code of all modules inside of a compiled one.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return bool(_OF_ATTENTION.search(str(module.inlined_graph)))
    return any(_names_attention(each) for each in getattr(module, "_orig_mod", module).modules())


def _names_attention(module: nn.Module) -> bool:
    """Return True if the class of a module, or its code, has a name of attention, or if its code cannot be read."""
    if isinstance(module, torch.jit.ScriptModule):
        return may_attend(module)
    own = type(module)
    if own.__module__.startswith("torch.nn."):
        return bool(_OF_ATTENTION.search(own.__name__)) or "Transformer" in own.__name__
    functions = [value for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    for each in own.__mro__:
        if each is not object and not each.__module__.startswith("torch.nn."):
            functions += [value for name, value in vars(each).items() if callable(value) and name != "__init__"]
    return bool(_OF_ATTENTION.search(own.__name__)) or any(_may_compute(each, set()) for each in functions)


def _may_compute(function: Any, known: set[CodeType]) -> bool:
    """Return True if a function, or one that it names, has a name of attention in its code, or cannot be read. `known`
    are the codes that were read before.
    """
    if isinstance(function, type | nn.Module):
        return bool(_OF_ATTENTION.search(getattr(function, "__name__", type(function).__name__)))
    if not isinstance(function, FunctionType) or (function.__module__ or "").split(".")[0] == "torch":
        is_of_torch = (getattr(function, "__module__", None) or "").split(".")[0] in ("torch", "builtins", "math")
        return not is_of_torch or bool(_OF_ATTENTION.search(getattr(function, "__name__", "")))
    if function.__code__ in known:
        return False
    known.add(function.__code__)
    names = set(_names_in(function.__code__))
    if any(_OF_ATTENTION.search(name) for name in names):
        return True
    inside = [cell.cell_contents for cell in function.__closure__ or ()]
    for name in names:
        value = function.__globals__.get(name)
        of_module = vars(value) if isinstance(value, ModuleType) and value.__name__.split(".")[0] != "torch" else {}
        inside += [value, *(of_module[other] for other in names if other in of_module)]
    return any(_may_compute(each, known) for each in inside if isinstance(each, FunctionType))


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of all functions, attributes and variables in a code, and in functions that are defined in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
