"""Cache of prepared calls: the backend of a short call, and its mask in the form that this backend reads.

The checks of `Problem.checked`, the choice of a backend and the evaluation of a mask take longer than attention to a
few tokens. Their results follow from the signature of a call: its sizes, dtypes, mask and options. So `attend` looks up
the signature first, and computes a call that has been prepared at once.

The readable path is the specification. A call is prepared from its `Problem` and its `Choice`. It runs the same
operator with the same arguments, so that its result is the same, bit for bit. Other calls take the readable path:
tensors of other classes or devices than plain ones on a CPU; calls that torch compiles, traces, transforms or observes;
autocast; and results that hidden NaN or infinity may have reached.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from headwise.attention.backend_choice import SMALLEST_PLANNED, Choice
from headwise.attention.backends import fused, reference
from headwise.attention.backends.native import backend as native
from headwise.attention.masks.base import And, Mask, Not, Or, PerHead
from headwise.attention.masks.key_ranges import unexpanded, visible_keys
from headwise.attention.masks.kinds import Band, Chunked, Padding, Prefix, Segments
from headwise.attention.nonfinite import may_have_leaked, may_have_nan
from headwise.attention.problem import Problem

MOST_CALLS = 512
"""Largest number of signatures that are kept; the oldest is removed first."""

MOST_ELEMENTS = 2**21
"""Largest number of elements of all prepared masks together, 8 MiB in float32."""

MOST_ELEMENTS_OF_A_MASK = 2**18
"""Largest number of elements of one prepared mask."""

Run = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor | tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False, slots=True)
class PreparedCall:
    """Cached preparation of a call of `attend`, with the chosen backend, the mask and the options. It can compute any
    later call that has the same signature (sizes, options and so on), with the q, k, v and bias of that call.

    Attributes:
        run: function that computes the output, or output and weights, as the chosen backend does.
        hides_keys: True if NaN and infinity in a key or value may reach rows that do not attend to it.
        needs_gradient: True if they may do so in the gradients alone.
        elements: number of elements of the prepared mask.
        reads: tensors that the mask stores, with the versions from which it was prepared.
        parts: parts of the mask. A part without tensors is kept, so that an equal mask has the same signature. Of other
            parts this is a weak reference, which removes the prepared call when the part is deleted.
    """

    run: Run
    hides_keys: bool
    needs_gradient: bool
    elements: int
    reads: tuple[tuple[Tensor, int], ...]
    parts: tuple[Any, ...]


_calls: dict[Hashable, PreparedCall | tuple[Any, ...] | None] = {}
"""Prepared calls by signature. For a signature that was seen once, the parts of its mask; None for one that cannot be
prepared.
"""

_lock = Lock()

# Looking up these functions anew takes as long as calling them.
_function_modes, _dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_is_any_autocast_enabled, _is_tracing = torch._C._is_any_autocast_enabled, torch._C._is_tracing
_transform = torch._C._functorch.peek_interpreter_stack


def signature(
    q: Any, k: Any, v: Any, mask: Any, bias: Any, scale: Any, return_weights: bool, backend: Any
) -> Hashable | None:
    """Return a hashable key of everything that preparing a call of `attend` depends on, such as sizes, mask and
    options. Return None if the call is not one of the ordinary calls that can be prepared. Arguments of `attend` that
    this function does not have must be at their defaults. The dtypes of k and v are not in the key: the operators check
    them.

    The batch, and the number of keys, are part of the signature only with a mask that is evaluated, and for so few keys
    that torch's kernel gets a mask. So the steps of decoding share one.
    """
    if not (
        type(q) is type(k) is type(v) is Tensor
        and q.is_cpu
        and k.is_cpu
        and v.is_cpu
        and (scale is None or type(scale) is float)
        and (backend is None or type(backend) is str)
        and (
            bias is None
            or (
                (type(bias) is Tensor or type(bias) is Parameter)
                and bias.is_cpu
                and bias.dtype is q.dtype
                and bias.layout is torch.strided
                and (not bias.is_inference() or torch.is_inference_mode_enabled())  # autograd may save it
            )
        )
    ):
        return None
    if (
        _function_modes()
        or _dispatch_modes()
        or _is_any_autocast_enabled()
        or _transform() is not None
        or _is_tracing()
        or forward_ad._current_level >= 0
    ):
        return None
    try:
        batch, heads, queries, width = q.shape
        key_batch, kv_heads, keys, key_width = k_shape = k.shape
        if (
            batch != key_batch
            or width != key_width
            or k_shape != v.shape
            or not 0 < batch * heads * queries * keys < SMALLEST_PLANNED  # larger calls may be planned by their sizes
            or not q.stride(3) == k.stride(3) == v.stride(3) == 1
        ):
            return None
    except (RuntimeError, ValueError):  # nested or sparse tensors, or another number of axes
        return None
    has_gradients = torch.is_grad_enabled()
    biased = None if bias is None else (bias.shape, batch, keys, has_gradients and bias.requires_grad)
    masked: Hashable = None
    if mask is not None:
        if type(mask) is Band and mask.width is None and mask.ahead == 0 and mask.dilation == 1:  # causal
            masked = None if queries == 1 else True if queries == keys else (weakref.ref(mask), batch, keys)
        elif isinstance(mask, Mask):
            masked = (_key_of(mask), batch, keys)
        else:
            return None
    needs_gradient = has_gradients and (q.requires_grad or k.requires_grad or v.requires_grad)
    few_keys = keys if keys < fused.FEWEST_KEYS_WITHOUT_MASK else None
    sizes = queries, heads, kv_heads, width, q.dtype
    return *sizes, needs_gradient, masked, biased, scale, return_weights, backend, few_keys


def run(key: Hashable, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor | tuple[Tensor, Tensor] | None:
    """Run the prepared call that is cached for the signature `key`, and return its output, or output and weights.
    Return None if no call is cached for `key`, if the operator refuses the tensors, or if the cached mask has changed.
    Also return None if the results may be wrong because of NaN or infinity. After None, `attend` computes the call in
    the normal way.
    """
    try:
        call = _calls.get(key)
        if type(call) is not PreparedCall:
            return None
        if bias is not None and bias.ndim == 2:
            bias = bias[None, None]
        result = call.run(q, k, v, bias)
    except (TypeError, RuntimeError):  # a mask that has no hash, such as a rule that is an unhashable object
        return None
    for tensor, version in call.reads:
        if tensor._version != version:
            _calls.pop(key, None)
            return None
    out = result if isinstance(result, Tensor) else result[0]
    if out is not result and may_have_nan(out):  # the readable path sets the weights of a row of scores of -inf to 0
        return None
    if call.hides_keys and may_have_leaked(out, k, v, to_gradients=call.needs_gradient):
        return None
    return result


def prepare(key: Hashable, mask: Mask | None, problem: Problem, choice: Choice) -> None:
    """Cache a prepared call for the signature `key` when the signature is seen for the second time. Later calls with
    this signature are computed by `run`. `mask` is the caller's mask. If it hides nothing, the mask of `problem` is
    None.
    """
    try:
        known = _calls.get(key, False)
        if known is None or type(known) is PreparedCall:
            return
        tensors = () if mask is None else tuple(_stored_tensors(mask))
    except TypeError:  # a mask that has no hash, or whose results may change
        return
    if any(tensor.is_inference() for tensor in tensors):  # torch does not count the changes of these
        return
    if not _lock.acquire(blocking=False):
        return
    try:
        if known is False:
            _calls[key] = tuple(
                part if part.is_constant else weakref.ref(part, lambda _: _calls.pop(key, None) and None)
                for part in ([] if mask is None else _parts(mask))
            )
        elif isinstance(known, tuple):  # the parts of the first call keep the signature valid
            _calls[key] = _prepared(known, tensors, problem, choice)
        elements = sum(call.elements for call in list(_calls.values()) if type(call) is PreparedCall)
        for oldest in list(_calls):
            if len(_calls) <= MOST_CALLS and elements <= MOST_ELEMENTS:
                break
            removed = _calls.pop(oldest, None)
            elements -= removed.elements if type(removed) is PreparedCall else 0
    finally:
        _lock.release()


def clear() -> None:
    """Remove all prepared calls from the cache."""
    _calls.clear()


def _prepared(
    parts: tuple[Any, ...], tensors: tuple[Tensor, ...], problem: Problem, choice: Choice
) -> PreparedCall | None:
    """Return a prepared call for an attention problem. Return None if the chosen backend has no prepared form of such a
    call, as where it has to change q, k or v. Also return None if the mask has too many elements.
    """
    needs_gradient = problem.needs_grad
    # The prepared tensors serve later calls, which may save them for a backward pass.
    with torch.inference_mode(False), torch.no_grad():
        if problem.return_weights:  # `fused` leaves such calls to `reference`
            prepare_run = _with_weights if choice.backend in ("fused", "reference") else None
        else:
            prepare_run = {"fused": _fused, "native": _native}.get(choice.backend)
        prepared = None if prepare_run is None else prepare_run(problem, needs_gradient)
    if prepared is None:
        return None
    run, elements = prepared
    if elements > MOST_ELEMENTS_OF_A_MASK:
        return None
    return PreparedCall(
        run,
        hides_keys=problem.mask is not None or problem.bias is not None,
        needs_gradient=needs_gradient,
        elements=elements,
        reads=tuple((tensor, tensor._version) for tensor in tensors),
        parts=parts,
    )


def _fused(problem: Problem, needs_gradient: bool) -> tuple[Run, int] | None:
    """Return a function that computes an attention problem with torch's fused kernel, and the number of mask elements
    that the function stores. Return None if the kernel cannot be called with q, k, v and the bias themselves, but only
    with changed tensors.
    """
    is_grouped = problem.q.shape[1] != problem.k.shape[1]
    if problem.grid.queries == 1 and (is_grouped or problem.q.dtype == torch.bfloat16):
        return None
    options = {"scale": problem.scale, "enable_gqa": is_grouped}
    if problem.bias is not None:
        if needs_gradient and problem.bias.requires_grad and problem.bias.dtype != problem.score_dtype:
            return None
        hidden = None if problem.mask is None else ~problem.mask.block(problem.grid)
        return partial(_run_fused, hidden, False, options), 0 if hidden is None else hidden.numel()
    matrix, is_causal = fused.mask_arguments(problem)
    if matrix is not None:
        matrix = unexpanded(matrix)
        matrix = torch.zeros(matrix.shape, dtype=problem.q.dtype).masked_fill(~matrix, -torch.inf)  # as torch does
    return partial(_run_fused, matrix, is_causal, options), 0 if matrix is None else matrix.numel()


def _run_fused(
    matrix: Tensor | None,
    is_causal: bool,
    options: dict[str, Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """Return the output of `F.scaled_dot_product_attention`, which is looked up at each call, since other code may have
    replaced it. Without a bias, `matrix` is passed as its mask. With a bias, `matrix` is boolean, and True where the
    bias is replaced by -inf.
    """
    if bias is not None:
        matrix = bias if matrix is None else bias.masked_fill(matrix, -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, matrix, 0.0, is_causal, **options)


def _native(problem: Problem, needs_gradient: bool) -> tuple[Run, int] | None:
    """Return a function that computes an attention problem with the native kernels, and the number of mask elements
    that the function stores. Return None if the mask is so large that the problem is computed in parts.
    """
    visible = visible_keys(problem.mask, problem.grid)
    if visible.parts() is not None:
        return None
    matrix = visible.matrix()
    _, _, _, *arguments, _ = native.arguments(problem, visible.ranges, matrix)
    operators = torch.ops.headwise
    operator = operators.attend_forward.default if needs_gradient else operators.attend.default
    elements = sum(tensor.numel() for tensor in (visible.ranges, matrix) if tensor is not None)
    return lambda q, k, v, bias: operator(q, k, v, *arguments, bias)[0], elements


def _with_weights(problem: Problem, needs_gradient: bool) -> tuple[Run, int] | None:
    """Return a function that computes output and weights as the reference backend does, and the number of mask elements
    that the function stores. Return None if the dtype of the scores is not that of q, or if the mask hides all keys of
    some row.
    """
    if problem.q.dtype != problem.score_dtype:
        return None
    is_grouped = problem.q.shape[1] != problem.k.shape[1]
    product = reference.grouped_matmul if is_grouped else torch.matmul
    matrix = None if problem.mask is None else problem.mask.block(problem.grid)
    if matrix is not None and not matrix.any(-1).all():
        return None
    hidden_by_mask, scale = None if matrix is None else ~unexpanded(matrix), problem.scale

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        scores, hidden = product(q, k.mT) * scale, hidden_by_mask
        if bias is not None:
            scores = scores + bias
            hidden = bias == -torch.inf if hidden is None else hidden | (bias == -torch.inf)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        weights = torch.softmax(scores, -1)
        return product(weights, v), weights

    return run, 0 if hidden_by_mask is None else hidden_by_mask.numel()


def _key_of(mask: Any) -> Hashable:
    """Return a hashable key that is equal for equal masks. It contains weak references, so it does not keep the masks
    in memory. Weak references are compared by comparing the masks, and cache the hashes of the masks.
    """
    kind = type(mask)
    if kind is And or kind is Or:
        left, right = mask.parts
        return kind, _key_of(left), _key_of(right)
    return weakref.ref(mask)


def _parts(mask: Any) -> Iterator[Mask]:
    """Iterate over the masks to which the result of `_key_of` has weak references: the parts of a mask made by `&` or
    `|`, otherwise the mask itself.
    """
    if type(mask) in (And, Or):
        for part in mask.parts:
            yield from _parts(part)
    else:
        yield mask


def _stored_tensors(mask: Any) -> Iterator[Tensor]:
    """Iterate over the tensors that a mask stores as its own copies; changes of such a tensor can be detected. Raise
    `TypeError` for masks whose results may change unnoticed: matrices of the caller, functions, and masks of other
    packages.
    """
    kind = type(mask)
    if kind in (And, Or, Not, PerHead):
        for part in mask.parts:
            yield from _stored_tensors(part)
    elif kind is Padding:
        yield mask.lengths
    elif kind is Segments:
        yield mask.ids
    elif kind not in (Band, Prefix, Chunked):
        raise TypeError(kind)
