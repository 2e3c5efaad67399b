"""The backend `flex`: torch's FlexAttention, compiled, for masks, biases and options that SDPA would need a matrix for.

FlexAttention (Dong et al. 2024) compiles the rule of a mask and of the scores into its kernel, and leaves out blocks in
which no key is visible. It has the log-sum-exp and gradients on a GPU. Sinks follow from the log-sum-exp. On a CPU it
has neither, and is slower than the other backends; there it serves to test the rules.

Each combination of options is compiled once. Past a number of compiled kernels, torch would run FlexAttention without a
kernel, with the whole matrix in memory; here that is an error.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from headwise.attention.backends import fused, reference
from headwise.attention.backends.gpu.block_mask import block_mask_of
from headwise.attention.backends.gpu.flex_rules import score_rule
from headwise.attention.backends.native.backend import why_no_derivative
from headwise.attention.problem import Answer, Problem
from headwise.errors import InputError

name = "flex"

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes that FlexAttention's kernels compute in."""

DEVICES = ("cuda", "cpu")
"""Types of devices that the backend knows."""

LEAST_WIDTH = 16
"""Least number of features of a head for FlexAttention; narrower heads are padded with zeros."""

MOST_COMPILED = 128
"""Number of kernels that torch may compile before it raises an error."""

STAGES_WITH_BIAS = 2
"""Number of tiles that a kernel in half precision loads ahead if there is a bias. Torch's own choice of 3 does not
count the tiles of the bias: with those, an H100 has too little shared memory.
"""

Kernel = Literal["auto", "triton", "flash"]


def why_not(problem: Problem, kernel: Kernel = "auto") -> str | None:
    """Return one sentence that says why FlexAttention cannot compute an attention problem (tensors, mask and options of
    one call) with one of its kernels; None if it can.
    """
    if problem.talking is not None:
        return "FlexAttention keeps heads apart, and talking_heads mixes them"
    if problem.dropout > 0:
        return "FlexAttention has no dropout"
    if problem.q.device.type not in DEVICES:
        return f"FlexAttention is used on a GPU and a CPU, and q is on {problem.q.device}"
    if problem.q.dtype not in DTYPES:
        return f"FlexAttention's kernels compute in float16, bfloat16 and float32, and q is in {problem.q.dtype}"
    reason = why_no_derivative() or _why_not_transformed(problem)
    if reason is None:
        reason = (
            _why_not_on_cpu(problem, kernel) if problem.q.device.type == "cpu" else _why_not_on_gpu(problem, kernel)
        )
    return reason


def _why_not_transformed(problem: Problem) -> str | None:
    """Return the reason that tensors are wrapped by something that FlexAttention does not know; None if none is."""
    if torch.compiler.is_compiling():
        return None
    if torch._C._is_tracing():
        return "FlexAttention cannot be recorded by torch.jit.trace"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "FlexAttention has no rules for transforms of torch.func"
    return None


def _why_not_on_cpu(problem: Problem, kernel: Kernel) -> str | None:
    """Return the reason that FlexAttention cannot compute a problem on a CPU; None if it can."""
    if kernel != "auto":
        return f"FlexAttention's kernel {kernel!r} is for GPUs, and q is on {problem.q.device}"
    if _needs_lse(problem):
        return "FlexAttention returns no log-sum-exp on a CPU, which sinks need too"
    if torch.is_grad_enabled() and any(each.requires_grad for each in _tensors(problem)):
        return "FlexAttention has no gradients on a CPU"
    if torch.compiler.is_compiling() and problem.mask is not None:
        return "while compiling for a CPU, FlexAttention cannot read the ranges of a mask that the program computes"
    return None


def _why_not_on_gpu(problem: Problem, kernel: Kernel) -> str | None:
    """Return the reason that FlexAttention cannot compute a problem on a GPU; None if it can."""
    learns = [each for each in (problem.bias, problem.scale) if isinstance(each, Tensor) and each.requires_grad]
    if torch.is_grad_enabled() and learns:
        if torch.are_deterministic_algorithms_enabled():
            return "FlexAttention adds up the gradient of a bias or of scales in no fixed order"
        if kernel == "flash":
            return "FlashAttention has no gradients of a bias or of scales"
    return _why_no_flash(problem) if kernel == "flash" else None


def _why_no_flash(problem: Problem) -> str | None:
    """Return the reason that FlexAttention cannot use the kernels of FlashAttention 4; None if it can."""
    if problem.q.dtype == torch.float32:
        return "FlashAttention computes in float16 and bfloat16, and q is in torch.float32"
    if _needs_lse(problem):
        return "the log-sum-exp of FlexAttention's flash kernel was wrong in some versions of torch, and sinks need it"
    if not _has_flash_package():
        return "the package of FlashAttention 4 is not installed: pip install --pre flash-attn-4"
    if torch.cuda.get_device_capability(problem.q.device)[0] not in (9, 10):
        return "FlashAttention 4 is for GPUs of compute capability 9 and 10"
    return None


