"""A profile as data: what every head does, in numbers with their standard errors, and the role that follows."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.analysis.roles import ROLES
from headwise.runs.table import HeadRow, HeadTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANDOM_SUFFIX = "_random"
"""What is added to a statistic's name where it was measured on random tokens."""


@dataclass(frozen=True, kw_only=True)
class ProfiledHead(HeadRow):
    """One head: its place in the model, its role, and its statistics by name."""

    role: str


class Profile(HeadTable[ProfiledHead]):
    """What every head of a model does over a data set: layer, head, kv_head, module, kind, role, and statistics."""

    NAME = "profile"
    ROW_TYPE = ProfiledHead

    def role_share(self, head: ProfiledHead) -> float:
        """The number that gave a head its role: of the data or of random tokens, whichever is larger."""
        statistic = next(role.statistic for role in ROLES if role.name == head.role)
        found = [
            head.statistics[name].value for name in (statistic, statistic + RANDOM_SUFFIX) if name in head.statistics
        ]
        return max((value for value in found if not math.isnan(value)), default=math.nan)

    def roles(self) -> dict[str, list[tuple[int, int]]]:
        """The heads `(layer, head)` of each role that any has, those roles first that say most about a head."""
        found = {role.name: [(h.layer, h.head) for h in self.heads if h.role == role.name] for role in ROLES}
        return {role: heads for role, heads in found.items() if heads}

    def plot(self, statistic: str | None = "entropy") -> "Figure":
        """See `HeadTable.plot`: the entropy, by default."""
        return super().plot(statistic)


def load_profile(folder: str | Path) -> Profile:
    """The profile that was saved in a folder.

    Raises:
        InputError: no profile there, or one that cannot be read.
        MissingExtra: pyarrow is not installed.
    """
    return Profile.load(folder)
