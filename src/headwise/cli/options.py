"""Options of commands: values such as 1.5M or 30m, options that several commands share, and groups of options."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.output import quiet_libraries
from headwise.errors import InputError
from headwise.settings import DOCUMENT_MODES, DTYPES, LOSSES, ROW_STATISTICS

if TYPE_CHECKING:
    import torch
    from torch import nn

    import headwise as hw
    from headwise.data.models import ModelSource

# -- values: a text of another form raises `typer.BadParameter` -------------------------------------------------------


def path(text: str) -> Path:
    """Convert a command-line value to a path. Raise a usage error if it is empty, which would mean the current folder,
    or contains a null character.
    """
    if not text.strip() or "\0" in text:
        raise typer.BadParameter(f"expected a path, got {text!r}")
    return Path(text)


def option(description: str, metavar: str | None = None, *, least: float | None = None, **further: Any) -> Any:
    """Return a typer option with a help text. `metavar` is the placeholder for its value in the help, and `least` the
    smallest number that it accepts.
    """
    return typer.Option(min=least, metavar=metavar, help=description, **further)


def path_option(metavar: str, description: str) -> Any:
    """Return a typer option whose value is a path. `metavar` is the placeholder for the path in the help."""
    return option(description, metavar, parser=path)


def choice(
    names: Iterable[str], description: str, *, others: Callable[[], Iterable[str]] = tuple, kind: Any = typer.Option
) -> Any:
    """Return a typer option whose value must be one of `names`, or an argument if `kind` is `typer.Argument`. The names
    are listed in the help and completed by the shell. Names that `others` returns are accepted too, but not listed.
    """
    allowed = tuple(names)

    def parse(text: str) -> str:
        if text not in allowed and text not in (known := (*allowed, *others())):
            raise typer.BadParameter(f"expected one of {', '.join(known)}, got {text!r}")
        return text

    completed: dict[str, Any] = {"autocompletion": lambda: list(allowed), "metavar": "|".join(allowed)}
    return kind(parser=parse, help=description, **completed)


def added_statistics() -> list[str]:
    """Return the names of the attention statistics that commands accept although their help does not list them: all
    other statistics in the registry with one value per query.
    """
    from headwise.statistics.registry import row_statistics

    return [name for name in row_statistics() if name not in ROW_STATISTICS]


def head_name(text: str) -> int | str:
    """Convert a command-line value that names heads: the index of a head in all layers, such as 11, becomes a number;
    the name of a single head, such as 5.11, is returned unchanged.
    """
    if not re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII):
        raise typer.BadParameter(f"expected a head such as 5.11 (layer 5, head 11) or 11, got {text!r}")
    return text if "." in text else int(text)


def numbers(text: str, kind: Callable[[str], Any] = int, example: str = "1,2,4") -> tuple[Any, ...]:
    """Convert a command-line value such as "1,2,4" to a tuple of numbers of type `kind`. `example` is shown in the
    error for other values.
    """
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"expected numbers such as {example}, got {text!r}") from None


def amount(text: str) -> int:
    """Convert a positive amount such as 300k or 1.5M to an integer (k = 1e3, M = 1e6, G or B = 1e9)."""
    return round(_scaled(text, {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}, "an amount such as 1.5M or 300k"))


def seconds(text: str) -> float:
    """Convert a positive duration such as 90s, 30m, 2h or 1d to seconds. A number without a unit is in seconds."""
    return _scaled(text, {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}, "a time such as 30m, 90s or 2h")


def _scaled(text: str, units: dict[str, float], expected: str) -> float:
    """Convert a positive number, optionally followed by a one-letter unit, to the number times the unit's factor in
    `units`. `expected` describes the format in the error for other values.
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)([a-z]?)", text.strip().lower())
    if match is None or match[2] not in units or not float(match[1]):
        raise typer.BadParameter(f"expected {expected}, got {text!r}")
    return float(match[1]) * units[match[2]]


# -- options ----------------------------------------------------------------------------------------------------------

