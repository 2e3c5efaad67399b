"""Answer of an attention call, whichever function the model calls: it is computed, observed, changed and followed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import torch
from torch import Tensor

from headwise.attention.autocast import without_autocast
from headwise.attention.problem import Answer, Problem
from headwise.intercept.attention_call import HEADS_FIRST, AttentionCall, OutputLayout, widest_dtype_under_autocast
from headwise.intercept.attention_source import AttentionSource
from headwise.intercept.call_handlers import CallHandlers, handlers_of_call
from headwise.intercept.module_call import must_trace, report_empty, report_unreadable
from headwise.intercept.plans import OTHER_WAY
from headwise.intercept.session import current_session
from headwise.intercept.trace.axes import HeadLayout, OutputAxes
from headwise.intercept.trace.outputs import follow_reported, hold, refuse_multiplied
from headwise.intercept.trace.state import AttentionOutput
from headwise.intercept.undropped import random_state_kept
from headwise.shapes import Float
from headwise.statistics.row_blocks import row_blocks_of_problem

OTHER_OUTPUT = (
    "another library replaced the attention function, and its output in these modules is not that of softmax attention"
)
"""Reason for modules in which another library's function computes something else than softmax attention."""


def answered(
    function: str,
    call: AttentionCall,
    compute: Callable[[], Answer],
    *,
    compute_without_dropout: Callable[[], Tensor] | None = None,
) -> Answer:
    """Answer one attention call inside an intercepted model. The interceptors observe its weights, and may change its
    output, which is then followed to the output projection. Return the answer with their changes.

    Args:
        function: name of the function that the model calls, by which a plan states the call.
        call: the call.
        compute: the model's function, which returns the output in the layout of the call; it is called at most once.
        compute_without_dropout: the same function without dropout, if another library has put it in the place of
            torch's. It is passed if the output must be compared with softmax attention.
    """
    session = current_session()
    with session.paused():
        call.step = call.step or session.step(function, call.q, call.k, call.v)
        if call.step is None:
            return compute()
        call.origins = session.origins_of(call.q, *(call.sources or (call.k, call.v)))
        refuse_multiplied(call.q, call.k, call.v)
        layout, compute_once = call.layout, cache(compute)

        @cache
        def compute_by_head() -> Answer:
            answer = compute_once()
            return answer._replace(out=layout.by_head(answer.out))

        is_foreign = compute_without_dropout is not None
        if compute_without_dropout is not None and not is_attention(call, compute_once().out, compute_without_dropout):
            return compute_once()
        handlers = handlers_of_call(call)
        if not handlers.observations and not handlers.changes:
            answer = compute_once()
        else:
            answer = handlers.answer(compute_by_head, keeps_output=is_foreign)
            out = handlers.changed(answer.out)
            is_computed = compute_once.cache_info().currsize > 0
            if is_computed and out is compute_by_head().out:
                answer = compute_once()
            else:
                answer = answer._replace(out=layout.written(out, compute_once().out if is_computed else out))
        if call.origins is not None and layout.axes is not None:
            follow_reported(answer.out, layout.axes, call.origins, call.step.number)
        elif call.origins is not None:
            session.lineage.set_attended(answer.out, call.origins)
        return answer


