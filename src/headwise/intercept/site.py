"""Statements of users about the attention of a module, for what cannot be derived."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Size, nn

from headwise.errors import InputError
from headwise.intercept.stated_layout import axis_names, stated_head_layout
from headwise.intercept.trace.axes import HeadLayout

KINDS = ("self", "cross")


@dataclass(frozen=True)
class Site:
    """Statement of the user about the attention that one module of a model computes: its number of heads, its kind
    (self- or cross-attention), and the axes of its attention weights. `watch` and `gate` accept it as an element of
    `sites`.

    The statement is used where these properties cannot be derived from the model. Otherwise it is compared with the
    derived ones.

        hw.watch(model, sites=[hw.Site("blocks.0.mixer", heads=8, kind="self")])

    Attributes:
        path: path of the module, as in `model.named_modules()`.
        heads: number of heads; None to derive it.
        kind: "self" or "cross"; None to derive it.
        layout: axes of the attention weights that the module multiplies with values, such as "b h q k" or "(b h) q k".
            The names h, q and k are heads, queries and keys; all others are sequences, and an axis in parentheses has
            several parts. None to derive it.

    Raises:
        InputError: an attribute has another type or value.
    """

    path: str
    heads: int | None = None
    kind: str | None = None
    layout: str | None = None

    def __post_init__(self) -> None:
        if self.heads is not None and (type(self.heads) is not int or self.heads < 1):
            raise InputError("heads", expected="a positive whole number or None", got=repr(self.heads))
        if self.kind is not None and self.kind not in KINDS:
            raise InputError("kind", expected="'self', 'cross' or None", got=repr(self.kind))
        if self.layout is not None:
            axis_names(self.layout)

    def resolved_cross(self, derived: bool | None) -> bool | None:
        """Return True for cross-attention, False for self-attention: the kind that the user states, or else the derived
        kind. Return None if it is neither derived nor stated.

        Raises:
            InputError: the derived kind is not the stated one.
        """
        if self.kind is None:
            return derived
        stated = self.kind == "cross"
        if derived not in (None, stated):
            expected = f"attention in {self.path} of the stated kind {self.kind!r}"
            raise InputError("sites", expected=expected, got=f"{KINDS[bool(derived)]!r}")
        return stated

    def head_layout(self, shape: Size, value_axis: int, weight_axes: Sequence[int | None]) -> HeadLayout | None:
        """Return the layout of the heads in an attention output, as the user states it. Return None if the user states
        no layout.

        Args:
            shape: shape of the output.
            value_axis: its axis of values.
            weight_axes: axes of the weights that its other axes are, as in `stated_head_layout`.

        Raises:
            InputError: the output cannot have this layout.
        """
        if self.layout is None:
            return None
        return stated_head_layout(self.path, self.layout, self.heads, shape, value_axis, weight_axes)

    def require_heads(self, derived: int) -> None:
        """Raise `InputError` if the user states a number of heads that differs from `derived`, the number found in the
        model.
        """
        if self.heads not in (None, derived):
            raise InputError("sites", expected=f"{self.heads} heads in {self.path}, as stated", got=derived)


def sites_by_path(model: nn.Module, sites: Iterable[Any]) -> dict[str, Site]:
    """Check the user's statements about the attention of modules of `model`. Return them by the path of their module.

    Raises:
        InputError: an element is no `Site`, the model has no such module, or two are about the same module.
    """
    sites = list(sites)
    paths, by_path = {path for path, _ in model.named_modules()} if sites else set(), dict[str, Site]()
    for site in sites:
        if not isinstance(site, Site):
            raise InputError("sites", expected="a list of headwise.Site", got=repr(site))
        if site.path not in paths:
            raise InputError("sites", expected="paths of modules of the model", got=repr(site.path))
        if site.path in by_path:
            raise InputError("sites", expected="one statement for each module", got=f"two for {site.path}")
        by_path[site.path] = site
    return by_path
