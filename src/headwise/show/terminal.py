"""View of a text in a terminal: heads grouped by role; plain text without colour in a pipe."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwise.analysis.roles import MIXED, ROLES, Role
from headwise.analysis.view_result import HeadView, View
from headwise.show.wording import counted

PIPE_WIDTH = 140
"""Width of the output when it is not a terminal."""

MAX_TITLE = 300
"""Characters of the text that are shown above the heads, at most."""

LINKS = 3
"""Number of links and of keys that a line shows."""

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
    """Return a rich console on standard output. If standard output is not a terminal, the console is 140 columns wide,
    so that tables fit.
    """
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def print_view(view: View, console: Console, *, detail: bool = False) -> None:
    """Print a view (the attention of a model on one text): first the text, then one table for each role (what a head
    mostly attends to), with one line per head. With `detail`, also print for every head the keys that each word attends
    to most.
    """
    console.print(Text(_one_line(view.text), style="bold"))
    cut = " (the text was cut there)" if view.truncated else ""
    console.print(Text(f"{view.title}, {counted(view.tokens, 'token')}{cut}, {counted(len(view.heads), 'head')}"))
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
    """Return up to three of a head's strongest links as text. A link is the attention of one word to the word that
    it attends to most, written `tea → coffee 0.14`. If each of two words attends most to the other, and both weights
    are larger than under uniform attention, their link is written `coffee ↔ tea 0.32/0.17` with both weights.
    """
    texts = []
    for link in view.strongest_links(head, LINKS):
        query, key = view.words[link.query].text, view.words[link.key].text
        if link.back is None:
            texts.append(f"{query} → {key} {link.weight:.2f}")
        else:
            texts.append(f"{query} ↔ {key} {link.weight:.2f}/{link.back:.2f}")
    return "  ".join(texts)


def _heading(view: View, role: Role, count: int) -> Text:
    """Return the heading printed above the heads of one role: the name of the role, the number of heads, and the rule
    by which heads get this role.
    """
    return Text.assemble(
        (view.role_title(role), f"bold {COLOURS[role.name]}"), f" · {counted(count, 'head')} · {role.rule}"
    )


def _one_line(text: str) -> str:
    """Return a text on one line of at most 300 characters. Control characters and runs of blanks become single spaces,
    and the end of a longer text is replaced by an ellipsis.
    """
    line = "".join(character if character.isprintable() else " " for character in text)
    line = " ".join(line.split())
    return line if len(line) <= MAX_TITLE else line[: MAX_TITLE - 1] + "…"


def _table(view: View, role: Role, members: list[HeadView]) -> Table:
    """Return a table with one line per head of a role: the mean of the statistic that decides the role (empty for the
    mixed role), other mean statistics, and the strongest links between words.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    for column in ("head", "share", "entropy", "confidence", "distance"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("strongest links between words", overflow="fold")
    for head in members:
        share = "" if role is MIXED else f"{head.means[role.statistic]:.2f}"
        numbers = (f"{head.means[name]:z.2f}" for name in ("entropy", "confidence", "distance"))
        table.add_row(Text(head.name, style=f"bold {COLOURS[role.name]}"), share, *numbers, Text(link_text(view, head)))
    return table


def _print_detail(view: View, head: HeadView, console: Console) -> None:
    """Print a table for one head with one line per word: the keys that the word attends to most. For a short text,
    whose attention weights are stored without pooling, the line also shows all attention weights of the word as shaded
    characters.
    """
    console.print(
        Text.assemble((f"head {head.name}", "bold"), f" · {view.role_title(head.role)} · what each word attends to")
    )
    has_all_words = head.picture.shape[0] == len(view.words)
    table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="dim")
    table.add_column("word", justify="right", no_wrap=True, max_width=24)
    if has_all_words:
        table.add_column("first to last word", no_wrap=True)
    table.add_column("strongest keys")
    for index, word in enumerate(view.words):
        keys = zip(head.top_keys[index].tolist(), head.top_weights[index].tolist(), strict=True)
        strongest = "  ".join(f"{view.words[key].text} {weight:z.2f}" for key, weight in list(keys)[:LINKS])
        shades = [_shade(head.picture[index].tolist())] if has_all_words else []
        table.add_row(Text(word.text), *shades, Text(strongest))
    console.print(table)


def _shade(weights: list[float]) -> str:
    """Return the attention weights of one query as text with one character per key, darker for larger weights (on a
    square-root scale).
    """
    steps = len(SHADES) - 1
    return "".join(SHADES[min(steps, round(weight**0.5 * steps))] for weight in weights)
