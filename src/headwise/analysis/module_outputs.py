"""Outputs of modules in one run of a model, which the modules return again in a later run."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def norms_of(model: nn.Module) -> list[nn.Module]:
    """Return the norm layers of a model: modules with "norm" in the name of their class."""
    return [module for module in model.modules() if "norm" in type(module).__name__.lower()]


class ModuleOutputs:
    """Recorder of the outputs of some modules of a model in one run, which can make the modules return these outputs in
    a later run.

    Args:
        modules: the modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._outputs: dict[nn.Module, list[Any]] = {module: [] for module in modules}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the output of every call of every module while the context is active."""
        with self._hooks(lambda module, _, output: self._outputs[module].append(output)):
            yield

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Make each module return the outputs that `recorded` stored, in the order of its calls, while the context is
        active.
        """
        remaining = {module: iter(outputs) for module, outputs in self._outputs.items()}
        with self._hooks(lambda module, *_: next(remaining[module], None)):
            yield

    @contextmanager
    def _hooks(self, hook: Callable[..., Any]) -> Iterator[None]:
        """Register `hook` as forward hook of every module while the context is active."""
        handles = [module.register_forward_hook(hook) for module in self._outputs]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
