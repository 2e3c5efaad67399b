"""The output projection that is found for a module, against the inputs of the model's own."""

import pytest
import torch
from torch import nn

import headwise as hw
from headwise.intercept.output_projection import gram_of, output_projection
from tiny import TOKENS, family

PLACES = {
    "bert": "encoder.layer.{}.attention.output.dense",
    "gpt2": "h.{}.attn.c_proj",
    "llama": "layers.{}.self_attn.o_proj",
    "gemma2, softcap": "layers.{}.self_attn.o_proj",
    "t5 encoder": "encoder.block.{}.layer.0.SelfAttention.o",
}


@pytest.mark.parametrize("name", PLACES)
@torch.no_grad()
def test_written_norm_is_the_norm_after_the_output_projection(name):
    model, inputs = family(name, "eager" if "softcap" in name else "sdpa"), {}

    def keep(place):
        return lambda module, given: inputs.update({place: given[0]})

    places = [PLACES[name].format(layer) for layer in range(3)]
    hooks = [model.get_submodule(place).register_forward_pre_hook(keep(place)) for place in places]
    with hw.watch(model) as heads:
        model(input_ids=TOKENS)
    for hook in hooks:
        hook.remove()
    for layer, place in enumerate(places):
        weight = model.get_submodule(place).weight
        weight = weight if name != "gpt2" else weight.mT  # (out, heads x value_dim)
        x = inputs[place].unflatten(-1, (6, -1))  # (batch, length, heads, value_dim)
        written = torch.stack([x[:, :, h] @ weight.unflatten(1, (6, -1))[:, h].mT for h in range(6)])
        found = [row["written_norm"] for row in heads.rows() if row["layer"] == layer]
        assert found == pytest.approx(written.norm(dim=-1).mean((1, 2)).tolist(), rel=1e-4)


def test_a_projection_is_found_by_its_width():
    model = nn.ModuleDict({"attn": nn.ModuleDict({"proj": nn.Linear(24, 7), "out": nn.Linear(20, 24)})})
    assert output_projection(model, "attn", 24) is model["attn"]["proj"]
    assert output_projection(model, "attn", 21) is None
    gram = gram_of(model["attn"]["proj"], 3, 8)
    slices = model["attn"]["proj"].weight.view(7, 3, 8)
    torch.testing.assert_close(gram[1], slices[:, 1].mT @ slices[:, 1])


def test_written_norm_is_absent_without_a_projection():
    class Bare(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    model = Bare()
    with hw.watch(model) as heads:
        model(torch.randn(2, 3, 5, 8))
    assert "output_norm" in heads.rows()[0]
    assert "written_norm" not in heads.rows()[0]
