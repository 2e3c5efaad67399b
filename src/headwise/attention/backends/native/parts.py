"""Attention in parts of the score matrix, for masks whose boolean matrix is too large to be evaluated at once.

A part has some query rows, and the keys that these rows may attend to. The matrix of a part exists only while the
kernels compute the part. The backward pass evaluates it again, and compares checksums: a rule that returned another
matrix, because it draws random numbers or reads a tensor that has changed, would make the gradient silently wrong.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.attention.backends.native.operators import empty_output, with_usual_strides
from headwise.attention.backends.sinks_gradient import SinksGradient
from headwise.attention.masks.key_ranges import Part, VisibleKeys
from headwise.attention.tensors import Bias, Matrix, Outputs, PerHead, PerRow
from headwise.checks import savable
from headwise.errors import InputError
from headwise.shapes import Int


class Options(NamedTuple):
    """Arguments of the native attention operators (headwise's C++ kernels for CPUs) other than q, k, v and the mask."""

    scale: float
    head_scale: PerHead | None
    softcap: float
    sinks: PerHead | None
    bias: Bias | None
    dropout: float = 0.0
    seed: Int[Tensor, ""] | None = None

    def arguments(self, part: Part, ranges: Tensor | None, matrix: Matrix | None) -> tuple[Any, ...]:
        """Return the arguments of a native attention operator that follow q, k and v, for one part (rectangle of the
        score matrix). The bias among them is cut to the part.
        """
        bias = None if self.bias is None else _of_part(part, self.bias)
        return self.scale, self.head_scale, self.softcap, self.sinks, ranges, matrix, bias

    def with_dropout(self, part: Part, ranges: Tensor | None, matrix: Matrix | None) -> tuple[Any, ...]:
        """Return the arguments of a native attention operator that follow q, k and v, for one part (rectangle of the
        score matrix), with those for dropout at the end. The seed, and the first row and column of the part, alone
        decide which weights are dropped.
        """
        dropout = self.dropout, self.seed, part.rows.start, part.columns.start
        return *self.arguments(part, ranges, matrix), *dropout


def attend_in_parts(
    q: Tensor, k: Tensor, v: Tensor, options: Options, visible: VisibleKeys, parts: list[Part]
) -> tuple[Outputs, PerRow]:
    """Return the output and the log-sum-exp, computed for one part (rectangle of the score matrix) after the other, in
    the order of the rows. They can be differentiated with respect to q, k, v, the sinks and the bias.
    """
    if torch.compiler.is_compiling():
        return _traced(q, k, v, options, visible, parts)
    out, lse, _ = _AttentionInParts.apply(  # type: ignore[no-untyped-call]
        q, k, v, options.sinks, options.bias, options, visible, parts
    )
    return out, lse


def _traced(
    q: Tensor, k: Tensor, v: Tensor, options: Options, visible: VisibleKeys, parts: list[Part]
) -> tuple[Outputs, PerRow]:
    """Return the output and the log-sum-exp, computed by one operator for each part (rectangle of the score matrix), so
    that the compiler can trace them. The compiler decides which mask matrices it keeps for the backward pass.
    """
    # Gradients of parts are added up in float32.
    wide = [each.float() for each in (k, v)]
    results = []
    for part in parts:
        of_part = (part.columns_of(each).to(q.dtype) for each in wide)
        arguments = options.with_dropout(part, *visible.of_part(part))
        results.append(torch.ops.headwise.attend_forward(part.rows_of(q), *of_part, *arguments))
    out, lse, _ = zip(*results, strict=True)
    return torch.cat(out, 2), torch.cat(lse, 2)


class _AttentionInParts(torch.autograd.Function):
    """Attention that is computed in parts (rectangles of the score matrix). The forward pass does not store the boolean
    mask matrix of a part; the backward pass evaluates the mask again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        bias: Tensor | None,
        options: Options,
        visible: VisibleKeys,
        parts: list[Part],
    ) -> tuple[Outputs, PerRow, Tensor]:
        """Return the output, the log-sum-exp, and two numbers of each row that the backward pass needs to normalize
        weights.
        """
        out, rows = empty_output(q, v), q.shape[:3]
        lse, normalizers = torch.empty(rows), torch.empty(*rows, 2)
        checksums = []
        for part in parts:
            ranges, matrix = visible.of_part(part)
            checksums.append(_checksum(matrix))
            results = torch.ops.headwise.attend_forward(*part.of(q, k, v), *options.with_dropout(part, ranges, matrix))
            for whole, of_part in zip((out, lse, normalizers), results, strict=True):
                part.rows_of(whole).copy_(of_part)
        tensors = (q, k, v, sinks, options.head_scale, bias, options.seed, out, lse, normalizers)
        ctx.save_for_backward(*(each if each is None else savable(each) for each in tensors))
        ctx.others = options, visible, parts, checksums
        ctx.mark_non_differentiable(normalizers)
        ctx.set_materialize_grads(False)
        return out, lse, normalizers

    @staticmethod
    def backward(
        ctx: Any, out_gradient: Outputs | None, lse_gradient: PerRow | None, _: None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v, the sinks and the bias, given the gradients of the output and the
        log-sum-exp.
        """
        q, k, v, sinks, head_scale, bias, seed, out, lse, normalizers = ctx.saved_tensors
        options, visible, parts, checksums = ctx.others
        options = options._replace(sinks=sinks, head_scale=head_scale, bias=bias, seed=seed)
        out_gradient, lse_gradient = with_usual_strides(out_gradient, lse_gradient, out)
        q_gradient = torch.empty_like(q)
        k_gradient, v_gradient = (torch.zeros_like(each, dtype=torch.float32) for each in (k, v))
        bias_gradient = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[4] else None
        deltas = torch.empty_like(lse)
        for part, checksum in zip(parts, checksums, strict=True):
            ranges, matrix = visible.of_part(part)
            if _checksum(matrix) != checksum:
                raise InputError(
                    "mask_rule(rule)",
                    expected="a function with the same result in the backward pass as in the forward pass",
                    got="another result",
                    remedy="pass its matrix, a boolean tensor, as mask=",
                )
            of_lse = None if lse_gradient is None else part.rows_of(lse_gradient).contiguous()
            arguments = (
                *(part.rows_of(out_gradient), of_lse, part.rows_of(out)),
                part.rows_of(normalizers).contiguous(),
                *(*part.of(q, k, v), *options.with_dropout(part, ranges, matrix)),
            )
            of_q, of_k, of_v, of_rows = torch.ops.headwise.attend_backward(*arguments)
            if bias_gradient is not None:
                _of_part(part, bias_gradient).add_(torch.ops.headwise.attend_bias_gradient(*arguments))
            if sinks is not None:
                part.rows_of(deltas).copy_(of_rows)
            part.rows_of(q_gradient).copy_(of_q)
            part.columns_of(k_gradient).add_(of_k)
            part.columns_of(v_gradient).add_(of_v)
        of_sinks = None
        if ctx.needs_input_grad[3]:
            of_rows = (deltas, lse_gradient, lse, *normalizers.unbind(-1))
            of_sinks = SinksGradient.apply(*of_rows, sinks)  # type: ignore[no-untyped-call]
        of_bias = None if bias_gradient is None else bias_gradient.to(bias.dtype)
        return q_gradient, k_gradient.to(k.dtype), v_gradient.to(v.dtype), of_sinks, of_bias, None, None, None


def _of_part(part: Part, bias: Tensor) -> Tensor:
    """Return the rows and columns of a bias that belong to a part (rectangle of the score matrix). An axis of size 1,
    along which the bias repeats, is not cut.
    """
    for axis, indices in ((2, part.rows), (3, part.columns)):
        bias = bias if bias.shape[axis] == 1 else bias.narrow(axis, indices.start, len(indices))
    return bias


def _checksum(matrix: Matrix | None) -> int:
    """Return a checksum of a boolean matrix, by which two matrices are compared. Different matrices have the same
    checksum with a chance of about 2^-56. Each eight elements of a row form one integer, and the checksum is the sum of
    these integers, multiplied by fixed random weights.
    """
    if matrix is None or matrix.numel() == 0:
        return 0
    flat = matrix.contiguous().view(-1, matrix.shape[-1])
    words = torch.nn.functional.pad(flat, (0, -flat.shape[1] % 8)).view(torch.int64)
    generator = torch.Generator().manual_seed(0)
    of_columns, of_rows = (torch.randint(-(2**63), 2**63 - 1, (n,), generator=generator) for n in words.shape[::-1])
    return int(((words * (of_columns | 1)).sum(1) * (of_rows | 1)).sum())
