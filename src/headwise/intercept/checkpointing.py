"""Interception of activation checkpointing, which repeats parts of a forward pass in the backward pass.

The repeated part must be the same computation as in the forward pass: with the same changes by interceptors, also if
their contexts have ended since. `torch.utils.checkpoint` calls the part again in two ways, which both are replaced by
subclasses here: `CheckpointFunction` if it is reentrant, and `_CheckpointFrame` if it is not.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame

from headwise.intercept.accelerated_sdpa import accelerated_modules, active_recorders
from headwise.intercept.module_call import must_trace
from headwise.intercept.session import current_session


class InterceptedCheckpointFunction(CheckpointFunction):
    """Replacement of torch's autograd function for reentrant activation checkpointing. When the checkpointed function
    is repeated in the backward pass, its attention calls are intercepted in the same way as in the forward pass.
    """

    @classmethod
    def apply(cls, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` in the forward pass, and prepare its repetition in the backward pass."""
        repeatable = _Repeatable(function, is_first_call_forward=True)
        return CheckpointFunction.apply(repeatable, *args)  # type: ignore[no-untyped-call]


class InterceptedCheckpointFrame(_CheckpointFrame):
    """Replacement of torch's data object for non-reentrant activation checkpointing. When the checkpointed function is
    repeated in the backward pass, its attention calls are intercepted in the same way as in the forward pass.
    """

    def __init__(self, recompute_fn: Callable[..., Any], *args: Any) -> None:
        super().__init__(_Repeatable(recompute_fn, is_first_call_forward=False), *args)


class _Repeatable:
    """Function that checkpointing calls again in the backward pass. The object stores the interceptors, running module
    calls and accelerated modules from when it was created, and restores them for the second call. It also stores the
    active accelerations, since the function may call an accelerated model that was not running yet.
    """

    def __init__(self, function: Callable[..., Any], is_first_call_forward: bool) -> None:
        self._function, self._is_forward = function, is_first_call_forward
        session = current_session()
        must_trace(session.module_calls)  # what is repeated is traced, with the origins of this call
        self._session, self._accelerated = session.snapshot(), accelerated_modules.running[:]
        self._recorders = active_recorders[:]

    def __call__(self, *args: Any) -> Any:
        """Call the function: in the forward pass as it is, and afterwards as a repetition."""
        if self._is_forward:
            self._is_forward = False
            return self._function(*args)
        with self._as_in_forward_pass():
            return self._function(*args)

    @contextmanager
    def _as_in_forward_pass(self) -> Iterator[None]:
        """Return a context in which interception has the state of the forward pass: the same hooks, patches and running
        module calls.
        """
        with ExitStack() as stack:
            for interception in self._session.current_interceptions:
                stack.enter_context(interception)
            for recorder in self._recorders:
                stack.enter_context(recorder.patches)
            stack.enter_context(accelerated_modules.repeating(self._accelerated, self._recorders))
            stack.enter_context(self._session.repeated())
            yield
