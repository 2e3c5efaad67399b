"""Statements of users about the attention of a module, for what cannot be derived."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Size, nn

from headwise.errors import InputError
from headwise.intercept.trace.axes import Factor, HeadLayout

Names = tuple[tuple[str, ...], ...]
"""Names of the parts of each axis, the one that changes slowest first."""

_AXIS = re.compile(r"\(([^()]*)\)|(\S+)")


def axis_names(layout: str) -> Names:
    """Return the names of the axes in a layout that the user states, such as "(b h) q k". Names in parentheses are
    parts of one axis. The names `h`, `q` and `k` mean heads, queries and keys; all other names mean sequences.

    Raises:
        InputError: a name is missing or occurs twice, or the heads are in the middle of an axis.
    """
    names = tuple(tuple((inner or outer).split()) for inner, outer in _AXIS.findall(layout))
    flat = [name for axis in names for name in axis]
    is_complete = {"h", "q", "k"} <= set(flat) and len(set(flat)) == len(flat) and ("k",) in names
    of_heads = next((axis for axis in names if "h" in axis), ())
    if not is_complete or not all(map(str.isidentifier, flat)) or "h" in of_heads[1:-1]:
        expected = "axes of the attention weights, such as 'b h q k' or '(b h) q k'"
        raise InputError("layout", expected=expected, got=repr(layout))
    return names


def stated_head_layout(
    path: str, layout: str, heads: int | None, shape: Size, value_axis: int, weight_axes: Sequence[int | None]
) -> HeadLayout:
    """Return which axes of an attention output are heads, queries and values. They follow from `layout`, the user's
    statement about the axes of the module's attention weights, such as "(b h) q k".

    Args:
        path: path of the module.
        layout: layout of the weights.
        heads: number of heads; None if they have an axis of their own.
        shape: shape of the output.
        value_axis: axis of the values in the output.
        weight_axes: the axis of the weights that each axis of the output is, without that of the values; None if it is
            none.

    Raises:
        InputError: the weights have another number of axes, or an axis has no whole number of heads.
    """
    names = [axis for axis in axis_names(layout) if axis != ("k",)]
    known = sorted(axis for axis in weight_axes if axis is not None)
    got = f"an output of shape {tuple(shape)}"
    if len(known) != len(names):
        raise InputError("sites", expected=f"weights with axes {layout!r} in {path}, as stated", got=got)
    others = [axis for axis in range(len(shape)) if axis != value_axis]
    by_axis = {axis: names[known.index(w)] for axis, w in zip(others, weight_axes, strict=True) if w is not None}
    axis = next(axis for axis, parts in by_axis.items() if "h" in parts)
    parts, size = by_axis[axis], shape[axis]
    count = size if len(parts) == 1 else heads
    if count is None or size % count:
        expected = f"a number of heads that divides axis {' '.join(parts)!r} in {path}; state heads="
        raise InputError("sites", expected=expected, got=f"{count} and {got}")
    stride = 1 if parts[-1] == "h" else size // count
    queries = tuple(axis for axis, parts in by_axis.items() if "q" in parts)
    return HeadLayout(tuple(shape), value_axis, queries, (Factor(axis, stride, count),) if count > 1 else ())


KINDS = ("self", "cross")


@dataclass(frozen=True)
class Site:
    """User's statement about the attention that one module of a model computes: its number of heads, its kind (self- or
    cross-attention), and the axes of its attention weights. `watch` and `gate` accept such statements in the argument
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
        """Return True for cross-attention, False for self-attention, and None if the kind is unknown. The kind is the
        one that the user states, or by default `derived`, the kind found in the model.

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
        """Return the layout of an attention output as the user states it: which of its axes are heads, queries and
        values. Return None if the user states no layout.

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
    """Check the user's statements about the attention of modules of `model`. Return the statements by module path.

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
