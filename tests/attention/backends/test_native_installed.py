"""The state of the native kernels in an installation, found without loading them, and their compilation into it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import headwise as hw
from headwise.attention.backends.native import build, installed, library

COMPILER = """#!{python}
import pathlib, sys
arguments = sys.argv[1:]
result = pathlib.Path(arguments[arguments.index("-o") + 1])
if "-c" in arguments:
    source = pathlib.Path(arguments[arguments.index("-c") + 1])
    if source.stem == "{broken}":
        sys.exit(f"In file included from above\\n{{source.name}}:3:5: error: no amx here\\nand more")
    result.write_text(next(each for each in arguments if each.startswith("-DHEADWISE_SOURCES")))
else:
    result.write_text("".join(pathlib.Path(each).read_text() for each in arguments if each.endswith(".o")))
"""
"""A program that takes the place of the compiler and the linker, and copies the checksum of the sources."""

FLAGS = {
    "avx512 without bfloat16": ("avx2 fma avx512f avx512bw avx512vl avx512dq", ["avx512", "avx2", "portable"]),
    "avx512 without dq": ("avx2 fma avx512f avx512bw avx512vl avx512_bf16", ["avx2", "portable"]),
    "avx2 without fma": ("sse4_2 avx2", ["portable"]),
    "bfloat16": (
        "avx2 fma avx512f avx512bw avx512vl avx512dq avx512_bf16",
        ["avx512_bf16", "avx512", "avx2", "portable"],
    ),
    "amx": (
        "avx2 fma avx512f avx512bw avx512vl avx512dq avx512_bf16 amx_tile amx_bf16",
        ["amx", "avx512_bf16", "avx512", "avx2", "portable"],
    ),
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package without the library; the compiler is the program above."""
    folder = tmp_path / "site-packages" / "headwise" / "attention" / "backends" / "native"
    folder.mkdir(parents=True)
    monkeypatch.setattr(installed, "LIBRARY", folder / "_native.so")
    monkeypatch.setattr(installed, "NOTE", folder / "_not_compiled.txt")
    monkeypatch.delenv(installed.VARIABLE, raising=False)
    use_compiler(tmp_path, monkeypatch)
    sources = [each for each in build.sources_with_flags() if each[0].stem in ("operators", "parallel")]
    monkeypatch.setattr(build, "sources_with_flags", lambda: sources)
    return tmp_path / "site-packages"


def use_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, broken: str = "") -> None:
    """Write the program that takes the place of the compiler, and name it; it fails for the source `broken`."""
    program = folder / "compiler"
    program.write_text(COMPILER.format(python=sys.executable, broken=broken))
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))


# -- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(library.why_not_loaded() is not None, reason=str(library.why_not_loaded()))
def test_the_state_without_loading_is_that_of_the_loaded_library():
    assert installed.why_not() is None
    assert installed.instruction_set() == library.instruction_set()
    assert installed.state() == f"native kernels: {library.instruction_set()}"


