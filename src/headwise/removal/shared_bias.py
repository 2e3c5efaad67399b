"""T5's position bias, which the first attention module of a stack computes for the heads of all others.

If different heads remain in the modules of a stack, each module gets a table of its own, with the columns of its heads,
and ignores the bias that the module before passes on.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from headwise.removal.head_axes import KeptHeads

CLASSES = ("T5Attention",)
"""Names of classes of attention modules that share a position bias."""


def separate_biases(model: nn.Module, kept: Mapping[str, KeptHeads]) -> None:
    """Give each attention module of a T5 stack a position bias of its own, in place, if different heads will remain in
    the modules of the stack. Modules of other families are not changed.
    """
    modules: dict[str, Any] = {
        path: module for path, module in model.named_modules() if type(module).__name__ in CLASSES
    }
    for paths in _sharing(modules):
        if len({kept.get(path) for path in paths}) == 1:
            continue
        table = next((modules[path] for path in paths if modules[path].has_relative_attention_bias), None)
        for path in paths:
            module = modules[path]
            if table is not None and not module.has_relative_attention_bias:
                weight = table.relative_attention_bias.weight
                module.relative_attention_bias = nn.Embedding.from_pretrained(  # type: ignore[no-untyped-call]
                    weight.detach().clone(), freeze=not weight.requires_grad
                )
                module.has_relative_attention_bias = True
            module.register_forward_pre_hook(_ignore_bias, with_kwargs=True)


def _sharing(modules: Mapping[str, Any]) -> Iterable[list[str]]:
    """Return lists of paths of modules that share a position bias: those of one name in the blocks of one stack."""
    groups: dict[tuple[str, str], list[str]] = {}
    for path in modules:
        stack, _, rest = path.rpartition(".block.")
        groups.setdefault((stack, rest.rpartition(".")[2]), []).append(path)
    return groups.values()


def _ignore_bias(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Leave out the position bias among the arguments of a call, so that the module computes its own."""
    return arguments, {**named, "position_bias": None}
