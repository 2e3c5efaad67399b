"""Numbers as compact text: quantised to integers, compressed with gzip, and written in base64."""

import gzip
import math
import sys
from base64 import b64encode

import torch
from torch import Tensor

from headwise.shapes import Float


def angular(weights: Float[Tensor, "*shape"], dtype: torch.dtype, *, down: bool = False) -> Tensor:
    """Return attention weights as integers of type `dtype`, uint8 or uint16: arcsin(sqrt(weight)) in units of a right
    angle divided by the type's largest number Q.

    The weight is sin(q / Q * pi / 2) squared. The rounding error is at most pi / 4 / Q, for a weight of 1/2, and
    vanishes near 0 and 1, which are exact (variance-stabilising transform of a share). If `down`, weights are rounded
    down, so that sums of them are lower bounds; the error is then at most twice as large.
    """
    largest = torch.iinfo(dtype).max
    units = weights.double().clamp(0, 1).sqrt().asin() * (largest * 2 / math.pi)
    # Without the small number, rounding in the arcsine would turn a weight of 1 into the next smaller one.
    return (units + 1e-9).floor().to(dtype) if down else units.round().to(dtype)


def from_angular(integers: Tensor) -> Float[Tensor, "*shape"]:
    """Return the weights that `angular` wrote as integers, up to rounding."""
    largest = torch.iinfo(integers.dtype).max
    return (integers.double() * (math.pi / 2 / largest)).sin().square()


def as_bytes(*tensors: Tensor) -> bytes:
    """Return the elements of tensors one after the other as little-endian bytes."""
    parts = (tensor.detach().cpu().contiguous().numpy() for tensor in tensors)
    return b"".join((part if sys.byteorder == "little" else part.byteswap()).tobytes() for part in parts)


def compressed(data: bytes) -> str:
    """Return bytes compressed with gzip, as base64. Equal bytes give equal text."""
    return b64encode(gzip.compress(data, compresslevel=9, mtime=0)).decode("ascii")
