"""Check that projections multiply by their weight and have no other parameters."""

from torch import nn

from headwise.errors import InputError
from headwise.removal.head_module import HeadModule

REMEDY = "merge adapters, and remove parametrizations"


def require_plain_projections(model: nn.Module, module: HeadModule) -> None:
    """Raise `InputError` if a projection of an attention module computes its weights, such as one with a
    parametrization, or has further parameters, such as those of LoRA.
    """
    names_of: dict[str, set[str]] = {}
    for axis in module.axes:
        path, _, name = axis.parameter.rpartition(".")
        names_of.setdefault(path, set()).add(name)
    for path, names in names_of.items():
        own = dict(model.get_submodule(path).named_parameters())
        if missing := sorted(names - own.keys()):
            got = f"{path} without a parameter {missing[0]}, with {', '.join(own) or 'none'}"
            raise InputError("model", expected="projections with plain weights", got=got, remedy=REMEDY)
        others = sorted(own.keys() - names - {"bias"})
        if path != module.path and others:
            got = f"{path} with {', '.join(others)}"
            raise InputError("model", expected="projections without further parameters", got=got, remedy=REMEDY)
