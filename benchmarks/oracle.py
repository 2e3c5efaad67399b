"""The layer by definition, in float64, some rows of the matrix at a time; and who is how far from it.

Nothing here imports headwise. It is the yardstick: ours may be at most twice as far from it as a block around torch's
`scaled_dot_product_attention` in the same dtype, in the output and in every gradient.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from benchmarks.regime import Regime

Results = dict[str, Tensor]
"""The output, and after training the gradients: "out", "x", "qkv", "out_proj" and the biases'."""

ROWS = 512
SANE = {"float32": 1e-2, "bfloat16": 1e-1}
"""Errors, relative to the size of what is computed, beyond which something else was computed."""
YARDSTICK = "SDPA block"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    regime: Regime,
    upstream: Tensor | None = None,
    starts: Iterable[int] | None = None,
) -> list[Tensor]:
    """The heads' output `(batch, heads, length, head_dim)`, and given its gradient those of q, k and v. In float64.

    Args:
        q: `(batch, heads, length, head_dim)`.
        k: `(batch, kv_heads, length, head_dim)`.
        v: the same.
        regime: says which keys are allowed.
        upstream: the gradient of the output.
        starts: first rows of the blocks of `ROWS` that are wanted, all unless given; elsewhere the output is 0, and
            taken to have gradient 0.
    """
    q, k, v = (tensor.detach().double() for tensor in (q, k, v))
    out, gradients = torch.zeros_like(q), [torch.zeros_like(tensor) for tensor in (q, k, v)]
    for start in range(0, q.shape[2], ROWS) if starts is None else starts:
        rows = slice(start, min(start + ROWS, q.shape[2]))
        allowed = regime.allowed(range(rows.start, rows.stop))
        keys = _seen(allowed, k.shape[2])
        parts = [tensor[:, :, span].requires_grad_() for tensor, span in ((q, rows), (k, keys), (v, keys))]
        with torch.set_grad_enabled(upstream is not None):
            here = _block(*parts, None if allowed is None else allowed[..., keys])
        out[:, :, rows] = here.detach()
        if upstream is not None:
            found = torch.autograd.grad(here, parts, upstream[:, :, rows].double())
            for total, gradient, span in zip(gradients, found, (rows, keys, keys), strict=True):
                total[:, :, span] += gradient
    return [out, *(gradients if upstream is not None else [])]


def _seen(allowed: Tensor | None, length: int) -> slice:
    """From the first key that a block of rows sees to the last: the others weigh nothing."""
    if allowed is None:
        return slice(0, length)
    seen = allowed.flatten(0, 2).any(0).nonzero()
    return slice(int(seen.min()), int(seen.max()) + 1)


def _block(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(head_dim) + mask) v."""
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return torch.softmax(scores, -1) @ v


def turned(x: Tensor, theta: float = 10_000.0) -> Tensor:
    """Rotary positions (Su et al. 2021), i and i + head_dim / 2 a pair; x `(batch, heads, length, head_dim)`."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * theta ** -(torch.arange(half).double() / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@lru_cache(maxsize=3)
def _with_gradients(regime: Regime) -> Results:
    data = regime.data()
    given = {"x": data.x, **data.weights.named()}
    named = {name: tensor.double().requires_grad_() for name, tensor in given.items()}
    projected = named["x"] @ named["qkv"].T + named.get("qkv_bias", 0.0)
    q, k, v = (part.unflatten(-1, (-1, regime.head_dim)).transpose(1, 2) for part in projected.split(regime.widths, -1))
    if regime.rotary:
        q, k = turned(q), turned(k)
    upstream = data.upstream.double()
    of_heads = (upstream @ named["out_proj"].detach()).unflatten(-1, (regime.heads, -1)).transpose(1, 2)
    heads, *gradients = attention(q, k, v, regime, of_heads)
    merged = heads.transpose(1, 2).flatten(2).requires_grad_()
    out = merged @ named["out_proj"].T + named.get("out_bias", 0.0)
    after = {name: tensor for name, tensor in named.items() if name.startswith("out")}
    before = {name: tensor for name, tensor in named.items() if name not in after}
    found = dict(zip(after, torch.autograd.grad(out, list(after.values()), upstream), strict=True))
    found |= dict(zip(before, torch.autograd.grad([q, k, v], list(before.values()), gradients), strict=True))
    return {"out": out.detach(), **found}


def layer(regime: Regime) -> Results:
    """What the layer of a regime gives: the output, and if it is trained every gradient."""
    everything = _with_gradients(replace(regime, training=True))
    return everything if regime.training else {"out": everything["out"]}


class WrongError(Exception):
    """Something computed something else; the message is one sentence."""


def errors(results: Results, exact: Results, regime: Regime) -> dict[str, float]:
    """Each result's distance from the oracle, relative to its size; and that of the worst row of the output.

    Padding is left out: what stands there is nobody's business. What is not a number is infinitely far off.
    """
    if results.keys() != exact.keys():
        raise WrongError(f"returned {sorted(results)} where {sorted(exact)} is wanted")
    found = {}
    for name, right in exact.items():
        if results[name].shape != right.shape:
            raise WrongError(f"{name} is of shape {tuple(results[name].shape)}, not {tuple(right.shape)}")
        where = regime.real if name == "out" else slice(None)
        wanted = right[where]
        difference = results[name].detach()[where].double() - wanted
        found[name] = _relative(difference.norm(), wanted.norm())
        if name == "out":
            found["worst row"] = _relative(difference.norm(dim=-1).max(), wanted.norm(dim=-1).square().mean().sqrt())
    return found


def _relative(error: Tensor, size: Tensor) -> float:
    return float(error / size) if error.isfinite() else float("inf")


def sane(results: Results, exact: Results, regime: Regime) -> dict[str, float]:
    """The errors, of what computed the same thing; otherwise `WrongError`, with what was off."""
    found = errors(results, exact, regime)
    name, worst = max(found.items(), key=lambda each: each[1])
    if not worst <= SANE[regime.dtype]:
        raise WrongError(f"{name} is off by {worst:.1e} of its size")
    return found


def check(ours: Results, yardstick: Results, exact: Results, regime: Regime) -> None:
    """`WrongError` unless ours is right, and at most twice as far off as the yardstick."""
    mine, plain = sane(ours, exact, regime), sane(yardstick, exact, regime)
    for name, error in mine.items():
        if name != "worst row" and not error <= 2 * plain[name]:
            raise WrongError(f"{name} is off by {error:.1e} of its size, and the {YARDSTICK} by {plain[name]:.1e}")
