"""Layout of attention weights as a user states it, such as `(b h) q k`, and the heads that it names."""

import re
from collections.abc import Sequence

from torch import Size

from headwise.errors import InputError
from headwise.intercept.trace.axes import Factor, HeadLayout

Names = tuple[tuple[str, ...], ...]
"""Names of the parts of each axis, the one that changes slowest first."""

_AXIS = re.compile(r"\(([^()]*)\)|(\S+)")


def axis_names(layout: str) -> Names:
    """Return the names of the axes in a layout such as "(b h) q k", which the user states. Names in parentheses are
    parts of one axis. The names `h`, `q` and `k` are the heads, the queries and the keys; all others are sequences.

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
    """Return which axes of an attention output are heads, queries and values. The user has stated this for the axes of
    the module's attention weights, as a text such as "(b h) q k".

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
