"""Commands made of functions: their options, groups of options, and options that are used at most once.

A group of options is a dataclass whose fields are options of a command, or other groups.
"""

import functools
import inspect
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any, get_type_hints

from typer.core import TyperCommand

from headwise.progress import shown_progress


def expand_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap the function `command` for typer, which makes command-line options from a function's parameters. A parameter
    annotated with a dataclass becomes one option per field, also of nested dataclasses. The wrapper creates the
    dataclass objects from the options and passes them to `command`. Options that a user must state come first in the
    help.

    With such groups, several commands share options, and the function of a command with many options stays readable.
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
    """Yield one keyword-only parameter for each option of a command's function or of a dataclass. A parameter whose
    type is a dataclass is replaced by the parameters of that dataclass.
    """
    hints = get_type_hints(owner, include_extras=True)
    for name, parameter in inspect.signature(owner).parameters.items():
        if is_dataclass(hints[name]):
            yield from _parameters(hints[name])
        else:
            yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])


def _grouped(owner: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with which to call `owner`, a command's function or a dataclass. Arguments that are
    dataclass objects are created from `options`, which has the value of every option by name.
    """
    hints = get_type_hints(owner, include_extras=True)
    return {
        name: hints[name](**_grouped(hints[name], options)) if is_dataclass(hints[name]) else options[name]
        for name in inspect.signature(owner).parameters
    }


class SingleUseCommand(TyperCommand):
    """Command that raises a usage error if an option is used twice, unless the option collects several values. Typer
    would ignore all uses but the last. Surplus arguments are an error, too; the error message advises the user to put
    quotes around a value with spaces.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # completion parses an incomplete command line
            values, further, order = self.make_parser(ctx).parse_args(args=list(args))
            for parameter, count in Counter(order).items():
                if count > 1 and not parameter.multiple:
                    ctx.fail(f"{parameter.opts[0]}: expected once, got {count} times")
            names = [parameter.name for parameter in self.params if parameter.param_type_name == "argument"]
            if further and not names:
                words = " ".join(shlex.quote(word) for word in further)
                ctx.fail(f"expected options alone, got {words}; put quotes around a value with spaces")
            if further:
                quoted = " ".join([str(values[names[-1]]), *further]).replace('"', '\\"')
                remedy = f'put quotes around a value with spaces: "{quoted}"'
                ctx.fail(f"{names[-1]}: expected one, got {1 + len(further)}; {remedy}")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and show all progress bars unless --quiet is used. If several processes run the command,
        only the first one shows them.
        """
        is_first = os.environ.get("RANK", "0") == "0"
        with shown_progress(is_first and not ctx.params.get("quiet", True)):
            return super().invoke(ctx)
