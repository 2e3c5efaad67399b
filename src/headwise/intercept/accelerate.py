"""`accelerate`: the attention of any model, computed by the native kernels."""

import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple
from weakref import finalize

from torch import nn

from headwise.attention.backends.native import library
from headwise.checks import require_module
from headwise.intercept.accelerated_layers import (
    TORCH_LAYERS,
    AcceleratedHooks,
    accelerate_layer,
    layer_patches,
    marked_modules,
)
from headwise.intercept.accelerated_modules import accelerated_modules
from headwise.intercept.install import require_uncompiled
from headwise.intercept.layer_index import innermost_attention_modules, is_related
from headwise.intercept.torch_patches import sdpa_patches

FAST_PATH = "torch computes the whole layer in one function, which is as fast for short inputs, or has masks"
"""Reason for a layer of torch that ran without SDPA."""

NOT_SDPA = "it does not call torch.nn.functional.scaled_dot_product_attention"
"""Reason for a module that is called attention, ran, and made no call of SDPA."""


class ModuleCalls(NamedTuple):
    """Numbers of attention calls of one module of an accelerated model: of the calls that headwise's native CPU kernels
    computed, and of those that torch computed.

    Attributes:
        path: path of the module; empty for the model itself.
        accelerated: number of calls that the native kernels computed.
        unchanged: number of calls that torch computed, by the reason. A module that made no call that could be
            intercepted has its reason with the number 0.
    """

    path: str
    accelerated: int
    unchanged: dict[str, int]


class Acceleration:
    """Result of `accelerate` for one model. It counts the attention calls of each module, and `print` shows a summary.
    The acceleration ends with a call of `restore`, or at the end of a `with` statement on this object.

    Attributes:
        is_active: True until `restore` is called.
        patches: context in which calls of SDPA are intercepted.
    """

    patches = sdpa_patches

    def __init__(self, model: nn.Module) -> None:
        self._modules = {path: type(module) for path, module in model.named_modules()}
        self._order = {path: index for index, path in enumerate(self._modules)}
        self._named = innermost_attention_modules(dict(model.named_modules()), self._modules)
        self._ran: set[str] = set()
        self._counts: Counter[tuple[str, str | None]] = Counter()
        self._lock = threading.Lock()
        self.is_active = True
        self._remove = finalize(model, _close, _install(model, self))

    def __enter__(self) -> "Acceleration":
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """End the acceleration: the model computes its attention as before `accelerate`. Calling this method again does
        nothing.
        """
        self.is_active = False
        self._remove()
        accelerated_modules.discard_ended()

    def on_start(self, path: str) -> None:
        """Record that the module at `path` ran."""
        self._ran.add(path)

    def record(self, path: str, reason: str | None) -> None:
        """Count one attention call of the module at `path`. If `reason` is None, the native kernels computed the call;
        otherwise torch did, for this reason.
        """
        with self._lock:
            self._counts[path, reason] += 1

    @property
    def modules(self) -> list[ModuleCalls]:
        """Counts of attention calls for each module that made such calls, in the order of the model's modules. Also
        included are modules that ran and seem to compute attention, but made no call that could be intercepted: each
        with the reason why not.
        """
        with self._lock:
            counts = dict(self._counts)
        paths = {path for path, _ in counts}
        unseen = {path: NOT_SDPA for path in self._named if path in self._ran}
        unseen |= {path: FAST_PATH for path in self._ran if issubclass(self._modules[path], TORCH_LAYERS)}
        unseen = {path: why for path, why in unseen.items() if not any(is_related(path, other) for other in paths)}
        modules = [ModuleCalls(path, 0, {reason: 0}) for path, reason in unseen.items()]
        for path in paths:
            unchanged = {reason: count for (other, reason), count in counts.items() if other == path and reason}
            modules.append(ModuleCalls(path, counts.get((path, None), 0), unchanged))
        return sorted(modules, key=lambda module: self._order[module.path])

    def summary(self) -> str:
        """Return a text with two kinds of modules: those whose attention the native kernels computed, and those whose
        attention torch computed, with the reasons. For each module, the text states the number of attention calls so
        far.
        """
        state = f"native kernels: {library.why_not_loaded() or library.instruction_set()}"
        lines = [state if self.is_active else f"{state}; restored"]
        if not self._ran:
            return "\n".join([*lines, "no module has run outside of torch.compile so far"])
        accelerated = [(module.path, module.accelerated) for module in self.modules if module.accelerated]
        lines += _listed("computed by the native kernels", accelerated)
        reasons = dict.fromkeys(reason for module in self.modules for reason in module.unchanged)
        for reason in reasons:
            unchanged = [(each.path, each.unchanged[reason]) for each in self.modules if reason in each.unchanged]
            lines += _listed(f"unchanged: {reason}", unchanged)
        return "\n".join(lines if len(lines) > 1 else [*lines, "no attention was intercepted"])

    def __str__(self) -> str:
        return self.summary()


