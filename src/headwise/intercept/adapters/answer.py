"""Answer of a call of an attention engine: interceptors observe its weights, and may change its output."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headwise.attention.attend import uniform_output
from headwise.attention.problem import Answer, Problem
from headwise.errors import InputError
from headwise.intercept.adapters.engine import EngineCall, HeadsInBatch, UnreadableCall
from headwise.intercept.call_handlers import CallHandlers, handlers_of_call
from headwise.intercept.module_call import must_trace, report_unreadable
from headwise.intercept.plans import OTHER_WAY
from headwise.intercept.received_mask import MaskSource, ReceivedMask
from headwise.intercept.sdpa_calls import SDPACall
from headwise.intercept.session import current_session
from headwise.intercept.trace.outputs import follow_reported, hold, refuse_multiplied
from headwise.intercept.trace.state import AttentionOutput

UNEXPECTED = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""Errors of an adapter for a call of a form that it does not expect, as of another version of the library."""


def answered_by_engine(name: str, compute: Callable[[], Any], read: Callable[[], EngineCall | HeadsInBatch]) -> Any:
    """Let an attention engine compute a call, and return its result with the interceptors' changes. If the call cannot
    be read, report this, and return the result unchanged.

    Args:
        name: name of the engine's function, for the report.
        compute: the engine's function, with the arguments of the call.
        read: function that reads the call; called after `compute`.
    """
    with current_session().paused():
        result = compute()
    return finished(name, result, read)


def finished(name: str, result: Any, read: Callable[[], EngineCall | HeadsInBatch]) -> Any:
    """Return the `result` of an engine's function with the interceptors' changes, as `answered_by_engine` does."""
    out = result[0] if isinstance(result, tuple) else result
    if not isinstance(out, Tensor):
        return result
    session = current_session()
    try:
        call = read()
        if isinstance(call, EngineCall):
            with session.paused():
                call.problem  # noqa: B018 - checks the tensors
    except (UnreadableCall, InputError, *UNEXPECTED) as error:
        reason = str(error) if isinstance(error, UnreadableCall) else f"({type(error).__name__}: {error})"
        report_unread(name, reason)
        return result
    with session.paused():
        changed = _answered(name, out, call) if isinstance(call, EngineCall) else _followed(out, call)
    return result if changed is out else _with_output(result, changed)


def _answered(name: str, out: Tensor, call: EngineCall) -> Tensor:
    """Report a call of the function `name` to the interceptors, after the engine has computed its output `out`. They
    observe its weights, which headwise computes in addition, without dropout. Return the output with their changes.
    """
    session = current_session()
    step = None if session.reports_unreadable(call.q) else session.step(name, call.q, call.k, call.v)
    if step is None:
        return out
    origins = session.origins_of(call.q, *(call.sources or (call.k, call.v)))
    refuse_multiplied(call.q, call.k, call.v)
    mask = MaskSource(lambda: _received_mask(call), call.mask_origin)
    handlers = handlers_of_call(
        call.grid,
        call.k.shape[1],
        call.v.shape[3],
        mask_source=mask,
        origins=origins,
        keys=call.problem.k,
        packed=call.packed,
        step=step,
    )
    with torch.no_grad(), session.paused():
        outputs = call.layout.by_head(out.detach())
    if call.modified_scores is None:
        handlers.answer(lambda: call.problem, lambda: Answer(outputs, None, None), keeps_output=True)
    elif handlers.observations:
        _observe_weights(handlers, call, mask, outputs)
    if handlers.changes:
        with session.paused():
            by_head = call.layout.by_head(out)
        changed = handlers.changed(by_head, partial(_uniform_output, call), partial(_problem_or_none, call))
        with session.paused():
            out = call.layout.written(changed, out)
    if origins is not None:
        follow_reported(out, call.layout.axes, origins, step.number)
    return out


def _followed(out: Tensor, call: HeadsInBatch) -> Tensor:
    """Follow the output of a call without an axis of heads to where the model merges the heads; it is then reported to
    the interceptors, as one of `scaled_dot_product_attention`. Return the output.
    """
    session = current_session()
    must_trace(session.module_calls)
    if session.reports_unreadable(call.q):
        return out
    origins = session.origins_of(call.q, call.k, call.v)
    if origins is None:  # a plan is followed, which states no such call
        report_unreadable(session.module_calls, OTHER_WAY)
        return out
    refuse_multiplied(call.q, call.k, call.v)
    session.lineage.set_attended(out, origins)
    source = SDPACall.of(call.q, call.k, call.v, call.options, out, origins, None)
    return hold(AttentionOutput(source, out, source.axes, source.module_calls, origins), out)


def report_unread(name: str, reason: str) -> None:
    """Report the running modules to the interceptors as unreadable, since their call of an engine's function `name`
    cannot be read, for a `reason` such as "with qv".
    """
    report_unreadable(current_session().module_calls, f"attention of these modules by {name} {reason} cannot be read")


def _received_mask(call: EngineCall) -> ReceivedMask:
    """Return the mask of a call. A key is also hidden if changed scores of it are -inf."""
    if call.modified_scores is None:
        return ReceivedMask.of_problem(call.problem)
    return ReceivedMask.of_problem(_problem_of_visible(call))


def _problem_of_visible(call: EngineCall) -> Problem:
    """Return a call with changed scores as a `Problem` with the same visible keys; its scores are not changed."""
    tensors, scores = call.problem, call.weights_and_scores[1]
    return Problem.checked(tensors.q, tensors.k, tensors.v, mask=scores != -torch.inf)


def _observe_weights(handlers: CallHandlers, call: EngineCall, mask: MaskSource, outputs: Tensor) -> None:
    """Pass the attention weights of a call with changed scores to the observers, with the engine's outputs."""
    with torch.no_grad(), current_session().paused():
        weights, scores = call.weights_and_scores
        values = call.problem.v.to(weights.dtype)
        handlers.observe_weights(weights, mask.read(), outputs, values, True, lambda: (scores, None))


def _uniform_output(call: EngineCall) -> Tensor:
    """Return what each head would output if every query attended with equal weights to all keys that it may see."""
    return uniform_output(call.problem if call.modified_scores is None else _problem_of_visible(call))


def _problem_or_none(call: EngineCall) -> Problem | None:
    """Return a call as a `Problem`; None if the model changes its scores in its own way."""
    return call.problem if call.modified_scores is None else None


def _with_output(result: Any, out: Tensor) -> Any:
    """Return an engine's `result`, an output or a tuple of an output and further tensors, with the output `out`."""
    if not isinstance(result, tuple):
        return out
    others = (out, *result[1:])
    return type(result)(*others) if hasattr(result, "_fields") else others
