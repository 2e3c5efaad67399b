"""Gates on the heads of any model: the `gate` context manager.

A gate multiplies a head's output before the output projection (Michel, Levy and Neubig 2019, equation 2). The model
keeps its own attention kernels; attention weights are not needed.
"""

import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.gate_interceptor import GateInterceptor, GateValue, HeadGate
from headwise.analysis.replacements import Replacement
from headwise.checks import finite_number, flag, named_head, require_module
from headwise.errors import InputError
from headwise.intercept.install import intercepted
from headwise.intercept.layer_index import module_paths_of_layer

POSITIONS = "whole numbers, or a boolean tensor (queries,) or (batch, queries)"


@contextmanager
def gate(
    model: Any,
    values: Mapping[Any, GateValue],
    *,
    groups: bool = False,
    positions: Iterable[int] | Tensor | None = None,
    sites: Iterable[Any] = (),
) -> Iterator[None]:
    """Multiply the outputs of heads by factors, or replace them, before the output projection, while the context is
    active. `values` maps `(layer, head)`, or a layer, to a factor or replacement; `positions` selects queries to gate.

    With o_h the output of head h (attention weights times values) and W_h its columns of the output projection, the
    attention module computes

        sum_h W_h (g_h o_h) + b

    where g_h is the gate's factor, 1 without a gate (Michel, Levy and Neubig 2019, eq. 2). A replacement replaces o_h.

        with hw.gate(model, {(3, 5): 0.0, (4, 1): hw.replacements.mean(texts), 7: 0.5}):
            model(**inputs)     # head 3.5 is off, 4.1 is replaced by its mean, and layer 7 is halved

    The model runs on its own attention kernels, with gradients, caches and generation. Contexts can be nested: an inner
    gate changes the output of an outer one. `watch` reports attention before gates. A norm of the heads between
    attention and the output projection, as in differential attention, is applied after the gate.

    Args:
        model: any module that `watch` supports.
        values: gates by `(layer, head)`, zero-based, or by `layer` for all its heads. A layer is its number or the path
            of its attention module. A value is

            - a number, which multiplies the head's output;
            - a float tensor, which may require gradients. For one head it broadcasts to `(batch, queries)`. For a layer
              its shape is `()`, `(heads,)`, `(batch, heads)` or `(batch, heads, queries)`;
            - one of `hw.replacements`: `zero()`, `uniform()`, `mean(dataset)`, `resample(batch)`, `patch(run)`.

            Several values of one head are all applied: replacements first, in their order, and then factors.
        groups: count heads by key/value group: `(layer, group)` is all heads of a group, and a tensor of a layer has
            one number per group. In a model that repeats keys and values itself, each head is a group.
        positions: gate only these queries of each call: indices, negative ones from the end, or a boolean tensor
            `(queries,)` or `(batch, queries)`. All queries by default. A module must attend with all queries of a call
            at once, in the order of tokens.
        sites: `Site` objects, which state what cannot be derived about the attention of a module, as in `watch`.

    Raises:
        InputError: a layer, head or position does not exist; a value has another type or shape; `model` is not a
            module, or is compiled. While the model runs: a gated module computes something like attention that cannot
            be changed. At the end of the context, if the model ran: no attention was intercepted in a gated
            module or a module of `sites`, or the run showed that a layer's number is another module's.
    """
    require_module(model)
    gates = _gates_by_module(model, values)
    gated_positions = _positions_tensor(positions)
    gates = _prepared(gates, model)
    interceptor = GateInterceptor(gates, groups=flag("groups", groups), positions=gated_positions)
    sites = list(sites)
    with intercepted(model, interceptor, sites, "hw.gate"):
        yield
    interceptor.require_intercepted(model, [site.path for site in sites])


