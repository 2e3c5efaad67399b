"""Attention calls inside any model, met where they are made, shown to visitors and changed by them.

    what a module calls                        is met
    transformers' attention interface          where it hands out the function, under the model's own implementation
    `scaled_dot_product_attention`             by a mode of torch that is on while the model runs
    `F.multi_head_attention_forward`           where that calls the one above, or softmax, in its own module
    softmax, in a module called attention      by the same mode: its result is the weights
    `headwise.attend`, so every layer of ours  by a variable that it reads

Nothing is changed at import. While a model is visited its modules have hooks, which know which of them runs, in every
thread; what is put in the place of others' functions leaves the calls of all other models alone.
"""

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from headwise.attention.attend import interception_hook
from headwise.errors import InputError
from headwise.intercept import eager_softmax
from headwise.intercept.interceptor import Frame, Interceptor, answer, running
from headwise.intercept.torch_patches import Mode, in_place


@contextmanager
def intercepted(model: nn.Module, by: Interceptor) -> Iterator[None]:
    """Within the context, `by` is asked about every attention call of `model`.

    All is put back when the context ends, also by an exception; contexts may be nested, over one model or several.

    Raises:
        InputError: a compiled or scripted model, whose calls do not pass through Python.
    """
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError("model", expected="modules that run in Python", got="a scripted one")
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            remedy = "give the module before it is compiled, model._orig_mod"
            raise InputError("model", expected="modules that run in Python", got="a compiled one", remedy=remedy)
    hooks = []
    with in_place:
        for path, module in model.named_modules():
            own = _Hooks(by, path, module)
            hooks.append(module.register_forward_pre_hook(own.enter, prepend=True, with_kwargs=True))
            hooks.append(module.register_forward_hook(own.leave, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            # Torch calls no hook for what is no Exception, such as a key that interrupts.
            while any(frame.visitor is by for frame in running.frames):
                _pop()


class _Hooks:
    """What says that a module begins, and that it ends."""

    def __init__(self, by: Interceptor, path: str, module: nn.Module) -> None:
        self._by, self._path = by, path
        self._names = tuple(inspect.signature(module.forward).parameters)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The module is called."""
        outermost = all(frame.visitor is not self._by for frame in running.frames)
        _push(Frame(self._by, self._path, module, dict(zip(self._names, args, strict=False)) | kwargs))
        if outermost:
            self._by.on_model_call()
        self._by.on_module_call(self._path)

    def leave(self, module: nn.Module, *_: Any) -> None:
        """The module has ended; one in which a hook of others' failed before `enter` never began."""
        if running.frames and running.frames[-1].module is module and running.frames[-1].visitor is self._by:
            _pop()


def has_foreign_hooks(module: nn.Module) -> bool:
    """Whether anybody else has hooks on a module, who may read what it gives."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return any(not isinstance(getattr(hook, "__self__", None), _Hooks) for hook in hooks)


class _Outermost(threading.local):
    """What is on in this thread while a visited model runs."""

    def __init__(self) -> None:
        self.mode: Mode | None = None
        self.token: Any = None


_outermost = _Outermost()


def _push(frame: Frame) -> None:
    if not running.frames:
        _outermost.token, _outermost.mode = interception_hook.set(answer), Mode()
        _outermost.mode.__enter__()  # type: ignore[no-untyped-call]
    running.frames.append(frame)


def _pop() -> None:
    eager_softmax.ends(running.frames.pop())
    if not running.frames and _outermost.mode is not None:
        eager_softmax.forget()
        _outermost.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        interception_hook.reset(_outermost.token)
