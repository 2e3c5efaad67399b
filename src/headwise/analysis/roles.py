"""Roles: names for what heads attend to, assigned by rule from their statistics.

The rule. A head that puts at least half of its attention on one kind of position is named after that position. If
several positions qualify, the one with the most attention names the head; the first token takes precedence over special
tokens, because it may be one. A head without such a position is *broad* if its entropy is at least 0.85 of that of
uniform attention. Otherwise it is *mixed*: it prefers some words, but no position describes them. *Duplicate token* and
*induction* count only rows whose token has an earlier copy, and need at least two such rows.

If a head was also measured on random tokens that repeat (`data/random_repeats.py`), half of its attention there makes
it *induction* or *duplicate token* as well, with the larger of both shares. Attention sinks do not compete with these
two roles, because a copying head attends to a sink wherever there is nothing to copy.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headwise.page.contents import PageRole

HALF = 0.5
"""Share of a head's attention from which a position names its role."""

BROAD_EVENNESS = 0.85
"""Share of the entropy of uniform attention from which a head is broad."""

MIN_ROWS = 2
"""Least number of query rows behind a statistic that decides a role."""


@dataclass(frozen=True)
class Role:
    """Role of a head: a name for what it attends to, such as "previous token". A head has the role if a certain
    statistic of the head reaches a threshold.

    Attributes:
        name: such as "previous token".
        statistic: name of the statistic that decides it.
        threshold: value of the statistic from which a head has the role.
        rule: the rule in words, for display.
    """

    name: str
    statistic: str
    threshold: float
    rule: str


PREVIOUS = Role("previous token", "previous", HALF, "at least half of the attention is on the token before")
NEXT = Role("next token", "next", HALF, "at least half of the attention is on the token after")
INDUCTION = Role("induction", "induction", HALF, "at least half is on what followed an earlier copy of the token")
DUPLICATE = Role("duplicate token", "duplicate", HALF, "at least half is on earlier copies of the same token")
SAME = Role("same token", "self", HALF, "at least half of the attention is on the token itself")
FIRST = Role("sink on the first token", "first", HALF, "at least half of the attention is on the first token")
SPECIAL = Role("sink on special tokens", "special", HALF, "at least half of the attention is on special tokens")
BROAD = Role(
    "broad",
    "evenness",
    BROAD_EVENNESS,
    f"spread out: entropy is at least {BROAD_EVENNESS} of that of uniform attention",
)
MIXED = Role("mixed", "confidence", 0.0, "no one position gets half of the attention, and it is not spread out either")

POSITION_ROLES = (PREVIOUS, NEXT, INDUCTION, DUPLICATE, SAME, FIRST, SPECIAL)
"""Roles of heads that attend mostly to one kind of position."""

COPYING_ROLES = (INDUCTION, DUPLICATE)
"""Roles that random tokens can decide as well."""

SINK_ROLES = (FIRST, SPECIAL)
"""Roles of heads that attend by default to an attention sink."""

ROLES = (PREVIOUS, NEXT, INDUCTION, DUPLICATE, SAME, MIXED, BROAD, FIRST, SPECIAL)
"""All roles, the most specific ones first."""


def role_of(means: Mapping[str, float], rows: Mapping[str, float], random: Mapping[str, float] | None = None) -> Role:
    """Return a head's role, a name for what it attends to. It is the kind of position that gets most of the head's
    attention, if this is at least half. Without such a position, the role is "broad" if attention is nearly uniform,
    and otherwise "mixed". `means` are the means of the head's statistics on data, and `rows` states over how many
    queries each mean is. `random` are means on random tokens that repeat. They can add the roles for attention to
    earlier copies of a token, and to what followed these copies.

    This module's docstring has the whole rule.
    """

    def reaches(role: Role) -> bool:
        return rows.get(role.statistic, 0) >= MIN_ROWS and means[role.statistic] >= role.threshold

    shares = {role: means[role.statistic] for role in POSITION_ROLES if reaches(role)}
    copies = {
        role: random[role.statistic] for role in COPYING_ROLES if random and random[role.statistic] >= role.threshold
    }
    if copies:
        shares = {role: share for role, share in shares.items() if role not in SINK_ROLES}
    shares |= {role: max(share, shares.get(role, 0.0)) for role, share in copies.items()}
    if FIRST in shares:
        shares.pop(SPECIAL, None)
    if shares:
        return max(shares, key=lambda role: shares[role])
    return BROAD if reaches(BROAD) else MIXED


def page_roles(names: Iterable[str | None], first_word: str | None = None) -> tuple[PageRole, ...]:
    """Return the roles with the names `names` in the form that a page shows, in the order of `ROLES`. A role is a name
    for what heads attend to. In titles of roles, `first_word` replaces "the first token" if it is given.
    """
    occurring, first = set(names), "the first token"
    return tuple(
        PageRole(role.name, role.name.replace(first, first_word or first), role.rule, role.statistic)
        for role in ROLES
        if role.name in occurring
    )
