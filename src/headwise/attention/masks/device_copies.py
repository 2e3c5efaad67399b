"""Copies of the numbers that a mask stores, on the devices of the calls that use the mask."""

from typing import Any

import torch
from torch import Tensor

from headwise.shapes import Int


class DeviceCopies:
    """One tensor of a mask, and its copies on other devices. Each copy is made once, in the first call that needs it: a
    copy from the CPU to a GPU in every call would make every call wait.

    Args:
        tensor: numbers of the mask, which must not change afterwards.
    """

    def __init__(self, tensor: Int[Tensor, "..."]) -> None:
        self._tensor = tensor
        self._copies: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Int[Tensor, "..."]:
        """Return the tensor, or its copy on another device. While compiling or tracing, a copy would have no values, so
        that this method must not be called.
        """
        if self._tensor.device == device:
            return self._tensor
        if device not in self._copies:
            with torch.inference_mode(False):  # later calls may need gradients
                self._copies[device] = self._tensor.to(device, non_blocking=True)
        return self._copies[device]

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a copy or a pickle, without the copies, whose devices may not exist there."""
        return {"_tensor": self._tensor, "_copies": {}}
