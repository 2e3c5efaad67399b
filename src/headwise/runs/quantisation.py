"""Recognition of weights that were quantised to few bits, also where they are plain numbers again."""

from typing import Any

import torch
from torch import Tensor, nn

from headwise.checks import has_own_class, has_values
from headwise.shapes import Bool, Float

BLOCK = 32
"""Number of consecutive weights of a matrix that are compared. Quantisation formats share a scale among this number of
weights, or a multiple of it.
"""

SAMPLED_ROWS = 16
"""Number of rows, and of columns, of each matrix that are compared."""

MOST_BITS = 4
"""Largest number of bits that is recognised: 32 weights with 5 bits can all be different."""

FORMATS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
"""Formats of floating-point numbers from the coarsest to the finest, and integers of the same size."""


def quantisation_of(model: nn.Module) -> str | None:
    """Return a short description of how the weights of a model are or were quantised, or None if there is no sign of
    it. One sign is a quantisation method in the model's configuration. The other is that blocks of weights have so few
    different values that they must come from few bits.

    Weights of b bits have at most 2^b different values in each block of 32. Weights that were not quantised practically
    always have more, unless their format has few numbers in their range, such as bfloat16 near 1; such weights are not
    reported. If a parameter has three axes, such as the weights of experts, each matrix of its last two axes is
    examined.
    """
    stated: Any = getattr(getattr(model, "config", None), "quantization_config", None)
    if stated is not None:
        method = stated.get("quant_method") if isinstance(stated, dict) else getattr(stated, "quant_method", None)
        name = "a method without a name" if method is None else getattr(method, "value", method)
        return f"quantised by {name}"
    weights = [weight for weight in model.parameters() if weight.ndim in (2, 3) and min(weight.shape[-2:]) >= BLOCK]
    if not all(has_own_class(weight) and has_values(weight) for weight in weights):
        return None
    by_bits: dict[int, int] = {}
    for weight in weights:
        for matrix in weight.detach().reshape(-1, *weight.shape[-2:]):
            if (bits := _bits(matrix)) is not None:
                by_bits[bits] = by_bits.get(bits, 0) + matrix.numel()
    if not by_bits:
        return None
    share = sum(by_bits.values()) / sum(weight.numel() for weight in weights)
    return f"dequantised from {max(by_bits, key=by_bits.__getitem__)} bits in blocks ({share:.0%} of the matrices)"


def _bits(weight: Float[Tensor, "rows columns"]) -> int | None:
    """Return the number of bits from which a matrix of weights was dequantised: the smallest number that can encode the
    different values in each block of 32 weights, along rows or along columns. Return None if more than `MOST_BITS` are
    needed, or if the few values have another cause: zeros, equal weights, copied heads, or a coarse floating-point
    format.
    """
    for part in (weight[:SAMPLED_ROWS], weight[:, :SAMPLED_ROWS].T):
        of_lines = part[:, : part.shape[1] // BLOCK * BLOCK].cpu().reshape(len(part), -1, BLOCK)
        if _bits_of_blocks(of_lines) is None:
            continue  # nearly all matrices, which are not searched for copies
        of_lines = of_lines[:, ~_have_copies(of_lines)]
        if (bits := _bits_of_blocks(of_lines)) is not None and _have_room(of_lines):
            return bits
    return None


def _have_copies(of_lines: Float[Tensor, "lines blocks size"]) -> Bool[Tensor, " blocks"]:
    """Return True for each block of columns that contains at most 16 different columns, as after heads were copied. Few
    different values in such a block are no sign of quantisation. `of_lines` has the sampled rows (or columns) of a
    matrix, each cut into blocks.
    """
    flat = of_lines.float().flatten(1)
    columns: Tensor = torch.unique(flat, dim=1, return_inverse=True)[1]
    columns = columns.view(-1, BLOCK).sort(1).values
    distinct: Tensor = 1 + (columns.diff(dim=1) != 0).sum(1)
    return distinct.le(2**MOST_BITS)


def _bits_of_blocks(of_lines: Float[Tensor, "lines blocks size"]) -> int | None:
    """Return the smallest number of bits that can encode the different values in every block of weights. Return None if
    it exceeds `MOST_BITS`, if each block has only one value, or if all blocks are mostly 0.
    """
    blocks = _dense_blocks(of_lines)
    distinct = 1 + int((blocks.diff(dim=1) != 0).sum(1).max()) if len(blocks) else 0
    return next((bits for bits in range(1, MOST_BITS + 1) if 1 < distinct <= 2**bits), None)


def _dense_blocks(of_lines: Float[Tensor, "lines blocks size"]) -> Float[Tensor, "dense size"]:
    """Return the sorted values of each block of weights. Blocks that are mostly 0 are left out: they have few different
    values even if the weights were not quantised.
    """
    blocks = of_lines.flatten(0, 1).sort(1).values
    return blocks[(blocks == 0).sum(1) <= BLOCK // 2]


def _have_room(of_lines: Float[Tensor, "lines blocks size"]) -> bool:
    """Return True if the floating-point format of the values is so fine that few different values must come from
    quantisation. The condition is that, in most blocks, the format has at least as many numbers between the block's
    quartiles as the block has weights. Rounding to the format alone then leaves more than 2^4 different values in all
    but 1 of 10^5 random blocks.
    """
    blocks = _dense_blocks(of_lines)
    formats = (each for each in FORMATS if bool((blocks.to(each).to(blocks.dtype) == blocks).all()))
    numbers = blocks.to(next(formats, torch.float32)).contiguous()
    bits = numbers.view(FORMATS[numbers.dtype]).long()
    sign_bit = 1 << (8 * numbers.element_size() - 1)
    order = torch.where(bits < 0, -(bits + sign_bit), bits)  # neighbouring numbers have neighbouring places
    room = order[:, -BLOCK // 4 - 1] - order[:, BLOCK // 4] + 1
    return bool((room >= BLOCK).double().mean() > 0.5)
