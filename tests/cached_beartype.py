"""Type checker of the tests: beartype, with one check for all equal functions that are defined inside a function."""

import inspect
from collections.abc import Callable

import beartype

_CHECKED: dict[tuple, Callable] = {}


def check(function: Callable) -> Callable:
    """Return a function with beartype's checks of its arguments and return value.

    jaxtyping passes functions that contain nothing but a signature, so equal signatures have equal checks. A function
    inside a function is defined again at each call, and without this cache beartype, which takes milliseconds, would
    write the same check each time.
    """
    if "<locals>" not in function.__qualname__:
        return beartype.beartype(function)
    key = (function.__module__, function.__qualname__, inspect.signature(function))
    try:
        if key not in _CHECKED:
            _CHECKED[key] = beartype.beartype(function)
    except TypeError:  # a default value that cannot be hashed
        return beartype.beartype(function)
    return _CHECKED[key]
