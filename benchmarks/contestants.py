"""What is timed: a layer in a regime, given weights and an input, that can be run and asked for what it computed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw
from benchmarks.oracle import Results
from benchmarks.regime import NARROW, WINDOW, Data, Regime


class LeftOutError(Exception):
    """Why a peer cannot be measured in a regime, in a few words."""


@dataclass(frozen=True)
class Contestant:
    """`run` is what is timed; `results` makes of what it returned what the oracle knows."""

    run: Callable[[], object]
    results: Callable[[object], Results]


@dataclass(frozen=True)
class Peer:
    """How a peer is built, and how its layer differs from ours as it comes: ours and the oracle are then the same.

    One that keeps the matrix of weights takes minutes and gigabytes for long texts, and is left out there.
    """

    build: Callable[[Regime, Data], Contestant]
    flavour: dict[str, bool] = field(default_factory=dict)
    torch_only: bool = True
    keeps_matrix: bool = False


def of_torch(
    call: Callable[[Tensor], Tensor],
    modules: list[nn.Module],
    parameters: dict[str, list[Tensor]],
    regime: Regime,
    data: Data,
) -> Contestant:
    """A layer of torch, given the weights: evaluated without gradients, or trained.

    Args:
        call: from x to the output.
        modules: set to evaluate or to train.
        parameters: for each name of the oracle's the parameters that make it up, end to end.
        regime: what is computed.
        data: with which numbers.
    """
    load(parameters, data)
    for module in modules:
        module.train(regime.training)
    if not regime.training:
        return Contestant(lambda: _without_gradients(call, data.x), lambda out: {"out": out})
    x = data.x.clone().requires_grad_()
    leaves = [x, *(each for parts in parameters.values() for each in parts)]

    def step() -> tuple[Tensor, tuple[Tensor, ...]]:
        out = call(x)
        return out, torch.autograd.grad(out, leaves, data.upstream)

    def results(found: tuple[Tensor, tuple[Tensor, ...]]) -> Results:
        out, (of_x, *rest) = found
        gradients = iter(rest)
        named = {name: torch.cat([next(gradients) for _ in parts]) for name, parts in parameters.items()}
        return {"out": out, "x": of_x, **named}

    return Contestant(step, results)


def _without_gradients(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        return call(x)


def load(parameters: dict[str, list[Tensor]], data: Data) -> None:
    """Give a layer its weights; `parameters` as in `of_torch`."""
    wanted = data.weights.named()
    if parameters.keys() != wanted.keys():
        raise LeftOutError(f"has {sorted(parameters)} where {sorted(wanted)} are given")
    with torch.no_grad():
        for name, parts in parameters.items():
            for part, value in zip(parts, wanted[name].split([len(part) for part in parts]), strict=True):
                part.copy_(value)


def linear_parameters(projections: list[nn.Linear], out: nn.Linear) -> dict[str, list[Tensor]]:
    """The parameters of linear maps by the oracle's names."""
    found = {"qkv": [each.weight for each in projections], "out_proj": [out.weight]}
    if projections[0].bias is not None:
        found |= {"qkv_bias": [each.bias for each in projections], "out_bias": [out.bias]}
    return found


def our_layer(regime: Regime) -> hw.MultiHeadAttention:
    """Headwise's layer, as a user writes it."""
    half = regime.heads // 2
    per_head = [NARROW] * half + [None] * (regime.heads - half)
    masks = {"causal": hw.causal(), "window": hw.window(WINDOW), "heads": hw.window(per_head)}
    return hw.MultiHeadAttention(
        regime.embed,
        regime.heads,
        num_kv_heads=regime.kv_heads,
        bias=regime.bias,
        rotary=hw.Rotary() if regime.rotary else None,
        mask=masks.get(regime.mask),
        dtype=regime.torch_dtype,
    )


def our_parameters(layer: hw.MultiHeadAttention) -> dict[str, list[Tensor]]:
    """Its parameters by the oracle's names."""
    return linear_parameters([layer.q_proj, layer.k_proj, layer.v_proj], layer.out_proj)


def ours(regime: Regime, data: Data) -> Contestant:
    """Headwise's layer; of a padded batch it is told the lengths."""
    return _ours(regime, data, {"lengths": regime.lengths} if regime.mask == "padding" else {})


def ours_masked(regime: Regime, data: Data) -> Contestant:
    """Headwise's layer, given the padding as a mask."""
    return _ours(regime, data, {"mask": hw.padding(regime.lengths)})


def _ours(regime: Regime, data: Data, given: dict[str, Any]) -> Contestant:
    layer = our_layer(regime)
    return of_torch(lambda x: layer(x, **given), [layer], our_parameters(layer), regime, data)
