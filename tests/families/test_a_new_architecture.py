"""An architecture of your own: one record, and it is converted, has heads removed, and gets its row in the docs."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import headwise as hw
from headwise.families import registry
from headwise.families.registry import Family, head_module
from headwise.monitoring.head_slices import head_slices
from headwise.removal.remove_heads import remove_heads
from research.tables.families import HEADERS, REPORT, Residual, row


class ToyAttention(nn.Module):
    """Attention with names of its own, and keys that two heads share."""

    is_causal, scaling, drop = True, 0.3, 0.0

    def __init__(self):
        super().__init__()
        self.size, self.num_heads, self.num_kv_heads = 11, 6, 3
        self.ask, self.look, self.carry = nn.Linear(29, 66), nn.Linear(29, 33), nn.Linear(29, 33)
        self.mix = nn.Linear(66, 29)

    def forward(self, x):
        parts = (each(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for each in (self.ask, self.look, self.carry))
        y = F.scaled_dot_product_attention(*parts, is_causal=True, scale=self.scaling, enable_gqa=True)
        return self.mix(y.transpose(1, 2).flatten(2))


TOY = Family(
    "Toy",
    ("ToyAttention",),
    inputs=("ask", "look", "carry"),
    output="mix",
    head_dim="size",
    positions="added",
    config_fields={},
    is_converted=True,
    dropout="drop",
)


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(registry, "FAMILIES", (*registry.FAMILIES, TOY))
    torch.manual_seed(0)
    model = nn.Sequential(ToyAttention(), ToyAttention()).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


X = torch.randn(2, 7, 29, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_it_is_converted_and_back(model):
    block, other = model
    layer = hw.from_transformers(block)
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (6, 3, 11)
    torch.testing.assert_close(layer(X), block(X), rtol=0, atol=1e-12)
    hw.to_transformers(layer, other)
    assert all(torch.equal(value, block.state_dict()[name]) for name, value in other.state_dict().items())


@torch.no_grad()
def test_removed_heads_equal_gates_of_0(model):
    kept = {"0": (0, 1, 4, 5), "1": (2, 4)}
    gates = {(layer, head): 0.0 for layer in (0, 1) for head in range(6) if head not in kept[str(layer)]}
    with hw.gate(model, gates):
        expected = model(X)
    assert (expected - model(X)).abs().max() > 0.1
    remove_heads(model, {path: head_module(model, path).kept(heads) for path, heads in kept.items()})
    assert (model[1].num_heads, model[1].num_kv_heads, model[1].mix.in_features) == (2, 2, 22)
    torch.testing.assert_close(model(X), expected, rtol=0, atol=1e-12)


def test_logits_are_not_clipped_if_the_record_names_norms(model, monkeypatch):
    assert len(head_slices(model, "0")) == 6
    monkeypatch.setattr(registry, "FAMILIES", (replace(TOY, qk_norms=("levels",)),))
    model[0].levels = nn.ModuleList([nn.LayerNorm(11) for _ in range(6)])
    with pytest.raises(hw.InputError, match="^model: expected attention modules whose logits scale .* the norm levels"):
        head_slices(model, "0")
    assert len(head_slices(model, "1")) == 6


class JointAttention(nn.Module):
    """Attention with one projection, in which query, key and value of a head stand together, and with norms."""

    def __init__(self):
        super().__init__()
        self.size, self.num_heads = 11, 3
        self.ask, self.mix = nn.Linear(29, 99), nn.Linear(33, 29)
        self.q_norm, self.k_norm = nn.LayerNorm(11), nn.LayerNorm(11)

    def forward(self, x):
        joint = self.ask(x).unflatten(-1, (3, 3, 11))
        q, k, v = self.q_norm(joint[..., 0, :]), self.k_norm(joint[..., 1, :]), joint[..., 2, :]
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.mix(y.transpose(1, 2).flatten(2))


@torch.no_grad()
def test_circuits_read_a_joint_projection_with_norms(monkeypatch):
    joint = replace(
        TOY, classes=("JointAttention",), inputs=("ask",), is_joint=True, is_converted=False, qk_norms=registry.NORMS
    )
    monkeypatch.setattr(registry, "FAMILIES", (joint,))
    torch.manual_seed(0)
    attention = JointAttention().double().eval()
    circuits = hw.circuits(Residual(attention, 29))
    for head in range(3):
        value = attention.ask.weight.unflatten(0, (3, 3, 11))[head, 2]
        expected = attention.mix.weight[:, head * 11 : (head + 1) * 11] @ value
        torch.testing.assert_close(circuits.ov(0, head).matrix(), expected, rtol=0, atol=1e-12)
    with pytest.raises(hw.InputError, match="the norm attention.q_norm of queries or keys"):
        circuits.qk(0, 0)


def test_it_has_a_row_in_the_docs(model):
    assert dict(zip(HEADERS, row(TOY, Residual(model[0], 29)), strict=True)) == {
        "architecture": "Toy",
        "convert": "yes",
        "remove heads": "yes",
        "merge key/value heads": "no",
        "circuits": "OV and QK",
        "clip logits": "yes",
    }


def test_the_docs_have_a_row_for_every_architecture():
    lines = REPORT.read_text(encoding="utf-8").splitlines()
    rows = [line.removeprefix("| ").split(" | ")[0] for line in lines if line.startswith("| ")]
    assert rows[2:] == [family.name for family in registry.FAMILIES]


def test_it_is_unknown_without_its_record():
    with pytest.raises(hw.InputError, match="^model: expected attention modules of .*, got ToyAttention in 0"):
        head_module(nn.Sequential(ToyAttention()), "0")
