"""The whole layer, full and causal, against every peer, and what part of the machine's product rate it reaches.

Regime: (batch, length, embed, heads) = (8, 128, 512, 8), (4, 512, 768, 12), (2, 1024, 512, 8), (1, 4096, 512, 8),
(1, 8192, 512, 8); float32 and bfloat16; forward without gradients, and forward with backward (the gradients of x and
of all weights). Output and gradients of ours and of every peer are first compared with the layer by definition in
float64. A ratio is their time over ours, taken in the same round. The rate is that of a product of 1,024 x 1,024 in
the same rounds; the work of causal attention is that of the scores that are not hidden.

    python -m benchmarks.layer [--quick] [--rounds N] [--only "causal float32"]
"""

from collections.abc import Sequence
from itertools import product

from benchmarks.command_line import arguments
from benchmarks.measure import report
from benchmarks.peers import FLEX, Comparison
from benchmarks.regime import Regime, both

SIZES = [(8, 128, 512, 8), (4, 512, 768, 12), (2, 1024, 512, 8), (1, 4096, 512, 8), (1, 8192, 512, 8)]


def main(given: Sequence[str] | None = None) -> dict:
    """Every regime, a table, and a line of JSON last."""
    options = arguments(__doc__, given)
    found = Comparison(options)
    sizes = options.sizes(SIZES)[-1:] if options.quick else options.sizes(SIZES)
    for size, mask, dtype in product(sizes, ("full", "causal"), ("float32", "bfloat16")):
        for regime in both(Regime(*size, mask, dtype)):
            found.add(regime, without=[FLEX], gemm_share=not regime.training)
    return report("layer", found.rows, options, found.left_out)


if __name__ == "__main__":
    main()
