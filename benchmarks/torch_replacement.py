"""Time of headwise's replacement for `torch.nn.MultiheadAttention`, as a ratio to torch's layer.

Regime: self-attention of 2 sequences of 1,024 tokens, width 512, 8 heads, in float32, alone and in an encoder of two
blocks. The two layers run alternately; the result is the median ratio. Each case first checks that both return the same
output or gradient.

    python -m benchmarks.torch_replacement [repeats]
"""

import argparse
import json
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.measure import Call, Ratio, interleaved
from headwise.compat import MultiheadAttention


def calls_of(cls: type[nn.MultiheadAttention]) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the benchmark cases for a layer class, by name. Each case is a function that returns an output or a
    gradient to compare.
    """
    torch.manual_seed(0)
    layer = cls(512, 8, batch_first=True)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True), 2)
    for block in encoder.layers:
        theirs, block.self_attn = block.self_attn, cls(512, 8, batch_first=True)
        block.self_attn.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 1024, 512)
    padding = torch.arange(1024) >= torch.tensor([512, 1024])[:, None]

    def trained(need_weights: bool) -> torch.Tensor:
        layer.train().zero_grad()
        layer(x, x, x, need_weights=need_weights)[0].square().sum().backward()
        return layer.in_proj_weight.grad

    def evaluated(need_weights: bool) -> torch.Tensor:
        with torch.no_grad():
            return layer.eval()(x, x, x, need_weights=need_weights)[0]

    def encoded(**options: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return encoder.eval()(x, **options)[1]  # the sequence without padding

    return {
        "training step": lambda: trained(False),
        "training step, with weights": lambda: trained(True),
        "evaluation": lambda: evaluated(False),
        "evaluation, with weights": lambda: evaluated(True),
        "encoder, evaluation": encoded,
        "encoder, evaluation, half of one sequence padding": lambda: encoded(src_key_padding_mask=padding),
    }


def main() -> None:
    """Print a line for each case, and a line of JSON last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repeats", type=int, nargs="?", default=15, help="samples of each case; 15 by default")
    repeats = parser.parse_args().repeats
    theirs, ours = calls_of(nn.MultiheadAttention), calls_of(MultiheadAttention)
    ratios = {}
    for case, call in ours.items():
        expected = theirs[case]()
        torch.testing.assert_close(call(), expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
        samples = interleaved({"ours": Call(call), "theirs": Call(theirs[case])}, repeats)
        ratios[case] = Ratio.of(samples["ours"], samples["theirs"]).median
        print(f"{ratios[case]:5.2f}  {case}")
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), "ours / torch": ratios}))


if __name__ == "__main__":
    main()
