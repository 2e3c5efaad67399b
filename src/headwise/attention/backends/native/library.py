"""Loader of the library of native kernels. It is loaded by the first call that may use it, never by an import."""

import os
import warnings
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from headwise.attention.backends.native import installed, operators
from headwise.attention.backends.native.installed import VARIABLE, cpuinfo
from headwise.checks import called_by_compiler


@called_by_compiler
def why_not_loaded() -> str | None:
    """Load the library of native kernels, and return None. If it is not available, return the reason. `torch.compile`
    calls this function instead of tracing it.
    """
    return load()


@cache
def load() -> str | None:
    """Load the library of native kernels at the first call, and return None, or the reason that it is not available.
    Later calls return the same result. If a library exists and cannot be used, issue a warning.
    """
    reason = installed.why_no_library()
    if reason is None:
        try:
            torch.ops.load_library(str(installed.LIBRARY))  # type: ignore[no-untyped-call]
            reason = None if instruction_set() else installed.why_no_instructions()
        except OSError as error:
            reason = f"the native kernels cannot be loaded: {error}"
    if reason is None:
        operators.register_rules(operators.FAKES)
    elif installed.LIBRARY.is_file() and os.environ.get(VARIABLE) != "off":
        warnings.warn(f"{reason}; headwise computes without them", stacklevel=2)
    return reason


@cache
def operator(name: str) -> Any:
    """Return the operator of the native kernels called `name`, such as "all_finite". It is cached, since looking it up
    takes as long as a short call of it.
    """
    return getattr(torch.ops.headwise, name).default


def instruction_set() -> str:
    """Return the name of the processor's instruction set that the loaded native kernels use, such as "avx512". Torch's
    active dispatch modes are disabled during the call. Otherwise, a mode that traces would record the call in the
    traced program.
    """
    with _disable_current_modes():
        name: str = torch.ops.headwise.instruction_set()
    return name


@cache
def mkl_uses_avx512() -> bool | None:
    """Return True if MKL, the library for float32 products in torch, is expected to use AVX-512 instructions: on Intel
    processors that have them. Return False on other processors, and None if torch has no MKL or the processor is
    unknown. Environment variables that restrict MKL are not considered.
    """
    description = cpuinfo()
    if not torch.backends.mkl.is_available() or not description:  # type: ignore[no-untyped-call]
        return None
    return "GenuineIntel" in description and "avx512f" in description
