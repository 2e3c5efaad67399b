"""Peak memory of whole layers, forward with backward.

Regime: 8,192 tokens, 8 heads of 64, full, causal, and a window of 256; float32 and bfloat16. The ratio is the peak,
minus input and weights, of the block around SDPA and of `nn.MultiheadAttention`, over that of headwise. Each case runs
twice in its own interpreter, which returns freed memory at once; the second run counts, because the first one also
stores what is compiled for each shape. Everything is first compared with the definition in float64.

    python -m benchmarks.layer_memory [--quick] [--rounds N] [--only "causal float32"]
"""

from collections.abc import Sequence
from itertools import product
from statistics import median

from benchmarks.command_line import Options, arguments
from benchmarks.contestants import ours
from benchmarks.measure import Ratio, Row, report, show
from benchmarks.oracle import YARDSTICK
from benchmarks.peak_memory import IS_SUPPORTED, UNSUPPORTED_REASON, measured, peak
from benchmarks.peers import PEERS, TORCH_LAYER, Comparison, checked
from benchmarks.regime import Regime

OURS = "ours"
LAYERS = {OURS: ours, **{name: PEERS[name].build for name in (YARDSTICK, TORCH_LAYER)}}
MOST_ROUNDS = 2
"""Peaks hardly vary between rounds."""


def peak_in_this_process(name: str, regime: Regime) -> dict[str, int]:
    """Run the named layer in the current interpreter. Return its peak memory in bytes, without input and weights."""
    return {"peak": peak(LAYERS[name](regime, regime.data()).run)}


def rows_of(regime: Regime, rounds: int, comparison: Comparison) -> list[Row]:
    """Return one row for each peer's layer: its peak memory divided by that of headwise. Peers with wrong results are
    listed as left out in `comparison`.
    """
    checked(regime)
    correct = [name for name in LAYERS if name == OURS or comparison.sane(name, LAYERS[name], regime)]
    peaks = {name: [measured("layer_memory", name, regime)["peak"] for _ in range(rounds)] for name in correct}
    medians = {name: median(samples) for name, samples in peaks.items()}
    rows = [(name, Ratio.of(peaks[name], peaks[OURS])) for name in correct if name != OURS]
    return [Row(regime, f"peak of {name}", ratio, medians[OURS], medians[name]) for name, ratio in rows]


def main(command_line: Sequence[str] | None = None) -> dict:
    """Measure every regime, and print a line of JSON last."""
    options: Options = arguments(__doc__, command_line)
    if not IS_SUPPORTED:
        raise SystemExit(f"layer_memory: {UNSUPPORTED_REASON}")
    comparison, rounds = Comparison(options), 1 if options.quick or options.tiny else min(options.rounds, MOST_ROUNDS)
    length = 256 if options.tiny else 8192
    cases = product(("full", "causal", "window"), ("float32", "bfloat16"))
    for mask, dtype in [("causal", "bfloat16")] if options.quick else cases:
        regime = Regime(1, length, 512, 8, mask, dtype, training=True)
        if options.wants(regime):
            rows = rows_of(regime, rounds, comparison)
            for row in rows:
                show(row)
            comparison.rows += rows
    return report("layer_memory", comparison.rows, options, comparison.left_out)


if __name__ == "__main__":
    main()
