"""Checks of the statistics of `hw.watch` on a GPU: a small decoder in plain torch, against the same on the CPU in
float64.

The error of each statistic may be at most twice that of the CPU in the same dtype. That error counts as at least 32
roundings of the largest value in float32, and one in half precision.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import headwise as hw
from benchmarks.gpu.checks import Check, CheckError
from benchmarks.gpu.decoder import decoder, tokens

ROUNDINGS = {torch.float32: 32, torch.bfloat16: 1, torch.float16: 1}

Statistics = dict[tuple[int, str], Tensor]
"""Values of the heads by layer and name of the statistic."""


def statistics_checks(device: str, *, length: int) -> Iterator[Check]:
    """Yield a check of the statistics in each dtype, for two widths of heads."""
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for width in (128, 256):
            name = f"statistics of hw.watch, {str(dtype).removeprefix('torch.')}, head_dim {width // 2}"
            yield Check(name, partial(check, device, dtype, width, length))


def check(device: str, dtype: torch.dtype, width: int, length: int) -> None:
    """Raise `CheckError` unless all statistics on the device are those of the CPU."""
    ours = statistics_of(device, dtype, width, length)
    theirs = statistics_of("cpu", dtype, width, length)
    exact = statistics_of("cpu", torch.float64, width, length)
    if ours.keys() != exact.keys():
        raise CheckError(f"the statistics {sorted(map(str, ours.keys() ^ exact.keys()))} are on one device only")
    for (layer, name), expected in exact.items():
        if not torch.equal(expected.isnan(), ours[layer, name].isnan()):
            raise CheckError(f"{name} of layer {layer} is undefined for other heads")
        least = ROUNDINGS[dtype] * torch.finfo(dtype).eps * float(expected.nan_to_num().abs().max())
        error = float((ours[layer, name] - expected).nan_to_num().abs().max())
        allowed = 2 * max(least, float((theirs[layer, name] - expected).nan_to_num().abs().max()))
        if not error <= allowed:
            raise CheckError(f"{name} of layer {layer}: an error of {error:.2g}, allowed is {allowed:.2g}")


def statistics_of(device: str, dtype: torch.dtype, width: int, length: int) -> Statistics:
    """Return all statistics of a decoder with two layers of two heads, in float64 on the CPU."""
    model = decoder(width, 2, 2, device, dtype)
    with torch.no_grad(), hw.watch(model) as heads:
        model(tokens(length, device, batch=2))
    return {
        (layer, name): statistic.value.double().cpu()
        for layer, record in enumerate(heads.records)
        for name, statistic in record.statistics.items()
    }
