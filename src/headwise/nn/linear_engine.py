"""Linear projections of the layers, computed by the fastest engine: the module itself, the native kernels, or oneDNN
directly.

    float32     the native kernels where they have AVX-512 and MKL, torch's library, does not use it: on processors by
                AMD; oneDNN for large products there, if the native kernels are missing or do not use AVX-512
    bfloat16    without gradients, the native kernels where they multiply pairs of bfloat16 numbers by AVX-512; oneDNN
                elsewhere for a projection with a bias: `F.linear` computes this product with oneDNN too, but first
                writes the bias into the output
    few tokens  elsewhere the native kernel, without gradients, where it was measured to be faster (`native_rule`)

The choice depends on the instructions and the vendor of the processor, and on nothing that is timed. The other
engines replace only the call of a plain `nn.Linear` on plain tensors. An `nn.Linear` with hooks, another module in its
place, tensors of other types, and whatever torch traces, transforms or observes, are computed by calling the module.
`hw.watch` and other contexts of headwise follow the functions of a model by a mode of torch: this mode receives a call
of `F.linear`, and computes it by the same engine (`fastest_linear`). `explain_linear` states the choice.
"""

import math
import os
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from headwise.attention.backends.native import library
from headwise.checks import called_by_compiler, has_own_class, is_transformed
from headwise.errors import InputError
from headwise.shapes import Float

# -- choice of the engine on this processor ----------------------------------------------------------------------------

VARIABLE = "HEADWISE_LINEAR"
"""Environment variable that names the engine: "torch" for `F.linear` everywhere, or "onednn" for oneDNN in float32 on
every processor. Both switch the native kernels off. It is read by the first projection.
"""


class LinearChoice(NamedTuple):
    """Choice of the engine (library) that computes a linear projection, with the reason for this choice.

    Attributes:
        engine: "torch", "onednn" or "native".
        because: reason, in one sentence.
    """

    engine: str
    because: str


class NativeRule(NamedTuple):
    """Rule that states when headwise's native kernel for few tokens computes a linear projection: for which numbers of
    tokens and sizes of the weight. It also states why these limits were chosen.

    Attributes:
        rows: numbers of tokens; empty for no product.
        smallest_weight: number of elements below which a weight is left to the other engines.
        because: reason of this rule, in one sentence.
    """

    rows: range
    smallest_weight: int
    because: str


ADDS_BIAS = LinearChoice("onednn", "in bfloat16, oneDNN adds the bias to the product itself")
"""Choice for a projection with a bias in bfloat16."""


@cache
def engine_of(dtype: torch.dtype) -> LinearChoice:
    """Return the engine that computes ordinary linear projections in `dtype` on this processor, with the reason.

    As measured in float32 (docs/lab-notes.md), the native kernels and oneDNN with AVX-512 take about half the time of
    MKL without, and with the same instructions MKL is faster. In bfloat16, the native kernels are faster than oneDNN
    with the same instructions, most of all for short texts, and not faster than the matrix unit AMX.
    """
    wanted, engine = _wanted(), "torch"
    capability, mkl_has_avx512 = torch.backends.cpu.get_cpu_capability(), library.mkl_uses_avx512()
    if wanted == "torch":
        because = f"{VARIABLE}=torch"
    elif not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        because = "this torch was built without oneDNN"
    elif dtype == torch.bfloat16:
        because = "oneDNN does not compute in bfloat16 on this processor"
        if not wanted and library.why_not_loaded() is None and library.instruction_set() == "avx512_bf16":
            engine, because = "native", "the native kernels are faster than oneDNN without AMX"
        elif torch.ops.mkldnn._is_mkldnn_bf16_supported():
            engine, because = ADDS_BIAS
    elif dtype != torch.float32:
        because = "another engine is chosen in float32 and bfloat16 only"
    elif wanted == "onednn":
        engine, because = "onednn", f"{VARIABLE}=onednn"
    elif capability != "AVX512":
        because = f"other engines have no advantage with the instructions {capability}"
    elif mkl_has_avx512 is None:
        because = "the instructions of torch's library for float32 products are unknown"
    elif mkl_has_avx512:
        because = "MKL, which torch computes float32 products with, uses AVX-512"
    else:
        has_kernels = library.why_not_loaded() is None and library.instruction_set().startswith("avx512")
        engine = "native" if has_kernels else "onednn"
        because = "MKL, which torch computes float32 products with, does not use AVX-512 here"
    return LinearChoice(engine, because)


