"""The operator of attention with statistics on a GPU: an engine of torch for the output, Triton for the statistics."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from headwise.attention.backend_choice import choose_fastest
from headwise.attention.backends.blockwise import operator
from headwise.attention.backends.gpu.statistics import weight_statistics
from headwise.attention.backends.native import library
from headwise.attention.backends.plain_statistics import RECEIVED_UNIT, StatisticsCall
from headwise.attention.masks.base import Mask
from headwise.attention.masks.kinds import Dense, InRanges
from headwise.attention.problem import Problem
from headwise.shapes import Float

_implementations: list[torch.library.Library] = []


@cache
def why_not_registered() -> str | None:
    """Register the operator for tensors on a GPU at the first call, and return None; or return the reason that it
    cannot be registered, in one sentence.
    """
    if library.load() is not None:
        reason: str | None = operator.why_not_registered()
        if reason is not None:
            return reason
    implementation = torch.library.Library("headwise", "IMPL")  # type: ignore[no-untyped-call]
    implementation.impl("attend_statistics", attend_statistics, "CUDA")  # type: ignore[no-untyped-call]
    _implementations.append(implementation)  # the implementation exists as long as it does
    return None


def attend_statistics(*arguments: Any) -> tuple[Tensor, ...]:
    """Return the results of the operator for the arguments of a `StatisticsCall`; see
    `plain_statistics.attend_statistics`.
    """
    call = StatisticsCall(*arguments)
    out = _output(call)
    lse, rows, received, seen_by = weight_statistics(call, out)
    return out, lse, rows, (received / RECEIVED_UNIT).long(), seen_by


def _output(call: StatisticsCall) -> Float[Tensor, "batch heads queries value_dim"]:
    """Return the output of a call from the fastest backend, with the heads of one position adjacent in memory."""
    masks: list[Mask] = [] if call.ranges is None else [InRanges(call.ranges)]
    masks += [] if call.dense is None else [Dense(call.dense)]
    scale = call.scale if call.head_scale is None else call.scale * call.head_scale
    problem = Problem.checked(
        call.q,
        call.k,
        call.v,
        mask=masks[0] & masks[1] if len(masks) == 2 else masks[0] if masks else None,
        bias=call.bias,
        scale=scale,
        softcap=call.softcap or None,
        sinks=call.sinks,
    )
    out = choose_fastest(problem).run(problem).out
    return out.transpose(1, 2).contiguous().transpose(1, 2)
