"""Attention by distance, compared with whole matrices of each sequence alone."""

import pytest
import torch

import headwise as hw
import tiny
from jackknife import jackknife
from token_sequences import padded, sequences
from whole_matrices import (
    LENGTHS,
    batches_of,
    heads_of,
    layers_of,
    model_of,
    numbers_of,
    require_numbers,
    run_with_cache,
)

pytestmark = pytest.mark.usefixtures("as_user")

QUANTILES = (0.3, 0.5, 0.9)


def shares(weights, first):
    """Return the share of the attention of one head within each distance, where `first` keys count at any distance."""
    n = len(weights)
    distance = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    is_first = torch.arange(n)[None] < first
    distance = torch.where(is_first, 0, distance).flatten()
    sums = torch.bincount(distance, weights.flatten(), minlength=n)
    return (sums.cumsum(0) / weights.sum()).tolist()


def compare(distances, model, name, rows, first):
    """Compare tables with the estimates from whole matrices: all numbers, and no others."""
    measured, wanted = {row.distance for row in distances.curve.rows}, {}
    for layer, head, of_rows in heads_of(model, name, rows):
        for suffix, number in (("", 0), ("_with_first", first)):
            of_head = [shares(weights, number) for _, weights, *_ in of_rows]
            for quantile in QUANTILES:
                reached = [float(next(d for d, share in enumerate(each) if share >= quantile)) for each in of_head]
                wanted[layer, head, f"distance_{100 * quantile:g}{suffix}"] = jackknife(reached)
            for distance in measured:
                within = [each[min(distance, len(each) - 1)] for each in of_head]
                wanted[layer, head, f"within{suffix}", distance] = jackknife(within)
    assert {0, 1, 2, 4} <= measured <= {0, 1, 2, 4, 8, 16, 32}
    require_numbers(numbers_of(distances) | numbers_of(distances.curve, "distance"), wanted)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_distances_equal_those_of_whole_matrices(name, side):
    model, rows = model_of(name), sequences(*LENGTHS)
    found = hw.attention_distances(model, batches_of(rows, side), quantiles=QUANTILES, first=2)
    compare(found, model, name, rows, 2)


def test_first_tokens_are_those_of_packed_documents():
    model, rows = model_of("llama"), sequences(6, 9)
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    packed = {"input_ids": torch.cat(rows)[None], "position_ids": positions, "use_cache": False}
    distances = hw.attention_distances(model, [packed], first=2)
    layers = [layers_of(model, "llama", ids) for ids in rows]
    for row in distances.curve.rows:
        for name, first in (("within", 0), ("within_with_first", 2)):
            of_rows = [shares(of[row.layer][0][row.head], first) for of in layers]
            mass = sum(len(each) * each[min(row.distance, len(each) - 1)] for each in of_rows)
            assert row.statistics[name].value == pytest.approx(mass / 15, abs=1e-10)


