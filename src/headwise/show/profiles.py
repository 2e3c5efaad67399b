"""Profiles in a terminal: the heads of each role, and the heads in which two profiles differ most."""

from collections.abc import Collection
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwise.analysis.compare import Comparison
from headwise.analysis.profile import Profile, ProfiledHead
from headwise.analysis.roles import MIXED, ROLES
from headwise.show.terminal import COLOURS


def print_profile(profile: Profile, console: Console) -> None:
    """Print the heads of each role, with the largest attention share of the role first."""
    console.print(Text(_title(profile), style="bold"), soft_wrap=True)
    heads_by_role = profile.roles()
    for role in ROLES:
        members = [profile.head(*layer_and_head) for layer_and_head in heads_by_role.get(role.name, ())]
        if not members:
            continue
        if role is not MIXED:
            members.sort(key=profile.role_share, reverse=True)
        count = "1 head" if len(members) == 1 else f"{len(members)} heads"
        console.print()
        console.print(Text.assemble((role.name, f"bold {COLOURS[role.name]}"), f" · {count} · {role.rule}"))
        share = {} if role is MIXED else {head.name: f" {profile.role_share(head):.2f}" for head in members}
        console.print(Text("   ".join(head.name + share.get(head.name, "") for head in members)))


def print_comparison(comparison: Comparison, console: Console, statistics: Collection[str], top: int) -> None:
    """Print the heads that differ most, and the number of heads whose role differs.

    Args:
        comparison: two profiles of the same heads.
        console: where to print.
        statistics: names of the statistics to show; all of them if empty.
        top: number of rows.
    """
    for letter, profile in (("A", comparison.a), ("B", comparison.b)):
        console.print(Text.assemble((f"{letter}  ", "bold"), _title(profile)), soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    for column in ("head", "statistic", "A", "B", "difference", "in standard errors", "role"):
        table.add_column(column, justify="left" if column in ("statistic", "role") else "right", no_wrap=True)
    for each in comparison.largest(statistics)[:top]:
        a, b = (head.statistics[each.statistic].value for head in (each.a, each.b))
        numbers = (f"{a:.3f}", f"{b:.3f}", f"{each.difference:+.3f}", f"{each.errors:+.1f}")
        table.add_row(each.a.name, each.statistic, *numbers, _role(each.a, each.b))
    console.print()
    console.print(table)
    changed = sum(one.role != other.role for one, other in zip(comparison.a.heads, comparison.b.heads, strict=True))
    console.print(f"\n{changed} of {len(comparison.a.heads)} heads have a different role")


def _role(one: ProfiledHead, other: ProfiledHead) -> str:
    """Return the role of a head in two profiles, as `A → B` if it differs."""
    return one.role if one.role == other.role else f"{one.role} → {other.role}"


def _title(profile: Profile) -> str:
    """Return model, data and size of a profile in one line."""
    metadata: Any = profile.metadata
    measured, source = metadata["measured"], (metadata["data"] or {}).get("source", "batches")
    sequences = "1 sequence" if measured["sequences"] == 1 else f"{measured['sequences']:,} sequences"
    size = f"{sequences}, {measured['tokens']:,} tokens, {len(profile.heads)} heads"
    return f"{metadata['model']['name']} on {source}: {size}"
