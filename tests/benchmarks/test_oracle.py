"""The float64 definition that every contestant is compared with, and the rejection of wrong results."""

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
def test_oracle_equals_a_plain_layer_in_float64(regime, rows, monkeypatch):
    monkeypatch.setattr(oracle, "ROWS", rows)
    oracle._with_gradients.cache_clear()
    regime = replace(regime, training=True)
    exact = oracle.layer(regime)
    for name, wanted in plain_layer(regime).items():
        torch.testing.assert_close(exact[name], wanted.detach(), rtol=1e-12, atol=1e-12, msg=name)


def test_window_masks_allow_the_last_keys_up_to_the_query(monkeypatch):
    monkeypatch.setattr("benchmarks.regime.WINDOW", 2)
    monkeypatch.setattr("benchmarks.regime.NARROW", 1)
    narrow, wide = Regime(1, 3, 4, 2, "heads").allowed()[0].int().tolist()
    assert Regime(1, 3, 4, 2, "window").allowed()[0, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert narrow == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert wide == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_padded_lengths_range_from_a_sixteenth_to_the_full_length():
    assert Regime(4, 512, 768, 12, "padding").lengths.tolist() == [32, 192, 352, 512]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mask", MASKS)
def test_headwise_and_torch_peers_agree_with_the_oracle(mask, dtype, training):
    regime = replace(TINY, mask=mask, dtype=dtype, training=training)
    peers.checked(regime)
    for build in (torch_peers.sdpa_block, torch_peers.torch_layer, torch_peers.torch_layer_with_weights):
        oracle.sane(results_of(regime, build), oracle.layer(regime), regime)


@pytest.mark.parametrize("name", sorted(set(peers.PEERS) - {peers.FLEX}))
def test_every_peer_agrees_with_the_oracle(name):
    needed = {"Equinox": "equinox", "Flax NNX": "flax", "x-transformers": "x_transformers"}.get(name, "transformers")
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    peer = peers.PEERS[name]
    for mask in MASKS:
        regime = Regime(3, 37, 30, 5, mask, training=True)
        regime = replace(regime, **peer.flavour)
        oracle.sane(results_of(regime, peer.build), oracle.layer(regime), regime)


@pytest.mark.parametrize("name", ["x-transformers", "LlamaAttention", "Flax NNX", oracle.YARDSTICK])
def test_peers_assign_query_heads_to_the_same_key_value_heads(name):
    needed = {"Flax NNX": "flax", "x-transformers": "x_transformers"}.get(name, "transformers")
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    regime = replace(Regime(3, 37, 36, 6, "causal", training=True, kv_heads=3), **peers.PEERS[name].flavour)
    oracle.sane(results_of(regime, peers.PEERS[name].build), oracle.layer(regime), regime)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["out", "x", "qkv", "out_proj", "qkv_bias", "out_bias"])
@pytest.mark.parametrize(
    "corrupt",
    [torch.zeros_like, torch.randn_like, torch.neg, lambda correct: correct * 1.2, lambda correct: correct.roll(1, 0)],
    ids=["zeros", "noise", "negated", "scaled", "rolled"],
)
def test_wrong_output_or_gradient_is_rejected(name, corrupt, dtype):
    regime = replace(TINY, mask="causal", dtype=dtype, training=True)
    correct, yardstick = results_of(regime), results_of(regime, torch_peers.sdpa_block)
    oracle.check(correct, yardstick, oracle.layer(regime), regime)
    with pytest.raises(WrongError, match=rf"{name if name != 'out' else '(out|worst row)'} is off by"):
        oracle.check({**correct, name: corrupt(correct[name])}, yardstick, oracle.layer(regime), regime)


@pytest.mark.parametrize("row", [0, 17, 36])
def test_one_wrong_row_is_rejected(row):
    regime = replace(TINY, dtype="bfloat16")
    correct, yardstick = results_of(regime), results_of(regime, torch_peers.sdpa_block)
    correct["out"] = correct["out"].clone()
    correct["out"][1, row] *= 0.5
    with pytest.raises(WrongError, match="worst row is off by"):
        oracle.check(correct, yardstick, oracle.layer(regime), regime)


