"""Checks of arguments: each returns the value in the form the caller needs, or raises `InputError`."""

import math
import operator
import os
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.shapes import Float, Int

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

LARGEST_INTEGER = 2**63 - 1
"""Largest number of a tensor of int64, the dtype in which torch computes lengths and positions."""

LARGEST_SIZE = 2**31
"""Largest size that a layer or a cache accepts; the product of two such sizes is an int64 too."""


def whole_number(argument: str, value: Any, *, least: int, most: int | None = None) -> int:
    """Return `value`, a Python, NumPy or torch integer, as an int. Raise `InputError` for a bool, for a float such as
    2.0, and for a number below `least` or, if `most` is not None, above it.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise InputError(argument, expected=f"a whole number of {least} or more", got=repr(value))
    if most is not None and number > most:
        raise InputError(argument, expected=f"a whole number from {least} to {most}", got=repr(value))
    return number


def require_one_of(argument: str, value: Any, names: Collection[str], remedies: Mapping[str, str] | None = None) -> str:
    """Return `value` if it is one of the strings in `names`. Otherwise raise `InputError`, which lists the strings and
    contains the advice for this value in `remedies`, if there is any.
    """
    if not isinstance(value, str) or value not in names:
        remedy = (remedies or {}).get(value) if isinstance(value, str) else None
        raise InputError(argument, expected=f"one of {', '.join(names)}", got=repr(value), remedy=remedy)
    return value


def size_argument(argument: str, value: Any) -> int:
    """Return `value`, a size of a layer or cache such as a width, as an int. Raise `InputError` for anything but a
    whole number from 1 to 2**31.
    """
    return whole_number(argument, value, least=1, most=LARGEST_SIZE)


def token_ids(argument: str, values: Any) -> list[int]:
    """Return the distinct token ids in `values`, in ascending order. Raise `InputError` if `values` is not a collection
    of integers.
    """
    try:
        return sorted({whole_number(argument, value, least=-LARGEST_INTEGER, most=LARGEST_INTEGER) for value in values})
    except (TypeError, InputError):
        is_text = isinstance(values, str) or (isinstance(values, Iterable) and any(isinstance(x, str) for x in values))
        remedy = "tokenizer.all_special_ids has the ids of special tokens" if is_text else None
        raise InputError(argument, expected="token ids", got=repr(values), remedy=remedy) from None


def collection_of(argument: str, values: Any, *, of: str) -> Iterable[Any]:
    """Return `values`, a collection such as a list, unchanged. Raise `InputError` for a string or an object that cannot
    be iterated. The error message states that "a collection of", followed by the text `of`, was expected.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InputError(argument, expected=f"a collection of {of}", got=repr(values))
    return values


def pair_of(argument: str, values: Any, *, of: str) -> tuple[Any, Any]:
    """Return a list or tuple of two hashable values as a tuple. Raise `InputError` for anything else. The text `of`
    states in the error message what was expected.
    """
    is_pair = isinstance(values, list | tuple) and len(values) == 2
    if not is_pair or not all(isinstance(value, Hashable) for value in values):
        raise InputError(argument, expected=of, got=repr(values))
    return values[0], values[1]


def named_head(value: Any) -> Any:
    """Convert a head's name to numbers: return the pair (layer, head), such as `(5, 11)`, for the string "5.11". Return
    any other value unchanged.
    """
    if isinstance(value, str) and re.fullmatch(r"\d+\.\d+", value, re.ASCII):
        layer, head = value.split(".")
        return int(layer), int(head)
    return value


def head_pair(argument: str, value: Any, *, of: str) -> tuple[Any, Any]:
    """Return a head as the pair (layer, head). `value` is such a pair or a name such as "5.11". Raise `InputError` for
    anything else. The text `of` states in the error message what was expected.
    """
    return pair_of(argument, named_head(value), of=of)


def head_pairs(argument: str, heads: Any) -> list[tuple[Any, Any]]:
    """Return a list of pairs (layer, head). Each of the `heads` is such a pair or a name such as "5.11"; raise
    `InputError` for anything else.
    """
    of = "heads (layer, head)"
    return [head_pair(argument, head, of=of) for head in collection_of(argument, heads, of=of)]


def folder_path(argument: str, folder: Any) -> Path:
    """Return `folder`, a string or path object, as a `Path`. Raise `InputError` for another type, for an empty path,
    and for a path with a null character. The folder need not exist.
    """
    if not isinstance(folder, str | os.PathLike) or not str(folder) or "\0" in str(folder):
        raise InputError(argument, expected="the path of a folder", got=repr(folder))
    return Path(folder)


