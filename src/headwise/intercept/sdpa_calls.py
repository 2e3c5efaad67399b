"""Interception of calls of torch's `scaled_dot_product_attention`."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from headwise.attention.attend import uniform_output
from headwise.attention.autocast import autocast_dtype
from headwise.attention.masks.base import Mask
from headwise.attention.masks.factories import causal
from headwise.attention.masks.grid import Grid
from headwise.attention.problem import Answer, Problem, mask_and_bias
from headwise.intercept.accelerated_sdpa import accelerated_sdpa
from headwise.intercept.additive_masks import fill_hidden_rows_as_torch, with_infinite
from headwise.intercept.attention_source import AttentionSource
from headwise.intercept.call_handlers import CallHandlers, handlers_of_call
from headwise.intercept.foreign_answer import is_attention
from headwise.intercept.foreign_functions import SDPA, is_causal_bias, is_foreign
from headwise.intercept.module_call import ModuleCall, must_trace, report_empty, report_unreadable
from headwise.intercept.plans import OTHER_WAY, Step
from headwise.intercept.received_mask import MaskSource, ReceivedMask
from headwise.intercept.session import current_session
from headwise.intercept.trace.axes import Factor, HeadLayout, OutputAxes
from headwise.intercept.trace.functions import FunctionCall
from headwise.intercept.trace.lineage import CallOrigins
from headwise.intercept.trace.outputs import before_function, hold, refuse_multiplied
from headwise.intercept.trace.state import AttentionOutput
from headwise.shapes import Float


def intercepted_sdpa(previous: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Replacement of torch's `scaled_dot_product_attention`. Inside an intercepted model, interceptors observe the
    attention weights and may change the output. Inside an accelerated model, the native kernels may compute the output.
    Elsewhere, return the output of `previous`, the function that is replaced.
    """
    session = current_session()
    if not session.intercepts:
        return accelerated_sdpa(previous, *args, **kwargs)
    with session.paused():  # so that only the model's own functions are followed
        return _reported_sdpa(previous, *args, **kwargs)


