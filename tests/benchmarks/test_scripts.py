"""Each benchmark script at tiny sizes: it runs, prints JSON, and rejects wrong results before timing."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmark_examples import ROOT

import headwise as hw
from benchmarks import (
    ablating,
    accelerated_steps,
    accelerating,
    attention,
    attention_only,
    calls,
    command_line,
    decoding,
    layer,
    memory,
    models,
    monitoring,
    observed_call,
    peak_memory,
    peers,
    pruned_attention,
    watching,
    watching_methods,
    weight_statistics,
    windows,
)
from benchmarks import all as all_scripts
from benchmarks.measure import Row
from benchmarks.observed_call import check_statistics
from benchmarks.oracle import YARDSTICK, WrongError
from benchmarks.regime import Regime
from benchmarks.watched_model import TINY, watched_model, words
from benchmarks.watching_methods import EAGER, METHODS, OURS, PLAIN, checked_methods

SCRIPTS = [attention, layer, windows, memory, watching, accelerating, ablating, pruned_attention]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_script_runs_and_prints_json_last(script, capsys, monkeypatch):
    # A separate interpreter takes seconds to start.
    for measuring in (watching, memory):
        in_this_process = measuring.peak_in_this_process
        monkeypatch.setattr(measuring, "measured", lambda _, *case, here=in_this_process: here(*case))
    results = script.main(["--tiny", "--peers", "torch", "--rounds", "1", "--only", "forward"])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == results
    assert f"benchmarks.{last['benchmark']}" == script.__name__
    assert last["rows"]
    assert all(Row.read(row).ratio.median > 0 for row in last["rows"])


def results_of_compiling(script, only):
    """Return the results of a tiny run in another interpreter: torch cannot trace the type checks of the tests."""
    command = [sys.executable, "-m", f"benchmarks.{script}", "--tiny", "--peers", "torch", "--rounds", "1"]
    done = subprocess.run([*command, "--only", only], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_decoding_script_compares_compiled_steps():
    results = results_of_compiling("decoding", "8) causal float32")
    fastest = {row.note: row.ratio.median for row in map(Row.read, results["rows"]) if row.against == peers.FASTEST}
    caches = [f"{YARDSTICK}, {kind}" for kind in decoding.CACHES]
    assert list(fastest) == [*caches, *(f"{name}, {decoding.COMPILED}" for name in caches)]
    assert all(ratio > 0 for ratio in fastest.values())
    assert not results["left_out"]


def test_best_way_to_accelerate_an_encoder_is_compared_with_the_fastest_peer():
    results = results_of_compiling("models", "")
    rows = list(map(Row.read, results["rows"]))
    assert [row.against for row in rows] == [models.PLAIN, models.COMPILED, peers.FASTEST] * 2
    assert [row.regime.dtype for row in rows] == ["float32"] * 3 + ["bfloat16"] * 3
    for plain, compiled, best in (rows[:3], rows[3:]):
        fastest = min(plain, compiled, key=lambda row: row.theirs)
        assert best.theirs == fastest.theirs
        assert best.ours <= plain.ours == compiled.ours
        assert best.note.startswith(f"({fastest.against}), Bert, {models.OURS}")
    assert not results["left_out"]


def test_training_steps_of_accelerated_models_are_compared_with_plain_ones(capsys):
    results = accelerated_steps.main(["--tiny", "--peers", "torch", "--rounds", "1"])
    rows = list(map(Row.read, results["rows"]))
    assert [(row.regime.dtype, row.note) for row in rows] == [
        (dtype, "Llama, training step") for dtype in ("float32", "bfloat16")
    ]
    assert all(row.ratio.median > 0 for row in rows)


@pytest.mark.parametrize("is_prompt", [True, False], ids=["prompt", "tokens"])
def test_generation_returns_the_output_of_the_last_token(is_prompt):
    model = accelerated_steps.trained_model("Llama").eval()
    call, output = accelerated_steps.generation(model, torch.arange(9)[None], is_prompt=is_prompt)
    text = torch.cat([torch.arange(9), words(accelerated_steps.STEPS, 4096)])[None]
    with torch.no_grad():
        expected = model(input_ids=text[:, : 9 if is_prompt else None]).logits[:, -1:]
    torch.testing.assert_close(output(), expected, rtol=1e-4, atol=1e-5)
    assert call.seconds(1, time.perf_counter) > 0


ENCODED = Regime(3, 41, 48, 6)


def test_wrong_output_of_an_accelerated_encoder_ends_the_script(monkeypatch):
    accelerate = hw.accelerate

    def wrong(model, **options):
        for name, parameter in model.named_parameters():
            if name.endswith("value.weight"):
                parameter.mul_(1.001)
        return accelerate(model, **options)

    monkeypatch.setattr(hw, "accelerate", wrong)
    comparison = peers.Comparison(command_line.Options(tiny=True, peers="torch"))
    with torch.no_grad(), pytest.raises(SystemExit, match=r"Bert, \(3, 41, 48, 6\) .*, accelerated: .* is off by"):
        models.compare(comparison, "Bert", models.model_of("Bert"), ENCODED)


@pytest.mark.parametrize("build", [models.by_onnx_runtime, models.by_openvino], ids=["onnxruntime", "openvino"])
def test_other_runtimes_compute_the_encoder(build, request):
    pytest.importorskip(request.node.callspec.id)
    model = models.model_of("Bert")
    inputs = models.inputs_of(model.config, ENCODED)
    encoder = models.Encoder(model, list(inputs))
    with torch.no_grad():
        contestant = build(encoder, tuple(inputs.values()), "float32")
        torch.testing.assert_close(contestant.results(contestant.run())["out"], encoder(*inputs.values()))


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("name", [attention_only.ATTEND, attention_only.OBSERVED])
def test_attention_without_projections_is_checked_before_timing(name, training, monkeypatch):
    if training and name == attention_only.OBSERVED:
        pytest.skip("statistics have no gradient")
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


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_wrong_statistics_of_one_call_end_the_script(mask, monkeypatch):
    regime = Regime(1, 8192, 30, 5, mask, "bfloat16")
    check_statistics(regime)
    monkeypatch.setitem(observed_call.MASKS, mask, hw.causal() & hw.window(255))
    with pytest.raises(
        SystemExit, match=r"\(1, 256, 30, 5\) .*, one call with statistics: .* is off by .* of its size"
    ):
        check_statistics(regime)


def test_wrong_output_of_an_accelerated_model_ends_the_script(monkeypatch):
    watched = watched_model(replace(TINY, length=accelerating.CHECKED))
    accelerating.check(watched.model, watched.tokens, TINY)
    with pytest.raises(
        SystemExit, match=r"(?s)not every attention call was accelerated; .* faster than the native ones"
    ):
        accelerating.check(watched.model, watched.tokens[:20], TINY)
    original, calls = accelerating.forward, []

    def wrong(model, tokens):
        calls.append(original(model, tokens))
        return calls[-1] + 1e-5 if len(calls) == 2 else calls[-1]  # the second call is the accelerated one

    monkeypatch.setattr(accelerating, "forward", wrong)
    with pytest.raises(SystemExit, match="accelerated: out is off by .* and the SDPA block by"):
        accelerating.check(watched.model, watched.tokens, TINY)


def test_steps_of_a_training_are_compared_with_both_intervals(capsys):
    results = monitoring.main(["--tiny", "--rounds", "1", "--peers", "torch"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == results
    ratios = {each["against"]: each["ratio"]["median"] for each in results["rows"]}
    assert list(ratios) == [monitoring.EVERY_1, monitoring.UNOBSERVED, monitoring.EVERY_100]
    assert ratios[monitoring.EVERY_100] == pytest.approx(1 + (ratios[monitoring.EVERY_1] - 1) / 100, abs=0.002)


def test_short_calls_are_compared_and_measured(capsys):
    results = calls.main(["--tiny", "--rounds", "1", "--peers", "torch"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == results
    rows = [(each["against"], each["note"], each["regime"]["training"]) for each in results["rows"]]
    assert len(set(rows)) == 2 * 5 + 4  # in both modes: attention twice, layers thrice; and steps of decoding
    for each in results["rows"]:
        assert each["ratio"]["median"] == pytest.approx((each["ours"] - each["theirs"]) * 1e6, rel=1e-2, abs=2.0)


def test_short_calls_with_other_results_end_the_script(monkeypatch):
    monkeypatch.setattr(calls.hw, "attend", lambda q, k, v, mask=None: q + v)
    with pytest.raises(SystemExit, match=r"\(1, 1, 128, 4\) .*, against SDPA : results differ by "):
        calls.main(["--tiny", "--rounds", "1", "--peers", "torch"])


def test_losses_that_a_monitor_changes_end_the_script(monkeypatch):
    original = monitoring.training

    def wrong(regime, every, stack):
        step, monitor = original(regime, every, stack)
        return monitoring.Training((lambda: step() * 1.0000001) if every == 1 else step, monitor)

    monkeypatch.setattr(monitoring, "training", wrong)
    with pytest.raises(SystemExit, match=r"\(1, 40, 48, 6\) .*: losses differ in step 0: {'plain': .*, 'observed': "):
        monitoring.main(["--tiny", "--rounds", "1", "--peers", "torch"])


def test_losses_that_differ_from_whole_forwards_end_the_script():
    model, batch = ablating.model_and_batch(TINY)
    heads = [(1, 2)]
    losses_by_method = {name: method(model, batch, heads, 24)[1] for name, method in ablating.METHODS.items()}
    ablating.require_same(losses_by_method)
    losses_by_method["ours"] = ablating.by_ablate(model, batch, [(1, 3)], 24)[1]
    with pytest.raises(SystemExit, match="ours: losses differ from those of whole forwards by"):
        ablating.require_same(losses_by_method)


def test_a_pruned_layer_with_another_output_ends_the_script(monkeypatch):
    regime = replace(TINY, length=41)
    with torch.no_grad():
        for name, build in pruned_attention.LAYERS.items():
            layer = build(regime)
            attention = layer.of(pruned_attention.pruned(layer, regime))
            sizes = [attention.k_proj.out_features, getattr(attention, "o_proj", attention.q_proj).weight.numel()]
            assert sizes == [regime.head_dim, 48 * 3 * regime.head_dim], name
        prune = hw.prune
        monkeypatch.setattr(hw, "prune", lambda model, plan: prune(model, plan).apply(shift))
        with pytest.raises(SystemExit, match="the output without half of the heads is off by"):
            pruned_attention.pruned(build(regime), regime)


def shift(module):
    """Change the weights of a linear layer."""
    if isinstance(module, torch.nn.Linear):
        module.weight += 0.01


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


def test_options_are_passed_on_as_a_command_line():
    options = command_line.arguments("", ["--tiny", "--rounds", "5", "--long-rounds", "9", "--peers", "torch"])
    assert options == command_line.Options(tiny=True, rounds=5, long_rounds=5, peers="torch")
    assert command_line.arguments("", options.command_line) == options


def test_unknown_script_is_refused(capsys):
    with pytest.raises(SystemExit):
        all_scripts.main(["layer", "layers"])
    assert "scripts: expected any of attention, layer, " in capsys.readouterr().err
