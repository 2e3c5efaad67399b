"""The targets, the regimes that each target covers, and when it counts as met."""

from dataclasses import replace

import pytest
from benchmark_examples import line, results, row

from benchmarks import (
    ablating,
    accelerating,
    attention_only,
    calls,
    measure,
    memory,
    models,
    monitoring,
    oracle,
    peers,
    targets,
    watching,
    windows,
)
from benchmarks import report as make_benchmarks
from benchmarks.regime import Regime


def test_bounds_of_all_targets():
    assert [(target.bound, target.at_most) for target in targets.TARGETS] == [
        (2.2, False),  # attention alone, float32, forward
        (1.7, False),  # and training
        (3.8, False),  # bfloat16, forward
        (2.5, False),  # and training
        (0.70, False),  # share of the GEMM rate
        (1.8, False),  # fastest peer, float32, forward
        (1.4, False),  # and training
        (1.3, False),  # bfloat16, forward
        (1.2, False),  # and training
        (0.97, False),  # on any machine
        (1.4, False),  # nn.MultiheadAttention, float32, full
        (2.5, False),  # and causal
        (2.0, False),  # SDPA block, bfloat16, forward
        (1.5, False),  # and training
        (0.85, False),  # share of the GEMM rate of the layer, float32
        (0.60, False),  # and bfloat16
        (60.0, False),  # window, forward
        (35.0, False),  # and training
        (2.0, False),  # and FlexAttention
        (3.0, False),  # padded, nn.MultiheadAttention
        (1.5, False),  # and the SDPA block
        (1.3, False),  # decoding, float32
        (2.0, False),  # and bfloat16
        (1.5, False),  # compiled, float32
        (3.0, False),  # and bfloat16
        (9.0, True),  # growth
        (1.0, True),  # memory over 64 MiB
        (0.9, True),  # watching at 2,048
        (0.7, True),  # and at 8,192
        (6.0, False),  # output_attentions=True
        (1.2, False),  # accelerated, 2,048, float32
        (1.5, False),  # and 8,192
        (1.5, False),  # accelerated, 2,048, bfloat16
        (2.0, False),  # and 8,192
        (1.6, False),  # accelerated encoders, float32
        (1.3, False),  # and bfloat16
        (1.0, False),  # and the fastest peer
        (1.0, True),  # 300 MB
        (1.0, True),  # 1 GB
        (1.8, False),  # every head removed
        (0.6, True),  # half of the heads, a prompt
        (0.6, True),  # and decoding
        (1.01, True),  # monitored training, every=100
        (1.5, True),  # and every=1
        (12.0, True),  # microseconds of attend over SDPA
        (15.0, True),  # of a mask
        (25.0, True),  # of the layer
        (25.0, True),  # of the replacement of nn.MultiheadAttention
        (40.0, True),  # of a decoding step
    ]


def test_target_is_judged_by_its_worst_regime_and_a_miss_is_marked():
    longer = Regime(1, 4096, 512, 8)
    text = make_benchmarks.document([results(row(1.6), row(1.3, longer))])
    cells = line(text, "float32, 1,024 and more, forward, full")
    assert cells[1:4] == ["at least 1.4", "1.30", "1.20 to 1.40"]
    assert cells[4:] == ["(1, 4096, 512, 8) full float32 forward", "1 of 2", "**missed**"]
    text = make_benchmarks.document([results(row(1.6), row(1.4, longer))])
    assert line(text, "float32, 1,024 and more, forward, full")[-2:] == ["2 of 2", "met"]
    assert line(text, "| compiled decoding step", "float32")[-1] == "not measured"


@pytest.mark.parametrize("part", [{"only": "1024"}, {"quick": True}])
def test_partly_measured_target_does_not_count_as_met(part):
    partial_results = results(row(1.6)) | part
    assert (
        line(make_benchmarks.document([partial_results]), "float32, 1,024 and more, forward, full")[-1]
        == "met in some regimes"
    )
    assert "Some regimes only." in make_benchmarks.document([partial_results])
    assert (
        line(make_benchmarks.document([results(row(1.3)) | part]), "1,024 and more, forward, full")[-1] == "**missed**"
    )