def float_dtype(argument: str, dtype: Any) -> torch.dtype | None:
    """Return `dtype`, a floating-point `torch.dtype` or None, unchanged. Raise `InputError` for anything else, such as
    the string "float16".
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InputError(argument, expected="a floating-point dtype, such as torch.float16", got=repr(dtype))
    return dtype


def device_argument(argument: str, device: Any) -> torch.device:
    """Return a device, such as "cuda:0", as a `torch.device`. Raise `InputError` if torch cannot create tensors on it,
    and for "meta", whose tensors have no numbers.
    """
    expected = "a device that torch can use"
    try:
        torch.empty(0, device=device)
        usable = torch.device(device)
    except Exception:  # torch has an error for each kind of device
        reason = _why_unusable(str(device))
        got = repr(str(device)) if reason is None else f"{str(device)!r}: {reason}"
        remedy = "use --device cpu (device='cpu')"
        raise InputError(argument, expected=expected, got=got, remedy=remedy) from None
    if usable.type == "meta":
        raise InputError(argument, expected=expected, got="'meta', whose tensors have no numbers")
    return usable


def finite_number(argument: str, value: Any, *, above: float = -math.inf) -> float:
    """Return `value`, a finite number greater than `above`, as a float. Raise `InputError` for other numbers, NaN,
    strings, and a tensor that requires grad.
    """
    number = _as_float(argument, value)
    if not above < number < math.inf:
        more = "" if above == -math.inf else f" above {above:g}"
        raise InputError(argument, expected=f"a finite number{more}", got=repr(value))
    return number


def is_whole(value: Any, least: int) -> bool:
    """Return True if `value` is an int, but not a bool, of at least `least`."""
    return type(value) is int and value >= least


def probability(argument: str, value: Any) -> float:
    """Return `value` as a float. Raise `InputError` unless it is a number from 0 up to, but not including, 1."""
    number = _as_float(argument, value)
    if not 0.0 <= number < 1.0:
        raise InputError(argument, expected="a probability of 0 or more and less than 1", got=repr(value))
    return number


def flag(argument: str, value: Any) -> bool:
    """Return `value`, True or False, unchanged. Raise `InputError` for every other type, such as 1 or None."""
    if not isinstance(value, bool):
        raise InputError(argument, expected="True or False", got=repr(value))
    return value


def require_module(model: Any) -> nn.Module:
    """Return `model` unchanged if it is a torch module; otherwise raise `InputError`."""
    if not isinstance(model, nn.Module):
        raise InputError("model", expected="a torch module", got=type(model).__name__)
    return model


def float_tensor(argument: str, value: Any, *, like: Tensor) -> Float[Tensor, "..."]:
    """Return `value`, a floating-point tensor on the same device as the tensor `like`. Raise `InputError` for anything
    else. A tensor that was made in inference mode is copied, unless inference mode is still on, because autograd cannot
    save such a tensor.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise InputError(argument, expected="a float tensor", got=got)
    if value.device != like.device:
        raise InputError(argument, expected=f"a tensor on {like.device} like q", got=value.device)
    return savable(value)


def whole_numbers(argument: str, values: Any, *, dimensions: tuple[int, ...], shape: str) -> Int[Tensor, "..."]:
    """Return integers (a tensor, list or scalar) as a new int64 tensor that shares no memory with `values`. Raise
    `InputError` for bools, for other dtypes than integers, and for a number of axes that is not in `dimensions`. The
    text `shape` describes the expected axes in the message. Under `torch.device("meta")`, a list or scalar becomes a
    tensor on the CPU, so that Python code can read the numbers.
    """
    try:
        # `as_tensor` would move a tensor to torch's default device.
        tensor = values if isinstance(values, Tensor) else torch.as_tensor(values)
        if tensor.is_meta and not isinstance(values, Tensor):
            tensor = torch.as_tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise InputError(argument, expected=f"whole numbers, {shape}", got=repr(values)) from None
    if isinstance(values, Sequence) and not tensor.numel():
        tensor = tensor.long()  # torch makes an empty list float
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool or tensor.ndim not in dimensions:
        got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise InputError(argument, expected=f"whole numbers, {shape}", got=got)
    return tensor.to(torch.int64, copy=True)


def position_ids(
    argument: str,
    value: Any,
    *,
    batch: int | None = None,
    length: int | None = None,
    device: torch.device | None = None,
) -> Int[Tensor, "_ _"]:
    """Return `value`, an integer tensor of shape `(batch, length)` or `(1, length)`, unchanged. Raise `InputError` for
    anything else. Where `batch`, `length` or `device` is None, it is not checked.
    """
    expected = "a tensor of whole numbers (batch, length)"
    if not isinstance(value, Tensor):
        raise InputError(argument, expected=expected, got=type(value).__name__)
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool or value.ndim != 2:
        raise InputError(argument, expected=expected, got=f"{value.dtype} of shape {tuple(value.shape)}")
    if (batch is not None and value.shape[0] not in (1, batch)) or (length is not None and value.shape[1] != length):
        raise InputError(argument, expected=f"shape ({batch}, {length}) or (1, {length})", got=tuple(value.shape))
    if device is not None and value.device != device:
        raise InputError(argument, expected=f"a tensor on {device}", got=value.device)
    return value


