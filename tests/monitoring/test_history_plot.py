"""Plots of a history draw its numbers."""

import math
from itertools import pairwise

import pytest
from matplotlib.colors import to_hex

import headwise as hw
from headwise.plots.canvas import LINE_COLOURS
from histories import history, rows

NAN, INF = math.nan, math.inf


def linear(layer, head, step):
    """Return a number that changes by head + 1 and falls with the layer."""
    return (head + 1) * step / 10 - layer


def names_on(axes):
    """Return the names of heads from the lowest to the highest."""
    return [text.get_text() for text in sorted(axes.texts, key=lambda text: text.xyann[1])]


def legend_of(axes):
    return [] if axes.get_legend() is None else [text.get_text() for text in axes.get_legend().get_texts()]


def test_each_head_is_a_line_with_its_numbers_and_the_colour_of_its_layer():
    axes = history(2, 3, (0, 7, 20), linear).plot("entropy")
    drawn = {tuple(line.get_ydata()): to_hex(line.get_color()) for line in axes.lines}
    expected = {tuple(linear(layer, head, step) for step in (0, 7, 20)): layer for layer in (0, 1) for head in range(3)}
    assert drawn.keys() == expected.keys()
    assert {drawn[line] for line, layer in expected.items() if layer == 0} == {LINE_COLOURS[0]}
    assert {drawn[line] for line, layer in expected.items() if layer == 1} == {LINE_COLOURS[1]}
    assert all(list(line.get_xdata()) == [0, 7, 20] for line in axes.lines)
    assert legend_of(axes) == ["layer 0", "layer 1"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "entropy (nats)")
    assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "linear")
    assert axes.get_title() == "entropy of 6 heads, TinyModel"


def test_the_heads_that_changed_most_are_named_in_the_order_of_their_last_values():
    axes = history(2, 7, (0, 20), linear).plot("entropy")
    assert " ".join(names_on(axes)) in ("1.4 0.4 1.5 1.6 0.6", "0.4 1.5 0.5 1.6 0.6")
    equal_lines = history(1, 5, (0, 20), lambda layer, head, step: step).plot("entropy")
    for drawn in (axes, equal_lines):
        heights = sorted(text.xyann[1] for text in drawn.texts)
        assert len(heights) == 5
        assert min(after - before for before, after in pairwise(heights)) >= 0.0499
        assert heights[-1] <= 1.0 + (1e-9 if drawn is axes else 0.0)


def test_heads_that_did_not_change_are_not_named_if_there_are_many():
    assert names_on(history(2, 3, (0, 20), lambda *_: 1.0).plot("entropy")) == []
    assert names_on(history(1, 3, (0, 20), lambda *_: 1.0).plot("entropy")) == ["0.0", "0.1", "0.2"]


def test_chosen_heads_are_drawn_alone():
    many = history(3, 40, (0, 10), linear)
    axes = many.plot("entropy", heads=[(2, 39), (0, 1)])
    assert sorted(tuple(line.get_ydata()) for line in axes.lines) == [(-2.0, 38.0), (0.0, 2.0)]
    assert names_on(axes) == ["0.1", "2.39"]
    assert legend_of(axes) == ["layer 0", "layer 2"]
    with pytest.raises(hw.InputError, match=r"heads: expected each a \(layer, head\) of the history, got \(3, 0\)"):
        many.plot("entropy", heads=[(3, 0)])
    with pytest.raises(hw.InputError, match="heads: expected at least one head to plot, got none"):
        many.plot("entropy", heads=[])
    with pytest.raises(hw.InputError, match="statistic: expected one of entropy, got 'first'"):
        many.plot("first")


def test_one_head_in_one_step_is_a_point_with_a_name():
    axes = history(1, 1, (30,), linear).plot("entropy")
    (line,) = axes.lines
    assert (list(line.get_xdata()), list(line.get_ydata()), line.get_marker()) == ([30], [3.0], ".")
    assert list(axes.get_xticks()) == [30]
    assert names_on(axes) == ["0.0"]
    assert legend_of(axes) == []


def test_lines_have_gaps_and_crosses_where_values_are_not_finite():
    numbers = {(0, 0): [1.0, NAN, 3.0, INF, INF], (0, 1): [1.0, 2.0, 2.0, 2.0, 2.0], (0, 2): [NAN] * 5}
    axes = history(1, 3, range(5), lambda layer, head, step: numbers[layer, head][step]).plot("entropy")
    first, second, third, crosses = axes.lines
    assert [str(value) for value in first.get_ydata()] == ["1.0", "nan", "3.0", "nan", "nan"]
    assert (first.get_marker(), second.get_marker()) == (".", "")
    assert all(map(math.isnan, third.get_ydata()))
    assert list(crosses.get_xdata()) == [0, 1, 2, 3, 4]
    assert axes.get_title() == "entropy of 3 heads (2 with NaN or infinite values), TinyModel"
    assert legend_of(axes) == ["NaN or infinite"]
    assert names_on(axes) == ["0.1", "0.0"]  # at the last finite value


def test_a_history_without_finite_values_is_drawn():
    axes = history(2, 2, range(3), lambda *_: NAN).plot("entropy")
    assert list(axes.lines[-1].get_xdata()) == [0, 1, 2]
    assert (list(axes.get_yticks()), names_on(axes)) == ([], [])


def test_a_thousand_heads_have_thin_lines_and_a_colour_bar():
    axes = history(40, 25, (0, 10), linear).plot("entropy")
    assert len(axes.lines) == 1000
    assert sorted({line.get_linewidth() for line in axes.lines}) == [0.6, 1.6]
    assert sum(line.get_linewidth() == 1.6 for line in axes.lines) == len(names_on(axes)) == 5
    assert axes.figure.axes[1].get_ylabel() == "layer"
    assert axes.get_legend() is None
    colours = {round(-line.get_ydata()[0]): to_hex(line.get_color()) for line in axes.lines}
    assert len(set(colours.values())) > 30


def test_axes_of_the_user_are_drawn_on():
    from matplotlib.figure import Figure

    ours = Figure().subplots()
    assert history(1, 2, (0, 1), linear).plot("entropy", ax=ours) is ours
    with pytest.raises(hw.InputError, match="ax: expected matplotlib axes, got int"):
        history(1, 2, (0, 1), linear).plot("entropy", ax=3)


def test_a_picture_of_each_statistic_is_saved(tmp_path):
    both = history(2, 3, (), linear)
    for step in (0, 10):
        both.append(step, rows(2, 3, lambda layer, head, step=step: {"entropy": layer + step, "self": 0.5}))
    files = both.save_pictures(tmp_path / "new" / "folder")
    assert files == [tmp_path / "new" / "folder" / name for name in ("entropy.png", "self.png")]
    assert sorted(path.name for path in files[0].parent.iterdir()) == ["entropy.png", "self.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files)
    earlier = files[0].read_bytes()
    both.append(20, rows(2, 3, lambda layer, head: {"entropy": 9.0, "self": 0.5}))
    both.save_pictures(tmp_path / "new" / "folder")
    assert files[0].read_bytes() != earlier


def test_pictures_need_a_step_and_a_folder(tmp_path):
    with pytest.raises(hw.InputError, match="history: expected at least 1 observed step, got 0"):
        history(1, 1, (), linear).save_pictures(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(hw.InputError, match="out: expected a folder that can be created and written, got '.*file'"):
        history(1, 1, (0,), linear).save_pictures(tmp_path / "file")
