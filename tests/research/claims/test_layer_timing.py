"""Timing of one fused layer against a list of heads, with a made-up clock."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

import headwise as hw
from research.claims import (
    layer_timing,
)
from research.claims.sizes import SIZES


def test_a_list_of_heads_is_the_layer():
    layer = hw.MultiHeadAttention(15, 3, bias=False, mask=hw.causal()).double()
    apart = layer_timing.ListOfHeads(layer)
    x, upstream = torch.randn(2, 7, 15, dtype=torch.float64), torch.randn(2, 7, 15, dtype=torch.float64)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    given, wanted = apart(other), layer(one)
    torch.testing.assert_close(given, wanted, rtol=1e-12, atol=1e-12)
    wanted.backward(upstream)
    given.backward(upstream)
    torch.testing.assert_close(other.grad, one.grad, rtol=1e-12, atol=1e-12)
    for place, name in enumerate(("q_proj", "k_proj", "v_proj")):
        together = torch.cat([head[place].weight.grad for head in apart.heads])
        torch.testing.assert_close(together, getattr(layer, name).weight.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(apart.projection.weight.grad, layer.out_proj.weight.grad, rtol=1e-12, atol=1e-12)


def test_seconds_are_of_one_run_by_a_clock_that_is_made_up(monkeypatch):
    now = [0.0]
    ran = Counter()

    def run(name, seconds):
        ran[name] += 1
        now[0] += seconds

    def wait():
        now[0] += 100.0 * (ran.total() == 0)

    monkeypatch.setattr(layer_timing.time, "perf_counter", lambda: now[0])
    costs = {"quick": 0.004, "slow": 1.0}
    found = layer_timing.interleaved({name: lambda n=name, s=s: run(n, s) for name, s in costs.items()}, 3, wait)
    assert found == {name: pytest.approx([seconds] * 3) for name, seconds in costs.items()}
    assert ran == {"quick": 2 + 3 * (1 + 5), "slow": 2 + 3 * (1 + 1)}


SIZE = replace(SIZES["tiny"], heads=(1, 2, 4), rounds=2, width=16, lengths=((2, 5),))


def test_the_clock_runs_and_refuses_lists_that_are_not_the_layer(monkeypatch):
    monkeypatch.setattr(layer_timing, "LEAST", 0.0)
    monkeypatch.setattr(layer_timing.torch.cuda, "is_available", lambda: False)
    (found,) = layer_timing.time_layers(SIZE)
    names = {f"{a} {b} {n}" for a in ("forward", "training") for b in ("fused", "list") for n in (1, 2, 4)}
    assert set(found["seconds"]) == names
    assert all(len(each) == 2 and min(each) > 0 for each in found["seconds"].values())
    monkeypatch.setattr(layer_timing, "NEAR", -1.0)
    with pytest.raises(ValueError, match="a list of 1 heads differs from the layer by"):
        layer_timing.time_layers(SIZE)
