"""A padded batch, against layers that also compute the padding.

Regime: (batch, length, embed, heads) = (8, 128, 512, 8), (4, 512, 768, 12), (2, 1024, 512, 8), (8, 1024, 512, 8). The
lengths of the sequences are equally spaced from 1/16 of the longest to its full length, with padding on the right.
Every query attends to every key that is not padding. float32 and bfloat16, forward, and forward with backward of a loss
that does not read padding. Each peer receives the padding in the form it supports best: `nn.MultiheadAttention` as
`key_padding_mask`, the block around SDPA as a precomputed mask `(batch, 1, 1, keys)`. Everything except padding is
first compared with the definition in float64. Headwise receives the lengths, `layer(x, lengths=...)`; the version with
`mask=hw.padding(lengths)` is an additional row.

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


def main(command_line: Sequence[str] | None = None) -> dict:
    """Measure every regime, and print a line of JSON last."""
    options = arguments(__doc__, command_line)
    comparison = Comparison(options, also={"ours, mask=padding(lengths)": ours_masked})
    sizes = options.sizes(SIZES)
    for size, dtype in product(sizes[2:3] if options.quick else sizes, ("float32", "bfloat16")):
        for regime in both(Regime(*size, "padding", dtype)):
            comparison.add(regime)
    return report("padding", comparison.rows, options, comparison.left_out)


if __name__ == "__main__":
    main()
