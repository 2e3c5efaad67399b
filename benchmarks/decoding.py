"""Time of decoding one token after 4,096 cached ones, against Llama's attention with its caches.

Regime: batch 1, embed 512 with 8 heads, and embed 768 with 12 query heads on 4 key/value heads; rotary, causal, no
biases, float32 and bfloat16, no gradients. A sample is 64 single-token steps after a prompt of 4,096 tokens. Each
sample starts with a fresh copy of the prompt's cache; the copy is not timed, but the growth of the cache is. Dynamic
and static caches (capacity 4,352 tokens) are compared with the peer's cache of the same kind, and with a block around
SDPA that appends to its keys and values. Cosines, sines and masks of peers are precomputed, as a model does once for
all its layers. The outputs of prompt and steps are first compared with the definition in float64.

    python -m benchmarks.decoding [--quick] [--rounds N] [--only "float32"]
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from benchmarks.command_line import arguments
from benchmarks.contestants import Contestant, linear_parameters, load, our_layer, our_parameters
from benchmarks.library_peers import llama_layer, llama_parameters
from benchmarks.measure import Call, interleaved, report
from benchmarks.peers import LLAMA, Comparison, checked
from benchmarks.regime import Data, Regime
from benchmarks.torch_peers import cos_and_sin, rotated

STEPS = 64
SIZES = [(512, 8, None), (768, 12, 4)]


@dataclass(frozen=True)
class Decoder:
    """An attention layer with a cache.

    Attributes:
        layer: the module.
        fresh: returns an empty cache.
        step: `step(x, cache, position)` returns the output of the next tokens, the first of which has that position,
            and updates the cache.
    """

    layer: nn.Module
    fresh: Callable[[], Any]
    step: Callable[[Tensor, Any, int], Tensor]


def decoding(decoder: Decoder, regime: Regime, data: Data) -> tuple[Contestant, Call]:
    """Run the prompt once. Return the contestant, whose results (output of prompt and steps) are checked, and the call
    that is timed: `STEPS` single-token steps on a copy of the prompt's cache.
    """
    decoder.layer.eval()
    prompt = regime.length - STEPS
    tokens = [data.x[:, position : position + 1].clone() for position in range(prompt, regime.length)]
    cache = decoder.fresh()
    with torch.no_grad():
        prompt_output = decoder.step(data.x[:, :prompt], cache, 0)

    def steps(cache: Any) -> list[Tensor]:
        with torch.no_grad():
            return [decoder.step(token, cache, prompt + number) for number, token in enumerate(tokens)]

    def fresh() -> Any:
        return copy.deepcopy(cache)

    contestant = Contestant(lambda: steps(fresh()), lambda outs: {"out": torch.cat([prompt_output, *outs], 1)})
    return contestant, Call(steps, fresh)


def capacity(regime: Regime) -> int:
    """Return the capacity in tokens of the static caches: the length of the regime plus one, rounded up to a multiple
    of 256.
    """
    return -(-(regime.length + 1) // 256) * 256


def our_decoder(regime: Regime, data: Data, *, static: bool) -> Decoder:
    """Return headwise's layer with its static or its dynamic cache."""
    layer = our_layer(regime)
    load(our_parameters(layer), data)
    fresh = (lambda: layer.static_cache(regime.batch, capacity(regime))) if static else hw.DynamicCache
    return Decoder(layer, fresh, lambda x, cache, _: layer(x, cache=cache))


def llama_decoder(regime: Regime, data: Data, *, static: bool) -> Decoder:
    """Return Llama's attention with the static or the dynamic cache of transformers."""
    from transformers import DynamicCache, StaticCache

    layer = llama_layer(regime)
    load(llama_parameters(layer), data)
    cos, sin = cos_and_sin(regime)
    masks = (torch.arange(capacity(regime)) <= torch.arange(regime.length)[:, None])[:, None, None, None]

    def step(x: Tensor, cache: Any, position: int) -> Tensor:
        cos_sin = (cos[:, position : position + x.shape[1]], sin[:, position : position + x.shape[1]])
        mask = masks[position] if static and x.shape[1] == 1 else None
        return layer(x, cos_sin, mask, past_key_values=cache)[0]

    def fresh() -> Any:
        return StaticCache(layer.config, max_cache_len=capacity(regime)) if static else DynamicCache()

    return Decoder(layer, fresh, step)