def _gates_by_module(model: nn.Module, values: Mapping[Any, GateValue]) -> dict[str, list[HeadGate]]:
    """Check the mapping `values`, from heads `(layer, head)` or whole layers to gates (factors or replacements of head
    outputs). Return the gates of each attention module by its path. If several modules may have a layer number, each of
    them has the gate.
    """
    if not isinstance(values, Mapping):
        raise InputError("values", expected="a mapping {(layer, head): value}", got=type(values).__name__)
    gates: dict[str, list[HeadGate]] = {}
    paths = {path for path, _ in model.named_modules()}
    for name, value in values.items():
        key = name if isinstance(name, str) and name in paths else named_head(name)
        layer, head = key if isinstance(key, tuple) and len(key) == 2 else (key, None)
        layer, head_index = layer if isinstance(layer, str) else _as_index(layer), _as_index(head)
        if layer is None or (head is not None and head_index is None):
            raise InputError("values", expected="keys (layer, head) or layer", got=repr(key))
        gate = HeadGate(head_index, _checked_value(value, head_index), layer if isinstance(layer, int) else None)
        for path in module_paths_of_layer(model, layer):
            gates.setdefault(path, []).append(gate)
    return gates


def _prepared(gates: Mapping[str, list[HeadGate]], model: nn.Module) -> dict[str, list[HeadGate]]:
    """Return the gates (factors or replacements of head outputs) of each module, by path. Each replacement among them
    is exchanged for the result of its method `prepare`, which may run the model. A replacement that several gates share
    is prepared once, for all modules that use it.
    """
    modules: dict[int, tuple[Replacement, list[str]]] = {}
    for path, module_gates in gates.items():
        for _, value, _ in module_gates:
            if isinstance(value, Replacement):
                paths = modules.setdefault(id(value), (value, []))[1]
                paths.extend([] if path in paths else [path])
    prepared: dict[int, GateValue] = {
        key: replacement.prepare(model, paths) for key, (replacement, paths) in modules.items()
    }
    return {
        path: [gate._replace(value=prepared.get(id(gate.value), gate.value)) for gate in module_gates]
        for path, module_gates in gates.items()
    }


def _as_index(value: Any) -> int | None:
    """Return `value` as an int; None if it is a boolean, a float, or anything else that is not an integer."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _checked_value(value: Any, head: int | None) -> GateValue:
    """Check the value of a gate and return it; a number is converted to float. Allowed are a finite number (factor of a
    head's output), a `Replacement` of the output, or a float tensor of factors. The tensor has at most 2 axes for one
    head or key/value group, and at most 3 for a layer (`head` is None). Anything else raises `InputError`.
    """
    if isinstance(value, Replacement):
        return value
    if isinstance(value, Tensor):
        most_axes = 2 if head is not None else 3
        if not value.is_floating_point() or value.ndim > most_axes:
            got = f"{value.dtype} of shape {tuple(value.shape)}"
            raise InputError("value", expected=f"a float tensor of at most {most_axes} dimensions", got=got)
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        expected = "a number, a tensor, or one of hw.replacements: zero(), uniform(), mean(), resample(), patch()"
        raise InputError("value", expected=expected, got=repr(value))
    return finite_number("value", value)


def _positions_tensor(positions: Any) -> Tensor | None:
    """Check query positions and return them as a tensor: indices with one axis, or booleans with one or two axes. None,
    which stands for all queries, is returned unchanged; anything else raises `InputError`.
    """
    if positions is None:
        return None
    try:
        tensor = positions if isinstance(positions, Tensor) else torch.as_tensor(list(positions))
    except (TypeError, ValueError, RuntimeError):
        raise InputError("positions", expected=POSITIONS, got=repr(positions)) from None
    if not tensor.numel() and tensor.dtype != torch.bool:
        tensor = tensor.long()  # torch makes a float tensor of an empty list
    most_axes = 2 if tensor.dtype == torch.bool else 1
    if tensor.is_floating_point() or tensor.is_complex() or not 1 <= tensor.ndim <= most_axes:
        raise InputError("positions", expected=POSITIONS, got=f"{tensor.dtype} of shape {tuple(tensor.shape)}")
    return tensor
