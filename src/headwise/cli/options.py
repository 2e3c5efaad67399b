"""Command-line options that several commands share."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.quantities import choice, path
from headwise.settings import DOCUMENT_MODES, DTYPES, LOSSES

if TYPE_CHECKING:
    import torch

    import headwise as hw
    from headwise.data.models import ModelSource

Data = Annotated[
    Path, typer.Option(parser=path, metavar="PATH", help="Data, a file or folder: text, JSON lines, CSV or Parquet.")
]
Out = Annotated[
    Path,
    typer.Option(
        parser=path,
        metavar="FOLDER",
        help="Folder for the results. An interrupted run resumes when you repeat the command.",
    ),
]
TableOut = Annotated[
    Path | None,
    typer.Option(
        parser=path,
        metavar="FOLDER",
        help="Also save the table in this folder. An interrupted run resumes when you repeat the command.",
    ),
]
TableFolder = Annotated[
    Path | None, typer.Option(parser=path, metavar="FOLDER", help="Also save the table in this folder.")
]
ModelFolder = Annotated[
    Path, typer.Option(parser=path, metavar="FOLDER", help="Folder for the smaller model. It must not exist yet.")
]
Html = Annotated[
    Path | None,
    typer.Option(parser=path, metavar="FILE", help="Also write an interactive page to this file. It works offline."),
]
LossName = Annotated[
    str | None,
    typer.Option("--loss", help="Default: a language model's own loss, otherwise embedding.", **choice(LOSSES)),
]
Column = Annotated[str, typer.Option(help="Column with the text, in JSON lines, CSV and Parquet.")]
Device = Annotated[
    str | None, typer.Option(help="Device, such as cpu, cuda or cuda:1. Default: a GPU if there is one.")
]
Top = Annotated[int, typer.Option(min=1, help="Number of rows to print, largest first.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing run in the output folder.")]

Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the hub.")]
DataType = Annotated[str | None, typer.Option(help="Data type of the weights. Default: as saved.", **choice(DTYPES))]


@dataclass(frozen=True)
class ModelFlags:
    """Command-line options that name a model, and say how it is loaded: its name, its revision on the hub, the data
    type of its weights, and its device.

    Attributes:
        model: name of the model.
        revision: branch, tag or commit on the hub; None for the main branch.
        dtype: name of the data type of the weights; None for the saved one.
        device: name of the device; None for a GPU if there is one.
    """

    model: Annotated[str, typer.Option(help="minilm, smollm2, a folder in Hugging Face format, or a hub id.")] = (
        "minilm"
    )
    revision: Revision = None
    dtype: DataType = None
    device: Device = None

    def find(self) -> "ModelSource":
        """Return the location of the model, after checking that its configuration can be reached."""
        from headwise.data.models import find_model

        return find_model(self.model, self.revision)

    @property
    def torch_dtype(self) -> "torch.dtype | None":
        """Data type of the weights as torch's object; None for the saved one."""
        import torch

        return None if self.dtype is None else getattr(torch, self.dtype)

    @property
    def torch_device(self) -> "torch.device":
        """Device as torch's object: a GPU if there is one and no device is named.

        Raises:
            InputError: torch cannot use the named device.
        """
        from headwise.runs.distributed import LocalProcess

        return LocalProcess(True, 0).device(self.device)


@dataclass(frozen=True)
class DecoderFlags(ModelFlags):
    """Command-line options that name a model, for commands that need a causal language model."""

    model: Annotated[
        str, typer.Option(help="A causal language model: smollm2, a folder in Hugging Face format, or a hub id.")
    ] = "smollm2"


@dataclass(frozen=True)
class TextFlags:
    """Command-line options that determine how a data set is cut into sequences and batches for a model: tokens per
    sequence, the way from documents to sequences (whole, truncated, cut into pieces or packed), sequences per batch,
    number of sequences, and the column with the text.

    Attributes:
        context: largest number of tokens per sequence.
        documents: treatment of documents that are longer than the context.
        batch: sequences per batch.
        limit: number of sequences to use.
        column: column with the text.
    """

    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens per sequence, at most. Default: 2048, or the model's limit.")
    ] = None
    documents: Annotated[
        str,
        typer.Option(
            help="Documents become sequences: whole (error if too long), truncate, cut (in pieces), or pack.",
            **choice(DOCUMENT_MODES),
        ),
    ] = "whole"
    batch: Annotated[int, typer.Option(min=1, help="Sequences per batch.")] = 8
    limit: Annotated[int | None, typer.Option(min=1, help="Use only this many sequences.")] = None
    column: Column = "text"

    def texts(self, data: Path, tokenizer: Any) -> "hw.Texts":
        """Return the data set in the file or folder `data` as `Texts`, which tokenizes it with `tokenizer` and cuts it
        into sequences and batches according to these options.
        """
        import headwise as hw

        return hw.Texts(data, tokenizer, self.context, self.documents, self.batch, self.limit, self.column)
