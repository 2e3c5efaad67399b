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


def print_smaller(described: str, sizes: Mapping[str, int], console: Console) -> None:
    """Print `described`, the description of a smaller model, and the numbers of parameters before and after the model
    was made smaller.
    """
    before, after = sizes["parameters_before"], sizes["parameters_after"]
    parameters = f"parameters: {before:,} before, {after:,} after ({after / before:.1%})"
    console.print(Text(f"{described}\n{parameters}"), soft_wrap=True)


def plan_records(plan: PruningPlan, metadata: Mapping[str, Any]) -> Records:
    """Return a pruning plan as rows, one per attention module; the metadata has the plan's other settings."""
    rows = [{**asdict(each), "kept": list(each.kept), "kept_kv_heads": each.kept_kv_heads} for each in plan.modules]
    described = {name: getattr(plan, name) for name in ("constraint", "keep", "scores", "rounds", "loader")}
    return Records(rows, {**metadata, "plan": described})


def print_recipe(report: RecipeResult, console: Console) -> None:
    """Print the number of parameters and the held-out loss of a model after each step of its compression."""
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
    """Return the result of a compression as one row per step, with the other fields in the metadata."""
    described = {name: getattr(report, name) for name in ("loader", "loss", "documents")}
    return Records(report.records(), {"model": {"name": report.model}, **described})
