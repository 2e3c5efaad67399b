"""Compile the native kernels into one shared library: `python build.py [library]`.

The library has no Python code in it and uses torch's stable ABI, so that one file serves all supported versions of
Python and of torch. Nothing here imports torch or headwise: the build of a wheel runs this file by its path.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = Path(__file__).resolve().parent
LIBRARY = FOLDER / "_native.so"
"""The library, next to this file."""

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
    "portable": "",
}
"""Additional flags of the sources `isa_*.cpp`."""


def sources_checksum() -> str:
    """Return a checksum of all sources. The library has that of the sources it was compiled from."""
    sources = sorted(path for path in (FOLDER / "cpp").iterdir() if path.suffix in (".h", ".cpp"))
    return hashlib.sha256(b"".join(source.name.encode() + source.read_bytes() for source in sources)).hexdigest()[:16]


def torch_folder() -> Path | None:
    """Return the folder of an installed torch, whose headers and library are used; None if there is none.

    It is the folder that the environment variable `HEADWISE_TORCH` names. By default it is searched for in the folders
    of this Python, which pip hides from `import` while it builds a wheel, and in the active virtual environment, which
    `python -m build` replaces by one of its own.
    """
    paths = sysconfig.get_paths()
    folders = [Path(paths["purelib"]), Path(paths["platlib"]), *(Path(entry) for entry in sys.path if entry)]
    if "VIRTUAL_ENV" in os.environ:
        folders += sorted(Path(os.environ["VIRTUAL_ENV"]).glob("lib/python*/site-packages"))
    candidates = [folder / "torch" for folder in folders]
    if "HEADWISE_TORCH" in os.environ:
        candidates.insert(0, Path(os.environ["HEADWISE_TORCH"]))
    found = (each for each in candidates if (each / "include/torch/csrc/stable/library.h").is_file())
    return next(found, None)


def why_not() -> str | None:
    """Return the reason that the library cannot be built here, in one sentence; None if it can."""
    if platform.system() != "Linux":
        return f"the native kernels are built on Linux only, and this is {platform.system()}"
    if shutil.which(_compiler()[0]) is None:
        return f"there is no C++ compiler {_compiler()[0]!r}"
    if torch_folder() is None:
        return "no installed torch was found, whose headers are needed; HEADWISE_TORCH can name its folder"
    return None


def sources_with_flags() -> list[tuple[Path, list[str]]]:
    """Return the sources that are compiled for this processor, each with the flags of the compiler that it needs."""
    common = [*FLAGS.split(), *INTRINSICS_WARNINGS.split(), f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"]
    common += ["-isystem", f"{torch_folder()}/include", f'-DHEADWISE_SOURCES="{sources_checksum()}"']
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    sources = {source.stem.removeprefix("isa_"): source for source in sorted((FOLDER / "cpp").glob("*.cpp"))}
    return [
        (source, [*common, *INSTRUCTION_SETS.get(name, "").split()])
        for name, source in sources.items()
        if is_x86 or not name.startswith(("avx", "amx"))
    ]


def build(library: Path = LIBRARY) -> None:
    """Compile all sources and link them to the file `library`. Raises `CalledProcessError` if the compiler fails. The
    environment variables `CXXFLAGS` and `LDFLAGS` add flags.
    """
    compiling, linking = (shlex.split(os.environ.get(name, "")) for name in ("CXXFLAGS", "LDFLAGS"))
    with TemporaryDirectory() as folder:
        objects, commands = [], []
        for source, flags in sources_with_flags():
            objects.append(f"{folder}/{source.stem}.o")
            commands.append([*_compiler(), *flags, *compiling, "-c", source, "-o", objects[-1]])
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        partial = library.with_suffix(".partial")
        _run([*_compiler(), "-shared", *objects, "-o", partial, f"-L{torch_folder()}/lib", "-ltorch_cpu", *linking])
        partial.replace(library)


def _compiler() -> list[str]:
    """Return the command of the C++ compiler: the environment variable `CXX`, by default `c++`."""
    return shlex.split(os.environ.get("CXX", "c++"))


def _run(command: list[str | Path]) -> None:
    """Run a command; raise `CalledProcessError` if it fails."""
    subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    reason = why_not()
    if reason is not None:
        print(f"headwise runs without native kernels: {reason}", file=sys.stderr)
    else:
        build(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else LIBRARY)
