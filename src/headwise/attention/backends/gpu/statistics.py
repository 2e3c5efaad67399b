"""Statistics of the attention weights of a call on a GPU, from two Triton kernels.

The output comes from whichever engine computed it. The kernels read the queries and keys alone, so they serve every
engine, and calls whose output is differentiated. Next to the output of the fastest engine, they are the operator of
attention with statistics for tensors on a GPU.
"""

from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.attention.backend_choice import choose_fastest
from headwise.attention.backends.blockwise import operator
from headwise.attention.backends.gpu.spans import spans_of_keys, spans_of_rows
from headwise.attention.backends.native import library
from headwise.attention.backends.plain_statistics import RECEIVED_UNIT, ROWS, StatisticsCall, output_norms
from headwise.attention.masks.kinds import mask_of_keys
from headwise.attention.problem import Problem
from headwise.attention.tensors import Outputs, PerRow
from headwise.checks import has_own_class, has_values
from headwise.shapes import Float, Int

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of queries and keys that the kernels read."""

REGISTERS = 255
"""Largest number of registers of a thread, on all GPUs. Without this number, the assembler sometimes spills a few
registers to let more programs run at once.
"""

OUTPUTS_AT_ONCE = 2**21
"""Largest number of outputs whose norms are computed at a time, in float32, unless those of one row are more."""


class Tiles(NamedTuple):
    """Sizes of the work that one program (instance of a GPU kernel) does at a time: the number of query rows, of keys,
    and of features of a head. A head with more features is read in several steps. `warps` is the number of groups of 32
    threads in the program.
    """

    rows: int
    keys: int
    features: int
    warps: int


class WeightStatistics(NamedTuple):
    """Statistics of attention weights that the GPU kernels compute. For each query row: the log-sum-exp, and the
    numbers that `plain_statistics.ROWS` names. For each key, over the rows that statistics include: the sum of the
    weights on the key, in float64, and the number of rows that may attend to it.
    """

    lse: PerRow
    rows: Float[Tensor, "numbers batch heads queries"]
    received: Float[Tensor, "batch heads keys"]
    seen_by: Int[Tensor, "batch heads keys"]


def why_not(problem: Problem) -> str | None:
    """Return the reason that the GPU kernels cannot compute the statistics of a problem (one attention call), in one
    sentence; None if they can.
    """
    if problem.talking is not None:
        return "the kernels keep heads apart, and talking_heads mixes them"
    if problem.q.dtype not in DTYPES:
        return f"the kernels compute in float16, bfloat16 and float32, and q is in {problem.q.dtype}"
    tensors = (problem.q, problem.k, problem.v)
    if torch._C._is_tracing() or not all(has_values(each) and has_own_class(each) for each in tensors):
        return "the kernels read plain tensors with values, outside of transforms of torch"
    return why_no_triton()


@cache
def why_no_triton() -> str | None:
    """Return the reason that Triton cannot be imported, in one sentence; None if it can."""
    return None if find_spec("triton") else "the statistics on a GPU need Triton: pip install triton"


def tiles_of(head_dim: int, dtype: torch.dtype, *, reads_matrix: bool, has_softcap: bool) -> Tiles:
    """Return the numbers of query rows, keys and features that the GPU kernels work on at a time. They are chosen so
    that no register is spilled, and that two programs (instances of a kernel) fit the shared memory of a multiprocessor
    (docs/reports/gpu_kernels.md).

    Among 16 sizes, those for half precision without a dense mask, a bias and a softcap were the fastest on an H100 for
    heads of 64 features. The other sizes have not been timed.

    A dense mask or a bias needs registers for its addresses (`reads_matrix`), and a softcap for its polynomial.
    """
    features = max(1 << (head_dim - 1).bit_length(), 16)
    if dtype == torch.float32:
        return Tiles(rows=32, keys=16, features=min(features, 32), warps=8)
    is_wide = features > 128
    features = 64 if is_wide else features
    if reads_matrix:
        return Tiles(rows=16, keys=16 if is_wide else 32, features=features, warps=8)
    return Tiles(rows=64, keys=32, features=features, warps=8 if is_wide or has_softcap else 4)


def weight_statistics(call: StatisticsCall, out: Outputs) -> WeightStatistics:
    """Return statistics of the attention weights of a call for each query row and each key, computed on a GPU. The
    statistics of a row include two norms of the head's output for this row, which are computed from `out`.
    """
    reads_matrix = call.dense is not None or call.bias is not None
    tiles = tiles_of(call.q.shape[-1], call.q.dtype, reads_matrix=reads_matrix, has_softcap=bool(call.softcap))
    batch, heads, queries, _ = call.q.shape
    keys = call.k.shape[2]
    lse = call.q.new_empty(batch, heads, queries, dtype=torch.float32)
    rows = lse.new_empty(len(ROWS), batch, heads, queries)
    received = lse.new_empty(batch, heads, keys, dtype=torch.float64)
    seen_by = lse.new_empty(batch, heads, keys, dtype=torch.int32)
    with torch.cuda.device(call.q.device) if call.q.is_cuda else nullcontext():
        _launch(call, tiles, lse, rows, received, seen_by)
    step = max(OUTPUTS_AT_ONCE // (batch * heads * out.shape[3]), 1)
    for start in range(0, queries, step):
        part = slice(start, start + step)
        rows[-3:-1, :, :, part] = output_norms(out[:, :, part], call.gram)
    return WeightStatistics(lse, rows, received, seen_by)


def _launch(call: StatisticsCall, tiles: Tiles, lse: Tensor, rows: Tensor, received: Tensor, seen_by: Tensor) -> None:
    """Run the two GPU kernels on a call. They write their results to the last four arguments. Each query row gets its
    log-sum-exp and its statistics. Each key gets the sum of the weights on it and the number of rows that may attend to
    it.
    """
    from headwise.attention.backends.gpu.kernels import Call, KeySums, Results, Spans, Tokens, key_kernel, row_kernel

    batch, heads, queries, head_dim = call.q.shape
    keys = call.k.shape[2]
    row_blocks, key_blocks = -(-queries // tiles.rows), -(-keys // tiles.keys)
    of_rows = of_keys = Spans(None, None)
    if call.ranges is not None:
        spans = spans_of_rows(call.ranges, keys, tiles.rows, tiles.keys)
        of_rows = Spans(spans, _strides(spans)[:3])
        spans = spans_of_keys(spans, key_blocks)
        of_keys = Spans(spans, _strides(spans)[:3])
    key_ranges = None if call.ranges is None else call.ranges.contiguous()
    dense = _as_bytes(call.dense)
    arguments = Call(
        *(call.q, call.k, call.q.stride(), call.k.stride()),
        *(head_dim, heads, heads // call.k.shape[1], queries, keys),
        *(call.scale, call.head_scale, call.softcap or None, call.sinks),
        *(key_ranges, None if key_ranges is None else _strides(key_ranges)[:3]),
        *(dense, None if dense is None else _strides(dense)),
        *(call.bias, None if call.bias is None else _strides(call.bias)),
    )
    tokens = Tokens(
        positions=call.positions,
        first_key=call.first_key,
        special=_as_bytes(call.special),
        key_tokens=None if call.query_tokens is None else call.key_tokens,
        query_tokens=None if call.key_tokens is None else call.query_tokens,
    )
    ranges = 0 if call.ranges is None else call.ranges.shape[3]
    top, share = (rows[ROWS.index(name)] for name in ("max_logit", "confidence"))
    counted = _as_bytes(call.counted)
    options = {
        "head_dim": head_dim,
        "ranges": ranges,
        "block_rows": tiles.rows,
        "block_keys": tiles.keys,
        "features": tiles.features,
        "num_warps": tiles.warps,
        "maxnreg": REGISTERS,
    }
    results, sums = Results(lse, rows, batch * heads * queries), KeySums(top, share, counted, received, seen_by)
    row_kernel[(row_blocks * batch * heads,)](arguments, tokens, of_rows, results, span_count=max(ranges, 1), **options)
    key_kernel[(key_blocks * batch * heads,)](arguments, of_keys, sums, **options)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor. The stride is 0 on an axis of size 1, so that a kernel reads the same number for
    every index.
    """
    return tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _as_bytes(values: Tensor | None) -> Tensor | None:
    """Return a boolean tensor as bytes (1 for True), without a copy; None for None."""
    return None if values is None else values.view(torch.uint8)


