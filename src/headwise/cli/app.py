"""The command line: parse, call, print."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise import __version__
from headwise.analysis.ablate import ablate as without
from headwise.analysis.compare import compare as line_up
from headwise.analysis.importance.importance import METHODS
from headwise.analysis.importance.importance import importance as score
from headwise.analysis.losses import LOSSES, EmbeddingDistance, loss_by_name
from headwise.analysis.profile import load_profile
from headwise.analysis.profile import profile as measure
from headwise.analysis.replacements import Replacement, mean, uniform, zero
from headwise.analysis.view import view as view_text
from headwise.data.models import LoadedModel, lm_head_of, load, load_tokenizer
from headwise.data.texts import Texts
from headwise.errors import HeadwiseError, InputError
from headwise.runs.distributed import LocalProcess, process_group
from headwise.show.html import write_page
from headwise.show.profiles import print_comparison, print_profile
from headwise.show.scores import print_ablation, print_importance
from headwise.show.studies import print_study
from headwise.show.terminal import make_console, print_view
from headwise.studies.corpus import TASKS
from headwise.studies.text_study import BATCH, CONTEXT, VOCABULARY, study_texts

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

_UsageError: Any = typer.BadParameter.__base__
"""What the parser raises for a command line that it cannot read; typer keeps the class to itself."""


Data = Annotated[Path, typer.Option(help="A file or folder: text, JSON lines, parquet.")]
Out = Annotated[Path, typer.Option(help="A folder for the table; a run that was stopped goes on there.")]
Model = Annotated[str, typer.Option(help="minilm, smollm2, a folder in Hugging Face format, or a hub id.")]
Context = Annotated[
    int | None, typer.Option(min=1, help="The most tokens of a sequence; 2048, or what the model takes.")
]
Documents = Annotated[
    str, typer.Option(help="What becomes of a document: whole (too long is refused), truncate, cut, pack.")
]
Batch = Annotated[int, typer.Option(min=1, help="Sequences that are run together.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only so many sequences, the first.")]
Column = Annotated[str, typer.Option(help="Where the text is, in JSON lines and parquet.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; a GPU where there is one.")]
Force = Annotated[bool, typer.Option("--force", help="Replace another run in that folder.")]
LossName = Annotated[
    str | None, typer.Option("--loss", help=f"{', '.join(LOSSES)}; by default what the model was made for.")
]
Top = Annotated[int, typer.Option(min=1, help="How many are shown, the largest.")]


def run() -> int:
    """Run the command line and return its exit status."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without arrows still shows the numbers
    try:
        return app(prog_name="headwise", standalone_mode=False) or 0
    except _UsageError as error:
        return _refused(" ".join(error.format_message().split())).exit_code


@app.callback(invoke_without_command=True)
def headwise(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """See what each attention head of a model does."""
    if version:
        typer.echo(f"headwise {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def view(
    text: Annotated[str, typer.Argument(help="The text; - reads standard input, @FILE a file.")],
    model: Model = "minilm",
    layer: Annotated[list[int] | None, typer.Option(metavar="N", help="Only this layer; may be repeated.")] = None,
    head: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Only this head, and where each word looks; may be repeated."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a page that needs no network.")] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut a text that is too long for the model.")] = False,
) -> None:
    """Show what every attention head does with TEXT: its role, its statistics and its strongest links."""
    with _mistakes_in_a_sentence():
        content = _read_text(text)
        _require_folder(html)
        _quiet_libraries()
        loaded = load(model)
        seen = view_text(loaded.model, loaded.tokenizer, content, title=loaded.title, truncate=truncate)
        seen = seen.select(layer or (), head or ())
        print_view(seen, make_console(), detail=bool(head))
        if html is not None:
            write_page(seen, html)
            typer.echo(f"\nwrote {html}")
        sys.stdout.flush()


