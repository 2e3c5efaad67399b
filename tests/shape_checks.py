"""Shape checks of the tests: jaxtyping and beartype check the first calls of each function in each test.

Checks take longer than most functions, and later calls in a test seldom have other shapes.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable
from functools import cache, wraps
from types import CodeType, FunctionType
from typing import Any

import jaxtyping
import torch

MOST_CALLS = 12
"""Number of calls that are checked: of each function in each test; of a function inside a function, in all tests, since
it is defined anew at each call, and the definition of its check takes milliseconds.
"""

calls: defaultdict[CodeType, int] = defaultdict(int)
"""Number of checked calls of each function in the current test."""

calls_of_inner: defaultdict[CodeType, int] = defaultdict(int)
"""The same for functions inside functions, in all tests."""

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
    return lambda function: _checked(function, check_all) if isinstance(function, FunctionType) else check_all(function)


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
        return check()(*args, **kwargs)

    return wrapper


@contextlib.contextmanager
def shapes_unchecked():
    """Turn off the shape checks within the context."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)
