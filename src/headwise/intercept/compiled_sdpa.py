"""Calls of torch's `scaled_dot_product_attention` in accelerated models that `torch.compile` compiles.

The compiler reads sizes, dtypes and options, but not the numbers of a mask. So it records native attention for a call
without a mask. For one with a mask, it records an operator, which reads the mask at each call.
"""

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from headwise.attention.autocast import AUTOCAST_DTYPES, autocast_dtype
from headwise.attention.backends.native import backend as native
from headwise.attention.backends.native import operators
from headwise.attention.backends.native.mask_tensors import mask_ranges
from headwise.attention.masks.factories import causal
from headwise.checks import is_transformed
from headwise.intercept.accelerated_sdpa import (
    SDPACall,
    computed_by_kernels,
    laid_out_like,
    problem_of,
    why_not_supported,
)
from headwise.intercept.patches import SDPA, call_replaced


class CompiledModules(threading.local):
    """Counter of the accelerated modules (their attention is computed by headwise's kernels) around the code that
    `torch.compile` reads now, or that runs with a break in the compiled graph, in one thread.

    Attributes:
        depths: number of these modules around the code that is read now, for each acceleration by its number.
    """

    def __init__(self) -> None:
        self.depths: dict[int, int] = {}

    def start(self, acceleration: int, is_model: bool) -> None:
        """Count a module that starts. Where it is the model itself, no other module runs: torch calls no hook after
        KeyboardInterrupt, which leaves modules that have ended.
        """
        self.depths[acceleration] = 1 + (0 if is_model else self.depths.get(acceleration, 0))

    def end(self, acceleration: int) -> None:
        """Count a module that has ended."""
        self.depths[acceleration] = max(self.depths.get(acceleration, 0) - 1, 0)


compiled_modules = CompiledModules()
"""The accelerated modules whose calls `torch.compile` is reading; each thread has its own."""


def compiled_sdpa(previous: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Code that `torch.compile` reads in place of torch's `scaled_dot_product_attention`. In accelerated modules it
    computes by the native kernels what these support and compute faster; other calls are those of `previous`, the
    replaced function.
    """
    is_accelerated = any(compiled_modules.depths.values()) and not (torch.compiler.is_exporting() or is_transformed())
    if previous is SDPA and is_accelerated:
        call = SDPACall.of(*args, **kwargs)
        dtype = autocast_dtype(call.query.device)
        if dtype is not None:
            call = call.cast(dtype)
            if call.attn_mask is not None and call.attn_mask.dtype in AUTOCAST_DTYPES:
                call = call._replace(attn_mask=call.attn_mask.to(dtype))
        if _is_for_kernels(call):
            if call.attn_mask is None:
                out = native.run(problem_of(call, causal() if call.is_causal else None)).out
                return laid_out_like(call.query, out)
            of_mask = call.attn_mask, call.scale, call.enable_gqa
            return laid_out_like(call.query, torch.ops.headwise.sdpa_with_mask(*call.tensors, *of_mask))
    result: Tensor = call_replaced(previous, *args, **kwargs)
    return result


def _is_for_kernels(call: SDPACall) -> bool:
    """Return True if the native kernels support a call and compute it faster, judged without reading the numbers of its
    mask. Calls with a mask that need a gradient are left to torch. So are causal calls in which the numbers of keys and
    queries differ.
    """
    mask = call.attn_mask
    if call.query.ndim != 4 or (mask is not None and (call.needs_gradient or type(mask) is not Tensor)):
        return False
    if call.is_causal and call.query.shape[2] != call.key.shape[2]:
        return False
    return why_not_supported(call) is None


@cache
def register_operator() -> torch.library.Library:
    """Register the torch operator that computes attention calls with a mask in compiled code. The operator exists as
    long as the returned library.
    """
    operators = torch.library.Library("headwise", "FRAGMENT")  # type: ignore[no-untyped-call]
    schema = "sdpa_with_mask(Tensor q, Tensor k, Tensor v, Tensor mask, float? scale, bool enable_gqa) -> Tensor"
    operators.define(schema)  # type: ignore[no-untyped-call]
    operators.impl("sdpa_with_mask", _sdpa_with_mask, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake("headwise::sdpa_with_mask", _empty_output)
    return operators


def _sdpa_with_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None, enable_gqa: bool) -> Tensor:
    """Return the output of a call by the native kernels, or by torch if the kernels cannot read the mask."""
    call = SDPACall(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
    ranges, reason = mask_ranges(call.mask_of_all_keys)
    if reason is not None:
        return _empty_output(q, k, v).copy_(SDPA(*call[:4], scale=scale, enable_gqa=enable_gqa))
    return computed_by_kernels(call, ranges)


def _empty_output(q: Tensor, _: Tensor, v: Tensor, *__: Any) -> Tensor:
    """Return the output of a call in the memory layout of the native kernels, without values."""
    return operators.empty_output(q, v)
