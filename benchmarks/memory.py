"""Peak extra memory of attention alone, forward, and forward with backward.

Regime: 8,192 tokens, 8 heads of 64, full, causal, and a window of 256; float32 and bfloat16. The extra memory of
`hw.attend`, with the backend that it chooses, is the peak minus the size of its inputs (queries, keys, values, and in
training the gradient of the output) and of its outputs (the output, and in training the gradients of queries, keys and
values). The ratio is that extra memory divided by 64 MiB. It includes memory that the kernels keep for later calls:
each case is the first call of this length, in its own interpreter, after a call with 256 tokens. Everything is first
compared with the definition in float64.

    python -m benchmarks.memory [--quick] [--rounds N] [--only "causal float32"]
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from statistics import median

from benchmarks.attention_only import ATTEND, attention, check
from benchmarks.command_line import Options, arguments
from benchmarks.measure import Ratio, Row, report, show
from benchmarks.peak_memory import IS_SUPPORTED, PAGE, UNSUPPORTED_REASON, measured, peak
from benchmarks.regime import Regime, both
from benchmarks.watched_model import SHORT

LIMIT, LIMIT_BYTES = "64 MiB", 2**26
MOST_ROUNDS = 2
"""Peaks hardly vary between rounds."""


def peak_in_this_process(name: str, regime: Regime) -> dict[str, int]:
    """Run attention in the current interpreter. Return its extra memory in bytes, at least one page."""
    short, _ = attention(name, replace(regime, length=min(SHORT, regime.length)))
    run, _ = attention(name, regime)
    highest = peak(run, short)
    return {"extra": max(highest - sum(tensor.nbytes for tensor in run()), PAGE)}


def row_of(regime: Regime, rounds: int) -> Row:
    """Return the row for the extra memory of attention divided by its limit."""
    check(ATTEND, regime)
    extra = [measured("memory", ATTEND, regime)["extra"] for _ in range(rounds)]
    return Row(regime, LIMIT, Ratio.of(extra, [LIMIT_BYTES] * rounds), median(extra), LIMIT_BYTES, "extra memory")


def main(command_line: Sequence[str] | None = None) -> dict:
    """Measure every regime, and print a line of JSON last."""
    options: Options = arguments(__doc__, command_line)
    if not IS_SUPPORTED:
        raise SystemExit(f"memory: {UNSUPPORTED_REASON}")
    rounds, rows = 1 if options.quick or options.tiny else min(options.rounds, MOST_ROUNDS), []
    length = 256 if options.tiny else 8192
    cases = product(("full", "causal", "window"), ("float32", "bfloat16"))
    for mask, dtype in [("causal", "bfloat16")] if options.quick else cases:
        for regime in filter(options.wants, both(Regime(1, length, 512, 8, mask, dtype))):
            rows.append(row_of(regime, rounds))
            show(rows[-1])
    return report("memory", rows, options)


if __name__ == "__main__":
    main()
