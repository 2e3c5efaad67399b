"""Plots of one or more numbers per head draw these numbers."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import headwise as hw
from headwise.plots.canvas import LINE_COLOURS, layer_scale, tick_step
from headwise.plots.curves import draw_received
from headwise.plots.grids import (
    ROLE_STYLES,
    UNKNOWN_ROLE,
    draw_heatmap,
    draw_role_counts,
    draw_role_grid,
    draw_similarity,
    role_style,
)
from headwise.plots.points import PlottedNumbers, draw_ranking, draw_scatter
from headwise.plots.words import draw_pattern

NAN, INF = math.nan, math.inf
THREE_LAYERS = {
    (layer, head): 10.0 * layer + head for layer, heads in ((0, 5), (2, 3), (7, 2)) for head in range(heads)
}


def legend_of(axes: Axes) -> list[str]:
    """Return the labels of the legend of axes."""
    return [text.get_text() for text in axes.get_legend().get_texts()]


def scale_of(axes: Axes) -> tuple[str, float, float]:
    """Return name and limits of the colour map of the picture on axes."""
    (image,) = axes.images
    return image.get_cmap().name, *image.get_clim()


def labels_on(axis) -> list[str]:
    """Return the tick labels of an axis."""
    return [label.get_text() for label in axis.get_ticklabels()]


def test_a_heatmap_has_every_number_and_blank_cells_elsewhere():
    axes = draw_heatmap(THREE_LAYERS, statistic="distance", label="distance (tokens)", title="a model")
    image = axes.images[0].get_array().filled(NAN)
    assert image.shape == (3, 5)
    drawn = {(layer, head): image[row, head] for row, layer in enumerate((0, 2, 7)) for head in range(5)}
    assert {cell: value for cell, value in drawn.items() if not math.isnan(value)} == THREE_LAYERS
    assert labels_on(axes.yaxis) == ["0", "2", "7"]
    assert labels_on(axes.xaxis) == ["0", "1", "2", "3", "4"]
    assert axes.get_title() == "distance, a model"
    assert axes.figure.axes[1].get_ylabel() == "distance (tokens)"
    assert scale_of(axes) == ("cividis", 0.0, 71.0)
    assert not axes.collections  # no crosses, as every head has a number


@pytest.mark.parametrize(
    ("numbers", "centred", "limit"),
    [([-3.0, 1.0, 2.0], False, 3.0), ([0.5, 1.0, 2.0], True, 2.0), ([0.0, 0.0, NAN], True, 1.0)],
)
def test_effects_have_colours_around_0(numbers, centred, limit):
    cells = {(0, head): number for head, number in enumerate(numbers)}
    assert scale_of(draw_heatmap(cells, statistic="cost", centred=centred)) == ("RdBu_r", -limit, limit)


def test_a_head_without_a_number_is_crossed():
    axes = draw_heatmap({(0, 0): 1.0, (0, 1): NAN, (3, 1): INF, (3, 2): 2.0}, statistic="cost")
    assert axes.collections[0].get_offsets().tolist() == [[1.0, 0.0], [1.0, 1.0]]
    assert scale_of(axes)[1:] == (1.0, 2.0)
    assert axes.get_xlabel() == "head\ngrey: 2 of 4 heads without a number, such as a mean over no row"


def test_a_map_of_one_colour_says_why():
    equal = {(layer, head): 0.0 for layer in range(2) for head in range(3)}
    axes = draw_heatmap(equal, statistic="cost", centred=True)
    assert axes.get_xlabel() == "head\none colour: every head has 0"
    axes = draw_heatmap(equal | {(0, 1): NAN}, statistic="cost")
    assert axes.get_xlabel().splitlines()[1:] == [
        "one colour: every head with a number has 0",
        "grey: 1 of 6 heads without a number, such as a mean over no row",
    ]
    assert draw_heatmap({(0, 0): 1.0}, statistic="cost").get_xlabel() == "head"
    pattern = draw_pattern(torch.zeros(2, 3), ["a", "b"], ["a", "b", "c"])
    assert pattern.get_xlabel() == "key\none colour: every cell has 0"


def linear(colour: str) -> torch.Tensor:
    """Return the linear amounts of red, green and blue of a colour."""
    srgb = torch.tensor([int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    return torch.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def contrast_to_white(colour: str) -> float:
    """Return the contrast ratio of a colour and white as in the Web Content Accessibility Guidelines."""
    return 1.05 / (float(torch.tensor([0.2126, 0.7152, 0.0722]) @ linear(colour)) + 0.05)


def test_lines_and_points_are_visible_on_white():
    roles = [style.colour for style in (*ROLE_STYLES.values(), UNKNOWN_ROLE)]
    of_layers = [to_hex(colour) for colour in layer_scale([0]).cmap.colors]
    for colour in (*roles, *LINE_COLOURS, *of_layers):
        assert contrast_to_white(colour) >= 3, colour
    points = draw_scatter(PlottedNumbers("a", [0.0, 1.0]), PlottedNumbers("b", [0.0, 1.0]), heads=[(0, 0), (9, 0)])
    drawn = points.collections[0]
    points.figure.draw_without_rendering()
    assert all(contrast_to_white(to_hex(colour)) >= 3 for colour in drawn.get_facecolors())


def test_one_head_and_a_thousand_heads_have_readable_labels():
    axes = draw_heatmap({(0, 0): 1.0}, statistic="entropy")
    assert axes.images[0].get_array().tolist() == [[1.0]]
    for layers, heads in ((1, 1000), (40, 25), (1000, 1)):
        cells = {(layer, head): float(layer + head) for layer in range(layers) for head in range(heads)}
        axes = draw_heatmap(cells, statistic="entropy")
        assert axes.images[0].get_array().shape == (layers, heads)
        axes.figure.draw_without_rendering()
        for boxes, side in ((axes.xaxis, "x"), (axes.yaxis, "y")):
            extents = [label.get_window_extent() for label in boxes.get_ticklabels()]
            edges = sorted((getattr(box, f"{side}0"), getattr(box, f"{side}1")) for box in extents)
            assert all(stop < start for (_, stop), (start, _) in pairwise(edges))
        width, height = axes.figure.get_size_inches()
        assert width <= 12
        assert height <= 10


def test_the_distance_of_labels_is_a_round_number():
    assert [tick_step(count, 3.0) for count in (3, 14, 15, 29, 100, 1000)] == [1, 1, 2, 5, 10, 100]


ROLES = {(0, 0): "induction", (0, 1): "mixed", (0, 2): "mixed", (4, 0): "induction", (4, 2): "a new role"}


def test_a_grid_of_roles_has_the_colour_and_marker_of_each_head():
    axes = draw_role_grid(ROLES, title="a model")
    cells = axes.images[0].get_array()
    for (layer, head), role in ROLES.items():
        assert to_hex(cells[(0, 4).index(layer), head]) == role_style(role).colour
    assert to_hex(cells[1, 1]) == "#ffffff"  # no head
    assert legend_of(axes) == ["induction (2)", "mixed (2)", "a new role (1)"]
    assert axes.collections[0].get_offsets().tolist() == [[0.0, 0.0], [0.0, 1.0]]
    assert axes.get_title() == "roles of 5 heads, a model"
    many = draw_role_grid({(layer, head): "broad" for layer in range(25) for head in range(40)})
    assert legend_of(many) == ["broad (1000)"]
    assert not many.collections


def test_bars_of_roles_add_up_to_the_heads_of_each_layer():
    axes = draw_role_counts(ROLES)
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers}
    assert heights == {"induction (2)": [1, 1], "mixed (2)": [2, 0], "a new role (1)": [0, 1]}
    assert [bar.get_y() for bar in axes.containers[2]] == [3, 1]
    assert legend_of(axes) == ["a new role (1)", "mixed (2)", "induction (2)"]  # from top to bottom, as in the bars
    assert labels_on(axes.xaxis) == ["0", "4"]
    assert axes.containers[0][0].get_facecolor()[:3] == pytest.approx(torch.tensor([0xBC, 0x72, 0x00]) / 255)


HEADS = [(0, 0), (0, 1), (3, 0), (3, 1)]


def test_a_scatter_plot_has_one_point_per_head_by_role():
    x = PlottedNumbers("entropy", [1.0, 2.0, NAN, 4.0], [0.1, NAN, 0.3, 0.4], "entropy (nats)")
    y = PlottedNumbers("distance", [5.0, -9.0, 7.0, 8.0], [0.5, 0.6, 0.7, 0.8])
    roles = ["mixed", "induction", "mixed", "mixed"]
    axes = draw_scatter(x, y, heads=HEADS, roles=roles, title="a model", errors=2.0, top=2)
    assert legend_of(axes) == ["induction (1)", "mixed (2)"]
    bars, (induction, mixed) = axes.containers[0], axes.collections[-2:]
    assert induction.get_offsets().tolist() == [[2.0, -9.0]]
    assert mixed.get_offsets().tolist() == [[1.0, 5.0], [4.0, 8.0]]
    assert to_hex(induction.get_facecolor()[0]) == ROLE_STYLES["induction"].colour
    segments = [lines.get_segments() for lines in bars.lines[2]]
    assert [segment[:, 0].tolist() for segment in segments[0]] == [[0.8, 1.2], [2.0, 2.0], [3.2, 4.8]]
    assert [segment[:, 1].tolist() for segment in segments[1]] == [[4.0, 6.0], [-10.2, -7.8], [6.4, 9.6]]
    assert axes.get_xlabel() == "entropy (nats)\nbars: ±2 standard errors"
    assert [text.get_text() for text in axes.texts] == ["0.1", "3.1"]  # of the largest absolute distances
    assert axes.get_title() == "3 heads, a model"


def test_a_scatter_plot_without_roles_is_coloured_by_layer():
    x, y = PlottedNumbers("a", [1.0, 2.0, 3.0, 4.0]), PlottedNumbers("b", [4.0, 3.0, 2.0, 1.0])
    axes = draw_scatter(x, y, heads=HEADS, errors=1.0, named_by=[0.0, 0.0, 5.0, 0.0], top=1, with_diagonal=True)
    assert axes.collections[0].get_array().tolist() == [0, 0, 3, 3]
    assert axes.figure.axes[1].get_ylabel() == "layer"
    assert (axes.get_xlabel(), axes.containers) == ("a", [])  # no standard errors
    assert [text.get_text() for text in axes.texts] == ["3.0"]
    assert axes.lines[0].get_slope() == 1.0


def test_a_ranking_of_few_heads_names_all():
    numbers = PlottedNumbers("cost", [0.1, NAN, 0.3, -0.2], [0.01, 0.02, 0.03, NAN])
    axes = draw_ranking(numbers, ["0.0", "0.1", "0.2", "0.3"], title="a model")
    line, _, (bars,) = axes.containers[0]
    assert line.get_xydata().tolist() == [[1, 0.3], [2, 0.1], [3, -0.2]]
    lengths = [segment[:, 1].tolist() for segment in bars.get_segments()]
    expected = [(0.3 - 1.96 * 0.03, 0.3 + 1.96 * 0.03), (0.1 - 1.96 * 0.01, 0.1 + 1.96 * 0.01), (-0.2, -0.2)]
    assert lengths == [pytest.approx(pair) for pair in expected]
    assert labels_on(axes.xaxis) == ["0.2", "0.0", "0.3"]
    assert axes.get_ylabel() == "cost\nbars: ±1.96 standard errors"
    assert axes.get_title() == "cost of 3 heads (1 without a number), a model"


def test_a_ranking_of_many_heads_lists_the_first():
    values = [math.sin(index) for index in range(1000)]
    names = [f"{index // 40}.{index % 40}" for index in range(1000)]
    axes = draw_ranking(PlottedNumbers("cost", values), names, top=7)
    order = sorted(range(1000), key=lambda index: -values[index])
    assert axes.containers[0].lines[0].get_ydata().tolist() == [values[index] for index in order]
    (listed,) = axes.texts
    assert listed.get_text().replace("\n", " ") == "largest: " + ", ".join(names[index] for index in order[:7])
    assert axes.lines[-1].get_ydata().tolist() == [values[index] for index in order[:7]]
    assert axes.get_ylabel() == "cost"
    assert axes.get_title() == "cost of 1,000 heads"
    assert not draw_ranking(PlottedNumbers("cost", values), names, top=0).texts


def test_received_attention_has_a_line_per_head():
    lines = {(0, 1): [0.5, 0.25, 0.0, NAN], (2, 3): [0.125, 0.5, 0.25, 0.125]}
    axes = draw_received(lines, words=["[CLS]", "a", "$b$", "c"], title="a model")
    drawn = {line.get_label(): line.get_ydata().tolist() for line in axes.lines}
    assert drawn["2.3"] == lines[2, 3]
    assert str(drawn["0.1"]) == "[0.5, 0.25, nan, nan]"  # a logarithmic axis has no 0
    assert legend_of(axes) == ["0.1", "2.3"]
    assert labels_on(axes.xaxis) == ["[CLS]", "a", "$b$", "c"]
    assert axes.get_yscale() == "log"
    many = draw_received({(layer, head): [0.1] * 7 for layer in range(25) for head in range(40)})
    assert len(many.lines) == 1000
    assert many.lines[0].get_color() != many.lines[-1].get_color()
    assert many.figure.axes[1].get_ylabel() == "layer"
    assert many.get_legend() is None


def test_a_similarity_matrix_has_ticks_at_layers():
    matrix = torch.tensor([[1.0, 0.5, NAN], [0.5, 1.0, NAN], [NAN, NAN, 1.0]])
    axes = draw_similarity(matrix, [0, 0, 3], measure="cka", title="a model")
    assert str(axes.images[0].get_array().data.tolist()) == str(matrix.tolist())
    assert (axes.get_xticks().tolist(), labels_on(axes.xaxis)) == ([0, 2], ["0", "3"])
    assert scale_of(axes) == ("cividis", 0.5, 1.0)
    assert scale_of(draw_similarity(matrix, [0, 0, 3], measure="cosine", centred=True)) == ("RdBu_r", -1.0, 1.0)


DRAWINGS = {
    "heatmap": lambda **options: draw_heatmap(THREE_LAYERS, statistic="cost", **options),
    "roles": lambda **options: draw_role_grid(ROLES, **options),
    "role_counts": lambda **options: draw_role_counts(ROLES, **options),
    "scatter": lambda **options: draw_scatter(
        PlottedNumbers("a", [1.0, 2.0], [0.1, 0.2]),
        PlottedNumbers("b", [3.0, 4.0]),
        heads=[(0, 0), (1, 0)],
        errors=1.0,
        **options,
    ),
    "ranking": lambda **options: draw_ranking(PlottedNumbers("a", [1.0, 2.0], [0.1, 0.2]), ["0.0", "0.1"], **options),
    "received": lambda **options: draw_received({(0, 0): [0.5, 0.2]}, **options),
    "similarity": lambda **options: draw_similarity(torch.eye(4), [0, 0, 1, 1], measure="cka", **options),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("draw", DRAWINGS.values(), ids=DRAWINGS)
def test_plots_use_given_axes_and_are_saved_and_displayed(draw, tmp_path):
    from matplotlib import pyplot

    figure = Figure(layout="constrained")
    left, right = figure.subplots(1, 2)
    assert draw(ax=right, title="costs $5 and $6") is right
    assert not left.has_data()
    assert "$5 and $6" in right.get_title()
    for ending, start in {"svg": b"<?xml", "pdf": b"%PDF", "png": b"\x89PNG"}.items():
        right.figure.savefig(tmp_path / f"plot.{ending}")
        assert (tmp_path / f"plot.{ending}").read_bytes().startswith(start)
    before, new = pyplot.get_fignums(), draw()
    for displayed in (new, new.figure):  # by notebooks
        assert displayed._repr_png_().startswith(b"\x89PNG")
    assert pyplot.get_fignums() == before


NONE = "heads: expected at least one head to plot, got none"
ALL_NAN = (
    "statistic: expected a statistic with a finite number for at least one head, got {}, NaN or infinite for all 2; "
    "a mean over no row is NaN, such as one over repeated words of a text without any"
)
AXES = "ax: expected matplotlib axes, got {}; figure.subplots() returns axes"


@pytest.mark.parametrize(
    ("draw", "sentence"),
    [
        (lambda: draw_heatmap({}, statistic="a"), NONE),
        (lambda: draw_role_grid({}), NONE),
        (lambda: draw_role_counts({}), NONE),
        (lambda: draw_heatmap({(0, 0): NAN, (0, 1): INF}, statistic="a"), ALL_NAN.format("'a'")),
        (
            lambda: draw_scatter(PlottedNumbers("a", [NAN, 1.0]), PlottedNumbers("b", [1.0, NAN]), heads=HEADS[:2]),
            ALL_NAN.format("'b against a'"),
        ),
        (lambda: draw_heatmap({(0, 0): 1.0}, statistic="a", ax=Figure()), AXES.format("Figure")),
        (lambda: draw_received({(0, 0): [0.5]}, ax=SimpleNamespace()), AXES.format("SimpleNamespace")),
    ],
)
def test_plots_of_nothing_are_refused(draw, sentence):
    with pytest.raises(hw.InputError) as caught:
        draw()
    assert str(caught.value) == sentence


def seen_with(colour: str, vision: str) -> torch.Tensor:
    """Return a colour as a reader with a type of colour vision sees it, in the perceptual space CIELAB.

    The simulations are those of Machado, Oliveira and Fernandes (2009) for the complete deficiency.
    """
    matrices = {
        "normal": torch.eye(3).tolist(),
        "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
        "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    }
    seen = (torch.tensor(matrices[vision]) @ linear(colour)).clamp(0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = torch.tensor(to_xyz) @ seen / torch.tensor([0.9505, 1.0, 1.089])
    f = torch.where(xyz > 0.008856, xyz ** (1 / 3), 7.787 * xyz + 16 / 116)
    return torch.stack([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", ["normal", "protan", "deutan", "tritan"])
def test_roles_and_lines_have_different_colours_for_every_colour_vision(vision):
    for colours in ([*(style.colour for style in ROLE_STYLES.values()), UNKNOWN_ROLE.colour], LINE_COLOURS):
        seen = torch.stack([seen_with(colour, vision) for colour in colours])
        distances = torch.pdist(seen)
        assert float(distances.min()) > 15


def test_every_role_has_a_style_of_its_own():
    from headwise.analysis.roles import ROLES as ALL_ROLES

    assert list(ROLE_STYLES) == [role.name for role in ALL_ROLES]
    assert len({style.marker for style in (*ROLE_STYLES.values(), UNKNOWN_ROLE)}) == len(ALL_ROLES) + 1
    assert role_style("a new role") == UNKNOWN_ROLE
