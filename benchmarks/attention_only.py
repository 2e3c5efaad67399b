"""Attention without the projections of a layer: `hw.attend`, the same with statistics, torch's
`scaled_dot_product_attention`, and compiled FlexAttention.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from benchmarks import oracle
from benchmarks.observed_call import MASKS, observed_call
from benchmarks.oracle import WrongError
from benchmarks.regime import Regime
from benchmarks.torch_peers import boolean_mask, flex_attention

ATTEND, OBSERVED, SDPA, FLEX = "attend", "attend with statistics", "SDPA", "compiled FlexAttention"


def attention(name: str, regime: Regime) -> tuple[Callable[[], list[Tensor]], list[Tensor]]:
    """Return a function that runs attention in a regime, and the list of its input tensors.

    The function returns the output and, if the regime trains, the gradients of q, k and v. `name` selects the
    implementation: `ATTEND` is `hw.attend` with the backend that headwise chooses, `OBSERVED` is the same with all
    statistics, `SDPA` is torch's `scaled_dot_product_attention`, and `FLEX` is torch's `flex_attention`, compiled. Only
    `ATTEND` and `SDPA` can train.
    """
    q, k, v, upstream = regime.attention_inputs()
    leaves = [tensor.requires_grad_(regime.training) for tensor in (q, k, v)]
    call = _call(name, regime)

    def run() -> list[Tensor]:
        out = call(*leaves)
        gradients = torch.autograd.grad(out, leaves, upstream) if regime.training else ()
        return [out.detach(), *gradients]

    return run, [*leaves, upstream]


def _call(name: str, regime: Regime) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the function from q, k and v to the output for an implementation of `attention`."""
    if name == ATTEND:
        return lambda q, k, v: hw.attend(q, k, v, mask=MASKS[regime.mask])
    if name == OBSERVED:
        observed = observed_call(regime)  # has the same inputs
        return lambda *_: observed()[0]
    if name == FLEX:
        return flex_attention(regime)
    mask, causal = boolean_mask(regime), regime.mask == "causal"
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


def check(name: str, regime: Regime) -> None:
    """Exit with a message if the output or a gradient of the named implementation is wrong, or has more than twice the
    error of torch's SDPA against float64.
    """
    results = [_by_token(attention(implementation, regime)[0]()) for implementation in (name, SDPA)]
    try:
        oracle.check(*results, exact(regime), regime)
    except WrongError as reason:
        raise SystemExit(f"{regime.name}, {name}, attention alone: {reason}") from reason


def check_peer(name: str, regime: Regime) -> None:
    """Raise `WrongError` if a result of the named implementation is wrong by more than rounding."""
    oracle.sane(_by_token(attention(name, regime)[0]()), exact(regime), regime)


def exact(regime: Regime) -> oracle.Results:
    """Return the output in float64, and the gradients of q, k and v if the regime trains, as `_by_token` does."""
    results = _exact_with_gradients(replace(regime, training=True))
    return results if regime.training else {"out": results["out"]}


@lru_cache(maxsize=1)
def _exact_with_gradients(regime: Regime) -> oracle.Results:
    """Return the float64 output and gradients. Cached, since forward and training of a regime follow each other."""
    q, k, v, upstream = regime.attention_inputs()
    return _by_token(oracle.attention(q, k, v, regime, upstream))


def _by_token(tensors: Sequence[Tensor]) -> oracle.Results:
    """Return output and gradients by name, each reshaped from `(batch, heads, length, head_dim)` to `(batch, length,
    heads * head_dim)`.
    """
    names = ("out", "q", "k", "v")[: len(tensors)]
    return {name: tensor.transpose(1, 2).flatten(2) for name, tensor in zip(names, tensors, strict=True)}
