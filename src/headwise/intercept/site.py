"""Statements of users about the attention of a module, for what cannot be derived."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from headwise.errors import InputError

KINDS = ("self", "cross")


@dataclass(frozen=True)
class Site:
    """Statement about the attention that one module of a model computes, for `watch` and `gate`: its number of heads,
    and its kind, self- or cross-attention.

    It is used where this cannot be derived, and otherwise compared with what was derived.

        hw.watch(model, sites=[hw.Site("blocks.0.mixer", heads=8, kind="self")])

    Attributes:
        path: path of the module, as in `model.named_modules()`.
        heads: number of heads; None to derive it.
        kind: "self" or "cross"; None to derive it.

    Raises:
        InputError: an attribute has another type or value.
    """

    path: str
    heads: int | None = None
    kind: str | None = None

    def __post_init__(self) -> None:
        if self.heads is not None and (type(self.heads) is not int or self.heads < 1):
            raise InputError("heads", expected="a positive whole number or None", got=repr(self.heads))
        if self.kind is not None and self.kind not in KINDS:
            raise InputError("kind", expected="'self', 'cross' or None", got=repr(self.kind))

    def resolved_cross(self, derived: bool | None) -> bool | None:
        """Return True for cross-attention, False for self-attention: as `derived` if it is not None, else as stated.
        Return None if it is neither derived nor stated.

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

    def require_heads(self, derived: int) -> None:
        """Raise `InputError` if the derived number of heads is not the stated one."""
        if self.heads not in (None, derived):
            raise InputError("sites", expected=f"{self.heads} heads in {self.path}, as stated", got=derived)


def sites_by_path(model: nn.Module, sites: Iterable[Any]) -> dict[str, Site]:
    """Check statements about the attention of `model`, and return them by the path of their module.

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
