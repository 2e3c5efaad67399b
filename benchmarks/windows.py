"""Attention to a window: against what computes the whole matrix, window by head, and growth with the length.

Regime: (1, 8192, 512, 8) under a causal window of 256 keys, against every peer that does not keep the whole matrix,
given that mask as a boolean matrix, or FlexAttention its block mask; (2, 1024, 512, 8) and (1, 4096, 512, 8) with a
window of 128 for half of the heads and causal attention for the others; attention alone, without a layer's
projections, under the window of 256 at 8,192; and the time of ours at 32,768 tokens over that at 4,096 under that
window. float32 and bfloat16, forward, and forward with backward. Everything is first compared with the definition in
float64; at 32,768 tokens, which the block around SDPA cannot do, without twice its error as the bound.

    python -m benchmarks.windows [--quick] [--rounds N] [--only "8192"]
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from benchmarks import oracle
from benchmarks.attention_only import ATTEND, SDPA, attention, check
from benchmarks.command_line import Options, arguments
from benchmarks.contestants import ours
from benchmarks.measure import Call, Ratio, Row, interleaved, report, show
from benchmarks.oracle import WrongError
from benchmarks.peers import Comparison, checked
from benchmarks.regime import Regime, both

LONG = [(1, 8192, 512, 8)]
BY_HEAD = [(2, 1024, 512, 8), (1, 4096, 512, 8)]
SHORT_AND_LONG = (4096, 32768)
GROWTH = "length 4,096"


def alone(regime: Regime, options: Options) -> Row:
    """`hw.attend` against SDPA with that mask."""
    check(ATTEND, regime)
    taken = interleaved({name: Call(attention(name, regime)[0]) for name in (ATTEND, SDPA)}, options.rounds)
    ratio = Ratio.of(taken[SDPA], taken[ATTEND])
    return Row(regime, SDPA, ratio, *(statistics.median(taken[name]) for name in (ATTEND, SDPA)), "attention alone")


def growth(regime: Regime, options: Options) -> Row:
    """The time at the longer of two lengths over that at the shorter; both are right."""
    lengths = (64, 512) if options.tiny else SHORT_AND_LONG
    short, long = (replace(regime, length=length) for length in lengths)
    contestants = {"short": checked(short)[0], "long": ours(long, long.data())}
    try:
        oracle.sane(contestants["long"].results(contestants["long"].run()), oracle.layer(long), long)
    except WrongError as reason:
        raise SystemExit(f"{long.name}: {reason}") from reason
    calls = {name: Call(contestant.run) for name, contestant in contestants.items()}
    taken = interleaved(calls, options.rounds)
    ratio = Ratio.of(taken["long"], taken["short"])
    return Row(long, GROWTH, ratio, statistics.median(taken["long"]), statistics.median(taken["short"]))


def main(given: Sequence[str] | None = None) -> dict:
    """Every regime, and a line of JSON last."""
    options = arguments(__doc__, given)
    found = Comparison(options)
    by_head = product(options.sizes(BY_HEAD), ["heads"])
    long = product(options.sizes(LONG), ["window"])  # none where it is to be quick
    for (size, mask), dtype in product([*by_head, *long], ("float32", "bfloat16")):
        for regime in both(Regime(*size, mask, dtype)):
            found.add(regime)
    for size, dtype in product(options.sizes(LONG) if options.tiny else LONG, ("float32", "bfloat16")):
        for regime in both(Regime(*size, "window", dtype)):
            if options.wants(regime):
                found.rows.append(alone(regime, options))
                show(found.rows[-1])
    for dtype in ("float32",) if options.quick else ("float32", "bfloat16"):
        for regime in both(Regime(1, SHORT_AND_LONG[1], 512, 8, "window", dtype)):
            if options.wants(regime):
                found.rows.append(growth(regime, options))
                show(found.rows[-1])
    return report("windows", found.rows, options, found.left_out)


if __name__ == "__main__":
    main()
