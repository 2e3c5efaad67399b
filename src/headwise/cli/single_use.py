"""Commands whose options are used at most once, and whose values with spaces are quoted."""

import os
import shlex
from collections import Counter
from typing import Any

from typer.core import TyperCommand

from headwise.progress import shown_progress


class SingleUseCommand(TyperCommand):
    """Command that refuses an option that is used twice, unless the option collects several values. Typer would ignore
    all uses but the last. Further arguments are refused with the advice to quote values with spaces.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # completion parses an incomplete command line
            values, further, order = self.make_parser(ctx).parse_args(args=list(args))
            for parameter, count in Counter(order).items():
                if count > 1 and not parameter.multiple:
                    ctx.fail(f"{parameter.opts[0]}: expected once, got {count} times")
            if further:
                ctx.fail(self._advice(values, further))
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and show all progress bars unless --quiet is used, in the first of several processes."""
        is_first = os.environ.get("RANK", "0") == "0"
        with shown_progress(is_first and not ctx.params.get("quiet", True)):
            return super().invoke(ctx)

    def _advice(self, values: dict[str, Any], further: list[str]) -> str:
        """Return the sentence for arguments that the command has no place for."""
        names = [parameter.name for parameter in self.params if parameter.param_type_name == "argument"]
        if not names:
            words = " ".join(shlex.quote(word) for word in further)
            return f"expected options alone, got {words}; put quotes around a value with spaces"
        quoted = " ".join([str(values[names[-1]]), *further]).replace('"', '\\"')
        return f'{names[-1]}: expected one, got {1 + len(further)}; put quotes around a value with spaces: "{quoted}"'
