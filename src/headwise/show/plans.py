"""Plans of pruning in a terminal, and as rows."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from headwise.compression.pruning.pruning_plan import PruningPlan
from headwise.show.records import Records


def print_plan(plan: PruningPlan, console: Console, sizes: Mapping[str, int]) -> None:
    """Print a plan, and the number of parameters before and after."""
    console.print(Text(str(plan)), soft_wrap=True)
    before, after = sizes["parameters_before"], sizes["parameters_after"]
    console.print(f"\nparameters: {before:,} before, {after:,} after ({after / before:.1%})")


def plan_records(plan: PruningPlan, metadata: Mapping[str, Any]) -> Records:
    """Return one row per attention module of a plan, with the rest of the plan among the metadata."""
    rows = [{**asdict(each), "kept": list(each.kept), "kept_kv_heads": each.kept_kv_heads} for each in plan.modules]
    described = {name: getattr(plan, name) for name in ("constraint", "keep", "scores", "rounds", "loader")}
    return Records(rows, {**metadata, "plan": described})
