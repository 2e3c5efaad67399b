"""Layer numbers that `watch` shows can be gated, also where only some of the attention modules run."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import headwise as hw


class Attention(nn.Module):
    def __init__(self, layer_idx=None):
        super().__init__()
        self.qkv, self.out = nn.Linear(15, 45), nn.Linear(15, 15)
        if layer_idx is not None:
            self.layer_idx = layer_idx

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (3, 5)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Latent(Attention):
    """Attention in a class that is not called so."""


class Mixer(Attention):
    """As `Latent`; it stores no number."""


class Towers(nn.Module):
    """Two stacks of layers, each of which may be skipped."""

    def __init__(self, images, texts):
        super().__init__()
        self.images, self.texts = nn.ModuleList(images), nn.ModuleList(texts)

    def forward(self, image, text):
        for layers, inputs in ((self.images, image), (self.texts, text)):
            if inputs is not None:
                output = nn.Sequential(*layers)(inputs)
        return output


X = torch.randn(2, 7, 15)
MODELS = {
    "both stacks have numbers": lambda: Towers([Attention(0), Attention(1)], [Attention(0), Attention(1)]),
    "one stack has numbers": lambda: Towers([Attention(), Attention()], [Attention(0), Attention(1)]),
    "no stack has numbers": lambda: Towers([Attention(), Attention(), Attention()], [Attention(), Attention()]),
    "not called attention": lambda: Towers([], [Latent(0), Latent(1)]),
}


@pytest.mark.parametrize("inputs", [(None, X), (X, X)], ids=["texts", "images and texts"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_every_number_that_watch_shows_is_gated(name, inputs):
    torch.manual_seed(0)
    model = MODELS[name]()
    with hw.watch(model) as heads:
        model(*inputs)
    layers = {row["layer"]: row["module"] for row in heads.rows()}
    assert len(layers) == len(heads.rows()) / 3
    for layer, path in layers.items():
        with hw.gate(model, {(layer, 1): 0.0}):
            gated = model(*inputs)
        columns = model.get_submodule(path).out.weight
        kept = columns.clone()
        columns[:, 5:10] = 0.0
        torch.testing.assert_close(gated, model(*inputs))
        columns.copy_(kept)


@torch.no_grad()
def test_numbers_of_modules_stay_the_same_whatever_runs():
    model = MODELS["no stack has numbers"]()
    layers = []
    for inputs in ((None, X), (X, X)):
        with hw.watch(model) as heads:
            model(*inputs)
        layers.append({row["module"]: row["layer"] for row in heads.rows()})
    assert layers[0] == {"texts.0": 3, "texts.1": 4}
    assert layers[1] == {"images.0": 0, "images.1": 1, "images.2": 2, **layers[0]}


class Backwards(Towers):
    """The stack that is stored last runs first."""

    def forward(self, image, text):
        return super().forward(None, super().forward(None, text)) + self.images[0](image)


@torch.no_grad()
def test_a_number_that_the_run_shows_to_be_anothers_is_refused():
    model = Backwards([Attention(0)], [Attention(0)])
    sentence = (
        "^layer: expected the module of layer 0, got texts.0, where the model ran images.0; name modules by their"
    )
    with pytest.raises(hw.InputError, match=sentence), hw.gate(model, {(0, 1): 0.0}):
        model(X, X)
    with pytest.raises(hw.InputError, match="none in images.0$"), hw.gate(model, {(0, 1): 0.0}):
        model.texts[0].qkv(X)
    with hw.gate(model, {(1, 1): 0.0}):
        model(X, X)


@torch.no_grad()
def test_sites_are_counted_where_their_modules_are_not():
    model = Towers([Attention()], [Mixer()])
    with hw.watch(model) as heads:
        model(X, X)
    assert {row["module"]: row["layer"] for row in heads.rows()} == {"images.0": 0, "texts.0": 1}
    sentence = "^layer: expected one of layers 0 to 0, got 1; name the module by its path, as watch"
    with pytest.raises(hw.InputError, match=sentence), hw.gate(model, {(1, 1): 0.0}):
        pass