@cache
def native_rule(dtype: torch.dtype) -> NativeRule:
    """Return the rule that states which linear projections in `dtype` headwise's native kernel for few tokens computes
    on this processor in place of the engine that `engine_of` names. The rules are from measurements
    (docs/lab-notes.md).
    """
    rows, smallest_weight, mkl_has_avx512 = range(0), 0, library.mkl_uses_avx512()
    if wanted := _wanted():
        because = f"{VARIABLE}={wanted}"
    elif dtype not in (torch.float32, torch.bfloat16):
        because = "the native kernel computes in float32 and bfloat16 only"
    elif reason := library.why_not_loaded():
        because = reason
    elif (instructions := library.instruction_set()).startswith(("portable", "neon")):
        because = "the portable native kernel was not measured to be faster, and the one for Arm was not measured"
    elif dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        rows, because = range(1, 9), "up to 8 tokens, torch is slower without instructions for bfloat16"
    elif dtype == torch.bfloat16 and instructions == "avx512_bf16":
        rows, because = range(1, 7), "up to 6 tokens, the native kernel is faster than oneDNN without AMX"
    elif dtype == torch.bfloat16:
        rows, smallest_weight = range(1, 5), 2**14
        because = "up to 4 tokens, the native kernel reads a bfloat16 weight faster than oneDNN"
    elif mkl_has_avx512 is None:
        because = "the instructions of torch's library for float32 products are unknown"
    elif mkl_has_avx512 and instructions == "avx2":
        because = "MKL uses AVX-512, and the native kernels do not"
    elif mkl_has_avx512:
        rows, smallest_weight = range(4, 9), 2**19
        because = "from 4 to 8 tokens, the native kernel reads a large weight faster than MKL"
    elif instructions == "avx2":
        rows, smallest_weight = range(2, 9), 2**16
        because = "from 2 to 8 tokens, MKL without AVX-512 is slower than the native kernel"
    else:
        because = "no rule for few tokens is needed: one engine computes all numbers of tokens"
    return NativeRule(rows, smallest_weight, because)


def _wanted() -> str:
    """Return the library for linear projections that the environment variable HEADWISE_LINEAR names, "torch" or
    "onednn". Return an empty string if the variable is not set. Raise `InputError` for other values.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "torch", "onednn"):
        raise InputError(VARIABLE, expected="'torch' or 'onednn'", got=repr(wanted))
    return wanted


@called_by_compiler
def engine_name(dtype: torch.dtype) -> str:
    """Return the engine that computes linear projections in `dtype` on this processor. torch's compiler calls this
    function instead of tracing it.
    """
    return engine_of(dtype).engine


@called_by_compiler
def _has_threads() -> bool:
    """Return True if torch computes with more than one thread. torch's compiler calls this function instead of tracing
    it.
    """
    return torch.get_num_threads() > 1


# -- products ----------------------------------------------------------------------------------------------------------

BLOCK = 256
"""Largest width over which a product of oneDNN sums. The width of x is split into blocks of nearly equal size up to
this.
"""

WIDEST_UNSPLIT = 128
"""Width above which there are at least two blocks, as in MKL's own products without AVX-512."""

SMALLEST_WORK = 2**22
"""Number of multiplications in a block below which a product is left to torch: oneDNN needs about 20 us to start."""

SMALLEST_WEIGHT, FEWEST_OUTPUTS = 2**13, 8
"""Numbers of elements and of rows of a weight below which a product is left to torch in place of the native kernels."""

LARGEST_FOR_ONE_THREAD = 2**18
"""Number of elements of a weight above which one thread computes a product in bfloat16 faster by oneDNN than by the
native kernels.
"""

SMALLEST_COPIED_FOR = 128
"""Number of rows of x below which a product is left to torch if the blocks of the weight must be copied."""

LINEAR = torch._C._nn.linear
"""Torch's own function `F.linear`, also while another library replaces it."""

_pointwise = torch.ops.mkldnn._linear_pointwise.default


