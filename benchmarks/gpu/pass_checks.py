"""Checks of whole passes on a GPU: they wait for nothing, and a step of decoding can be captured in a CUDA graph."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

import headwise as hw
from benchmarks.gpu.checks import Check, CheckError

BATCH, HEADS, HEAD_DIM = 2, 4, 64
WIDTH = HEADS * HEAD_DIM


def pass_checks(device: str, *, length: int) -> Iterator[Check]:
    """Yield checks of passes that must not wait, and of captured decoding."""
    for name, run in passes(device, length).items():
        yield Check(f"waits for nothing: {name}", partial(check_waits_for_nothing, run, device))
    for name, make in layers(device).items():
        yield Check(f"decoding in a CUDA graph: {name}", partial(check_captured, make, device))


# -- no synchronisation -----------------------------------------------------------------------------------------------


@contextmanager
def refusing_to_wait(device: str) -> Iterator[None]:
    """Return a context in which torch raises an error where the CPU would wait for the GPU."""
    if device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_waits_for_nothing(run: Callable[[], Tensor], device: str) -> None:
    """Raise an error if the second forward or backward pass waits for the GPU. The first one may: it compiles kernels,
    and copies masks to the device.
    """
    run().backward()
    with refusing_to_wait(device):
        run().backward()


def passes(device: str, length: int) -> dict[str, Callable[[], Tensor]]:
    """Return functions that run a forward pass and return a loss, by name."""
    dtype = torch.bfloat16
    q, k, v = (torch.randn(BATCH, HEADS, length, HEAD_DIM, device=device, dtype=dtype).requires_grad_() for _ in "qkv")
    x = torch.randn(BATCH, length, WIDTH, device=device, dtype=dtype)
    bias = torch.randn(1, HEADS, length, length, device=device, dtype=dtype, requires_grad=True)
    sinks = torch.randn(HEADS, device=device, requires_grad=True)
    ids = (torch.arange(length) * 5 // length)[None].expand(BATCH, -1)
    lengths = torch.tensor([length // 3, length])
    masks = {
        "no mask": None,
        "causal": hw.causal(),
        "window": hw.window(length // 4),
        "window per head": hw.window([1, 3, length // 2, None]),
        "documents": hw.causal() & hw.segments(ids),
        "documents made on the device": hw.causal() & hw.segments(ids.to(device)),
        "padding": hw.causal() & hw.padding(lengths),
        "left padding": hw.padding(lengths, side="left"),
        "prefix": hw.causal() | hw.prefix(3),
        "tensor": (torch.rand(length, length) > 0.5).to(device),
        "rule": hw.mask_rule(lambda b, h, q, k: (q >= k) & ((q + k + h) % 3 != b)),
    }
    options = {
        "bias": {"bias": bias},
        "softcap": {"softcap": 5.0, "mask": hw.causal()},
        "sinks": {"sinks": sinks, "mask": hw.causal()},
        "dropout": {"dropout": 0.1, "mask": hw.causal()},
        "log-sum-exp": {"return_lse": True, "mask": hw.causal()},
    }
    runs: dict[str, Callable[[], Tensor]] = {
        f"attend, {name}": partial(_attend, q, k, v, mask=mask) for name, mask in masks.items()
    }
    runs |= {f"attend, {name}": partial(_attend, q, k, v, **option) for name, option in options.items()}
    on_device, starts = lengths.to(device), torch.tensor([0, length // 3, length], device=device)
    for name, make in layers(device).items():
        runs[f"layer, {name}"] = partial(_layer, make().train(), x)
    layer = layers(device)["rotary"]()
    runs["layer, lengths"] = partial(_layer, layer, x, lengths=on_device)
    runs["layer, packed"] = partial(_layer, layer, x[0], offsets=starts)
    runs["layer, packed by numbers on the CPU"] = partial(_layer, layer, x[0], offsets=[0, length // 3, length])
    return runs


def _attend(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    """Return the sum of the results of `hw.attend`."""
    returned = hw.attend(q, k, v, **options)
    return sum(result.sum() for result in returned) if isinstance(returned, tuple) else returned.sum()


def _layer(layer: torch.nn.Module, x: Tensor, **options: object) -> Tensor:
    """Return the sum of the output of a layer."""
    return layer(x, **options).sum()


# -- CUDA graphs ------------------------------------------------------------------------------------------------------


def layers(device: str) -> dict[str, Callable[[], torch.nn.Module]]:
    """Return functions that make a layer with a causal mask, by name."""
    common = {"mask": hw.causal(), "device": device, "dtype": torch.bfloat16}
    return {
        "rotary": lambda: hw.MultiHeadAttention(WIDTH, HEADS, num_kv_heads=2, rotary=hw.Rotary(), **common),
        "ALiBi": lambda: hw.MultiHeadAttention(WIDTH, HEADS, position_bias=hw.ALiBi(), **common),
        "sinks": lambda: hw.MultiHeadAttention(WIDTH, HEADS, scores=hw.Scores(sinks=True), **common),
        "differential": lambda: hw.DifferentialAttention(WIDTH, HEADS // 2, depth=1, **common),
        "latent": lambda: hw.LatentAttention(WIDTH, HEADS, kv_rank=32, head_dim=48, rotary_dim=16, **common),
    }


@torch.no_grad()
def check_captured(make: Callable[[], torch.nn.Module], device: str) -> None:
    """Raise `CheckError` unless a step of decoding that is captured once and replayed returns what the layer returns
    without a graph.
    """
    torch.manual_seed(0)
    layer = make().eval()
    x = torch.randn(BATCH, 20, WIDTH, device=device, dtype=torch.bfloat16)
    cache = layer.static_cache(BATCH, 32)
    layer(x[:, :7], cache=cache)
    expected = [layer(token, cache=cache) for token in x[:, 7:].split(1, dim=1)]
    cache.reset()
    layer(x[:, :7], cache=cache)
    token = torch.zeros_like(x[:, :1])
    replay = captured(lambda: layer(token, cache=cache), lambda: cache.crop(7), device)
    for number, (new, wanted) in enumerate(zip(x[:, 7:].split(1, dim=1), expected, strict=True)):
        token.copy_(new)
        difference = float((replay() - wanted).abs().max())
        if not difference <= torch.finfo(torch.bfloat16).eps * float(wanted.abs().max()):
            raise CheckError(f"step {number} of the replayed graph differs by {difference:.2g}")


def captured(step: Callable[[], Tensor], undo: Callable[[], None], device: str) -> Callable[[], Tensor]:
    """Return a function that replays a step from a CUDA graph and returns its output. The step runs twice before, and
    `undo` removes what it left. On a CPU the step itself is returned.
    """
    if device != "cuda":
        step()
        undo()
        return step
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
        undo()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        output = step()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay
