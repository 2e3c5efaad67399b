"""Timed layers: a layer in a regime, with given weights and input, that can be run and returns its output and
gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw
from benchmarks.oracle import Results
from benchmarks.regime import NARROW, WINDOW, Data, Regime


class LeftOutError(Exception):
    """Error of a peer that cannot be measured in a regime; the message states the reason in a few words."""


@dataclass(frozen=True)
class Contestant:
    """A layer in a regime that is ready to be timed.

    Attributes:
        run: the timed call, without arguments.
        results: converts the return value of `run` to the output and gradients by name, for comparison with the float64
            definition.
    """

    run: Callable[[], object]
    results: Callable[[object], Results]


@dataclass(frozen=True)
class Peer:
    """An implementation that headwise is compared with.

    Attributes:
        build: creates the contestant from a regime and its data.
        flavour: regime options that the peer's layer requires, such as `{"bias": False}`; headwise and the float64
            definition are then built with the same options.
        torch_only: the peer needs no package other than torch.
        keeps_matrix: the peer stores the matrix of attention weights. It is left out for long sequences, where that
            would take minutes and gigabytes.
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
    """Return the contestant for a torch layer, after copying the data's weights into it. It runs without gradients, or
    with a backward pass if the regime trains.

    Args:
        call: from x to the output.
        modules: are set to evaluation or training mode.
        parameters: for each name in the oracle's results, the parameters that form it when concatenated.
        regime: sizes, mask and dtype.
        data: input, weights and output gradient.
    """
    load(parameters, data)
    for module in modules:
        module.train(regime.training)
    if not regime.training:
        return Contestant(lambda: _without_gradients(call, data.x), lambda out: {"out": out})
    x = data.x.clone().requires_grad_()
    leaves = [x, *(part for parts in parameters.values() for part in parts)]

    def step() -> tuple[Tensor, tuple[Tensor, ...]]:
        out = call(x)
        return out, torch.autograd.grad(out, leaves, data.upstream)

    def results(returned: tuple[Tensor, tuple[Tensor, ...]]) -> Results:
        out, (x_gradient, *parameter_gradients) = returned
        gradients = iter(parameter_gradients)
        named = {name: torch.cat([next(gradients) for _ in parts]) for name, parts in parameters.items()}
        return {"out": out, "x": x_gradient, **named}

    return Contestant(step, results)


def _without_gradients(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return `call(x)`, computed without gradients."""
    with torch.no_grad():
        return call(x)


def load(parameters: dict[str, list[Tensor]], data: Data) -> None:
    """Copy the weights of `data` into the parameters of a layer, which `parameters` lists by the oracle's names. Raise
    `LeftOutError` if the layer has other parameters.
    """
    wanted = data.weights.named()
    if parameters.keys() != wanted.keys():
        raise LeftOutError(f"has {sorted(parameters)} where {sorted(wanted)} are given")
    with torch.no_grad():
        for name, parts in parameters.items():
            for part, value in zip(parts, wanted[name].split([len(part) for part in parts]), strict=True):
                part.copy_(value)


def linear_parameters(projections: list[nn.Linear], out: nn.Linear) -> dict[str, list[Tensor]]:
    """Return the weights, and biases if there are any, of the input and output projections by the oracle's names:
    "qkv", "out_proj", "qkv_bias", "out_bias".
    """
    parameters = {"qkv": [projection.weight for projection in projections], "out_proj": [out.weight]}
    if projections[0].bias is not None:
        parameters |= {"qkv_bias": [projection.bias for projection in projections], "out_bias": [out.bias]}
    return parameters


def our_layer(regime: Regime) -> hw.MultiHeadAttention:
    """Return headwise's layer for a regime, built as a user would."""
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
    """Return the parameters of a headwise layer by the oracle's names."""
    return linear_parameters([layer.q_proj, layer.k_proj, layer.v_proj], layer.out_proj)


def ours(regime: Regime, data: Data) -> Contestant:
    """Return the contestant for headwise's layer. Padding is passed as `lengths`."""
    return _ours(regime, data, {"lengths": regime.lengths} if regime.mask == "padding" else {})


def ours_masked(regime: Regime, data: Data) -> Contestant:
    """Return the contestant for headwise's layer when padding is passed as a mask rule instead of `lengths`."""
    return _ours(regime, data, {"mask": hw.padding(regime.lengths)})


def _ours(regime: Regime, data: Data, call_options: dict[str, Any]) -> Contestant:
    """Return the contestant for headwise's layer, called with the given keyword arguments."""
    layer = our_layer(regime)
    return of_torch(lambda x: layer(x, **call_options), [layer], our_parameters(layer), regime, data)
