"""Formulas of `torch.utils.flop_counter` for the native operators.

They count what torch counts for `scaled_dot_product_attention`: all scores, also those that a mask hides. A mask that
is evaluated in parts leaves out keys, which are not counted.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

Shape = torch.Size


def register() -> None:
    """Register the formulas with torch's counter of operations if it has been imported, and with the counters that are
    active. Importing it here would take as long as importing a large part of torch.
    """
    counter: Any = sys.modules.get("torch.utils.flop_counter")
    if counter is None or not hasattr(torch.ops.headwise, "attend_forward"):
        return
    for name, formula in FORMULAS.items():
        operator = getattr(torch.ops.headwise, name)
        if operator not in counter.flop_registry:
            counter.register_flop_formula(operator)(formula)
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, counter._FlopCounterMode):  # it copied the formulas when it was made
            added = {getattr(torch.ops.headwise, name) for name in FORMULAS}
            mode.counter.flop_registry.update({each: counter.flop_registry[each] for each in added})


def _forward(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """Return the number of operations of the two products: queries with keys, and weights with values."""
    batch, heads, queries, head_dim = q
    operations: int = 2 * batch * heads * queries * k[2] * (head_dim + v[3])
    return operations


def _backward(*arguments: Any, **_: Any) -> int:
    """Return the number of operations of the five products of the backward pass, of which one computes scores again."""
    q, k, v = arguments[4:7]
    batch, heads, queries, head_dim = q
    operations: int = 2 * batch * heads * queries * k[2] * (3 * head_dim + 2 * v[3])
    return operations


def _bias_gradient(*arguments: Any, **_: Any) -> int:
    """Return the number of operations of the two products of another pass over the scores."""
    return _forward(*arguments[4:7])


FORMULAS: dict[str, Callable[..., int]] = {
    "attend": _forward,
    "attend_forward": _forward,
    "attend_statistics": _forward,
    "attend_backward": _backward,
    "attend_bias_gradient": _bias_gradient,
}
"""Formula of each operator: a function of the shapes of its tensors."""
