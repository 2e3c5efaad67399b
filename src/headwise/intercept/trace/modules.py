"""Running calls of modules, as tracing reads them."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import nn

from headwise.intercept.site import Site


@runtime_checkable
class RunningModule(Protocol):
    """Interface of a running module call, with only the attributes that tracing reads. `ModuleCall` implements and
    describes them.
    """

    @property
    def path(self) -> str: ...

    @property
    def module(self) -> nn.Module: ...

    @property
    def arguments(self) -> Mapping[str, Any]: ...

    @property
    def stated(self) -> Site | None: ...

    @property
    def is_attention(self) -> bool: ...

    @property
    def projected(self) -> list[int]: ...

    @property
    def unfollowed(self) -> list[str]: ...


def named_arguments(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a module call by name. If an argument is a dict, as in `model({"input_ids": ...})`, its
    entries are included as arguments; a direct argument of the same name takes precedence. Entries whose keys are not
    strings are left out, such as those of a cache with modules as keys.
    """
    if not any(isinstance(argument, Mapping) for argument in arguments.values()):
        return arguments
    nested = {
        name: value
        for argument in arguments.values()
        if isinstance(argument, Mapping)
        for name, value in argument.items()
        if isinstance(name, str)
    }
    return {**nested, **arguments}