def held(
    call: AttentionCall,
    out: Tensor,
    *,
    shares_heads: bool = False,
    compute_without_dropout: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Follow the output `out` of an attention call, whose heads may be in any axis, to where the model merges them. The
    call is reported to the interceptors then. Return the output; with changes, if the layout of the heads is known.

    Args:
        call: the call, with queries, keys and values of the axes `(..., length, features)`, and their origins. If its
            `step` is None, no plan is made for calls of the model.
        out: the output, with the same axes as the queries.
        shares_heads: True if several heads may share keys and values.
        compute_without_dropout: as in `answered`.
    """
    session = current_session()
    if call.origins is None:  # a plan is followed, which states no such call
        report_unreadable(session.module_calls, OTHER_WAY)
        return out
    if call.step is None:
        must_trace(session.module_calls)
    session.lineage.set_attended(out, call.origins)
    if not call.k.shape[-2]:  # an empty memory, which nothing attends to
        report_empty(session.module_calls)
        return out
    source = HeldCall.of(call, out, shares_heads=shares_heads)
    if compute_without_dropout is not None:
        layout = HeadLayout(tuple(out.shape), source.axes.value, source.axes.queries, ())
        if not is_attention(source.with_heads(layout), out, compute_without_dropout):
            return out
    number = None if call.step is None else call.step.number
    return hold(AttentionOutput(source, out, source.axes, session.module_calls[:], call.origins, number=number), out)


@dataclass(frozen=True, eq=False)
class HeldCall(AttentionSource):
    """Attention call of which it is not yet known which axis of its tensors is the heads. It is stored until later
    functions of the model show the axis.

    Attributes:
        call: the call, with the axes `(..., length, features)`.
        shape: shape of the output.
        shares_heads: True if several heads may share keys and values.
        values: the values, as the model passed them.
    """

    call: AttentionCall
    shape: torch.Size
    shares_heads: bool
    values: Tensor
    has_usual_axes = True

    @staticmethod
    def of(call: AttentionCall, out: Tensor, *, shares_heads: bool) -> "HeldCall":
        """Return a `HeldCall` for a call that has computed the output `out` in the modules that run now. Queries, keys
        and values get one dtype now, since autocast may have ended when the call is reported.
        """
        session, values = current_session(), call.v
        tensors = widest_dtype_under_autocast(call.q, call.k, call.v)
        call.q, call.k, call.v = (tensor.detach() for tensor in tensors)
        call.module_calls, call.appended_keys = session.module_calls[:], session.appended_keys
        return HeldCall(call, out.shape, shares_heads, values)

    @property
    def axes(self) -> OutputAxes:
        """Axes of the output: the last one has the features of the values, the one before it the queries."""
        return OutputAxes(len(self.shape) - 1, (len(self.shape) - 2,))

    @property
    def weight_axes(self) -> list[int | None]:
        """Axis of the weights that corresponds to each axis of the output except the last one, the features of the
        values: the axis with the same number.
        """
        return list(range(len(self.shape) - 1))

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors from which the weights are computed again: queries, keys, values, and the mask if there is one."""
        added = self.call.added
        return [self.call.q, self.call.k, self.call.v, *([] if added is None else [added])]

    @property
    def weights_id(self) -> object:
        """This object as the identity of the attention weights, since each call computes weights of its own."""
        return self

    def handlers(self, layout: HeadLayout) -> CallHandlers:
        """Report the attention call to the interceptors (objects that observe or change attention). `layout` states
        which axes of the output are the heads. Return the functions by which the interceptors observe or change the
        call.
        """
        return handlers_of_call(self.with_heads(layout))

    def with_heads(self, layout: HeadLayout) -> AttentionCall:
        """Return the attention call with the axes `(batch, heads, length, features)`. `layout` states which axes are
        the heads. If an axis of the call contains both heads and queries, these heads share keys and values.
        """
        call, is_usual = self.call, layout.is_usual
        of_keys = tuple(head for head in layout.heads if head.axis not in layout.query_axes)

        def of_heads(tensor: Tensor) -> Tensor:
            if is_usual and self.shares_heads:
                return tensor
            groups = self.shape[-3] // tensor.shape[-3] if self.shares_heads else 1
            repeated = tensor.repeat_interleave(groups, -3) if groups > 1 else tensor
            shape = (*self.shape[:-2], *tensor.shape[-2:])
            expanded = repeated.expand(shape)
            return expanded if is_usual else replace(layout, shape=shape, heads=of_keys).by_head(expanded)

        def arranged(mask: Tensor) -> Tensor:
            if prod(mask.shape[:-2]) == 1:
                return mask.reshape(1, 1, *mask.shape[-2:])
            if is_usual:
                return mask[(None,) * (4 - mask.ndim)]
            return layout.by_head(mask.expand(*self.shape[:-1], call.k.shape[-2]))

        q = call.q.expand(*self.shape[:-2], *call.q.shape[-2:])
        in_layout = OutputLayout(self.axes, layout.by_head, lambda changed, out: layout.from_heads(changed))
        return replace(
            call,
            q=q if is_usual else layout.by_head(q),
            k=of_heads(call.k),
            v=of_heads(call.v),
            layout=HEADS_FIRST if is_usual else in_layout,
            arranged=arranged,
            mask_origin=call.mask_origin if is_usual else (),
            step=call.step if is_usual else None,
        )


def is_attention(call: AttentionCall, out: Tensor, compute_without_dropout: Callable[[], Tensor]) -> bool:
    """Return True if the function by which another library replaces torch's attention computes softmax attention. Its
    output is compared, up to rounding, with softmax attention of the same queries, keys and values. If they differ,
    report the running modules as unreadable.

    Args:
        call: the call.
        out: output of the function, in the layout of the call.
        compute_without_dropout: the same function without dropout, for a call with dropout, whose output is random.
    """
    with current_session().paused():
        problem = call.problem
        with torch.no_grad(), without_autocast(problem.q.device):
            if problem.dropout > 0:
                with random_state_kept(problem.q.device):
                    out = compute_without_dropout()
            if _is_output(problem.without_dropout(), call.layout.by_head(out)):
                return True
    report_unreadable(current_session().module_calls, OTHER_OUTPUT)
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
