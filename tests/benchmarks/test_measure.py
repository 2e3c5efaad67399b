"""Interleaved timing, ratios of paired samples, and the rows made from them."""

import pytest
from benchmark_examples import TINY

from benchmarks import (
    command_line,
    measure,
    peers,
)
from benchmarks.measure import Call, Ratio
from benchmarks.regime import Regime


class Clock:
    """A clock that advances only when a call of `call` runs."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def call(self, *seconds, prepare=None):
        """Return a call whose runs take these seconds in turn; further runs take as long as the last one."""
        left = list(seconds)

        def run(*_):
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return Call(run, prepare)


def test_ratio_divides_samples_of_the_same_round():
    clock = Clock()
    # The first run is not counted; the samples are 1 s, 2 s, 4 s and 3 s, 4 s, 4 s.
    calls = {"ours": clock.call(9, 1, 2, 4), "theirs": clock.call(9, 3, 4, 4)}
    samples = measure.interleaved(calls, 3, clock)
    assert samples == {"ours": [1, 2, 4], "theirs": [3, 4, 4]}
    assert Ratio.of(samples["theirs"], samples["ours"]) == Ratio(2.0, 1.0, 3.0)


def test_quick_calls_are_warmed_up_and_repeated_within_a_sample():
    clock, order = Clock(), []
    calls = {name: clock.call(0.004) for name in "abc"}
    runs = {name: call.run for name, call in calls.items()}
    calls = {name: Call(lambda name=name: (order.append(name), runs[name]())) for name in calls}
    samples = measure.interleaved(calls, 3, clock)
    assert all(seconds == pytest.approx([0.004] * 3) for seconds in samples.values())
    samples = order[3::6]
    assert "".join(order[3:]) == "".join(name * 6 for name in samples)
    rounds = ["".join(samples[start : start + 3]) for start in (0, 3, 6)]
    assert all(sorted(order_of_round) == ["a", "b", "c"] for order_of_round in rounds)
    assert len(set(rounds)) > 1


def test_preparation_of_a_run_is_not_timed():
    clock = Clock()

    def prepare():
        clock.now += 50

    assert measure.interleaved({"one": clock.call(2.0, prepare=prepare)}, 2, clock) == {"one": [2.0, 2.0]}


def test_gemm_share_is_the_layers_rate_over_that_of_a_matrix_product():
    regime = Regime(2, 1024, 512, 8)
    assert regime.attention_flops == 4 * 2 * 512 * 1024**2
    assert regime.flops == 2 * 2048 * 512 * 2048 + regime.attention_flops
    assert Regime(2, 3, 512, 8, "causal").attention_flops == 4 * 2 * 512 * 6
    half = {"ours": [regime.flops / 1e9] * 2, measure.GEMM: [measure.gemm_flops() / 2e9] * 2}
    row = measure.gemm_share(regime, regime.flops, half, "ours")
    assert (row.ratio.median, row.ours, row.theirs) == pytest.approx((0.5, 1e9, 2e9))


def test_fastest_peer_is_the_one_with_the_smallest_ratio():
    comparison = peers.Comparison(command_line.Options(rounds=3))
    samples = {"ours": [2.0, 2.0, 4.0], "ours, bias False": [1.0, 1.0, 2.0], "a": [4.0, 5.0, 4.0], "b": [3.0, 1.0, 3.0]}
    comparison.keep(TINY, samples, {"a": "ours", "b": "ours, bias False"}, runs=2)
    assert {row.against: row.ratio for row in comparison.rows[:2]} == {
        "a": Ratio(2.0, 1.0, 2.5),
        "b": Ratio(1.5, 1.0, 3.0),
    }
    fastest = comparison.rows[2]
    assert (fastest.against, fastest.note, fastest.ours, fastest.theirs) == (peers.FASTEST, "b", 0.5, 1.5)
