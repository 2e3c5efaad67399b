"""Grouped-query attention: 12 query heads on 4 key/value heads, against every peer that supports it.

Regime: (batch, length, embed, heads) = (4, 512, 768, 12), (2, 1024, 768, 12); full and causal; float32 and bfloat16;
forward, and forward with backward. The block around SDPA uses `enable_gqa`. Everything is first compared with the
definition in float64.

    python -m benchmarks.grouped [--quick] [--rounds N] [--only "causal"]
"""

from collections.abc import Sequence
from itertools import product

from benchmarks.command_line import arguments
from benchmarks.measure import report
from benchmarks.peers import Comparison
from benchmarks.regime import Regime, both

SIZES = [(4, 512, 768, 12), (2, 1024, 768, 12)]
KV_HEADS = 4


def main(command_line: Sequence[str] | None = None) -> dict:
    """Measure every regime, and print a line of JSON last."""
    options = arguments(__doc__, command_line)
    comparison = Comparison(options)
    sizes = options.sizes(SIZES)
    sizes = sizes[:1] if options.quick else sizes
    for size, mask, dtype in product(sizes, ("full", "causal"), ("float32", "bfloat16")):
        for regime in both(Regime(*size, mask, dtype, kv_heads=KV_HEADS)):
            comparison.add(regime)
    return report("grouped", comparison.rows, options, comparison.left_out)


if __name__ == "__main__":
    main()
