"""Calls of single modules while a model runs: their arguments and outputs, which may be replaced."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from torch import nn

KeyT = TypeVar("KeyT")


@contextmanager
def module_calls(
    modules: Mapping[KeyT, nn.Module], on_call: Callable[[KeyT, tuple[Any, ...], Any], Any]
) -> Iterator[None]:
    """Return a context in which `on_call` is called after each call of one of `modules`, with the module's key, its
    positional arguments and its output. If `on_call` returns a value other than None, this replaces the module's
    output.
    """

    def hook_of(key: KeyT) -> Callable[..., Any]:
        return lambda module, arguments, output: on_call(key, arguments, output)

    with ExitStack() as stack:
        for key, module in modules.items():
            stack.callback(module.register_forward_hook(hook_of(key)).remove)
        yield
