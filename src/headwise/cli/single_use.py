"""Commands whose options are used at most once."""

from collections import Counter
from typing import Any

from typer.core import TyperCommand


class SingleUseCommand(TyperCommand):
    """Command that refuses an option that is used twice, unless the option collects several values. Typer would ignore
    all uses but the last.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # completion parses an incomplete command line
            _, _, order = self.make_parser(ctx).parse_args(args=list(args))
            for parameter, count in Counter(order).items():
                if count > 1 and not parameter.multiple:
                    ctx.fail(f"{parameter.opts[0]}: expected once, got {count} times")
        return super().parse_args(ctx, args)
