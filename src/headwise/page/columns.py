"""Numbers of each head from one result, and their union from several, as columns of a page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from headwise.errors import InputError
from headwise.page.contents import Contents, Estimates, PageHead, PageModel, PageRole, PageStatistic


class HeadPlace(NamedTuple):
    """Values that identify a head in its model: zero-based numbers of the layer and of the head, the kind of attention
    ("self" or "cross"), and the path of the attention module.
    """

    layer: int
    head: int
    kind: str
    module: str

    def is_same(self, other: "HeadPlace") -> bool:
        """Return True if two places identify the same head. The paths of their modules may differ in a prefix, because
        a model with a language-model head contains the model without this head as a part.
        """
        shorter, longer = sorted((self.module, other.module), key=len)
        return self[:3] == other[:3] and f".{longer}".endswith(f".{shorter}")


class ModelIdentity(NamedTuple):
    """Values by which results of different models are distinguished: the number of a model's attention modules, the
    data type of its weights, and a hash. The hash is of the configuration and the weights. The weights of the layer for
    the model's task, such as a language-model head, are not included.
    """

    modules: int
    dtype: str
    digest: str

    def is_other(self, other: "ModelIdentity") -> bool:
        """Return True if two identities are certainly of different models: their hashes differ, while the number of
        modules and the data type are equal. Return False if the hashes are equal, or cannot be compared, such as those
        of a model and of its encoder.
        """
        return self[:2] == other[:2] and self.digest != other.digest


def is_identity(value: ModelIdentity | None) -> bool:
    """Return True if `value` is None, or an identity of a model whose number of modules, data type and hash have the
    right Python types.
    """
    return value is None or [type(each) for each in value] == [int, str, str]


@dataclass(frozen=True, eq=False)
class Columns:
    """Statistics of each head from one result, such as a profile or an ablation, in the form that a page shows as
    columns of a table.

    Attributes:
        model: name of the model.
        source: what the numbers were measured on, for display.
        statistics: the numbers; `estimates` has their values for each head.
        roles: name of each head's role; None where it is unknown.
        identity: identity of the model; None if it is unknown.
        data: hash of the data that the numbers were measured on; None if it is unknown.
        shown: name of the statistic by which heads are coloured and sorted when a page opens; None for roles.
        details: facts about the model and the run in words, by which two models of the same name are distinguished.
    """

    model: str
    source: str
    places: tuple[HeadPlace, ...]
    statistics: tuple[PageStatistic, ...]
    estimates: Estimates
    roles: tuple[str | None, ...]
    identity: ModelIdentity | None = None
    data: str | None = None
    shown: str | None = None
    details: Mapping[str, str] = field(default_factory=dict)

    def in_order(self, places: Sequence[HeadPlace]) -> "Columns":
        """Return these columns for the heads at `places`, in this order. Raise `InputError` if there are no numbers for
        one of these heads.
        """
        by_numbers: dict[tuple[int, int, str], list[int]] = {}
        for index, place in enumerate(self.places):
            by_numbers.setdefault(place[:3], []).append(index)
        indices = []
        for place in places:
            fitting = [index for index in by_numbers.get(place[:3], ()) if self.places[index].is_same(place)]
            if len(fitting) != 1:
                expected = f"numbers of head {place.layer}.{place.head} ({place.kind} attention in {place.module})"
                raise InputError("results", expected=expected, got=f"none in the {self.source} of {self.model}")
            indices += fitting
        estimates = Estimates(*(part[:, indices] for part in self.estimates))
        roles = tuple(self.roles[index] for index in indices)
        return replace(self, places=tuple(places), estimates=estimates, roles=roles)

    def page_heads(self) -> tuple[PageHead, ...]:
        """Return the heads in the form that a page shows. Heads with the same numbers of layer and head have names with
        the kind of attention or, if that does not suffice, with the module.
        """
        names = [f"{place.layer}.{place.head}" for place in self.places]
        if len(set(names)) < len(names):
            names = [f"{place.kind} {name}" for place, name in zip(self.places, names, strict=True)]
        if len(set(names)) < len(names):
            names = [f"{place.module} {place.head}" for place in self.places]
        return tuple(
            PageHead(name, place.layer, place.head, place.module, place.kind, role)
            for name, place, role in zip(names, self.places, self.roles, strict=True)
        )

    def contents(self, roles: tuple[PageRole, ...] = ()) -> Contents:
        """Return the contents of a page that shows these columns alone. `roles` describes the roles of heads; a head
        with another role is shown without one.
        """
        described = {role.name for role in roles}
        heads = tuple(head if head.role in described else replace(head, role=None) for head in self.page_heads())
        names = [statistic.name for statistic in self.statistics]
        opening = {} if self.shown is None else sorted_by(names.index(self.shown))
        models = (PageModel(self.model, heads, self.estimates),)
        return Contents(self.model, (), roles, self.statistics, models, opening=opening)


def sorted_by(statistic: int) -> dict[str, str]:
    """Return display settings with which a page opens: heads are coloured and sorted by the statistic with this
    index.
    """
    return {"colour": str(statistic), "sort": str(statistic), "group": "none"}


def joined_estimates(columns: Sequence[Columns], statistics: Sequence[PageStatistic]) -> Estimates:
    """Join several results for the heads of one model, and return the numbers of all heads in the order of
    `statistics`.
    """
    row_of = {
        (each.source, statistic.name): (each.estimates, row)
        for each in columns
        for row, statistic in enumerate(each.statistics)
    }
    rows = [row_of[statistic.source, statistic.name] for statistic in statistics]
    return Estimates(*(torch.stack([estimates[part][row] for estimates, row in rows]) for part in range(3)))


def estimates_of(table: Sequence[Sequence[Sequence[float]]]) -> Estimates:
    """Return the estimates in `table` as tensors. Each cell of the table has the mean, the standard error and the
    number of samples of one statistic (outer sequence) of one head (inner sequence); further numbers in a cell are
    ignored.
    """
    numbers = torch.tensor([[tuple(cell)[:3] for cell in row] for row in table], dtype=torch.float64)
    return Estimates(*numbers.view(len(table), len(table[0]) if table else 0, 3).unbind(-1))
