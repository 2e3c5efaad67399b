"""Each benchmark script at tiny sizes: it runs, prints JSON, and rejects wrong results before timing."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import (
    ablating,
    attention_only,
    command_line,
    decoding,
    gpu,
    layer,
    peak_memory,
    watching,
    watching_methods,
    weight_statistics,
    windows,
)
from benchmarks.measure import Row
from benchmarks.oracle import WrongError
from benchmarks.regime import Regime
from benchmarks.watched_model import TINY, watched_model
from benchmarks.watching_methods import EAGER, METHODS, OURS, PLAIN, checked_methods

SCRIPTS = [layer, windows, decoding, watching, ablating, gpu]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_script_runs_and_prints_json_last(script, capsys, monkeypatch):
    # A separate interpreter takes seconds to start.
    monkeypatch.setattr(watching, "measured", lambda _, name, regime: watching.peak_in_this_process(name, regime))
    results = script.main(["--tiny", "--peers", "torch", "--rounds", "1", "--only", "forward"])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == results
    assert f"benchmarks.{last['benchmark']}" == script.__name__
    assert last["rows"]
    assert all(Row.read(row).ratio.median > 0 for row in last["rows"])


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("name", [attention_only.ATTEND, attention_only.BLOCKWISE])
def test_attention_without_projections_is_checked_before_timing(name, training, monkeypatch):
    regime = Regime(1, 64, 30, 5, "window", training=training)
    attention_only.check(name, regime)
    original = attention_only.attention

    def wrong(requested, regime):
        run, inputs = original(requested, regime)
        return (lambda: [*run()[:-1], run()[-1] * 1.1]) if requested == name else run, inputs

    monkeypatch.setattr(attention_only, "attention", wrong)
    with pytest.raises(SystemExit, match=f"{name}, attention alone: .* is off by"):
        attention_only.check(name, regime)


def test_peak_of_a_call_is_its_largest_memory_use():
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("peak memory is only available on Linux")
    megabytes = peak_memory.peak(lambda: torch.ones(64, 1024, 1024).sum()) / 2**20
    assert 240 < megabytes < 300


def test_wrong_statistics_of_headwise_end_the_script(monkeypatch):
    original = watching_methods.by_watch

    def wrong(watched):
        method = original(watched)
        return lambda length: {**(found := method(length)), "distance": found["distance"] * 1.001}

    watched = watched_model(TINY)
    with torch.no_grad():
        methods, left_out = checked_methods(watched, list(METHODS)[:3], 40)
        assert (list(methods), left_out) == (list(METHODS)[:3], {})
        monkeypatch.setitem(METHODS, OURS, wrong)
        with pytest.raises(SystemExit, match="watched, 40 tokens: distance is off by 1.0e-03 of its size in 12 heads"):
            checked_methods(watched, [OURS], 40)


def test_losses_that_differ_from_whole_forwards_end_the_script():
    model, batch = ablating.model_and_batch(TINY)
    heads = [(1, 2)]
    losses_by_method = {name: method(model, batch, heads, 24)[1] for name, method in ablating.METHODS.items()}
    ablating.require_same(losses_by_method)
    losses_by_method["ours"] = ablating.by_ablate(model, batch, [(1, 3)], 24)[1]
    with pytest.raises(SystemExit, match="ours: losses differ from those of whole forwards by"):
        ablating.require_same(losses_by_method)


def test_peer_with_wrong_statistics_is_left_out_and_named(monkeypatch, capsys):
    original = watching_methods.by_output_attentions
    monkeypatch.setitem(METHODS, EAGER, lambda watched: lambda length: original(watched)(length - 1))
    with torch.no_grad():
        methods, left_out = checked_methods(watched_model(TINY), [PLAIN, EAGER], 40)
    assert (list(methods), list(left_out)) == ([PLAIN], [EAGER])
    assert f"LEFT OUT  {EAGER}: " in capsys.readouterr().out


def test_missing_and_additional_statistics_are_rejected():
    weights = torch.eye(5, dtype=torch.float64).expand(2, 5, 5)
    statistics = weight_statistics.statistics(weights, weights, weight_statistics.Text(torch.tensor([7, 8, 7, 9, 8])))
    weight_statistics.check(statistics, statistics)
    assert statistics["self"].tolist() == [1, 1]
    assert statistics["received"].tolist() == pytest.approx(
        [1 / 3, 1 / 3]
    )  # the third key, which is visible to three rows
    assert (
        statistics["entropy"].tolist() == statistics["previous"].tolist() == statistics["duplicate"].tolist() == [0, 0]
    )
    with pytest.raises(WrongError, match=r"measured \['confidence'.* where \['confidence'"):
        weight_statistics.check({**statistics, "special": statistics["self"]}, statistics)


def test_missing_package_gives_a_one_sentence_message():
    with pytest.raises(SystemExit, match=r'not_there: not installed, .*; pip install "headwise\[bench\]"'):
        command_line.require("torch", "not_there")