def by_operators(
    x: Float[Tensor, "*tokens width"], weight: Float[Tensor, "out width"], bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "*tokens out"]:
    """Return `F.linear(x, weight, bias)` for tensors on the CPU, computed by the engine that `engine_of` names or, for
    small products, by torch. Tensors in bfloat16 must need no gradient.

    OneDNN adds the products of a row one after another, so that its rounding error grows with the width of x. In
    float32, the width is therefore split into blocks, whose products are added: that keeps the error near that of MKL
    (docs/lab-notes.md, "Linear projections").

    The operator `headwise::linear` has derivatives of every order, since its gradients are calls of itself: dx = dy W,
    dW = dy^T x, db = sum of dy over the tokens. Compiled code without gradients calls the operator of the native
    kernels, which is not written in Python.
    """
    is_compiling, has_gradient = torch.compiler.is_compiling(), needs_gradient(x, weight, bias)
    if is_compiling and not has_gradient and engine_name(x.dtype) == "native" and not torch.is_autocast_enabled("cpu"):
        return (by_native if is_large_enough(x, weight) else LINEAR)(x, weight, bias)
    if is_compiling or has_gradient:
        register()
        result: Tensor = torch.ops.headwise.linear(x, weight, bias)
        return result
    return _linear(x, weight, bias)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Return True if gradients are enabled and one of the tensors requires a gradient."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def is_large_enough(x: Tensor, weight: Tensor) -> bool:
    """Return True if the size of a linear projection of x is one for which the engine of its dtype, oneDNN or the
    native kernels, is faster than torch.
    """
    out, width = weight.shape
    if engine_name(x.dtype) == "native":
        is_large = out * width >= SMALLEST_WEIGHT and out >= FEWEST_OUTPUTS
        if x.dtype == torch.float32 or not is_large:
            return is_large
        is_fast = out * width <= LARGEST_FOR_ONE_THREAD or _has_threads()
        return is_fast and width % 2 == 0 and weight.is_contiguous()
    rows = x.numel() // max(width, 1)
    block = _block_of(width)
    if rows * block * out < SMALLEST_WORK:
        return False
    is_copied = width > block and not weight.t().is_contiguous()  # a block of rows has gaps, and of columns has none
    return rows >= SMALLEST_COPIED_FOR or not is_copied


