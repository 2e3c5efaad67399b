"""Peak memory of attention over blocks, forward with backward, beside its inputs and outputs.

Regime: 8,192 tokens, 8 heads of 64, full, causal, and a window of 256; float32 and bfloat16. Each case runs in an
interpreter of its own, twice; the second run counts, since the first keeps what is compiled for each shape, and what is
freed is given back at once. `hw.attend(backend="blockwise")`: the peak beside q, k, v, the output and the gradients of
these four, over the size of these eight tensors. The whole layer: the peak beside input and weights of the block around
SDPA and of `nn.MultiheadAttention`, over that of ours. Everything is first compared with the definition in float64.

    python benchmarks/memory.py [--quick] [--rounds N] [--only "causal float32"]
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import median

from alone import BLOCKWISE, attention, check
from command import Options, arguments
from contestants import ours
from measure import Ratio, Row, report, show
from oracle import YARDSTICK
from peers import PEERS, TORCH_LAYER, Comparison, checked
from regime import Regime

OURS = "ours"
LAYERS = {OURS: ours, **{name: PEERS[name].build for name in (YARDSTICK, TORCH_LAYER)}}
SIZES = "inputs and outputs"


# -- in an interpreter of its own -------------------------------------------------------------------------------------


def kept(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def peak(run: Callable[[], object]) -> int:
    """Bytes that a second run takes at its peak, beside what there is before it."""
    run()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before = kept("VmRSS")
    run()
    return max(kept("VmHWM") - before, 4096)  # a page: what is smaller is not seen


def child(name: str, regime: Regime) -> dict[str, int]:
    """What the interpreter that is measured reports: its peak, and the sizes of what goes in and comes out."""
    if name in LAYERS:
        return {"peak": peak(LAYERS[name](regime, regime.data()).run), "results": 0, "sizes": 0}
    run, inputs = attention(name, regime)
    results = sum(tensor.nbytes for tensor in run())
    return {"peak": peak(run), "results": results, "sizes": results + sum(tensor.nbytes for tensor in inputs)}


CHILD = """
import json, sys, memory
from regime import Regime
print(json.dumps(memory.child(sys.argv[1], Regime(**json.loads(sys.argv[2])))))
"""


def measured(name: str, regime: Regime) -> dict[str, int]:
    """`child`, in an interpreter of its own that gives back what is freed."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, name, json.dumps(asdict(regime))],
        cwd=Path(__file__).parent,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{name}, {regime.name}: {(done.stderr.strip() or 'ended').splitlines()[-1]}")
    return json.loads(done.stdout)


# -- rows -------------------------------------------------------------------------------------------------------------


def of_attention(regime: Regime, rounds: int) -> Row:
    """What blockwise attention takes beside its inputs and outputs, over these."""
    check(BLOCKWISE, regime)
    found = [measured(BLOCKWISE, regime) for _ in range(rounds)]
    extra, sizes = [each["peak"] - each["results"] for each in found], [each["sizes"] for each in found]
    return Row(regime, SIZES, Ratio.of(extra, sizes), median(extra), median(sizes), "blockwise")


def of_layers(regime: Regime, rounds: int, found: Comparison) -> list[Row]:
    """What whole layers take, over what ours takes."""
    checked(regime)
    right = [name for name in LAYERS if name == OURS or found.sane(name, LAYERS[name], regime)]
    peaks = {name: [measured(name, regime)["peak"] for _ in range(rounds)] for name in right}
    of = {name: median(taken) for name, taken in peaks.items()}
    rows = [(name, Ratio.of(peaks[name], peaks[OURS])) for name in right if name != OURS]
    return [Row(regime, f"peak of {name}", ratio, of[OURS], of[name]) for name, ratio in rows]


def main(given: Sequence[str] | None = None) -> dict:
    """Every regime, and a line of JSON last."""
    options: Options = arguments(__doc__, given)
    if not os.access("/proc/self/clear_refs", os.W_OK):
        raise SystemExit("memory: the peak is read from Linux's /proc/self/clear_refs, which is not there")
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
