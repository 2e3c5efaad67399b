"""Colour and marker of each role of heads, which readers with any colour vision can distinguish.

The colours are near those of the schemes of Paul Tol (2021, "Colour schemes", SRON/EPS/TN/09-002) and of Okabe and Ito
(2008), and darker where these are pale on white. A test simulates deficiencies of colour vision and measures how much
the colours differ, and their contrast to white. Markers repeat what colours show.
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
    "next token": RoleStyle("#2d8ddf", ">"),
    "induction": RoleStyle("#bc7200", "^"),
    "duplicate token": RoleStyle("#9c4294", "D"),
    "same token": RoleStyle("#000000", "v"),
    "mixed": RoleStyle("#74797c", "o"),
    "broad": RoleStyle("#7a4e00", "h"),
    "sink on the first token": RoleStyle("#17421a", "s"),
    "sink on special tokens": RoleStyle("#6a9f52", "P"),
}
"""Colour and marker of each role by the role's name, in the order of legends."""

UNKNOWN_ROLE = RoleStyle("#424242", "X")
"""Style of a role with a name that is not in `ROLE_STYLES`."""


def role_style(role: str) -> RoleStyle:
    """Return the colour and marker of a role by the role's name; grey for an unknown name.

    >>> role_style("induction")
    RoleStyle(colour='#bc7200', marker='^')
    """
    return ROLE_STYLES.get(role, UNKNOWN_ROLE)


def in_legend_order(roles: Iterable[str]) -> list[str]:
    """Return the different names in `roles` in the order of legends: roles that headwise assigns, then other names in
    alphabetical order.
    """
    distinct = set(roles)
    return [role for role in ROLE_STYLES if role in distinct] + sorted(distinct - ROLE_STYLES.keys())
