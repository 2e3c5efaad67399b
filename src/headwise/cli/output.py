"""Output of a command: a text for people, or JSON or CSV for programs."""

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
    """Command-line options for the output: its format, and silence on standard error.

    Attributes:
        json: print the result as JSON.
        csv: print the result as CSV.
        quiet: show no progress, and no note of written files.
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
        result: "Table[Any] | Callable[[], Records]",
        print_text: "Callable[[Console], None]",
        written: Path | None = None,
        page: Path | None = None,
    ) -> None:
        """Print a result on standard output: as JSON or CSV from the rows of a table, or from the records that the
        function `result` returns, or as text by `print_text(console)`. Then say, unless `quiet`, that the file or
        folder `written` and the file `page` were written; below JSON or CSV, on standard error.
        """
        from headwise.show.records import table_records, write_csv, write_json
        from headwise.show.terminal import make_console

        if self.json or self.csv:
            records = result() if callable(result) else table_records(result)
            (write_json if self.json else write_csv)(records, sys.stdout)
        else:
            print_text(make_console())
        paths = [str(path) for path in (written, page) if path is not None]
        if paths and not self.quiet:
            is_text = not (self.json or self.csv)
            note = f"wrote {' and '.join(paths)}"
            typer.echo(f"\n{note}" if is_text else note, err=not is_text)


def require_new_tables(out: Path | None, *names: str, force: bool) -> None:
    """Raise `InputError` if the folder `out` cannot be written, or if it has a table of one of `names` and `force` is
    off. Without a folder, nothing is checked.
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
