"""The commands `headwise doctor` and `kernels`: what is installed, what is in use, and what is broken."""

import base64
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.attention.backends.native import installed
from headwise.cli.options import choice
from headwise.data.converted_models import CACHE_VARIABLE, cache_folder
from headwise.errors import InputError, MissingExtra
from headwise.packaged_models import PACKAGED, PackagedModel

DEVELOPMENT = ("all", "bench", "dev")
"""Extras that contain others, or that serve the development of headwise."""

BROKEN_STATUS = 1
"""Exit status if a part of the installation is broken."""

Section = dict[str, Any]
Report = dict[str, Section]


def doctor(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, and nothing else.")] = False,
) -> None:
    """Show versions, processor, native kernels, GPU, extras, packaged models, folders and environment variables of this
    installation, for a report of a bug. If a part of it is broken, name it and exit with status 1.

    Examples:
    headwise doctor
    headwise doctor --json > doctor.json
    """
    report, problems = examine()
    if as_json:
        typer.echo(json.dumps({**report, "problems": problems}, indent=2))
    else:
        _print(report, problems)
    if problems:
        raise typer.Exit(BROKEN_STATUS)


def examine() -> tuple[Report, list[str]]:
    """Examine this installation of headwise. Return facts about it by section (such as versions, GPU, folders), and a
    list with one sentence about each part that is broken.
    """
    problems: list[str] = []
    report: Report = {
        "versions": _versions(),
        "processor": _processor(),
        "kernels": _kernels(problems),
        "gpu": _gpu(),
        "extras": _extras(problems),
        "models": {name: _packaged_model(name, model, problems) for name, model in PACKAGED.items()},
        "folders": _folders(problems),
        "environment": _environment(problems),
    }
    return report, problems


def _versions() -> Section:
    """Return the versions of headwise, Python, the operating system, torch and triton."""
    import torch

    import headwise

    return {
        "headwise": f"{headwise.__version__} in {Path(headwise.__file__).parent}",
        "python": f"{platform.python_version()} in {sys.executable}",
        "system": platform.platform(),
        "torch": torch.__version__,
        "triton": _version("triton"),
    }


def _processor() -> Section:
    """Return the name of the processor, the instruction sets that the native kernels can use, and the numbers of cores
    and of torch's threads.
    """
    import torch

    lines = installed.cpuinfo().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "name": next(names, platform.processor() or platform.machine()),
        "instruction_sets": installed.supported_instruction_sets(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _kernels(problems: list[str]) -> Section:
    """Return the state of the native CPU kernels: whether they are in use, and otherwise the reason. Their results are
    compared with the reference implementation of attention. If kernels are installed but cannot be used, or compute
    wrong results, add a sentence to `problems`.
    """
    import torch

    import headwise as hw
    from headwise.attention.backends.blockwise.call_context import CallContext
    from headwise.attention.backends.native import library
    from headwise.attention.problem import Problem
    from headwise.statistics import kernel_statistics

    reason = library.load()
    if reason is not None:
        if installed.LIBRARY.is_file() and os.environ.get(installed.VARIABLE) != "off":
            problems.append(reason)
        return {"in_use": False, "reason": reason}
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 37, 11, generator=generator) for heads in (6, 3, 3))
    out: Any = hw.attend(q, k, v, mask=hw.causal(), backend="native")
    exact: Any = hw.attend(q.double(), k.double(), v.double(), mask=hw.causal(), backend="reference")
    error = (out - exact).abs().max().item()
    if not error < 1e-5:
        problems.append(f"the native kernels compute wrong results on this processor: {error:.1e} from the definition")
    return {
        "in_use": True,
        "instruction_set": library.instruction_set(),
        "error_in_float32": f"{error:.1e}",
        "statistics": kernel_statistics.explain(Problem.checked(q, k, v), CallContext()),
    }


def _gpu() -> Section:
    """Return the name of the GPU that torch uses, and which backends compute attention and attention statistics on it.
    Without a GPU, return the reason.
    """
    import torch

    import headwise as hw
    from headwise.attention.backends.blockwise.call_context import CallContext
    from headwise.attention.problem import Problem
    from headwise.statistics import kernel_statistics

    built = torch.version.cuda or torch.version.hip
    if not torch.cuda.is_available():
        reason = (
            "this torch was built without CUDA" if built is None else f"torch is for CUDA {built}, and found no GPU"
        )
        return {"name": None, "reason": reason}
    q = torch.zeros(1, 8, 1024, 64, device="cuda", dtype=torch.bfloat16)
    return {
        "name": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "cuda": built,
        "attention_causal": hw.explain(q, q, q, mask=hw.causal()).backend,
        "attention_window": hw.explain(q, q, q, mask=hw.window(256)).backend,
        "statistics": kernel_statistics.explain(Problem.checked(q, q, q), CallContext()),
    }


