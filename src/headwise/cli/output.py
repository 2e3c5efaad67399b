"""Output of a command: a text for people, JSON or CSV for programs, and pages; and checks that it can be written."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from headwise.runs.table import Table
    from headwise.show.records import Records


@dataclass(frozen=True)
class OutputFlags:
    """Command-line options for the output of a command: its format (text, JSON or CSV), and whether progress bars and
    messages are suppressed.
    """

    json: Annotated[bool, typer.Option("--json", help="Print all rows as JSON, and nothing else.")] = False
    csv: Annotated[bool, typer.Option("--csv", help="Print all rows as CSV, and nothing else.")] = False
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Show no progress bar, and do not say which files were written.")
    ] = False

    def __post_init__(self) -> None:
        if self.json and self.csv:
            raise InputError("csv", expected="one of --json and --csv", got="both")

    def show(
        self,
        make_records: "Callable[[], Records]",
        print_text: "Callable[[Console], None]",
        written: Path | None = None,
        page: Path | None = None,
    ) -> None:
        """Print a result on standard output: as JSON or CSV from the rows that `make_records` returns, or as text by
        `print_text`. Then state which files were written, unless --quiet is used. With JSON or CSV, this statement is
        on standard error.
        """
        from headwise.show.records import write_csv, write_json
        from headwise.show.terminal import make_console

        if self.json or self.csv:
            (write_json if self.json else write_csv)(make_records(), sys.stdout)
        else:
            print_text(make_console())
        paths = [str(path) for path in (written, page) if path is not None]
        if paths and not self.quiet:
            is_text = not (self.json or self.csv)
            note = f"wrote {' and '.join(paths)}"
            typer.echo(f"\n{note}" if is_text else note, err=not is_text)

    def show_table(
        self, table: "Table[Any]", written: Path | None = None, page: Path | None = None, **options: Any
    ) -> None:
        """Print a table as JSON, CSV or text, and state which files were written, unless --quiet is used. `options` are
        those of `print_result`, which prints the table as text.
        """
        from headwise.show.records import Records
        from headwise.show.results import print_result

        self.show(
            lambda: Records(table.records(), table.metadata),
            lambda console: print_result(table, console, **options),
            written,
            page,
        )


def require_new_tables(out: Path | None, *names: str, force: bool) -> None:
    """Raise `InputError` if the folder `out` cannot be written. Raise it also if the folder already has a table with
    one of `names`, unless `force` is True. If `out` is None, nothing is checked.
    """
    if out is None:
        return
    from headwise.runs.files import require_writable
    from headwise.runs.table import table_path

    require_writable(out)
    existing = [name for name in names if table_path(out, name).exists()]
    if existing and not force:
        expected, remedy = f"a folder without {existing[0]}.parquet", "--force (force=True) replaces it"
        raise InputError("out", expected=expected, got=repr(str(out)), remedy=remedy)


def require_writable_page(html: Path | None) -> None:
    """Raise `InputError` if no HTML page can be written to the path `html`. If it is None, nothing is checked."""
    if html is None:
        return
    from headwise.page.write import require_jinja

    require_jinja()
    if html.is_dir() or not html.parent.is_dir() or not os.access(html if html.exists() else html.parent, os.W_OK):
        raise InputError("html", expected="a file in an existing, writable folder", got=repr(str(html)))


def quiet_libraries() -> None:
    """Turn off the warnings and progress bars of transformers in this process, if transformers is installed. The
    conversion of a GGUF file still shows its progress.
    """
    try:
        from transformers.utils import logging
    except ImportError:
        return  # `find_model` reports the missing package
    logging.set_verbosity_error()
    logging.disable_progress_bar()
