"""Type the README from the top into a new environment, and print the time and the result of each command and block.

python tools/type_readme.py [--wheel FILE] [--no-compiler] [--without TEXT] [--folder FOLDER]

The environment is a clone of the last commit, a virtual environment, and a home folder without caches. It has no model
before the README installs one. Every fenced block whose lines start with `pip`, `make` or `headwise` is run by the
shell, command by command. All Python blocks are run in one process, as in one session. What a block shows is compared
with what it prints. A failure does not stop the commands after it. Exits with 1 if there was one.

`--wheel` installs this wheel where the README installs the checkout. `--no-compiler` leaves the C++ compilers out of
the path. `--without` leaves out commands that contain a text, such as "make". `constraints.txt` decides the versions.
"""

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = re.compile(r"(pip|make|headwise) ")
KERNELS = re.compile("Created wheel for headwise|native kernels|plain torch|in use: ")
COMPILERS = re.compile(r"(.*-)?(c\+\+|g\+\+|gcc|cc|clang|clang\+\+)(-\d+)?$")
CORPUS = '{"text": "A cup of tea."}\n{"text": "And one of coffee."}\n' + '{"text": "%s"}\n' % ("Tea or coffee? " * 400)
"""The reader's own file, which the README calls corpus.jsonl: two short documents and a long one."""

SESSION = """
import sys, time, traceback
names = {"__name__": "__main__"}
while header := sys.stdin.readline():
    code = sys.stdin.read(int(header))
    began = time.process_time()
    try:
        exec(compile(code, "<block>", "exec"), names)
        failed = 0
    except BaseException:
        traceback.print_exc()
        failed = 1
    print(f"\\0{failed} {time.process_time() - began}", flush=True)
"""
"""Program that executes blocks of code, each preceded by its length. After each, it prints a null character, 1 for a
failure or 0, and the processor time.
"""


def blocks(page: str) -> list[tuple[str, str, str]]:
    """Return the language and the text of each fenced block of a page, and the text of a block that follows at once."""
    return re.findall(r"^```(\w*)\n(.*?)^```$(?:\n```\n(.*?)^```$)?", page, re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[str]:
    """Return the commands of a block, of which a line may continue after a backslash."""
    return [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def environment(folder: Path, *, has_compiler: bool) -> dict[str, str]:
    """Make a virtual environment, an empty home folder and a folder of the system's programs, and return the
    environment variables that name them.
    """
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    for name in ("home", "bin"):
        (folder / name).mkdir()
    for program in (program for path in ("/usr/bin", "/bin") for program in sorted(Path(path).iterdir())):
        link = folder / "bin" / program.name
        if not link.exists() and (has_compiler or not COMPILERS.match(program.name)):
            link.symlink_to(program)
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name.endswith("_proxy")}
    return kept | {
        "PATH": f"{folder}/venv/bin:{folder}/bin",
        "HOME": f"{folder}/home",
        "LANG": "C.UTF-8",
        "MPLBACKEND": "agg",
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
        "VIRTUAL_ENV": str(folder / "venv"),
    }


class Typist:
    """Runs commands and blocks in one environment, and prints a line about each."""

    def __init__(self, folder: Path, variables: dict[str, str]):
        self.clone, self.variables, self.failures = folder / "clone", variables, 0
        self._session: subprocess.Popen[str] | None = None

    def run(self, command: str) -> None:
        """Run a command of the shell."""
        began, used = time.monotonic(), _processor_seconds()
        result = subprocess.run(
            command, shell=True, cwd=self.clone, env=self.variables, capture_output=True, text=True, check=False
        )
        times = time.monotonic() - began, _processor_seconds() - used
        self._report(command, result.returncode, result.stdout + result.stderr, times)

    def execute(self, code: str, shown: str) -> None:
        """Run a block of Python in the session. `shown` is what the README shows as its output, if anything."""
        if self._session is None:
            self._session = subprocess.Popen(
                [f"{self.variables['VIRTUAL_ENV']}/bin/python", "-c", SESSION],
                cwd=self.clone,
                env=self.variables,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        assert self._session.stdin is not None
        assert self._session.stdout is not None
        began = time.monotonic()
        self._session.stdin.write(f"{len(code)}\n{code}")
        self._session.stdin.flush()
        output = ""
        while "\0" not in output and (line := self._session.stdout.readline()):
            output += line
        printed, _, end = output.partition("\0")
        status, used = map(float, end.split() or (1, 0))  # the session has ended if there is no end
        if not status and shown not in printed:
            status, printed = 1, f"the README shows\n{shown}and this was printed:\n{printed}"
        self._report(next(filter(None, code.splitlines())), int(status), printed, (time.monotonic() - began, used))

    def _report(self, title: str, status: int, output: str, times: tuple[float, float]) -> None:
        """Print the elapsed and the processor time of a command, its result, and the lines of its output that tell of
        the native kernels; after a failure, the end of its output.
        """
        result = f"FAILED ({status})" if status else "ok"
        print(f"{times[0]:8.1f} s, {times[1]:8.1f} s of processor  {result}  {title}", flush=True)
        lines = output.splitlines()
        lines = lines[-30:] if status else [line for line in lines if KERNELS.search(line)]
        print("".join(f"        | {line}\n" for line in lines), end="", flush=True)
        self.failures += bool(status)


def _processor_seconds() -> float:
    """Return the processor time of the commands that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    """Type the README, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="install this wheel instead of the checkout")
    parser.add_argument("--no-compiler", action="store_true", help="leave the C++ compilers out of the path")
    parser.add_argument("--without", action="append", default=[], help="leave out commands that contain this text")
    parser.add_argument("--folder", type=Path, help="existing folder for the environment, which is kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        typist = Typist(folder, environment(folder, has_compiler=not options.no_compiler))
        subprocess.run(["git", "clone", "--quiet", ROOT, typist.clone], check=True)
        (typist.clone / "corpus.jsonl").write_text(CORPUS, encoding="utf-8")
        page = blocks((typist.clone / "README.md").read_text(encoding="utf-8"))
        for language, block, following in page:
            if language == "python":
                typist.execute(block, following)
            elif COMMANDS.match(block):
                installed = '".[all]"' if options.wheel is None else f'"{options.wheel.resolve()}[all]"'
                for command in commands(block.replace('".[all]"', installed)):
                    if not any(part in command for part in options.without):
                        typist.run(command)
    print(f"{typist.failures} failures")
    return int(typist.failures > 0)


if __name__ == "__main__":
    sys.exit(main())
