"""Torch function mode that sees the functions by which an intercepted model computes attention."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headwise.intercept import eager_softmax
from headwise.intercept.adapters.engine import answered_by_engine
from headwise.intercept.adapters.sdpa import intercepted_sdpa
from headwise.intercept.adapters.torch_layers import TORCH_ATTENTION, torch_attention
from headwise.intercept.adapters.torch_operators import OPERATORS, read
from headwise.intercept.fused_functions import report_fused
from headwise.intercept.module_call import must_trace, report_unreadable
from headwise.intercept.patches import OPERATORS as OTHER_OPERATORS
from headwise.intercept.patches import SDPA, torchs_own
from headwise.intercept.plans import OTHER_WAY, Following
from headwise.intercept.session import Session, current_session
from headwise.intercept.trace.axes import VIEWS_IN_PLACE
from headwise.intercept.trace.functions import QUERIES, FunctionCall, share_memory
from headwise.intercept.trace.modules import RunningModule
from headwise.intercept.trace.outputs import after_function, before_function, lose_outputs
from headwise.intercept.trace.scores import EXPONENTIALS, contracted, follow_places, follow_scores, written_softmax
from headwise.intercept.trace.state import CURRENT
from headwise.intercept.trace.unread import report_averages, report_new_tensors
from headwise.intercept.trace.weights import before_overwriting
from headwise.intercept.unreadable_tensors import has_no_numbers
from headwise.nn.linear_engine import FOLLOWING, LINEAR, fastest_linear


class TorchCalls(TorchFunctionMode):
    """Torch function mode that traces the functions that an intercepted model calls in one thread, also as tensor
    methods: `scaled_dot_product_attention`, softmax, the functions that compute the input of a softmax, and those that
    use its result. If the model's call follows a plan (stored facts about its attention), each function is compared
    with the plan.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a torch function and return its result."""
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            return torchs_own(func)(*args, **kwargs)  # a compiler reads it; its calls are intercepted when they run
        if func in QUERIES:
            return func(*args, **kwargs)
        session = CURRENT.get()  # a session with this mode is one of this thread
        if (
            not isinstance(session, Session)
            or session.torch_mode is not self
            or session.is_paused
            or not session.module_calls
        ):
            # The mode is another one where a backward pass repeats modules in a module.
            return _run(func, torchs_own(func), args, kwargs)
        if session.following is not None:
            return _planned(session, session.following, func, args, kwargs)
        return _recorded_call(session, func, args, kwargs)


FOLLOWING.add(TorchCalls)


def _recorded_call(session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a torch function for a model whose call is traced, and return its result. Record the function call for a
    plan (stored facts about attention), which later calls of the model can follow.
    """
    recording = session.module_calls[0].recording
    if recording is None:
        return _traced(func, args, kwargs)
    recording.on_function(torchs_own(func), args, kwargs)
    result = _traced(func, args, kwargs)
    recording.on_result(result, session.lineage.is_of_input)
    return result


