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
from headwise.families.head_module import HeadModule, KeptHeads
from headwise.families.registry import family_of, head_module

RECORD = "headwise_kept_heads"
"""Field of a configuration with the remaining heads: for each path of an attention module the indices of its query
heads, among those of the dense model."""


def remove_heads(model: nn.Module, kept: Mapping[str, KeptHeads], *, may_record: bool = True) -> None:
    """Remove all heads except those in `kept` from attention modules of a model, in place. The usual fields of the
    model's configuration then state the remaining heads. If these fields cannot state them, an additional field, the
    record, lists them. If `may_record` is False, or if a module reads its number of heads from the configuration,
    `InputError` is raised instead of adding the record.
    """
    if hasattr(getattr(model, "config", None), RECORD):
        expected = "one without removed heads that its configuration records"
        remedy = "prune the dense model by one plan"
        raise InputError("model", expected=expected, got="one with such heads", remedy=remedy)
    modules = _remove(model, kept)
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return
    fields_of = _own_fields(model, modules, kept)
    if fields_of is not None and _shapes_of_new(model, fields_of) == _shapes(model):
        configs = {id(each): each for each in (config, *(getattr(each, "config", None) for each in model.modules()))}
        for name, fields in fields_of.items():
            part = _part(config, name)
            configs[id(part)] = part
            before = [getattr(part, field, None) for field in fields]
            # Modules may have copies of the configuration, which state the same heads in these fields.
            for each in configs.values():
                if type(each) is type(part) and [getattr(each, field, None) for field in fields] == before:
                    for field, value in fields.items():
                        setattr(each, field, value)
        return
    if not may_record:
        expected = "a model whose configuration can state the remaining heads"
        raise InputError("model", expected=expected, got=type(model).__name__)
    families = [family_of(model.get_submodule(path)) for path in modules]
    if any(family is not None and family.reads_config for family in families):
        if fields_of is not None:
            expected, got = "a model whose configuration can state fewer heads", f"a {type(model).__name__}"
            raise InputError("model", expected=expected, got=f"{got} that transformers cannot make anew")
        expected = f"equally many heads in all layers of a {type(model).__name__}, which its configuration states"
        raise InputError("heads", expected=expected, got="different numbers")
    setattr(config, RECORD, {path: list(heads.query) for path, heads in kept.items()})


def remove_recorded_heads(model: nn.Module, record: Mapping[str, Sequence[int]]) -> None:
    """Remove heads from a dense model, in place, as the record of a saved model states. The record is a field of the
    saved model's configuration that lists the remaining heads of each module by path. The paths may have the prefix of
    the base model where those of the dense model have none, or the reverse.
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


@torch.no_grad()
def _remove(model: nn.Module, kept: Mapping[str, KeptHeads]) -> dict[str, HeadModule]:
    """Remove all heads except those in `kept` from attention modules of a model, in place, but leave the configuration
    unchanged. Return the locations of heads before the removal, by module path.
    """
    _separate_biases(model, kept)
    modules = {path: head_module(model, path) for path in kept}
    for path, heads in kept.items():
        for parameter, blocks in modules[path].parameters(model):
            owner_path, _, name = blocks[0].parameter.rpartition(".")
            owner: Any = model.get_submodule(owner_path)
            indices = []  # along the axis of the heads
            for each in blocks:
                starts = each.start + each.step * torch.tensor(heads.kv if each.kind == "kv" else heads.query)
                indices.append((starts[:, None] + torch.arange(each.width)).flatten())
            remaining = torch.cat(indices).sort().values.to(parameter.device)
            sliced = nn.Parameter(parameter.detach().index_select(blocks[0].axis, remaining), parameter.requires_grad)
            setattr(owner, name, sliced)
            if name == "weight" and isinstance(owner, nn.Linear):
                owner.out_features, owner.in_features = sliced.shape
            elif name == "weight" and hasattr(owner, "nf"):  # `Conv1D` of transformers
                owner.nx, owner.nf = sliced.shape
            elif isinstance(owner, nn.Embedding):
                owner.embedding_dim = sliced.shape[1]
        modules[path].set_counts(model.get_submodule(path), heads)
    return modules


def _separate_biases(model: nn.Module, kept: Mapping[str, KeptHeads]) -> None:
    """Prepare T5 stacks, in which the first attention module computes the relative position bias for all modules. If
    different heads will remain in the modules of a stack, each module gets its own copy of the bias table, and computes
    its own bias.
    """
    modules_of_stack: dict[tuple[str, str], dict[str, Any]] = {}
    for path, module in model.named_modules():
        is_named = (family := family_of(module)) is not None and family.positions == "shared bias"
        if is_named and hasattr(module, "has_relative_attention_bias"):  # not another class of the same name
            stack, _, inside = path.rpartition(".block.")
            modules_of_stack.setdefault((stack, inside.rpartition(".")[2]), {})[path] = module
    for modules in modules_of_stack.values():
        if len({kept.get(path) for path in modules}) == 1:
            continue
        table = next((module for module in modules.values() if module.has_relative_attention_bias), None)
        for module in modules.values():
            if table is not None and not module.has_relative_attention_bias:
                weight = table.relative_attention_bias.weight
                module.relative_attention_bias = nn.Embedding.from_pretrained(  # type: ignore[no-untyped-call]
                    weight.detach().clone(), freeze=not weight.requires_grad
                )
                module.has_relative_attention_bias = True
            module.register_forward_pre_hook(_ignore_bias, with_kwargs=True)


def _ignore_bias(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook of an attention module. It removes the argument `position_bias`, the bias that the previous
    module computed, so that the module computes its own bias.
    """
    return arguments, {**named, "position_bias": None}


