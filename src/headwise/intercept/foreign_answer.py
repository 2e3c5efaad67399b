"""Attention calls that another library's function answers, in the place of torch's."""

from collections.abc import Callable

import torch

from headwise.attention.autocast import without_autocast
from headwise.attention.problem import Answer, Problem
from headwise.intercept.module_call import report_unreadable
from headwise.intercept.session import current_session
from headwise.intercept.undropped import random_state_kept
from headwise.shapes import Float
from headwise.statistics.row_blocks import row_blocks_of_problem

OTHER_OUTPUT = (
    "another library replaced the attention function, and its output in these modules is not that of softmax attention"
)
"""Reason for modules in which another library's function computes something else than softmax attention."""


def is_attention(
    read_problem: Callable[[], Problem], compute: Callable[[], Answer], compute_without_dropout: Callable[[], Answer]
) -> bool:
    """Return True if the function by which another library replaces torch's attention computes softmax attention. The
    output of the function is compared, up to rounding, with softmax attention of the same queries, keys and values. If
    they differ, report the running modules as unreadable.

    Args:
        read_problem: function that states the call as a `Problem`.
        compute: the other library's function.
        compute_without_dropout: the same function without dropout, for a call with dropout, whose output is random.
    """
    session = current_session()
    with session.paused():
        problem, answer = read_problem(), compute()
        with torch.no_grad(), without_autocast(problem.q.device):
            if problem.dropout > 0:
                with random_state_kept(problem.q.device):
                    answer = compute_without_dropout()
            if _is_output(problem.without_dropout(), answer.out):
                return True
    report_unreadable(session.module_calls, OTHER_OUTPUT)
    return False


def _is_output(problem: Problem, out: Float[torch.Tensor, "batch heads queries value_dim"]) -> bool:
    """Return True if `out` equals, up to rounding, the softmax attention of the queries, keys and values in `problem`.
    Rows that may attend to no key are not compared.
    """
    tolerance = torch.finfo(out.dtype).eps ** 0.5
    for row_block in row_blocks_of_problem(problem, with_output=True):
        if row_block.out is None:
            return False
        expected, by_head = row_block.tile.by_head(row_block.out), row_block.tile.by_head
        has_key = by_head(row_block.powers).sum(-1, keepdim=True) > 0
        difference = (out[:, :, row_block.rows.start : row_block.rows.stop] - expected).masked_fill(~has_key, 0.0)
        if not bool(difference.abs().amax() <= tolerance * expected.abs().amax()):  # also if it is NaN
            return False
    return True
