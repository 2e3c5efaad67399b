"""Plots of attention weights between the words of a text."""

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import headwise as hw
from headwise.plots.grids import role_style
from headwise.plots.words import MIN_WEIGHT, ViewedHead, draw_pattern, draw_word_lines, group_labels

WORDS = ["[CLS]", "a", "$x$ and $y$", "[SEP]", "a word that is longer than eighteen"]


def test_a_pattern_has_every_weight_and_word():
    weights = torch.rand(5, 5)
    axes = draw_pattern(weights, WORDS, title="head 0.2")
    assert torch.equal(torch.from_numpy(axes.images[0].get_array().data).float(), weights)
    labels = ["[CLS]", "a", "$x$ and $y$", "[SEP]", "a word that is lo…"]
    for axis in (axes.xaxis, axes.yaxis):
        assert [label.get_text() for label in axis.get_ticklabels()] == labels
    assert (axes.get_ylabel(), axes.get_xlabel(), axes.get_title()) == ("query", "key", "head 0.2")
    assert axes.images[0].get_clim()[0] == 0.0
    assert axes.figure.axes[1].get_ylabel() == "attention weight"


def test_a_pattern_of_cross_attention_has_queries_and_keys():
    axes = draw_pattern(torch.rand(2, 5), WORDS[:2], WORDS)
    assert axes.images[0].get_array().shape == (2, 5)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["[CLS]", "a"]
    assert len(axes.get_xticklabels()) == 5
    assert axes.figure.axes[1].get_ylabel() == "attention weight"


def test_rows_of_a_pooled_pattern_are_labelled_by_their_first_words():
    words = [str(index) for index in range(101)]
    cell_of = [index * 64 // 101 for index in range(101)]  # as `hw.view` pools the weights of long texts
    assert group_labels(words, 64) == [words[cell_of.index(cell)] for cell in range(64)]
    axes = draw_pattern(torch.rand(64, 64), words)
    assert "group of words" in axes.figure.axes[1].get_ylabel()


def lines(title: str, keys: list[list[int]], weights: list[list[float]]) -> ViewedHead:
    """Return an induction head with these strongest weights."""
    strongest = torch.tensor(keys), torch.tensor(weights)
    return ViewedHead(title, "induction", WORDS[:3], WORDS[:4], *strongest, special=[True, False, False])


def test_lines_connect_words_with_weights_of_3_percent_or_more():
    first = lines("0.1", [[1, 0], [1, 2], [0, 1]], [[1.0, 0.5], [0.25, MIN_WEIGHT / 2], [0.5, 0.0]])
    second = lines("costs $1 or $2", [[2, 0], [2, 0], [2, 0]], [[0.75, 0.0]] * 3)
    axes = draw_word_lines([first, second])
    drawn = [line.get_ydata().tolist() for line in axes.lines if len(line.get_xdata()) == 2]
    assert drawn == [[0, 1], [0, 0], [1, 1], [2, 0], [0, 2], [1, 2], [2, 2]]
    widths = [line.get_linewidth() for line in axes.lines if len(line.get_xdata()) == 2]
    assert widths == pytest.approx([2.6, 1.5, 0.95, 1.5, 2.05, 2.05, 2.05])
    assert {to_hex(line.get_color()) for line in axes.lines} == {role_style("induction").colour}
    texts = [text.get_text() for text in axes.texts]
    assert texts.count("$x$ and $y$") == 4
    assert [text for text in texts if text not in WORDS] == ["0.1", "costs $1 or $2"]
    colours = {text.get_text(): text.get_color() for text in axes.texts}
    assert colours["[CLS]"] != colours["a"]


@pytest.mark.filterwarnings("error")
def test_given_axes_are_saved_in_every_format(tmp_path):
    left, right = Figure().subplots(1, 2)
    assert draw_pattern(torch.eye(3), WORDS[:3], ax=left) is left
    assert draw_word_lines([lines("0.1", [[1], [1], [0]], [[1.0]] * 3)], ax=right) is right
    for ending in ("svg", "pdf", "png"):
        left.figure.savefig(tmp_path / f"plot.{ending}")
        assert (tmp_path / f"plot.{ending}").stat().st_size > 1000


@pytest.mark.parametrize(
    ("draw", "sentence"),
    [
        (lambda: draw_pattern(torch.eye(3), WORDS[:2]), "queries: expected at least 3 words, got 2"),
        (lambda: draw_pattern(torch.rand(3, 2), WORDS, WORDS[:1]), "keys: expected at least 2 words, got 1"),
        (lambda: draw_pattern(torch.rand(0, 0), []), "queries: expected at least 1 word, got 0"),
        (lambda: draw_word_lines([]), "heads: expected at least one head to plot, got none"),
        (
            lambda: draw_word_lines([lines("0.1", [[1], [0]], [[1.0]] * 2)]),
            "queries: expected 2 words, as in the weights, got 3",
        ),
    ],
)
def test_other_numbers_of_words_are_refused(draw, sentence):
    with pytest.raises(hw.InputError, match=f"^{sentence}$"):
        draw()
