"""The operator `headwise::linear`: x weight^T + bias in float32 by oneDNN, with a gradient.

Torch computes `F.linear` in float32 with MKL, which uses AVX-512 on processors by Intel alone. OneDNN, which is part of
torch too, uses it on all processors that have it. It adds the products of a row one after another, so that its rounding
error grows with the width of x. Here the width is therefore split into blocks, whose products are added: that keeps the
error near that of MKL (docs/lab-notes.md, "Linear projections").

    y = x W^T + b        dx = dy W        dW = dy^T x        db = sum of dy over the tokens

All three products are calls of the operator itself, so that it has derivatives of every order.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.checks import called_by_compiler
from headwise.nn.linear_choice import native_rule
from headwise.shapes import Float

BLOCK = 256
"""Largest width over which one product sums. The width of x is split into blocks of nearly equal size up to this."""

WIDEST_UNSPLIT = 128
"""Width above which there are at least two blocks, as in MKL's own products without AVX-512."""

SMALLEST_WORK = 2**22
"""Number of multiplications in a block below which a product is left to torch: oneDNN needs about 20 us to start."""

SMALLEST_COPIED_FOR = 128
"""Number of rows of x below which a product is left to torch if the blocks of the weight must be copied."""

_pointwise = torch.ops.mkldnn._linear_pointwise.default


def linear(
    x: Float[Tensor, "*tokens width"], weight: Float[Tensor, "out width"], bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "*tokens out"]:
    """Return `F.linear(x, weight, bias)` for float32 tensors on the CPU, computed by oneDNN unless it is too small a
    product to gain.

    Example:
        >>> linear(torch.randn(2, 1024, 512), torch.randn(64, 512), None).shape
        torch.Size([2, 1024, 64])

    Args:
        x: input.
        weight: matrix of the linear map.
        bias: addition to each token's output.
    """
    if torch.compiler.is_compiling() or needs_gradient(x, weight, bias):
        register()
        result: Tensor = torch.ops.headwise.linear(x, weight, bias)
        return result
    return _linear(x, weight, bias)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Return True if gradients are enabled and one of the tensors requires one."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def gains(x: Tensor, weight: Tensor) -> bool:
    """Return True if a product is large enough for oneDNN to be faster than a library without AVX-512."""
    out, width = weight.shape
    rows = x.numel() // max(width, 1)
    block = _block_of(width)
    is_copied = width > block and not _columns_are_dense(weight)
    return rows * block * out >= SMALLEST_WORK and (rows >= SMALLEST_COPIED_FOR or not is_copied)


def gains_by_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return True if the native kernel of few tokens is the fastest engine for these tensors."""
    rule = native_rule(x.dtype)
    return (
        bool(rule.rows)
        and x.numel() // max(weight.shape[-1], 1) in rule.rows
        and weight.numel() >= rule.smallest_weight
        and weight.layout == torch.strided
        and weight.is_contiguous()
        and (bias is None or bias.is_contiguous())
    )


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x weight^T + bias, computed by the native kernel, without a gradient."""
    result: Tensor = _few_rows()(x.contiguous(), weight, bias)
    return result


@cache
def _few_rows() -> Any:
    """Return the operator of the native kernel. Finding it anew takes as long as the product of a small weight."""
    return torch.ops.headwise.linear_few_rows.default


def _block_of(width: int) -> int:
    """Return the width over which one product sums."""
    least = 2 if width > WIDEST_UNSPLIT else 1
    return -(-width // max(-(-width // BLOCK), least))


@called_by_compiler
def register() -> None:
    """Register the operator with torch at the first call. The compiler calls this function instead of tracing it."""
    _registered()


@cache
def _registered() -> torch.library.Library:
    """Register the operator with torch at the first call, and return the library that keeps it registered."""
    library = torch.library.Library("headwise", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")  # type: ignore[no-untyped-call]
    for function, key in ((_linear, "CPU"), (F.linear, "AutocastCPU")):  # under autocast, torch computes it
        library.impl("linear", function, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake("headwise::linear", _fake)
    torch.library.register_autograd("headwise::linear", _backward, setup_context=_save)
    return library


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x weight^T + bias: by oneDNN in blocks of the width, by the native kernel for few tokens, or by
    `F.linear` if neither gains anything.
    """
    if not gains(x, weight):
        return few_rows(x, weight, bias) if gains_by_few_rows(x, weight, bias) else F.linear(x, weight, bias)
    block = _block_of(weight.shape[1])
    parts = zip(torch.split(x, block, dim=-1), torch.split(weight, block, dim=-1), strict=True)
    total = product(*next(parts), bias)
    for x_block, weight_block in parts:
        total += product(x_block, weight_block, None)
    return total


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x weight^T + bias in one product of oneDNN. It is a hundred times slower for a weight with gaps between
    its rows, and reads a bias with gaps as if it had none, so that both are copied.
    """
    if not (weight.is_contiguous() or _columns_are_dense(weight)):
        weight = weight.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    result: Tensor = _pointwise(x, weight, bias, "none", [], "")
    return result


def _columns_are_dense(weight: Tensor) -> bool:
    """Return True if the columns of a weight follow each other in memory, so that no block of them has gaps."""
    return weight.t().is_contiguous()


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the output without values, for tracing."""
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    """Save the tensors that the backward pass needs: x for the gradient of the weight, and the weight for that of x."""
    x, weight, _ = inputs
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)


def _backward(ctx: Any, upstream: Float[Tensor, "*tokens out"]) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight and bias that are needed, given that of the output."""
    x, weight = ctx.saved_tensors
    rows = _rows(upstream)
    x_gradient = weight_gradient = bias_gradient = None
    if weight is not None:
        x_gradient = torch.ops.headwise.linear(upstream, weight.t(), None)
    if x is not None:
        weight_gradient = torch.ops.headwise.linear(rows.t(), _rows(x).t(), None)
    if ctx.needs_input_grad[2]:
        bias_gradient = rows.sum(0)
    return x_gradient, weight_gradient, bias_gradient


def _rows(tensor: Float[Tensor, "*tokens width"]) -> Float[Tensor, "rows width"]:
    """Return the tokens as the rows of a matrix."""
    return tensor[None] if tensor.ndim == 1 else tensor.flatten(0, -2)
