"""Colour and marker of each role of heads, which readers with any colour vision can distinguish.

Most colours are from the schemes of Paul Tol (2021, "Colour schemes", SRON/EPS/TN/09-002) and of Okabe and Ito (2008).
A test simulates deficiencies of colour vision and measures how much the colours differ. Markers repeat what colours
show.
"""

from collections.abc import Iterable
from typing import NamedTuple


class RoleStyle(NamedTuple):
    """Colour and marker by which plots show a role of heads.

    Attributes:
        colour: colour as `#rrggbb`.
        marker: name of a matplotlib marker, such as "o".
    """

    colour: str
    marker: str


ROLE_STYLES = {
    "previous token": RoleStyle("#332288", "<"),
    "next token": RoleStyle("#56b4e9", ">"),
    "induction": RoleStyle("#d55e00", "^"),
    "duplicate token": RoleStyle("#aa4499", "D"),
    "same token": RoleStyle("#000000", "v"),
    "mixed": RoleStyle("#9da1a8", "o"),
    "broad": RoleStyle("#f0c000", "h"),
    "sink on the first token": RoleStyle("#225522", "s"),
    "sink on special tokens": RoleStyle("#aadd88", "P"),
}
"""Colour and marker of each role by the role's name, in the order of legends."""

UNKNOWN_ROLE = RoleStyle("#5c5c5c", "X")
"""Style of a role with a name that is not in `ROLE_STYLES`."""


def role_style(role: str) -> RoleStyle:
    """Return the colour and marker of a role by the role's name; grey for an unknown name.

    >>> role_style("induction")
    RoleStyle(colour='#d55e00', marker='^')
    """
    return ROLE_STYLES.get(role, UNKNOWN_ROLE)


def in_legend_order(roles: Iterable[str]) -> list[str]:
    """Return the different names in `roles` in the order of legends: roles that headwise assigns, then other names in
    alphabetical order.
    """
    distinct = set(roles)
    return [role for role in ROLE_STYLES if role in distinct] + sorted(distinct - ROLE_STYLES.keys())
