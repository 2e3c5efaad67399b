"""Autocast: inputs are cast as torch's own attention casts them, and scores are kept out of it."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

AUTOCAST_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32))
"""The dtypes that autocast casts between; it leaves float64 alone."""


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast casts to on `device`, None where it is off or does not exist."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast off: inside a backend it would take the scores to half precision."""
    if autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
