"""Statistics against position, compared with whole matrices of each sequence alone."""

import math
from itertools import pairwise

import pytest
import torch

import headwise as hw
import tiny
from jackknife import jackknife
from token_sequences import padded, sequences
from whole_matrices import (
    ENCODERS,
    LENGTHS,
    SPECIAL,
    batches_of,
    cut_texts,
    heads_of,
    mean_of,
    model_of,
    numbers_of,
    require_numbers,
    row_statistics,
    run_with_cache,
)

pytestmark = pytest.mark.usefixtures("as_user")


def slope_of(values):
    """Return the slope of values on the logarithm of their number, counted from 1, by numpy-free least squares."""
    points = [(math.log(i + 1), value) for i, value in enumerate(values) if not math.isnan(value)]
    if len(points) < 2:
        return math.nan
    x_mean, y_mean = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    spread = sum((x - x_mean) ** 2 for x, _ in points)
    return sum((x - x_mean) * (y - y_mean) for x, y in points) / spread


def expected(model, name, rows, edges, documents=None):
    """Return, by layer, head and name, the estimates of each statistic in each bin that a sequence reaches, with the
    first and last position of the bin, and of its slope.
    """
    found = {}
    for layer, head, of_rows in heads_of(model, name, rows):
        values = []
        for ids, weights, of_keys, projection in of_rows:
            out = weights @ of_keys
            norms = {"output_norm": out.norm(dim=-1).tolist(), "written_norm": (out @ projection).norm(dim=-1).tolist()}
            values.append(row_statistics(weights, ids, causal=name not in ENCODERS) | norms)
        for statistic in values[0]:
            slopes = [slope_of(each[statistic]) for each in values]
            found[layer, head, statistic, "slope"] = jackknife(slopes, documents)
            for first, stop in pairwise(edges):
                if any(len(ids) > first for ids in rows):
                    means = [mean_of(each[statistic][first:stop]) for each in values]
                    found[layer, head, statistic, first, stop - 1] = jackknife(means, documents)
    return found


def compare(curves, wanted):
    """Compare tables with the estimates of `expected`: all numbers, and no others."""
    slopes = {
        (layer, head, name.removesuffix("_slope"), "slope"): each
        for (layer, head, name), each in numbers_of(curves.slopes).items()
    }
    require_numbers(numbers_of(curves, "position_from", "position_to") | slopes, wanted)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_curves_equal_those_of_whole_matrices(name, side):
    model, rows = model_of(name), sequences(*LENGTHS)
    curves = hw.position_curves(model, batches_of(rows, side), special=SPECIAL)
    compare(curves, expected(model, name, rows, [0, 1, 2, 4, 8, 16, 32]))


def test_edges_of_a_user():
    model, rows, edges = model_of("llama"), sequences(*LENGTHS), [3, 5, 11, 40, 50]
    curves = hw.position_curves(model, [padded(rows, "right")], special=SPECIAL, edges=edges)
    compare(curves, expected(model, "llama", rows, edges))
    assert {row.position_from for row in curves.rows} == {3, 5, 11}


def test_sequences_of_one_document_are_a_cluster():
    model, (texts, rows, documents) = model_of("llama"), cut_texts()
    curves = hw.position_curves(model, texts, special=SPECIAL)
    compare(curves, expected(model, "llama", rows, [0, 1, 2, 4, 8], documents))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_is_no_slope(dtype):
    model = tiny.model("decoder").to(dtype)
    torch.nn.init.zeros_(model.layers[0].self_attn.q_proj.weight)
    rows = [{"input_ids": torch.randint(5, 97, (1, length))} for length in range(20, 40)]
    table = hw.position_curves(model, rows).slopes.table().set_index(["layer", "head"])
    uniform = table.loc[0]
    assert (uniform["evenness_slope"] == 0.0).all()
    assert (uniform["evenness_slope_p"] == 1.0).all()
    assert (uniform["entropy_slope"] > 0.9).all()
    assert (table.loc[1, "evenness_slope"] != 0.0).all()


