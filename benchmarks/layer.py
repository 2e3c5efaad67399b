"""The whole layer, full and causal, against every peer, and its share of the machine's matrix-multiplication rate.

Regime: (batch, length, embed, heads) = (8, 128, 512, 8), (4, 512, 768, 12), (2, 1024, 512, 8), (1, 4096, 512, 8), (1,
8192, 512, 8); float32 and bfloat16; forward without gradients, and forward with backward (the gradients of x and of all
weights). Output and gradients of headwise and of every peer are first compared with the layer's definition in float64.
A ratio is the peer's time divided by that of headwise, measured in the same round. The rate is that of a product of two
1,024 x 1,024 matrices in the same rounds. For causal attention, only scores that are not masked count as work.

    python -m benchmarks.layer [--quick] [--rounds N] [--only "causal float32"]
"""

from collections.abc import Sequence
from itertools import product

from benchmarks.command_line import arguments
from benchmarks.measure import report
from benchmarks.peers import FLEX, Comparison
from benchmarks.regime import Regime, both

SIZES = [(8, 128, 512, 8), (4, 512, 768, 12), (2, 1024, 512, 8), (1, 4096, 512, 8), (1, 8192, 512, 8)]


def main(command_line: Sequence[str] | None = None) -> dict:
    """Measure every regime, print a table, and print a line of JSON last."""
    options = arguments(__doc__, command_line)
    comparison = Comparison(options)
    sizes = options.sizes(SIZES)[-1:] if options.quick else options.sizes(SIZES)
    for size, mask, dtype in product(sizes, ("full", "causal"), ("float32", "bfloat16")):
        for regime in both(Regime(*size, mask, dtype)):
            comparison.add(regime, without=[FLEX], with_gemm_share=not regime.training)
    return report("layer", comparison.rows, options, comparison.left_out)


if __name__ == "__main__":
    main()
