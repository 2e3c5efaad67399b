"""Attention alone in every regime: `hw.attend` with its own choice of backend, against torch's SDPA engines and
FlexAttention.

Every contestant that is timed is first compared with float64 in some rows. The error of headwise, and of each gradient,
may be at most twice that of plain attention in bfloat16; a contestant with another result is left out.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import headwise as hw
from benchmarks.gpu.attend_checks import Errors, distance
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.checks import CheckError
from benchmarks.gpu.regimes import (
    allowed,
    attention_regimes,
    checked_blocks,
    document_ids,
    mask_of,
    plain_rows,
    window_of,
)
from benchmarks.gpu.timing import rounds_of, rows_against, timer
from benchmarks.measure import Row, show
from benchmarks.regime import Regime

ENGINES = {
    "SDPA, flash": SDPBackend.FLASH_ATTENTION,
    "SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA, efficient": SDPBackend.EFFICIENT_ATTENTION,
}
OURS, FLEX = "ours", "FlexAttention"
LARGEST_MASK = 2**30
"""Largest number of entries of a boolean mask that is passed to SDPA; its engines are left out above it."""

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def time_attention(
    device: str, budget: Budget, share: float, *, tiny: bool, only: str
) -> tuple[list[Row], dict[str, str]]:
    """Check and time every regime until a share of the time is used. Return a row for each contestant of a regime, and
    the errors of headwise by regime.
    """
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for regime in attention_regimes(tiny=tiny):
        name = f"attention: {regime.name}"
        if only not in name or not budget.allows(name, share):
            continue
        try:
            regime_rows = compare(regime, device, budget)
        except CheckError as error:
            failed[name] = str(error)
            print(f"FAILED  {name}: {error}", flush=True)
            continue
        for row in regime_rows:
            show(row)
        rows += regime_rows
    return rows, failed


def compare(regime: Regime, device: str, budget: Budget) -> list[Row]:
    """Check and time the contestants of a regime. Return a row for each correct one but headwise; note others as left
    out. Raises `CheckError` if the result of headwise is wrong.
    """
    torch.manual_seed(0)
    if device == "cuda":
        torch.cuda.empty_cache()
    shape = (regime.batch, regime.heads, regime.length, regime.head_dim)
    q, k, v, upstream = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    leaves = [tensor.requires_grad_(regime.training) for tensor in (q, k, v)]
    is_checked = torch.zeros(regime.length, 1, dtype=torch.bool, device=device)
    for block in checked_blocks(regime):
        is_checked[block.start : block.stop] = True

    def run(attention: Attention, upstream: Tensor) -> list[Tensor]:
        with torch.set_grad_enabled(regime.training):
            out = attention(*leaves)
            return [out, *(torch.autograd.grad(out, leaves, upstream) if regime.training else [])]

    exact, theirs = (plain_rows(regime, q, k, v, upstream, dtype) for dtype in (torch.float64, torch.bfloat16))
    calls = {}
    for name, attention in contestants(regime, device).items():
        try:
            results = named(regime, run(attention, upstream * is_checked))
            require_small_errors(results, theirs, exact)
        except Exception as error:  # a kernel that does not support a device or mask is left out by name
            reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
            if name == OURS:
                raise CheckError(reason) from error
            budget.left_out[f"{name}, {regime.name}"] = reason
            continue
        calls[name] = timer(device)(lambda attention=attention: run(attention, upstream))
    if OURS not in calls:
        return []
    backend = hw.explain(*(leaf.detach() for leaf in leaves), mask=mask_of(regime)).backend
    return rows_against(regime, rounds_of(calls), OURS, note=f"(ours: {backend})")


def named(regime: Regime, results: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the checked rows of the first sequence's output, and the gradients of that sequence, by name."""
    out, *gradients = (tensor.detach()[:1] for tensor in results)
    rows = torch.cat([out[:, :, block.start : block.stop] for block in checked_blocks(regime)], 2)
    return {"out": rows, **dict(zip("qkv", gradients, strict=bool(gradients)))}


def require_small_errors(
    results: dict[str, Tensor], theirs: dict[str, Tensor], exact: dict[str, Tensor], most: float = 2.0
) -> None:
    """Raise `CheckError` unless the error of each result is at most `most` times that of plain attention."""
    for name, result in results.items():
        size = distance(torch.zeros_like(exact[name]), exact[name])
        least = Errors(torch.finfo(result.dtype).eps / 4 * size.mean, 0.0)
        error, allowed_error = distance(result, exact[name]), distance(theirs[name], exact[name]).or_larger(least)
        if not error.mean <= most * allowed_error.mean:
            figures = f"{error.mean:.2g}, that of plain attention is {allowed_error.mean:.2g}"
            raise CheckError(f"{name}: an error of {figures}")


def contestants(regime: Regime, device: str) -> dict[str, Attention]:
    """Return every implementation that may compute the regime, by name; each maps q, k, v to the heads' output."""
    mask = mask_of(regime)
    by_name: dict[str, Attention] = {OURS: lambda q, k, v: hw.attend(q, k, v, mask=mask)}
    is_causal, matrix = regime.mask == "causal", None
    heads = regime.heads if regime.mask == "heads" else 1
    if regime.mask not in ("causal", "dense"):
        if heads * regime.length**2 <= LARGEST_MASK:
            matrix = allowed(regime, device)
        else:
            return by_name | {FLEX: flex(regime, device)}
    for name, engine in (ENGINES if device == "cuda" else {"SDPA": None}).items():
        by_name[name] = lambda q, k, v, engine=engine: _sdpa(q, k, v, matrix, is_causal, engine)
    return by_name | {FLEX: flex(regime, device)}


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, engine: SDPBackend | None) -> Tensor:
    """Return the output of torch's SDPA, by one engine; None for any."""
    with nullcontext() if engine is None else sdpa_kernel(engine):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)


@lru_cache(maxsize=64)
def compiled(function: Callable[..., Any], *kind: object, dynamic: bool | None = None) -> Callable[..., Any]:
    """Return a function compiled for one kind of regime of any length, which the other arguments describe."""
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(function, dynamic=dynamic)


def flex(regime: Regime, device: str) -> Attention:
    """Return FlexAttention with the block mask of the regime. Mask and kernels are made in the first call. On a CPU,
    where only the code is tested, it is not compiled.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    wide, narrow = window_of(regime)
    half, ids = regime.heads // 2, document_ids(regime.length).to(device)
    rules = {
        "causal": lambda b, h, i, j: j <= i,
        "documents": lambda b, h, i, j: (j <= i) & (ids[i] == ids[j]),
        "window": lambda b, h, i, j: (j <= i) & (i - j < wide),
        "heads": lambda b, h, i, j: (j <= i) & ((i - j < narrow) | (h >= half)),
    }
    run, make = flex_attention, create_block_mask
    if device == "cuda":
        run = compiled(flex_attention, regime.mask, regime.heads, regime.training, dynamic=True)
        make = compiled(create_block_mask)  # otherwise it makes the whole matrix
    made: list[Any] = []

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not made:
            heads = regime.heads if regime.mask == "heads" else None
            sizes = (None, heads, regime.length, regime.length)
            made.append(make(rules[regime.mask], *sizes, device=device) if regime.mask in rules else None)
        return run(q, k, v, block_mask=made[0])

    return attention
