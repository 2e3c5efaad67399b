"""Cost of statistics on a GPU: of one attention call, of a whole model, and of 131,072 tokens in memory."""

import time
from collections.abc import Callable
from functools import partial

import torch

import headwise as hw
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.decoder import Decoder, decoder, tokens
from benchmarks.gpu.timing import rounds_of, rows_against, timer
from benchmarks.measure import Ratio, Row, show
from benchmarks.regime import Regime
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.problem import Problem
from headwise.statistics.attend_observed import WholeCall, attend_observed
from headwise.statistics.tally import Tally

CALL, PLAIN, MEMORY = "the attention it observes", "plain forward of the model", "peak memory of the plain forward"
EXTRA = 200e6
"""Bytes that observing 131,072 tokens may take in addition to a plain forward pass."""
HEADS, LAYERS = 16, 8
MEMORY_LAYERS = 2


def time_observing(device: str, budget: Budget, share: float, *, tiny: bool, only: str) -> list[Row]:
    """Time statistics until a share of the time is used, and return the rows."""
    lengths = (48,) if tiny else (4096, 16384, 1024)
    work: list[tuple[Regime, str, Callable[[Regime, str], list[Row]], float]] = []
    for length in lengths:
        batch = 2 if tiny else max(16384 // length, 1)
        for heads in (16, 8):
            embed = 64 if tiny else 1024
            work.append((Regime(batch, length, embed, heads, "causal", "bfloat16"), CALL, one_call, 4.0))
    for length in (40,) if tiny else (4096, 1024):
        embed = 64 if tiny else 1024
        work.append((Regime(1, length, embed, HEADS, "causal", "bfloat16"), PLAIN, whole_model, 6.0))
    length, embed = (60, 64) if tiny else (131072, 1024)
    work.append((Regime(1, length, embed, HEADS, "causal", "bfloat16"), MEMORY, memory, 0.0))
    rows: list[Row] = []
    for regime, what, measure, seconds in work:
        name = f"observing: {what}, {regime.name}"
        if only not in name or not budget.allows(name, share, seconds):
            continue
        if what == MEMORY and not budget.allows(name, share, expected_seconds(regime, device)):
            continue
        measured = measure(regime, device)
        for row in measured:
            show(row)
        rows += measured
    return rows


def one_call(regime: Regime, device: str) -> list[Row]:
    """Return the row of one attention call with the statistics of `hw.watch`, over the call without."""
    torch.manual_seed(0)
    shape = (regime.batch, regime.heads, regime.length, regime.head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))
    mask, context = hw.causal(), CallContext(tokens(regime.length, device, batch=regime.batch))
    problem = Problem.checked(q, k, v, mask=mask)

    @torch.no_grad()
    def observed() -> None:
        tally = Tally()
        attend_observed(problem, tally.add, context, whole_call=WholeCall(tally))

    @torch.no_grad()
    def plain() -> None:
        hw.attend(q, k, v, mask=mask)

    calls = {"observed": timer(device)(observed), CALL: timer(device)(plain)}
    return rows_against(regime, rounds_of(calls), "observed", of_ours=True)


def whole_model(regime: Regime, device: str) -> list[Row]:
    """Return the row of a decoder's forward pass under `hw.watch`, over the plain forward pass."""
    layers = 2 if regime.embed < 100 else LAYERS
    model = decoder(regime.embed, regime.heads, layers, device, torch.bfloat16)
    input_ids = tokens(regime.length, device, batch=regime.batch)
    calls = {
        "observed": timer(device)(partial(observe, model, input_ids)),
        PLAIN: timer(device)(partial(forward, model, input_ids)),
    }
    return rows_against(regime, rounds_of(calls), "observed", note=f"{layers} layers", of_ours=True)


def memory(regime: Regime, device: str) -> list[Row]:
    """Return the row of the memory that observing a long text takes in addition to a plain forward pass, over
    `EXTRA`. On a CPU, whose memory is not measured here, it is 0.
    """
    model = decoder(regime.embed, regime.heads, MEMORY_LAYERS, device, torch.bfloat16)
    input_ids = tokens(regime.length, device)
    forward(model, input_ids[:, : regime.length // 16])
    plain = peak(partial(forward, model, input_ids), device)
    observed = peak(partial(observe, model, input_ids), device)
    extra = max(observed - plain, 0) / EXTRA
    return [Row(regime, MEMORY, Ratio(extra, extra, extra), observed, plain, f"{MEMORY_LAYERS} layers")]


def expected_seconds(regime: Regime, device: str) -> float:
    """Return the seconds that `memory` is expected to take: from an eighth of the tokens, since the time grows with the
    square of the length.
    """
    model = decoder(regime.embed, regime.heads, MEMORY_LAYERS, device, torch.bfloat16)
    input_ids = tokens(regime.length // 8, device)
    observe(model, input_ids)
    synchronize(device)
    start = time.perf_counter()
    observe(model, input_ids)
    synchronize(device)
    return 64 * (time.perf_counter() - start) + 2.0 * (device == "cuda")


def peak(run: Callable[[], None], device: str) -> int:
    """Return the peak of allocated memory during a call in bytes; 0 on a CPU."""
    if device != "cuda":
        run()
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def synchronize(device: str) -> None:
    """Wait for the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def forward(model: Decoder, input_ids: torch.Tensor) -> None:
    """Run a plain forward pass."""
    model(input_ids)


@torch.no_grad()
def observe(model: Decoder, input_ids: torch.Tensor) -> None:
    """Run a forward pass and compute the statistics of every head."""
    with hw.watch(model) as heads:
        model(input_ids)
    for record in heads.records:
        for statistic in record.statistics.values():
            statistic.value.sum()
