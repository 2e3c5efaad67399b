"""State of the native kernels in this installation, found without torch, and their compilation into it."""

import ctypes
import os
import platform
from functools import cache
from pathlib import Path

from headwise.attention.backends.native import build
from headwise.errors import HeadwiseError

LIBRARY, NOTE = build.LIBRARY, build.NOTE
"""The library in this installation; the reason of a wheel without it."""

VARIABLE = "HEADWISE_NATIVE"
"""Environment variable that names the instruction set to use, such as "avx2", or "off"."""

COMMAND = "headwise kernels build"
"""Command that compiles the library into this installation."""

_FLAGS = {"avx512bf16": "avx512_bf16", "amx-tile": "amx_tile", "amx-bf16": "amx_bf16"}
"""Names in Linux of instructions that the compiler spells in another way."""


def why_not() -> str | None:
    """Return the reason that this installation does not use the native kernels, with the command that compiles them
    where that helps. Return None if they are expected to load. The kernels are not loaded, and torch is not imported.
    """
    return why_no_library() or (why_no_instructions() if instruction_set() is None else None)


def state() -> str:
    """Return one line of text: the instruction set that the native kernels use, or the reason that they are not
    used.
    """
    reason = why_not()
    return f"native kernels: {instruction_set()}" if reason is None else f"plain torch: {reason}"


def why_no_library() -> str | None:
    """Return the reason that the native kernels cannot be loaded: they are switched off, not compiled, or compiled from
    other sources. It includes the command that compiles them, where that helps. Return None if there is a library to
    load.
    """
    if os.environ.get(VARIABLE) == "off":
        return f"the native kernels are switched off by {VARIABLE}=off"
    if not LIBRARY.is_file():
        reason = f" when headwise was installed, since {NOTE.read_text('utf-8').strip()}" if NOTE.is_file() else ""
        return f"the native kernels were not compiled{reason}{_remedy()}"
    if build.sources_checksum().encode() not in LIBRARY.read_bytes():
        return f"the native kernels were compiled from other sources{_remedy()}"
    return None


def why_no_instructions() -> str:
    """Return an error message: the environment variable `HEADWISE_NATIVE` names an instruction set that the native
    kernels cannot use on this processor. The message lists the possible values.
    """
    choices = ", ".join([*supported_instruction_sets(), "off"])
    return (
        f"the native kernels cannot run with {VARIABLE}={os.environ.get(VARIABLE)} here, which may be one of {choices}"
    )


def _remedy() -> str:
    """Return the end of an error message: the command that compiles the native kernels. Return an empty string on
    systems other than Linux, where they cannot be compiled.
    """
    if platform.system() != "Linux":
        return ""
    first = "" if build.has_compiler() else "install a C++ compiler, such as g++, then "
    return f"; {first}run: {COMMAND}"


def instruction_set() -> str | None:
    """Return the name of the processor's instruction set that the native kernels use, such as "avx512". The environment
    variable `HEADWISE_NATIVE` can name one; by default it is the fastest that the processor supports. Return None if
    the named one is not supported.
    """
    wanted = os.environ.get(VARIABLE)
    return next((name for name in supported_instruction_sets() if wanted in (None, "", name)), None)


def cpuinfo() -> str:
    """Return the text of Linux's file `/proc/cpuinfo`, which describes the processor; an empty string on other
    systems.
    """
    file = Path("/proc/cpuinfo")
    return file.read_text(errors="replace") if file.is_file() else ""


@cache
def supported_instruction_sets() -> list[str]:
    """Return the names of the instruction sets that native kernels are compiled for and this processor supports, the
    fastest first. The C++ code in `cpp/dispatch.cpp` follows the same rules.
    """
    available = set(cpuinfo().partition("flags")[2].partition("\n")[0].split())
    names = []
    for name in filter(build.is_for_this_architecture, build.INSTRUCTION_SETS):
        if name == "neon_bf16":
            is_supported = _has_arm_bfloat16()
        else:
            options = build.INSTRUCTION_SETS[name].replace("-m", "").split()
            needed = {_FLAGS.get(flag, flag) for flag in options}
            is_supported = needed <= available and (name != "amx" or _may_use_amx())
        if is_supported:
            names.append(name)
    return names


def _has_arm_bfloat16() -> bool:
    """Return True if Linux reports that this Arm processor has the instructions for bfloat16."""
    capabilities, bfloat16 = 26, 1 << 14  # AT_HWCAP2 and HWCAP2_BF16
    return bool(ctypes.CDLL(None).getauxval(capabilities) & bfloat16)


def _may_use_amx() -> bool:
    """Request permission from Linux to use the AMX registers in this process. Return True if it is granted."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


def compile_kernels() -> None:
    """Compile the native kernels into this installation, for every process that starts afterwards. Raise
    `HeadwiseError` with the reason if that is not possible.
    """
    try:
        build.build(LIBRARY)
    except RuntimeError as error:
        raise HeadwiseError(f"the native kernels were not compiled: {error}") from error
    _list_in_record(LIBRARY)


def _list_in_record(library: Path) -> None:
    """Add the compiled library to the list of files of an installed headwise (`RECORD`), so that it is removed when
    headwise is uninstalled.
    """
    site_packages = library.parents[4]
    entry = f"{library.relative_to(site_packages).as_posix()},,"
    for record in site_packages.glob("headwise-*.dist-info/RECORD"):
        lines = record.read_text("utf-8").splitlines()
        if not any(line.startswith(entry[:-1]) for line in lines):
            partial = record.with_suffix(".partial")  # the file itself may be shared with a cache by a hard link
            partial.write_text("\n".join([*lines, entry, ""]), "utf-8")
            partial.replace(record)
