"""View of a text in a terminal: heads grouped by role; plain text without colour in a pipe."""

import math
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwise.analysis.roles import MIXED, ROLES, Role
from headwise.analysis.view_result import SMALLEST_SHOWN_WEIGHT, Focus, HeadView, View, ViewSet, shortened
from headwise.plots.grids import role_style
from headwise.show.tables import plain_table
from headwise.wording import counted, number

PIPE_WIDTH = 140
"""Width of the output when it is not a terminal."""

MAX_TITLE = 300
"""Characters of the text that are shown above the heads, at most."""

LINKS = 3
"""Largest number of links and of keys that a line shows."""

FOCUS_HEADS = 5
"""Number of heads that are printed for a focus."""

AVERAGED = ("entropy", "confidence", "distance", "previous", "next", "first")
"""Statistics of several texts that are printed."""

NARROW = 100
"""Width of a terminal below which a line shows fewer numbers."""

SHADES = " ·░▒▓█"


def make_console() -> Console:
    """Return a rich console that prints to standard output. If that is not a terminal, the console is 140 columns wide,
    so that tables fit.
    """
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def bold_colour(role: Role) -> str:
    """Return the rich style, bold and in the role's colour, for the name of a role and the names of its heads."""
    return f"bold {role_style(role.name).terminal}"


def print_view(view: View, console: Console, *, detail: bool = False) -> None:
    """Print the attention of all heads on one text: the text, then a table for each role (name for what heads attend
    to) with one line per head. With `detail`, also print for every head the keys to which each word attends most.
    """
    console.print(Text(_one_line(view.text), style="bold"))
    cut = " (the text was cut there)" if view.truncated else ""
    console.print(Text(f"{view.title}, {counted(view.tokens, 'token')}{cut}, {counted(len(view.heads), 'head')}"))
    for role in ROLES:
        members = [head for head in view.heads if head.role is role]
        if members:
            console.print()
            console.print(_heading(view, role, len(members)))
            console.print(_table(view, role, members, console.width))
    if detail:
        for head in view.heads:
            console.print()
            _print_detail(view, head, console)


def print_views(views: ViewSet, console: Console) -> None:
    """Print the attention of all heads on several texts: for each role a table with one line per head, which has the
    means of statistics over the texts.
    """
    heads = views[0].heads
    console.print(Text(f"{views.title}, {counted(len(views), 'text')}, {counted(len(heads), 'head')}", style="bold"))
    roles = [views.role(index) for index in range(len(heads))]
    for role in ROLES:
        members = [index for index, own in enumerate(roles) if own is role]
        if not members:
            continue
        console.print()
        console.print(_heading(views[0], role, len(members)))
        table = plain_table("head", *AVERAGED)
        for index in members:
            estimates = [views.estimate(name, index) for name in AVERAGED]
            table.add_row(
                Text(heads[index].name, style=bold_colour(role)),
                *(estimate.text("z.2f") for estimate in estimates),
            )
        console.print(table)


def print_foci(foci: Sequence[Focus], console: Console) -> None:
    """Print, for each set of words, the heads whose attention on these words exceeds uniform attention most, and the
    verdict.
    """
    for focus in foci:
        console.print()
        console.print(Text.assemble((focus.name, "bold"), f" · attention {focus.kind}"))
        is_tested = not math.isnan(focus.heads[0].p)
        table = plain_table("head", "share", "uniform", "excess", *(("p",) if is_tested else ()))
        for each in focus.heads[:FOCUS_HEADS]:
            p = [number(each.p, ".2g")] if is_tested else []
            name = Text(each.head.name, style=bold_colour(each.head.role))
            table.add_row(name, number(each.share, ".2f"), number(each.uniform, ".2f"), each.excess.text("z.2f"), *p)
        console.print(table)
        console.print(Text(f"{focus.verdict} {focus.note}".rstrip()))


