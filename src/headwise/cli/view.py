"""The command `headwise view`."""

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import headwise as hw
from headwise.cli.options import Html, ModelFlags, choice, head_name, option, path_option
from headwise.cli.output import OutputFlags, require_writable_page
from headwise.errors import InputError
from headwise.settings import FOCUS_KINDS


def view(
    *,
    text: Annotated[
        str | None,
        typer.Argument(
            help="The text; not needed with --image or --audio. - reads standard input, @FILE reads a file."
        ),
    ] = None,
    model: ModelFlags,
    image: Annotated[
        list[Path] | None, path_option("FILE", "Picture that the model reads with the text. Can be repeated.")
    ] = None,
    audio: Annotated[Path | None, path_option("FILE", "Sound that the model reads, a WAV file.")] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Treat each line of the text as a text of its own.")] = False,
    layer: Annotated[list[int] | None, option("Show only this layer. Can be repeated.", "N")] = None,
    head: Annotated[
        list[Any] | None,
        option(
            "Show only this head, such as 5.11 or 11 (of all layers), and what each word attends to. Can be repeated.",
            "HEAD",
            parser=head_name,
        ),
    ] = None,
    focus: Annotated[
        list[str] | None,
        option(
            "Rank the heads by the attention on these words, such as coffee,tea or drinks=coffee,tea. Can be repeated.",
            "WORDS",
        ),
    ] = None,
    region: Annotated[
        list[str] | None,
        option(
            "Rank the heads by the attention on this part of the picture: left,top,right,bottom in percent, such as "
            "0,0,50,50, or 2:0,0,50,50 in the second picture. Can be repeated.",
            "SIDES",
        ),
    ] = None,
    queries: Annotated[
        str | None, option("Words whose attention --focus and --region measure. Default: all other words.", "WORDS")
    ] = None,
    focus_kind: Annotated[
        str | None,
        choice(FOCUS_KINDS, "Attention that the words of --focus receive from others (the default), or exchange."),
    ] = None,
    generate: Annotated[
        int, option("Let the model continue the text by N tokens, and view them too.", "N", least=0)
    ] = 0,
    against: Annotated[str | None, option("Compare with this model on the page of --html.", "MODEL")] = None,
    html: Html = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut a text that is longer than the model's limit.")
    ] = False,
    output: OutputFlags,
) -> None:
    """Show what every head does with a text, pictures or a sound. Prints each head's role (what the head mostly attends
    to), its attention statistics averaged over the text, and its strongest attention from one word to another. With
    --html, also writes an interactive page.

    Examples:
    headwise view "Which do you like better, coffee or tea?" --focus object=you,coffee,tea --html page.html
    headwise view "What is left of the red circle?" --image scene.png --model FOLDER --html page.html
    cat notes.txt | headwise view - --layer 0 --head 9
    """
    from headwise.data.models import find_model
    from headwise.data.tokenization import require_text
    from headwise.show.records import view_records
    from headwise.show.terminal import print_foci, print_view, print_views

    if text is None and not image and audio is None:
        raise InputError("text", expected="a text, --image or --audio", got="none of them")
    content = None if text is None else _read_text(text)
    texts: Any = content
    if content is not None:
        require_text(content)
        texts = [line for line in content.splitlines() if line.strip()] if lines else content
    for given, name in ((image, "--image"), (audio, "--audio")):
        if lines and given:
            raise InputError("lines", expected=f"no {name}, which belongs to one text", got=name)
    require_writable_page(html)
    if against is not None and html is None:
        raise InputError("against", expected="--html, whose page compares both models", got="no --html")
    if queries is not None and not (focus or region):
        raise InputError("queries", expected="--focus or --region, which they attend to", got="neither")
    if focus_kind is not None and not focus:
        raise InputError("focus-kind", expected="--focus, whose words receive or exchange attention", got="no --focus")
    other = None if against is None else find_model(against, argument="against")
    options: dict[str, Any] = {"generate": generate, "truncate": truncate, "progress": not output.quiet}
    options |= {"images": image} if image else {}
    options |= {"audio": audio} if audio is not None else {}
    seen = _view(model, model.find(), texts, options).select(layer or (), head or ())
    words = None if queries is None else _words("queries", queries)
    foci = [_find(seen, each, focus_kind or FOCUS_KINDS[0], words) for each in focus or ()]
    foci += [seen.find([_region(each, len(image or ()))], queries=words) for each in region or ()]
    if html is not None:
        compared = () if other is None else (_view(model, other, texts, options).select(layer or (), head or ()),)
        hw.write_page(html, seen, against=compared, foci=foci)

    def print_text(console: Any) -> None:
        if isinstance(seen, hw.View):
            print_view(seen, console, detail=bool(head))
        else:
            print_views(seen, console)
        print_foci(foci, console)

    output.show(lambda: view_records(seen, foci), print_text, page=html)


def _view(flags: ModelFlags, source: Any, texts: Any, options: dict[str, Any]) -> "hw.View | hw.ViewSet":
    """Load a model, and return the attention of its heads on one text (`View`), or on each of several texts
    (`ViewSet`).
    """
    if "images" in options or "audio" in options:
        from headwise.data.models import SAVED

        processor = source.processor()
        loaded = flags.load(source, SAVED)
    else:
        processor = source.tokenizer()
        loaded = flags.load(source, source.lm_head() if options["generate"] else None)
    seen: hw.View | hw.ViewSet = hw.view(loaded, processor, texts, title=source.title, **options)
    return seen


def _find(seen: "hw.View | hw.ViewSet", focus: str, kind: str, queries: list[str] | None) -> "hw.Focus":
    """Rank the heads by the attention on the words that the option --focus names. `focus` has the form "word,word", or
    "name=word,word".
    """
    name, separator, words = focus.rpartition("=")
    if not separator or not name.strip():
        name, words = "", focus
    return seen.find(_words("focus", words), kind=kind, queries=queries, name=name.strip() or None)


def _words(argument: str, text: str) -> list[str]:
    """Return the words of an option such as "coffee,tea"."""
    chosen = [word for word in text.split(",") if word.strip()]
    if not chosen:
        raise InputError(argument, expected="words between commas, such as coffee,tea", got=repr(text))
    return chosen


def _region(text: str, pictures: int) -> "hw.Region":
    """Return the region that the option --region names, such as "0,0,50,50" or "2:0,0,50,50", in percent."""
    match = re.fullmatch(r"(?:(\d+):)?(\d+\.?\d*),(\d+\.?\d*),(\d+\.?\d*),(\d+\.?\d*)", text.strip())
    if match is None:
        expected = "left,top,right,bottom in percent, such as 0,0,50,50"
        raise InputError("region", expected=expected, got=repr(text))
    number, *sides = match.groups()
    name = "picture" if pictures <= 1 and number in (None, "1") else f"picture {number or 1}"
    left, top, right, bottom = (float(side) / 100 for side in sides)
    return hw.Region(left, top, right, bottom, name)


def _read_text(text: str) -> str:
    """Return the text to view: standard input if `text` is `-`, the content of the file FILE if it is `@FILE`,
    otherwise `text` itself.
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
