"""The harness of the benchmarks: what it refuses, what it makes of times, and what it writes. Nothing is timed here."""

import importlib.util
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from benchmarks import (
    ablating,
    alone,
    command,
    contestants,
    decoding,
    gpu,
    layer,
    matrices,
    measure,
    memory,
    oracle,
    peak,
    peers,
    promises,
    torch_peers,
    watching,
    windows,
)
from benchmarks import report as make_benchmarks
from benchmarks.measure import Call, Ratio, Row
from benchmarks.oracle import WrongError
from benchmarks.regime import MASKS, Regime

ROOT = Path(__file__).parent.parent
TINY = Regime(3, 37, 35, 5)


def results_of(regime, build=contestants.ours):
    contestant = build(regime, regime.data())
    return contestant.results(contestant.run())


def plain_layer(regime):
    """The layer in a few lines of float64, the whole matrix, differentiated by autograd."""
    data = regime.data()
    x, weights = data.x.double().requires_grad_(), {n: t.double() for n, t in data.weights.named().items()}
    weights = {name: tensor.requires_grad_() for name, tensor in weights.items()}
    projected = x @ weights["qkv"].T + weights["qkv_bias"]
    q, k, v = (part.unflatten(2, (-1, regime.head_dim)).transpose(1, 2) for part in projected.split(regime.widths, 2))
    groups = regime.heads // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).mT / regime.head_dim**0.5
    allowed = regime.allowed()
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    heads = scores.softmax(-1) @ v.repeat_interleave(groups, 1)
    out = heads.transpose(1, 2).flatten(2) @ weights["out_proj"].T + weights["out_bias"]
    gradients = torch.autograd.grad(out, [x, *weights.values()], data.upstream.double())
    return {"out": out, **dict(zip(["x", *weights], gradients, strict=True))}


# -- the oracle and the check -----------------------------------------------------------------------------------------


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
    found = peers.Comparison(command.Options(rounds=1, peers="torch"))
    found.add(replace(TINY, mask="causal"))
    assert list(found.left_out) == ["another, (3, 37, 35, 5) causal float32 forward"]
    assert "LEFT OUT" in capsys.readouterr().out
    assert "another" not in {row.against for row in found.rows}


# -- times ------------------------------------------------------------------------------------------------------------


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
    found = peers.Comparison(command.Options(rounds=3))
    taken = {"ours": [2.0, 2.0, 4.0], "ours, bias False": [1.0, 1.0, 2.0], "a": [4.0, 5.0, 4.0], "b": [3.0, 1.0, 3.0]}
    found.keep(TINY, taken, {"a": "ours", "b": "ours, bias False"}, runs=2)
    assert {row.against: row.ratio for row in found.rows[:2]} == {"a": Ratio(2.0, 1.0, 2.5), "b": Ratio(1.5, 1.0, 3.0)}
    fastest = found.rows[2]
    assert (fastest.against, fastest.note, fastest.ours, fastest.theirs) == (peers.FASTEST, "b", 0.5, 1.5)


# -- the scripts ------------------------------------------------------------------------------------------------------


SCRIPTS = [layer, windows, decoding, watching, ablating, gpu]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_script_runs_and_says_it_in_json_last(script, capsys, monkeypatch):
    # An interpreter of its own takes seconds to start.
    monkeypatch.setattr(watching, "measured", lambda _, name, regime: watching.child(name, regime))
    results = script.main(["--tiny", "--peers", "torch", "--rounds", "1", "--only", "forward"])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == results
    assert f"benchmarks.{last['benchmark']}" == script.__name__
    assert last["rows"]
    assert all(Row.read(row).ratio.median > 0 for row in last["rows"])


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("name", [alone.ATTEND, alone.BLOCKWISE])
def test_attention_alone_is_checked_before_it_is_measured(name, training, monkeypatch):
    regime = Regime(1, 64, 30, 5, "window", training=training)
    alone.check(name, regime)
    right = alone.attention

    def wrong(asked, regime):
        run, inputs = right(asked, regime)
        return (lambda: [*run()[:-1], run()[-1] * 1.1]) if asked == name else run, inputs

    monkeypatch.setattr(alone, "attention", wrong)
    with pytest.raises(SystemExit, match=f"{name}, attention alone: .* is off by"):
        alone.check(name, regime)


def test_the_peak_of_a_run_is_what_it_holds_at_once():
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("Linux alone tells the peak")
    megabytes = peak.peak(lambda: torch.ones(64, 1024, 1024).sum()) / 2**20
    assert 240 < megabytes < 300


def test_what_is_watched_wrongly_is_not_timed(monkeypatch):
    right = watching.ours

    def wrong(of):
        way = right(of)
        return lambda length: {**(found := way(length)), "distance": found["distance"] * 1.001}

    of = watching.subject(watching.TINY)
    with torch.no_grad():
        ways, left_out = watching.checked(of, list(watching.WAYS)[:3], 40)
        assert (list(ways), left_out) == (list(watching.WAYS)[:3], {})
        monkeypatch.setitem(watching.WAYS, watching.OURS, wrong)
        with pytest.raises(SystemExit, match="watched, 40 tokens: distance is off by 1.0e-03 of its size in 12 heads"):
            watching.checked(of, [watching.OURS], 40)


