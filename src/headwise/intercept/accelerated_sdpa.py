"""Calls of torch's `scaled_dot_product_attention` in accelerated models, computed by the native kernels where they can.

A call is computed with exactly the arguments that the model passes. What the kernels cannot compute, or would compute
more slowly, is passed on to torch unchanged.
"""

import math
from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend

from headwise.attention.autocast import AUTOCAST_DTYPES, autocast_dtype
from headwise.attention.backend_choice import why_slower
from headwise.attention.backends.native import backend as native
from headwise.attention.masks.base import Mask
from headwise.attention.masks.factories import causal
from headwise.attention.problem import DTYPES, Problem
from headwise.checks import has_own_class, has_values
from headwise.intercept.accelerated_modules import accelerated_modules
from headwise.intercept.foreign_functions import SDPA, call_replaced, is_causal_bias, is_foreign
from headwise.shapes import Float, Int

FOREIGN = "another library replaced scaled_dot_product_attention"
UNUSUAL = "the tensors are of a class of their own, or have no values, as under torch.func or torch.jit.trace"
DROPOUT = "the call has dropout, whose random numbers are torch's"
SIZES = "the sizes of queries, keys and values are not (batch, heads, length, head_dim) with the same batch and heads"
TWO_MASKS = "the call has a mask and is_causal, which torch combines in its own way"
SCALE = "the scale is not a positive number"
KERNEL_CHOSEN = "torch.nn.attention.sdpa_kernel names the kernel to use"
SECOND_DERIVATIVE = "torch computes the call in a way that has second derivatives"
MASK_GRADIENT = "the mask requires a gradient"
MASK = "the mask does not broadcast to (batch, heads, queries, keys), or its dtype is not one that torch adds"


class SDPACall(NamedTuple):
    """Arguments of one call of torch's `scaled_dot_product_attention`, under the names of torch's parameters."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @staticmethod
    def of(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> "SDPACall":
        """Return the arguments of a call of torch's `scaled_dot_product_attention`. Raise `TypeError` for an argument
        that torch's function does not have.
        """
        return SDPACall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Queries, keys and values of the call."""
        return self[:3]

    @property
    def needs_gradient(self) -> bool:
        """True if gradients are enabled, and queries, keys or values require a gradient."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)


def accelerated_sdpa(previous: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Replacement of torch's `scaled_dot_product_attention` that counts the calls in accelerated models. The native
    kernels compute such a call if they support it and are expected to be faster. Otherwise return the output of
    `previous`: torch's function, or the function by which another library has replaced it.
    """
    own: Callable[..., Tensor] = partial(call_replaced, previous)
    if not accelerated_modules.is_accelerated:
        return own(*args, **kwargs)
    try:
        call = SDPACall.of(*args, **kwargs)
    except TypeError:
        return own(*args, **kwargs)  # which raises its own error, or has an argument that is new in torch
    answer = FOREIGN if is_foreign(previous, SDPA) else _answer(call)
    if isinstance(answer, str):
        if not is_causal_bias(call.attn_mask):  # which makes another call
            accelerated_modules.record(answer)
        return own(*args, **kwargs)
    accelerated_modules.record(None)
    return answer


def _answer(call: SDPACall) -> Float[Tensor, "*batch queries value_dim"] | str:
    """Return the output of an attention call, computed by the native kernels, or the reason why torch must compute the
    call.
    """
    mask = call.attn_mask
    if forward_ad._current_level >= 0 or torch._C._is_tracing():
        return UNUSUAL
    if not all(map(_is_usual, call.tensors if mask is None else (*call.tensors, mask))):
        return UNUSUAL
    dtype = autocast_dtype(call.query.device)
    if dtype is not None:
        q, k, v = (each.to(dtype) if each.dtype in AUTOCAST_DTYPES else each for each in call.tensors)
        call = call._replace(query=q, key=k, value=v)
    reason = why_not(call)
    if reason is not None:
        return reason
    ranges = _causal_ranges(call.query.shape[-2], call.key.shape[-2]) if call.is_causal else None
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)]
        ranges, reason = accelerated_modules.ranges_of(mask, dtype if mask.dtype in AUTOCAST_DTYPES else None)
        if reason is not None:
            return reason
    out: Tensor = torch.ops.headwise.attend_forward(*native.arguments(_problem_of(call), ranges, None))[0]
    return out if call.query.ndim == 4 else out[0]


def _is_usual(tensor: Tensor) -> bool:
    """Return True if a tensor is of a class of torch itself, is not nested, and has values that can be read."""
    return has_own_class(tensor) and not tensor.is_nested and has_values(tensor)


def _problem_of(call: SDPACall, mask: Mask | None = None) -> Problem:
    """Return an SDPA call as a `Problem`, headwise's form of the tensors and options of one attention call. The call's
    own mask is replaced by `mask`. Tensors without a batch axis get one of size 1.
    """
    q, k, v = (tensor[(None,) * (4 - tensor.ndim)] for tensor in call.tensors)
    return Problem.checked(q, k, v, mask=mask, scale=call.scale)


