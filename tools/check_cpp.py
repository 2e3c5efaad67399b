"""Check the C++ sources of the native kernels: their layout with clang-format, and their code with clang-tidy.

python tools/check_cpp.py [--fix]

Exits with 1 when a tool has a finding. `--fix` writes the layout instead of checking it. clang-tidy reads each source
with the flags that it is compiled with.
"""

import argparse
import os
import runpy
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NATIVE = Path(__file__).resolve().parent.parent / "src/headwise/attention/backends/native"
TOOLS = Path(sysconfig.get_path("scripts"))


def main() -> int:
    """Run both tools, print their findings, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fix", action="store_true", help="write the layout")
    layout = ["-i"] if parser.parse_args().fix else ["--dry-run", "--Werror"]
    build = runpy.run_path(str(NATIVE / "build.py"))
    sources = sorted((NATIVE / "cpp").iterdir())
    commands = [[TOOLS / "clang-format", *layout, *sources]]
    reason = build["why_not"]()
    if reason is not None:
        print(f"clang-tidy is left out: {reason}")
    else:
        commands += [
            [TOOLS / "clang-tidy", "--quiet", source, "--", *flags] for source, flags in build["sources_with_flags"]()
        ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(_run, commands))
    for result in results:
        if result.returncode:
            print(result.stdout, result.stderr, sep="\n")
    return int(any(result.returncode for result in results))


def _run(command: list[Path | str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and return its status and what it printed."""
    return subprocess.run(command, check=False, capture_output=True, text=True)


if __name__ == "__main__":
    sys.exit(main())
