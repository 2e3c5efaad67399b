"""Times of one fused layer and of a list of heads, with 1 to 32 heads, forward and training step.

A list of heads is the implementation that most people write first. Each head is a module with three linear maps. The
heads run one after the other, their outputs are concatenated, and the output projection is applied. `hw.to_heads`
makes the list from the layer, so that both have the same weights and the same output.
"""

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw

WIDTH, HEADS = 512, (1, 2, 4, 8, 16, 32)
REGIMES = ((8, 128), (1, 1024))
"""Pairs of batch size and length."""

ROUNDS = 21
"""Number of samples of each case."""

LEAST = 0.02
"""Shortest sample in seconds. A faster call is repeated within the sample."""

NEAR = 1e-4
"""Largest accepted difference between the outputs of the layer and of the list of heads."""


class ListOfHeads(nn.Module):
    """The heads of a layer as separate modules that run one after the other."""

    def __init__(self, layer: hw.MultiHeadAttention) -> None:
        super().__init__()
        heads, self.projection = hw.to_heads(layer)
        self.heads = nn.ModuleList(nn.ModuleList(head) for head in heads)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer, `(batch, length, embed)`."""
        outputs = []
        for head in self.heads:
            q, k, v = (linear(x)[:, None] for linear in head.children())
            outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])
        return self.projection(torch.cat(outputs, -1))


def time_layers() -> list[dict[str, Any]]:
    """Time the layer and the list of heads for every number of heads, on every device, batch and length.

    Returns:
        For each device, batch and length, `seconds` by case: one value for each round.
    """
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return [_time_regime(device, batch, length) for device in devices for batch, length in REGIMES]


def _time_regime(device: str, batch: int, length: int) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(batch, length, WIDTH, device=device)
    calls: dict[str, Callable[[], object]] = {}
    for heads in HEADS:
        fused = hw.MultiHeadAttention(WIDTH, heads, bias=False, mask=hw.causal()).to(device)
        separate = ListOfHeads(fused).to(device)
        with torch.no_grad():
            difference = (fused(x) - separate(x)).abs().max().item()
        if difference > NEAR:
            raise ValueError(f"a list of {heads} heads differs from the layer by {difference}")
        for name, layer in (("fused", fused), ("list", separate)):
            calls[f"forward {name} {heads}"] = partial(_forward, layer, x)
            calls[f"training {name} {heads}"] = partial(_training, layer, x)
    print(f"timing: {device}, batch {batch}, length {length}", flush=True)
    seconds = interleaved(calls, ROUNDS, torch.cuda.synchronize if device == "cuda" else lambda: None)
    return {"device": device, "batch": batch, "length": length, "width": WIDTH, "seconds": seconds}


@torch.no_grad()
def _forward(layer: nn.Module, x: Tensor) -> None:
    layer(x)


def _training(layer: nn.Module, x: Tensor) -> None:
    """Run forward and backward, with gradients of the weights and of the input."""
    layer.zero_grad(set_to_none=True)
    layer(x.detach().requires_grad_()).square().mean().backward()


def interleaved(
    calls: dict[str, Callable[[], object]], rounds: int, synchronize: Callable[[], object]
) -> dict[str, list[float]]:
    """Time calls in turns: one sample of each call in every round, each round in another random order.

    Args:
        calls: by name.
        rounds: number of samples of each call.
        synchronize: waits until the device has finished.

    Returns:
        Seconds of one run by name, one value for each round.
    """

    def sample(run: Callable[[], object], times: int) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(times):
            run()
        synchronize()
        return (time.perf_counter() - start) / times

    for run in calls.values():
        run()
    times = {name: max(1, round(LEAST / sample(run, 1))) for name, run in calls.items()}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    order, generator = list(calls), random.Random(0)
    for _ in range(rounds):
        generator.shuffle(order)
        for name in order:
            sample(calls[name], 1)  # not counted: fills the caches that the previous call has changed
            taken[name].append(sample(calls[name], times[name]))
    return taken
