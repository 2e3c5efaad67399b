"""Removal of heads from a model: rows and columns of its projections, and the numbers that its modules store.

A model of `transformers` records the remaining heads in its configuration, unless the configuration's own fields can
state them. Such a record is saved with the model, and read by `headwise.load`.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from headwise.errors import InputError
from headwise.removal.families import head_module
from headwise.removal.head_axes import HeadAxis, KeptHeads
from headwise.removal.head_module import HeadModule
from headwise.removal.shared_bias import separate_biases

RECORD = "headwise_kept_heads"
"""Field of a configuration with the remaining heads: for each path of an attention module the indices of its query
heads, among those of the dense model."""


def remove_heads(model: nn.Module, kept: Mapping[str, KeptHeads], *, may_record: bool = True) -> None:
    """Remove all other heads than those in `kept` from attention modules of a model, in place, and let the model's
    configuration state the remaining ones.

    Args:
        model: the model.
        kept: remaining heads of some attention modules, by the path of the module.
        may_record: True to record the heads in the configuration if its own fields cannot state them.

    Raises:
        InputError: a module is of no known family, or stores other numbers than its heads imply; the family needs
            equally many heads in all layers; the fields of the configuration cannot state the heads, and `may_record`
            is False; or heads were removed before that the configuration records, whose numbers are of the dense model.
    """
    if hasattr(getattr(model, "config", None), RECORD):
        expected = "one without removed heads that its configuration records"
        remedy = "prune the dense model by one plan"
        raise InputError("model", expected=expected, got="one with such heads", remedy=remedy)
    modules = _remove(model, kept)
    _state_heads(model, modules, kept, may_record=may_record)


def remove_recorded_heads(model: nn.Module, record: Mapping[str, Sequence[int]]) -> None:
    """Remove the heads from a dense model that were removed from the model whose configuration has this record. Paths
    of modules may lack the prefix of the model that was saved, or have one in addition.

    Raises:
        InputError: the model has no such module, or not these heads.
    """
    paths = dict(model.named_modules())
    prefix = getattr(model, "base_model_prefix", "") + "."
    kept = {}
    for saved, query in record.items():
        path = next((each for each in (saved, saved.removeprefix(prefix), prefix + saved) if each in paths), None)
        if path is None:
            raise InputError("model", expected=f"a module {saved}, whose heads were removed", got=type(model).__name__)
        kept[path] = head_module(model, path).kept(query)
    _remove(model, kept)


def _remove(model: nn.Module, kept: Mapping[str, KeptHeads]) -> dict[str, HeadModule]:
    """Remove all other heads than those in `kept` from attention modules of a model, in place, and return the dense
    modules' places of heads.
    """
    separate_biases(model, kept)
    modules = {path: head_module(model, path) for path in kept}
    for path, heads in kept.items():
        keep_heads(model, modules[path], heads)
    return modules


@torch.no_grad()
def keep_heads(model: nn.Module, module: HeadModule, kept: KeptHeads) -> None:
    """Remove all other heads than `kept` from one attention module of a model, in place."""
    for axis in module.axes:
        parameter = parameter_with_heads(model, module, axis)
        owner_path, _, name = axis.parameter.rpartition(".")
        owner: Any = model.get_submodule(owner_path)
        indices = axis.kept_indices(kept).to(parameter.device)
        sliced = nn.Parameter(parameter.detach().index_select(axis.axis, indices), parameter.requires_grad)
        setattr(owner, name, sliced)
        if name == "weight" and isinstance(owner, nn.Linear):
            owner.out_features, owner.in_features = sliced.shape
        elif name == "weight" and hasattr(owner, "nf"):  # `Conv1D` of transformers
            owner.nx, owner.nf = sliced.shape
        elif isinstance(owner, nn.Embedding):
            owner.embedding_dim = sliced.shape[1]
    module.set_counts(model.get_submodule(module.path), kept)


def parameter_with_heads(model: nn.Module, module: HeadModule, axis: HeadAxis) -> nn.Parameter:
    """Return the parameter of an axis.

    Raises:
        InputError: the axis has another length than all heads together.
    """
    parameter = model.get_parameter(axis.parameter)
    if parameter.shape[axis.axis] != axis.length:
        got = f"length {parameter.shape[axis.axis]} of {axis.parameter}"
        raise InputError("model", expected=f"{axis.length} numbers for {module.num_heads} heads", got=got)
    return parameter


def _state_heads(
    model: Any, modules: Mapping[str, HeadModule], kept: Mapping[str, KeptHeads], *, may_record: bool
) -> None:
    """Let the configuration of a `transformers` model state the remaining heads: by its own fields if a model made from
    it has the same shapes, otherwise by a record.
    """
    config = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return
    own_fields = _own_fields(model, modules, kept)
    if own_fields is not None and _shapes_of_new(model, own_fields) == _shapes(model):
        for each in _same_parts(model, own_fields):
            for name, value in each[1].items():
                setattr(each[0], name, value)
        return
    if not may_record:
        expected = "a model whose configuration can state the remaining heads"
        raise InputError("model", expected=expected, got=type(model).__name__)
    if own_fields is not None and any(module.reads_config for module in modules.values()):
        expected = "a model whose configuration can state fewer heads"
        raise InputError("model", expected=expected, got=f"a {type(model).__name__} that transformers cannot make anew")
    if any(module.reads_config for module in modules.values()):
        expected = f"equally many heads in all layers of a {type(model).__name__}, which its configuration states"
        raise InputError("heads", expected=expected, got="different numbers")
    setattr(config, RECORD, {path: list(heads.query) for path, heads in kept.items()})


def loader_of(model: nn.Module, kept: Mapping[str, Sequence[int]]) -> str:
    """Return what loads a model without other heads than those in `kept`, when it is saved: "transformers", if the
    fields of its configuration can state them; otherwise "headwise". Return "none" for a model that is not of
    `transformers`.

    Args:
        model: the dense model.
        kept: query heads that remain, by the path of the attention module.

    Raises:
        InputError: the model has no such module, or the module not these heads; or nothing could load the model.
    """
    if not hasattr(getattr(model, "config", None), "to_dict"):
        return "none"
    # The memo of copies puts meta tensors in the places of all tensors.
    shells: dict[int, Any] = {id(each): each.detach().to("meta") for each in model.buffers()}
    shells |= {id(each): nn.Parameter(each.detach().to("meta"), each.requires_grad) for each in model.parameters()}
    pruned = deepcopy(model, shells)
    remove_heads(pruned, {path: head_module(model, path).kept(query) for path, query in kept.items()})
    return loader_of_pruned(pruned)


def loader_of_pruned(pruned: nn.Module) -> str:
    """Return what loads a model whose heads were removed, as `loader_of` does for a dense one."""
    config = getattr(pruned, "config", None)
    if not hasattr(config, "to_dict"):
        return "none"
    return "headwise" if hasattr(config, RECORD) else "transformers"


def _own_fields(
    model: Any, modules: Mapping[str, HeadModule], kept: Mapping[str, KeptHeads]
) -> dict[str, dict[str, int]] | None:
    """Return values for fields of a model's configuration that state the remaining heads, by the part of the
    configuration; None if the modules differ, or have no such fields.
    """
    stated: dict[str, dict[str, int]] = {}
    for path, module in modules.items():
        part = _part_name(model.config, getattr(model.get_submodule(path), "config", None))
        if part is None or not module.config_fields:
            return None
        numbers = {"heads": len(kept[path].query), "kv_heads": len(kept[path].kv), "head_dim": module.head_dim}
        fields = {field: numbers[name] for name, field in module.config_fields.items()}
        if stated.setdefault(part, fields) != fields:
            return None
    return stated


def _part_name(config: Any, part: Any) -> str | None:
    """Return the name of the field of a configuration that is `part`; empty for the configuration itself, or a copy of
    it, as the stacks of T5 have; None if there is none.
    """
    if type(part) is type(config):
        return ""
    return next((name for name, value in vars(config).items() if value is part), None)


def _part(config: Any, name: str) -> Any:
    """Return the part of a configuration with this name."""
    return getattr(config, name) if name else config


def _same_parts(model: Any, fields_of: Mapping[str, Mapping[str, int]]) -> list[tuple[Any, Mapping[str, int]]]:
    """Return the parts of a model's configuration with these fields, and all copies of them in its modules that state
    the same heads; each with the fields.
    """
    held = {id(each): each for module in model.modules() if (each := getattr(module, "config", None)) is not None}
    pairs: list[tuple[Any, Mapping[str, int]]] = []
    for name, fields in fields_of.items():
        part = _part(model.config, name)
        old = {field: getattr(part, field, None) for field in fields}
        copies = [
            each
            for each in held.values()
            if each is not part
            and type(each) is type(part)
            and all(getattr(each, field, None) == value for field, value in old.items())
        ]
        pairs += [(each, fields) for each in (part, *copies)]
    return pairs


def _shapes_of_new(model: Any, own_fields: Mapping[str, Mapping[str, int]]) -> dict[str, torch.Size] | None:
    """Return the shapes of a new model with these fields in its configuration, as it is saved and loaded; None if it
    cannot be made, such as if `transformers` finds the fields inconsistent.
    """
    config = deepcopy(model.config)
    for part, fields in own_fields.items():
        for name, value in fields.items():
            setattr(_part(config, part), name, value)
    try:
        with torch.device("meta"):
            return _shapes(type(model)(type(config).from_dict(config.to_dict())))
    except Exception:  # each class has its own requirements
        return None


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shape of each entry of a model's state dict."""
    return {name: value.shape for name, value in model.state_dict().items()}