def positions_argument(
    argument: str, values: Any, *, batch: int, length: int, device: torch.device
) -> Int[Tensor, "#batch length"]:
    """Return token positions of shape `(length,)`, `(1, length)` or `(batch, length)` as a new int64 tensor of shape
    `(1, length)` or `(batch, length)`. Raise `InputError` for other shapes and for another device.
    """
    tensor = whole_numbers(argument, values, dimensions=(1, 2), shape="(length,) or (batch, length)")
    tensor = tensor[None] if tensor.ndim == 1 else tensor
    if tensor.shape[0] not in (1, batch) or tensor.shape[1] != length:
        raise InputError(argument, expected=f"shape {(length,)} or {(batch, length)}", got=tuple(tensor.shape))
    if tensor.device != device:
        raise InputError(argument, expected=f"a tensor on {device}", got=tensor.device)
    return tensor


def has_own_class(tensor: Tensor) -> bool:
    """Return True if the type of a tensor is `torch.Tensor` or `nn.Parameter`, and not a subclass. A subclass may
    change what operators do. Kernels that read the memory of such a tensor directly would ignore this.
    """
    return type(tensor) is Tensor or type(tensor) is nn.Parameter


_TRACING_MODES = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)
"""Modes of torch in which operators return tensors without values, or are recorded."""


def has_readable_values(tensor: Tensor) -> bool:
    """Return True if Python code may read the tensor's numbers during a forward or backward pass: it has numbers
    (`has_values`), and is on the CPU. A read from another device would wait for all unfinished work of that device.
    """
    return has_values(tensor) and tensor.device.type == "cpu"


def may_read_once(tensor: Tensor) -> bool:
    """Return True if Python code may read the tensor's numbers once, outside of a forward or backward pass. It must
    have numbers (`has_values`), and no CUDA graph capture may be in progress. A read from a GPU waits for that GPU.
    """
    return has_values(tensor) and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def has_values(tensor: Tensor) -> bool:
    """Return True if the tensor has actual numbers. Return False while torch compiles or traces, as with fake tensors.
    Also return False for a tensor on the meta device, and for one that a transform of `torch.func` wraps.
    """
    if torch.compiler.is_compiling() or tensor.is_meta:
        return False
    has_modes = torch._C._len_torch_dispatch_stack() > 0
    if has_modes and any(torch._C._get_dispatch_mode(mode) is not None for mode in _TRACING_MODES):
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def known_to_be_true(condition: bool) -> bool:
    """Return True if `condition`, a comparison of tensor sizes, is true. While torch compiles for variable sizes,
    return True only if the condition is true for all of these sizes.
    """
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes long to import

        return statically_known_true(condition)
    return condition


def called_by_compiler(function: FunctionT) -> FunctionT:
    """Decorate a function so that torch's compiler calls it instead of tracing it, and uses its result as a constant.
    `torch.compiler.assume_constant_result` does the same, but imports the compiler, which takes seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@called_by_compiler
def is_transformed() -> bool:
    """Return True inside of a transform of `torch.func`, such as `grad` or `vmap`, also while torch compiles one: the
    tensors of a gradient do not require one there. torch's compiler calls this function instead of tracing it.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def makes_plain_tensors() -> bool:
    """Return True if an operator called now returns an ordinary tensor, which can be kept for later calls. Return False
    while torch compiles or traces, inside a transform of `torch.func`, and while a torch function or dispatch mode is
    active.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def savable(tensor: Tensor) -> Tensor:
    """Return a tensor that autograd can save for the backward pass. A tensor that was made in inference mode is copied,
    unless inference mode is still on. Every other tensor is returned unchanged.
    """
    if torch.compiler.is_compiling() or not tensor.is_inference() or torch.is_inference_mode_enabled():
        return tensor
    return tensor.clone()


def records_program() -> bool:
    """Return True while `torch.export`, the export to ONNX or `torch.jit.trace` records a program. Such a program later
    runs without headwise.
    """
    return torch.compiler.is_exporting() or (not torch.compiler.is_compiling() and torch._C._is_tracing())


def _why_unusable(device: str) -> str | None:
    """Return the reason that torch cannot use a device named "cuda", "mps" or "xpu", with or without an index. Return
    None for other devices, and if the reason is unknown.
    """
    kind, _, index = device.partition(":")
    if kind not in ("cuda", "mps", "xpu"):
        return None
    is_built = torch.backends.mps.is_built() if kind == "mps" else getattr(torch, kind)._is_compiled()
    if not is_built:
        return f"this torch has no {'CUDA' if kind == 'cuda' else kind.upper()}"
    if not getattr(torch, kind).is_available():
        return "no GPU was found"
    last = getattr(torch, kind).device_count() - 1
    is_beyond = index.isdigit() and int(index) > last
    return f"the last GPU is {kind}:{last}" if is_beyond else None


def _as_float(argument: str, value: Any) -> float:
    """Return `value` as a float. Return NaN, which the callers refuse, for a string and for a value that cannot be
    converted. Raise `InputError` for a tensor that requires grad.
    """
    if isinstance(value, Tensor) and value.requires_grad:
        remedy = "its gradient would be lost: pass float(value)"
        raise InputError(argument, expected="a number", got="a tensor that requires grad", remedy=remedy)
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan
