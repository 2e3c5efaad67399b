"""Compile the native kernels into one shared library: `python build.py [library]`.

The library has no Python code in it and uses torch's stable ABI, so that one file serves all supported versions of
Python and of torch. Nothing here imports torch or headwise: the build of a wheel runs this file by its path. In an
installed headwise, `headwise kernels build` runs it.
"""

import hashlib
import os
import platform
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = Path(__file__).resolve().parent
LIBRARY = FOLDER / "_native.so"
"""The library, next to this file."""

NOTE = FOLDER / "_not_compiled.txt"
"""File in a wheel without the library: the reason why it was not compiled, which `hatch_build.py` writes."""

TORCH_TARGET_VERSION = "0x020b000000000000"
"""Oldest version of torch that the library runs with: 2.11."""

FLAGS = "-std=c++17 -O3 -fPIC -fvisibility=hidden -fno-math-errno -fno-trapping-math -Wall -Wextra"
"""Flags of all sources."""

INTRINSICS_WARNINGS = "-Wno-maybe-uninitialized -Wno-uninitialized -Wno-ignored-attributes"
"""Flags that silence warnings about the intrinsics of GCC 12, and about their types as template arguments."""

INSTRUCTION_SETS = {
    "amx": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mavx512bf16 -mamx-tile -mamx-bf16",
    "avx512_bf16": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mavx512bf16",
    "avx512": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma",
    "avx2": "-mavx2 -mfma",
    "neon_bf16": "-march=armv8.2-a+bf16",
    "neon": "",
    "portable": "",
}
"""Additional flags of the sources `isa_*.cpp`."""

ARCHITECTURES = {"amx": "x86_64", "avx": "x86_64", "neon": "aarch64"}
"""Architecture of the processors that have an instruction set, by the beginning of the name of the instruction set."""


def sources_checksum() -> str:
    """Return a checksum of all C++ sources of the native kernels. A compiled library contains the checksum of the
    sources that it was compiled from.
    """
    sources = sorted(path for path in (FOLDER / "cpp").iterdir() if path.suffix in (".h", ".cpp"))
    return hashlib.sha256(b"".join(source.name.encode() + source.read_bytes() for source in sources)).hexdigest()[:16]


def torch_folder() -> Path | None:
    """Return the folder of an installed torch, whose headers and library the native kernels are compiled with; None if
    there is none.

    It is the folder that the environment variable `HEADWISE_TORCH` names. By default it is searched for in the folders
    of this Python, which pip hides from `import` while it builds a wheel, and in the active virtual environment, which
    `python -m build` replaces by one of its own.
    """
    paths = sysconfig.get_paths()
    folders = [Path(paths["purelib"]), Path(paths["platlib"]), *(Path(entry) for entry in sys.path if entry)]
    folders.append(Path(site.getusersitepackages()))
    if "VIRTUAL_ENV" in os.environ:
        folders += sorted(Path(os.environ["VIRTUAL_ENV"]).glob("lib/python*/site-packages"))
    candidates = [folder / "torch" for folder in folders]
    if "HEADWISE_TORCH" in os.environ:
        candidates.insert(0, Path(os.environ["HEADWISE_TORCH"]))
    found = (each for each in candidates if (each / "include/torch/csrc/stable/library.h").is_file())
    return next(found, None)


def why_not() -> str | None:
    """Return the reason that the native kernels cannot be compiled on this machine, in one sentence; None if
    they can.
    """
    if platform.system() != "Linux":
        return f"the native kernels are for Linux, and this is {platform.system()}"
    if not has_compiler():
        return f"no C++ compiler {_compiler()[0]!r} was found"
    if torch_folder() is None:
        return "torch was not installed"
    return None


def has_compiler() -> bool:
    """Return True if the C++ compiler is on the path: `c++`, or the one that the environment variable `CXX` names."""
    return shutil.which(_compiler()[0]) is not None


