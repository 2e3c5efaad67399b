"""Command-line options that several commands share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.analysis.losses import LOSSES
from headwise.data.texts import Texts

Data = Annotated[Path, typer.Option(help="File or folder with the data: text, JSON lines or Parquet.")]
Out = Annotated[
    Path, typer.Option(help="Folder for the results. An interrupted run resumes when you repeat the command.")
]
ModelName = Annotated[
    str, typer.Option("--model", help="minilm, smollm2, a folder in Hugging Face format, or a hub id.")
]
LossName = Annotated[
    str | None,
    typer.Option(
        "--loss",
        help=f"Loss: {', '.join(LOSSES)}. Default: a language model's own, otherwise embedding.",
    ),
]
Column = Annotated[str, typer.Option(help="Column with the text, in JSON lines and Parquet.")]
Device = Annotated[
    str | None, typer.Option(help="Device, such as cpu, cuda or cuda:1. Default: a GPU if there is one.")
]
Top = Annotated[int, typer.Option(min=1, help="Number of rows to show, largest first.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing run in the output folder.")]


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
        typer.Option(help="Documents become sequences: whole (error if too long), truncate, cut (in pieces), or pack."),
    ] = "whole"
    batch: Annotated[int, typer.Option(min=1, help="Sequences per batch.")] = 8
    limit: Annotated[int | None, typer.Option(min=1, help="Use only this many sequences.")] = None
    column: Column = "text"

    def texts(self, data: Path, tokenizer: Any) -> Texts:
        """Return the data set in the file or folder `data` as `Texts`, which tokenizes it with `tokenizer` and cuts it
        into sequences and batches according to these options.
        """
        return Texts(data, tokenizer, self.context, self.documents, self.batch, self.limit, self.column)