def _reported_sdpa(
    previous: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Compute a call of SDPA inside an intercepted model, and return its output. The output is recorded and followed,
    since later operations of the model show which axis is the heads. The interceptors then observe the attention
    weights and may change the output.
    """
    session = current_session()
    if session.reports_unreadable(query):
        return accelerated_sdpa(previous, query, key, value, *args, **kwargs)
    step = session.step(SDPA.__name__, query, key, value) if query.ndim == 4 else None
    if session.following is not None:
        return _planned_sdpa(previous, query, key, value, step, *args, **kwargs)
    if step is None:
        must_trace(session.module_calls)
    origins = session.origins_of(query, key, value)
    assert origins is not None
    refuse_multiplied(query, key, value)
    options = _options_of(query, *args, **kwargs)
    call = before_function(FunctionCall(previous, (query, key, value), options))
    query, key, value = call.args
    with session.paused():
        out = accelerated_sdpa(previous, query, key, value, **options)
    session.lineage.set_attended(out, origins)
    if not key.shape[-2]:  # an empty memory, which nothing attends to
        report_empty(session.module_calls)
        return out
    source = SDPACall.of(query, key, value, options, out, origins, step)
    if is_foreign(previous, SDPA):
        layout = HeadLayout(tuple(out.shape), source.axes.value, source.axes.queries, ())

        def compute_without_dropout() -> Answer:
            return Answer(layout.by_head(previous(query, key, value, **{**options, "dropout_p": 0.0})), None, None)

        answer = Answer(layout.by_head(out), None, None)
        if not is_attention(lambda: source.problem(layout), lambda: answer, compute_without_dropout):
            return out
    number = None if step is None else step.number
    return hold(AttentionOutput(source, out, source.axes, source.module_calls, origins, number=number), out)


def _options_of(query: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call of SDPA after queries, keys and values, by name."""
    options = dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
    if is_causal_bias(options.get("attn_mask")):  # torch computes it only under the name of its own function
        options["attn_mask"] = options["attn_mask"]._materialize(query.device)
    return options


def _planned_sdpa(
    previous: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: Step | None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Compute a call of SDPA in a model that follows a plan, and return its output. The interceptors observe the
    attention weights and may change the output at once, since the plan states that axis 1 is the heads. If the plan
    states no such call, return the output of SDPA.
    """
    options = _options_of(query, *args, **kwargs)
    session = current_session()
    with session.paused():
        out = accelerated_sdpa(previous, query, key, value, **options)
    if step is None or not key.shape[-2]:
        return out
    if is_foreign(previous, SDPA):
        report_unreadable(session.module_calls, OTHER_WAY)
        return out
    source = SDPACall.of(query, key, value, options, out, None, step)
    layout = HeadLayout(tuple(out.shape), 3, (2,), (Factor(1, 1, out.shape[1]),) if out.shape[1] > 1 else ())
    handlers = source.handlers(layout)
    source.observe(handlers, layout, out.detach())
    return handlers.changed(out, lambda: source.uniform_output(layout), lambda: source.stated_problem(layout))


@dataclass(frozen=True, eq=False)
class SDPACall(AttentionSource[CallHandlers]):
    """One call of SDPA in an intercepted model, with the tensors as the model passed them.

    Attributes:
        query: the queries.
        key: the keys.
        value: the values.
        options: other arguments, by name.
        shape: shape of the output.
        module_calls: the running module calls, outermost first.
        origins: sources of the queries, keys and values.
        values: the values, as the model passed them.
        appended_keys: number of keys at the end that stand for no token.
        step: the call as it is recorded for a plan, or as a plan states it; None if there is no plan for such a call.
        problems: the call as a `Problem`, by layout.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]
    shape: torch.Size
    module_calls: list[ModuleCall]
    origins: CallOrigins | None
    values: Tensor
    appended_keys: int
    step: Step | None
    has_usual_axes = True
    problems: dict[HeadLayout, Problem] = field(default_factory=dict)

    @staticmethod
    def of(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: dict[str, Any],
        out: Tensor,
        origins: CallOrigins | None,
        step: Step | None,
    ) -> "SDPACall":
        """Return a call in the running modules that has computed the output `out`."""
        q, k, v = (tensor.detach() for tensor in widest_dtype_under_autocast(query, key, value))
        session = current_session()
        return SDPACall(
            q,
            k,
            v,
            options,
            out.shape,
            session.module_calls[:],
            origins,
            value,
            session.appended_keys,
            step,
        )

    @property
    def axes(self) -> OutputAxes:
        """Axes of values and queries of the output."""
        return OutputAxes(len(self.shape) - 1, (len(self.shape) - 2,))

    @property
    def weight_axes(self) -> list[int | None]:
        """List with one element for each axis of the attention output except the axis of values, which the attention
        weights do not have. The element is the number of the corresponding axis of the weights: in SDPA, the same
        number.
        """
        return list(range(len(self.shape) - 1))

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that must stay unchanged until the attention weights are computed again from them: queries, keys,
        values, and the mask if there is one.
        """
        mask = self.options.get("attn_mask")
        return [self.query, self.key, self.value, *([] if mask is None else [mask])]

    @property
    def weights_id(self) -> object:
        """Identity of the attention weights: this object, since each call of SDPA computes its own weights."""
        return self

    def handlers(self, layout: HeadLayout) -> CallHandlers:
        """Report the attention call to the interceptors of the model. `layout` states which of its axes are the heads.
        Return the functions by which they observe or change the call.
        """
        batch, heads, queries = layout.sizes
        grid = Grid(batch, heads, queries, self.key.shape[-2], self.query.device)
        origin = (self.options.get("attn_mask"), self.options.get("is_causal", False), layout)
        mask_source = MaskSource(lambda: ReceivedMask.of_problem(self.problem(layout)), origin)
        keys = self._keys_and_values(layout)[0]
        if not layout.is_usual:
            must_trace(self.module_calls)
        return handlers_of_call(
            grid,
            keys.shape[1],
            self.value.shape[-1],
            self.module_calls,
            mask_source,
            origins=self.origins,
            keys=keys,
            appended_keys=self.appended_keys,
            step=self.step,
        )

    def observe(
        self, handlers: CallHandlers, layout: HeadLayout, out: Float[Tensor, "batch heads queries value_dim"]
    ) -> None:
        """Compute the attention weights of the call again, since SDPA does not return them. Pass them to the functions
        in `handlers` that observe the call.
        """
        if handlers.observations:
            handlers.observe_problem(self.problem(layout), out)

    def uniform_output(self, layout: HeadLayout) -> Float[Tensor, "batch heads queries value_dim"]:
        """Return what each head would output if every query attended with equal weights to all keys that it may see."""
        problem, mask = self.problem(layout), self._mask(layout)
        return fill_hidden_rows_as_torch(uniform_output(problem), problem.v, mask)

    def stated_problem(self, layout: HeadLayout) -> Problem:
        """Return the call as a `Problem`, headwise's form of the tensors and options of one attention call. `layout`
        states which axes of the tensors are the heads.
        """
        return self.problem(layout)

    def problem(self, layout: HeadLayout) -> Problem:
        """Return the call as a `Problem`, headwise's form of the tensors and options of one attention call. `layout`
        states which axes of the tensors are the heads. The result is cached.
        """
        if layout not in self.problems:
            query = layout.by_head(self.query.expand(*self.shape[:-2], *self.query.shape[-2:]))
            options = self.options | {"attn_mask": self._mask(layout)}
            self.problems[layout] = _problem_of(query, *self._keys_and_values(layout), **options)
        return self.problems[layout]

    def _keys_and_values(self, layout: HeadLayout) -> tuple[Tensor, Tensor]:
        """Return the keys and the values, each with axes `(batch, kv_heads, keys, ...)`. Several heads share them under
        the option `enable_gqa`, or if one axis contains both heads and queries.
        """
        if layout.is_usual and self.options.get("enable_gqa"):
            return self.key, self.value
        of_keys = tuple(head for head in layout.heads if head.axis not in layout.query_axes)
        tensors: list[Tensor] = []
        for tensor in (self.key, self.value):
            groups = self.shape[-3] // tensor.shape[-3] if self.options.get("enable_gqa") else 1
            repeated = tensor.repeat_interleave(groups, -3) if groups > 1 else tensor
            shape = (*self.shape[:-2], *tensor.shape[-2:])
            tensors.append(replace(layout, shape=shape, heads=of_keys).by_head(repeated.expand(shape)))
        return tensors[0], tensors[1]

    def _mask(self, layout: HeadLayout) -> Tensor | None:
        """Return the mask with axes `(batch, heads, queries, keys)`, where an axis may have size 1. Return None if the
        call has no mask.
        """
        mask: Tensor | None = self.options.get("attn_mask")
        if mask is None:
            return None
        mask = mask.detach()
        if prod(mask.shape[:-2]) == 1:
            return mask.reshape(1, 1, *mask.shape[-2:])
        if layout.is_usual:
            return mask[(None,) * (4 - mask.ndim)]
        return layout.by_head(mask.expand(*self.shape[:-1], self.key.shape[-2]))


def _problem_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Problem:
    """Return a call of torch's `scaled_dot_product_attention` with these arguments as a `Problem`, headwise's form of
    the tensors and options of one attention call.
    """
    q, k, v = query, key, value
    mask: Mask | Tensor | None
    mask, bias = mask_and_bias(attn_mask, None)
    bias = None if bias is None else with_infinite(bias)
    positions: dict[str, Any] = {}
    if is_causal:
        mask = causal() if mask is None else causal() & mask
        if q.shape[2] != k.shape[2]:  # torch aligns the first query with the first key
            of_queries, of_keys = (torch.arange(tensor.shape[2], device=q.device) for tensor in (q, k))
            positions = {"query_positions": of_queries, "key_positions": of_keys}
    return Problem.checked(q, k, v, mask=mask, bias=bias, scale=scale, dropout=dropout_p, **positions)


def widest_dtype_under_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v in one common dtype if autocast is on, since their dtypes may then differ. It is the dtype to
    which torch promotes all three. Without autocast, return them unchanged.
    """
    if autocast_dtype(q.device) is None:
        return q, k, v
    widest = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    return q.to(widest), k.to(widest), v.to(widest)