def test_positions_continue_through_calls_with_cached_keys():
    from headwise.intercept.watch import watch_further
    from headwise.statistics.by_position import PositionStatistics

    model, rows, edges = model_of("llama"), sequences(12, 12), [0, 1, 2, 4, 8, 16]
    with watch_further(model, PositionStatistics(tuple(edges)), SPECIAL) as heads:
        run_with_cache(model, torch.stack(rows))
    wanted = expected(model, "llama", rows, edges)
    for layer, record in enumerate(heads.records):
        for name in ("entropy", "distance", "first", "previous", "output_norm"):
            values = record.statistics[f"{name} by position"].value.unflatten(0, (6, -1))
            slopes = record.statistics[f"{name} slope"].value
            for head in range(6):
                means = [wanted[layer, head, name, first, stop - 1][0] for first, stop in pairwise(edges)]
                assert values[head].tolist() == pytest.approx(means, abs=1e-10, nan_ok=True)
                assert float(slopes[head]) == pytest.approx(wanted[layer, head, name, "slope"][0], abs=1e-10)


def test_positions_start_again_in_packed_documents():
    model, rows = model_of("llama"), sequences(6, 9, 1)
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    packed = {"input_ids": torch.cat(rows)[None], "position_ids": positions, "use_cache": False}
    curves = numbers_of(hw.position_curves(model, [packed], edges=[0, 1, 2, 4, 8, 16]), "position_from", "position_to")
    for layer, head, of_rows in heads_of(model, "llama", rows):  # one sequence of 16 queries
        values = [row_statistics(weights, ids, causal=True) for ids, weights, *_ in of_rows]
        values = [
            each | {"output_norm": (weights @ of_keys).norm(dim=-1).tolist()}
            for each, (_, weights, of_keys, _) in zip(values, of_rows, strict=True)
        ]
        for name in ("entropy", "distance", "self", "first", "output_norm", "previous"):
            for first, stop in pairwise([0, 1, 2, 4, 8, 16]):
                in_bin = [value for each in values for value in each[name][first:stop]]
                found = curves[layer, head, name, first, stop - 1].value
                assert found == pytest.approx(mean_of(in_bin), abs=1e-10, nan_ok=True), name


def test_modules_without_positions_are_refused_by_name():
    class Picks(torch.nn.Module):
        """Attention whose queries are other tokens than its keys, in an unknown order."""

        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (torch.nn.Linear(12, 12) for _ in range(3))
            self.out = torch.nn.Linear(12, 12)

        def forward(self, x):
            q, k, v = (
                layer(each).unflatten(-1, (3, 4)).transpose(1, 2)
                for layer, each in ((self.q, x[:, [2, 0, 5]]), (self.k, x), (self.v, x))
            )
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            return self.out(out.transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    with (
        pytest.warns(UserWarning, match="positions of queries in their sequences could not be established"),
        pytest.raises(hw.InputError, match="^model: expected positions of queries that can be established, got none"),
    ):
        hw.position_curves(Picks(), [torch.randn(2, 7, 12)])


def test_tables_have_columns_and_are_drawn():
    model = model_of("llama")
    texts = hw.Texts(tiny.texts(20, 9, 30), tiny.tokenizer("decoder"))
    curves = hw.position_curves(model, texts)
    names = ["layer", "head", "kv_head", "module", "kind", "position_from", "position_to"]
    assert list(curves.table())[:7] == names
    assert curves.table()["position_from"].tolist() == [row.position_from for row in curves.rows]
    assert not set(curves.statistics) & set(curves.ROW_TYPE.identifier_columns())
    assert {"entropy_slope", "entropy_slope_p", "entropy_slope_q"} <= set(curves.slopes.table())
    axes = curves.plot("entropy", heads=[(0, 1), (1, 5)], errors=0)
    assert axes.get_legend_handles_labels()[1] == ["0.1", "1.5"]
    drawn = [row.statistics["entropy"].value for row in curves.curve(0, 1)]
    assert list(axes.lines[0].get_ydata()) == drawn
    assert len(curves.plot("entropy").get_legend_handles_labels()[1]) == 6
    curves.slopes.plot("entropy_slope")


@pytest.mark.parametrize("edges", [(), (3,), (4, 4), (5, 3), (-1, 3), (0, 1.5), 7])
def test_edges_that_are_refused(edges):
    with pytest.raises(hw.InputError, match="^edges: expected "):
        hw.position_curves(model_of("llama"), [padded(sequences(5), "right")], edges=edges)


def test_bins_that_no_sequence_reaches_are_named():
    with pytest.warns(UserWarning, match="^no sequence reaches position 50, where the bins start: curves are empty$"):
        curves = hw.position_curves(model_of("llama"), [padded(sequences(5), "right")], edges=(50, 60))
    assert not curves.rows
    assert len(curves.slopes.rows) == 12
