"""Models inside of the wrappers of compilation and data parallelism."""

from typing import Any

from torch import nn


def inner_model(model: Any) -> nn.Module:
    """Return the module that a compiled model, or one in DistributedDataParallel, contains."""
    inner: nn.Module = model
    while hasattr(model, "_orig_mod") or isinstance(model, nn.parallel.DistributedDataParallel):
        inner = model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return inner