# -- the operator ------------------------------------------------------------------------------------------------------

_implementations: list[torch.library.Library] = []


@cache
def why_not_registered() -> str | None:
    """Register `attend_statistics` as the GPU implementation of torch's operator of this name at the first call, and
    return None. If that is not possible, return the reason in one sentence.
    """
    if library.load() is not None:
        reason: str | None = operator.why_not_registered()
        if reason is not None:
            return reason
    implementation = torch.library.Library("headwise", "IMPL")  # type: ignore[no-untyped-call]
    implementation.impl("attend_statistics", attend_statistics, "CUDA")  # type: ignore[no-untyped-call]
    _implementations.append(implementation)  # the implementation exists as long as it does
    return None


def attend_statistics(*arguments: Any) -> tuple[Tensor, ...]:
    """Compute attention and the statistics of its weights on a GPU. This function implements torch's operator
    `attend_statistics` for GPUs.
    """
    call = StatisticsCall(*arguments)
    problem = Problem.checked(
        call.q,
        call.k,
        call.v,
        mask=mask_of_keys(call.ranges, call.dense),
        bias=call.bias,
        scale=call.scale if call.head_scale is None else call.scale * call.head_scale,
        softcap=call.softcap or None,
        sinks=call.sinks,
    )
    out = choose_fastest(problem).run(problem).out
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # the heads of one position adjacent in memory
    lse, rows, received, seen_by = weight_statistics(call, out)
    return out, lse, rows, (received / RECEIVED_UNIT).long(), seen_by
