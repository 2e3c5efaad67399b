"""Checks of every backend of `hw.attend` against plain attention in float64, on the drawn problems.

The error of a backend, in the output, the log-sum-exp and every gradient, may be at most twice that of plain attention
in the same dtype. The error is the root of the mean square over all elements; that of a single element, which depends
more on chance, may be at most six times the largest one of plain attention. The error of plain attention is the largest
of several orders of the keys, since sums in one order are sometimes exact by chance.
"""

import math
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

import headwise as hw
from benchmarks.gpu.checks import Check, CheckError
from benchmarks.gpu.problems import DrawnProblem, drawn_problems, plain
from headwise.attention import attend as attend_module

ORDERS = 8
"""Orders of the keys in which plain attention is computed."""

MOST, MOST_OF_ONE = 2, 6
"""Largest ratios of errors to those of plain attention: over all elements, and of a single one."""

FEW = 100
"""Number of elements below which the mean depends on chance as much as one element does, as in a gradient of sinks."""

CHOSEN = "chosen by default"
"""Name of the checks of `hw.attend` without a named backend."""

Results = dict[str, Tensor]
"""The output "out", the log-sum-exp "lse" where it is asked for, and the gradient of each tensor by its name."""


class Errors(NamedTuple):
    """Errors of one result: the root of the mean square over all elements, and the largest one."""

    mean: float
    largest: float

    def or_larger(self, other: "Errors") -> "Errors":
        """Return the larger one of both errors."""
        return Errors(max(self.mean, other.mean), max(self.largest, other.largest))


def attend_checks(device: str, *, largest: int) -> Iterator[Check]:
    """Yield a check of each drawn problem for each backend, and for the one that `hw.attend` chooses."""
    for problem in drawn_problems(largest=largest):
        for backend in (None, *attend_module.BACKENDS):
            yield Check(f"attend, {backend or CHOSEN}: {problem.name}", partial(check, problem, backend, device))


def check(problem: DrawnProblem, backend: str | None, device: str) -> str | None:
    """Raise `CheckError` unless a backend solves a problem. Return its reason if it refuses the problem."""
    tensors, options = problem.arguments(device)
    reason = refusal(backend, tensors, options)
    if reason is not None:
        return reason
    results = by_headwise(problem, backend, device)
    exact, errors = exact_results(problem, device)
    for name, expected in exact.items():
        got, allowed = distance(results[name], expected), errors[name]
        most = MOST if expected.numel() >= FEW else MOST_OF_ONE
        if not (got.mean <= most * allowed.mean and got.largest <= MOST_OF_ONE * allowed.largest):
            figures = f"{got.mean:.2g}, in one element {got.largest:.2g}"
            raise CheckError(
                f"{name}: an error of {figures}; plain attention: {allowed.mean:.2g}, {allowed.largest:.2g}"
            )
    return None


def refusal(backend: str | None, tensors: Results, options: dict) -> str | None:
    """Return the reason for which a backend cannot compute a problem; None if it can."""
    further = {name: tensor for name, tensor in tensors.items() if name not in "qkv"}
    q, k, v = (tensors[name] for name in "qkv")
    if backend is not None:
        return hw.why_not(backend, q, k, v, **further, **options)
    try:
        hw.explain(q, k, v, **further, **options)
    except hw.InputError as error:
        return str(error)
    return None


def by_headwise(problem: DrawnProblem, backend: str | None, device: str) -> Results:
    """Return the results of `hw.attend`."""
    tensors, options = problem.arguments(device)
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    q, k, v = (leaves[name] for name in "qkv")
    further = {name: tensor for name, tensor in leaves.items() if name not in "qkv"}
    returned = attend_module.attend(q, k, v, **further, **options, backend=backend)
    out, lse = returned if isinstance(returned, tuple) else (returned, None)
    return with_gradients(problem, leaves, out, lse)


@lru_cache(maxsize=2)
def exact_results(problem: DrawnProblem, device: str) -> tuple[Results, dict[str, Errors]]:
    """Return the results of plain attention in float64, and the errors of each in the problem's dtype."""
    exact = by_plain(problem, device, torch.float64, None)
    sizes = {name: distance(torch.zeros_like(result), result) for name, result in exact.items() if name != "lse"}
    # Gradients of q and k are differences, which may cancel to 0, of terms as large as the gradient of v.
    size = max(sizes.values())
    eps = torch.finfo(problem.dtype).eps
    errors = {}
    for name, expected in exact.items():
        own = sizes.get(name) or distance(torch.zeros_like(expected), expected.nan_to_num(neginf=0.0))
        larger = own.or_larger(size) if name.startswith("gradient") else own
        errors[name] = Errors(eps / 4 * larger.mean, eps / 2 * larger.largest)  # those of storing the numbers
    generator = torch.Generator().manual_seed(0)
    for order in range(ORDERS):
        keys = problem.allowed.shape[-1]
        index = torch.randperm(keys, generator=generator) if order else torch.arange(keys)
        results = by_plain(problem, device, problem.dtype, index)
        errors = {name: error.or_larger(distance(results[name], exact[name])) for name, error in errors.items()}
    return exact, errors


def by_plain(problem: DrawnProblem, device: str, dtype: torch.dtype, order: Tensor | None) -> Results:
    """Return the results of plain attention in a dtype, with the keys in an order; None for their own order."""
    tensors, options = problem.arguments(device, dtype)
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    allowed, permuted = problem.allowed.to(device), dict(leaves)
    if order is not None:
        order = order.to(device)
        allowed = allowed[..., order]
        permuted |= {name: leaves[name][:, :, order] for name in "kv"}
        if "bias" in leaves:
            permuted["bias"] = leaves["bias"][..., order]
    scale = None if problem.scale_per_head is None else problem.scale_per_head.to(device)
    out, lse = plain(permuted, allowed, options, scale)
    return with_gradients(problem, leaves, out, lse if "return_lse" in options else None)


def with_gradients(problem: DrawnProblem, leaves: Results, out: Tensor, lse: Tensor | None) -> Results:
    """Return output and log-sum-exp with the gradients of all leaves, for gradients of the results that depend on the
    problem alone.
    """
    generator = torch.Generator().manual_seed(0)
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(problem.dtype)
    outputs, upstreams = [out], [upstream.to(out.device, out.dtype)]
    results = {"out": out.detach()}
    if lse is not None:
        of_lse = torch.randn(lse.shape, generator=generator, dtype=torch.float64).to(lse.device, lse.dtype)
        outputs.append(lse)
        upstreams.append(of_lse.masked_fill(lse.detach() == -torch.inf, 0.0))
        results["lse"] = lse.detach()
    gradients = torch.autograd.grad(outputs, list(leaves.values()), upstreams)
    return results | {f"gradient of {name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}


def distance(got: Tensor, exact: Tensor) -> Errors:
    """Return the errors of a result; infinity if the two differ in what is finite."""
    wrong = Errors(math.inf, math.inf)
    if got.shape != exact.shape:
        return wrong
    finite, got = exact.isfinite(), got.double()
    if not torch.equal(finite, got.isfinite()) or not torch.equal(exact[~finite], got[~finite]):
        return wrong
    errors = (got[finite] - exact[finite]).abs()
    return Errors(float(errors.square().mean().sqrt()), float(errors.max())) if finite.any() else Errors(0.0, 0.0)