def test_other_losses_than_those_of_whole_forwards_are_not_timed():
    model, batch = ablating.subject(ablating.TINY)
    heads = [(1, 2)]
    found = {name: way(model, batch, heads, 24)[1] for name, way in ablating.WAYS.items()}
    ablating.require_same(found)
    found["ours"] = ablating.ours(model, batch, [(1, 3)], 24)[1]
    with pytest.raises(SystemExit, match="ours: losses differ from those of whole forwards by"):
        ablating.require_same(found)


def test_a_peer_that_measures_something_else_is_left_out_by_name(monkeypatch, capsys):
    right = watching.eager
    monkeypatch.setitem(watching.WAYS, watching.EAGER, lambda of: lambda length: right(of)(length - 1))
    with torch.no_grad():
        ways, left_out = watching.checked(watching.subject(watching.TINY), [watching.PLAIN, watching.EAGER], 40)
    assert (list(ways), list(left_out)) == ([watching.PLAIN], [watching.EAGER])
    assert f"LEFT OUT  {watching.EAGER}: " in capsys.readouterr().out


def test_statistics_of_a_matrix_that_are_not_there_or_too_many_are_refused():
    weights = torch.eye(5, dtype=torch.float64).expand(2, 5, 5)
    found = matrices.statistics(weights, weights, matrices.Text(torch.tensor([7, 8, 7, 9, 8])))
    matrices.check(found, found)
    assert found["self"].tolist() == [1, 1]
    assert found["received"].tolist() == pytest.approx([1 / 3, 1 / 3])  # the third key, which three rows see
    assert found["entropy"].tolist() == found["previous"].tolist() == found["duplicate"].tolist() == [0, 0]
    with pytest.raises(WrongError, match=r"measured \['confidence'.* where \['confidence'"):
        matrices.check({**found, "special": found["self"]}, found)


def test_a_missing_peer_is_one_sentence():
    with pytest.raises(SystemExit, match=r'not_there: not installed, .*; pip install "headwise\[bench\]"'):
        command.require("torch", "not_there")


# -- the document -----------------------------------------------------------------------------------------------------


def results(*rows, benchmark="layer", left_out=None):
    return {
        "benchmark": benchmark,
        "date": "2026-01-02",
        "rounds": 7,
        "quick": False,
        "only": "",
        "machine": {"cpu": "a processor", "cores": 2, "threads": 2, "capability": "AVX512", "gpu": None},
        "versions": {"torch": "2.13.0"},
        "rows": [asdict(row) for row in rows],
        "left_out": left_out or {},
    }


def row(median, regime=None, against=peers.TORCH_LAYER):
    return Row(regime or Regime(2, 1024, 512, 8), against, Ratio(median, median - 0.1, median + 0.1), 0.01, 0.02)


def line(text, *parts):
    (found,) = [line for line in text.splitlines() if all(part in line for part in parts)]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_the_targets_are_those_that_were_set():
    assert [(claim.target, claim.at_most) for claim in promises.CLAIMS] == [
        (1.0, False),  # fastest peer, float32, forward
        (1.0, False),  # and training
        (1.4, False),  # nn.MultiheadAttention, float32, full
        (2.5, False),  # and causal
        (2.0, False),  # SDPA block, bfloat16, forward
        (1.5, False),  # and training
        (0.85, False),  # share of the GEMM rate, float32
        (0.60, False),  # and bfloat16
        (15.0, False),  # window, forward
        (10.0, False),  # and training
        (3.0, False),  # padded, nn.MultiheadAttention
        (1.5, False),  # and the SDPA block
        (1.3, False),  # decoding
        (9.0, True),  # growth
        (2.0, True),  # memory
        (1.4, True),  # watching at 2,048
        (1.6, True),  # and at 8,192
        (3.0, False),  # output_attentions=True
        (1.0, True),  # 300 MB
        (1.0, True),  # 1 GB
        (1.8, False),  # every head removed
    ]


def test_a_claim_is_judged_by_its_worst_regime_and_a_miss_is_marked():
    longer = Regime(1, 4096, 512, 8)
    text = make_benchmarks.document([results(row(1.6), row(1.3, longer))])
    cells = line(text, "float32, 1,024 and more, forward, full")
    assert cells[1:4] == ["at least 1.4", "1.30", "1.20 to 1.40"]
    assert cells[4:] == ["(1, 4096, 512, 8) full float32 forward", "1 of 2", "**missed**"]
    text = make_benchmarks.document([results(row(1.6), row(1.4, longer))])
    assert line(text, "float32, 1,024 and more, forward, full")[-2:] == ["2 of 2", "met"]
    assert line(text, "decoding step")[-1] == "not measured"


