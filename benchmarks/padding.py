"""A padded batch, against layers that compute the padding too.

Regime: (batch, length, embed, heads) = (8, 128, 512, 8), (4, 512, 768, 12), (2, 1024, 512, 8), (8, 1024, 512, 8); the
lengths of the sequences are spread evenly from 1/16 of the longest to all of it, padding on the right; every query
attends to every key that is real. float32 and bfloat16, forward, and forward with backward of a loss that does not read
padding. Peers are given the padding as they want it, `nn.MultiheadAttention` as `key_padding_mask`, the block around
SDPA as a mask `(batch, 1, 1, keys)`, made beforehand. Everything is first compared with the definition in float64, in
what is no padding. Ours is told the lengths, `layer(x, lengths=...)`; as `mask=hw.padding(lengths)` it is shown beside.

    python -m benchmarks.padding [--quick] [--rounds N] [--only "float32"]
"""

from collections.abc import Sequence
from itertools import product

from benchmarks.command_line import arguments
from benchmarks.contestants import ours_masked
from benchmarks.measure import report
from benchmarks.peers import Comparison
from benchmarks.regime import Regime, both

SIZES = [(8, 128, 512, 8), (4, 512, 768, 12), (2, 1024, 512, 8), (8, 1024, 512, 8)]


def main(given: Sequence[str] | None = None) -> dict:
    """Every regime, and a line of JSON last."""
    options = arguments(__doc__, given)
    found = Comparison(options, also={"ours, mask=padding(lengths)": ours_masked})
    sizes = options.sizes(SIZES)
    for size, dtype in product(sizes[2:3] if options.quick else sizes, ("float32", "bfloat16")):
        for regime in both(Regime(*size, "padding", dtype)):
            found.add(regime)
    return report("padding", found.rows, options, found.left_out)


if __name__ == "__main__":
    main()
