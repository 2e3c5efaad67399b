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
    """Object that counts attention calls by the path of the module that made them.

    Attributes:
        is_active: False once the acceleration has ended.
        patches: context in which calls of SDPA are intercepted.
    """

    is_active: bool
    patches: Patches

    def on_start(self, path: str) -> None:
        """Note that the module at `path` runs."""

    def record(self, path: str, reason: str | None) -> None:
        """Count one attention call of the module at `path`: one that the native kernels computed if `reason` is None,
        otherwise one that was left to torch for this reason.
        """


class RunningModule(NamedTuple):
    """One module of an accelerated model that runs.

    Attributes:
        recorder: object that counts its attention calls.
        path: path of the module in the model.
        module: the module.
    """

    recorder: CallRecorder
    path: str
    module: nn.Module


class AcceleratedModules(threading.local):
    """The running modules of accelerated models in one thread, and the ranges of their masks.

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
        """True if attention calls of this thread are to be accelerated: a module of an accelerated model runs."""
        if not self.is_repeating and not all(module.recorder.is_active for module in self.running):
            self.discard_ended()
        return bool(self.running)

    def discard_ended(self) -> None:
        """Remove from `running` each module whose acceleration ended while the module ran: in another thread, or by an
        exception after which torch calls no hook, such as KeyboardInterrupt.
        """
        self.running = [module for module in self.running if module.recorder.is_active]

    def start(self, recorder: CallRecorder, path: str, module: nn.Module) -> None:
        """Push a module that starts. In a backward pass, do so only while activation checkpointing repeats what was
        accelerated in the forward pass: otherwise the two would differ in what they save for the gradient.
        """
        is_backward = torch._C._current_graph_task_id() != -1
        if is_backward and not (self.is_repeating and self.running):
            return
        self.end(recorder, module)  # torch calls no hook after KeyboardInterrupt, so it may be there
        self.running.append(RunningModule(recorder, path, module))
        recorder.on_start(path)

    def end(self, recorder: CallRecorder, module: nn.Module) -> None:
        """Pop a module that ends, and the modules inside of it that an exception left on the stack."""
        for index, each in enumerate(self.running):
            if each.module is module and each.recorder is recorder:
                del self.running[index:]
                break
        if not self.running:
            self._masks.clear()

    @contextmanager
    def repeating(self, running: list[RunningModule]) -> Iterator[None]:
        """Let `running` be the running modules within the context, in which a part of a forward pass is repeated."""
        before = self.running, self.is_repeating
        self.running, self.is_repeating = running[:], True
        try:
            yield
        finally:
            self.running, self.is_repeating = before

    @contextmanager
    def paused(self, reason: str) -> Iterator[None]:
        """Accelerate no calls within the context, in which headwise computes one attention call. Report `reason`."""
        if self.is_accelerated:
            self.record(reason)
        before, self.running = self.running, []
        try:
            yield
        finally:
            self.running = before

    def record(self, reason: str | None) -> None:
        """Report an attention call to the recorders of the running modules, for the innermost module of each. A
        repeated call is not counted again.
        """
        if self.is_repeating:
            return
        recorders: set[int] = set()
        for module in reversed(self.running):
            if id(module.recorder) not in recorders:
                recorders.add(id(module.recorder))
                module.recorder.record(module.path, reason)

    def ranges_of(self, mask: Tensor, dtype: torch.dtype | None) -> RunLengths:
        """Return a mask, cast to `dtype` if it is additive, as ranges of keys. The result is computed once for a mask
        that several layers receive.
        """
        for read in self._masks:
            if read.is_of(mask, dtype):
                return read.result
        read = _ReadMask(mask.detach(), dtype, run_lengths)
        self._masks = [*self._masks[1 - MOST_MASKS :], read]
        return read.result


class _ReadMask:
    """A mask with its ranges. The mask is stored, so that its memory cannot become that of another one.

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
        """Return True if the result is that of `mask`: the same memory, not changed since. Torch does not count the
        changes of tensors made in inference mode, so their values are compared.
        """
        return _key(mask, dtype) == self._key and (self._copy is None or torch.equal(mask, self._copy))


def _key(mask: Tensor, dtype: torch.dtype | None) -> tuple[object, ...]:
    """Return what identifies the values of a mask: its memory, layout and number of changes."""
    version = None if mask.is_inference() else mask._version
    return (mask.data_ptr(), mask.dtype, mask.shape, mask.stride(), version, dtype)


accelerated_modules = AcceleratedModules()
"""The running modules of accelerated models; each thread has its own."""