def is_for_few_tokens(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return True if headwise's native kernel for few tokens is expected to be the fastest way to compute the linear
    projection of x by `weight` and `bias`. Whether gradients are needed is not considered.
    """
    rule = native_rule(x.dtype)
    return (
        bool(rule.rows)
        and x.numel() // max(weight.shape[-1], 1) in rule.rows
        and weight.numel() >= rule.smallest_weight
        and weight.layout == torch.strided
        and weight.is_contiguous()
        and (bias is None or bias.is_contiguous())
    )


def by_native(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x weight^T + bias, computed by headwise's native kernels. The result has no gradient. Tensors with gaps
    in memory are copied first.
    """
    if not (x.dtype == torch.float32 and x.ndim == 2 and x.t().is_contiguous()):
        x = x.contiguous()
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        weight = weight.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    result: Tensor = torch.ops.headwise.linear_map.default(x, weight, bias)
    return result


def _block_of(width: int) -> int:
    """Return the number of columns of a matrix x that oneDNN multiplies at a time; x has `width` columns. The products
    of these blocks of columns are added, so that the rounding error of long sums stays small.
    """
    least = 2 if width > WIDEST_UNSPLIT else 1
    return -(-width // max(-(-width // BLOCK), least))


@called_by_compiler
def register() -> None:
    """Register the operator `headwise::linear` with torch at the first call. torch's compiler calls this function
    instead of tracing it.
    """
    _registered()


@cache
def _registered() -> torch.library.Library:
    """Register the operator `headwise::linear` with torch at the first call. Return the `Library` object, because the
    operator exists only as long as this object.
    """
    registration = torch.library.Library("headwise", "FRAGMENT")  # type: ignore[no-untyped-call]
    registration.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")  # type: ignore[no-untyped-call]
    for function, key in ((_linear, "CPU"), (LINEAR, "AutocastCPU")):  # under autocast, torch computes it
        registration.impl("linear", function, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake("headwise::linear", lambda x, weight, _: x.new_empty(*x.shape[:-1], weight.shape[0]))
    torch.library.register_autograd("headwise::linear", _backward, setup_context=_save)
    return registration


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x weight^T + bias, computed by the engine that `engine_of` names for float32. Products that are too small
    for it are computed by torch, or by headwise's native kernel where `native_rule` says so. oneDNN multiplies x in
    blocks of columns, and the products of the blocks are added.
    """
    if not is_large_enough(x, weight):
        return (by_native if is_for_few_tokens(x, weight, bias) else LINEAR)(x, weight, bias)
    if engine_name(torch.float32) == "native":
        return by_native(x, weight, bias)
    block = _block_of(weight.shape[1])
    parts = zip(torch.split(x, block, dim=-1), torch.split(weight, block, dim=-1), strict=True)
    total = product(*next(parts), bias)
    for x_block, weight_block in parts:
        total += product(x_block, weight_block, None)
    return total


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x weight^T + bias, computed by oneDNN. A weight or bias with gaps in memory is copied first. With gaps in
    the weight, oneDNN would be a hundred times slower. With gaps in the bias, it would read wrong numbers.
    """
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        weight = weight.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    result: Tensor = _pointwise(x, weight, bias, "none", [], "")
    return result


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    """Save the tensors for the backward pass of `headwise::linear`: x if the weight needs a gradient, and the weight if
    x needs one.

    An empty tensor is saved first, as a marker. Under activation checkpointing, the backward pass takes its tensors by
    their position from a second forward pass. If `F.linear` were called there, it would save the transposed weight,
    which has the same shape if the weight is square, and gradients would be wrong without notice. With the marker, the
    shapes differ, so that checkpointing raises an error.
    """
    x, weight, _ = inputs
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x.new_empty(0), x if needs_weight else None, weight if needs_x else None)


def _backward(ctx: Any, upstream: Float[Tensor, "*tokens out"]) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight and bias, each None if it is not needed, from the gradient of the output,
    `upstream`.
    """
    _, x, weight = ctx.saved_tensors
    rows = _rows(upstream)
    x_gradient = weight_gradient = bias_gradient = None
    is_plain = torch.autograd.forward_ad._current_level < 0 and not is_transformed()
    linear = torch.ops.headwise.linear if is_plain else LINEAR  # which has a forward-mode derivative and is transformed
    if weight is not None:
        x_gradient = linear(upstream, weight.t(), None)
    if x is not None:
        weight_gradient = linear(rows.t(), _rows(x).t(), None)
    if ctx.needs_input_grad[2]:
        bias_gradient = rows.sum(0)
    return x_gradient, weight_gradient, bias_gradient


def _rows(tensor: Float[Tensor, "*tokens width"]) -> Float[Tensor, "rows width"]:
    """Return the tensor as a matrix with one row per token: all axes before the last become one."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


# -- calls of modules --------------------------------------------------------------------------------------------------

NOT_PLAIN = LinearChoice("torch", "only a plain nn.Linear on the CPU is computed by another engine")
"""Choice for other modules and devices."""

OF_THE_MODULE = "hooks, transforms and modes of torch receive the call of the module"
"""Reason for projections of which other code receives the call."""

SMALLEST_BFLOAT16_WORK, SMALLEST_WITHOUT_AMX = 2**20, 2**25
"""Numbers of multiplications below which torch computes a product with a bias in bfloat16: the first with the
instructions AMX, the second without them, where the bias takes a smaller share of the time.
"""

LINEAR_FORWARD, _MODULE_CALL = nn.Linear.forward, nn.Module.__call__
"""Functions of torch that compute the call of an `nn.Linear`."""

FORWARDS = {LINEAR_FORWARD}
"""Methods `forward` of `nn.Linear` that compute nothing but the linear map: torch's, and that of accelerated models."""

FOLLOWING: set[type] = set()
"""Classes of headwise's own observers of a model: torch function modes that call `fastest_linear` in place of
`F.linear`, and objects whose methods are registered as hooks. They do not change which engine computes a linear map.
"""

_is_chosen: ContextVar[bool] = ContextVar("the engine of a linear map is chosen", default=False)
"""True while an active mode whose class is in `FOLLOWING` is to compute `F.linear` by the fastest engine."""


def project(linear: nn.Module, x: Float[Tensor, "*tokens width"]) -> Float[Tensor, "*tokens out"]:
    """Return `linear(x)`. If `linear` is an ordinary `nn.Linear` on the CPU, the fastest of torch, oneDNN and
    headwise's native kernel computes it.
    """
    return projections(x, linear)[0]


def projections(x: Float[Tensor, "*tokens width"], *linears: nn.Module) -> list[Float[Tensor, "*tokens _"]]:
    """Return `linear(x)` for each of the modules `linears`, which project the same input. An ordinary `nn.Linear` is
    computed by the fastest of torch, oneDNN and headwise's native kernel.
    """
    parameters = plain_parameters(x, *linears)
    if parameters is None:
        return [_project(linear, x) for linear in linears]
    return [F.linear(x, weight, bias) for weight, bias in parameters]


def plain_parameters(x: Float[Tensor, "*tokens _"], *linears: Any) -> list[tuple[Tensor, Tensor | None]] | None:
    """Return the weight and bias of each module in `linears` if `F.linear` may be called with them in place of the
    modules. That requires ordinary `nn.Linear` modules without hooks, and that neither oneDNN nor headwise's native
    kernels are faster for x. Otherwise return None.

    Callers use these instead of the modules, because calling a module and choosing its engine take longer than a small
    product.
    """
    if (
        torch.compiler.is_compiling()
        or type(x) is not Tensor
        or not x.is_cpu
        or torch_module._has_any_global_hook()  # type: ignore[no-untyped-call]
        or nn.Linear.forward not in FORWARDS
        or nn.Module.__call__ is not _MODULE_CALL
        or torch._C._is_tracing()  # a traced program names its operators by their modules
    ):
        return None
    dtype = x.dtype
    tokens = x.numel() // max(x.shape[-1], 1)
    if tokens in native_rule(dtype).rows:
        return None
    engine = engine_of(dtype).engine
    if engine == "native":
        smallest_work: float = tokens * SMALLEST_WEIGHT
    elif engine == "onednn":
        smallest_work = SMALLEST_WORK if dtype == torch.float32 else _smallest_bfloat16_work()
    else:
        smallest_work = math.inf
    found = []
    for linear in linears:
        if type(linear) is not nn.Linear and type(linear) is not NonDynamicallyQuantizableLinear:
            return None
        attributes = linear.__dict__
        if (
            attributes["_forward_hooks"]
            or attributes["_forward_pre_hooks"]
            or attributes["_backward_hooks"]
            or attributes["_backward_pre_hooks"]
            or "forward" in attributes
            or "weight" in attributes
            or "bias" in attributes
            or "_compiled_call_impl" in attributes
        ):
            return None
        parameters = attributes["_parameters"]
        weight = parameters.get("weight")
        if weight is None or "bias" not in parameters or tokens * weight.numel() >= smallest_work:
            return None
        found.append((weight, parameters["bias"]))
    return found


def _project(linear: nn.Module, x: Float[Tensor, "*tokens width"]) -> Float[Tensor, "*tokens out"]:
    """Return `linear(x)`, computed by the engine that is chosen for this input: torch, oneDNN or headwise's native
    kernel.
    """
    if torch.compiler.is_compiling():
        has_any_hooks = has_hooks(linear) or _has_further_hooks(linear)
        if type(linear) is nn.Linear and not has_any_hooks and is_compiled_by_operator(x, linear.weight, linear.bias):
            return by_operators(x, linear.weight, linear.bias)
    elif type(linear) is nn.Linear:
        weight, bias = linear.weight, linear.bias  # read once: in a step of decoding, the reads of modules take time
        engine = _choose(linear, x, weight, bias).engine
        if engine != "torch":
            return computed_by(engine, x, weight, bias)
        if _is_followed() and not _is_received_by_others(linear):
            return _within_mode(linear, x)
    result: Tensor = linear(x)
    return result


def is_compiled_by_operator(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return True if torch's compiler receives an operator of headwise for a linear projection (`by_operators`).
    These have no forward-mode derivative, and in bfloat16 no gradient. In float32, `headwise::linear` decides when it
    runs whether the product is large enough for another engine.
    """
    if (
        torch.compiler.is_exporting()
        or is_transformed()
        or torch.autograd.forward_ad._current_level >= 0
        or x.device.type != "cpu"
        or x.dtype != weight.dtype
        or not _has_sizes_of_a_map(weight, bias)
    ):
        return False
    if x.dtype == torch.bfloat16:
        is_plain = not needs_gradient(x, weight, bias) and not torch.is_autocast_enabled("cpu")
        return is_plain and engine_name(x.dtype) == "native"
    return x.dtype == torch.float32 and engine_name(torch.float32) != "torch"


def computed_by(engine: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x weight^T + bias, computed by the engine that `choice_of` names: torch, oneDNN or the native kernels."""
    if engine == "torch":
        return F.linear(x, weight, bias)
    if torch._C._len_torch_function_stack():
        return _within_mode(F.linear, x, weight, bias)
    if engine == "native" and not needs_gradient(x, weight, bias):
        return by_native(x, weight, bias)
    return (by_operators if x.dtype == torch.float32 else product)(x, weight, bias)


def _within_mode(function: Callable[..., Tensor], *args: Tensor | None) -> Tensor:
    """Call `function`, which is a module or `F.linear`, while one of headwise's modes is active, and return its result.
    The mode receives the call of `F.linear`, and lets the fastest engine compute it.
    """
    token = _is_chosen.set(True)
    try:
        return function(*args)
    finally:
        _is_chosen.reset(token)


def fastest_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
    """Return the result of a call of `F.linear` that a mode of a class in `FOLLOWING` has received. If the call was
    made by `_within_mode`, the fastest engine computes it; otherwise torch does.
    """
    if not _is_chosen.get():
        return LINEAR(input, weight, bias)
    return computed_by(choice_of(input, weight, bias).engine, input, weight, bias)


def _is_followed() -> bool:
    """Return True if the only active torch function mode is one that calls `fastest_linear`."""
    return torch._C._len_torch_function_stack() == 1 and type(torch._C._get_function_stack_at(0)) in FOLLOWING


def explain_linear(linear: nn.Module, x: Float[Tensor, "*tokens width"]) -> LinearChoice:
    """Return which engine computes the projection `linear(x)` inside a layer of headwise ("torch", "onednn", or
    "native" for headwise's own kernel), and the reason.

    Example:
        >>> layer = hw.MultiHeadAttention(512, num_heads=8)
        >>> hw.explain_linear(layer.q_proj, torch.randn(2, 1024, 512)).engine  # on a processor by Intel
        'torch'

    Args:
        linear: projection, such as `layer.q_proj`.
        x: its input, `(..., width)`.
    """
    if type(linear) is not nn.Linear:
        return NOT_PLAIN
    return _choose(linear, x, linear.weight, linear.bias)


def _choose(linear: nn.Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> LinearChoice:
    """Return the engine that computes the projection `linear(x)` (torch, oneDNN or headwise's native kernel), and the
    reason. `weight` and `bias` are the parameters of `linear`.
    """
    choice = choice_of(x, weight, bias)
    if choice.engine != "torch" and (has_hooks(linear) or _is_received_by_others(linear)):
        return LinearChoice("torch", OF_THE_MODULE)
    return choice


def choice_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> LinearChoice:
    """Return the engine that computes x weight^T + bias in place of `F.linear` (torch, oneDNN or headwise's native
    kernel), and the reason.
    """
    if not (type(x) is Tensor and x.is_cpu and not x.is_nested):
        return NOT_PLAIN
    if torch._C._is_tracing():  # tracing would record the sizes that are read below
        return LinearChoice("torch", "torch traces the call")
    if not _has_sizes_of_a_map(weight, bias):
        return NOT_PLAIN
    reason = None
    if is_for_few_tokens(x, weight, bias) and not needs_gradient(x, weight, bias):
        choice = LinearChoice("native", native_rule(x.dtype).because)
    else:
        choice = engine_of(x.dtype)
        if choice.engine == "torch":
            return choice
        if x.dtype == torch.bfloat16 and choice.engine == "native" and not is_large_enough(x, weight):
            choice = ADDS_BIAS
        reason = _why_not_faster(choice.engine, x, weight, bias)
    reason = reason or _why_not_plain(x, weight, bias)
    return choice if reason is None else LinearChoice("torch", reason)


def is_left_to_torch(linear: nn.Linear, x: Tensor) -> bool:
    """Return True if torch computes a linear map of x in bfloat16 because it is too small for oneDNN, and has too many
    tokens for the native kernel. `choice_of` would state the same, but takes as long as another engine could save.
    """
    return (
        type(x) is Tensor
        and x.dtype is torch.bfloat16
        and engine_of(torch.bfloat16).engine != "native"
        and x.numel() * linear.out_features < _smallest_bfloat16_work()
        and x.numel() // max(linear.in_features, 1) not in native_rule(torch.bfloat16).rows
    )


def _why_not_faster(engine: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Return the reason that torch's `F.linear` computes a linear projection of x, and not `engine`, oneDNN or the
    native kernels. Return None if that engine is faster.
    """
    if engine == "onednn" and not torch._C._get_mkldnn_enabled():
        return "oneDNN is switched off"
    if x.dtype == torch.float32:
        if torch._C._get_fp32_precision_getter("mkldnn", "matmul") not in ("none", "ieee"):
            return "torch computes float32 products in a lower precision"
        is_small = not is_large_enough(x, weight)
    else:
        if bias is None and engine == "onednn":
            return "without a bias, torch computes the same"
        if needs_gradient(x, weight, bias):
            return "with gradients, torch is as fast in bfloat16"
        is_small = engine == "onednn" and x.numel() * len(weight) < _smallest_bfloat16_work()
    return "the product is too small for another engine to be faster" if is_small else None


@cache
def _smallest_bfloat16_work() -> int:
    """Return the number of multiplications from which oneDNN adds the bias of a product in bfloat16."""
    has_amx: bool = torch.cpu._is_amx_tile_supported()
    return SMALLEST_BFLOAT16_WORK if has_amx else SMALLEST_WITHOUT_AMX


def _why_not_plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Return the reason that a call of `F.linear` may differ from x weight^T + bias of ordinary tensors, such as a
    transform or autocast. Return None if the two are the same.
    """
    if (
        (torch._C._len_torch_function_stack() and not _is_followed())
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or F.linear is not LINEAR
    ):
        return OF_THE_MODULE
    for tensor in (x, weight, bias):
        if tensor is not None and not (
            has_own_class(tensor) and tensor.layout == torch.strided and tensor.is_cpu and tensor.dtype == x.dtype
        ):
            return "x, weight and bias are not plain tensors of one dtype"
    if x.ndim < 2 or x.shape[-1] != weight.shape[1] or x.numel() == 0 or weight.numel() == 0:
        return "x is empty, or does not fit the weight"
    return "autocast is on" if torch.is_autocast_enabled("cpu") else None


def _has_sizes_of_a_map(weight: Tensor, bias: Tensor | None) -> bool:
    """Return True if the weight is a matrix, and the bias has one number for each of its rows. `F.linear` accepts
    others, too.
    """
    return weight.ndim == 2 and (bias is None or bias.shape == weight.shape[:1])


def has_hooks(module: nn.Module) -> bool:
    """Return True if a module has something that may change its output: a forward hook, or a `forward` set on the
    instance.
    """
    return bool("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)


def _has_further_hooks(linear: nn.Module) -> bool:
    """Return True if a hook receives the gradients of the module, or if torch has hooks for all modules."""
    return bool(linear._backward_hooks or linear._backward_pre_hooks or torch_module._has_any_global_hook())  # type: ignore[no-untyped-call]


def _is_received_by_others(linear: nn.Linear) -> bool:
    """Return True if code that is neither torch's nor headwise's receives the calls of the module or their gradients:
    by a replaced method, by a hook of the module, or by torch's hooks for all modules.
    """
    hooks = (*linear._forward_pre_hooks.values(), *linear._forward_hooks.values())
    return (
        nn.Linear.forward not in FORWARDS
        or nn.Module.__call__ is not _MODULE_CALL
        or "forward" in vars(linear)
        or any(type(getattr(hook, "__self__", None)) not in FOLLOWING for hook in hooks)
        or _has_further_hooks(linear)
    )


def reset_linear(linear: nn.Linear, blocks: tuple[int, ...]) -> None:
    """Initialise the weight of a projection uniformly by the method of Glorot and Bengio (2010), and its bias with
    zeros. `blocks` has the number of rows of each part of the weight, such as the queries, keys and values of a fused
    projection. Each part is initialised as a matrix by itself.
    """
    for weight in torch.split(linear.weight, list(blocks)):
        nn.init.xavier_uniform_(weight)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
