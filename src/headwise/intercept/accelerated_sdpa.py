"""Calls of torch's `scaled_dot_product_attention` in accelerated models, computed by the native kernels where they can.

A call is computed with exactly the arguments that the model passes. What the kernels cannot compute, or would compute
more slowly, is passed on to torch unchanged. Each thread has a stack of the running modules of accelerated models.
"""

import math
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol, runtime_checkable
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend

from headwise.attention.autocast import AUTOCAST_DTYPES, autocast_dtype
from headwise.attention.backend_choice import why_slower
from headwise.attention.backends.native import backend as native
from headwise.attention.backends.native import library
from headwise.attention.backends.native.mask_tensors import MaskRanges, mask_ranges
from headwise.attention.masks.base import Mask
from headwise.attention.masks.factories import causal
from headwise.attention.problem import DTYPES, Problem
from headwise.checks import called_by_compiler, has_own_class, has_values
from headwise.intercept.patches import SDPA, Patches, call_replaced, is_causal_bias, is_foreign
from headwise.nn.linear_engine import LinearChoice
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

MOST_MASKS = 2
"""Number of masks whose ranges are kept, those of layers with and without a window. Each mask stays in memory until the
model's call ends.
"""


OBSERVED = "hw.watch computes it in the same pass as its statistics"
"""Reason for a call whose output is a result of its observation."""

OWN_BACKEND = "headwise.attend chooses its own backend"
"""Reason for attention in headwise's own layers."""


@runtime_checkable
class CallRecorder(Protocol):
    """Interface of an object that counts the attention calls of each module of an accelerated model, by the path of the
    module.

    Attributes:
        is_active: False once the acceleration has ended.
        number: number of the acceleration, unique among all.
        linear_modules: the modules whose linear map is accelerated.
    """

    is_active: bool
    number: int
    linear_modules: WeakSet[nn.Module]

    @property
    def patches(self) -> Patches:
        """Context in which the calls of accelerated modules are intercepted."""

    def on_start(self, path: str) -> None:
        """Record that the module at `path` of the accelerated model ran."""

    def record(self, path: str, reason: str | None) -> None:
        """Count one attention call of the module at `path`. If `reason` is None, the native kernels computed the call;
        otherwise torch did, for this reason.
        """

    def record_linear(self, choice: LinearChoice) -> None:
        """Count one call of a linear map, which the engine in `choice` computes."""


class RunningModule(NamedTuple):
    """One module that is now running in an accelerated model (`accelerate`), with the object that counts the module's
    attention calls.

    Attributes:
        recorder: object that counts its attention calls.
        path: path of the module in the model.
        module: the module.
    """

    recorder: CallRecorder
    path: str
    module: nn.Module


class AcceleratedModules(threading.local):
    """Stack of the modules of accelerated models that are running in one thread. It also caches the attention masks of
    these modules in the form that the native kernels read: ranges of visible keys.

    Attributes:
        running: the running modules, outermost first.
        is_repeating: True while activation checkpointing repeats a part of a forward pass in a backward pass, with the
            modules that were running there.
        repeated: the accelerations that were active in that forward pass.
    """

    def __init__(self) -> None:
        self.running: list[RunningModule] = []
        self.is_repeating, self.repeated = False, list[CallRecorder]()
        self._masks: list[_ReadMask] = []

    @property
    def is_accelerated(self) -> bool:
        """True if attention calls of this thread are to be accelerated, that is while a module of an accelerated model
        runs.
        """
        if not self.is_repeating and not all(module.recorder.is_active for module in self.running):
            self.discard_ended()
        return bool(self.running)

    def discard_ended(self) -> None:
        """Remove from `running` (the stack of running modules) each module whose acceleration has ended while the
        module ran. It may have ended in another thread, or by an exception such as KeyboardInterrupt, after which torch
        calls no forward hooks.
        """
        self.running = [module for module in self.running if module.recorder.is_active]

    def start(self, recorder: CallRecorder, path: str, module: nn.Module) -> None:
        """Push a module whose call starts onto the stack of running modules. In a backward pass, push it only while
        activation checkpointing repeats a part of the forward pass that was accelerated. Otherwise forward pass and
        repetition would save different tensors for the gradient.
        """
        is_backward = torch._C._current_graph_task_id() != -1
        if is_backward and recorder not in self.repeated:
            return
        self.end(recorder, module)  # torch calls no hook after KeyboardInterrupt, so it may be there
        self.running.append(RunningModule(recorder, path, module))
        recorder.on_start(path)

    def end(self, recorder: CallRecorder, module: nn.Module) -> None:
        """Remove a module whose call has ended from the stack of running modules, with all modules above it, which an
        exception may have left there.
        """
        for index, each in enumerate(self.running):
            if each.module is module and each.recorder is recorder:
                del self.running[index:]
                break
        if not self.running:
            self._masks.clear()

    @contextmanager
    def repeating(self, running: list[RunningModule], recorders: list[CallRecorder]) -> Iterator[None]:
        """Return a context in which `running` are the running modules and `recorders` the active accelerations, for
        activation checkpointing that repeats a part of a forward pass.
        """
        before = self.running, self.is_repeating, self.repeated
        self.running, self.is_repeating, self.repeated = running[:], True, recorders
        try:
            yield
        finally:
            self.running, self.is_repeating, self.repeated = before

    @contextmanager
    def paused(self, reason: str) -> Iterator[None]:
        """Return a context in which no attention call is accelerated, for the time in which headwise itself computes
        one call. This call is recorded as one that the native kernels did not compute, for `reason`.
        """
        if self.is_accelerated:
            self.record(reason)
        before, self.running = self.running, []
        try:
            yield
        finally:
            self.running = before

    def record(self, reason: str | None) -> None:
        """Count one attention call with every recorder that has running modules, under the path of the innermost of
        these modules. `reason` states why torch computed the call; it is None if the native kernels did. Do nothing
        while activation checkpointing repeats a forward pass, where the call was already counted.
        """
        if self.is_repeating:
            return
        recorders: set[int] = set()
        for module in reversed(self.running):
            if id(module.recorder) not in recorders:
                recorders.add(id(module.recorder))
                module.recorder.record(module.path, reason)

    def ranges_of(self, mask: Tensor, dtype: torch.dtype | None) -> MaskRanges:
        """Return a mask as ranges of visible keys, the form that the native kernels read. An additive mask is first
        cast to `dtype`. The ranges are computed once for a mask that several layers receive.
        """
        for read in self._masks:
            if read.is_of(mask, dtype):
                return read.result
        read = _ReadMask(mask.detach(), dtype, mask_ranges)
        self._masks = [*self._masks[1 - MOST_MASKS :], read]
        return read.result


