"""Reuse of module outputs below a gate: same results, less computed, everything restored."""

import pytest
import torch
from torch import nn

import headwise as hw
from headwise.intercept.module_calls import Replay
from headwise.intercept.survey import survey
from tiny import TOKENS, family

pytestmark = pytest.mark.usefixtures("no_grad")

FAMILIES = ("bert", "gpt2", "llama", "t5 encoder")


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_below_a_gate_are_reused(name):
    model = family(name, "sdpa").double()

    def run():
        return model(input_ids=TOKENS).last_hidden_state

    seen = survey(model, run)
    places = dict(zip(seen.layers, (record.site.path for record in seen.records), strict=True))
    replay, ran = Replay(model, places.values()), []
    with replay.recording():
        whole = run()
    for path in places.values():
        model.get_submodule(path).register_forward_pre_hook(lambda *_, path=path: ran.append(path))
    for layer, path in places.items():
        with hw.gate(model, {(path, 1): 0.0}):
            wanted = run()
            ran.clear()
            with replay.reused_until([path]):
                found = run()
        assert torch.equal(found, wanted)
        assert not torch.equal(found, whole)
        # The layers below are not entered, those from the gate on are.
        assert ran == [places[other] for other in places if other >= layer]
    assert all("forward" not in vars(module) for module in model.modules())


class Writes(nn.Module):
    """Layers whose outputs are written into afterwards, as in a residual stream."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([hw.MultiHeadAttention(12, 3) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            y = layer(x)
            y += x
            x = y
        return x


def test_outputs_that_were_written_into_are_computed_again():
    model, x = Writes().double(), torch.randn(2, 7, 12, dtype=torch.float64)
    replay = Replay(model, [f"layers.{number}" for number in range(4)])
    with replay.recording():
        model(x)
    with hw.gate(model, {(2, 1): 0.0}):
        wanted = model(x)
        with replay.reused_until(["layers.2"]):
            assert torch.equal(model(x), wanted)
        with replay.reused_until(["layers.2"]):
            assert torch.equal(model(x), wanted)


class Shares(nn.Module):
    """One layer called several times, between others."""

    def __init__(self):
        super().__init__()
        self.below, self.shared, self.above = (hw.MultiHeadAttention(12, 3) for _ in range(3))

    def forward(self, x):
        x = self.shared(self.below(x))
        return self.above(self.shared(x))


@pytest.mark.parametrize("path", ["below", "shared", "above"])
def test_a_layer_that_is_called_twice_is_reused_call_by_call(path):
    model, x = Shares().double(), torch.randn(2, 7, 12, dtype=torch.float64)
    replay = Replay(model, ["below", "shared", "above"])
    with replay.recording():
        model(x)
    with hw.gate(model, {(path, 1): 0.0}):
        wanted = model(x)
        with replay.reused_until([path]):
            assert torch.equal(model(x), wanted)


def test_forward_and_hooks_are_restored():
    model, x = Shares().double(), torch.randn(2, 7, 12, dtype=torch.float64)
    own = lambda x: x * 2  # noqa: E731
    model.above.forward = own
    replay = Replay(model, ["below", "shared"])
    for context in (replay.recording(), replay.reused_until(["shared"])):
        with pytest.raises(hw.InputError, match="x: expected"), context:
            model(x[..., 1:])
        assert vars(model.above)["forward"] is own
        assert "forward" not in vars(model.below)
        assert not any(module._forward_pre_hooks for module in model.modules())
