"""Running calls of modules, as tracing reads them."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import nn

from headwise.intercept.site import Site


@runtime_checkable
class RunningModule(Protocol):
    """Running call of a module of a model, as tracing reads it."""

    @property
    def path(self) -> str:
        """Path of the module in the model."""

    @property
    def module(self) -> nn.Module:
        """The module."""

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Arguments of the call, by name."""

    @property
    def stated(self) -> Site | None:
        """What the user states about the attention of the module; None for nothing."""

    @property
    def is_attention(self) -> bool:
        """True if the module is named after attention."""

    @property
    def projected(self) -> list[int]:
        """Numbers of elements of the linear maps that the module has computed, if it contains other modules."""

    @property
    def unfollowed(self) -> list[str]:
        """Reasons why it may have attended in a way that is not followed, since it last attended."""


def named_arguments(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a module call by name. If an argument is a dict, as in `model({"input_ids": ...})`, its
    entries are included as arguments; a direct argument of the same name takes precedence.
    """
    if not any(isinstance(argument, Mapping) for argument in arguments.values()):
        return arguments
    nested = {
        name: value
        for argument in arguments.values()
        if isinstance(argument, Mapping)
        for name, value in argument.items()
    }
    return {**nested, **arguments}
