"""Attention without the projections of a layer: `hw.attend` and torch's `scaled_dot_product_attention`."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from benchmarks import oracle
from benchmarks.oracle import WrongError
from benchmarks.regime import Regime
from benchmarks.torch_peers import boolean_mask

ATTEND, BLOCKWISE, SDPA = "attend", "blockwise", "SDPA"


def attention(name: str, regime: Regime) -> tuple[Callable[[], list[Tensor]], list[Tensor]]:
    """Return a function that runs attention in a regime, and the list of its input tensors.

    The function returns the output and, if the regime trains, the gradients of q, k and v. `name` selects the
    implementation: `ATTEND` is `hw.attend` with the backend that headwise chooses, `BLOCKWISE` is its blockwise
    backend, and `SDPA` is torch's `scaled_dot_product_attention`.
    """
    torch.manual_seed(0)
    shape = (regime.batch, regime.heads, regime.length, regime.head_dim)
    q, k, v, upstream = (torch.randn(shape).to(regime.torch_dtype) for _ in range(4))
    leaves = [tensor.requires_grad_(regime.training) for tensor in (q, k, v)]
    ours_mask = {"causal": hw.causal(), "window": hw.window(256)}.get(regime.mask)
    sdpa_mask, causal = boolean_mask(regime), regime.mask == "causal"

    def run() -> list[Tensor]:
        if name == SDPA:
            out = F.scaled_dot_product_attention(*leaves, attn_mask=sdpa_mask, is_causal=causal)
        else:
            out = hw.attend(*leaves, mask=ours_mask, backend=None if name == ATTEND else name)
        gradients = torch.autograd.grad(out, leaves, upstream) if regime.training else ()
        return [out.detach(), *gradients]

    return run, [*leaves, upstream]


def check(name: str, regime: Regime) -> None:
    """Exit with a message if the output or a gradient of the named implementation is wrong, or has more than twice the
    error of torch's SDPA against float64.
    """
    results = []
    for implementation in (name, SDPA):
        run, (q, k, v, upstream) = attention(implementation, regime)
        results.append(_by_token(run()))
    exact = _by_token(oracle.attention(q, k, v, regime, upstream if regime.training else None))
    try:
        oracle.check(*results, exact, regime)
    except WrongError as reason:
        raise SystemExit(f"{regime.name}, {name}, attention alone: {reason}") from reason


def _by_token(tensors: Sequence[Tensor]) -> oracle.Results:
    """Return output and gradients by name, each reshaped from `(batch, heads, length, head_dim)` to `(batch, length,
    heads * head_dim)`.
    """
    names = ("out", "q", "k", "v")[: len(tensors)]
    return {name: tensor.transpose(1, 2).flatten(2) for name, tensor in zip(names, tensors, strict=True)}
