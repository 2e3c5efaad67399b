"""Interleaved timing, ratios of pairs, and the rows that are made of them."""

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
    """Stands still but for what calls add."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def call(self, *seconds, prepare=None):
        """A call that takes so long, and the last of them ever after."""
        left = list(seconds)

        def run(*_):
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return Call(run, prepare)


def test_ratios_are_of_pairs_of_a_round():
    clock = Clock()
    # One run is not counted; then samples of 1 s, 2 s, 4 s and of 3 s, 4 s, 4 s.
    calls = {"ours": clock.call(9, 1, 2, 4), "theirs": clock.call(9, 3, 4, 4)}
    taken = measure.interleaved(calls, 3, clock)
    assert taken == {"ours": [1, 2, 4], "theirs": [3, 4, 4]}
    assert Ratio.of(taken["theirs"], taken["ours"]) == Ratio(2.0, 1.0, 3.0)


def test_what_is_quick_is_repeated_within_a_sample_after_a_run_that_is_not_counted():
    clock, order = Clock(), []
    calls = {name: clock.call(0.004) for name in "abc"}
    runs = {name: call.run for name, call in calls.items()}
    calls = {name: Call(lambda name=name: (order.append(name), runs[name]())) for name in calls}
    taken = measure.interleaved(calls, 3, clock)
    assert all(each == pytest.approx([0.004] * 3) for each in taken.values())
    samples = order[3::6]
    assert "".join(order[3:]) == "".join(name * 6 for name in samples)
    rounds = ["".join(samples[start : start + 3]) for start in (0, 3, 6)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 1


def test_what_prepares_a_run_is_not_timed():
    clock = Clock()

    def prepare():
        clock.now += 50

    assert measure.interleaved({"one": clock.call(2.0, prepare=prepare)}, 2, clock) == {"one": [2.0, 2.0]}


def test_the_share_of_the_rate_is_work_over_time_over_that_of_the_product(monkeypatch):
    regime = Regime(2, 1024, 512, 8)
    assert regime.flops == 2 * 2048 * 512 * 2048 + 4 * 2 * 512 * 1024**2
    half = {"ours": [regime.flops / 1e9] * 2, peers.GEMM: [measure.gemm_flops() / 2e9] * 2}
    row = peers._share(regime, half)
    assert (row.ratio.median, row.ours, row.theirs) == pytest.approx((0.5, 1e9, 2e9))


def test_the_fastest_peer_is_the_one_that_ours_beats_by_least():
    found = peers.Comparison(command_line.Options(rounds=3))
    taken = {"ours": [2.0, 2.0, 4.0], "ours, bias False": [1.0, 1.0, 2.0], "a": [4.0, 5.0, 4.0], "b": [3.0, 1.0, 3.0]}
    found.keep(TINY, taken, {"a": "ours", "b": "ours, bias False"}, runs=2)
    assert {row.against: row.ratio for row in found.rows[:2]} == {"a": Ratio(2.0, 1.0, 2.5), "b": Ratio(1.5, 1.0, 3.0)}
    fastest = found.rows[2]
    assert (fastest.against, fastest.note, fastest.ours, fastest.theirs) == (peers.FASTEST, "b", 0.5, 1.5)
