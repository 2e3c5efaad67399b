"""The Triton kernels of the statistics, in Triton's interpreter, and compiled for GPUs that are not there."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.gpu import statistics
from headwise.attention.backends.gpu.spans import spans_of_keys, spans_of_rows
from headwise.attention.backends.native import library, operators
from headwise.attention.backends.plain_statistics import ROWS, SCHEMA, StatisticsCall, attend_statistics
from headwise.attention.masks import key_ranges
from headwise.attention.problem import Answer, Problem
from headwise.statistics import kernel_statistics
from headwise.statistics.tally import Tally
from live_memory import LiveMemory
from research.statistics_operator.agreement import compare
from tiny import model, texts, tokenizer

pytest.importorskip("triton")
NATIVE = pytest.mark.skipif(library.why_not_loaded() is not None, reason=str(library.why_not_loaded()))
ROOT = Path(hw.__file__).parents[2]


def check_agreement(calls: int, first_seed: int, dtype: torch.dtype) -> None:
    """Check the first calls of up to 16 tiles that are drawn with some of 1,000 seeds."""
    agreements = compare(range(first_seed, first_seed + 1000), dtype, calls, most_tiles=16)
    for name, agreement in agreements.items():
        assert agreement.calls == calls
        assert not agreement.beyond, name
        assert not agreement.worse_than(agreements["plain"]), name


@NATIVE
def test_three_implementations_agree_on_drawn_calls():
    check_agreement(6, 0, torch.float32)


@pytest.mark.parametrize("calls", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_kernels_agree_with_the_plain_implementation_in_float16(calls):
    check_agreement(calls, 30, torch.float16)


@NATIVE
@pytest.mark.slow
@pytest.mark.parametrize("first_seed", [1000, 5000])
def test_three_implementations_agree_on_many_drawn_calls(first_seed):
    check_agreement(40, first_seed, torch.float32)


def call(batch: int = 2, **options) -> StatisticsCall:
    q, k, v = torch.randn(batch, 2, 37, 24), torch.randn(batch, 1, 71, 24), torch.randn(batch, 1, 71, 8)
    positions = (torch.arange(37) + 34).expand(batch, -1).int().contiguous()
    given = {"head_scale": None, "softcap": 0.0, "sinks": None, "ranges": None, "dense": None, "bias": None}
    return StatisticsCall(
        *(q, k, v), scale=0.2, **(given | options), positions=positions, first_key=torch.zeros_like(positions)
    )


def test_a_hidden_nan_changes_no_row_and_a_visible_one_changes_those_that_see_it():
    ranges = torch.stack([torch.zeros(37), torch.arange(37) + 35], -1)[None, None, :, None].int()
    clean = call(ranges=ranges)
    out = torch.zeros(2, 2, 37, 8)
    expected = statistics.weight_statistics(clean, out)
    k = clean.k.clone()
    k[1, 0, 60] = torch.nan  # the second sequence, from row 26 on
    got = statistics.weight_statistics(clean._replace(k=k), out)
    sees = torch.zeros(2, 2, 37, dtype=torch.bool)
    sees[1, :, 26:] = True
    assert got.received.isnan().sum() == 2 * 71
    for name in ("entropy", "confidence", "distance", "max_logit"):
        ours, theirs = got.rows[ROWS.index(name)], expected.rows[ROWS.index(name)]
        assert ours[sees].isnan().all(), name
        assert torch.equal(ours[~sees], theirs[~sees]), name


@pytest.mark.parametrize("given", ["ranges", "dense", "bias"])
def test_rows_without_a_key_are_0(given):
    shape = (1, 1, 37, 71)
    hiding = {
        "ranges": torch.zeros(1, 1, 37, 2, 2, dtype=torch.int32),
        "dense": torch.zeros(shape, dtype=torch.bool),
        "bias": torch.full(shape, -torch.inf),
    }
    for sinks in (None, torch.tensor([100.0, -torch.inf])):
        results = statistics.weight_statistics(call(1, sinks=sinks, **{given: hiding[given]}), torch.zeros(1, 2, 37, 8))
        logits = -torch.inf if sinks is None else sinks[:, None]
        assert torch.equal(results.lse, torch.full((1, 2, 37), 1.0) * logits)
        values = results.rows.clone()
        for name in ("max_logit", "max_logit_uncapped"):
            assert (values[ROWS.index(name)] == -torch.inf).all()
            values[ROWS.index(name)] = 0
        assert not values.any()
        assert not results.received.any()
        assert not results.seen_by.any()


def test_the_operator_works_under_the_compiler():
    assert statistics.why_not_registered() is None
    # The implementation for GPUs, registered for the CPU under another name.
    library_of_test = torch.library.Library("headwise_test", "FRAGMENT")
    library_of_test.define("attend_statistics" + SCHEMA)
    library_of_test.impl("attend_statistics", statistics.attend_statistics, "CPU")
    torch.library.register_fake("headwise_test::attend_statistics", operators.FAKES["attend_statistics"])
    arguments = call(sinks=torch.randn(2))
    compiled = torch.compile(torch.ops.headwise_test.attend_statistics, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(compiled(*arguments), attend_statistics(*arguments), strict=True):
        same = {"rtol": 1e-5, "atol": 2**20 if ours.dtype == torch.int64 else 1e-5}
        torch.testing.assert_close(ours, theirs, **same)


def test_the_operator_is_registered_for_gpus():
    assert statistics.why_not_registered() is None
    assert torch._C._dispatch_has_kernel_for_dispatch_key("headwise::attend_statistics", "CUDA")


def watched(network, inputs, training: bool):
    """Return the statistics, the loss and the gradients of a model."""
    with torch.set_grad_enabled(training), hw.watch(network) as heads:
        output = network(**inputs)
    loss = output[0].float().square().mean()
    gradients = torch.autograd.grad(loss, list(network.parameters()), allow_unused=True) if training else []
    return heads.table(), loss.detach(), gradients


@pytest.mark.parametrize(("kind", "heads", "training"), [("encoder", 2, True), ("decoder", 4, False)])
def test_watch_measures_the_same_with_the_kernels_of_a_gpu(kind, heads, training, monkeypatch):
    network = model(kind, num_hidden_layers=1, num_attention_heads=heads).eval()
    inputs = tokenizer(kind)(texts(11, 20), return_tensors="pt", padding=True)
    expected = watched(network, inputs, training)
    monkeypatch.setattr(kernel_statistics, "is_on_gpu", lambda problem: True)
    launches = []
    measure = statistics.weight_statistics
    monkeypatch.setattr(statistics, "weight_statistics", lambda *given: launches.append(1) or measure(*given))
    table, loss, gradients = watched(network, inputs, training)
    assert launches
    # The model's own engine computes the output, with its gradient.
    output = network(**inputs)[0].float().square().mean().detach()
    assert torch.equal(loss, output)
    for ours, theirs in zip(gradients, expected[2], strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert list(table.columns) == list(expected[0].columns)
    for column in table.columns:
        if table[column].dtype.kind == "f":
            ours, theirs = (torch.tensor(each[column].to_numpy()) for each in (table, expected[0]))
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6, equal_nan=True, msg=column)


@pytest.mark.parametrize("bias", [-1e30, torch.finfo(torch.float32).min])
def test_keys_of_one_large_negative_bias_have_uniform_weights(bias, monkeypatch):
    q, k, v = torch.randn(3, 1, 1, 4, 8)
    problem = Problem.checked(q, k, v, bias=torch.full((1, 1, 1, 4), bias))
    for on_gpu in (False, True):
        monkeypatch.setattr(kernel_statistics, "is_on_gpu", lambda problem, on_gpu=on_gpu: on_gpu)
        if kernel_statistics.why_not(problem, CallContext()) is None:
            tally = Tally()
            kernel_statistics.attend_tallied(problem, CallContext(), tally)
            assert float(tally.means()["entropy"]) == pytest.approx(math.log(4), rel=1e-6)
    rows = attend_statistics(*call(bias=torch.full((1, 1, 1, 71), bias)))[2]
    torch.testing.assert_close(rows[ROWS.index("entropy")], torch.full((2, 2, 37), math.log(71)), rtol=1e-6, atol=0)


def test_rows_that_are_not_finite_are_counted(statistics_in_triton):
    q, k, v = torch.randn(3, 1, 1, 4, 8)
    q[0, 0, 2] = torch.nan
    tally = Tally()
    kernel_statistics.attend_tallied(Problem.checked(q, k, v, mask=hw.causal()), CallContext(), tally)
    assert int(tally.nonfinite_rows) == 1
    received = tally.other_sums["received"][0][0, 0]
    assert received.isnan().tolist() == [True, True, True, False]


def test_what_the_kernels_cannot_do_is_named(statistics_in_triton, monkeypatch):
    def reason(q, **options):
        return kernel_statistics.why_not(Problem.checked(q, q, q, **options), CallContext())

    q = torch.randn(1, 2, 5, 8)
    assert reason(q) is None
    assert reason(q, talking_heads=(torch.eye(2), torch.eye(2))) == (
        "the kernels keep heads apart, and talking_heads mixes them"
    )
    assert reason(q.double()) == "the kernels compute in float16, bfloat16 and float32, and q is in torch.float64"
    monkeypatch.setattr(statistics, "find_spec", lambda name: None)
    statistics.why_no_triton.cache_clear()
    assert reason(q) == "the statistics on a GPU need Triton: pip install triton"
    statistics.why_no_triton.cache_clear()


def test_large_masks_are_measured_in_parts(statistics_in_triton, monkeypatch):
    q, k, v = torch.randn(1, 2, 50, 8), torch.randn(1, 2, 50, 8), torch.randn(1, 2, 50, 4)
    problem = Problem.checked(q, k, v, mask=hw.mask_rule(lambda b, h, i, j: (i * j + h) % 3 > 0) & hw.causal())
    whole, parts = Tally(), Tally()
    kernel_statistics.attend_tallied(problem, CallContext(), whole)
    monkeypatch.setattr(key_ranges, "MATRIX_ELEMENTS", 2**10)
    kernel_statistics.attend_tallied(problem, CallContext(), parts)
    for name, value in whole.means().items():
        torch.testing.assert_close(parts.means()[name], value, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("projected", [False, True])
def test_statistics_of_131072_tokens_and_16_heads_need_less_than_200_mb(projected, statistics_in_triton, monkeypatch):
    def launch(call, tiles, *results):
        spans_of_keys(spans_of_rows(call.ranges, 131072, tiles.rows, tiles.keys), 131072 // tiles.keys)
        for each in results:
            each.zero_()

    monkeypatch.setattr(statistics, "_launch", launch)  # the kernels themselves keep nothing
    q = torch.zeros(1, 131072, 16, 32, dtype=torch.bfloat16).transpose(1, 2)
    problem = Problem.checked(q, q, q, mask=hw.causal())
    ids = torch.arange(131072)[None] % 1000
    tally = Tally(torch.zeros(16, 32, 32) if projected else None)
    with torch.no_grad(), LiveMemory() as memory:
        kernel_statistics.attend_tallied(
            problem, CallContext(ids, is_special=ids == 0), tally, lambda problem: Answer(q, None, None)
        )
    assert tally.counts()["entropy"].sum() == 0  # no visible key was counted
    assert 100e6 < memory.peak < 200e6


def compiled_for_gpus(*options: str) -> str:
    """Return what the compiler of the kernels prints; it must find no spilled register."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    command = [sys.executable, "-W", "ignore", "-m", "research.tables.gpu_kernels", "--print", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout


def test_kernels_compile_for_three_generations_of_gpus():
    printed = compiled_for_gpus("--quick")
    print(printed)
    assert printed.count("| bf16 | 64 |") == printed.count("| bf16 | 128 |") == 2


@pytest.mark.slow
def test_every_variant_compiles_without_spills_and_within_shared_memory():
    printed = compiled_for_gpus()
    print(printed)
    assert printed.count("| bf16 |") == printed.count("| fp32 |") == 18
