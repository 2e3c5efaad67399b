"""Attention whose rows are shown on the way: the answer, at about the cost of the answer alone."""

from collections.abc import Callable

import torch

from headwise.attention.autocast import without_autocast
from headwise.attention.backends import reference
from headwise.attention.backends.blockwise import backend as blockwise
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import Observer
from headwise.attention.problem import Answer, Problem
from headwise.statistics.registry import blocks


def attend_observed(
    problem: Problem,
    observer: Observer,
    call_context: CallContext | None = None,
    otherwise: Callable[[Problem], Answer] = reference.run,
) -> Answer:
    """The answer to a problem, every row of which has been shown once.

    Rows are shown while blocks compute them, from scores in float32 at least. Where blocks cannot do the problem, the
    rows are computed beside the answer, which is then `otherwise`'s.
    """
    holds_something = 0 not in (*problem.q.shape, *problem.k.shape)
    if blockwise.why_not(problem) is None and not problem.return_weights and holds_something:
        with without_autocast(problem.q.device):
            return blockwise.run(problem, observer=observer, call_context=call_context)
    with torch.no_grad(), without_autocast(problem.q.device):
        for rows in blocks(problem, call_context):
            observer(rows)
    return otherwise(problem)
