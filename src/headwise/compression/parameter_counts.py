"""Numbers of parameters and bytes of models, in which shared memory counts once."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def memory_of(tensor: Tensor) -> int:
    """Return a number that is equal for tensors that share memory: the address of the memory or, on the device meta,
    that of the tensor.
    """
    return tensor.untyped_storage().data_ptr() or id(tensor)


def count_parameters(model: nn.Module, paths: Sequence[str] = ("",)) -> int:
    """Return the number of parameters in modules of a model, by default in all. Numbers that several parameters share
    count once, also if only their memory is shared.
    """
    return sum(count for count, _ in _counts(model, paths))


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters of a model. Shared memory counts once."""
    return sum(count * size for count, size in _counts(model, ("",)))


def parameters_before_and_after(dense: nn.Module, smaller: nn.Module) -> dict[str, int]:
    """Return the numbers of parameters of a model before and after it was made smaller."""
    return {"parameters_before": count_parameters(dense), "parameters_after": count_parameters(smaller)}


def _counts(model: nn.Module, paths: Sequence[str]) -> list[tuple[int, int]]:
    """Return the number of distinct numbers, and the bytes of one, in each storage with parameters of some modules."""
    stored: dict[tuple[int, int], dict[int, nn.Parameter]] = {}
    for path in paths:
        for parameter in model.get_submodule(path).parameters():
            stored.setdefault((memory_of(parameter), parameter.element_size()), {})[id(parameter)] = parameter
    counts = []
    for (_, size), shared in stored.items():
        first, *others = shared.values()
        count = first.numel()
        if others or not first.is_contiguous():
            is_used = torch.zeros(first.untyped_storage().nbytes() // size, dtype=torch.bool)
            for each in (first, *others):
                is_used.as_strided(each.shape, each.stride(), each.storage_offset()).fill_(True)
            count = int(is_used.sum())
        counts.append((count, size))
    return counts
