"""Peak memory of attention over blocks, forward with backward, beside its inputs and outputs.

Regime: 8,192 tokens, 8 heads of 64, full, causal, and a window of 256; float32 and bfloat16. Each case runs in an
interpreter of its own, twice; the second run counts, since the first keeps what is compiled for each shape, and what is
freed is given back at once. `hw.attend(backend="blockwise")`: the peak beside q, k, v, the output and the gradients of
these four, over the size of these eight tensors. The whole layer: the peak beside input and weights of the block around
SDPA and of `nn.MultiheadAttention`, over that of ours. Everything is first compared with the definition in float64.

    python -m benchmarks.memory [--quick] [--rounds N] [--only "causal float32"]
"""

from collections.abc import Sequence
from itertools import product
from statistics import median

from benchmarks.attention_only import BLOCKWISE, attention, check
from benchmarks.command_line import Options, arguments
from benchmarks.contestants import ours
from benchmarks.measure import Ratio, Row, report, show
from benchmarks.oracle import YARDSTICK
from benchmarks.peak_memory import TOLD, UNTOLD, measured, peak
from benchmarks.peers import PEERS, TORCH_LAYER, Comparison, checked
from benchmarks.regime import Regime

OURS = "ours"
LAYERS = {OURS: ours, **{name: PEERS[name].build for name in (YARDSTICK, TORCH_LAYER)}}
SIZES = "inputs and outputs"


# -- in an interpreter of its own -------------------------------------------------------------------------------------


def child(name: str, regime: Regime) -> dict[str, int]:
    """What the interpreter that is measured reports: its peak, and the sizes of what goes in and comes out."""
    if name in LAYERS:
        return {"peak": peak(LAYERS[name](regime, regime.data()).run), "results": 0, "sizes": 0}
    run, inputs = attention(name, regime)
    results = sum(tensor.nbytes for tensor in run())
    return {"peak": peak(run), "results": results, "sizes": results + sum(tensor.nbytes for tensor in inputs)}


# -- rows -------------------------------------------------------------------------------------------------------------


def of_attention(regime: Regime, rounds: int) -> Row:
    """What blockwise attention takes beside its inputs and outputs, over these."""
    check(BLOCKWISE, regime)
    found = [measured("memory", BLOCKWISE, regime) for _ in range(rounds)]
    extra, sizes = [each["peak"] - each["results"] for each in found], [each["sizes"] for each in found]
    return Row(regime, SIZES, Ratio.of(extra, sizes), median(extra), median(sizes), "blockwise")


def of_layers(regime: Regime, rounds: int, found: Comparison) -> list[Row]:
    """What whole layers take, over what ours takes."""
    checked(regime)
    right = [name for name in LAYERS if name == OURS or found.sane(name, LAYERS[name], regime)]
    peaks = {name: [measured("memory", name, regime)["peak"] for _ in range(rounds)] for name in right}
    of = {name: median(taken) for name, taken in peaks.items()}
    rows = [(name, Ratio.of(peaks[name], peaks[OURS])) for name in right if name != OURS]
    return [Row(regime, f"peak of {name}", ratio, of[OURS], of[name]) for name, ratio in rows]


def main(given: Sequence[str] | None = None) -> dict:
    """Every regime, and a line of JSON last."""
    options: Options = arguments(__doc__, given)
    if not TOLD:
        raise SystemExit(f"memory: {UNTOLD}")
    found, rounds = Comparison(options), 1 if options.quick or options.tiny else min(options.rounds, 3)
    length = 256 if options.tiny else 8192
    regimes = product(("full", "causal", "window"), ("float32", "bfloat16"))
    for mask, dtype in [("causal", "bfloat16")] if options.quick else regimes:
        regime = Regime(1, length, 512, 8, mask, dtype, training=True)
        if not options.wants(regime):
            continue
        rows = [of_attention(regime, rounds)]
        if not options.quick:
            rows += of_layers(regime, min(rounds, 2), found)
        for row in rows:
            show(row)
        found.rows += rows
    return report("memory", found.rows, options, found.left_out)


if __name__ == "__main__":
    main()