def link_texts(view: View, head: HeadView) -> list[str]:
    """Return up to three of a head's strongest links between words as texts, such as `tea → coffee 0.14`. If two words
    attend most to each other, more than under uniform attention, the text has both weights: `coffee ↔ tea 0.32/0.17`.
    """
    texts = []
    for link in view.strongest_links(head, LINKS):
        query = view.word_label(head.attention.queries, link.query)
        key = view.word_label(head.attention.keys, link.key)
        if link.back is None:
            texts.append(f"{query} → {key} {link.weight:.2f}")
        else:
            texts.append(f"{query} ↔ {key} {link.weight:.2f}/{link.back:.2f}")
    return texts


def _fitting(texts: list[str], width: int) -> str:
    """Join as many of the texts as fit on a line of `width` characters, at least the first, and return the line."""
    line = ""
    for text in texts:
        longer = f"{line}  {text}" if line else text
        if line and cell_len(longer) > width:
            break
        line = longer
    return line


def _heading(view: View, role: Role, count: int) -> Text:
    """Return the heading for the heads of one role: the role's name, the number `count` of heads, and the rule by which
    heads get the role.
    """
    return Text.assemble((view.role_title(role), bold_colour(role)), f" · {counted(count, 'head')} · {role.rule}")


def _one_line(text: str) -> str:
    """Return a text as one line of at most 300 characters. Control characters and runs of blanks become single
    blanks.
    """
    line = "".join(character if character.isprintable() else " " for character in text)
    line = " ".join(line.split())
    return line if len(line) <= MAX_TITLE else line[: MAX_TITLE - 1] + "…"


def _table(view: View, role: Role, members: list[HeadView], width: int) -> Table:
    """Return a table with one line for each head of a role. A line has the value of the statistic that decides the
    role, and other statistics (fewer in a narrow terminal). It ends with as many of the strongest links between words
    as fit into `width` characters.
    """
    names = ("entropy", "confidence") if width < NARROW else ("entropy", "confidence", "distance", "first")
    table = plain_table("head", "share", *names)
    width_of_links = width - sum(max(5, len(column)) + 2 for column in ("head", "share", *names))
    table.add_column("strongest links between words", overflow="fold")
    for head in members:
        share = "" if role is MIXED else number(head.means[role.statistic], ".2f")
        numbers = [number(head.means.get(name), "z.2f") for name in names]
        links = _fitting(link_texts(view, head), width_of_links)
        table.add_row(Text(head.name, style=bold_colour(role)), share, *numbers, Text(links))
    return table


def _print_detail(view: View, head: HeadView, console: Console) -> None:
    """Print a table for one head, with one line for each word: the keys to which it attends most. For a text with up to
    64 words, also print all its attention weights as shaded characters, if they fit.
    """
    console.print(
        Text.assemble((f"head {head.name}", "bold"), f" · {view.role_title(head.role)} · what each word attends to")
    )
    queries = view.query_words(head)
    has_all_words = head.picture.shape == (len(queries), len(view.key_words(head)))
    table = plain_table("word", gap=2)
    if has_all_words and head.picture.shape[1] <= console.width // 3:
        table.add_column("first to last word", no_wrap=True)
    table.add_column("strongest keys")
    for index, word in enumerate(queries):
        keys = zip(head.top_keys[index].tolist(), head.top_weights[index].tolist(), strict=True)
        strongest = "  ".join(
            f"{view.word_label(head.attention.keys, key)} {weight:.2f}"
            for key, weight in list(keys)[:LINKS]
            if weight >= SMALLEST_SHOWN_WEIGHT
        )
        shades, steps = [], len(SHADES) - 1
        if len(table.columns) == 3:  # darker for larger weights, on a square-root scale
            weights = head.picture[index].tolist()
            shades = ["".join(SHADES[min(steps, round(weight**0.5 * steps))] for weight in weights)]
        table.add_row(Text(shortened(word.text)), *shades, Text(strongest))
    console.print(table)