@pytest.mark.parametrize(("flags", "names"), FLAGS.values(), ids=FLAGS)
def test_instruction_sets_follow_from_the_flags_of_the_processor(flags, names, monkeypatch):
    monkeypatch.setattr(installed.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(installed, "_may_use_amx", lambda: True)
    monkeypatch.setattr(
        Path, "read_text", lambda *_, **__: f"processor\t: 0\nflags\t\t: fpu {flags} sse\nvmx flags\t: amx_tile\n"
    )
    find = installed.supported_instruction_sets.__wrapped__
    assert find() == names
    monkeypatch.setattr(installed, "_may_use_amx", lambda: False)
    assert find() == [name for name in names if name != "amx"]
    monkeypatch.setattr(installed.platform, "machine", lambda: "riscv64")
    assert find() == ["portable"]


@pytest.mark.parametrize("has_bfloat16", [False, True])
def test_instruction_sets_of_arm_follow_from_its_bfloat16(has_bfloat16, monkeypatch):
    monkeypatch.setattr(installed.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(installed, "_has_arm_bfloat16", lambda: has_bfloat16)
    names = installed.supported_instruction_sets.__wrapped__()
    assert names == ["neon_bf16", "neon", "portable"][not has_bfloat16 :]


def test_the_named_instruction_set_is_the_one_in_use_or_refused(package, monkeypatch):
    monkeypatch.setattr(installed, "supported_instruction_sets", lambda: ["avx2", "portable"])
    installed.LIBRARY.write_text(build.sources_checksum())
    assert installed.state() == "native kernels: avx2"
    for name in ("avx2", "portable"):
        monkeypatch.setenv(installed.VARIABLE, name)
        assert installed.state() == f"native kernels: {name}"
    monkeypatch.setenv(installed.VARIABLE, "amx")
    refusal = "the native kernels cannot run with HEADWISE_NATIVE=amx here, which may be one of avx2, portable, off"
    assert installed.state() == f"plain torch: {refusal}"
    monkeypatch.setenv(installed.VARIABLE, "off")
    assert installed.why_not() == "the native kernels are switched off by HEADWISE_NATIVE=off"


def test_the_reason_is_that_of_the_installation_and_names_the_command(package, monkeypatch):
    assert installed.why_not() == "the native kernels were not compiled; run: headwise kernels build"
    installed.NOTE.write_text("torch was not installed\n")
    reason = "the native kernels were not compiled when headwise was installed, since torch was not installed"
    assert installed.why_not() == f"{reason}; run: headwise kernels build"
    monkeypatch.setenv("CXX", "/no/compiler")
    assert installed.why_not() == f"{reason}; install a C++ compiler, such as g++, then run: headwise kernels build"
    monkeypatch.setattr(build.platform, "system", lambda: "Darwin")
    assert installed.why_not() == reason
    installed.LIBRARY.write_text("of other sources")
    assert installed.why_not() == "the native kernels were compiled from other sources"


# -- compilation ------------------------------------------------------------------------------------------------------

CROSS_COMPILER = "aarch64-linux-gnu-g++"


@pytest.mark.skipif(shutil.which(CROSS_COMPILER) is None, reason=f"needs the cross compiler {CROSS_COMPILER}")
@pytest.mark.skipif(build.torch_folder() is None, reason="needs the headers of torch")
@pytest.mark.parametrize("name", ["dispatch", "isa_neon", "isa_neon_bf16"])
def test_the_kernels_compile_for_arm_without_warnings(name, monkeypatch):
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    ((source, flags),) = (each for each in build.sources_with_flags() if each[0].stem == name)
    command = [CROSS_COMPILER, *flags, "-O1", "-Werror", "-S", "-o", os.devnull, source]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_kernels_are_compiled_into_the_package_and_uninstalled_with_it(package, capsys):
    record = package / "headwise-0.1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("headwise/__init__.py,sha256=x,1\n")
    copy = record.with_name("hard link")
    os.link(record, copy)
    for _ in range(2):
        installed.compile_kernels()
    assert installed.why_no_library() is None
    assert [path.name for path in installed.LIBRARY.parent.iterdir()] == ["_native.so"]
    entry = "headwise/attention/backends/native/_native.so,,"
    assert record.read_text() == f"headwise/__init__.py,sha256=x,1\n{entry}\n"
    assert copy.read_text() == "headwise/__init__.py,sha256=x,1\n"
    printed = capsys.readouterr().out
    assert (
        f"compiling the native kernels, 2 files, with {os.environ['CXX']}\n  operators.cpp\n  parallel.cpp\n" in printed
    )


def test_a_process_keeps_the_library_that_it_has_loaded(package):
    installed.LIBRARY.write_text("earlier")
    with installed.LIBRARY.open() as loaded:
        installed.compile_kernels()
        assert loaded.read() == "earlier"
    assert installed.why_no_library() is None


def test_an_error_of_the_compiler_is_named_and_leaves_the_library(package, tmp_path, monkeypatch):
    installed.LIBRARY.write_text("earlier")
    use_compiler(tmp_path, monkeypatch, broken="operators")
    message = (
        r"the native kernels were not compiled: the C\+\+ compiler '.*/compiler' failed: operators.cpp:3:5: error: no"
    )
    with pytest.raises(hw.HeadwiseError, match=message):
        installed.compile_kernels()
    assert [path.read_text() for path in installed.LIBRARY.parent.iterdir()] == ["earlier"]


def test_what_prevents_the_compilation_is_named(package, monkeypatch):
    def refused() -> str:
        with pytest.raises(hw.HeadwiseError) as caught:
            installed.compile_kernels()
        return str(caught.value).removeprefix("the native kernels were not compiled: ")

    missing = installed.LIBRARY.parent / "missing"
    with monkeypatch.context() as patch:
        patch.setattr(installed, "LIBRARY", missing / "_native.so")
        assert refused() == f"the folder {missing} cannot be written: No such file or directory"
    with monkeypatch.context() as patch:
        patch.setattr(build, "torch_folder", lambda: None)
        assert refused() == "torch was not installed"
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "no-compiler -march=native")
        assert refused() == "no C++ compiler 'no-compiler' was found"
    monkeypatch.setattr(build.platform, "system", lambda: "Windows")
    assert refused() == "the native kernels are for Linux, and this is Windows"


def test_torch_is_found_in_each_kind_of_environment(tmp_path, monkeypatch):
    def torch_in(folder: Path) -> Path:
        header = folder / "torch" / "include" / "torch" / "csrc" / "stable" / "library.h"
        header.parent.mkdir(parents=True)
        header.touch()
        return folder / "torch"

    monkeypatch.setattr(
        build.sysconfig, "get_paths", lambda: dict.fromkeys(("purelib", "platlib"), str(tmp_path / "a"))
    )
    monkeypatch.setattr(build.site, "getusersitepackages", lambda: str(tmp_path / "user"))
    monkeypatch.setattr(sys, "path", [])
    for name in ("HEADWISE_TORCH", "VIRTUAL_ENV"):
        monkeypatch.delenv(name, raising=False)
    assert build.torch_folder() is None
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "venv"))
    for folder in ("venv/lib/python3.12/site-packages", "user", "a"):  # each before the last
        expected = torch_in(tmp_path / folder)
        assert build.torch_folder() == expected
        if folder.startswith("venv"):
            monkeypatch.delenv("VIRTUAL_ENV")
    monkeypatch.setenv("HEADWISE_TORCH", str(torch_in(tmp_path / "named")))
    assert build.torch_folder() == tmp_path / "named" / "torch"
