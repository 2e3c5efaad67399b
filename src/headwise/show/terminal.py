"""A view on a terminal: heads grouped by role, colour where there is a terminal, plain text in a pipe."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwise.analysis.roles import MIXED, ROLES, Role
from headwise.analysis.view_result import HeadView, View

PIPE_WIDTH = 140
"""Columns of the output where no terminal says how many it has."""

TITLE = 300
"""Characters of the text that are shown above the heads."""

LINKS = 3
"""How many links of a head its line shows."""

COLOURS = {
    "previous token": "cyan",
    "next token": "blue",
    "induction": "magenta",
    "duplicate token": "bright_magenta",
    "same token": "green",
    "mixed": "yellow",
    "broad": "white",
    "sink on the first token": "bright_black",
    "sink on special tokens": "bright_black",
}
SHADES = " ·░▒▓█"


def make_console() -> Console:
    """A console on standard output."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def print_view(view: View, console: Console, *, detail: bool = False) -> None:
    """Print every head of the view; with `detail`, also where each word looks, head by head."""
    console.print(Text(_one_line(view.text), style="bold"))
    cut = " (the text was cut there)" if view.truncated else ""
    console.print(Text(f"{view.title}, {view.tokens} tokens{cut}, {_heads(len(view.heads))}"))
    for role in ROLES:
        members = [head for head in view.heads if head.role is role]
        if members:
            console.print()
            console.print(_heading(view, role, len(members)))
            console.print(_table(view, role, members))
    if detail:
        for head in view.heads:
            console.print()
            _print_detail(view, head, console)


def link_text(view: View, head: HeadView) -> str:
    """The head's strongest links as words: `tea → coffee 0.14`, and `coffee ↔ tea 0.32/0.17` where mutual."""
    texts = []
    for link in view.strongest_links(head, LINKS):
        query, key = view.words[link.query].text, view.words[link.key].text
        if link.back is None:
            texts.append(f"{query} → {key} {link.weight:.2f}")
        else:
            texts.append(f"{query} ↔ {key} {link.weight:.2f}/{link.back:.2f}")
    return "  ".join(texts)


def _heading(view: View, role: Role, count: int) -> Text:
    return Text.assemble((view.role_title(role), f"bold {COLOURS[role.name]}"), f" · {_heads(count)} · {role.rule}")


def _heads(count: int) -> str:
    return "1 head" if count == 1 else f"{count} heads"


def _one_line(text: str) -> str:
    """The beginning of the text on one line, without what would command a terminal."""
    line = "".join(character if character.isprintable() else " " for character in text[: 2 * TITLE])
    line = " ".join(line.split())
    return line if len(line) <= TITLE else line[: TITLE - 1] + "…"


def _table(view: View, role: Role, members: list[HeadView]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    for column in ("head", "share", "entropy", "confidence", "distance"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("strongest links between words", overflow="fold")
    for head in members:
        share = "" if role is MIXED else f"{head.means[role.statistic]:.2f}"
        numbers = (f"{head.means[name]:.2f}" for name in ("entropy", "confidence", "distance"))
        table.add_row(Text(head.name, style=f"bold {COLOURS[role.name]}"), share, *numbers, Text(link_text(view, head)))
    return table


def _print_detail(view: View, head: HeadView, console: Console) -> None:
    """Each word with its row of the matrix in shades and its strongest keys, special tokens included."""
    console.print(
        Text.assemble((f"head {head.name}", "bold"), f" · {view.role_title(head.role)} · where each word looks")
    )
    whole = head.picture.shape[0] == len(view.words)
    table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="dim")
    table.add_column("word", justify="right", no_wrap=True, max_width=24)
    if whole:
        table.add_column("first to last word", no_wrap=True)
    table.add_column("strongest keys")
    for index, word in enumerate(view.words):
        keys = zip(head.top_keys[index].tolist(), head.top_weights[index].tolist(), strict=True)
        strongest = "  ".join(f"{view.words[key].text} {weight:.2f}" for key, weight in list(keys)[:LINKS])
        shades = [_shade(head.picture[index].tolist())] if whole else []
        table.add_row(Text(word.text), *shades, Text(strongest))
    console.print(table)


def _shade(weights: list[float]) -> str:
    steps = len(SHADES) - 1
    return "".join(SHADES[min(steps, round(weight**0.5 * steps))] for weight in weights)
