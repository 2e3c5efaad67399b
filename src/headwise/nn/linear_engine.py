"""Linear projections of the layers, computed by the faster engine: the module itself, oneDNN directly, or the native
kernel of few rows.

The other engines replace only the call of a plain `nn.Linear` on plain tensors. An `nn.Linear` with hooks, another
module in its place, tensors of other types, and whatever torch traces, transforms or observes, are called as before.
`explain_linear` states the choice.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from headwise.checks import has_own_class
from headwise.nn import linear_operator
from headwise.nn.linear_choice import LinearChoice, engine_of, native_rule, uses_onednn
from headwise.nn.projections import has_hooks
from headwise.shapes import Float

NOT_PLAIN = LinearChoice("torch", "only a plain nn.Linear on the CPU is computed by another engine")
"""Choice for other modules and devices."""

SMALLEST_BFLOAT16_WORK = 2**20
"""Number of multiplications below which the bias of a product in bfloat16 is left to torch."""


_LINEAR_FORWARD, _MODULE_CALL = nn.Linear.forward, nn.Module.__call__
"""Functions of torch that compute the call of an `nn.Linear`."""


def project(linear: nn.Module, x: Float[Tensor, "*tokens width"]) -> Float[Tensor, "*tokens out"]:
    """Return `linear(x)`, computed by the faster engine if `linear` is a plain `nn.Linear`.

    Args:
        linear: projection of a layer, usually an `nn.Linear`; adapters and quantised modules are called.
        x: input.
    """
    parameters = plain_parameters(x, linear)
    return _project(linear, x) if parameters is None else F.linear(x, *parameters[0])


def projections(x: Float[Tensor, "*tokens width"], *linears: nn.Module) -> list[Float[Tensor, "*tokens _"]]:
    """Return the result of `project` for each of several projections of the same input."""
    parameters = plain_parameters(x, *linears)
    if parameters is None:
        return [_project(linear, x) for linear in linears]
    return [F.linear(x, weight, bias) for weight, bias in parameters]


def plain_parameters(x: Float[Tensor, "*tokens _"], *linears: Any) -> list[tuple[Tensor, Tensor | None]] | None:
    """Return the weight and the bias of each projection if its call for the tokens of x is one call of `F.linear`: no
    other engine can gain, and nothing sees or changes the calls of the modules. Otherwise return None.

    The call of a module, and the choice of its engine, take longer than a small product.

    Args:
        x: tensor with the dtype and the number of tokens of each input.
        *linears: projections.
    """
    if (
        torch.compiler.is_compiling()
        or type(x) is not Tensor
        or not x.is_cpu
        or torch_module._has_any_global_hook()  # type: ignore[no-untyped-call]
        or nn.Linear.forward is not _LINEAR_FORWARD
        or nn.Module.__call__ is not _MODULE_CALL
        or torch._C._is_tracing()  # a traced program names its operators by their modules
    ):
        return None
    dtype = x.dtype
    tokens = x.numel() // max(x.shape[-1], 1)
    if tokens in native_rule(dtype).rows:
        return None
    is_torch = engine_of(dtype).engine == "torch"
    smallest_work = linear_operator.SMALLEST_WORK if dtype == torch.float32 else SMALLEST_BFLOAT16_WORK
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
            or "_compiled_call_impl" in attributes
        ):
            return None
        parameters = attributes["_parameters"]
        weight = parameters.get("weight")
        if weight is None or "bias" not in parameters or not (is_torch or tokens * weight.numel() < smallest_work):
            return None
        found.append((weight, parameters["bias"]))
    return found


def _project(linear: nn.Module, x: Float[Tensor, "*tokens width"]) -> Float[Tensor, "*tokens out"]:
    """Return `linear(x)`, computed by the engine that is chosen for this call."""
    weight: Any
    weight, bias = None, None
    if torch.compiler.is_compiling():
        is_replaced = not torch.compiler.is_exporting() and _is_compiled_with_operator(linear, x)
        engine = "onednn" if is_replaced else "torch"
    elif type(linear) is nn.Linear:
        weight, bias = linear.weight, linear.bias  # read once: in a step of decoding, the reads of modules take time
        engine = _choose(linear, x, weight, bias).engine
    else:
        engine = "torch"
    result: Tensor
    if engine == "torch":
        result = linear(x)
    elif engine == "native":
        result = linear_operator.few_rows(x, weight, bias)
    elif x.dtype == torch.float32:
        result = linear_operator.linear(x, linear.weight, linear.bias)  # type: ignore[arg-type]
    else:
        result = linear_operator.product(x, linear.weight, linear.bias)  # type: ignore[arg-type]
    return result


def explain_linear(linear: nn.Module, x: Float[Tensor, "*tokens width"]) -> LinearChoice:
    """Return the engine by which a layer of headwise computes its projection `linear(x)`, and the reason.

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
    """Return the engine of the projection, whose parameters are passed, and the reason."""
    if not (type(x) is Tensor and x.is_cpu):
        return NOT_PLAIN
    if torch._C._is_tracing():  # tracing would record the sizes that are read below
        return LinearChoice("torch", "torch traces the call")
    if _gains_by_native(x, weight, bias):
        choice = native_rule(x.dtype).choice
    else:
        choice = engine_of(x.dtype)
        if choice.engine == "torch":
            return choice
        reason = _why_not_onednn(x, weight, bias)
        if reason is not None:
            return LinearChoice("torch", reason)
    reason = _why_not_plain(linear, x, weight, bias)
    return choice if reason is None else LinearChoice("torch", reason)


