"""Attention alone, without the projections of a layer, full and causal, against torch's SDPA.

Regime: one sequence of 1,024, 2,048, 4,096 and 8,192 tokens, 8 heads of 64; float32 and bfloat16; forward without
gradients, and forward with backward (the gradients of queries, keys and values). `hw.attend` chooses its backend as it
does for a user. Forward regimes have a second row: the same call with all statistics of `hw.watch`, against SDPA, which
computes no statistics. At 4,096 tokens, forward regimes also have the share of the machine's matrix-multiplication
rate, as in `layer.py`.

Output and gradients are first compared with the definition in float64, and the statistics with those of the whole
matrix on 256 tokens.

    python -m benchmarks.attention [--quick] [--rounds N] [--only "causal float32"]
"""

from collections.abc import Sequence
from itertools import product

from benchmarks.attention_only import ATTEND, OBSERVED, SDPA, attention, check
from benchmarks.command_line import Options, arguments
from benchmarks.measure import GEMM, Call, Row, compared, gemm, gemm_share, interleaved, report, show
from benchmarks.observed_call import check_statistics
from benchmarks.regime import Regime, both

SIZES = [(1, 1024, 512, 8), (1, 2048, 512, 8), (1, 4096, 512, 8), (1, 8192, 512, 8)]
WITH_SHARE = 4096
"""Length with the share of the machine's rate."""
WITHOUT_STATISTICS = "SDPA without statistics"


def rows_of(regime: Regime, options: Options) -> list[Row]:
    """Check every implementation in a regime, time them interleaved, and return the rows."""
    ours = [ATTEND] if regime.training else [ATTEND, OBSERVED]
    for name in ours:
        check(name, regime)
    calls = {name: Call(attention(name, regime)[0]) for name in (*ours, SDPA)}
    if OBSERVED in ours:
        check_statistics(regime)
    has_share = regime.length == WITH_SHARE and not regime.training
    if has_share:
        calls[GEMM] = gemm(regime.torch_dtype)
    samples = interleaved(calls, options.rounds)
    rows = [compared(regime, samples, ATTEND, SDPA)]
    if OBSERVED in ours:
        samples[WITHOUT_STATISTICS] = samples[SDPA]
        rows.append(compared(regime, samples, OBSERVED, WITHOUT_STATISTICS))
    if has_share:
        rows.append(gemm_share(regime, regime.attention_flops, samples, ATTEND))
    return rows


def main(command_line: Sequence[str] | None = None) -> dict:
    """Measure every regime, and print a line of JSON last."""
    options = arguments(__doc__, command_line)
    rows: list[Row] = []
    for size, mask, dtype in product(options.sizes(SIZES), ("full", "causal"), ("float32", "bfloat16")):
        for regime in filter(options.wants, both(Regime(*size, mask, dtype))):
            for row in rows_of(regime, options):
                show(row)
                rows.append(row)
    return report("attention", rows, options)


if __name__ == "__main__":
    main()