def accelerate(model: Any) -> Acceleration:
    """Let headwise's native CPU kernels compute attention in a model, in place of torch's
    `scaled_dot_product_attention`. They compute only the calls that they support and are expected to compute faster.
    Return an `Acceleration`, which counts the calls of each module. The acceleration ends with its method `restore`, or
    at the end of a `with` statement.

    The model computes the same output and gradients, up to rounding, with its own masks. Other calls are unchanged: the
    same function of torch receives the same arguments. Those are calls with dropout, with a bias, on a GPU, in half
    precision, and calls that `torch.compile` compiles. Parameters, config and state dict of the model are unchanged,
    and copies of it are not accelerated.

        acceleration = hw.accelerate(model)
        model(**inputs)
        print(acceleration)             # modules, numbers of calls, and reasons
        acceleration.restore()

        with hw.accelerate(model):      # or within a context
            model.generate(**inputs)

    Args:
        model: any module: of torch, of `transformers` with the attention implementation "sdpa", or your own.

    Returns:
        the `Acceleration`. It may be used in several threads, and together with `watch` and `gate`, in any order.

    Raises:
        InputError: the model is not a torch module, or it is compiled or scripted, so its calls do not pass through
            Python.

    Warns:
        UserWarning: the native kernels are not available, so that nothing is accelerated.

    Example:
        >>> print(hw.accelerate(model))
        native kernels: avx512
        no module has run outside of torch.compile so far
    """
    require_module(model)
    require_uncompiled(model)
    reason = library.why_not_loaded()
    if reason is not None:
        warnings.warn(f"nothing is accelerated: {reason}", stacklevel=2)
    return Acceleration(model)


def _install(model: nn.Module, acceleration: Acceleration) -> ExitStack:
    """Install the hooks and patches by which `acceleration` intercepts attention in `model`. Return a context that
    removes them when it is closed. The context does not keep the model in memory.
    """
    with ExitStack() as stack:
        stack.enter_context(sdpa_patches)
        stack.enter_context(layer_patches)
        for path, module in marked_modules(model):
            if isinstance(module, TORCH_LAYERS):
                stack.callback(accelerate_layer(module, acceleration, path))
            else:
                for handle in AcceleratedHooks(acceleration, path).register(module):
                    stack.callback(handle.remove)
        return stack.pop_all()


def _close(installed: ExitStack) -> None:
    """Remove the hooks and patches that `_install` installed."""
    installed.close()


def _listed(title: str, calls: list[tuple[str, int]]) -> Iterator[str]:
    """Yield the lines of one section of a summary: first `title` with the total numbers of calls and modules, then each
    module's path with its number of calls. Yield nothing if `calls` is empty.
    """
    if calls:
        total = sum(count for _, count in calls)
        yield f"{title} ({total} calls of {len(calls)} modules)"
        yield from (f"    {path or 'the model'}" + (f" ({count})" if count else "") for path, count in calls)
