"""Whether heads cost time: one fused layer against a list of heads, 1 to 32 of them, forward and training step.

A list of heads is what one writes first: each head a module of its own with three maps, one after the other, their
outputs side by side, then the projection. It is made of the layer by `hw.to_heads`, and gives the same.
"""

import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from research.claims.sizes import Size

LEAST = 0.02
"""Seconds that a sample takes at least; what is quicker is repeated within it."""

NEAR = 1e-4
"""How far the two may be apart."""


class ListOfHeads(nn.Module):
    """The heads of a layer, one after the other."""

    def __init__(self, layer: hw.MultiHeadAttention) -> None:
        super().__init__()
        heads, self.projection = hw.to_heads(layer)
        self.heads = nn.ModuleList(nn.ModuleList(head) for head in heads)

    def forward(self, x: Tensor) -> Tensor:
        """As the layer does."""
        given = []
        for head in self.heads:
            q, k, v = (each(x)[:, None] for each in head)
            given.append(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])
        return self.projection(torch.cat(given, -1))


def clocked(size: Size) -> list[dict[str, Any]]:
    """Seconds of each round, of every number of heads, fused and as a list, in every regime."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return [_regime(size, device, batch, length) for device in devices for batch, length in size.lengths]


def _regime(size: Size, device: str, batch: int, length: int) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(batch, length, size.width, device=device)
    calls: dict[str, Callable[[], object]] = {}
    for heads in size.heads:
        fused = hw.MultiHeadAttention(size.width, heads, bias=False, mask=hw.causal()).to(device)
        apart = ListOfHeads(fused).to(device)
        with torch.no_grad():
            away = (fused(x) - apart(x)).abs().max().item()
        if away > NEAR:
            raise ValueError(f"a list of {heads} heads is {away} away from the layer")
        for name, layer in (("fused", fused), ("list", apart)):
            calls[f"forward {name} {heads}"] = lambda layer=layer: _forward(layer, x)
            calls[f"training {name} {heads}"] = lambda layer=layer: _training(layer, x)
    print(f"clock: {device}, batch {batch}, length {length}", flush=True)
    seconds = interleaved(calls, size.rounds, torch.cuda.synchronize if device == "cuda" else lambda: None)
    return {"device": device, "batch": batch, "length": length, "width": size.width, "seconds": seconds}


@torch.no_grad()
def _forward(layer: nn.Module, x: Tensor) -> None:
    layer(x)


def _training(layer: nn.Module, x: Tensor) -> None:
    """Forward and backward, of the weights and of what came in."""
    layer.zero_grad(set_to_none=True)
    layer(x.detach().requires_grad_()).square().mean().backward()


def interleaved(
    calls: dict[str, Callable[[], object]], rounds: int, wait: Callable[[], object]
) -> dict[str, list[float]]:
    """Seconds of one run of each call, a sample a round, every round in another order."""

    def sample(run: Callable[[], object], times: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(times):
            run()
        wait()
        return (time.perf_counter() - start) / times

    for run in calls.values():
        run()
    times = {name: max(1, round(LEAST / sample(run, 1))) for name, run in calls.items()}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    order, shuffled = list(calls), random.Random(0)
    for _ in range(rounds):
        shuffled.shuffle(order)
        for name in order:
            sample(calls[name], 1)  # nobody pays for what the one before left in the caches
            taken[name].append(sample(calls[name], times[name]))
    return taken