class _ReadMask:
    """An attention mask with its ranges of visible keys, stored for reuse. The object keeps the mask, so that no other
    tensor can get the mask's memory address.

    Attributes:
        result: the ranges.
    """

    def __init__(
        self, mask: Tensor, dtype: torch.dtype | None, read: Callable[[Tensor, torch.dtype | None], MaskRanges]
    ) -> None:
        self._mask, self._key = mask, _key(mask, dtype)
        self._copy = mask.clone() if mask.is_inference() else None
        self.result = read(mask, dtype)

    def is_of(self, mask: Tensor, dtype: torch.dtype | None) -> bool:
        """Return True if the stored ranges are valid for `mask`: it has the same memory and has not changed since.
        Torch counts no changes of tensors made in inference mode, so for these the values are compared.
        """
        return _key(mask, dtype) == self._key and (self._copy is None or torch.equal(mask, self._copy))


def _key(mask: Tensor, dtype: torch.dtype | None) -> tuple[object, ...]:
    """Return a key by which a mask that was read before is recognised: memory address, dtype, shape, strides, torch's
    count of in-place changes, and the requested `dtype`.
    """
    version = None if mask.is_inference() else mask._version
    return (mask.data_ptr(), mask.dtype, mask.shape, mask.stride(), version, dtype)


accelerated_modules = AcceleratedModules()
"""The running modules of accelerated models; each thread has its own."""

active_recorders: list[CallRecorder] = []
"""The accelerations that have not ended, of all models and threads."""


# -- calls -------------------------------------------------------------------------------------------------------------


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
    def mask_of_all_keys(self) -> Tensor:
        """The mask with four axes (batch, heads, queries, keys), of which all but the keys may have size 1 where the
        mask repeats. There must be a mask.
        """
        assert self.attn_mask is not None
        mask = self.attn_mask[(None,) * (4 - self.attn_mask.ndim)]
        return mask.expand(-1, -1, -1, self.key.shape[-2])

    def cast(self, dtype: torch.dtype) -> "SDPACall":
        """Return the call with queries, keys and values cast to `dtype`, as autocast does."""
        q, k, v = (each.to(dtype) if each.dtype in AUTOCAST_DTYPES else each for each in self.tensors)
        return self._replace(query=q, key=k, value=v)

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
        call = call.cast(dtype)
    reason = why_not(call)
    if reason is not None:
        return reason
    ranges = _causal_ranges(call.query.shape[-2], call.key.shape[-2]) if call.is_causal else None
    if mask is not None:
        cast_to = dtype if mask.dtype in AUTOCAST_DTYPES else None
        ranges, reason = accelerated_modules.ranges_of(call.mask_of_all_keys, cast_to)
        if reason is not None:
            return reason
    return laid_out_like(call.query, computed_by_kernels(call, ranges))


