"""Interception of calls of torch's `scaled_dot_product_attention`."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from headwise.attention.autocast import autocast_dtype
from headwise.attention.masks.base import Mask
from headwise.attention.masks.factories import causal
from headwise.attention.masks.grid import Grid
from headwise.attention.problem import Answer, Problem, mask_and_bias
from headwise.attention.uniform_attention import uniform_output
from headwise.intercept.additive_masks import fill_hidden_rows_as_torch, with_infinite
from headwise.intercept.call_handlers import handlers_of_call
from headwise.intercept.call_stack import call_stack
from headwise.intercept.foreign_answer import is_attention
from headwise.intercept.foreign_functions import SDPA, is_foreign
from headwise.intercept.received_mask import MaskSource, ReceivedMask
from headwise.shapes import Float


def intercepted_sdpa(
    previous: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Compute `previous`, torch's `scaled_dot_product_attention` or what another library has put in its place, and
    return its output. Inside an intercepted model, the interceptors observe the attention weights and may change the
    output.
    """
    if not call_stack.intercepts:
        return previous(query, key, value, *args, **kwargs)
    q, k, v = map(_by_head, (query, key, value))
    options = dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs

    @cache
    def read_problem() -> Problem:
        return _problem_of(query, key, value, **options)

    mask_origin = (options.get("attn_mask"), options.get("is_causal", False))
    mask_source = MaskSource(lambda: ReceivedMask.of_problem(read_problem()), mask_origin)
    grid = Grid(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.device)
    origins = call_stack.origins_of(query, key, value)

    @cache
    def compute() -> Answer:
        return Answer(_by_head(previous(query, key, value, *args, **kwargs)), None, None)

    def compute_without_dropout() -> Answer:
        return Answer(_by_head(previous(query, key, value, **{**options, "dropout_p": 0.0})), None, None)

    def as_torch(out: Tensor) -> Tensor:
        return fill_hidden_rows_as_torch(out, v, options.get("attn_mask")) if query.ndim == 4 else out

    is_replaced = is_foreign(previous, SDPA)
    if is_replaced and not is_attention(read_problem, compute, compute_without_dropout):
        return compute().out.reshape(*query.shape[:-1], value.shape[-1])
    handlers = handlers_of_call(grid, k.shape[1], v.shape[3], mask_source=mask_source, origins=origins)
    out = handlers.answer(read_problem, compute, is_replaced).out
    if handlers.observations and not is_replaced and not options.get("dropout_p"):
        out = as_torch(out)
    out = handlers.changed(out, lambda: as_torch(uniform_output(read_problem())))
    out = out.reshape(*query.shape[:-1], value.shape[-1])
    call_stack.lineage.set_attended(out, origins)
    return out


def _by_head(tensor: Tensor) -> Float[Tensor, "batch heads length width"]:
    """Return `tensor`, the query, key, value or output of a call of SDPA, with axes `(batch, heads, length, width)`. If
    `tensor` has three axes, an axis of one head is inserted; if it has more than four, all axes before the heads become
    one batch axis.
    """
    return tensor[:, None] if tensor.ndim == 3 else tensor.reshape(-1, *tensor.shape[-3:])


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
    q, k, v = widest_dtype_under_autocast(_by_head(query), _by_head(key), _by_head(value))
    mask: Mask | Tensor | None = attn_mask
    if attn_mask is not None and query.ndim == 3 and attn_mask.ndim == 3:
        mask = attn_mask[:, None]
    elif attn_mask is not None and attn_mask.ndim > 4:
        mask = attn_mask.expand(*query.shape[:-3], *attn_mask.shape[-3:]).reshape(-1, *attn_mask.shape[-3:])
    mask, bias = mask_and_bias(mask, None)
    bias = None if bias is None else with_infinite(bias)
    positions: dict[str, Any] = {}
    if is_causal:
        mask = causal() if mask is None else causal() & mask
        if q.shape[2] != k.shape[2]:  # torch aligns the first query with the first key
            of_queries, of_keys = (torch.arange(tensor.shape[2], device=q.device) for tensor in (q, k))
            positions = {"query_positions": of_queries, "key_positions": of_keys}
    return Problem.checked(q, k, v, mask=mask, bias=bias, scale=scale, dropout=dropout_p, **positions)


def widest_dtype_under_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v in one dtype if autocast is on, since their dtypes may then differ: the dtype to which torch
    promotes all three. Otherwise return q, k and v unchanged.
    """
    if autocast_dtype(q.device) is None:
        return q, k, v
    widest = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    return q.to(widest), k.to(widest), v.to(widest)
