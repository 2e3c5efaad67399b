"""Running modules of accelerated models, in each thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from headwise.attention.masks.key_ranges import RunLengths, run_lengths
from headwise.intercept.patches import Patches

MOST_MASKS = 2
"""Number of masks whose ranges are kept, those of layers with and without a window. Each mask stays in memory until the
model's call ends.
"""


OBSERVED = "hw.watch computes it in the same pass as its statistics"
"""Reason for a call whose output is a result of its observation."""

OWN_BACKEND = "headwise.attend chooses its own backend"
"""Reason for attention in headwise's own layers."""


@runtime_checkable
class CallRecorder(Protocol):
    """Interface of an object that counts attention calls, by the path of the module that made the call.

    Attributes:
        is_active: False once the acceleration has ended.
        patches: context in which calls of SDPA are intercepted.
    """

    is_active: bool
    patches: Patches

    def on_start(self, path: str) -> None:
        """Record that the module at `path` ran."""

    def record(self, path: str, reason: str | None) -> None:
        """Count one attention call of the module at `path`. If `reason` is None, the native kernels computed the call;
        otherwise torch did, for this reason.
        """


class RunningModule(NamedTuple):
    """One module of an accelerated model that is now running, with the object that counts its attention calls.

    Attributes:
        recorder: object that counts its attention calls.
        path: path of the module in the model.
        module: the module.
    """

    recorder: CallRecorder
    path: str
    module: nn.Module


class AcceleratedModules(threading.local):
    """Stack of the modules of accelerated models that are running in one thread. It also caches the attention masks of
    these modules in the form that the native kernels read: ranges of visible keys.

    Attributes:
        running: the running modules, outermost first.
        is_repeating: True while activation checkpointing repeats a part of a forward pass in a backward pass, with the
            modules that were running there.
    """

    def __init__(self) -> None:
        self.running: list[RunningModule] = []
        self.is_repeating = False
        self._masks: list[_ReadMask] = []

    @property
    def is_accelerated(self) -> bool:
        """True if attention calls of this thread are to be accelerated, that is while a module of an accelerated model
        runs.
        """
        if not self.is_repeating and not all(module.recorder.is_active for module in self.running):
            self.discard_ended()
        return bool(self.running)

    def discard_ended(self) -> None:
        """Remove from `running` each module whose acceleration has ended while the module ran. It may have ended in
        another thread, or by an exception such as KeyboardInterrupt, after which torch calls no forward hooks.
        """
        self.running = [module for module in self.running if module.recorder.is_active]

    def start(self, recorder: CallRecorder, path: str, module: nn.Module) -> None:
        """Push a module that starts onto the stack. In a backward pass, push it only while activation checkpointing
        repeats a part of the forward pass that was accelerated. Otherwise forward pass and repetition would save
        different tensors for the gradient.
        """
        is_backward = torch._C._current_graph_task_id() != -1
        if is_backward and not (self.is_repeating and self.running):
            return
        self.end(recorder, module)  # torch calls no hook after KeyboardInterrupt, so it may be there
        self.running.append(RunningModule(recorder, path, module))
        recorder.on_start(path)

    def end(self, recorder: CallRecorder, module: nn.Module) -> None:
        """Remove a module that has ended from the stack, with all modules above it, which an exception may have left
        there.
        """
        for index, each in enumerate(self.running):
            if each.module is module and each.recorder is recorder:
                del self.running[index:]
                break
        if not self.running:
            self._masks.clear()

    @contextmanager
    def repeating(self, running: list[RunningModule]) -> Iterator[None]:
        """Return a context in which `running` are the running modules, for activation checkpointing that repeats a part
        of a forward pass.
        """
        before = self.running, self.is_repeating
        self.running, self.is_repeating = running[:], True
        try:
            yield
        finally:
            self.running, self.is_repeating = before

    @contextmanager
    def paused(self, reason: str) -> Iterator[None]:
        """Return a context in which no attention call is accelerated, for the time in which headwise itself computes
        one call. This call is recorded as one that the native kernels did not compute, for `reason`.
        """
        if self.is_accelerated:
            self.record(reason)
        before, self.running = self.running, []
        try:
            yield
        finally:
            self.running = before

    def record(self, reason: str | None) -> None:
        """Count one attention call with every recorder that has running modules, under the path of the innermost of
        these modules. `reason` states why torch computed the call; it is None if the native kernels did. Do nothing
        while activation checkpointing repeats a forward pass, where the call was already counted.
        """
        if self.is_repeating:
            return
        recorders: set[int] = set()
        for module in reversed(self.running):
            if id(module.recorder) not in recorders:
                recorders.add(id(module.recorder))
                module.recorder.record(module.path, reason)

    def ranges_of(self, mask: Tensor, dtype: torch.dtype | None) -> RunLengths:
        """Return a mask as ranges of visible keys, the form that the native kernels read. An additive mask is first
        cast to `dtype`. The ranges are computed once for a mask that several layers receive.
        """
        for read in self._masks:
            if read.is_of(mask, dtype):
                return read.result
        read = _ReadMask(mask.detach(), dtype, run_lengths)
        self._masks = [*self._masks[1 - MOST_MASKS :], read]
        return read.result


class _ReadMask:
    """An attention mask and its ranges of visible keys, for reuse. The object keeps the mask, so that no other tensor
    can get the same memory address.

    Attributes:
        result: the ranges.
    """

    def __init__(
        self, mask: Tensor, dtype: torch.dtype | None, read: Callable[[Tensor, torch.dtype | None], RunLengths]
    ) -> None:
        self._mask, self._key = mask, _key(mask, dtype)
        self._copy = mask.clone() if mask.is_inference() else None
        self.result = read(mask, dtype)

    def is_of(self, mask: Tensor, dtype: torch.dtype | None) -> bool:
        """Return True if the stored ranges are valid for `mask`: it has the same memory and has not changed since.
        Torch counts no changes of tensors made in inference mode, so for these the values are compared.
        """
        return _key(mask, dtype) == self._key and (self._copy is None or torch.equal(mask, self._copy))


def _key(mask: Tensor, dtype: torch.dtype | None) -> tuple[object, ...]:
    """Return a key by which a mask that was read before is recognised: memory address, dtype, shape, strides, torch's
    count of in-place changes, and the requested `dtype`.
    """
    version = None if mask.is_inference() else mask._version
    return (mask.data_ptr(), mask.dtype, mask.shape, mask.stride(), version, dtype)


accelerated_modules = AcceleratedModules()
"""The running modules of accelerated models; each thread has its own."""