@app.command()
def profile(
    data: Data,
    out: Out,
    model: Model = "minilm",
    context: Context = None,
    documents: Documents = "whole",
    batch: Batch = 8,
    limit: Limit = None,
    column: Column = "text",
    repeats: Annotated[bool, typer.Option(help="Measure induction on random tokens as well.")] = True,
    device: Device = None,
    force: Force = False,
) -> None:
    """Measure every head of a model over a data set; under torchrun, with several processes."""
    with _mistakes_in_a_sentence(), process_group() as place:
        _quiet_libraries()
        loaded = load(model)
        texts = Texts(data, loaded.tokenizer, context, documents, batch, limit, column)
        moved = loaded.model.to(place.device(device))
        options: Any = {"out": out, "force": force, "progress": place.is_first, "title": loaded.title}
        found = measure(moved, texts, repeats=repeats, **options)
        if place.is_first:
            print_profile(found, make_console())
            _wrote(out)


@app.command()
def ablate(
    data: Data,
    out: Out,
    model: Model = "minilm",
    loss: LossName = None,
    replacement: Annotated[
        str, typer.Option(help="What takes the place of a head: zero, uniform attention, or its mean over the data.")
    ] = "zero",
    units: Annotated[str, typer.Option(help="What is removed at a time: heads, layers, groups, or roles.")] = "heads",
    roles: Annotated[Path | None, typer.Option(help="The folder of a profile, for --units roles.")] = None,
    context: Context = None,
    documents: Documents = "whole",
    batch: Batch = 8,
    limit: Limit = None,
    column: Column = "text",
    device: Device = None,
    top: Top = 20,
    force: Force = False,
) -> None:
    """Measure what a model's loss is without each head, layer, group or role."""
    with _mistakes_in_a_sentence():
        if (units == "roles") != (roles is not None):
            raise InputError("roles", expected="a profile's folder with --units roles, and only then", got=repr(roles))
        sets = units if roles is None else load_profile(roles).roles()
        loaded, texts, found_loss = _with_loss(model, loss, data, context, documents, batch, limit, column)
        moved = loaded.model.to(LocalProcess(True, 0).device(device))
        options: Any = {"out": out, "force": force, "progress": True, "title": loaded.title}
        found = without(moved, texts, found_loss, replacement=_replacement(replacement, texts), units=sets, **options)
        print_ablation(found, make_console(), top)
        _wrote(out)


@app.command()
def importance(
    data: Data,
    out: Out,
    model: Model = "minilm",
    loss: LossName = None,
    method: Annotated[
        str | None, typer.Option(help=f"{', '.join(METHODS)}; by default the first, or ablation of embeddings.")
    ] = None,
    normalise: Annotated[bool, typer.Option("--normalise", help="Divide by the l2 norm over a layer's heads.")] = False,
    steps: Annotated[int | None, typer.Option(min=1, help="Gates from 0 to 1, of integrated.")] = None,
    sparsity: Annotated[
        float | None, typer.Option(min=0.0, help="What an open gate costs, in units of the loss, of hard_concrete.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the data, of hard_concrete.")] = None,
    context: Context = None,
    documents: Documents = "whole",
    batch: Batch = 8,
    limit: Limit = None,
    column: Column = "text",
    device: Device = None,
    top: Top = 20,
    force: Force = False,
) -> None:
    """Score the heads of a model: gradients of gates, their integral, ablation, or gates that are learned."""
    with _mistakes_in_a_sentence():
        loaded, texts, found_loss = _with_loss(model, loss, data, context, documents, batch, limit, column)
        moved = loaded.model.to(LocalProcess(True, 0).device(device))
        given = {"steps": steps, "sparsity": sparsity, "epochs": epochs}
        options: Any = {name: value for name, value in given.items() if value is not None}
        options |= {"out": out, "force": force, "progress": True, "title": loaded.title}
        if method is None:  # a distance has no slope at the whole model
            method = "ablation" if isinstance(found_loss, EmbeddingDistance) else "gradient"
        found = score(moved, texts, found_loss, method, normalise=normalise, **options)
        print_importance(found, make_console(), top)
        _wrote(out)


