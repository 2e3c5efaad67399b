"""Regimes, results and helpers that the tests of the benchmarks share."""

from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import (
    contestants,
    peers,
)
from benchmarks.measure import Ratio, Row
from benchmarks.regime import Regime

ROOT = Path(__file__).parent.parent.parent

TINY = Regime(3, 37, 35, 5)


def results_of(regime, build=contestants.ours):
    """Return output and gradients, by name, of the contestant that `build` creates for a regime."""
    contestant = build(regime, regime.data())
    return contestant.results(contestant.run())


def plain_layer(regime):
    """Return the float64 output and all gradients of a layer: a few lines with the whole matrix, differentiated by
    autograd.
    """
    data = regime.data()
    x, weights = data.x.double().requires_grad_(), {n: t.double() for n, t in data.weights.named().items()}
    weights = {name: tensor.requires_grad_() for name, tensor in weights.items()}
    projected = x @ weights["qkv"].T + weights["qkv_bias"]
    q, k, v = (part.unflatten(2, (-1, regime.head_dim)).transpose(1, 2) for part in projected.split(regime.widths, 2))
    groups = regime.heads // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).mT / regime.head_dim**0.5
    allowed = regime.allowed()
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    heads = scores.softmax(-1) @ v.repeat_interleave(groups, 1)
    out = heads.transpose(1, 2).flatten(2) @ weights["out_proj"].T + weights["out_bias"]
    gradients = torch.autograd.grad(out, [x, *weights.values()], data.upstream.double())
    return {"out": out, **dict(zip(["x", *weights], gradients, strict=True))}


def results(*rows, benchmark="layer", left_out=None):
    """Return the saved results of a benchmark script with these rows."""
    return {
        "benchmark": benchmark,
        "date": "2026-01-02",
        "rounds": 7,
        "quick": False,
        "only": "",
        "machine": {"cpu": "a processor", "cores": 2, "threads": 2, "capability": "AVX512", "gpu": None},
        "versions": {"torch": "2.13.0"},
        "rows": [asdict(row) for row in rows],
        "left_out": left_out or {},
    }


def row(median, regime=None, against=peers.TORCH_LAYER, note=""):
    """Return a row of results with this median ratio; the lowest and highest are 0.1 away from it."""
    return Row(regime or Regime(2, 1024, 512, 8), against, Ratio(median, median - 0.1, median + 0.1), 0.01, 0.02, note)


def line(text, *parts):
    """Return the cells of the only line of a Markdown text that contains all these parts."""
    (matching_line,) = [line for line in text.splitlines() if all(part in line for part in parts)]
    return [cell.strip() for cell in matching_line.strip("|").split("|")]
