"""Roles: a name for what a head does, by rule from its statistics.

The rule. A head that gives at least half of its attention to one kind of place is named after that place;
where several qualify, after the one that gets most (the first token before the special tokens it may be
one of). A head without such a place is *broad* when its entropy
is at least 0.85 of what even attention would have, and otherwise *mixed*: it prefers some words, and no
position says which. *duplicate token* and *induction* look only at the rows that have an earlier copy of
their token, and are given only when the text has at least two of those.

Where a head was also measured on random tokens that repeat (`repeats.py`), half of its attention there makes it
*induction* or *duplicate token* just as well, with the larger of both shares. Sinks do not compete with that: a head
that copies rests on one wherever there is nothing to copy.
"""

from collections.abc import Mapping
from dataclasses import dataclass

SHARE = 0.5
"""The share of attention that makes a place a head's role."""

EVEN = 0.85
"""The share of the largest possible entropy from which a head is broad."""

MIN_ROWS = 2
"""Rows that a statistic must rest on before it can name a head."""


@dataclass(frozen=True)
class Role:
    """A role, the statistic that decides it, and its rule in words."""

    name: str
    statistic: str
    threshold: float
    rule: str


PREVIOUS = Role("previous token", "previous", SHARE, "at least half of the attention is on the token before")
NEXT = Role("next token", "next", SHARE, "at least half of the attention is on the token after")
INDUCTION = Role("induction", "induction", SHARE, "at least half is on what followed an earlier copy of the token")
DUPLICATE = Role("duplicate token", "duplicate", SHARE, "at least half is on earlier copies of the same token")
SAME = Role("same token", "self", SHARE, "at least half of the attention is on the token itself")
FIRST = Role("sink on the first token", "first", SHARE, "at least half of the attention rests on the first token")
SPECIAL = Role("sink on special tokens", "special", SHARE, "at least half of the attention rests on special tokens")
BROAD = Role("broad", "evenness", EVEN, f"spread out: entropy is at least {EVEN} of that of even attention")
MIXED = Role("mixed", "confidence", 0.0, "no one place gets half of the attention, and it is not spread out either")

PLACES = (PREVIOUS, NEXT, INDUCTION, DUPLICATE, SAME, FIRST, SPECIAL)
"""The roles that name a place."""

COPIES = (INDUCTION, DUPLICATE)
"""The roles that random tokens decide as well."""

SINKS = (FIRST, SPECIAL)
"""The roles of heads that rest."""

ROLES = (PREVIOUS, NEXT, INDUCTION, DUPLICATE, SAME, MIXED, BROAD, FIRST, SPECIAL)
"""Every role, those that say most about a head first."""


def role_of(means: Mapping[str, float], counts: Mapping[str, float], random: Mapping[str, float] | None = None) -> Role:
    """The role of a head from its statistics, the number of rows behind each, and its statistics on random tokens."""

    def reaches(role: Role) -> bool:
        return counts.get(role.statistic, 0) >= MIN_ROWS and means[role.statistic] >= role.threshold

    shares = {role: means[role.statistic] for role in PLACES if reaches(role)}
    copies = {role: random[role.statistic] for role in COPIES if random and random[role.statistic] >= role.threshold}
    if copies:
        shares = {role: share for role, share in shares.items() if role not in SINKS}
    shares |= {role: max(share, shares.get(role, 0.0)) for role, share in copies.items()}
    if FIRST in shares:
        shares.pop(SPECIAL, None)
    if shares:
        return max(shares, key=lambda role: shares[role])
    return BROAD if reaches(BROAD) else MIXED
