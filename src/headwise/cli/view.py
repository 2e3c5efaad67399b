"""The command `headwise view`."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from headwise.analysis.view import view as view_text
from headwise.cli.loading import quiet_libraries
from headwise.cli.options import ModelFlags
from headwise.cli.output import OutputFlags
from headwise.cli.quantities import path
from headwise.data.tokenization import require_text
from headwise.errors import InputError
from headwise.runs.distributed import LocalProcess
from headwise.show.html import require_jinja, write_page
from headwise.show.records import view_records
from headwise.show.terminal import print_view

EXAMPLES = """
headwise view "Which do you like better, coffee or tea?"
headwise view @notes.txt --model smollm2 --html page.html
cat notes.txt | headwise view - --layer 0 --head 9
"""


def view(
    *,
    text: Annotated[str, typer.Argument(help="The text. - reads standard input, @FILE reads a file.")],
    model: ModelFlags,
    layer: Annotated[list[int] | None, typer.Option(metavar="N", help="Show only this layer. Can be repeated.")] = None,
    head: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Show only this head, and what each word attends to. Can be repeated."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            parser=path, metavar="FILE", help="Also write an interactive page to this file. It works offline."
        ),
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut a text that is longer than the model's limit.")
    ] = False,
    output: OutputFlags,
) -> None:
    """Show what every head does with a text. Prints each head's role (what the head mostly attends to), its attention
    statistics averaged over the text, and its strongest attention from one word to another. With --html, also writes an
    interactive page.
    """
    content = _read_text(text)
    require_text(content)
    _require_writable(html)
    device = LocalProcess(True, 0).device(model.device)
    quiet_libraries()
    source = model.find()
    tokenizer = source.tokenizer()
    loaded = source.model(dtype=model.torch_dtype).to(device)
    shown = view_text(loaded, tokenizer, content, title=source.title, truncate=truncate)
    shown = shown.select(layer or (), head or ())
    if html is not None:
        write_page(shown, html)
    output.show(
        lambda: view_records(shown), lambda console: print_view(shown, console, detail=bool(head)), written=html
    )


def _read_text(text: str) -> str:
    """Return the text to view: standard input if `text` is `-`, the content of the file FILE if it is `@FILE`,
    otherwise `text` itself. Input that cannot be read, or is not UTF-8, raises `InputError`.
    """
    if text != "-" and not text.startswith("@"):
        return text
    name = "standard input" if text == "-" else text[1:]
    if text == "-" and sys.stdin is None:
        raise InputError("text", expected="a text on standard input", got="none: it is closed")
    try:
        data = sys.stdin.buffer.read() if text == "-" else Path(name).read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        remedy = "to pass a text that starts with @, use - and standard input"
        raise InputError("text", expected=f"a readable file {name!r}", got=error.strerror, remedy=remedy) from None
    except UnicodeDecodeError as error:
        got = f"a byte that is not UTF-8 at offset {error.start}"
        raise InputError("text", expected=f"UTF-8 in {name}", got=got) from None


def _require_writable(html: Path | None) -> None:
    """Raise `InputError` if the HTML page cannot be written to the path `html`; do nothing if it is None."""
    if html is None:
        return
    require_jinja()
    if html.is_dir() or not html.parent.is_dir() or not os.access(html if html.exists() else html.parent, os.W_OK):
        raise InputError("html", expected="a file in an existing, writable folder", got=repr(str(html)))