def test_growth_and_memory_bounds_are_upper_bounds():
    regime = Regime(1, 8192, 512, 8, "window", training=True)
    longer = replace(regime, length=32768)
    for median, verdict in ((1.0, "met"), (1.1, "**missed**")):
        text = make_benchmarks.document([results(row(median, regime, memory.LIMIT), benchmark="memory")])
        assert line(text, "peak extra memory of attention")[-1] == verdict
    text = make_benchmarks.document([results(row(9.5, longer, windows.GROWTH), benchmark="windows")])
    assert line(text, "cost growth")[-1] == "**missed**"


TRAINING, NARROW, FLOAT32 = {"training": True}, {"dtype": "bfloat16"}, {"dtype": "float32"}

LONG_WINDOW = {"mask": "window", "length": 8192}
DECODING, DECODED = ("decoding", peers.FASTEST), {"length": 4160}


@pytest.mark.parametrize(
    ("part_of_description", "benchmark", "against", "covered", "other"),
    [
        ("alone, against SDPA, float32, forward", "attention", attention_only.SDPA, {}, NARROW),
        ("alone, against SDPA, float32, training", "attention", attention_only.SDPA, TRAINING, {"training": False}),
        ("alone, against SDPA, bfloat16, forward", "attention", attention_only.SDPA, NARROW, TRAINING),
        ("alone, against SDPA, bfloat16, training", "attention", attention_only.SDPA, NARROW | TRAINING, FLOAT32),
        ("GEMM rate, attention alone", "attention", measure.GEMM, NARROW | {"length": 4096}, FLOAT32),
        ("fastest peer, float32, every regime, forward", "padding", peers.FASTEST, {}, NARROW),
        ("fastest peer, float32, every regime, training", "layer", peers.FASTEST, TRAINING, {"training": False}),
        ("fastest peer, bfloat16, every regime, forward", "grouped", peers.FASTEST, NARROW, TRAINING),
        ("fastest peer, bfloat16, every regime, training", "windows", peers.FASTEST, NARROW | TRAINING, FLOAT32),
        ("1,024 and more, forward, full", "layer", peers.TORCH_LAYER, {}, {"length": 512}),
        ("1,024 and more, forward, causal", "layer", peers.TORCH_LAYER, {"mask": "causal"}, {"mask": "full"}),
        ("bfloat16, 1,024 and more, forward", "layer", oracle.YARDSTICK, NARROW, {"length": 128}),
        ("bfloat16, 1,024 and more, training", "grouped", oracle.YARDSTICK, NARROW | TRAINING, {"training": False}),
        ("1,024, float32", "layer", measure.GEMM, {}, {"length": 4096}),
        ("1,024, bfloat16", "layer", measure.GEMM, NARROW, {"mask": "causal"}),
        ("with that mask, forward", "windows", attention_only.SDPA, LONG_WINDOW, {"length": 4096}),
        ("with that mask, training", "windows", attention_only.SDPA, LONG_WINDOW | TRAINING, {"mask": "heads"}),
        ("compiled FlexAttention", "windows", attention_only.FLEX, LONG_WINDOW, TRAINING),
        ("`key_padding_mask`", "padding", peers.TORCH_LAYER, {"mask": "padding"}, TRAINING),
        ("the SDPA block with a mask", "padding", oracle.YARDSTICK, {"mask": "padding"}, TRAINING),
        ("decoding step, 4,096 keys, against the fastest peer, float32", *DECODING, DECODED, {"length": 104}),
        (
            "decoding step, 4,096 keys, against the fastest peer, bfloat16",
            *DECODING,
            {"length": 4160} | NARROW,
            FLOAT32,
        ),
        ("cost growth", "windows", windows.GROWTH, {"length": 32768}, {"length": 512}),
        ("peak extra memory of attention", "memory", memory.LIMIT, {"length": 8192}, {"length": 256}),
        ("2,048 tokens, over its plain", "watching", watching.PLAIN, {"length": 2048}, {"length": 8192}),
        ("8,192 tokens, over its plain", "watching", watching.PLAIN, {"length": 8192}, {"length": 2048}),
        ("statistics from it", "watching", watching.EAGER, {"length": 2048}, {"length": 1024}),
        ("accelerated, 2,048 tokens, float32", "accelerating", accelerating.PLAIN, {"length": 2048}, NARROW),
        ("accelerated, 8,192 tokens, float32", "accelerating", accelerating.PLAIN, {"length": 8192}, {"length": 2048}),
        ("accelerated, 2,048 tokens, bfloat16", "accelerating", accelerating.PLAIN, {"length": 2048} | NARROW, FLOAT32),
        ("accelerated, 8,192 tokens, bfloat16", "accelerating", accelerating.PLAIN, {"length": 8192} | NARROW, FLOAT32),
        ("models, float32, against plain", "models", models.PLAIN, FLOAT32, NARROW),
        ("models, bfloat16, against plain", "models", models.PLAIN, NARROW, FLOAT32),
        ("over 300 MB", "watching", watching.MODEL_EXTRA, {"length": 8192}, {"length": 2048}),
        ("over 1 GB", "watching", watching.CALL_EXTRA, {"length": 32768}, {"length": 8192}),
        ("every head of SmolLM2", "ablating", ablating.WHOLE, {"batch": 16}, {"batch": 4}),
    ],
)
def test_target_covers_its_regimes_and_no_others(part_of_description, benchmark, against, covered, other):
    (target,) = [target for target in targets.TARGETS if part_of_description in target.description]
    regime = replace(Regime(2, 1024, 512, 8), **covered)
    assert target.covers(benchmark, row(1.0, regime, against))
    assert not target.covers(benchmark, row(1.0, regime, "somebody else"))
    assert not target.covers(benchmark, row(1.0, replace(regime, **other), against))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_steps_have_their_own_targets(dtype):
    eager, compiled = (target for target in targets.TARGETS if target.description.endswith(f"fastest peer, {dtype}"))
    regime = Regime(1, 4160, 512, 8, "causal", dtype)
    for note, covering in (("SDPA block, StaticCache", eager), ("SDPA block, StaticCache, compiled", compiled)):
        rows = row(1.0, regime, peers.FASTEST, note)
        assert [target for target in (eager, compiled) if target.covers("decoding", rows)] == [covering]


