"""Statistics against position, compared with whole matrices of each sequence alone."""

import math
from itertools import pairwise

import pytest
import torch
from eager_rows import SPECIAL, attention, models, row_statistics

import headwise as hw
import tiny
from jackknife import jackknife
from token_sequences import padded, sequences

pytestmark = pytest.mark.usefixtures("as_user")

LENGTHS = (13, 7, 1, 19, 2)


def mean_of(values):
    """Return the mean of the values that are not NaN; NaN if there are none."""
    valid = [value for value in values if not math.isnan(value)]
    return sum(valid) / len(valid) if valid else math.nan


def slope_of(values):
    """Return the slope of values on the logarithm of their number, counted from 1, by numpy-free least squares."""
    points = [(math.log(i + 1), value) for i, value in enumerate(values) if not math.isnan(value)]
    if len(points) < 2:
        return math.nan
    x_mean, y_mean = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    spread = sum((x - x_mean) ** 2 for x, _ in points)
    return sum((x - x_mean) * (y - y_mean) for x, y in points) / spread


def expected(model, rows, edges, *, causal, documents=None):
    """Return, by (layer, head), the estimates of each statistic in each bin, and of its slope."""
    layers = [attention(model, ids) for ids in rows]
    found = {}
    for layer in range(len(layers[0])):
        for head in range(layers[0][layer][0].shape[0]):
            values = [
                row_statistics(of[layer][0][head], of[layer][1][:, head], of[layer][2][head], ids, causal=causal)
                for of, ids in zip(layers, rows, strict=True)
            ]
            for name in values[0]:
                for first, stop in pairwise(edges):
                    means = [mean_of(each[name][first:stop]) for each in values]
                    found[layer, head, name, first] = jackknife(means, documents)
                found[layer, head, name, "slope"] = jackknife([slope_of(each[name]) for each in values], documents)
    return found


def compare(curves, wanted, edges):
    """Compare tables with the estimates of `expected`: all numbers, and no others."""
    seen = 0
    for row in curves.rows:
        for name, estimate in row.statistics.items():
            assert estimate == pytest.approx(
                wanted[row.layer, row.head, name, row.position_from], abs=1e-10, nan_ok=True
            ), name
            assert row.position_to == edges[edges.index(row.position_from) + 1] - 1
            seen += 1
    for row in curves.slopes.rows:
        for name, estimate in row.statistics.items():
            key = (row.layer, row.head, name.removesuffix("_slope"), "slope")
            assert estimate == pytest.approx(wanted[key], abs=1e-10, nan_ok=True), name
            seen += 1
    reached = {first for (_, _, _, first), estimate in wanted.items() if first != "slope" and estimate[2]}
    assert seen == 2 * 6 * 14 * (len(reached) + 1)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_curves_equal_those_of_whole_matrices(name, side):
    model, eager = models(name)
    rows = sequences(*LENGTHS)
    wanted = expected(eager, rows, [0, 1, 2, 4, 8, 16, 32], causal=name != "bert")
    batches = [padded(rows[:3], side), padded(rows[3:], side)]
    curves = hw.position_curves(model, batches, special=SPECIAL)
    compare(curves, wanted, [0, 1, 2, 4, 8, 16, 32])


def test_edges_of_a_user():
    model, eager = models("llama")
    rows = sequences(*LENGTHS)
    edges = [3, 5, 11, 40, 50]
    curves = hw.position_curves(model, [padded(rows, "right")], special=SPECIAL, edges=edges)
    compare(curves, expected(eager, rows, edges, causal=True), edges)
    assert {row.position_from for row in curves.rows} == {3, 5, 11}


def test_sequences_of_one_document_are_a_cluster():
    model, eager = models("llama")
    texts = hw.Texts(tiny.texts(20, 9, 5), tiny.tokenizer("decoder"), context=8, documents="cut", batch=2)
    rows = [ids.long() for batch in texts for ids in batch["input_ids"]]
    documents = texts.document_numbers()
    assert len(set(documents)) < len(rows)
    curves = hw.position_curves(model, texts, special=SPECIAL)
    edges = [0, 1, 2, 4, 8]
    compare(curves, expected(eager, rows, edges, causal=True, documents=documents), edges)


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


def test_positions_go_on_through_calls_with_cached_keys():
    model, eager = models("llama")
    rows = sequences(12, 12)
    ids = torch.stack(rows)

    class Decoder(torch.nn.Module):
        """Model that reads its tokens in several calls of another model, with a cache."""

        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids):
            cache, start = None, 0
            for count in (5, 1, 1, 5):
                output = self.model(input_ids[:, start : start + count], past_key_values=cache, use_cache=True)
                cache, start = output.past_key_values, start + count

    edges = [0, 1, 2, 4, 8, 16]
    decoder = Decoder()
    from headwise.intercept.watch import watch_further
    from headwise.statistics.by_position import PositionStatistics

    with watch_further(decoder.model, PositionStatistics(tuple(edges)), SPECIAL) as heads, torch.no_grad():
        decoder(ids)
    wanted = expected(eager, rows, edges, causal=True)
    for layer, record in enumerate(heads.records):
        for name in ("entropy", "distance", "first", "previous", "output_norm"):
            values = record.statistics[f"{name} by position"].value.unflatten(0, (6, -1))
            slopes = record.statistics[f"{name} slope"].value
            for head in range(6):
                means = [wanted[layer, head, name, first][0] for first in edges[:-1]]
                assert values[head].tolist() == pytest.approx(means, abs=1e-10, nan_ok=True)
                assert float(slopes[head]) == pytest.approx(wanted[layer, head, name, "slope"][0], abs=1e-10)


def test_positions_start_again_in_packed_documents():
    model, eager = models("llama")
    rows = sequences(6, 9, 1)
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    packed = {"input_ids": torch.cat(rows)[None], "position_ids": positions, "use_cache": False}
    curves = hw.position_curves(model, [packed], edges=[0, 1, 2, 4, 8, 16])
    layers = [attention(eager, ids) for ids in rows]
    for row in curves.rows:  # one sequence of 16 queries
        of_head = [
            row_statistics(of[row.layer][0][row.head], of[row.layer][1][:, row.head], of[row.layer][2][row.head], ids,
                           causal=True)
            for of, ids in zip(layers, rows, strict=True)
        ]  # fmt: skip
        for name in ("entropy", "distance", "self", "first", "output_norm", "previous"):
            values = [value for each in of_head for value in each[name][row.position_from : row.position_to + 1]]
            assert row.statistics[name].value == pytest.approx(mean_of(values), abs=1e-10, nan_ok=True), name


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
    model, _ = models("llama")
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
        hw.position_curves(models("llama")[0], [padded(sequences(5), "right")], edges=edges)


def test_bins_that_no_sequence_reaches_are_named():
    with pytest.warns(UserWarning, match="^no sequence reaches position 50, where the bins start: curves are empty$"):
        curves = hw.position_curves(models("llama")[0], [padded(sequences(5), "right")], edges=(50, 60))
    assert not curves.rows
    assert len(curves.slopes.rows) == 12
