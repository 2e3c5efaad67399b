"""Command-line application `headwise`: its commands, and how errors are shown."""

import sys
from typing import Annotated, Any

import typer

from headwise import __version__
from headwise.cli.ablate import ablate
from headwise.cli.compare import compare
from headwise.cli.importance import importance
from headwise.cli.option_groups import expand_option_groups
from headwise.cli.profile import profile
from headwise.cli.study import study
from headwise.cli.view import view
from headwise.errors import HeadwiseError

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

_UsageError: Any = typer.BadParameter.__base__
"""Exception of the parser for an invalid command line; typer does not export the class."""

USAGE_STATUS = 2
"""Exit status after a mistake of the user."""


def run() -> int:
    """Run the command line in `sys.argv` and return its exit status. A mistake of the user, such as an invalid option
    or a missing file, is reported in one sentence on standard error, with status 2.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without arrows still shows the numbers
    try:
        status: int = app(prog_name="headwise", standalone_mode=False) or 0
        sys.stdout.flush()
    except _UsageError as error:
        return _report(" ".join(error.format_message().split()))
    except HeadwiseError as error:
        return _report(str(error))
    except BrokenPipeError:
        raise  # the reader of the output closed it
    except OSError as error:
        return _report(f"{error.filename or 'output'}: {error.strerror}")
    return status


def _report(message: str) -> int:
    """Print an error message, preceded by `headwise: `, to standard error, and return 2, the exit status after a
    mistake of the user.
    """
    typer.echo(f"headwise: {message}", err=True)
    return USAGE_STATUS


@app.callback(invoke_without_command=True)
def headwise(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Show, measure and compare the attention heads of a model, with one command for each task. Without a command,
    print this help.
    """
    if version:
        typer.echo(f"headwise {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


for _command in (view, profile, compare, ablate, importance, study):
    app.command()(expand_option_groups(_command))
