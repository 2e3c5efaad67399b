"""Calls of torch's `scaled_dot_product_attention` (SDPA)."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from headwise.attention.masks.factories import causal
from headwise.attention.problem import Answer
from headwise.intercept.accelerated_sdpa import SDPACall, accelerated_sdpa
from headwise.intercept.answer import HeldCall, answered, held
from headwise.intercept.attention_call import AttentionCall
from headwise.intercept.patches import SDPA, is_causal_bias, is_foreign
from headwise.intercept.session import current_session
from headwise.intercept.trace.axes import Factor, HeadLayout
from headwise.intercept.trace.functions import FunctionCall
from headwise.intercept.trace.outputs import before_function, refuse_multiplied


def intercepted_sdpa(previous: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Replacement of torch's `scaled_dot_product_attention`. Inside an intercepted model, interceptors observe the
    attention weights and may change the output. Inside a model passed to `headwise.accelerate`, headwise's own kernels
    may compute the output. Elsewhere, return the output of `previous`, the function that is replaced.
    """
    session = current_session()
    if not session.intercepts:
        return accelerated_sdpa(previous, *args, **kwargs)
    with session.paused():  # so that only the model's own functions are followed
        return _reported_sdpa(previous, *args, **kwargs)


def _reported_sdpa(
    previous: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Compute a call of torch's SDPA inside an intercepted model, and return its output. If a plan (the record of an
    earlier run) states that axis 1 is the heads, the call is reported at once. Otherwise it is reported later:
    operations of the model on the output show which axis is the heads.
    """
    session = current_session()
    if session.reports_unreadable(query):
        return accelerated_sdpa(previous, query, key, value, *args, **kwargs)
    step = session.step(SDPA.__name__, query, key, value) if query.ndim == 4 else None
    options = dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
    if is_causal_bias(options.get("attn_mask")):  # torch computes it only under the name of its own function
        options["attn_mask"] = options["attn_mask"]._materialize(query.device)
    origins = session.origins_of(query, key, value)
    if origins is not None:
        refuse_multiplied(query, key, value)
        query, key, value = before_function(FunctionCall(previous, (query, key, value), options)).args
    out = accelerated_sdpa(previous, query, key, value, **options)
    read = SDPACall.of(query, key, value, **options)
    scores = {"mask": causal() if read.is_causal else None, "scale": read.scale, "dropout": read.dropout_p}
    call = AttentionCall(query, key, value, scores, added=read.attn_mask, is_top_left=read.is_causal)
    call.origins, call.step, call.mask_origin = origins, step, ("sdpa", read.attn_mask, read.is_causal)
    without_dropout: Callable[[], Tensor] | None = None
    if is_foreign(previous, SDPA):
        without_dropout = partial(previous, query, key, value, **{**options, "dropout_p": 0.0})
    if origins is not None:
        return held(call, out, shares_heads=read.enable_gqa, compute_without_dropout=without_dropout)
    if step is None or not key.shape[-2]:
        return out
    layout = HeadLayout(tuple(out.shape), 3, (2,), (Factor(1, 1, out.shape[1]),) if out.shape[1] > 1 else ())
    call, answer = HeldCall.of(call, out, shares_heads=read.enable_gqa).with_heads(layout), Answer(out, None, None)
    return answered(SDPA.__name__, call, lambda: answer, compute_without_dropout=without_dropout).out