class AppendingBlock(nn.Module):
    """Hand-written attention block that appends new keys and values to the cached ones and calls SDPA."""

    def __init__(self, regime: Regime):
        super().__init__()
        self.widths, self.head_dim, self.cos_sin = regime.widths, regime.head_dim, cos_and_sin(regime)
        self.qkv = nn.Linear(regime.embed, sum(regime.widths), bias=False, dtype=regime.torch_dtype)
        self.out = nn.Linear(regime.embed, regime.embed, bias=False, dtype=regime.torch_dtype)

    def forward(self, x: Tensor, cache: dict[str, Tensor], position: int) -> Tensor:
        """Return the output of the new tokens, `(batch, new, embed)`, and append their keys and values to the cache."""
        batch, new, embed = x.shape
        q, k, v = (
            part.view(batch, new, -1, self.head_dim).transpose(1, 2) for part in self.qkv(x).split(self.widths, -1)
        )
        cos_sin = [table[:, position : position + new] for table in self.cos_sin]
        q, k = rotated(q, *cos_sin), rotated(k, *cos_sin)
        if cache:
            k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
        cache["k"], cache["v"] = k, v
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=new > 1, enable_gqa=k.shape[1] != q.shape[1])
        return self.out(heads.transpose(1, 2).reshape(batch, new, embed))


def appending_decoder(regime: Regime, data: Data) -> Decoder:
    """Return the block that appends to its keys and values, with the weights of `data`."""
    block = AppendingBlock(regime)
    load(linear_parameters([block.qkv], block.out), data)
    return Decoder(block, dict, block)


def compare(comparison: Comparison, regime: Regime) -> None:
    """Check the decoders of headwise and of the peers in a regime, time them interleaved, and add the rows to the
    comparison.
    """
    data, calls, opponent = regime.data(), {}, {}
    static_by_cache = {"DynamicCache": False, "StaticCache": True}
    our_decoders = {
        f"ours, {kind}": our_decoder(regime, data, static=static) for kind, static in static_by_cache.items()
    }
    peers = {"block that appends, SDPA": (appending_decoder, {}, "ours, DynamicCache")}
    if comparison.options.peers == "all":
        for kind, static in static_by_cache.items():
            peers[f"{LLAMA}, {kind}"] = (llama_decoder, {"static": static}, f"ours, {kind}")
    for name, decoder in our_decoders.items():
        contestant, calls[name] = decoding(decoder, regime, data)
        checked(regime, lambda *_, contestant=contestant: contestant)
    for name, (build, options, rival) in peers.items():
        contestant, call = decoding(build(regime, data, **options), regime, data)
        if comparison.sane(name, lambda *_, contestant=contestant: contestant, regime):
            calls[name], opponent[name] = call, rival
    comparison.keep(regime, interleaved(calls, comparison.options.rounds), opponent, runs=STEPS)


def main(command_line: Sequence[str] | None = None) -> dict:
    """Measure every regime, and print a line of JSON last."""
    options = arguments(__doc__, command_line)
    comparison = Comparison(options)
    for embed, heads, kv_heads in SIZES[:1] if options.quick else SIZES:
        for dtype in ("float32", "bfloat16"):
            length = (40 if options.tiny else 4096) + STEPS
            regime = Regime(1, length, embed, heads, "causal", dtype, kv_heads=kv_heads, bias=False, rotary=True)
            if options.wants(regime):
                compare(comparison, regime)
    return report("decoding", comparison.rows, options, comparison.left_out)


if __name__ == "__main__":
    main()
