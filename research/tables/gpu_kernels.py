"""Compile the Triton kernels for GPUs that need not be there, and write docs/reports/gpu_kernels.md.

    python -m research.tables.gpu_kernels [--quick] [--print]

Triton's compiler and NVIDIA's assembler, which is part of Triton, run on any machine. The table has the registers of a
thread, the bytes of registers that are spilled to memory, and the shared memory of a program. The exit status is 1 if a
kernel spills, or needs more shared memory than a multiprocessor has for two programs. `--quick` compiles two
variants for each GPU, and `--print` writes no file.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headwise.attention.backends.gpu.kernels import Call, KeySums, Results, Spans, Tokens, key_kernel, row_kernel
from headwise.attention.backends.gpu.statistics import REGISTERS, tiles_of
from research.markdown import markdown_table, wrap

REPORT = Path(__file__).parent.parent.parent / "docs" / "reports" / "gpu_kernels.md"
ASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"

SHARED_MEMORY = {80: 164, 90: 228, 100: 228}
"""Shared memory of a multiprocessor in KiB, by compute capability times 10 (CUDA C++ Programming Guide, table of
technical specifications).
"""

OPTIONS = {"one range, tokens": 0, "softcap, sinks, 4 ranges, tokens": 1, "also a mask and a bias": 2}
"""Variants of a call, each with the options of the ones before."""

KERNELS = ("rows", "keys")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ABSENT, ONE = "constexpr", "constexpr"


class Variant(NamedTuple):
    """One compiled kernel.

    Attributes:
        kernel: "rows" or "keys".
        dtype: dtype of queries and keys.
        head_dim: features of a head.
        options: key of `OPTIONS`.
        target: compute capability times 10.
    """

    kernel: str
    dtype: str
    head_dim: int
    options: str
    target: int


class Resources(NamedTuple):
    """Registers and memory that a compiled kernel needs.

    Attributes:
        registers: registers of a thread.
        spilled: bytes of registers that a thread writes to memory.
        shared: bytes of shared memory of a program.
    """

    registers: int
    spilled: int
    shared: int


def signature_of(variant: Variant) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Return the types of a kernel's arguments, its compile-time numbers, and its warps."""
    level, element = OPTIONS[variant.options], f"*{variant.dtype}"
    ranges = 1 if level == 0 else 4
    strides, unit = ("i64", "i64", "i32"), ("i64", "i64", "i32", ONE)
    call = Call(
        q=element,
        k=element,
        q_strides=unit,
        k_strides=unit,
        head_dim="i32",
        heads="i32",
        group="i32",
        queries="i32",
        keys="i32",
        scale="fp32",
        head_scale="*fp32" if level else ABSENT,
        softcap="fp32" if level else ABSENT,
        sinks="*fp32" if level else ABSENT,
        ranges="*i32",
        ranges_strides=strides,
        dense="*u8" if level == 2 else ABSENT,
        dense_strides=unit if level == 2 else ABSENT,
        bias="*fp32" if level == 2 else ABSENT,
        bias_strides=unit if level == 2 else ABSENT,
    )
    tokens = Tokens("*i32", "*i32", "*u8", "*i32", "*i32")
    spans = Spans("*i32", strides)
    tiles = tiles_of(variant.head_dim, DTYPES[variant.dtype], reads_matrix=level == 2, has_softcap=level > 0)
    numbers = {"head_dim": variant.head_dim, "ranges": ranges, "block_rows": tiles.rows, "block_keys": tiles.keys}
    numbers |= {"features": tiles.features}
    if variant.kernel == "rows":
        types = {"call": call, "tokens": tokens, "spans": spans, "results": Results("*fp32", "*fp32", "i64")}
        return types, numbers | {"span_count": ranges}, tiles.warps
    sums = KeySums("*fp32", "*fp32", "*u8" if level else ABSENT, "*fp64", "*i32")
    return {"call": call, "spans": spans, "sums": sums}, numbers, tiles.warps


def _constants(types: Any, path: tuple[int, ...]) -> dict[tuple[int, ...], int | None]:
    """Return the constants among the types of an argument: 1 for strides, None for what is absent."""
    if isinstance(types, tuple):
        return {key: each for n, part in enumerate(types) for key, each in _constants(part, (*path, n)).items()}
    return {path: 1 if len(path) == 3 else None} if types == ABSENT else {}


