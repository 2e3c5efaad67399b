"""Numbers of parameters and bytes of models, in which shared memory counts once."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def memory_of(tensor: Tensor) -> int:
    """Return a number that is equal for tensors that share memory: the address of their storage. On the device meta,
    which has no memory, return the `id` of the tensor object.
    """
    return tensor.untyped_storage().data_ptr() or id(tensor)


def count_parameters(model: nn.Module, paths: Sequence[str] = ("",)) -> int:
    """Return the number of parameters of the modules at `paths` in a model, by default of the whole model. Elements in
    memory that several parameters share count once.
    """
    return sum(count for count, _ in _counts(model, paths))


def weight_bytes(model: nn.Module) -> int:
    """Return the number of bytes of all parameters of a model. Memory that several parameters share is counted once."""
    return sum(count * size for count, size in _counts(model, ("",)))


def parameters_before_and_after(dense: nn.Module, smaller: nn.Module) -> dict[str, int]:
    """Return a dictionary with the number of parameters of the dense model ("parameters_before") and of the smaller one
    ("parameters_after").
    """
    return {"parameters_before": count_parameters(dense), "parameters_after": count_parameters(smaller)}


def _counts(model: nn.Module, paths: Sequence[str]) -> list[tuple[int, int]]:
    """Return a pair of numbers for each memory storage that contains parameters of the modules at `paths`: how many of
    its elements these parameters use, and the bytes of one element. An element that several parameters share counts
    once.
    """
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
