"""Window attention: against implementations that compute the whole matrix, with a window for some heads only, and its
growth with the length.

Regime: float32 and bfloat16, forward, and forward with backward.

- (1, 8192, 512, 8) under a causal window of 256 keys, against every peer that does not store the whole matrix. Peers
  receive a boolean matrix, FlexAttention its block mask.
- (2, 1024, 512, 8) and (1, 4096, 512, 8) with a window of 128 keys for half of the heads and causal attention for the
  others.
- Attention alone, without the projections of a layer, under the window of 256 at 8,192 tokens, against SDPA with that
  mask, and in forward regimes against compiled FlexAttention, which has no backward on CPU.
- The time of headwise at 32,768 tokens over that at 4,096, under the window of 256.

Everything is first compared with the definition in float64. At 32,768 tokens, which the block around SDPA cannot
compute, that block's error is not used as a bound.

    python -m benchmarks.windows [--quick] [--rounds N] [--only "8192"]
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from benchmarks import oracle
from benchmarks.attention_only import ATTEND, FLEX, SDPA, attention, check, check_peer
from benchmarks.command_line import Options, arguments
from benchmarks.contestants import ours
from benchmarks.measure import Call, Ratio, Row, compared, interleaved, report, show
from benchmarks.oracle import WrongError
from benchmarks.peers import Comparison, checked
from benchmarks.regime import Regime, both

LONG = [(1, 8192, 512, 8)]
BY_HEAD = [(2, 1024, 512, 8), (1, 4096, 512, 8)]
SHORT_AND_LONG = (4096, 32768)
GROWTH, ALONE = "length 4,096", "attention alone"


def attention_rows(regime: Regime, options: Options) -> list[Row]:
    """Return the rows for `hw.attend` without the projections of a layer: against SDPA with the same mask, and against
    compiled FlexAttention if the regime does not train.
    """
    peers = [SDPA, FLEX] if options.peers != "torch" and not regime.training else [SDPA]
    check(ATTEND, regime)
    if FLEX in peers:
        check_peer(FLEX, regime)
    samples = interleaved({name: Call(attention(name, regime)[0]) for name in (ATTEND, *peers)}, options.rounds)
    return [compared(regime, samples, ATTEND, name, ALONE) for name in peers]


def growth_row(regime: Regime, options: Options) -> Row:
    """Return the row for the time of headwise's layer at the longer of two lengths, divided by that at the shorter.
    Both results are checked first.
    """
    lengths = (64, 512) if options.tiny else SHORT_AND_LONG
    short, long = (replace(regime, length=length) for length in lengths)
    contestants = {"short": checked(short)[0], "long": ours(long, long.data())}
    try:
        oracle.sane(contestants["long"].results(contestants["long"].run()), oracle.layer(long), long)
    except WrongError as reason:
        raise SystemExit(f"{long.name}: {reason}") from reason
    calls = {name: Call(contestant.run) for name, contestant in contestants.items()}
    samples = interleaved(calls, options.rounds)
    ratio = Ratio.of(samples["long"], samples["short"])
    return Row(long, GROWTH, ratio, statistics.median(samples["long"]), statistics.median(samples["short"]))


def main(command_line: Sequence[str] | None = None) -> dict:
    """Measure every regime, and print a line of JSON last."""
    options = arguments(__doc__, command_line)
    comparison = Comparison(options)
    by_head = product(options.sizes(BY_HEAD), ["heads"])
    long = product(options.sizes(LONG), ["window"])  # empty in a quick run
    for (size, mask), dtype in product([*by_head, *long], ("float32", "bfloat16")):
        for regime in both(Regime(*size, mask, dtype)):
            comparison.add(regime)
    for size, dtype in product(options.sizes(LONG) if options.tiny else LONG, ("float32", "bfloat16")):
        for regime in both(Regime(*size, "window", dtype)):
            if options.wants(regime):
                rows = attention_rows(regime, options)
                comparison.rows += rows
                for row in rows:
                    show(row)
    for dtype in ("float32",) if options.quick else ("float32", "bfloat16"):
        for regime in both(Regime(1, SHORT_AND_LONG[1], 512, 8, "window", dtype)):
            if options.wants(regime):
                comparison.rows.append(growth_row(regime, options))
                show(comparison.rows[-1])
    return report("windows", comparison.rows, options, comparison.left_out)


if __name__ == "__main__":
    main()
