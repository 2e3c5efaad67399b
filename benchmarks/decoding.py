"""One token after 4,096 cached ones, against Llama's attention with its caches.

Regime: batch 1, embed 512 with 8 heads, and embed 768 with 12 heads on 4; rotary, causal, no biases, float32 and
bfloat16, no gradients. A sample is 64 tokens, one after another, after a prompt of 4,096; each begins with a fresh copy
of the cache as the prompt left it, made outside the timing, so that what a cache pays for growing is paid. Both kinds
of cache, growing and static (with room for 4,352 tokens), each against the peer's of that kind, and against what people
write: a block around SDPA that appends to its keys. Cosines, sines and masks of peers are made beforehand, as a model
does once for all its layers. The outputs of prompt and steps are first compared with the definition in float64.

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
    """A layer with a cache: `step(x, cache, position)` is the next tokens' output, `fresh` an empty cache."""

    layer: nn.Module
    fresh: Callable[[], Any]
    step: Callable[[Tensor, Any, int], Tensor]


def decoding(decoder: Decoder, regime: Regime, data: Data) -> tuple[Contestant, Call]:
    """The prompt once; what is checked, and what is timed."""
    decoder.layer.eval()
    prompt = regime.length - STEPS
    tokens = [data.x[:, at : at + 1].clone() for at in range(prompt, regime.length)]
    cache = decoder.fresh()
    with torch.no_grad():
        said = decoder.step(data.x[:, :prompt], cache, 0)

    def steps(cache: Any) -> list[Tensor]:
        with torch.no_grad():
            return [decoder.step(token, cache, prompt + number) for number, token in enumerate(tokens)]

    def fresh() -> Any:
        return copy.deepcopy(cache)

    contestant = Contestant(lambda: steps(fresh()), lambda outs: {"out": torch.cat([said, *outs], 1)})
    return contestant, Call(steps, fresh)


def capacity(regime: Regime) -> int:
    """Of static caches: room for what comes, in steps of 256."""
    return -(-(regime.length + 1) // 256) * 256


def our_decoder(regime: Regime, data: Data, *, static: bool) -> Decoder:
    """Headwise's layer with one of its caches."""
    layer = our_layer(regime)
    load(our_parameters(layer), data)
    fresh = (lambda: layer.static_cache(regime.batch, capacity(regime))) if static else hw.DynamicCache
    return Decoder(layer, fresh, lambda x, cache, _: layer(x, cache=cache))


def llama_decoder(regime: Regime, data: Data, *, static: bool) -> Decoder:
    """Llama's attention with one of transformers' caches."""
    from transformers import DynamicCache, StaticCache

    layer = llama_layer(regime)
    load(llama_parameters(layer), data)
    cos, sin = cos_and_sin(regime)
    masks = (torch.arange(capacity(regime)) <= torch.arange(regime.length)[:, None])[:, None, None, None]

    def step(x: Tensor, cache: Any, position: int) -> Tensor:
        turns = (cos[:, position : position + x.shape[1]], sin[:, position : position + x.shape[1]])
        mask = masks[position] if static and x.shape[1] == 1 else None
        return layer(x, turns, mask, past_key_values=cache)[0]

    def fresh() -> Any:
        return StaticCache(layer.config, max_cache_len=capacity(regime)) if static else DynamicCache()

    return Decoder(layer, fresh, step)


class AppendingBlock(nn.Module):
    """What people write: keys and values appended to those of before, and SDPA."""

    def __init__(self, regime: Regime):
        super().__init__()
        self.widths, self.head_dim, self.turns = regime.widths, regime.head_dim, cos_and_sin(regime)
        self.qkv = nn.Linear(regime.embed, sum(regime.widths), bias=False, dtype=regime.torch_dtype)
        self.out = nn.Linear(regime.embed, regime.embed, bias=False, dtype=regime.torch_dtype)

    def forward(self, x: Tensor, cache: dict[str, Tensor], position: int) -> Tensor:
        """From `(batch, new, embed)` to the same."""
        batch, new, embed = x.shape
        q, k, v = (
            part.view(batch, new, -1, self.head_dim).transpose(1, 2) for part in self.qkv(x).split(self.widths, -1)
        )
        turns = [each[:, position : position + new] for each in self.turns]
        q, k = rotated(q, *turns), rotated(k, *turns)
        if cache:
            k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
        cache["k"], cache["v"] = k, v
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=new > 1, enable_gqa=k.shape[1] != q.shape[1])
        return self.out(heads.transpose(1, 2).reshape(batch, new, embed))


def appending_decoder(regime: Regime, data: Data) -> Decoder:
    """The block, given the weights."""
    block = AppendingBlock(regime)
    load(linear_parameters([block.qkv], block.out), data)
    return Decoder(block, dict, block)


def compare(found: Comparison, regime: Regime) -> None:
    """Check all, and time them by turns."""
    data, calls, opponent = regime.data(), {}, {}
    kinds = {"DynamicCache": False, "StaticCache": True}
    mine = {f"ours, {kind}": our_decoder(regime, data, static=static) for kind, static in kinds.items()}
    theirs = {"block that appends, SDPA": (appending_decoder, {}, "ours, DynamicCache")}
    if found.options.peers == "all":
        for kind, static in kinds.items():
            theirs[f"{LLAMA}, {kind}"] = (llama_decoder, {"static": static}, f"ours, {kind}")
    for name, decoder in mine.items():
        contestant, calls[name] = decoding(decoder, regime, data)
        checked(regime, lambda *_, contestant=contestant: contestant)
    for name, (build, options, rival) in theirs.items():
        contestant, call = decoding(build(regime, data, **options), regime, data)
        if found.sane(name, lambda *_, contestant=contestant: contestant, regime):
            calls[name], opponent[name] = call, rival
    found.keep(regime, interleaved(calls, found.options.rounds), opponent, runs=STEPS)


def main(given: Sequence[str] | None = None) -> dict:
    """Every regime, and a line of JSON last."""
    options = arguments(__doc__, given)
    found = Comparison(options)
    for embed, heads, kv_heads in SIZES[:1] if options.quick else SIZES:
        for dtype in ("float32", "bfloat16"):
            length = (40 if options.tiny else 4096) + STEPS
            regime = Regime(1, length, embed, heads, "causal", dtype, kv_heads=kv_heads, bias=False, rotary=True)
            if options.wants(regime):
                compare(found, regime)
    return report("decoding", found.rows, options, found.left_out)


if __name__ == "__main__":
    main()
