"""Temporary replacement of a module's `forward`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def swap_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Return a context in which `forward` replaces the method `forward` of one module object. At its end, the previous
    method is restored, unless other code has replaced it in the meantime.
    """
    attributes = vars(module)  # written directly, since modules may define what it means to set an attribute
    has_own, before = "forward" in attributes, attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        if attributes.get("forward") is forward:
            if has_own:
                attributes["forward"] = before
            else:
                del attributes["forward"]
