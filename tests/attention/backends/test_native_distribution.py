"""Installations of headwise: from the wheel, which has the native kernels, and from the sdist without a compiler, into
which they are compiled afterwards.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import headwise as hw
from headwise.attention.backends.native import build, installed

PROGRAM = """
import torch, headwise as hw
q = torch.randn(1, 2, 5, 8)
print(hw.__file__)
print(hw.why_not("native", q, q, q))
print(torch.allclose(hw.attend(q, q, q), hw.attend(q, q, q, backend="reference"), atol=1e-6))
"""


def run(*command: str | Path, **environment: str) -> str:
    """Run a command, and return what it prints."""
    result = subprocess.run(
        list(map(str, command)), env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def environment_with(distribution: Path, folder: Path) -> Path:
    """Install a distribution in a new virtual environment without a compiler, and return the environment's folder of
    programs. Other packages are those of this environment.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet")
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", *options)
    run(*pip, distribution, CXX="/no/compiler")
    return folder / "bin"


def reports(programs: Path) -> list[str]:
    """Return the lines that `headwise --version` and a program with one attention call print, without a compiler."""
    alone = {"PATH": str(programs), "PYTHONPATH": ""}
    lines = run(programs / "headwise", "--version", **alone).splitlines()
    file, *others = run(programs / "python", "-c", PROGRAM, **alone).splitlines()
    assert file.startswith(str(programs.parent))
    return [*lines[1:], *others]


COMPILER = """#!{python}
# C++ compiler that keeps each result by its command and its source, so that equal compilations take no time.
import hashlib, pathlib, shutil, subprocess, sys
*flags, result = sys.argv[1:]
sources = [pathlib.Path(each) for each in flags if each.endswith(".cpp")]
if not sources:
    sys.exit(subprocess.call(["c++", *sys.argv[1:]]))
contents = [*sources, *sorted(sources[0].parent.glob("*.h"))]
key = repr([each for each in flags if not each.endswith(".cpp")]).encode()
key += b"".join(each.read_bytes() for each in contents)
kept = pathlib.Path({folder!r}, hashlib.sha256(key).hexdigest())
if not kept.exists():
    status = subprocess.call(["c++", *sys.argv[1:]])
    if status:
        sys.exit(status)
    shutil.copy(result, kept)
shutil.copy(kept, result)
"""
"""Program that compiles as `c++` does; the build calls the compiler with the path of the result last."""


@pytest.mark.slow
@pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
def test_the_wheel_runs_native_kernels_and_an_sdist_without_a_compiler_plain_torch(tmp_path, monkeypatch):
    pytest.importorskip("hatchling")
    root = Path(hw.__file__).parents[2]
    monkeypatch.setenv("CXXFLAGS", "-O1")  # which compiles in half of the time
    (tmp_path / "objects").mkdir()
    (tmp_path / "c++").write_text(COMPILER.format(python=sys.executable, folder=str(tmp_path / "objects")))
    (tmp_path / "c++").chmod(0o755)
    compiler = {"CXX": str(tmp_path / "c++")}
    # The wheel is built from the sdist.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, root, **compiler)
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    assert "-py3-none-linux" in wheel.name  # for every version of Python
    version, *others = reports(environment_with(wheel, tmp_path / "wheel"))
    assert version.startswith("native kernels: ")
    assert others == ["None", "True"]
    programs = environment_with(sdist, tmp_path / "sdist")
    reason = (
        "the native kernels were not compiled when headwise was installed, since no C++ compiler '/no/compiler' was "
        "found; install a C++ compiler, such as g++, then run: headwise kernels build"
    )
    assert reports(programs) == [f"plain torch: {reason}", reason, "True"]
    compiled = set((tmp_path / "objects").iterdir())
    assert run(programs / "headwise", "kernels", "build", **compiler).splitlines()[-1] == version
    assert set((tmp_path / "objects").iterdir()) == compiled  # the same commands compile the same sources
    assert reports(programs) == [version, "None", "True"]
    run(sys.executable, "-m", "pip", "--python", programs / "python", "uninstall", "--yes", "--quiet", "headwise")
    assert not list(programs.parent.glob("lib/python*/site-packages/headwise"))


@pytest.mark.slow
@pytest.mark.skipif(installed.why_not() is not None, reason=str(installed.why_not()))
def test_the_library_needs_no_newer_system_than_torch():
    elf = pytest.importorskip("auditwheel.elfutils")
    elffile = pytest.importorskip("elftools.elf.elffile")
    newest = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24)}  # those of manylinux_2_28, as which torch is built
    with installed.LIBRARY.open("rb") as opened:
        versions = [version for _, version in elf.elf_find_versioned_symbols(elffile.ELFFile(opened))]
    for version in versions:
        name, _, number = version.partition("_")
        assert name not in newest or tuple(map(int, number.split("."))) <= newest[name], version
    assert {"GLIBC", "GLIBCXX"} <= {version.partition("_")[0] for version in versions}
