"""Shape checks of the tests: jaxtyping and beartype check the first calls of each function in each test, unless an
earlier call had arguments of the same kinds.

Checks take longer than most functions, and later calls in a test seldom have other shapes. Functions whose signatures
state no shape are not checked: mypy covers them, and most calls are of these.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable
from functools import cache, wraps
from types import CodeType, FunctionType
from typing import Any, get_args

import jaxtyping
import torch

MOST_CALLS = 12
"""Number of calls that may be checked: of each function in each test; of a function inside a function, in all tests,
since it is defined anew at each call, and the definition of its check takes milliseconds.
"""

calls: defaultdict[CodeType, int] = defaultdict(int)
"""Number of calls of each function in the current test, up to `MOST_CALLS`."""

calls_of_inner: defaultdict[CodeType, int] = defaultdict(int)
"""The same for functions inside functions, in all tests."""

checked: set[tuple] = set()
"""Functions with the kinds of arguments for which a call passed its check."""

_jaxtyped = jaxtyping.jaxtyped


def install(modules: list[str]) -> None:
    """Check the calls of all functions in modules that are imported later."""
    jaxtyping.jaxtyped = jaxtyped
    jaxtyping.install_import_hook(modules, "beartype.beartype")


def jaxtyped(typechecker: Any) -> Any:
    """Return a decorator that checks the first calls of a function, in place of the one that the import hook of
    jaxtyping applies.
    """
    check_all = _jaxtyped(typechecker=typechecker)

    def decorate(function: Any) -> Any:
        if not isinstance(function, FunctionType):
            return check_all(function)
        return _checked(function, check_all) if any(map(_states_shape, function.__annotations__.values())) else function

    return decorate


def _states_shape(annotation: Any) -> bool:
    """Return True if an annotation has a shape in it, such as `list[Float[Tensor, "rows"]]`. Annotations that are still
    strings may have one if they have brackets.
    """
    if isinstance(annotation, str):
        return "[" in annotation
    parts = annotation if isinstance(annotation, list) else get_args(annotation)
    return getattr(annotation, "__module__", "") == "jaxtyping" or any(map(_states_shape, parts))


def _checked(function: FunctionType, check_all: Callable) -> Callable:
    """Return a function with its first calls checked, by a decorator that checks all."""
    code, counts = function.__code__, calls_of_inner if "<locals>" in function.__qualname__ else calls
    if counts[code] >= MOST_CALLS:
        return function
    check = cache(lambda: check_all(function))

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or jaxtyping.config.jaxtyping_disable or counts[code] >= MOST_CALLS:
            return function(*args, **kwargs)
        counts[code] += 1
        try:
            kinds = (code, *map(_kind, args), *kwargs, *map(_kind, kwargs.values()))
            is_known = kinds in checked
        except (TypeError, RuntimeError):  # sizes that are symbols have no hash, and nested tensors no sizes
            return check()(*args, **kwargs)
        if is_known:
            return function(*args, **kwargs)
        result = check()(*args, **kwargs)
        checked.add(kinds)
        return result

    return wrapper


def _kind(argument: Any) -> Any:
    """Return what a check of an argument depends on: shape and dtype of a tensor, and of those in a list; the value of
    a flag or name, on which the result may depend; otherwise the type.
    """
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.dtype
    if type(argument) in (list, tuple):
        return type(argument), *map(_kind, argument[:8])
    return argument if type(argument) in (bool, str) else type(argument)


@contextlib.contextmanager
def shapes_unchecked():
    """Turn off the shape checks within the context."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)