def _own_fields(
    model: Any, modules: Mapping[str, HeadModule], kept: Mapping[str, KeptHeads]
) -> dict[str, dict[str, int]] | None:
    """Return new values for the fields of a model's configuration that state numbers of heads. The outer keys are names
    of parts of the configuration; the empty name stands for the configuration itself. Return None if the modules would
    need different values, or if the configuration has no such fields.
    """
    fields_of: dict[str, dict[str, int]] = {}
    for path, module in modules.items():
        attention = model.get_submodule(path)
        family, part = family_of(attention), getattr(attention, "config", None)
        name: str | None = ""  # also for a copy of the configuration, as the stacks of T5 have
        if type(part) is not type(model.config):
            name = next((name for name, value in vars(model.config).items() if value is part), None)
        if name is None or family is None or not family.config_fields:
            return None
        numbers = {"heads": len(kept[path].query), "kv_heads": len(kept[path].kv), "head_dim": module.head_dim}
        fields = {field: numbers[number] for number, field in family.config_fields.items()}
        if fields_of.setdefault(name, fields) != fields:
            return None
    return fields_of


def _part(config: Any, name: str) -> Any:
    """Return the part of a configuration that is called `name`, or the configuration itself if `name` is empty."""
    return getattr(config, name) if name else config


def _shapes_of_new(model: Any, fields_of: Mapping[str, Mapping[str, int]]) -> dict[str, torch.Size] | None:
    """Return the shapes of the weights of a new model whose configuration has the values in `fields_of`, by name.
    Return None if `transformers` cannot create such a model.
    """
    config = deepcopy(model.config)
    for part, fields in fields_of.items():
        for name, value in fields.items():
            setattr(_part(config, part), name, value)
    try:
        with torch.device("meta"):
            return _shapes(type(model)(type(config).from_dict(config.to_dict())))
    except Exception:  # each class has its own requirements
        return None


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shape of each tensor in a model's state dict, by name."""
    return {name: value.shape for name, value in model.state_dict().items()}


# -- saved models -----------------------------------------------------------------------------------------------------


def loader_of(model: nn.Module, kept: Mapping[str, Sequence[int]]) -> str:
    """Return the name of the package that can load the model after it is saved with the query heads `kept` alone (by
    module path). The name is "transformers" if the usual fields of the model's configuration can state these heads,
    otherwise "headwise". It is "none" for a model that is not of `transformers`.
    """
    if not hasattr(getattr(model, "config", None), "to_dict"):
        return "none"
    # The memo of copies puts meta tensors in the places of all tensors.
    shells: dict[int, Any] = {id(each): each.detach().to("meta") for each in model.buffers()}
    shells |= {id(each): nn.Parameter(each.detach().to("meta"), each.requires_grad) for each in model.parameters()}
    pruned: Any = deepcopy(model, shells)
    remove_heads(pruned, {path: head_module(model, path).kept(query) for path, query in kept.items()})
    return "headwise" if has_record(pruned.config) else "transformers"


def has_record(config: Any) -> bool:
    """Return True if a configuration has headwise's additional field that lists the remaining heads of each module."""
    return getattr(config, RECORD, None) is not None


def class_of_saved(loader: Any, config: Any) -> Any:
    """Return the class whose `from_pretrained` loads a saved model with this configuration. It is `loader`, a model
    class or auto class of `transformers`, unless the configuration lists the heads that remain. In that case, it is a
    subclass that removes the other heads before the weights are loaded. The loaded model is still an object of the
    original class.
    """
    if not has_record(config):
        return loader
    dense: Any = loader
    if not (isinstance(loader, type) and issubclass(loader, nn.Module)):
        with torch.device("meta"):
            dense = type(loader.from_config(config))

    class Pruned(dense):  # type: ignore[misc]
        """Subclass of the class of an unpruned model. When a model of this class is created, all heads that its
        configuration does not list are removed.
        """

        def __init__(self, config: Any, *arguments: Any, **named: Any) -> None:
            super().__init__(config, *arguments, **named)
            remove_recorded_heads(self, getattr(config, RECORD))
            self.__class__ = dense  # pickle finds this class by its name

    # By these names, `transformers` finds the rules by which it converts saved weights.
    Pruned.__name__, Pruned.__qualname__, Pruned.__module__ = dense.__name__, dense.__qualname__, dense.__module__
    return Pruned
