"""Profiles in a terminal: the heads of each role, and the heads in which two profiles differ most."""

from collections.abc import Collection

from rich.console import Console
from rich.text import Text

from headwise.analysis.compare import Comparison
from headwise.analysis.profile import Profile, ProfiledHead
from headwise.analysis.roles import MIXED, ROLES
from headwise.show.tables import print_table, print_title, run_title
from headwise.show.terminal import COLOURS
from headwise.wording import counted, number, quotient


def print_profile(profile: Profile, console: Console) -> None:
    """Print the heads of a profile, one group per role (what a head mostly attends to). Each head is followed by the
    mean of the statistic that decides its role. If this statistic was measured both on the data and on repeated random
    tokens, the larger of the two means is printed. In each group the largest mean is first. Heads of the mixed role
    have no number.
    """
    print_title(console, run_title(profile, head=len(profile.heads)))
    heads_by_role = profile.roles()
    for role in ROLES:
        members = [profile.head(*layer_and_head) for layer_and_head in heads_by_role.get(role.name, ())]
        if not members:
            continue
        if role is not MIXED:
            members.sort(key=profile.role_share, reverse=True)
        count = counted(len(members), "head")
        console.print()
        console.print(Text.assemble((role.name, f"bold {COLOURS[role.name]}"), f" · {count} · {role.rule}"))
        share = {} if role is MIXED else {head.name: f" {number(profile.role_share(head), '.2f')}" for head in members}
        console.print(Text("   ".join(head.name + share.get(head.name, "") for head in members)))


def print_comparison(comparison: Comparison, console: Console, statistics: Collection[str], top: int) -> None:
    """Print a table of the `top` largest differences between two profiles, sorted by absolute size in standard errors,
    with one row per head and statistic. Only the statistics named in `statistics` are shown; all are shown if it is
    empty. Then print the heads whose role differs, with both roles.

    Args:
        comparison: two profiles of the same heads.
        console: where to print.
        statistics: names of the statistics to show; all of them if empty.
        top: number of rows.
    """
    for letter, profile in (("A", comparison.a), ("B", comparison.b)):
        console.print(
            Text.assemble((f"{letter}  ", "bold"), run_title(profile, head=len(profile.heads))), soft_wrap=True
        )
    rows = (
        [
            change.a.name,
            change.statistic,
            *(number(head.statistics[change.statistic].value, "z.3f") for head in (change.a, change.b)),
            number(change.difference, "+z.3f"),
            quotient(change.errors, "+z.1f"),
            _role_text(change.a, change.b),
        ]
        for change in comparison.largest(statistics)[:top]
    )
    columns = ("head", "statistic", "A", "B", "difference", "in standard errors", "role")
    print_table(console, columns, rows, left=("statistic", "role"))
    changed = comparison.changed_roles()
    verb = "has" if len(changed) == 1 else "have"
    console.print(f"\n{len(changed)} of {counted(len(comparison.a.heads), 'head')} {verb} a different role")
    for one, other in changed:
        console.print(Text(f"{one.name}  {_role_text(one, other)}"))


def _role_text(one: ProfiledHead, other: ProfiledHead) -> str:
    """Return the role of a head in two profiles as text: the role, or `A → B` if the profiles differ."""
    return one.role if one.role == other.role else f"{one.role} → {other.role}"
