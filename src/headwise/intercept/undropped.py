"""Attention functions called a second time without dropout, to observe the weights before dropout."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headwise.errors import InputError

DROPOUT_NAMES = frozenset({"dropout", "dropout_", "alpha_dropout", "feature_dropout", "dropout1d", "dropout2d"})
"""Names of torch's dropout functions for attention weights."""


class _DropoutOff(TorchFunctionMode):
    """Torch function mode in which torch's dropout functions return their input unchanged."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a torch function and return its result; return the input of a dropout function."""
        kwargs = kwargs or {}
        if func is F.dropout or getattr(func, "__name__", "") in DROPOUT_NAMES:
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)


def random_state(device: torch.device) -> Tensor:
    """Return the state of the random number generator that torch uses on `device`."""
    if device.type in ("cpu", "meta"):
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def call_without_dropout(
    attention: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, path: str
) -> Any:
    """Call an attention function with torch's dropout turned off and without gradients, and return its result. The
    state of torch's random number generators is the same afterwards.

    Args:
        attention: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        device: the device that it computes on.
        path: path of the module that attends, for the error message.

    Raises:
        InputError: the function drew random numbers in another way than by torch's dropout.
    """
    state = random_state(device)
    with random_state_kept(device), torch.no_grad(), _DropoutOff():
        result = attention(*args, **kwargs)
        is_random = not torch.equal(state, random_state(device))
    if is_random:
        got = f"random numbers in {path}"
        raise InputError("model", expected="no dropout but torch's own", got=got, remedy="call model.eval()")
    return result


def random_state_kept(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that restores the state of torch's random number generators for the CPU and `device`."""
    if device.type in ("cpu", "meta"):
        return torch.random.fork_rng(devices=[])
    index = torch.get_device_module(device).current_device() if device.index is None else device.index
    return torch.random.fork_rng(devices=[index], device_type=device.type)
