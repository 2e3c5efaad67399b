"""Command-line application `headwise`: its commands, and how errors are shown.

The modules of all commands are imported at the start, also for help and completion. They therefore import torch, and
what imports it, inside of the functions that compute.
"""

import inspect
import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer

import headwise
from headwise.attention.backends.native import installed
from headwise.cli import attention, circuits, compression, doctor, effects, head_tests, training, view
from headwise.cli.commands import SingleUseCommand, expand_option_groups
from headwise.errors import HeadwiseError

app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_UsageError: Any = typer.BadParameter.__base__
"""Exception of the parser for an invalid command line; typer does not export the class."""

USAGE_STATUS = 2
"""Exit status after a mistake of the user."""

CLOSED_PIPE_STATUS = 141
"""Exit status if the reader of the output has closed it: that of a process which the signal SIGPIPE (13) ended."""


def run() -> int:
    """Run the command line in `sys.argv` and return its exit status. A mistake of the user, such as an invalid option
    or a missing file, is reported in one sentence on standard error; the status is then 2.
    """
    if sys.stdout is None:  # closed by the caller, as in `headwise ... >&-`
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without arrows still shows the numbers
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: typer.echo(
                f"headwise: warning: {' '.join(str(message).split())}", err=True
            )
            status: int = app(prog_name="headwise", standalone_mode=False) or 0
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:
        # typer and rich end the process after a BrokenPipeError
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing more can be written
        return CLOSED_PIPE_STATUS
    except Exception as error:
        message = _message(error)
        if message is None:
            raise
        typer.echo(f"headwise: {message}", err=True)
        return USAGE_STATUS
    return status


def _message(error: Exception) -> str | None:
    """Return a message of one sentence for an error that the user can correct, such as an invalid option or too little
    memory; None for any other error.
    """
    if isinstance(error, _UsageError):
        return " ".join(error.format_message().split())
    if isinstance(error, HeadwiseError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'output'}: {error.strerror}"
    is_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # the second is torch's
    if is_memory or "can't allocate memory" in str(error):
        return "device: expected enough memory, got less; a smaller --batch or --context needs less"
    return None


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Show, measure and compare the attention heads of a model, with one command for each task. Without a command,
    print this help.
    """
    if version:
        typer.echo(f"headwise {headwise.__version__}\n{installed.state()}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def add_command(command: Callable[..., None]) -> None:
    """Add a command to the application. `command` is its function: its parameters, or the fields of dataclasses among
    them, are the command's options. Its docstring is the help text, and ends with examples, one on each line below the
    line `Examples:`.
    """
    described, _, examples = (inspect.getdoc(command) or "").partition("\n\nExamples:\n")
    keep_lines = "\b"  # to typer
    epilog = f"{keep_lines}\nExamples:\n" + "\n".join(f"  {line}" for line in examples.splitlines())
    app.command(cls=SingleUseCommand, help=described, epilog=epilog)(expand_option_groups(command))


COMMANDS = (
    *(view.view, attention.profile, attention.positions, attention.distances, attention.norm_weighted),
    *(attention.rollout, attention.compare, effects.ablate, effects.importance, effects.curve, effects.in_context),
    *(circuits.circuits, circuits.patch, head_tests.retrieval, attention.sinks, head_tests.name_movers),
    *(head_tests.dependencies, compression.prune, compression.merge, compression.compress, compression.localize),
    *(training.study, training.monitor, doctor.kernels, doctor.doctor),
)
"""Functions of the commands, in the order of the help."""

for _command in COMMANDS:
    add_command(_command)
