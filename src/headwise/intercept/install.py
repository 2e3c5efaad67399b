"""Interception of a model: hooks on its modules keep the call stack, and patches intercept attention calls in them.

Nothing changes at import. Nothing is intercepted outside of the modules of an intercepted model.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from headwise.errors import InputError
from headwise.intercept import eager_softmax
from headwise.intercept.call_stack import call_stack
from headwise.intercept.interceptor import Interceptor
from headwise.intercept.module_call import ModuleCall
from headwise.intercept.torch_patches import TorchCalls, function_patches


@contextmanager
def intercepted(model: nn.Module, interceptor: Interceptor) -> Iterator[None]:
    """Report every attention call of `model` within the context, in any thread, to `interceptor`.

    Hooks and patches are removed when the context ends, also after an exception. Contexts may be nested, for one model
    or several.

    Raises:
        InputError: the model is compiled or scripted, so its calls do not pass through Python.
    """
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError("model", expected="modules that run in Python", got="a scripted one")
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            remedy = "give the module before it is compiled, model._orig_mod"
            raise InputError("model", expected="modules that run in Python", got="a compiled one", remedy=remedy)
    handles = []
    with function_patches:
        for path, module in model.named_modules():
            hooks = _ModuleHooks(interceptor, path, module)
            handles.append(module.register_forward_pre_hook(hooks.on_start, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(hooks.on_end, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            # Torch calls no hook after what is not an Exception, such as KeyboardInterrupt.
            while any(module_call.interceptor is interceptor for module_call in call_stack.module_calls):
                _pop()


class _ModuleHooks:
    """Forward hooks of one module of an intercepted model: they push each call of the module onto the thread's call
    stack at its start, and pop it at its end.
    """

    def __init__(self, interceptor: Interceptor, path: str, module: nn.Module) -> None:
        self._interceptor, self._path = interceptor, path
        self._argument_names = tuple(inspect.signature(module.forward).parameters)

    def on_start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook: push this call of `module` onto the thread's call stack, and report its start to the
        interceptor. If no other module of the same model is running in this thread, first report the start of a call of
        the model.
        """
        is_outermost = all(call.interceptor is not self._interceptor for call in call_stack.module_calls)
        arguments = dict(zip(self._argument_names, args, strict=False)) | kwargs
        _push(ModuleCall(self._interceptor, self._path, module, arguments))
        if is_outermost:
            self._interceptor.on_model_call()
        self._interceptor.on_module_call(self._path)

    def on_end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook: pop the module call from the call stack. Do nothing if `on_start` never pushed it, because
        another hook failed first.
        """
        innermost = call_stack.module_calls[-1] if call_stack.module_calls else None
        if innermost is not None and innermost.module is module and innermost.interceptor is self._interceptor:
            call_stack.lineage.record_module(innermost.arguments.values(), output, call_stack.module_calls)
            _pop()


def has_foreign_hooks(module: nn.Module) -> bool:
    """Return True if a module has forward hooks or forward pre-hooks that interception did not register; such a hook
    may read or change the module's output.
    """
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return any(not isinstance(getattr(hook, "__self__", None), _ModuleHooks) for hook in hooks)


def _push(module_call: ModuleCall) -> None:
    """Push a module call onto this thread's call stack. If the stack was empty, also turn on the mode that intercepts
    torch's functions in this thread.
    """
    if not call_stack.module_calls:
        call_stack.lineage.restart(module_call.arguments.values())
        call_stack.torch_mode = TorchCalls()
        call_stack.torch_mode.__enter__()  # type: ignore[no-untyped-call]
    call_stack.module_calls.append(module_call)


def _pop() -> None:
    """Pop the innermost module call from this thread's call stack. If attention inside this module call could not be
    read, report the module to the interceptors. If the stack is then empty, turn off the mode that intercepts torch's
    functions.
    """
    eager_softmax.on_module_end(call_stack.module_calls.pop())
    if not call_stack.module_calls and call_stack.torch_mode is not None:
        call_stack.lineage.restart()
        call_stack.pending_softmaxes.clear()  # an exception may have left some
        call_stack.torch_mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        call_stack.torch_mode = None
