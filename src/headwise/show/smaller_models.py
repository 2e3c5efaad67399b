"""Smaller models in a terminal, and as rows: plans of pruning, merged heads, streaming heads and recipes."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from headwise.compression.pruning.pruning_plan import PruningPlan
from headwise.compression.recipe.compress import RecipeResult
from headwise.show.records import Records
from headwise.show.tables import print_table, print_title
from headwise.wording import counted


def print_plan(plan: PruningPlan, console: Console, sizes: Mapping[str, int]) -> None:
    """Print a plan, and the number of parameters before and after."""
    console.print(Text(str(plan)), soft_wrap=True)
    console.print()
    _print_parameters(console, sizes)


def plan_records(plan: PruningPlan, metadata: Mapping[str, Any]) -> Records:
    """Return one row per attention module of a plan, with the rest of the plan among the metadata."""
    rows = [{**asdict(each), "kept": list(each.kept), "kept_kv_heads": each.kept_kv_heads} for each in plan.modules]
    described = {name: getattr(plan, name) for name in ("constraint", "keep", "scores", "rounds", "loader")}
    return Records(rows, {**metadata, "plan": described})


def print_merge(kv_heads: int, sizes: Mapping[str, int], console: Console) -> None:
    """Print the number of key/value heads that remain, and the number of parameters before and after."""
    console.print(f"key/value heads in each layer: {kv_heads}")
    _print_parameters(console, sizes)


def merge_records(kv_heads: int, sizes: Mapping[str, int], metadata: Mapping[str, Any]) -> Records:
    """Return one row with the number of key/value heads that remain, and the numbers of parameters."""
    return Records([{"kv_heads": kv_heads, **sizes}], metadata)


def _print_parameters(console: Console, sizes: Mapping[str, int]) -> None:
    """Print the number of parameters of a model, and that of a smaller one."""
    before, after = sizes["parameters_before"], sizes["parameters_after"]
    console.print(f"parameters: {before:,} before, {after:,} after ({after / before:.1%})")


def localization_records(result: Any, metadata: Mapping[str, Any]) -> Records:
    """Return one row per attention module, with its streaming heads, and the rest of the result among the metadata."""
    fields = asdict(result)
    return Records(fields.pop("modules"), {**metadata, **fields})


def print_recipe(report: RecipeResult, console: Console) -> None:
    """Print a table with one line per step of a compression: parameters, held-out loss, and its difference from that of
    the dense model.
    """
    print_title(console, f"{report.model}: {report.loss} on {counted(report.documents, 'held-out document')}")
    loads = "plain transformers loads" if report.loader == "transformers" else "only headwise.load loads"
    console.print(f"{loads} the smaller model, whose outputs are equal after loading")
    rows = (
        [stage.name, f"{stage.parameters:,}", stage.loss.text(), stage.difference.text("+z.4f")]
        for stage in report.stages
    )
    print_table(console, ("step", "parameters", "loss", "difference"), rows, left=("step",))
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
