"""Paths of the modules of a model that are running."""

from typing import Any

from torch import nn


class ModuleStack:
    """Paths of the modules of a model that are running, as a context with hooks for all modules."""

    def __init__(self, model: nn.Module) -> None:
        self._paths = {id(module): path for path, module in model.named_modules()}
        self.running: list[str] = []
        self._handles: list[Any] = []

    def __enter__(self) -> "ModuleStack":
        hooks = nn.modules.module
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        if id(module) in self._paths:
            self.running.append(self._paths[id(module)])

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if id(module) in self._paths and self.running:
            self.running.pop()
