"""Functions of attention engines, intercepted wherever a model refers to them.

Models import such functions by name, and store them in attributes, closures and tables. So the function object itself
is changed while a model is intercepted: its code (`__code__`) is exchanged for code that calls an intercepting
function. The original code runs in a second function object. This also intercepts a function that the model has
compiled by `torch.compile`: the compiled code of the original function is used as before.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CodeType, FunctionType
from typing import Any

import torch

from headwise.intercept.adapters.engine import Arguments, Engine, finished, report_unread
from headwise.intercept.attention_call import AttentionCall
from headwise.intercept.patches import Patches, Replacement
from headwise.intercept.session import current_session

GLOBAL_NAME = "_headwise_intercepted_{}"
"""Name of the intercepting function among the globals of the library's module, while a model is intercepted."""


class FunctionPatches(Patches):
    """Context in which the attention functions of other libraries run headwise's code, so that their calls are
    intercepted. The code inside the function objects is exchanged; leaving the context restores it.

    Args:
        engines: engines whose functions are intercepted, if their libraries are loaded when the context is entered.

    Attributes:
        engines: the engines.
    """

    def __init__(self, engines: Iterable[Engine]) -> None:
        super().__init__(lambda: _replacements(self.engines))
        self.engines = tuple(engines)

    def _replace(self, owner: FunctionType, name: str, function: Callable[..., Any]) -> None:
        """Exchange the code of the function `owner` for code that calls `function`, which is stored under `name` among
        the globals of the owner's module. Store a function that undoes both steps.
        """
        before, code = owner.__code__, _code_with_parameters_of(owner.__code__, name)
        if "torch._dynamo" in sys.modules:
            # A function that the model has compiled then runs these two frames in Python, and no others.
            from torch._dynamo.eval_frame import skip_code

            skip_code(function.__code__)
            skip_code(code)

        def restore() -> None:
            if owner.__code__ is code:
                owner.__code__ = before
            owner.__globals__.pop(name, None)

        self._restore.append(restore)
        owner.__globals__[name] = function
        owner.__code__ = code


def _replacements(engines: tuple[Engine, ...]) -> Iterator[Replacement]:
    """Yield the replacements for functions of `engines` (attention libraries) that are defined in loaded modules. A
    replacement has the function, a name, and the new function, which intercepts calls of it.
    """
    seen: set[FunctionType] = set()
    for module_name, engine in _searched_modules(engines):
        for name in engine.functions:
            function = getattr(sys.modules.get(module_name), name, None)
            if isinstance(function, FunctionType) and function not in seen:
                seen.add(function)
                yield Replacement(function, GLOBAL_NAME.format(name), _intercepting(function, name, engine))


def _searched_modules(engines: tuple[Engine, ...]) -> list[tuple[str, Engine]]:
    """Return the names of the modules, loaded now or earlier, that may define functions of `engines` (attention
    libraries), each with its engine. Thousands of modules are loaded, so each name is read once.
    """
    known, found = _search_of(engines)
    for name in sys.modules.keys() - known:
        known.add(name)
        found.extend((name, engine) for engine in engines if engine.is_module(name))
    return found


@cache
def _search_of(engines: tuple[Engine, ...]) -> tuple[set[str], list[tuple[str, Engine]]]:
    """Return the set and the list in which a search for `engines` (attention libraries) among loaded modules keeps its
    results. They are the names of the modules that were searched, and the modules that may define functions of an
    engine, each with its engine. The first call returns empty ones, and later calls return the same objects.
    """
    return set(), []


def _intercepting(function: FunctionType, name: str, engine: Engine) -> Callable[..., Any]:
    """Return a function that calls `function` of an attention engine (a library such as FlashAttention), and intercepts
    the call inside intercepted models.
    """
    original = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    original.__kwdefaults__ = function.__kwdefaults__
    vars(original).update(vars(function))  # such as the function that a decorator wraps, which has the signature

    def finish(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        def read() -> AttentionCall:
            arguments = Arguments.of(original, args, kwargs)
            call = engine.read(name, arguments)
            arguments.require_read()
            return call

        return finished(name, result, read)

    def name_compiled() -> None:
        if current_session().intercepts:
            report_unread(original.__name__, "inside of a function that torch.compile compiles")

    begin: Callable[[], Callable[[], None] | None] = _begin
    if "torch._dynamo" in sys.modules:
        torch.compiler.assume_constant_result(name_compiled)  # type: ignore[no-untyped-call]  # the compiler calls it
        begin, finish = (torch.compiler.disable(each) for each in (begin, finish))  # type: ignore[no-untyped-call]

    def intercepting(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # it becomes a part of a larger compiled function
            name_compiled()
            return original(*args, **kwargs)
        resume = begin()
        if resume is None:
            return original(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
        finally:
            resume()
        return finish(args, kwargs, result)

    return intercepting


def _code_with_parameters_of(code: CodeType, called: str) -> CodeType:
    """Return the code of a new function with the same parameters as `code`, so that defaults and the signature stay
    valid. The new code calls the global function `called` with all arguments.
    """
    names = list(code.co_varnames)
    positional, keyword_only = names[: code.co_argcount], names[code.co_argcount :][: code.co_kwonlyargcount]
    variadic = names[code.co_argcount + code.co_kwonlyargcount :]
    rest = [f"*{variadic.pop(0)}"] if code.co_flags & CO_VARARGS else []
    named = [f"**{variadic.pop(0)}"] if code.co_flags & CO_VARKEYWORDS else []
    arguments = [*positional, *rest, *(f"{name}={name}" for name in keyword_only), *named]
    parameters = [*positional, *(rest or ["*"] * bool(keyword_only)), *keyword_only, *named]
    if code.co_posonlyargcount:
        parameters.insert(code.co_posonlyargcount, "/")
    captured = ", ".join(code.co_freevars)  # a function only accepts code with as many variables from outside of it
    namespace: dict[str, Any] = {}
    source = (
        f"def outer({captured}):\n"
        f"    def new({', '.join(parameters)}):\n"
        f"        return {called}({', '.join(arguments)})\n"
        f"        ({captured})\n"
        "    return new"
    )
    exec(source, namespace)
    new: CodeType = namespace["outer"](*code.co_freevars).__code__
    return new.replace(co_name=code.co_name, co_filename=__file__)


def _begin() -> Callable[[], None] | None:
    """Pause interception before an attention engine (a library such as FlashAttention) computes a call. Return a
    function that resumes interception; None outside of intercepted models.
    """
    session = current_session()
    if not session.intercepts:
        return None
    paused = session.paused()
    paused.__enter__()
    return paused.__exit__