def _with_loss(
    model: str, name: str | None, data: Path, *options: Any
) -> tuple[LoadedModel, Texts, Callable[..., Any]]:
    """A model with what its loss asks for on top, the texts, and the loss."""
    _quiet_libraries()
    if name is None:
        made = lm_head_of(model)
        name = next(loss for loss, top in LOSSES.items() if top == made)
    if name not in LOSSES:
        raise InputError("loss", expected=f"one of {', '.join(LOSSES)}", got=repr(name))
    loaded = load(model, LOSSES[name])
    return loaded, Texts(data, loaded.tokenizer, *options), loss_by_name(name, loaded.tokenizer)


def _replacement(name: str, texts: Texts) -> Replacement:
    """What takes the place of a head's output, by its name."""
    known: dict[str, Callable[[], Replacement]] = {"zero": zero, "uniform": uniform, "mean": lambda: mean(texts)}
    if name not in known:
        raise InputError("replacement", expected=f"one of {', '.join(known)}", got=repr(name))
    return known[name]()


def _wrote(out: Path) -> None:
    typer.echo(f"\nwrote {out}")
    sys.stdout.flush()


def _numbers(text: str) -> tuple[int, ...]:
    """1,2,4 as numbers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"expected numbers such as 1,2,4, got {text!r}") from None


def _amount(text: str) -> int:
    """1.5M as 1,500,000."""
    return round(_scaled(text, {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}, "1.5M or 300k"))


def _seconds(text: str) -> float:
    """30m as 1,800 seconds."""
    return _scaled(text, {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}, "30m, 90s or 2h")


def _scaled(text: str, units: dict[str, float], such_as: str) -> float:
    """A positive number with a unit behind it."""
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)([a-z]?)", text.strip().lower())
    if found is None or found[2] not in units or not float(found[1]):
        raise typer.BadParameter(f"expected an amount such as {such_as}, got {text!r}")
    return float(found[1]) * units[found[2]]


@app.command()
def study(
    data: Data,
    out: Annotated[Path, typer.Option(help="A folder for table, picture, database and models; goes on there.")],
    task: Annotated[str, typer.Option(help=f"What the models learn: {', '.join(TASKS)}.")] = "lm",
    heads: Annotated[Any, typer.Option(parser=_numbers, metavar="N,N,...", help="Numbers of heads.")] = "1,2,4,8,16",
    head_dim: Annotated[
        Any, typer.Option(parser=_numbers, metavar="N,N,...", help="Widths of a head; by default embed_dim / heads.")
    ] = None,
    kv_heads: Annotated[
        Any, typer.Option(parser=_numbers, metavar="N,N,...", help="Key/value heads; by default as many as heads.")
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Ranks over which heads must divide.")] = 1,
    baseline: Annotated[
        str | None, typer.Option(metavar="HEADS[xDIM][/KV]", help="The setting in use, such as 8, 8x64 or 8x64/2.")
    ] = None,
    budget: Annotated[
        Any, typer.Option(parser=_seconds, metavar="TIME", help="30m, 2h; by default 30m, or none with --tokens.")
    ] = None,
    params: Annotated[Any, typer.Option(parser=_amount, metavar="N", help="Parameters of each model.")] = "1.5M",
    embed_dim: Annotated[int | None, typer.Option(min=2, help="Width of the models; from --params.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Their depth; from --params.")] = None,
    tokens: Annotated[
        Any, typer.Option(parser=_amount, metavar="N", help="Tokens of each training; from the budget.")
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Learning rates tried for each setting; as the budget allows.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each setting with its best rate.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of everything that is drawn.")] = 0,
    context: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = CONTEXT,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a batch.")] = BATCH,
    vocabulary: Annotated[int, typer.Option(min=1, help="Tokens of the tokenizer that is made.")] = VOCABULARY,
    tokenizer: Annotated[str | None, typer.Option(help="A model whose tokenizer is used instead.")] = None,
    column: Column = "text",
    label: Annotated[str, typer.Option(help="Where the label is, of --task classify.")] = "label",
    storage: Annotated[
        str | None, typer.Option(metavar="URL", help="A database that processes share; by default SQLite in --out.")
    ] = None,
    name: Annotated[str, typer.Option(help="Of the study in the database.")] = "study",
    device: Device = None,
    force: Force = False,
) -> None:
    """Compare numbers of heads on a text: small models of the same size, the same tokens, several seeds."""
    with _mistakes_in_a_sentence():
        _quiet_libraries()
        if budget is None and tokens is None:
            budget = 30 * 60.0
        sizes: Any = {"params": params, "embed_dim": embed_dim, "layers": layers, "context": context, "batch": batch}
        space: Any = {"heads": heads, "head_dims": head_dim, "kv_heads": kv_heads, "tensor_parallel": tensor_parallel}
        length: Any = {"budget": budget, "tokens": tokens, "trials": trials, "seeds": seeds, "seed": seed}
        texts: Any = {"task": task, "column": column, "label": label, "vocabulary": vocabulary}
        if tokenizer is not None:
            texts["tokenizer"] = load_tokenizer(tokenizer)
        place: Any = {"storage": storage, "name": name, "device": device, "force": force, "progress": True}
        found = study_texts(data, out, baseline=baseline, **sizes, **space, **length, **texts, **place)
        print_study(found, make_console())
        _wrote(out)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="The folder of a profile.")],
    b: Annotated[Path, typer.Argument(help="That of another, of the same heads.")],
    statistic: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this statistic; may be repeated.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many differences are shown, the largest.")] = 20,
) -> None:
    """Line up two profiles and show the heads that differ most, in standard errors."""
    with _mistakes_in_a_sentence():
        compared = line_up(load_profile(a), load_profile(b))
        print_comparison(compared, make_console(), statistic or (), top)
        sys.stdout.flush()


@contextmanager
def _mistakes_in_a_sentence() -> Iterator[None]:
    """Turn a user's mistake into one sentence on standard error and exit status 2."""
    try:
        yield
    except HeadwiseError as error:
        raise _refused(str(error)) from None
    except BrokenPipeError:
        raise  # whoever reads has seen enough
    except OSError as error:
        raise _refused(f"{error.filename or 'output'}: {error.strerror}") from None


