"""Attention whose weights pass through an observer while they are computed."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.attention.autocast import without_autocast
from headwise.attention.backends.blockwise import backend as blockwise
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import Observer
from headwise.attention.nonfinite import has_nonfinite_keys_or_values
from headwise.attention.problem import Answer, Problem
from headwise.shapes import Float
from headwise.statistics import kernel_statistics
from headwise.statistics.kernel_statistics import fastest_or_reference
from headwise.statistics.row_blocks import row_blocks_of_problem
from headwise.statistics.tally import Tally


class WholeCall(NamedTuple):
    """Description of an observer (function that receives attention weights) with only two effects: it adds each row
    block (some query rows of a call) to `tally`, and passes the head outputs of all rows to `on_output`. For such an
    observer, kernels can compute the statistics of a whole call at once.
    """

    tally: Tally
    on_output: Callable[[Float[Tensor, "batch heads queries value_dim"]], None] | None = None


def attend_observed(
    problem: Problem,
    observer: Observer,
    call_context: CallContext | None = None,
    compute: Callable[[Problem], Answer] = fastest_or_reference,
    whole_call: WholeCall | None = None,
    *,
    computes_output: bool = False,
) -> Answer:
    """Compute one attention call, and pass its attention weights to `observer` in row blocks (some query rows at a
    time). Return the answer: the output, and other results that the problem (the call's tensors and options) requests.
    By default the blockwise backend computes the weights and the answer. `compute` computes the answer instead in four
    cases: the backend does not support the problem, the weights are requested, the inputs are empty, or a key or value
    is NaN or infinite. In the last case, blockwise attention would also change rows that do not attend to this key.

    If `whole_call` is passed, `observer` must have only the effects that it describes. Then kernels compute the
    statistics where they can, and `observer` is not called. On a CPU, native kernels do so in the pass that computes
    the answer. On a GPU, `compute` computes the answer, and Triton kernels the statistics. Only the statistics that no
    kernel computes are added up from row blocks, in a second pass.

    Row blocks are observed while blockwise attention computes them, from scores in float32 at least, at about the cost
    of the answer alone. For problems that blockwise attention cannot solve, the row blocks are computed separately;
    with `computes_output`, their output is the product of weights and values rather than the answer of `compute`.
    """
    context = call_context or CallContext()
    if whole_call is not None and kernel_statistics.why_not(problem, context, whole_call.tally.measured) is None:
        tally = whole_call.tally
        tallied = kernel_statistics.attend_tallied(problem, context, tally, compute)
        if tallied is not None:
            if whole_call.on_output is not None:
                whole_call.on_output(tallied.out)
            others = kernel_statistics.left_to_blocks(tally.measured)
            if others:
                rest = Tally(tally.gram, tally.first_token, measured=frozenset(others), further=tally.further)
                with torch.no_grad():
                    attend_observed(problem, rest.add, call_context, lambda _: tallied)
                tally.join(rest)
            return tallied
    is_empty = 0 in (*problem.q.shape, *problem.k.shape)
    is_finite = not has_nonfinite_keys_or_values(problem)
    if blockwise.why_not(problem) is None and not problem.return_weights and not is_empty and is_finite:
        with without_autocast(problem.q.device):
            return blockwise.run(problem, observer=observer, call_context=call_context)
    answer = compute(problem)
    with torch.no_grad(), without_autocast(problem.q.device):
        out = None if is_finite or computes_output else answer.out
        for row_block in row_blocks_of_problem(problem, call_context, computes_output, out):
            observer(row_block)
    return answer
