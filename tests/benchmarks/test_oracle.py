"""The float64 definition that every contestant is compared with, and what is rejected."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from benchmark_examples import TINY, plain_layer, results_of

from benchmarks import (
    command_line,
    contestants,
    oracle,
    peers,
    torch_peers,
)
from benchmarks.oracle import WrongError
from benchmarks.regime import MASKS, Regime


@pytest.mark.parametrize("rows", [5, 512])
@pytest.mark.parametrize("regime", [*(replace(TINY, mask=mask) for mask in MASKS), Regime(2, 13, 42, 6, kv_heads=3)])
def test_the_oracle_is_the_layer_by_definition(regime, rows, monkeypatch):
    monkeypatch.setattr(oracle, "ROWS", rows)
    oracle._with_gradients.cache_clear()
    regime = replace(regime, training=True)
    exact = oracle.layer(regime)
    for name, wanted in plain_layer(regime).items():
        torch.testing.assert_close(exact[name], wanted.detach(), rtol=1e-12, atol=1e-12, msg=name)


def test_the_window_and_the_narrow_heads_are_what_their_names_say(monkeypatch):
    monkeypatch.setattr("benchmarks.regime.WINDOW", 2)
    monkeypatch.setattr("benchmarks.regime.NARROW", 1)
    narrow, wide = Regime(1, 3, 4, 2, "heads").allowed()[0].int().tolist()
    assert Regime(1, 3, 4, 2, "window").allowed()[0, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert narrow == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert wide == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_lengths_of_a_padded_batch_go_from_a_sixteenth_to_all():
    assert Regime(4, 512, 768, 12, "padding").lengths.tolist() == [32, 192, 352, 512]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mask", MASKS)
def test_ours_and_the_peers_of_torch_are_right(mask, dtype, training):
    regime = replace(TINY, mask=mask, dtype=dtype, training=training)
    peers.checked(regime)
    for build in (torch_peers.sdpa_block, torch_peers.torch_layer, torch_peers.torch_layer_with_weights):
        oracle.sane(results_of(regime, build), oracle.layer(regime), regime)


@pytest.mark.parametrize("name", sorted(set(peers.PEERS) - {peers.FLEX}))
def test_every_peer_computes_the_same(name):
    needed = {"Equinox": "equinox", "Flax NNX": "flax", "x-transformers": "x_transformers"}.get(name, "transformers")
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    peer = peers.PEERS[name]
    for mask in MASKS:
        regime = Regime(3, 37, 30, 5, mask, training=True)
        regime = replace(regime, **peer.flavour)
        oracle.sane(results_of(regime, peer.build), oracle.layer(regime), regime)


@pytest.mark.parametrize("name", ["x-transformers", "LlamaAttention", "Flax NNX", oracle.YARDSTICK])
def test_grouped_heads_are_the_same_heads_everywhere(name):
    needed = {"Flax NNX": "flax", "x-transformers": "x_transformers"}.get(name, "transformers")
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    regime = replace(Regime(3, 37, 36, 6, "causal", training=True, kv_heads=3), **peers.PEERS[name].flavour)
    oracle.sane(results_of(regime, peers.PEERS[name].build), oracle.layer(regime), regime)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["out", "x", "qkv", "out_proj", "qkv_bias", "out_bias"])
@pytest.mark.parametrize(
    "garbage",
    [torch.zeros_like, torch.randn_like, torch.neg, lambda right: right * 1.2, lambda right: right.roll(1, 0)],
    ids=["zeros", "noise", "negated", "scaled", "rolled"],
)
def test_garbage_is_refused(name, garbage, dtype):
    regime = replace(TINY, mask="causal", dtype=dtype, training=True)
    right, yardstick = results_of(regime), results_of(regime, torch_peers.sdpa_block)
    oracle.check(right, yardstick, oracle.layer(regime), regime)
    with pytest.raises(WrongError, match=rf"{name if name != 'out' else '(out|worst row)'} is off by"):
        oracle.check({**right, name: garbage(right[name])}, yardstick, oracle.layer(regime), regime)


@pytest.mark.parametrize("row", [0, 17, 36])
def test_one_wrong_row_is_refused(row):
    regime = replace(TINY, dtype="bfloat16")
    right, yardstick = results_of(regime), results_of(regime, torch_peers.sdpa_block)
    right["out"] = right["out"].clone()
    right["out"][1, row] *= 0.5
    with pytest.raises(WrongError, match="worst row is off by"):
        oracle.check(right, yardstick, oracle.layer(regime), regime)


def test_what_is_no_number_is_refused():
    regime = replace(TINY, training=True)
    right, yardstick = results_of(regime), results_of(regime, torch_peers.sdpa_block)
    wrong = {**right, "x": right["x"].index_fill(1, torch.tensor([3]), torch.nan)}
    with pytest.raises(WrongError, match="x is off by inf"):
        oracle.check(wrong, yardstick, oracle.layer(regime), regime)


def test_more_than_twice_the_error_of_the_yardstick_is_refused():
    regime = replace(TINY, training=True)
    exact = oracle.layer(regime)
    noise = {name: torch.randn_like(tensor) * tensor.abs().mean() for name, tensor in exact.items()}

    def off(by):
        return {name: tensor + by * noise[name] for name, tensor in exact.items()}

    oracle.check(off(1.9e-6), off(1e-6), exact, regime)
    with pytest.raises(WrongError, match=r"is off by .* of its size, and the SDPA block by"):
        oracle.check(off(2.1e-6), off(1e-6), exact, regime)


def test_results_of_another_shape_and_missing_ones_are_refused():
    regime = replace(TINY, training=True)
    right, exact = results_of(regime), oracle.layer(regime)
    with pytest.raises(WrongError, match=r"out is of shape \(3, 37\), not \(3, 37, 35\)"):
        oracle.sane({**right, "out": right["out"][..., 0]}, exact, regime)
    with pytest.raises(WrongError, match=r"returned \['out'\] where"):
        oracle.sane({"out": right["out"]}, exact, regime)


def test_padding_does_not_count_and_its_neighbours_do():
    regime = replace(TINY, mask="padding")
    right, exact = results_of(regime), oracle.layer(regime)
    out = right["out"].clone()
    out[~regime.real] = torch.nan
    oracle.sane({"out": out}, exact, regime)
    out[1, regime.lengths[1] - 1] = torch.nan
    with pytest.raises(WrongError, match="off by inf"):
        oracle.sane({"out": out}, exact, regime)


@pytest.mark.parametrize("training", [False, True])
def test_a_layer_that_returns_garbage_ends_the_script(monkeypatch, training):
    def wrong(regime, data):
        made = contestants.ours(regime, data)

        def results(found):
            named = made.results(found)
            spoiled = "qkv" if training else "out"
            return {**named, spoiled: named[spoiled].flip(0)}

        return contestants.Contestant(made.run, results)

    with pytest.raises(SystemExit, match=r"\(3, 37, 35, 5\) full float32 (forward|training): .* is off by"):
        peers.checked(replace(TINY, training=training), wrong)


def test_a_peer_that_computes_something_else_is_left_out_by_name(monkeypatch, capsys):
    def uncausal(regime, data):
        return torch_peers.sdpa_block(replace(regime, mask="full"), data)

    monkeypatch.setitem(peers.PEERS, "another", contestants.Peer(uncausal))
    found = peers.Comparison(command_line.Options(rounds=1, peers="torch"))
    found.add(replace(TINY, mask="causal"))
    assert list(found.left_out) == ["another, (3, 37, 35, 5) causal float32 forward"]
    assert "LEFT OUT" in capsys.readouterr().out
    assert "another" not in {row.against for row in found.rows}