def _refused(sentence: str) -> typer.Exit:
    typer.echo(f"headwise: {sentence}", err=True)
    return typer.Exit(2)


def _read_text(text: str) -> str:
    """TEXT itself, standard input for `-`, or the file after `@`."""
    if text != "-" and not text.startswith("@"):
        return text
    name = "standard input" if text == "-" else text[1:]
    if text == "-" and sys.stdin is None:
        raise InputError("text", expected="a text on standard input", got="none: it is closed")
    try:
        data = sys.stdin.buffer.read() if text == "-" else Path(name).read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise InputError(
            "text",
            expected=f"a file {name!r} that can be read",
            got=error.strerror,
            remedy="- takes a text that begins with @ from standard input",
        ) from None
    except UnicodeDecodeError as error:
        raise InputError("text", expected=f"UTF-8 in {name}", got=f"another byte at offset {error.start}") from None


def _require_folder(html: Path | None) -> None:
    """Refuse a page that cannot be written before the model is loaded."""
    if html is None:
        return
    if html.is_dir() or not html.parent.is_dir() or not os.access(html if html.exists() else html.parent, os.W_OK):
        raise InputError("html", expected="a file in a folder that exists and can be written", got=repr(str(html)))


def _quiet_libraries() -> None:
    """No advice from the libraries underneath, and no progress bar for what takes a moment.

    Converting a GGUF file takes several, and shows its bar on standard error.
    """
    try:
        from transformers.utils import logging
    except ImportError:
        return  # `load` says what is missing
    logging.set_verbosity_error()
    logging.disable_progress_bar()
