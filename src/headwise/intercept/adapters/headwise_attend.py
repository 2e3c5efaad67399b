"""Calls of headwise's own `attend`, which are intercepted by its hook."""

from collections.abc import Callable

from headwise.attention.problem import Answer, Problem
from headwise.intercept.accelerated_sdpa import OWN_BACKEND, accelerated_modules
from headwise.intercept.answer import answered
from headwise.intercept.attention_call import NOT_FOLLOWED, AttentionCall
from headwise.intercept.patches import is_sdpa_foreign
from headwise.intercept.session import current_session


def answer_intercepted(problem: Problem, run: Callable[[Problem], Answer]) -> Answer:
    """Compute an attention call that was passed to `headwise.attend` as a `Problem` (its tensors and options), by
    calling `run`, and return the answer. While an intercepted model is running, interceptors may observe the attention
    weights and change the head outputs. If they observe weights, blockwise attention may compute the answer in place of
    `run`.
    """
    with accelerated_modules.paused(OWN_BACKEND):
        if not current_session().intercepts:
            return run(problem)
        call = AttentionCall(
            *(problem.q, problem.k, problem.v),
            layout=NOT_FOLLOWED,
            is_aligned=True,
            is_replaceable=not is_sdpa_foreign(),
        )
        call.problem = problem
        return answered("headwise.attend", call, lambda: run(problem))