def _planned(session: Session, following: Following, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a torch function for a model whose call follows a plan (stored steps and attention of the model), and return
    its result. If no plan contains this step, trace the model's call from now on. If the model has already attended,
    report the contradiction to the interceptors instead.
    """
    own = func if type(func) in _IN_C else torchs_own(func)
    is_next = following.is_next(own, args, kwargs)
    if not is_next:
        if session.following is None:  # the plan was left just now
            return _recorded_call(session, func, args, kwargs)
        session.report_contradiction()
        if own in _ATTENTION_BY_HAND:
            report_unreadable(session.module_calls, OTHER_WAY)
    if own is SDPA or func in OPERATORS:
        result = _attention(own if own is SDPA else func, args, kwargs)
    elif own is func and own is not LINEAR:
        result = own(*args, **kwargs)
    else:
        result = _run(func, own, args, kwargs)
    if is_next:
        following.on_result(func, args, kwargs, result, session.module_calls)
    return result


_IN_C = type(torch.add), type(torch.Tensor.add), type(torch.Tensor.__getitem__)
"""Types of functions that are written in C, which no other library can replace under the same name."""


_ATTENTION_BY_HAND = eager_softmax.SOFTMAXES | EXPONENTIALS | {TORCH_ATTENTION}
"""Functions by which a model may attend in a call that has contradicted its plan, so that it is no longer followed."""


def trace_from_log(following: Following) -> None:
    """Trace the running call of a model that has left its plan (stored steps of an earlier call) before it first
    attended. The functions that the model has called so far are recorded as if they had been traced.
    """
    session = current_session()
    session.following = None
    session.module_calls[0].recording = following.recording()
    session.lineage.restart(following.given)
    with session.paused():
        for function, args, kwargs, result, module_calls in following.log:
            call = FunctionCall(torchs_own(function), args, kwargs)
            _take_note(call, _recorded(contracted(call, result), result, None), module_calls)


def _run(func: Any, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `func` if it is an operator under `torch.ops`, and otherwise `own`, torch's original function for `func`.
    The library that is chosen for the module computes `F.linear`.
    """
    if func is LINEAR:
        return fastest_linear(*args, **kwargs)
    return (func if isinstance(func, OTHER_OPERATORS) else own)(*args, **kwargs)


def _traced(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a torch function of an intercepted model, and return its result. If the function is part of attention,
    record it. Interceptors may change its arguments.
    """
    func = torchs_own(operator)
    if func is SDPA or operator in OPERATORS:
        return _attention(func if func is SDPA else operator, args, kwargs)
    call = before_function(FunctionCall(func, args, kwargs))
    if func is TORCH_ATTENTION:
        return torch_attention(*call.args, **call.kwargs)
    before_overwriting(call)
    kept = _scores_to_keep(call)
    followed = _not_in_place(call)
    result = _run(operator, func, call.args, call.kwargs)
    call = followed
    after_function(call, result)
    if not has_no_numbers():
        follow_places(call, result)
    call = contracted(call, result)
    result = _recorded(call, result, kept)
    session = current_session()
    report_fused(call, result, session.module_calls)
    report_new_tensors(call, result)
    _take_note(call, result, session.module_calls)
    return result


def _not_in_place(call: FunctionCall) -> FunctionCall:
    """If a function call is about to change the axes of a tensor in place, as `unsqueeze_`, return an equivalent call
    of a function that returns a view. Its argument is a view of the tensor with the old axes. The records about these
    axes are moved to this view. Return any other call unchanged.
    """
    function = VIEWS_IN_PLACE.get(call.function)
    if function is None:
        return call
    session, tensor = current_session(), call.tensors[0]
    must_trace(session.module_calls)  # a plan would record the tensor with its later axes
    with session.paused():
        before = tensor.detach()
    session.attention.move(tensor, before)
    session.lineage.move(tensor, before, session.module_calls)
    return FunctionCall(function, (before, *call.args[1:]), call.kwargs)


def _take_note(call: FunctionCall, result: Any, module_calls: Sequence[RunningModule]) -> None:
    """Record the sources (tensors on which it depends), the tokens and the token ids of the `result` of a function
    call.
    """
    session = current_session()
    session.lineage.record(call, result, module_calls)
    if has_no_numbers():
        lose_outputs()
    else:
        session.lineage.record_tokens(call, result, module_calls)


def _attention(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a call of torch's `scaled_dot_product_attention`, or of another attention operator of torch, inside an
    intercepted model. Return its result, with the interceptors' changes.
    """
    if function is SDPA:
        return intercepted_sdpa(SDPA, *args, **kwargs)
    name = OPERATORS[function].__name__
    return answered_by_engine(name, lambda: function(*args, **kwargs), lambda: read(function, args, kwargs))


def _scores_to_keep(call: FunctionCall) -> Tensor | None:
    """Return a copy of the scores (the first argument) of a softmax call if the call overwrites them. Otherwise return
    None.
    """
    if call.function not in eager_softmax.SOFTMAXES or not isinstance(out := call.kwargs.get("out"), Tensor):
        return None
    scores = call.tensors[0]
    return scores.detach().clone() if share_memory(scores, out) else None


def _recorded(call: FunctionCall, result: Any, kept: Tensor | None) -> Any:
    """Return the `result` of a function call in an intercepted model. If it is attention scores, attention weights or
    an attention output, record it, so that later functions that use it are recognised. If it is an attention output,
    interceptors may change it.
    """
    if call.function in eager_softmax.SOFTMAXES:
        arguments = (*call.args, *(call.kwargs[name] for name in ("input", "dim") if name in call.kwargs), None)
        negative = -arguments[0].detach() if call.function is F.softmin else None
        eager_softmax.on_softmax(arguments[0], result, arguments[1], kept, numbers=negative)
        if current_session().attention.weights.get(result) is None:  # such as a softmax over heads
            follow_scores(call, result)
        return result
    report_averages(call)
    result = eager_softmax.on_function(call, result)
    follow_scores(call, result)
    softmax = written_softmax(call, result)
    if softmax is not None:
        scores, numbers, dim = softmax
        eager_softmax.on_softmax(scores, result, dim, numbers=numbers, is_written=True)
    return result