def compile_variant(variant: Variant) -> Resources:
    """Compile a kernel for a GPU, and return what it needs."""
    kernel = row_kernel if variant.kernel == "rows" else key_kernel
    types, numbers, warps = signature_of(variant)
    constants: dict[Any, Any] = dict(numbers)
    for place, name in enumerate(kernel.arg_names):
        constants |= _constants(types.get(name, ()), (place,))
    source = ASTSource(fn=kernel, signature=types | dict.fromkeys(numbers, ABSENT), constexprs=constants)
    target = GPUTarget("cuda", variant.target, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": warps, "maxnreg": REGISTERS})
    assembly = compiled.asm["ptx"]
    architecture = re.search(r"\.target (\w+)", assembly)
    assert architecture is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(assembly)
        file.flush()
        command = [ASSEMBLER, "-v", "--gpu-name", architecture[1], file.name, "-o", "/dev/null"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = (re.search(text, printed) for text in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
    assert registers is not None, printed
    assert spilled is not None, printed
    return Resources(int(registers[1]), int(spilled[1]), compiled.metadata.shared)


def variants(quick: bool) -> list[Variant]:
    """Return the kernels to compile. With `quick`, these are the variant that needs the most registers, and one with
    more options.
    """
    if quick:
        chosen = zip((64, 128), OPTIONS, strict=False)
        return [Variant(kernel, "bf16", *each, sm) for sm, each, kernel in product(SHARED_MEMORY, chosen, KERNELS)]
    cases = product(SHARED_MEMORY, ("bf16", "fp32"), (64, 128, 256), OPTIONS, KERNELS)
    return [Variant(kernel, dtype, head_dim, options, sm) for sm, dtype, head_dim, options, kernel in cases]


def why_bad(variant: Variant, needs: Resources) -> str | None:
    """Return what is wrong with a compiled kernel; None if nothing is."""
    if needs.spilled:
        return f"{variant}: {needs.spilled} bytes are spilled"
    if 2 * needs.shared > SHARED_MEMORY[variant.target] * 1024:
        return f"{variant}: two programs need {2 * needs.shared} bytes of shared memory"
    return None


def table(measured: dict[Variant, Resources]) -> list[str]:
    """Return the lines of the table: one row for each kernel and variant, and three numbers for each GPU."""
    rows: dict[Variant, dict[int, str]] = {}
    for variant, needs in measured.items():
        row = rows.setdefault(variant._replace(target=0), {})
        row[variant.target] = f"{needs.registers}, {needs.spilled}, {needs.shared:,}"
    headers = ["kernel", "dtype", "head_dim", "options", *(f"sm_{target}" for target in SHARED_MEMORY)]
    return markdown_table(
        headers, [[*variant[:4], *(row.get(target, "") for target in SHARED_MEMORY)] for variant, row in rows.items()]
    )


def main() -> int:
    """Compile all kernels, print and write the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="compile two variants for each GPU")
    parser.add_argument("--print", action="store_true", help="write no file")
    options = parser.parse_args()
    measured = {each: compile_variant(each) for each in tqdm(variants(options.quick), unit="kernel", disable=None)}
    lines = table(measured)
    print("\n".join(lines))
    if not options.print:
        sentences = (
            f"The table lists headwise's Triton kernels for the statistics of heads, compiled on {date.today()} by "
            f"Triton {version('triton')} without a "
            "GPU. A cell has three numbers: the registers of a thread, the bytes of registers that a thread spills "
            "to memory, and the bytes of shared memory of a program (a thread block). The columns that begin with sm_ "
            "are for generations of NVIDIA GPUs. A multiprocessor has 65,536 registers, and "
            f"{', '.join(f'{size} KiB of shared memory on sm_{target}' for target, size in SHARED_MEMORY.items())}. "
            "`make gpu-kernels` writes this page."
        )
        REPORT.write_text("\n".join(["# Triton kernels", "", wrap(sentences), "", *lines]), encoding="utf-8")
    bad = [reason for variant, needs in measured.items() if (reason := why_bad(variant, needs)) is not None]
    print("\n".join(bad))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
