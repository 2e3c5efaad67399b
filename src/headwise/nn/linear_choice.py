"""Choice of the engine of linear projections on this processor: `F.linear` of torch, oneDNN, or a native kernel.

    float32     oneDNN where it has AVX-512 and MKL, torch's library, does not use it: on processors by AMD
    bfloat16    oneDNN for a projection with a bias, without gradients: `F.linear` computes this product with oneDNN
                too, but writes the bias into the output before
    few tokens  the native kernel, without gradients, where it was measured to be faster (`native_rule`)

The choice depends on the instructions of both engines, and on nothing that is timed while a model runs.
"""

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from headwise.attention.backends.native import library
from headwise.checks import called_by_compiler
from headwise.errors import InputError

VARIABLE = "HEADWISE_LINEAR"
"""Environment variable that names the engine: "torch" for `F.linear` everywhere, or "onednn" for oneDNN in float32 on
every processor. Both switch the native kernel off. It is read by the first projection.
"""

FIRST_AVX512_BRANCH = 11
"""Smallest number by which MKL names a code branch with AVX-512: `MKL_CBWR_AVX512_MIC` in its header."""


class LinearChoice(NamedTuple):
    """Engine of a linear projection, and the reason for the choice.

    Attributes:
        engine: "torch", "onednn" or "native".
        because: reason, in one sentence.
    """

    engine: str
    because: str


class NativeRule(NamedTuple):
    """Products for which the native kernel of few rows is chosen.

    Attributes:
        rows: numbers of tokens; empty for no product.
        smallest_weight: number of elements below which a weight is left to the other engines.
        because: reason of this rule, in one sentence.
    """

    rows: range
    smallest_weight: int
    because: str

    @property
    def choice(self) -> LinearChoice:
        """Choice of the native kernel by this rule."""
        return LinearChoice("native", self.because)


@called_by_compiler
def uses_onednn(dtype: torch.dtype) -> bool:
    """Return True if plain projections in this dtype are computed by oneDNN directly. The compiler calls this function
    instead of tracing it.
    """
    return engine_of(dtype).engine == "onednn"


@cache
def engine_of(dtype: torch.dtype) -> LinearChoice:
    """Return the engine of plain projections in a dtype on this processor, and the reason.

    Raises:
        InputError: the environment variable names another engine than "torch" and "onednn".
    """
    wanted = _wanted()
    if wanted == "torch":
        return LinearChoice("torch", f"{VARIABLE}=torch")
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return LinearChoice("torch", "this torch was built without oneDNN")
    if dtype == torch.bfloat16:
        return _bfloat16_engine()
    if dtype != torch.float32:
        return LinearChoice("torch", "oneDNN is chosen in float32 and bfloat16 only")
    if wanted == "onednn":
        return LinearChoice("onednn", f"{VARIABLE}=onednn")
    return _engine_by_instructions(torch.backends.cpu.get_cpu_capability(), _mkl_branch())


def _wanted() -> str:
    """Return the engine that the environment variable names; an empty string if it is not set.

    Raises:
        InputError: it names another engine than "torch" and "onednn".
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "torch", "onednn"):
        raise InputError(VARIABLE, expected="'torch' or 'onednn'", got=repr(wanted))
    return wanted


@cache
def native_rule(dtype: torch.dtype) -> NativeRule:
    """Return the products in a dtype that the native kernel of few rows computes on this processor.

    Raises:
        InputError: the environment variable names another engine than "torch" and "onednn".
    """
    if wanted := _wanted():
        return NativeRule(range(0), 0, f"{VARIABLE}={wanted}")
    if dtype not in (torch.float32, torch.bfloat16):
        return NativeRule(range(0), 0, "the native kernel computes in float32 and bfloat16 only")
    if reason := library.why_not_loaded():
        return NativeRule(range(0), 0, reason)
    instructions = library.instruction_set()
    if dtype == torch.bfloat16:
        return _native_rule_in_bfloat16(instructions, torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return _native_rule_in_float32(instructions, _mkl_branch())


def _native_rule_in_bfloat16(instructions: str, onednn_has_bfloat16: bool) -> NativeRule:
    """Return the rule in bfloat16, as measured (docs/lab-notes.md).

    Args:
        instructions: instruction set of the native kernels.
        onednn_has_bfloat16: True if oneDNN computes in bfloat16 here, which is faster from about 8 tokens on.
    """
    if instructions == "portable":
        return NativeRule(range(0), 0, "the portable native kernel is slower")
    if onednn_has_bfloat16:
        if instructions == "avx512_bf16":
            return NativeRule(range(1, 7), 0, "up to 6 tokens, the native kernel is faster than oneDNN without AMX")
        return NativeRule(
            range(1, 5), 2**14, "up to 4 tokens, the native kernel reads a bfloat16 weight faster than oneDNN"
        )
    return NativeRule(range(1, 9), 0, "up to 8 tokens, torch is slower without instructions for bfloat16")


def _native_rule_in_float32(instructions: str, mkl_branch: int | None) -> NativeRule:
    """Return the rule in float32, as measured (docs/lab-notes.md).

    Args:
        instructions: instruction set of the native kernels.
        mkl_branch: number of MKL's code branch; None if it is unknown.
    """
    if instructions == "portable" or mkl_branch is None:
        return NativeRule(range(0), 0, "no native kernel was measured to be faster here")
    if mkl_branch < FIRST_AVX512_BRANCH and instructions != "avx2":
        return NativeRule(range(1, 9), 0, "up to 8 tokens, the native kernel uses AVX-512, and MKL does not")
    if mkl_branch < FIRST_AVX512_BRANCH:
        return NativeRule(
            range(2, 9), 2**16, "from 2 to 8 tokens, MKL without AVX-512 is slower than the native kernel"
        )
    if instructions == "avx2":
        return NativeRule(range(0), 0, "MKL uses AVX-512, and the native kernels do not")
    return NativeRule(range(4, 9), 2**19, "from 4 to 8 tokens, the native kernel reads a large weight faster than MKL")


def _bfloat16_engine() -> LinearChoice:
    """Return the engine of projections in bfloat16: oneDNN where torch computes such products with oneDNN too."""
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return LinearChoice("onednn", "in bfloat16, oneDNN adds the bias to the product itself")
    return LinearChoice("torch", "oneDNN does not compute in bfloat16 on this processor")


def _engine_by_instructions(capability: str, mkl_branch: int | None) -> LinearChoice:
    """Return the engine of projections in float32 by the instructions of both engines, as measured (docs/lab-notes.md):
    oneDNN with AVX-512 takes about half the time of MKL without, and with the same instructions MKL is faster.

    Args:
        capability: instruction set of torch and of oneDNN, such as "AVX512".
        mkl_branch: number of MKL's code branch; None if it is unknown.
    """
    if capability != "AVX512":
        return LinearChoice("torch", f"oneDNN has no advantage with the instructions {capability}")
    if mkl_branch is None:
        return LinearChoice("torch", "the instructions of torch's library for float32 products are unknown")
    if mkl_branch >= FIRST_AVX512_BRANCH:
        return LinearChoice("torch", "MKL, which torch computes float32 products with, uses AVX-512")
    return LinearChoice("onednn", "MKL, which torch computes float32 products with, does not use AVX-512 here")


def _mkl_branch() -> int | None:
    """Return the number of the code branch that MKL chose for this processor, from the function of MKL inside torch's
    library; None if torch has no MKL or does not export this function. The public header of MKL declares the function
    as `mkl_cbwr_get_auto_branch`.
    """
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return int(library.mkl_serv_cbwr_get_auto_branch())
    except (OSError, AttributeError):
        return None