def laid_out_like(query: Tensor, out: Tensor) -> Tensor:
    """Return the output of an attention call in the memory layout that torch gives it: contiguous if the query is. The
    native kernels write the heads of one position next to each other.
    """
    return out.contiguous() if query.is_contiguous() else out


def computed_by_kernels(
    call: SDPACall, ranges: Int[Tensor, "#batch #heads #queries ranges 2"] | None
) -> Float[Tensor, "*batch queries value_dim"]:
    """Return the output of an attention call, computed by the native kernels. `ranges` are the keys that each query
    attends to; None if no key is hidden.
    """
    q, k, v = call.tensors if call.query.ndim == 4 else (tensor[None] for tensor in call.tensors)
    scale = q.shape[-1] ** -0.5 if call.scale is None else float(call.scale)
    out, _ = native.attend((*native.with_adjacent_columns(q, k, v), scale, None, 0.0, None, ranges, None, None))
    return out if call.query.ndim == 4 else out[0]


def _is_usual(tensor: Tensor) -> bool:
    """Return True if a tensor is of a class of torch itself, is not nested, and has values that can be read."""
    return has_own_class(tensor) and not tensor.is_nested and has_values(tensor)


def problem_of(call: SDPACall, mask: Mask | None = None) -> Problem:
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


# -- reasons for which torch computes a call --------------------------------------------------------------------------

_reasons: dict[Hashable, str | None] = {}
"""Results of `why_not` by all that they depend on, since the layers of a model make equal calls."""

MOST_REASONS = 1024
"""Number of stored results, after which all are removed."""


def why_not(call: SDPACall) -> str | None:
    """Return the reason, in one sentence, why torch must compute an SDPA call. Return None if the native kernels
    support the call and are expected to be faster. Only sizes, dtypes and options are read, not the values of tensors.
    """
    mask = call.attn_mask
    strides = tuple(tensor.stride() for tensor in call.tensors) if call.needs_gradient else None
    key = (
        *((tensor.shape, tensor.dtype, tensor.device) for tensor in call.tensors),
        *(None if mask is None else (mask.shape, mask.dtype, mask.requires_grad), call[4:]),
        *(strides, torch.get_num_threads(), torch._C._get_flash_sdp_enabled()),
    )
    if key not in _reasons:
        if len(_reasons) >= MOST_REASONS:
            _reasons.clear()
        _reasons[key] = why_not_supported(call)
    return _reasons[key]


def why_not_supported(call: SDPACall) -> str | None:
    """Return the reason why torch must compute an SDPA call; None if the native kernels support the call and are
    expected to be faster. This function has no cache, so that a compiler can read it.
    """
    if not _has_usual_sizes(call):
        return SIZES
    if call.scale is not None and not (isinstance(call.scale, (int, float)) and 0 < call.scale < math.inf):
        return SCALE
    if not (isinstance(call.is_causal, bool) and isinstance(call.enable_gqa, bool)):
        return UNUSUAL
    is_square = call.query.shape[-2] == call.key.shape[-2]
    problem = problem_of(call, causal() if call.is_causal and is_square else None)
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
    if call.dropout_p != 0:
        return DROPOUT
    reason = None if call.attn_mask is None else _why_not_mask(call, call.attn_mask)
    if reason is not None:
        return reason
    if not torch._C._get_flash_sdp_enabled():
        return KERNEL_CHOSEN
    q, k, v, mask, *_ = call
    options: dict[str, Any] = {"is_causal": call.is_causal, "scale": call.scale, "enable_gqa": call.enable_gqa}
    if torch.compiler.is_compiling():  # compiled code has no second derivative
        return None
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
"""Number of queries, for each dtype, from which the native kernels are expected to be faster than torch's kernel where
MKL, the library of torch for float32 products, may use AVX-512. It was measured with SmolLM2 on a processor with AMX
(docs/lab-notes.md).
"""


def _why_slower(problem: Problem, hides_nothing: bool) -> str | None:
    """Return the reason why torch is expected to compute a call as fast as the native kernels, such as few queries.
    Return None if the kernels are expected to be faster. `hides_nothing` is False for a call with a mask, for which
    torch computes all scores, also hidden ones.
    """
    smallest = SMALLEST_QUERIES[problem.q.dtype]
    if problem.grid.queries < smallest and _may_be_slow_for_few_queries():
        return f"torch is as fast for fewer than {smallest:,} queries in {problem.q.dtype}"
    return why_slower(problem, hides_nothing)


@called_by_compiler
def _may_be_slow_for_few_queries() -> bool:
    """Return True if, for fewer queries than `SMALLEST_QUERIES`, torch may be as fast as the native kernels on this
    processor.
    """
    return library.mkl_uses_avx512() is not False