@lru_cache(maxsize=8)
def _causal_ranges(queries: int, keys: int) -> Int[Tensor, "1 1 queries 1 2"]:
    """Return the range of keys that each query may attend to under torch's flag `is_causal`, as first key and end.
    Torch aligns the first query with the first key: query i attends to keys 0 to i.
    """
    with torch.inference_mode(False):  # later calls may save this tensor for a backward pass
        stop = torch.arange(1, queries + 1, dtype=torch.int32, device="cpu").clamp(max=keys)
        return torch.stack([torch.zeros_like(stop), stop], -1)[None, None, :, None].contiguous()


# -- reasons for which torch computes a call ---------------------------------------------------------------------------

_reasons: dict[Hashable, str | None] = {}
"""Results of `why_not` by all that they depend on, since the layers of a model make equal calls."""

MOST_REASONS = 1024
"""Number of stored results, after which all are removed."""


def why_not(call: SDPACall) -> str | None:
    """Return the reason, in one sentence, why torch must compute an SDPA call. Return None if the native kernels
    support the call and are expected to be faster. Only sizes, dtypes and options are read, not the values of tensors.
    """
    mask = call.attn_mask
    key = (
        *((tensor.shape, tensor.dtype, tensor.device) for tensor in call.tensors),
        *(None if mask is None else (mask.shape, mask.dtype, mask.requires_grad), call[4:]),
        *(call.needs_gradient, torch.get_num_threads(), torch._C._get_flash_sdp_enabled()),
    )
    if key not in _reasons:
        if len(_reasons) >= MOST_REASONS:
            _reasons.clear()
        _reasons[key] = _examine(call)
    return _reasons[key]


def _examine(call: SDPACall) -> str | None:
    """Compute the result of `why_not`, which caches it: the reason why torch must compute a call, or None."""
    if not _has_usual_sizes(call):
        return SIZES
    if call.scale is not None and not 0 < call.scale < math.inf:
        return SCALE
    is_square = call.query.shape[-2] == call.key.shape[-2]
    problem = _problem_of(call, causal() if call.is_causal and is_square else None)
    return native.why_not(problem) or _why_not_options(call) or _why_slower(problem, call.attn_mask is None)


def _has_usual_sizes(call: SDPACall) -> bool:
    """Return True if the sizes of queries, keys and values are supported: axes (batch, heads, length, head_dim) or the
    last three of these, none of them empty. Heads may share keys and values only if `enable_gqa` is True.
    """
    q, k, v = (tensor.shape for tensor in call.tensors)
    if len(q) not in (3, 4) or len(k) != len(q) or len(v) != len(q) or 0 in (*q, *k, *v):
        return False
    if len({(tensor.dtype, tensor.device) for tensor in call.tensors}) > 1 or call.query.dtype not in DTYPES:
        return False
    heads_fit = q[-3] % k[-3] == 0 if call.enable_gqa else q[-3] == k[-3]
    return heads_fit and q[:-3] == k[:-3] == v[:-3] and k[-3:-1] == v[-3:-1] and q[-1] == k[-1]


def _why_not_options(call: SDPACall) -> str | None:
    """Return the reason why the native kernels cannot compute a call with these options, such as dropout or a mask.
    Return None if they can.
    """
    if call.dropout_p > 0:
        return DROPOUT
    reason = None if call.attn_mask is None else _why_not_mask(call, call.attn_mask)
    if reason is not None:
        return reason
    if not torch._C._get_flash_sdp_enabled():
        return KERNEL_CHOSEN
    q, k, v, mask, *_ = call
    options: dict[str, Any] = {"is_causal": call.is_causal, "scale": call.scale, "enable_gqa": call.enable_gqa}
    if call.needs_gradient and torch._fused_sdp_choice(q, k, v, mask, **options) == SDPBackend.MATH.value:
        return SECOND_DERIVATIVE
    return None


def _why_not_mask(call: SDPACall, mask: Tensor) -> str | None:
    """Return the reason why the native kernels cannot compute a call with this mask, from its shape, dtype and options,
    not its values. Return None if they can.
    """
    sizes = (*call.query.shape[:-1], call.key.shape[-2])
    fits = all(size in (1, wanted) for size, wanted in zip(mask.shape[::-1], sizes[::-1], strict=False))
    if not fits or not 2 <= mask.ndim <= len(sizes) or mask.device != call.query.device:
        return MASK
    if mask.dtype not in (torch.bool, torch.float32, call.query.dtype):
        return MASK
    if call.is_causal:
        return TWO_MASKS
    return MASK_GRADIENT if mask.requires_grad and torch.is_grad_enabled() else None


SMALLEST_QUERIES = {torch.float32: 512, torch.bfloat16: 1024}
"""Number of queries from which the native kernels are expected to be faster than torch's, by dtype; measured with
SmolLM2 on a processor with AMX (docs/lab-notes.md).
"""


def _why_slower(problem: Problem, hides_nothing: bool) -> str | None:
    """Return the reason why torch is expected to compute a call as fast as the native kernels, such as few queries.
    Return None if the kernels are expected to be faster. `hides_nothing` is False for a call with a mask, for which
    torch computes all scores, also hidden ones.
    """
    smallest = SMALLEST_QUERIES[problem.q.dtype]
    if problem.grid.queries < smallest:
        return f"torch is as fast for fewer than {smallest:,} queries in {problem.q.dtype}"
    return why_slower(problem, hides_nothing)