@pytest.mark.parametrize("part", [{"only": "1024"}, {"quick": True}])
def test_what_was_measured_in_part_is_not_called_met(part):
    found = results(row(1.6)) | part
    assert (
        line(make_benchmarks.document([found]), "float32, 1,024 and more, forward, full")[-1]
        == "met in part of the regimes"
    )
    assert "A part of the regimes, not all." in make_benchmarks.document([found])
    assert (
        line(make_benchmarks.document([results(row(1.3)) | part]), "1,024 and more, forward, full")[-1] == "**missed**"
    )


def test_growth_and_memory_may_not_exceed_their_targets():
    regime = Regime(1, 8192, 512, 8, "window", training=True)
    longer = replace(regime, length=32768)
    for median, verdict in ((1.9, "met"), (2.1, "**missed**")):
        text = make_benchmarks.document([results(row(median, regime, memory.SIZES), benchmark="memory")])
        assert line(text, "peak extra memory of blockwise")[-1] == verdict
    text = make_benchmarks.document([results(row(9.5, longer, windows.GROWTH), benchmark="windows")])
    assert line(text, "cost growth")[-1] == "**missed**"


TRAINING, NARROW = {"training": True}, {"dtype": "bfloat16"}
LONG_WINDOW = {"mask": "window", "length": 8192}


@pytest.mark.parametrize(
    ("says", "benchmark", "against", "covered", "other"),
    [
        ("fastest peer, float32, every regime, forward", "padding", peers.FASTEST, {}, NARROW),
        ("fastest peer, float32, every regime, training", "layer", peers.FASTEST, TRAINING, {"training": False}),
        ("1,024 and more, forward, full", "layer", peers.TORCH_LAYER, {}, {"length": 512}),
        ("1,024 and more, forward, causal", "layer", peers.TORCH_LAYER, {"mask": "causal"}, {"mask": "full"}),
        ("bfloat16, 1,024 and more, forward", "layer", oracle.YARDSTICK, NARROW, {"length": 128}),
        ("bfloat16, 1,024 and more, training", "grouped", oracle.YARDSTICK, NARROW | TRAINING, {"training": False}),
        ("1,024, float32", "layer", peers.GEMM, {}, {"length": 4096}),
        ("1,024, bfloat16", "layer", peers.GEMM, NARROW, {"mask": "causal"}),
        ("with that mask, forward", "windows", alone.SDPA, LONG_WINDOW, {"length": 4096}),
        ("with that mask, training", "windows", alone.SDPA, LONG_WINDOW | TRAINING, {"mask": "heads"}),
        ("`key_padding_mask`", "padding", peers.TORCH_LAYER, {"mask": "padding"}, TRAINING),
        ("the SDPA block with a mask", "padding", oracle.YARDSTICK, {"mask": "padding"}, TRAINING),
        ("decoding step", "decoding", "LlamaAttention, DynamicCache", {"length": 4160}, {"length": 104}),
        ("cost growth", "windows", windows.GROWTH, {"length": 32768}, {"length": 512}),
        ("peak extra memory of blockwise", "memory", memory.SIZES, {"length": 8192}, {"length": 256}),
        ("2,048 tokens, over its plain", "watching", watching.PLAIN, {"length": 2048}, {"length": 8192}),
        ("8,192 tokens, over its plain", "watching", watching.PLAIN, {"length": 8192}, {"length": 2048}),
        ("statistics from it", "watching", watching.EAGER, {"length": 2048}, {"length": 1024}),
        ("over 300 MB", "watching", watching.MODEL_EXTRA, {"length": 8192}, {"length": 2048}),
        ("over 1 GB", "watching", watching.CALL_EXTRA, {"length": 32768}, {"length": 8192}),
        ("every head of SmolLM2", "ablating", ablating.WHOLE, {"batch": 16}, {"batch": 4}),
    ],
)
def test_a_claim_covers_its_regimes_and_no_others(says, benchmark, against, covered, other):
    (claim,) = [claim for claim in promises.CLAIMS if says in claim.says]
    regime = replace(Regime(2, 1024, 512, 8), **covered)
    assert claim.covers(benchmark, row(1.0, regime, against))
    assert not claim.covers(benchmark, row(1.0, regime, "somebody else"))
    assert not claim.covers(benchmark, row(1.0, replace(regime, **other), against))


def test_the_document_says_where_when_with_what_and_what_was_left_out():
    text = make_benchmarks.document([results(row(1.6), left_out={"a peer, a regime": "has no backward"})])
    assert "2026-01-02, a processor, 2 cores, AVX512, 2 threads, 7 rounds; torch 2.13.0." in text
    assert "- a peer, a regime: has no backward" in text
    assert "Nothing has run on a GPU yet" in text
    on_gpu = make_benchmarks.document([results(row(1.6), benchmark="gpu")])
    assert "Nothing has run on a GPU yet" not in on_gpu


def test_the_document_is_that_of_the_results_that_are_kept():
    found = make_benchmarks.load(ROOT / "benchmarks" / "results")
    assert not any(each["quick"] for each in found)
    assert (ROOT / "docs" / "reports" / "benchmarks.md").read_text(encoding="utf-8") == make_benchmarks.document(found)
