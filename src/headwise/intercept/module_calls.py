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
    """Pass each call of some modules to a function while the context is active: the key of the module, its positional
    arguments and its output. The module returns what the function returns, or its own output for None.
    """

    def hook_of(key: KeyT) -> Callable[..., Any]:
        return lambda module, arguments, output: on_call(key, arguments, output)

    with ExitStack() as stack:
        for key, module in modules.items():
            stack.callback(module.register_forward_hook(hook_of(key)).remove)
        yield
