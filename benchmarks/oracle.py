"""The attention layer by definition in float64, computed in blocks of rows, and the error of other results against it.

Nothing here imports headwise. The accepted error of headwise, in the output and in every gradient, is twice that of a
block around torch's `scaled_dot_product_attention` in the same dtype.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from benchmarks.regime import Regime

Results = dict[str, Tensor]
"""The output, and after training the gradients, by name: "out", "x", "qkv", "out_proj", "qkv_bias" and "out_bias"."""

ROWS = 512
SANE = {"float32": 1e-2, "bfloat16": 1e-1}
"""Largest relative error of a correct result, by dtype. With a larger error, something else was computed."""
YARDSTICK = "SDPA block"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    regime: Regime,
    upstream: Tensor | None = None,
    starts: Iterable[int] | None = None,
) -> list[Tensor]:
    """Return the heads' output in float64, `(batch, heads, length, head_dim)`; if the gradient of the output is given,
    also the gradients of q, k and v.

    Args:
        q: `(batch, heads, length, head_dim)`.
        k: `(batch, kv_heads, length, head_dim)`.
        v: `(batch, kv_heads, length, head_dim)`.
        regime: defines the allowed keys of each query.
        upstream: the gradient of the output.
        starts: first rows of the blocks of `ROWS` query rows to compute, by default all. In other rows the output and
            its gradient are treated as 0.
    """
    q, k, v = (tensor.detach().double() for tensor in (q, k, v))
    out, gradients = torch.zeros_like(q), [torch.zeros_like(tensor) for tensor in (q, k, v)]
    for start in range(0, q.shape[2], ROWS) if starts is None else starts:
        rows = slice(start, min(start + ROWS, q.shape[2]))
        allowed = regime.allowed(range(rows.start, rows.stop))
        keys = _key_span(allowed, k.shape[2])
        parts = [tensor[:, :, span].requires_grad_() for tensor, span in ((q, rows), (k, keys), (v, keys))]
        with torch.set_grad_enabled(upstream is not None):
            block_output = _block(*parts, None if allowed is None else allowed[..., keys])
        out[:, :, rows] = block_output.detach()
        if upstream is not None:
            block_gradients = torch.autograd.grad(block_output, parts, upstream[:, :, rows].double())
            for total, gradient, span in zip(gradients, block_gradients, (rows, keys, keys), strict=True):
                total[:, :, span] += gradient
    return [out, *(gradients if upstream is not None else [])]


def _key_span(allowed: Tensor | None, length: int) -> slice:
    """Return the slice from the first to the last key that any row of a block attends to. Keys outside of it have
    weight 0.
    """
    if allowed is None:
        return slice(0, length)
    seen = allowed.flatten(0, 2).any(0).nonzero()
    return slice(int(seen.min()), int(seen.max()) + 1)


def _block(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
    """Return softmax(q k^T / sqrt(head_dim) + mask) v, the heads' output for a block of query rows."""
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return torch.softmax(scores, -1) @ v


def rotate(x: Tensor, theta: float = 10_000.0) -> Tensor:
    """Apply rotary position embeddings (Su et al. 2021), in which features i and i + head_dim / 2 form a pair; x is
    `(batch, heads, length, head_dim)`.
    """
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * theta ** -(torch.arange(half).double() / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@lru_cache(maxsize=3)
def _with_gradients(regime: Regime) -> Results:
    """Return the float64 output and all gradients of a regime's layer. Cached for the last three regimes."""
    data = regime.data()
    inputs = {"x": data.x, **data.weights.named()}
    named = {name: tensor.double().requires_grad_() for name, tensor in inputs.items()}
    projected = named["x"] @ named["qkv"].T + named.get("qkv_bias", 0.0)
    q, k, v = (part.unflatten(-1, (-1, regime.head_dim)).transpose(1, 2) for part in projected.split(regime.widths, -1))
    if regime.rotary:
        q, k = rotate(q), rotate(k)
    upstream = data.upstream.double()
    heads_upstream = (upstream @ named["out_proj"].detach()).unflatten(-1, (regime.heads, -1)).transpose(1, 2)
    heads, *gradients = attention(q, k, v, regime, heads_upstream)
    merged = heads.transpose(1, 2).flatten(2).requires_grad_()
    out = merged @ named["out_proj"].T + named.get("out_bias", 0.0)
    output_parameters = {name: tensor for name, tensor in named.items() if name.startswith("out")}
    input_parameters = {name: tensor for name, tensor in named.items() if name not in output_parameters}
    gradients_by_name = dict(
        zip(output_parameters, torch.autograd.grad(out, list(output_parameters.values()), upstream), strict=True)
    )
    gradients_by_name |= dict(
        zip(input_parameters, torch.autograd.grad([q, k, v], list(input_parameters.values()), gradients), strict=True)
    )
    return {"out": out.detach(), **gradients_by_name}


def layer(regime: Regime) -> Results:
    """Return the float64 output of a regime's layer, and all gradients if the regime trains."""
    results = _with_gradients(replace(regime, training=True))
    return results if regime.training else {"out": results["out"]}


class WrongError(Exception):
    """Error for a result that differs from the definition; the message is one sentence."""


def errors(results: Results, exact: Results, regime: Regime) -> dict[str, float]:
    """Return the error of each result, relative to the norm of the exact one, and as "worst row" the largest error of
    one output row, relative to the mean row. Padding is ignored; a result that is not finite has an infinite error.
    """
    if results.keys() != exact.keys():
        raise WrongError(f"returned {sorted(results)} where {sorted(exact)} is wanted")
    relative_errors = {}
    for name, expected in exact.items():
        if results[name].shape != expected.shape:
            raise WrongError(f"{name} is of shape {tuple(results[name].shape)}, not {tuple(expected.shape)}")
        counted = regime.real if name == "out" else slice(None)
        expected_values = expected[counted]
        difference = results[name].detach()[counted].double() - expected_values
        relative_errors[name] = _relative(difference.norm(), expected_values.norm())
        if name == "out":
            relative_errors["worst row"] = _relative(
                difference.norm(dim=-1).max(), expected_values.norm(dim=-1).square().mean().sqrt()
            )
    return relative_errors


def _relative(error: Tensor, size: Tensor) -> float:
    """Return error / size as a float; infinity if the error is not finite."""
    return float(error / size) if error.isfinite() else float("inf")


def sane(results: Results, exact: Results, regime: Regime) -> dict[str, float]:
    """Return the relative errors of results that are correct up to rounding. Raise `WrongError`, which names the
    largest error, if it exceeds `SANE`.
    """
    relative_errors = errors(results, exact, regime)
    name, worst = max(relative_errors.items(), key=lambda item: item[1])
    if not worst <= SANE[regime.dtype]:
        raise WrongError(f"{name} is off by {worst:.1e} of its size")
    return relative_errors


def check(ours: Results, yardstick: Results, exact: Results, regime: Regime) -> None:
    """Raise `WrongError` unless the results of headwise are correct, and each error is at most twice that of the
    yardstick, the block around SDPA.
    """
    our_errors, yardstick_errors = sane(ours, exact, regime), sane(yardstick, exact, regime)
    for name, error in our_errors.items():
        if name != "worst row" and not error <= 2 * yardstick_errors[name]:
            raise WrongError(
                f"{name} is off by {error:.1e} of its size, and the {YARDSTICK} by {yardstick_errors[name]:.1e}"
            )