def sources_with_flags() -> list[tuple[Path, list[str]]]:
    """Return the C++ sources to compile for this processor, each with its compiler flags."""
    common = [*FLAGS.split(), *INTRINSICS_WARNINGS.split(), f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"]
    common += ["-isystem", f"{torch_folder()}/include", f'-DHEADWISE_SOURCES="{sources_checksum()}"']
    sources = {source.stem.removeprefix("isa_"): source for source in sorted((FOLDER / "cpp").glob("*.cpp"))}
    return [
        (source, [*common, *INSTRUCTION_SETS.get(name, "").split()])
        for name, source in sources.items()
        if is_for_this_architecture(name)
    ]


def is_for_this_architecture(name: str) -> bool:
    """Return True if a source can be compiled for the architecture of this processor: the source of one of its
    instruction sets, or one for every architecture. `name` is the name of an instruction set or of another source.
    """
    architectures = {each for start, each in ARCHITECTURES.items() if name.startswith(start)}
    return not architectures or platform.machine().replace("AMD64", "x86_64") in architectures


def build(library: Path = LIBRARY) -> None:
    """Compile the C++ sources of the native kernels, link them to the file `library`, and print a line for each source.
    Raise `RuntimeError` with the reason if that is not possible. The environment variable `CXX` names the compiler;
    `CXXFLAGS` and `LDFLAGS` add flags. The file is replaced only when the new one is complete, and a process that uses
    the earlier library keeps it.
    """
    reason = why_not()
    if reason is not None:
        raise RuntimeError(reason)
    partial = library.with_suffix(f".{os.getpid()}")
    try:
        partial.touch()
    except OSError as error:
        raise RuntimeError(f"the folder {library.parent} cannot be written: {error.strerror}") from error
    try:
        with TemporaryDirectory() as folder:
            _compile(Path(folder), partial)
        partial.replace(library)
    finally:
        partial.unlink(missing_ok=True)


def _compile(folder: Path, library: Path) -> None:
    """Compile all sources to object files in a folder, and link these to the file `library`."""
    compiling, linking = (shlex.split(os.environ.get(name, "")) for name in ("CXXFLAGS", "LDFLAGS"))
    sources = sources_with_flags()
    objects = [folder / f"{source.stem}.o" for source, _ in sources]
    commands = [
        [*_compiler(), *flags, *compiling, "-c", source, "-o", compiled]
        for (source, flags), compiled in zip(sources, objects, strict=True)
    ]
    print(f"compiling the native kernels, {len(sources)} files, with {shlex.join(_compiler())}", flush=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (source, _), _done in zip(sources, pool.map(_run, commands), strict=True):
            print(f"  {source.name}", flush=True)
    _run([*_compiler(), "-shared", *objects, "-o", library, f"-L{torch_folder()}/lib", "-ltorch_cpu", *linking])


def _compiler() -> list[str]:
    """Return the command of the C++ compiler: the environment variable `CXX`, by default `c++`."""
    return shlex.split(os.environ.get("CXX", "c++"))


def _run(command: list[str | Path]) -> None:
    """Run a command of the C++ compiler, and print its warnings. If the command fails, raise `RuntimeError` with the
    first error that the compiler printed.
    """
    result = subprocess.run([str(part) for part in command], check=False, stderr=subprocess.PIPE, text=True)
    if result.returncode:
        lines = result.stderr.splitlines() or [f"exit status {result.returncode}"]
        first = next((line for line in lines if "error" in line), lines[-1])
        raise RuntimeError(f"the C++ compiler {command[0]!r} failed: {first.strip()}")
    sys.stderr.write(result.stderr)


def main() -> None:
    """Compile the native kernels to the file that the first command-line argument names, by default `_native.so` next
    to this file. If that is not possible on this machine, print the reason.
    """
    reason = why_not()
    if reason is not None:
        print(f"headwise runs without native kernels: {reason}", file=sys.stderr)
        return
    try:
        build(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else LIBRARY)
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
