"""Hashes of weights, computed where the weights are: no weight is copied from an accelerator."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.shapes import Int

BLOCK = 2**16
"""Number of integers that one hash stands for. A block and its factors fit into the cache of a processor."""

INTEGERS = {1: torch.int8, 2: torch.int16}
"""Integers with as many bytes as one number. Larger numbers are read as several integers of 32 bits."""


def hashed_state(module: nn.Module) -> Iterator[Any]:
    """Yield each entry of a module's `state_dict`: its name, and its dtype, its shape and the hashes of its values, or
    None for an entry that is not a tensor.

    Raises:
        InputError: the values of an entry are not in memory.
    """
    factors: dict[torch.device, Tensor] = {}
    for name, value in module.state_dict().items():
        yield name
        if not isinstance(value, Tensor):
            yield None
            continue
        if value.is_meta:
            got, remedy = f"{name} on the device meta", "load the model without offloading"
            raise InputError("model", expected="weights in memory", got=got, remedy=remedy)
        if value.device not in factors:
            factors[value.device] = _odd_numbers().to(value.device)
        yield value.dtype, tuple(value.shape)
        yield block_hashes(value, factors[value.device])


def block_hashes(value: Tensor, factors: Int[Tensor, "block"]) -> Int[Tensor, "blocks"]:
    """Return a hash of each block of a tensor's bits: the sum of the block's integers, each multiplied by a random odd
    number, modulo 2**64. A change of one integer always changes the hash; changes of several do so with a
    probability of at least 1 - 2**-32 (multilinear hashing: Carter and Wegman, Universal Classes of Hash Functions,
    1979).
    """
    if value.is_complex():
        value = torch.view_as_real(value)
    bits = value.detach().contiguous().flatten()
    bits = bits.view(INTEGERS.get(bits.element_size(), torch.int32))
    sums = [(block.long() * factors[: len(block)]).sum() for block in torch.split(bits, BLOCK)]
    return torch.stack(sums)


def _odd_numbers() -> Int[Tensor, "block"]:
    """Return `BLOCK` random odd numbers, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (BLOCK,), generator=generator) | 1