def test_cached_keys_are_at_their_distance():
    model, ids = model_of("llama"), torch.stack(sequences(12, 12))
    from headwise.intercept.watch import watch_further
    from headwise.statistics.by_distance import DistanceStatistics

    with watch_further(model, DistanceStatistics(QUANTILES, 2)) as heads:
        run_with_cache(model, ids)
    with watch_further(model, DistanceStatistics(QUANTILES, 2)) as whole, torch.no_grad():
        model(ids)
    for cached, at_once in zip(heads.records, whole.records, strict=True):
        assert cached.statistics.keys() == at_once.statistics.keys()
        for name, moments in at_once.statistics.items():
            if "_" in name or "within" in name:
                torch.testing.assert_close(cached.statistics[name].value, moments.value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mask", [hw.causal(), hw.causal() & hw.window(5), None])
def test_many_blocks_of_rows_equal_one_matrix(mask):
    """Tiles of blockwise attention: several blocks of rows, windows with gaps between the spans of keys."""
    torch.manual_seed(1)
    layer = hw.MultiHeadAttention(20, num_heads=4, num_kv_heads=2, mask=mask).double()
    x = torch.randn(2, 611, 20, dtype=torch.float64) * 3
    distances = hw.attention_distances(layer, [x], quantiles=QUANTILES, first=3)
    with torch.no_grad():
        _, weights = layer(x, return_weights=True)
    for row in distances.rows:
        for suffix, first in (("", 0), ("_with_first", 3)):
            of_sequences = [shares(weights[b, row.head], first) for b in range(2)]
            for quantile in QUANTILES:
                values = [next(d for d, s in enumerate(each) if s >= quantile) for each in of_sequences]
                assert row.statistics[f"distance_{100 * quantile:g}{suffix}"].value == sum(values) / 2


def test_weights_in_float32_have_the_same_shares():
    model = model_of("llama")
    batches = [padded(sequences(*LENGTHS), "left")]
    exact = hw.attention_distances(model, batches)
    rounded = hw.attention_distances(model.float(), batches)
    for one, other in zip(exact.curve.rows, rounded.curve.rows, strict=True):
        assert other.statistics["within"].value == pytest.approx(one.statistics["within"].value, abs=1e-5)


def test_cross_attention_has_no_distances():
    class Cross(torch.nn.Module):
        """Self-attention and cross-attention."""

        def __init__(self):
            super().__init__()
            self.own = hw.MultiHeadAttention(12, num_heads=3)
            self.cross = hw.MultiHeadAttention(12, num_heads=3)

        def forward(self, x, context):
            return self.cross(self.own(x), context)

    torch.manual_seed(0)
    batch = {"x": torch.randn(2, 5, 12), "context": torch.randn(2, 7, 12)}
    with pytest.warns(UserWarning, match="their attention by distance is left out .*: cross"):
        distances = hw.attention_distances(Cross(), [batch])
    assert [row.statistics["distance_90"].n for row in distances.rows] == [2] * 3 + [0] * 3


def test_tables_are_drawn():
    model = model_of("llama")
    texts = hw.Texts(tiny.texts(20, 9, 30), tiny.tokenizer("decoder"))
    distances = hw.attention_distances(model, texts)
    assert list(distances.curve.table())[5:] == ["distance", "within", "within_with_first"]
    axes = distances.curve.plot("within_with_first", heads=[(0, 1), (1, 5)], errors=0)
    assert axes.get_legend_handles_labels()[1] == ["0.1", "1.5"]
    assert list(axes.lines[0].get_xdata())[:4] == [1, 2, 3, 5]
    assert len(distances.curve.plot().get_legend_handles_labels()[1]) == 6
    distances.plot("distance_90")


@pytest.mark.parametrize("quantiles", [(), (0.0,), (1.0,), (0.5, 2), ("a",), 0.5, (1 / 3, 0.333333333)])
def test_shares_that_are_refused(quantiles):
    with pytest.raises(hw.InputError, match="^quantiles: expected "):
        hw.attention_distances(model_of("llama"), [padded(sequences(5), "right")], quantiles=quantiles)


def test_shares_are_those_by_which_localize_ranks_windows():
    """`localize` averages over the queries that have keys outside of window and first tokens; the others have no such
    attention.
    """
    model = model_of("llama", top="ForCausalLM")
    batch = {"input_ids": sequences(40)[0][None]}
    streaming = hw.localize(model, [batch], window=5, first=2)
    distances = hw.attention_distances(model, [batch], first=2)
    for module in streaming.modules:
        for kv_head, outside in enumerate(module.outside):
            within = [
                row.statistics["within_with_first"].value
                for row in distances.curve.rows
                if (row.layer, row.kv_head, row.distance) == (module.layer, kv_head, 4)
            ]
            assert len(within) == 3
            assert outside * (40 - 7) / 40 == pytest.approx(1 - sum(within) / 3, abs=1e-6)
