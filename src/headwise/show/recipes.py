"""Reports of compressions in a terminal, and as rows."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwise.compression.recipe.recipe_result import RecipeResult
from headwise.show.records import Records
from headwise.wording import counted


def print_recipe(report: RecipeResult, console: Console) -> None:
    """Print a table with one line per step of a compression: parameters, held-out loss, and its difference from that of
    the dense model.
    """
    documents = counted(report.documents, "held-out document")
    console.print(Text(f"{report.model}: {report.loss} on {documents}", style="bold"), soft_wrap=True)
    loads = "plain transformers loads" if report.loader == "transformers" else "only headwise.load loads"
    console.print(f"{loads} the smaller model, whose outputs are equal after loading")
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    for column in ("step", "parameters", "loss", "difference"):
        table.add_column(column, justify="left" if column == "step" else "right", no_wrap=True)
    for stage in report.stages:
        table.add_row(stage.name, f"{stage.parameters:,}", stage.loss.text(), stage.difference.text("+z.4f"))
    console.print()
    console.print(table)
    note = "±: standard error clustered by document"
    console.print(note if report.documents > 1 else "standard errors need more than one document", style="dim")


def recipe_records(report: RecipeResult) -> Records:
    """Return one row per step of a compression, with the rest of the report as metadata."""
    metadata = {
        "model": {"name": report.model},
        "loader": report.loader,
        "loss": report.loss,
        "documents": report.documents,
    }
    return Records(report.records(), metadata)