def test_nan_is_rejected():
    regime = replace(TINY, training=True)
    correct, yardstick = results_of(regime), results_of(regime, torch_peers.sdpa_block)
    wrong = {**correct, "x": correct["x"].index_fill(1, torch.tensor([3]), torch.nan)}
    with pytest.raises(WrongError, match="x is off by inf"):
        oracle.check(wrong, yardstick, oracle.layer(regime), regime)


def test_more_than_twice_the_error_of_the_sdpa_block_is_rejected():
    regime = replace(TINY, training=True)
    exact = oracle.layer(regime)
    noise = {name: torch.randn_like(tensor) * tensor.abs().mean() for name, tensor in exact.items()}

    def off(by):
        return {name: tensor + by * noise[name] for name, tensor in exact.items()}

    oracle.check(off(1.9e-6), off(1e-6), exact, regime)
    with pytest.raises(WrongError, match=r"is off by .* of its size, and the SDPA block by"):
        oracle.check(off(2.1e-6), off(1e-6), exact, regime)


def test_wrong_shapes_and_missing_results_are_rejected():
    regime = replace(TINY, training=True)
    correct, exact = results_of(regime), oracle.layer(regime)
    with pytest.raises(WrongError, match=r"out is of shape \(3, 37\), not \(3, 37, 35\)"):
        oracle.sane({**correct, "out": correct["out"][..., 0]}, exact, regime)
    with pytest.raises(WrongError, match=r"returned \['out'\] where"):
        oracle.sane({"out": correct["out"]}, exact, regime)


def test_errors_in_padding_are_ignored_and_those_next_to_it_are_not():
    regime = replace(TINY, mask="padding")
    correct, exact = results_of(regime), oracle.layer(regime)
    out = correct["out"].clone()
    out[~regime.real] = torch.nan
    oracle.sane({"out": out}, exact, regime)
    out[1, regime.lengths[1] - 1] = torch.nan
    with pytest.raises(WrongError, match="off by inf"):
        oracle.sane({"out": out}, exact, regime)


@pytest.mark.parametrize("training", [False, True])
def test_wrong_results_of_headwise_end_the_script(monkeypatch, training):
    def wrong(regime, data):
        contestant = contestants.ours(regime, data)

        def results(returned):
            named = contestant.results(returned)
            corrupted = "qkv" if training else "out"
            return {**named, corrupted: named[corrupted].flip(0)}

        return contestants.Contestant(contestant.run, results)

    with pytest.raises(SystemExit, match=r"\(3, 37, 35, 5\) full float32 (forward|training): .* is off by"):
        peers.checked(replace(TINY, training=training), wrong)


def test_peer_with_wrong_results_is_left_out_and_named(monkeypatch, capsys):
    def uncausal(regime, data):
        return torch_peers.sdpa_block(replace(regime, mask="full"), data)

    monkeypatch.setitem(peers.PEERS, "another", contestants.Peer(uncausal))
    comparison = peers.Comparison(command_line.Options(rounds=1, peers="torch"))
    comparison.add(replace(TINY, mask="causal"))
    assert list(comparison.left_out) == ["another, (3, 37, 35, 5) causal float32 forward"]
    assert "LEFT OUT" in capsys.readouterr().out
    assert "another" not in {row.against for row in comparison.rows}


def test_peer_of_another_task_is_compared_with_the_results_that_are_given():
    comparison = peers.Comparison(command_line.Options())
    contestant = contestants.Contestant(lambda: torch.ones(3, 37, 35), lambda out: {"out": out})
    assert comparison.sane("right", lambda *_: contestant, TINY, {"out": torch.ones(3, 37, 35)}) is contestant
    assert comparison.sane("wrong", lambda *_: contestant, TINY, {"out": torch.full((3, 37, 35), 1.1)}) is None
    assert comparison.left_out == {f"wrong, {TINY.name}": "worst row is off by 9.1e-02 of its size"}
