"""The command `headwise kernels`, and the text of `headwise --version`."""

from typing import Annotated

import typer

from headwise.attention.backends.native import installed
from headwise.cli.quantities import choice

EXAMPLES = """
headwise kernels
headwise kernels build
"""


def kernels(
    action: Annotated[
        str, typer.Argument(help="`show` the state of the kernels, or `build` them.", **choice(("show", "build")))
    ] = "show",
) -> None:
    """Show whether the native kernels for the CPU are in use, and if not, why; or compile them into this installation
    with a C++ compiler. Processes that start afterwards use them.
    """
    if action == "build":
        installed.compile_kernels()
    typer.echo(installed.state())


def version_text() -> str:
    """Return the text of `headwise --version`, two lines: the version, and the instruction set of the native kernels or
    the reason why they are not used. torch is not imported.
    """
    from headwise import __version__

    return f"headwise {__version__}\n{installed.state()}"
