"""Groups of command-line options: a dataclass whose fields are options of a command, or other groups."""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any, get_type_hints


def expand_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap the function `command` for typer: each parameter that is annotated with a dataclass becomes one command-line
    option per field of the dataclass, and of the dataclasses in it. The wrapper creates the dataclass objects from the
    options and passes them to `command`. Options that a user must state come first in the help.

    Typer reads options from the parameters of a function. With groups, commands share options, and a command with many
    options stays readable.
    """
    parameters = sorted(_parameters(command), key=lambda parameter: parameter.default is not inspect.Parameter.empty)

    @functools.wraps(command)
    def expanded(**options: Any) -> None:
        command(**_grouped(command, options))

    del expanded.__wrapped__  # typer would read the signature of the original
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded


def _parameters(owner: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    """Yield one keyword-only parameter for each option of a command or of a dataclass."""
    hints = get_type_hints(owner, include_extras=True)
    for name, parameter in inspect.signature(owner).parameters.items():
        if is_dataclass(hints[name]):
            yield from _parameters(hints[name])
        else:
            yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])


def _grouped(owner: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a command or of a dataclass from the options of it and of its groups."""
    hints = get_type_hints(owner, include_extras=True)
    return {
        name: hints[name](**_grouped(hints[name], options)) if is_dataclass(hints[name]) else options[name]
        for name in inspect.signature(owner).parameters
    }