def _extras(problems: list[str]) -> Section:
    """Return, for each extra of the package headwise (group of optional packages), the versions of its packages, or the
    command that installs it. If a package is too old, or its module is missing, add a sentence to `problems`. No
    package is imported, since importing all of them takes many seconds.
    """
    from packaging.requirements import Requirement

    try:
        distribution = metadata.distribution("headwise")
    except metadata.PackageNotFoundError:
        return {"none": "headwise is not installed by pip, but imported from a folder"}
    requirements = [Requirement(text) for text in distribution.requires or ()]
    section: Section = {}
    for extra in sorted(set(distribution.metadata.get_all("Provides-Extra") or ()) - set(DEVELOPMENT)):
        needed = [each for each in requirements if each.marker and each.marker.evaluate({"extra": extra})]
        versions = {each.name: _version(each.name) for each in needed}
        if None in versions.values():
            missing = ", ".join(name for name, version in versions.items() if version is None)
            section[extra] = f'without {missing}: pip install "headwise[{extra}]"'
        else:
            section[extra] = ", ".join(f"{name} {version}" for name, version in versions.items())
        for each in needed:
            version = versions[each.name]
            if version is not None:
                broken = _why_broken(each.name, version, each.specifier)
                problems.extend([broken] if broken and broken not in problems else [])
    return section


def _why_broken(package: str, version: str, allowed: Any) -> str | None:
    """Return the reason why an installed package cannot be used (its version is not in `allowed`, or its module is
    missing) and a command that repairs it. Return None if the package can be used.
    """
    if not allowed.contains(version, prereleases=True):
        return (
            f'{package} {version} is installed, and headwise needs {package}{allowed}: pip install "{package}{allowed}"'
        )
    if find_spec(package.replace("-", "_")) is None:
        remedy = f"pip install --force-reinstall {package}"
        return f"{package} {version} is installed without a module that can be imported: {remedy}"
    return None


def _packaged_model(name: str, model: PackagedModel, problems: list[str]) -> str:
    """Return the state of a model that is distributed as a Python package: its version, "not installed" or "damaged".
    If a file of the package is missing or changed, add a sentence to `problems`.
    """
    if model.location() is None:
        return f"not installed: {model.install}"
    if changed := next(_changed_files(model.package), None):
        remedy = model.install.replace("install", "install --force-reinstall", 1)
        problems.append(f"the files of the model {name} are damaged, such as {changed}: {remedy}")
        return "damaged"
    return f"{model.package} {_version(model.package)}"


def _changed_files(package: str) -> Iterator[str]:
    """Yield the files of an installed package that are missing, or whose content differs from the hash that pip
    recorded.
    """
    for file in metadata.files(package) or ():
        path = Path(str(file.locate()))
        if not path.is_file():
            yield str(path)
        elif file.hash is not None:
            with path.open("rb") as opened:
                digest = hashlib.file_digest(opened, file.hash.mode).digest()
            if base64.urlsafe_b64encode(digest).decode().rstrip("=") != file.hash.value:
                yield str(path)


def _folders(problems: list[str]) -> Section:
    """Return the paths of two cache folders, that of headwise and that of the Hugging Face hub, and state whether they
    can be written. If an environment variable names a cache folder for headwise that cannot be written, add a sentence
    to `problems`.
    """

    def is_writable(path: Path) -> bool:
        existing = next(each for each in (path, *path.absolute().parents) if each.exists())
        return existing.is_dir() and os.access(existing, os.W_OK)  # or can be made

    def described(path: Path) -> str:
        return f"{path} ({'exists' if path.is_dir() else 'none yet'}, {'' if is_writable(path) else 'not '}writable)"

    try:
        cache = cache_folder()
    except MissingExtra:
        cache = None
    if os.environ.get(CACHE_VARIABLE) and cache is not None and not is_writable(cache):
        problems.append(f"{CACHE_VARIABLE} names a folder that cannot be written: {cache}")
    hub = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    return {"cache": None if cache is None else described(cache), "hugging_face": described(hub)}


def _environment(problems: list[str]) -> Section:
    """Return the environment variables that are set and start with "HEADWISE_". If headwise refuses the value of one,
    add its error message to `problems`.
    """
    import torch

    from headwise.nn.linear_engine import engine_of

    try:
        engine_of(torch.float32)
    except InputError as error:
        problems.append(str(error))
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("HEADWISE_")}


def _version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _print(report: Report, problems: list[str]) -> None:
    """Print a report about the installation as text, section by section, and then the problems that were found."""
    from rich.text import Text

    from headwise.show.terminal import make_console

    console, words = make_console(), {"None": "none", "True": "yes", "False": "no"}
    for title, section in report.items():
        console.print(Text(title.replace("_", " "), style="bold"))
        lines = []
        for name, value in section.items():
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            lines.append(f"{name.replace('_', ' ')}: {words.get(text, text)}")
        for line in lines or ["none"]:
            console.print(Text(f"  {line}"), soft_wrap=True)
    for problem in problems:
        console.print(Text(f"problem: {problem}", style="bold red"), soft_wrap=True)
    if not problems:
        console.print("no problem was found")


def kernels(
    action: Annotated[
        str, choice(("show", "build"), "`show` the state of the kernels, or `build` them.", kind=typer.Argument)
    ] = "show",
) -> None:
    """Show whether the native kernels for the CPU are in use, and if not, why; or compile them into this installation
    with a C++ compiler. Processes that start afterwards use them.

    Examples:
    headwise kernels
    headwise kernels build
    """
    if action == "build":
        installed.compile_kernels()
    typer.echo(installed.state())