@cache
def _has_flash_package() -> bool:
    """Return True if the package of FlashAttention 4 is installed."""
    return find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None


def run(problem: Problem, kernel: Kernel = "auto") -> Answer:
    """Compute attention with FlexAttention, or with the reference backend if the call is to return the weights. The
    gate (a factor of the output) is not applied. `why_not` must have returned None for the problem.
    """
    if problem.return_weights:
        return reference.run(problem)  # the caller asks for the matrix that kernels avoid
    if 0 in (*problem.q.shape, *problem.k.shape, *problem.v.shape):
        return fused.empty_result(problem)
    q, k, v = (fused.widen(tensor, max(tensor.shape[-1], LEAST_WIDTH)) for tensor in (problem.q, problem.k, problem.v))
    block_mask = None if problem.mask is None else block_mask_of(problem.mask, problem.grid)
    options: dict[str, Any] = {
        "score_mod": score_rule(problem),
        "block_mask": block_mask,
        "scale": 1.0 if isinstance(problem.scale, Tensor) else problem.scale,
        "enable_gqa": q.shape[1] != k.shape[1],
        "kernel_options": _kernel_options(problem, kernel),
    }
    lse = None
    if _needs_lse(problem):
        from torch.nn.attention.flex_attention import AuxRequest

        out, others = _call(q, k, v, options | {"return_aux": AuxRequest(lse=True)})
        lse = others.lse
    else:
        out = _call(q, k, v, options)
    if lse is not None and problem.sinks is not None:
        out, lse = reference.with_sinks(out, lse, problem.sinks)
    out = out[..., : problem.v.shape[-1]].to(problem.q.dtype)
    return Answer(out, lse if problem.return_lse else None, None)


def _call(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
    """Return the result of FlexAttention. It is compiled, unless the caller is being compiled already."""
    from torch.nn.attention.flex_attention import flex_attention

    if torch.compiler.is_compiling():
        return flex_attention(q, k, v, **options)
    # A scale or softcap that is a variable of the kernel cannot be compiled.
    changes = {"recompile_limit": MOST_COMPILED, "accumulated_recompile_limit": MOST_COMPILED, "specialize_float": True}
    with torch._dynamo.config.patch(changes):
        return compiled()(q, k, v, **options)


@cache
def compiled() -> Callable[..., Any]:
    """Return compiled FlexAttention. With `fullgraph`, too many kernels are an error."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, fullgraph=True)


def _kernel_options(problem: Problem, kernel: Kernel) -> dict[str, Any] | None:
    """Return the options of FlexAttention's kernel; None for its own choice. The kernel for few queries has no gradient
    of a bias.
    """
    if problem.q.device.type == "cpu":
        return None
    if kernel == "flash":
        return {"BACKEND": "FLASH"}
    options: dict[str, Any] = {}
    if kernel == "triton" or any(
        isinstance(each, Tensor) and each.requires_grad for each in (problem.bias, problem.scale)
    ):
        options["BACKEND"] = "TRITON"
    if problem.bias is not None and problem.q.dtype != torch.float32:
        options["num_stages"] = STAGES_WITH_BIAS
    return options or None


def _needs_lse(problem: Problem) -> bool:
    """Return True if the log-sum-exp must be computed: it is asked for, or there are sinks."""
    return problem.return_lse or problem.sinks is not None


def _tensors(problem: Problem) -> list[Tensor]:
    """Return the tensors of a problem that may require a gradient."""
    tensors = (problem.q, problem.k, problem.v, problem.bias, problem.sinks, problem.scale)
    return [each for each in tensors if isinstance(each, Tensor)]


@dataclass(frozen=True)
class Flex:
    """The backend `flex` with one of FlexAttention's kernels; pass it as `backend=` to `attend`.

    Attributes:
        kernel: "auto" for FlexAttention's own choice, "triton" for its Triton kernel, or "flash" for FlashAttention 4
            on GPUs of the generations Hopper and Blackwell, which needs the package `flash-attn-4`.

    Raises:
        InputError: any other kernel.

    Example:
        >>> out = hw.attend(q, k, v, mask=hw.window(4096), backend=hw.Flex("flash"))
    """

    kernel: Kernel = "auto"
    name: str = field(default=name, init=False)

    def __post_init__(self) -> None:
        if self.kernel not in get_args(Kernel):
            raise InputError("kernel", expected=f"one of {', '.join(get_args(Kernel))}", got=repr(self.kernel))

    def why_not(self, problem: Problem) -> str | None:
        """Return one sentence that says why FlexAttention cannot compute an attention problem with this kernel; None if
        it can.
        """
        return why_not(problem, self.kernel)

    def run(self, problem: Problem) -> Answer:
        """Compute attention with this kernel."""
        return run(problem, self.kernel)
