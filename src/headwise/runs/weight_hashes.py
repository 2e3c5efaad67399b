"""Hashes of weights, computed where the weights are: no weight is copied from an accelerator."""

import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from headwise.errors import InputError
from headwise.shapes import Int

BLOCK = 2**16
"""Number of integers that one hash stands for. A block and its factors fit into the cache of a processor."""

INTEGERS = {1: torch.int8, 2: torch.int16}
"""Integers with as many bytes as one number. Larger numbers are read as several integers of 32 bits."""


def hashed_state(module: nn.Module) -> Iterator[Any]:
    """Yield each entry of a module's `state_dict`: its name, and for each tensor in it the dtype, the shape and the
    hashes of its values, such as for the tensors in the packed weights of a quantised layer. Other values are pickled.

    Raises:
        InputError: the values of an entry are not in memory, or cannot be read.
    """
    factors: dict[torch.device, Tensor] = {}
    for name, entry in module.state_dict().items():
        yield name
        leaves, structure = pytree.tree_flatten(entry)
        yield str(structure)
        for value in leaves:
            if not isinstance(value, Tensor):
                yield _pickled(name, value)
                continue
            values = _plain(name, value)
            if values.device not in factors:
                factors[values.device] = _odd_numbers().to(values.device)
            yield value.dtype, tuple(value.shape)
            yield block_hashes(values, factors[values.device])


def _plain(name: str, value: Tensor) -> Tensor:
    """Return the numbers of an entry as a tensor that is dense, not quantised, and without a lazy conjugation."""
    if value.is_meta:
        got, remedy = f"{name} on the device meta", "load the model without offloading"
        raise InputError("model", expected="weights in memory", got=got, remedy=remedy)
    if value.is_nested:
        raise InputError("model", expected="weights of one shape", got=f"the nested tensor {name}")
    value = value.detach()
    value = value.dequantize() if value.is_quantized else value
    value = value if value.layout == torch.strided else value.to_dense()
    return value.resolve_conj().resolve_neg()


def _pickled(name: str, value: Any) -> bytes:
    """Return a value that is not a tensor as bytes."""
    try:
        return pickle.dumps(value)
    except Exception as error:
        expected = "values in state_dict() that can be pickled"
        raise InputError("model", expected=expected, got=f"{type(value).__name__} in {name}") from error


def block_hashes(value: Tensor, factors: Int[Tensor, "block"]) -> Int[Tensor, "blocks"]:
    """Return a hash of each block of a tensor's bits: the sum of the block's integers, each multiplied by a random odd
    number, modulo 2**64. A change of one integer always changes the hash; changes of several do so with a
    probability of at least 1 - 2**-32 (multilinear hashing: Carter and Wegman, Universal Classes of Hash Functions,
    1979).
    """
    if value.is_complex():
        value = torch.view_as_real(value)
    bits = value.contiguous().flatten()
    bits = bits.view(INTEGERS.get(bits.element_size(), torch.int32))
    sums = [(block.long() * factors[: len(block)]).sum() for block in torch.split(bits, BLOCK)]
    return torch.stack(sums)


def _odd_numbers() -> Int[Tensor, "block"]:
    """Return `BLOCK` random odd numbers, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (BLOCK,), generator=generator) | 1
