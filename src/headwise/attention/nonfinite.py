"""Containment of NaN and infinity: a key or value that a query may not attend to does not change the query's output.

Every kernel multiplies hidden values by a weight of 0, and 0 times NaN or infinity is NaN. So one bad token in the
padding, or in the future of a causal mask, would spread to all rows. Here the result is checked, and only if that may
have happened, the call is computed again without the bad numbers. Rows that may attend to them keep theirs.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from headwise.attention.backend_choice import choose_fastest
from headwise.attention.backends.native import library
from headwise.attention.problem import Answer, Problem
from headwise.checks import has_readable_values
from headwise.shapes import Bool, Float

MOST_COMPARED = 2**13
"""Largest number of elements of which `torch.equal` finds NaN faster than a sum does."""


def run_contained(problem: Problem, run: Callable[[Problem], Answer]) -> Answer:
    """Return the result of `run(problem)`, in which NaN or infinity in a key or value changes only the query rows that
    may attend to it. If other rows may have changed, `run` computes the problem again with zeros in place of these
    numbers.

    Nothing is checked while compiling or tracing, inside a transform of `torch.func`, or on other devices than a CPU,
    where reading a sum would wait for the device: there a hidden NaN or infinity can reach every row.
    """
    result = run(problem)
    if (problem.mask is None and problem.bias is None) or not _can_check(result.out):
        return result
    if not may_have_leaked(result.out, problem.k, problem.v, to_gradients=result.out.requires_grad):
        return result
    bad_keys = ~problem.k.isfinite().all(-1, keepdim=True)
    bad_values = ~problem.v.isfinite()
    if not (bad_keys.any() or bad_values.any()):
        return result
    cleaned = replace(problem, k=problem.k.masked_fill(bad_keys, 0.0), v=problem.v.masked_fill(bad_values, 0.0))
    clean = run(cleaned)
    sees_bad_value, sees_bad_key = _visible_to_rows(problem, bad_keys, bad_values)
    lse, weights = result.lse, result.weights
    if lse is not None and clean.lse is not None:
        lse = _combine(lse, clean.lse, sees_bad_key)
    if weights is not None and clean.weights is not None:
        weights = _combine(weights, clean.weights, sees_bad_key[..., None])
    return Answer(_combine(result.out, clean.out, sees_bad_value), lse, weights)


def may_have_leaked(out: Tensor, k: Tensor, v: Tensor, *, to_gradients: bool) -> bool:
    """Return True if NaN or infinity in keys or values may have changed query rows that may not attend to them, in a
    call on the CPU. This is possible if the output contains NaN. With `to_gradients`, it is possible if any key or
    value is NaN or infinite, since the backward pass multiplies such numbers by 0 more often.
    """
    return not all_finite(k, v) if to_gradients else may_have_nan(out)


def may_have_nan(x: Tensor) -> bool:
    """Return True if a tensor on a CPU contains NaN. If it contains infinity, the result may be True as well."""
    if x.numel() <= MOST_COMPARED:
        return not torch.equal(x, x)
    return math.isnan(x.detach().sum())


def has_nonfinite_keys_or_values(problem: Problem) -> bool:
    """Return True if a key or value of an attention problem is NaN or infinite. Return False if the values cannot be
    read now, as on a GPU or while compiling.
    """
    tensors = (problem.k, problem.v)
    return all(map(_can_check, tensors)) and not all_finite(*tensors)


def all_finite(x: Tensor, y: Tensor) -> bool:
    """Return True if all numbers of two tensors on a CPU are finite."""
    if library.load() is None:
        return bool(library.operator("all_finite")(x, y))
    return all(math.isfinite(tensor.detach().sum()) or bool(tensor.isfinite().all()) for tensor in (x, y))


def _can_check(tensor: Tensor) -> bool:
    """Return True if the values of a tensor can be read now: without waiting for a GPU, and outside of compiling,
    tracing and transforms of `torch.func`.
    """
    return has_readable_values(tensor) and not torch._C._is_tracing()


@torch.no_grad()
def _visible_to_rows(
    problem: Problem,
    bad_keys: Bool[Tensor, "batch kv_heads keys 1"],
    bad_values: Bool[Tensor, "batch kv_heads keys value_dim"],
) -> tuple[Bool[Tensor, "batch #heads queries value_dim"], Bool[Tensor, "batch #heads queries"]]:
    """Return where NaN or infinity ("bad" numbers) may reach. The first result is True for an output feature of a query
    row if the row may attend to a bad key, or to a value that is bad in this feature. The second is True for a row that
    may attend to a bad key. With talking heads, a row may attend to the keys of all heads.
    """
    dtype = problem.score_dtype
    indicators = torch.cat([bad_values | bad_keys, bad_keys], -1).to(dtype)
    k = torch.zeros_like(problem.k, dtype=dtype)
    uniform = replace(problem, q=problem.q.to(dtype), k=k, v=indicators).with_uniform_weights()
    visible = choose_fastest(uniform).run(uniform).out > 0
    if problem.talking is not None:
        visible = visible.any(1, keepdim=True)  # every head reads the keys of all heads
    return visible[..., :-1], visible[..., -1]


def _combine(
    result: Float[Tensor, "*axes"], clean: Float[Tensor, "*axes"], visible: Bool[Tensor, "..."]
) -> Float[Tensor, "*axes"]:
    """Return `result` where `visible`, which broadcasts, is True. Elsewhere return `clean`, which was computed with
    zeros in place of NaN and infinity. The gradient is that of `clean` everywhere.
    """
    return clean + torch.where(visible, (result - clean).detach(), 0.0)
