"""Time of decoding one token after 4,096 cached ones, against Llama's attention with its caches and hand-written
blocks, without and with `torch.compile`.

Regime: batch 1, embed 512 with 8 heads, and embed 768 with 12 query heads on 4 key/value heads; rotary, causal, no
biases, float32 and bfloat16, no gradients. A sample is 64 single-token steps after a prompt of 4,096 tokens. Each
sample starts with a fresh copy of the prompt's cache; the copy is not timed, but the growth of the cache is.

Dynamic (growing) and static caches (capacity 4,352 tokens) are compared with the peers' caches of the same kind: those
of transformers, and a block around SDPA that appends to its keys and values, or writes them to preallocated memory.
Cosines, sines and masks of peers are precomputed, as a model does once for all its layers. For the compiled rows, the
layers of headwise and of the peers are compiled with the default options of `torch.compile`; the prompt is not. The
outputs of prompt and steps are first compared with the definition in float64.

    python -m benchmarks.decoding [--quick] [--rounds N] [--only "float32"]
"""

import copy
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.command_line import Options, arguments
from benchmarks.contestants import Contestant
from benchmarks.decoders import Decoder, block_decoder, llama_decoder, our_decoder
from benchmarks.measure import Call, interleaved, report
from benchmarks.oracle import YARDSTICK
from benchmarks.peers import LLAMA, Comparison, checked
from benchmarks.regime import Data, Regime

STEPS = 64
SIZES = [(512, 8, None), (768, 12, 4)]
CACHES = {"DynamicCache": False, "StaticCache": True}
"""Kinds of caches by name: True for those of a fixed capacity."""
COMPILED = "compiled"
"""Last word of the names of compiled contestants."""


def decoding(decoder: Decoder, regime: Regime, data: Data, compiler: str | None = None) -> tuple[Contestant, Call]:
    """Run the prompt once. Return the contestant, whose results (output of prompt and steps) are checked, and the call
    that is timed: `STEPS` single-token steps on a copy of the prompt's cache. The steps are compiled by the named
    backend of `torch.compile`, if any.
    """
    layer = decoder.layer.eval()
    prompt = regime.length - STEPS
    tokens = [data.x[:, position : position + 1].clone() for position in range(prompt, regime.length)]
    cache = decoder.fresh()
    with torch.no_grad():
        prompt_output = decoder.step(layer, data.x[:, :prompt], cache, 0)
    stepped = torch.compile(layer, backend=compiler) if compiler else layer

    def steps(cache: Any) -> list[Tensor]:
        with torch.no_grad():
            return [decoder.step(stepped, token, cache, prompt + number) for number, token in enumerate(tokens)]

    def fresh() -> Any:
        return copy.deepcopy(cache)

    contestant = Contestant(lambda: steps(fresh()), lambda outs: {"out": torch.cat([prompt_output, *outs], 1)})
    return contestant, Call(steps, fresh)


def compare(comparison: Comparison, regime: Regime) -> None:
    """Check the decoders of headwise and of the peers in a regime, time them interleaved, and add the rows to the
    comparison: those of each kind of cache, and of compiled steps, on their own.
    """
    torch.compiler.reset()  # above its limit of compilations it would silently not compile
    options, data = comparison.options, regime.data()
    compiler = "eager" if options.tiny else "inductor"  # "eager" traces the layer, and compiles nothing
    peers = {YARDSTICK: block_decoder} | ({LLAMA: llama_decoder} if options.peers != "torch" else {})
    calls: dict[str, Call] = {}
    opponents: list[dict[str, str]] = []
    for backend, (kind, static) in product((None, compiler), CACHES.items()):
        suffix = f"{kind}, {COMPILED}" if backend else kind
        ours = f"ours, {suffix}"
        contestant, calls[ours] = decoding(our_decoder(regime, data, static=static), regime, data, backend)
        checked(regime, lambda *_, contestant=contestant: contestant)
        opponents.append({})
        for peer, decoder in peers.items():
            name = f"{peer}, {suffix}"

            def build(*_: object, name=name, decoder=decoder, static=static, backend=backend) -> Contestant:
                contestant, calls[name] = decoding(decoder(regime, data, static=static), regime, data, backend)
                return contestant

            if comparison.sane(name, build, regime):
                opponents[-1][name] = ours
            else:
                calls.pop(name, None)
    samples = interleaved(calls, options.rounds)
    for opponent in filter(None, opponents):
        comparison.keep(regime, samples, opponent, runs=STEPS)


def regimes(options: Options) -> list[Regime]:
    """Return the regimes that the command line asks for."""
    length = (40 if options.tiny else 4096) + STEPS
    sizes = product(SIZES[:1] if options.quick else SIZES, ("float32", "bfloat16"))
    every = [
        Regime(1, length, embed, heads, "causal", dtype, kv_heads=kv_heads, bias=False, rotary=True)
        for (embed, heads, kv_heads), dtype in sizes
    ]
    return [regime for regime in every if options.wants(regime)]


def main(command_line: Sequence[str] | None = None) -> dict:
    """Measure every regime, and print a line of JSON last."""
    options = arguments(__doc__, command_line)
    comparison = Comparison(options)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for regime in regimes(options):
            compare(comparison, regime)
    return report("decoding", comparison.rows, options, comparison.left_out)


if __name__ == "__main__":
    main()