@pytest.mark.parametrize(("against", "bound"), [(monitoring.EVERY_100, 1.01), (monitoring.EVERY_1, 1.5)])
def test_every_length_of_a_monitored_training_has_the_bound_of_its_interval(against, bound):
    (target,) = [each for each in targets.TARGETS if each.covers("monitoring", row(1.0, monitoring.LLAMA, against))]
    assert (target.bound, target.at_most) == (bound, True)
    assert target.covers("monitoring", row(1.0, replace(monitoring.LLAMA, length=512), against))


@pytest.mark.parametrize(
    ("against", "bound"),
    [(calls.SDPA, 12), (calls.UNMASKED, 15), (calls.BLOCK, 25), (calls.TORCH_LAYER, 25), (calls.STEP, 40)],
)
def test_short_calls_have_bounds_in_microseconds(against, bound):
    regime = Regime(1, 16, 512, 8, training=True)
    (target,) = [each for each in targets.TARGETS if each.covers("calls", row(1.0, regime, against))]
    assert (target.bound, target.at_most) == (bound, True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_accelerated_encoder_may_be_slower_than_its_fastest_peer(dtype):
    fastest = row(1.0, Regime(1, 128, 384, 12, dtype=dtype), peers.FASTEST)
    (target,) = [target for target in targets.TARGETS if target.covers("models", fastest)]
    assert (target.bound, target.at_most) == (1.0, False)
    assert not target.covers("layer", fastest)


def test_no_regime_of_a_whole_layer_may_be_slower_on_any_machine():
    (target,) = [target for target in targets.TARGETS if "on any machine" in target.description]
    for regime in (Regime(2, 1024, 512, 8), Regime(1, 8192, 512, 8, "window", "bfloat16", training=True)):
        assert all(target.covers(script, row(1.0, regime, peers.FASTEST)) for script in targets.LAYERS)
        assert not target.covers("decoding", row(1.0, regime, peers.FASTEST))
        assert not target.covers("layer", row(1.0, regime, peers.TORCH_LAYER))
