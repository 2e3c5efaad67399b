"""A view of the heads, printed to a terminal or a pipe, and written as an HTML page."""

import io
import re

from rich.console import Console

from headwise.analysis.ablation_result import Ablation
from headwise.analysis.view import view
from headwise.runs.rows import HeadRow, MeanEstimate
from headwise.runs.significance import in_errors
from headwise.show.results import print_scores
from headwise.show.terminal import _one_line, print_view


def printed(shown, *, terminal: bool = False, detail: bool = False, width: int = 140) -> str:
    """Return what is printed for a view, with colours if for a terminal."""
    stream = io.StringIO()
    colours = "truecolor" if terminal else None
    console = Console(file=stream, force_terminal=terminal, width=width, highlight=False, color_system=colours)
    print_view(shown, console, detail=detail)
    return stream.getvalue()


def test_every_head_is_printed_once_under_its_role(coffee):
    text = printed(coffee)
    role = None
    role_of_head = {}
    for line in text.splitlines():
        if match := re.match(r"(.+?) · \d+ heads? · ", line):
            role = match[1]
        elif match := re.match(r" *(\d+\.\d+) ", line):
            role_of_head[match[1]] = role
    assert role_of_head == {head.name: coffee.role_title(head.role) for head in coffee.heads}
    titles = list(dict.fromkeys(role_of_head.values()))
    assert titles == ["previous token", "next token", "mixed", "broad", "sink on [CLS]", "sink on special tokens"]


def test_the_lines_of_heads_show_statistics_and_links(coffee):
    lines = {line.split()[0]: line for line in printed(coffee).splitlines() if re.match(r" *\d+\.\d+ ", line)}
    assert re.search(r"0\.2 +1\.00 +0\.00 +1\.00 .*do → Which 1\.00", lines["0.2"])
    assert "tea → coffee 0.14" in lines["0.9"]
    assert "coffee ↔ tea 0.32/0.17" in lines["0.3"]


def test_output_is_coloured_on_a_terminal_and_plain_in_a_pipe(coffee):
    assert "\x1b[" in printed(coffee, terminal=True)
    assert "\x1b" not in printed(coffee)


def test_markup_in_a_text_is_printed_unchanged(minilm):
    shown = view(minilm.model, minilm.tokenizer, "[bold]<script>alert(1)</script>[/bold] :smile:")
    assert "[bold]<script>alert(1)</script>[/bold] :smile:" in printed(shown)


def test_a_long_text_is_cut_with_an_ellipsis(coffee):
    assert _one_line("tea " + " " * 700 + "coffee\n") == "tea coffee"
    assert _one_line("tea " * 100) == ("tea " * 100)[:299] + "…"


def test_distances_from_zero_in_standard_errors():
    nan, inf = float("nan"), float("inf")
    pairs = [(3.0, 1.5), (-2.0, 0.0), (0.0, 0.0), (nan, 0.0), (1.0, nan)]
    found = [in_errors(MeanEstimate(value, sem, 7, 6)) for value, sem in pairs]
    assert str(found) == str([2.0, -inf, 0.0, nan, nan])


def test_a_number_that_rounds_to_zero_has_no_sign():
    rows = tuple(
        HeadRow(
            layer=0, head=n, kv_head=n, module="m", kind="self", statistics={"cost": MeanEstimate(value, 1e-5, 7, 6)}
        )
        for n, value in enumerate((-1e-9, -0.125, 1e-9))
    )
    stream = io.StringIO()
    print_scores(Ablation(rows, {}), Console(file=stream, width=140, highlight=False), "cost", 3)
    assert [line.split()[:5] for line in stream.getvalue().splitlines()[2:]] == [
        ["0.2", "0.0000", "±", "1e-05", "+0.0"],
        ["0.0", "0.0000", "±", "1e-05", "+0.0"],
        ["0.1", "-0.1250", "±", "1e-05", "-12500.0"],
    ]


def test_the_detail_of_a_head_lists_the_words_each_word_attends_to(coffee):
    text = printed(coffee.select([0], [2]), detail=True)
    rows = text[text.index("what each word attends to") :].splitlines()[2:]
    assert len(rows) == 12
    assert re.match(r" +tea +█ +or 1\.00", rows[9])
