"""`qk_clip`: scale query and key projections, so that no head's attention logits exceed a threshold."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from headwise.checks import finite_number, is_whole, named_head, require_module
from headwise.data.batches import arguments_of
from headwise.errors import InputError
from headwise.families.registry import softcap_of
from headwise.intercept.layer_index import innermost_attention_modules, module_paths_of_layer
from headwise.monitoring.head_slices import (
    HeadSlices,
    derived_slices,
    head_slices,
    is_known,
    require_scalable,
    scale_slices,
)
from headwise.monitoring.history import History, Row
from headwise.monitoring.monitor import Monitor, inner_model
from headwise.wording import counted


class ClippedHead(NamedTuple):
    """Attention head with its largest logit, and the factor by which `qk_clip` multiplied its logits to limit them.

    Attributes:
        layer: number of the layer.
        head: number of the head.
        module: path of the attention module.
        logit: largest logit before.
        factor: factor of the head's logits.
    """

    layer: int
    head: int
    module: str
    logit: float
    factor: float = 1.0


_USED: WeakKeyDictionary[nn.Module, tuple[ReferenceType[History], int]] = WeakKeyDictionary()
"""History and step whose logits were used last for each model. The same logits a second time would scale heads again
whose logits were scaled since."""


def qk_clip(
    model: nn.Module,
    logits: Monitor | History | Mapping[tuple[int, int], float],
    threshold: float = 100.0,
    *,
    inputs: Mapping[str, Any] | Tensor | None = None,
) -> list[ClippedHead]:
    """Reduce the largest attention logit of each head to at most a threshold (QK-clip, Kimi Team 2025, section 2.1).
    The head's query projection, and its key projection unless heads share it, are scaled in place. Heads whose largest
    logit is below the threshold are unchanged. Call this function after each step of the optimizer.

    With S_h the largest logit of head h, its logits are multiplied by gamma_h = threshold / S_h if that is below 1:

    - weights and biases of both projections by sqrt(gamma_h), if the head has its own key;
    - those of the query alone by gamma_h, if heads share the key (grouped queries);
    - in latent attention, the parts of query and key that are not rotated by sqrt(gamma_h), the rotated part of the
      query by gamma_h, and nothing of the rotated key, which all heads share.

    All other heads of the module keep their logits exactly. With a softcap, S_h is the largest logit before it. An
    additive bias, such as ALiBi or a float mask, is part of S_h otherwise, and is not scaled: where it is not
    positive, the largest logit becomes the threshold or less.

    Args:
        model: the model that trains. It may be compiled, in DistributedDataParallel, or sharded by `fully_shard`; call
            `qk_clip` in every process then.
        logits: the monitor of the model, or its history, of which the last observed step is used once: until a further
            step is observed, nothing is scaled. Or the largest logit of each head by `(layer, head)`.
        threshold: largest accepted logit.
        inputs: arguments of the model by name, or its first argument. Attention modules of unknown classes, such as
            hand-written ones, run on them, to derive which rows of their linear maps compute the query and the key of
            each head. By default those of the latest observed call of the model, if `logits` is its monitor.

    Returns:
        the heads that were scaled, with their factors of the logits.

    Raises:
        InputError: a module is not supported, such as one with a norm of queries and keys; a module of an unknown class
            has no linear maps that its logits follow, or there are no inputs to derive them; projections are shared;
            logits are missing or not finite. Nothing is scaled then.

    Example:
        optimizer.step()
        monitor.step()
        clipped = hw.qk_clip(model, monitor)
    """
    model = inner_model(require_module(model))
    threshold = finite_number("threshold", threshold, above=0.0)
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

        for path, module in model.named_modules():
            if isinstance(module, FullyShardedDataParallel):
                got = f"FullyShardedDataParallel at {path or 'the model'}"
                remedy = "fully_shard keeps single parameters"
                raise InputError("model", expected="a model with its own parameters", got=got, remedy=remedy)
            if isinstance(module, FSDPModule):
                module.reshard()  # the optimizer changes the sharded parameters, not the gathered ones
    history = logits.history if isinstance(logits, Monitor) else logits
    if isinstance(history, History):
        if history.latest is None and not history.begins_unobserved:
            remedy = "call monitor.step() first, after the step of the optimizer"
            raise InputError("logits", expected="a history with an observed step", got="none", remedy=remedy)
        other, used_step = _USED.get(model, (None, None))
        is_used = other is not None and other() is history and used_step == history.latest
        # After a training resumed between observed steps, the logits in its folder were used before the checkpoint.
        if history.latest is None or is_used:
            return []
        head_logits = _of_rows(model, history.rows(history.latest))
    else:
        head_logits = _of_mapping(model, logits)
    if isinstance(logits, Monitor) and inputs is None:
        inputs = logits.inputs
    slices_of = _slices_of_modules(model, head_logits, inputs, is_complete=isinstance(history, History))
    above = (each for each in head_logits if each.logit > threshold)
    clipped = [each._replace(factor=threshold / each.logit) for each in above]
    factors = {piece: each.factor**piece.exponent for each in clipped for piece in slices_of[each.module][each.head]}
    require_scalable(model, factors)
    scale_slices(model, factors)
    if isinstance(history, History) and history.latest is not None:
        _USED[model] = ref(history), history.latest
    return clipped


def _of_rows(model: nn.Module, rows: Iterable[Row]) -> list[ClippedHead]:
    """Return the largest logit of each head from the rows of a recorded step. It is the logit before a softcap, and the
    larger one of self- and cross-attention if a module computes both.
    """
    modules = dict(model.named_modules())
    logits: dict[tuple[str, int], ClippedHead] = {}
    for row in rows:
        place = f"head {row['head']} of {row['module'] or 'the model'}"
        is_capped = softcap_of(modules.get(row["module"])) is not None
        uncapped = row.get("max_logit_uncapped")
        logit = row.get("max_logit") if uncapped is None and not is_capped else uncapped
        if logit is None:
            name = "max_logit_uncapped" if is_capped else "max_logit"
            remedy = "observe max_logit; the argument layers of monitor leaves out modules without"
            raise InputError("logits", expected=f"{name} of every head", got=f"none of {place}", remedy=remedy)
        if not math.isfinite(logit) or row["nonfinite_rows"]:
            got = f"{logit} for {place}, with {counted(row['nonfinite_rows'], 'query row')} that are not finite"
            raise InputError("logits", expected="finite numbers", got=got)
        other = logits.get((row["module"], row["head"]))
        if other is None or logit > other.logit:
            logits[row["module"], row["head"]] = ClippedHead(row["layer"], row["head"], row["module"], logit)
    return list(logits.values())


def _of_mapping(model: nn.Module, logits: Any) -> list[ClippedHead]:
    """Return the largest logit of each head from a mapping by `(layer, head)`, with the path of the attention module.
    Raise `InputError` if a layer does not have exactly one attention module.
    """
    if not isinstance(logits, Mapping):
        expected = "a Monitor, a History, or a mapping from (layer, head) to a logit"
        raise InputError("logits", expected=expected, got=type(logits).__name__)
    of_heads: list[tuple[tuple[int, int], float]] = []
    for name, value in logits.items():
        key = named_head(name)
        if not (isinstance(key, tuple) and len(key) == 2 and all(is_whole(number, 0) for number in key)):
            raise InputError("logits", expected="keys (layer, head)", got=repr(key))
        try:
            of_heads.append((key, finite_number("logits", value)))
        except InputError:
            got = f"{value!r} for layer {key[0]}, head {key[1]}"
            raise InputError("logits", expected="finite numbers", got=got) from None
    modules, paths = dict(model.named_modules()), {}
    is_named = bool(innermost_attention_modules(modules, modules))
    for layer in {layer for (layer, _), _ in of_heads}:
        of_layer = module_paths_of_layer(model, layer) if is_named else []
        if len(of_layer) != 1:
            remedy = "pass the monitor or its history, which name modules"
            got = f"layer {layer} for {', '.join(of_layer) or 'no module, since no class is called attention'}"
            raise InputError("logits", expected="layers with one attention module each", got=got, remedy=remedy)
        paths[layer] = of_layer[0]
    return [ClippedHead(layer, head, paths[layer], logit) for (layer, head), logit in sorted(of_heads)]


_DERIVED: WeakKeyDictionary[nn.Module, tuple[str, HeadSlices]] = WeakKeyDictionary()
"""Path and slices of modules of unknown classes. `require_scalable` verifies the projections each time."""


def _derived(model: nn.Module, heads: Mapping[str, int | None], inputs: Any) -> dict[str, HeadSlices]:
    """Return the slices of parameters that compute each head's query and key, by the path of the attention module, for
    modules whose class headwise does not know. They are derived from a run on `inputs`, and kept for later calls.
    """
    known = {path: _DERIVED.get(model.get_submodule(path), ("", ())) for path in heads}
    slices = {path: of_heads for path, (name, of_heads) in known.items() if of_heads and name == path}
    missing = {path: number for path, number in heads.items() if path not in slices}
    if missing:
        path = next(iter(missing))
        arguments = None if inputs is None else arguments_of(inputs)
        if arguments is None:
            name = type(model.get_submodule(path)).__name__
            remedy = "pass the monitor, or inputs=, arguments of the model to derive its projections"
            got = f"{name} in {path or 'the model'}, whose class is unknown"
            raise InputError("model", expected="attention modules of known families", got=got, remedy=remedy)
        derived = derived_slices(model, missing, arguments)
        _DERIVED.update({model.get_submodule(path): (path, of_heads) for path, of_heads in derived.items()})
        slices |= derived
    return slices


def _slices_of_modules(
    model: nn.Module, head_logits: Iterable[ClippedHead], inputs: Any, *, is_complete: bool
) -> dict[str, HeadSlices]:
    """Return the slices of parameters that compute each head's query and key, by the path of the attention module. For
    modules whose class headwise does not know, the slices are derived from a run on `inputs`. `head_logits` names the
    heads. If `is_complete` is True, these are all heads of their modules.
    """
    heads_of: dict[str, set[int]] = {}
    for each in head_logits:
        heads_of.setdefault(each.module, set()).add(each.head)
    modules = dict(model.named_modules())
    slices_of: dict[str, HeadSlices] = {}
    unknown: dict[str, int | None] = {}
    for path, heads in heads_of.items():
        if path not in modules:
            raise InputError("logits", expected="logits of attention modules of this model", got=f"those of {path}")
        if not is_known(modules[path]):
            unknown[path] = len(heads) if is_complete else None
        else:
            slices_of[path] = head_slices(model, path)
    if unknown:
        slices_of |= _derived(model, unknown, inputs)
    for path, heads in heads_of.items():
        count = len(slices_of[path])
        if max(heads) >= count or (is_complete and len(heads) != count):
            place = path or type(modules[path]).__name__
            raise InputError("logits", expected=f"those of heads 0 to {count - 1} of {place}", got=sorted(heads))
    return slices_of