def _is_compiled_with_operator(linear: nn.Module, x: Tensor) -> bool:
    """Return True if the compiler receives the operator `headwise::linear` in place of the call of `linear`. It decides
    when it runs whether the product is large enough for oneDNN. Other products are left to the compiler.
    """
    return (
        uses_onednn(torch.float32)
        and type(linear) is nn.Linear
        and not _has_any_hooks(linear)
        and torch.autograd.forward_ad._current_level < 0  # the operator has no forward-mode derivative
        and x.device.type == "cpu"
        and x.dtype == linear.weight.dtype == torch.float32
    )


def _gains_by_native(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return True if the native kernel is the fastest engine for these tensors, and no gradient is needed, which it
    does not have.
    """
    return linear_operator.gains_by_few_rows(x, weight, bias) and not linear_operator.needs_gradient(x, weight, bias)


def _why_not_plain(linear: nn.Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Return the reason that the call of an `nn.Linear` is not a plain product of its tensors; None if it is one."""
    if _is_observed(linear):
        return "hooks, transforms and modes of torch receive the call of the module"
    dtype = x.dtype
    if not (_is_plain(x, dtype) and _is_plain(weight, dtype) and (bias is None or _is_plain(bias, dtype))):
        return "x, weight and bias are not plain tensors of one dtype"
    if x.ndim < 2 or x.shape[-1] != weight.shape[1] or x.numel() == 0 or weight.numel() == 0:
        return "x is empty, or does not fit the weight"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    return None


def _why_not_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Return the reason to leave a product of these tensors to `F.linear`; None if oneDNN is faster."""
    if not torch._C._get_mkldnn_enabled():
        return "oneDNN is switched off"
    if x.dtype == torch.bfloat16:
        if bias is None:
            return "without a bias, torch computes the same"
        if linear_operator.needs_gradient(x, weight, bias):
            return "with gradients, torch is as fast in bfloat16"
        is_small = x.numel() * len(weight) < SMALLEST_BFLOAT16_WORK
        return "the product is too small for oneDNN to be faster" if is_small else None
    if torch._C._get_fp32_precision_getter("mkldnn", "matmul") not in ("none", "ieee"):
        return "torch computes float32 products in a lower precision, by oneDNN too"
    return None if linear_operator.gains(x, weight) else "the product is too small for oneDNN to be faster"


def _is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return True if a tensor is of torch's own type, dense, on the CPU and of this dtype."""
    is_dense = tensor.layout == torch.strided and tensor.is_cpu
    return has_own_class(tensor) and is_dense and tensor.dtype == dtype


def _is_observed(linear: nn.Module) -> bool:
    """Return True if something of torch or of another library may see or change the call of an `nn.Linear`: hooks, a
    replaced function, a mode, or a transform of `torch.func`.
    """
    return bool(
        _has_any_hooks(linear)
        or torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or F.linear is not torch._C._nn.linear
        or _is_replaced(nn.Linear.forward, nn.modules.linear)
        or _is_replaced(nn.Module.__call__, torch_module)
    )


def _has_any_hooks(linear: nn.Module) -> bool:
    """Return True if a hook of the module, or one of all modules, sees its calls or their gradients."""
    return bool(
        has_hooks(linear) or linear._backward_hooks or linear._backward_pre_hooks or torch_module._has_any_global_hook()  # type: ignore[no-untyped-call]
    )


def _is_replaced(function: Any, module: Any) -> bool:
    """Return True if a function of torch's module was replaced by that of another one."""
    return getattr(function, "__globals__", None) is not vars(module)
