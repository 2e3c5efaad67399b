"""Timing of one fused layer against a list of separate heads, with a simulated clock."""

from collections import Counter

import pytest
import torch

import headwise as hw
from research.claims import layer_timing


def test_list_of_heads_computes_the_same_as_the_layer():
    layer = hw.MultiHeadAttention(15, 3, bias=False, mask=hw.causal()).double()
    separate_heads = layer_timing.ListOfHeads(layer)
    x, upstream = torch.randn(2, 7, 15, dtype=torch.float64), torch.randn(2, 7, 15, dtype=torch.float64)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    list_output, expected = separate_heads(other), layer(one)
    torch.testing.assert_close(list_output, expected, rtol=1e-12, atol=1e-12)
    expected.backward(upstream)
    list_output.backward(upstream)
    torch.testing.assert_close(other.grad, one.grad, rtol=1e-12, atol=1e-12)
    for index, name in enumerate(("q_proj", "k_proj", "v_proj")):
        together = torch.cat([head[index].weight.grad for head in separate_heads.heads])
        torch.testing.assert_close(together, getattr(layer, name).weight.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        separate_heads.projection.weight.grad, layer.out_proj.weight.grad, rtol=1e-12, atol=1e-12
    )


def test_samples_are_seconds_of_one_run(monkeypatch):
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


def test_all_cases_are_timed_and_a_list_with_wrong_results_is_rejected(monkeypatch):
    few = {"LEAST": 0.0, "HEADS": (1, 2, 4), "ROUNDS": 2, "WIDTH": 16, "REGIMES": ((2, 5),)}
    for name, value in few.items():
        monkeypatch.setattr(layer_timing, name, value)
    monkeypatch.setattr(layer_timing.torch.cuda, "is_available", lambda: False)
    (found,) = layer_timing.time_layers()
    names = {f"{a} {b} {n}" for a in ("forward", "training") for b in ("fused", "list") for n in (1, 2, 4)}
    assert set(found["seconds"]) == names
    assert all(len(each) == 2 and min(each) > 0 for each in found["seconds"].values())
    monkeypatch.setattr(layer_timing, "NEAR", -1.0)
    with pytest.raises(ValueError, match="a list of 1 heads differs from the layer by"):
        layer_timing.time_layers()