Data = Annotated[Path, path_option("PATH", "Data, a file or folder: text, JSON lines, CSV or Parquet.")]
Out = Annotated[
    Path, path_option("FOLDER", "Folder for the results. An interrupted run resumes when you repeat the command.")
]
TableOut = Annotated[
    Path | None,
    path_option(
        "FOLDER", "Also save the table in this folder. An interrupted run resumes when you repeat the command."
    ),
]
TableFolder = Annotated[Path | None, path_option("FOLDER", "Also save the table in this folder.")]
ModelFolder = Annotated[Path, path_option("FOLDER", "Folder for the smaller model. It must not exist yet.")]
Html = Annotated[Path | None, path_option("FILE", "Also write an interactive page to this file. It works offline.")]
LossName = Annotated[str | None, choice(LOSSES, "Default: a language model's own loss, otherwise embedding.")]
Column = Annotated[str, option("Column with the text, in JSON lines, CSV and Parquet.")]
Top = Annotated[int, option("Number of rows to print, largest first.", least=1)]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing run in the output folder.")]


@dataclass(frozen=True)
class ModelFlags:
    """Command-line options that name a model and determine how it is loaded."""

    model: Annotated[str, option("minilm, smollm2, a folder in Hugging Face format, or a hub id.")] = "minilm"
    revision: Annotated[str | None, option("Branch, tag or commit of a model on the hub.")] = None
    dtype: Annotated[str | None, choice(DTYPES, "Data type of the weights. Default: as saved.")] = None
    device: Annotated[str | None, option("Device, such as cpu, cuda or cuda:1. Default: a GPU if there is one.")] = None

    def find(self) -> "ModelSource":
        """Return the location of the model. Raise `InputError` if its configuration cannot be read."""
        from headwise.data.models import find_model

        quiet_libraries()
        return find_model(self.model, self.revision)

    def load(self, source: "ModelSource", lm_head: str | None) -> "nn.Module":
        """Load a model from `source` onto the chosen device, with the kind of language-model head that `lm_head` names,
        or without one. The device is checked before the weights are loaded.
        """
        device = self.torch_device
        model: nn.Module = source.model(lm_head, self.torch_dtype)
        return model.to(device)

    @property
    def torch_dtype(self) -> "torch.dtype | None":
        """The option --dtype as a torch dtype; None to load weights in the dtype in which they were saved."""
        import torch

        return None if self.dtype is None else getattr(torch, self.dtype)

    @property
    def torch_device(self) -> "torch.device":
        """The option --device as a torch device, after checking that torch can use it. By default it is a GPU if there
        is one.
        """
        from headwise.runs.distributed import LocalProcess

        return LocalProcess(True, 0).device(self.device)


@dataclass(frozen=True)
class DecoderFlags(ModelFlags):
    """Command-line options that name a decoder. The command loads it with or without its language-model head."""

    model: Annotated[str, option("A causal language model: smollm2, a folder in Hugging Face format, or a hub id.")] = (
        "smollm2"
    )


@dataclass(frozen=True)
class CausalFlags(DecoderFlags):
    """Command-line options that name a causal language model; other models are refused."""

    def find(self) -> "ModelSource":
        source = super().find()
        if source.lm_head() != "causal":
            expected = "a causal language model (a decoder), such as smollm2"
            raise InputError("model", expected=expected, got=repr(source.title))
        return source


@dataclass(frozen=True)
class TextFlags:
    """Command-line options that determine how a data set is cut into sequences and batches for a model."""

    context: Annotated[
        int | None, option("Tokens per sequence, at most. Default: 2048, or the model's limit.", least=1)
    ] = None
    documents: Annotated[
        str,
        choice(
            DOCUMENT_MODES, "Documents become sequences: whole (error if too long), truncate, cut (in pieces), or pack."
        ),
    ] = "whole"
    batch: Annotated[int, option("Sequences per batch.", least=1)] = 8
    limit: Annotated[int | None, option("Use only this many sequences.", least=1)] = None
    column: Column = "text"

    def texts(self, data: Path, tokenizer: Any) -> "hw.Texts":
        """Return the data set in the file or folder `data`, tokenized with `tokenizer`."""
        import headwise as hw

        return hw.Texts(data, tokenizer, self.context, self.documents, self.batch, self.limit, self.column)
