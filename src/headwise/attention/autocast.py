"""Autocast: attention inputs are cast in the same way as by torch's own attention, and scores stay in float32."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

AUTOCAST_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32))
"""Dtypes that autocast casts; it leaves float64 unchanged."""


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that torch's autocast casts to on a device; None if autocast is off or not available for the
    device.
    """
    if not torch._C._is_any_autocast_enabled():
        return None
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context manager that turns autocast off on a device, so that a backend computes scores in float32 at
    least.
    """
    if autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
