"""Attribution patching, compared with derivatives by plain hooks, and with the results that it estimates."""

import math

import pytest
import torch

import headwise as hw
from headwise.analysis.patching.attribution_patching import AttributionPatching, attribution_patching
from prompt_models import (
    ASKED,
    CLEAN,
    CORRUPTED,
    HEADS,
    KINDS_AND_DIRECTIONS,
    LAYERS,
    changed_outputs,
    difference,
    language_model,
    outputs_of,
    require_values,
    scale,
)

pytestmark = pytest.mark.usefixtures("as_user")


def by_hooks(model, direction):
    """Return the estimated difference of logits of each prompt pair, layer and head, by torch.autograd alone."""
    source, destination, _ = scale(model, direction)
    there, leaves = outputs_of(model, source), {}

    def with_leaf(layer, out):
        leaves[layer] = torch.zeros_like(out, requires_grad=True)
        return out + leaves[layer]

    with changed_outputs(model, with_leaf):
        unpatched = difference(model, destination)
    gradients = torch.autograd.grad(unpatched.sum(), [leaves[layer] for layer in range(LAYERS)])
    pairs = zip(there, outputs_of(model, destination), gradients, strict=True)
    effects = [((new - old) * gradient).sum((1, 3)) for new, old, gradient in pairs]
    return unpatched.detach()[:, None, None] + torch.stack(effects, 1)


@pytest.mark.parametrize(("kind", "direction"), KINDS_AND_DIRECTIONS)
def test_it_equals_derivatives_by_plain_hooks(kind, direction):
    model = language_model(kind)
    found = attribution_patching(model, CLEAN, CORRUPTED, **ASKED, direction=direction)
    assert isinstance(found, AttributionPatching)
    assert [(row.layer, row.head) for row in found.heads] == [(i, j) for i in range(LAYERS) for j in range(HEADS)]
    expected, to_recovered = by_hooks(model, direction), scale(model, direction)[2]
    for row in found.heads:
        require_values(row, expected[:, row.layer, row.head], to_recovered)
    assert found.metadata["measured"]["clean"] == pytest.approx(difference(model, CLEAN).mean().item())
    assert "completeness_gap" not in found.metadata["measured"]


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_its_agreement_with_activation_patching_is_measured(direction):
    arguments = {"clean": CLEAN, "corrupted": CORRUPTED, **ASKED, "direction": direction}
    model = language_model("bert", std=0.1)
    tables = hw.attribution_patching(model, **arguments), hw.activation_patching(model, **arguments)
    assert tables[0].metadata["measured"] == pytest.approx(tables[1].metadata["measured"])
    found = hw.agreement(*tables)
    assert found.names == ("recovered", "recovered")
    assert found.no_effect == ((0.0, 0.0) if direction == "denoise" else (1.0, 1.0))
    assert found.spearman > 0.9
    low, high = found.interval("spearman")
    assert low < found.spearman < high
    assert found.overlap(LAYERS * HEADS) == 1.0
    axes = found.plot()
    labels = [label.splitlines()[0] for label in (axes.get_xlabel(), axes.get_ylabel())]
    assert labels == ["predicted recovered", "measured recovered"]
    unpatched = difference(model, CORRUPTED if direction == "denoise" else CLEAN).mean().item()
    assert hw.agreement(*tables, ("difference", "difference")).no_effect == pytest.approx((unpatched, unpatched))


def test_small_changes_are_estimated_exactly():
    """Between prompts whose head outputs hardly differ, the result of patching is linear in the change."""
    model, near = language_model("llama"), CLEAN.clone()
    near[:, 3] = CORRUPTED[:, 3]
    embedding = model.model.embed_tokens.weight
    with torch.no_grad():
        embedding[near[:, 3]] = embedding[CLEAN[:, 3]] + 1e-6 * torch.randn(3, 48, dtype=torch.float64)
    estimated = attribution_patching(model, CLEAN, near, **ASKED)
    measured = hw.activation_patching(model, CLEAN, near, **ASKED)
    for head in measured.heads:
        expected = head.statistics["recovered"].value
        assert estimated.head(head.layer, head.head).statistics["recovered"].value == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("kind", "direction"), KINDS_AND_DIRECTIONS)
def test_integrated_effects_add_up_to_those_of_layers(kind, direction):
    model, enough = language_model(kind, std=0.1), 32 if kind == "llama" else 12
    few, many = (
        attribution_patching(model, CLEAN, CORRUPTED, **ASKED, direction=direction, steps=steps)
        for steps in (2, enough)
    )
    gaps = [table.metadata["measured"]["completeness_gap"] for table in (few, many)]
    assert gaps[1] < 1e-5
    assert gaps[1] < gaps[0]
    unpatched = difference(model, CORRUPTED if direction == "denoise" else CLEAN).mean().item()
    for layer in range(LAYERS):
        every = [(layer, head) for head in range(HEADS)]
        together = hw.patch_together(model, CLEAN, CORRUPTED, every, **ASKED, direction=direction)["difference"].value
        effects = [many.head(*head).statistics["difference"].value - unpatched for head in every]
        assert sum(effects) == pytest.approx(together - unpatched, abs=1e-5)


def test_integrated_effects_equal_derivatives_along_the_line():
    model = language_model("llama")
    source, destination, to_recovered = scale(model, "denoise")
    ends = outputs_of(model, destination), outputs_of(model, source)
    unpatched, effects = difference(model, destination).detach(), torch.zeros(3, LAYERS, HEADS, dtype=torch.float64)
    for moved in range(LAYERS):
        for share, weight in ((0.5 - math.sqrt(0.15), 5 / 18), (0.5, 4 / 9), (0.5 + math.sqrt(0.15), 5 / 18)):
            old, new = ends[0][moved], ends[1][moved]
            point = (old + share * (new - old)).requires_grad_()
            with changed_outputs(model, lambda layer, out, at=moved, to=point: to if layer == at else out):
                gradient = torch.autograd.grad(difference(model, destination).sum(), point)[0]
            effects[:, moved] += weight * ((new - old) * gradient).sum((1, 3))
    found = attribution_patching(model, CLEAN, CORRUPTED, **ASKED, steps=3)
    for row in found.heads:
        require_values(row, unpatched + effects[:, row.layer, row.head], to_recovered)


def test_the_number_of_steps_is_checked():
    with pytest.raises(hw.InputError, match="^steps: expected a whole number of 1 or more, got 0"):
        attribution_patching(language_model("llama"), CLEAN, CORRUPTED, **ASKED, steps=0)


def test_a_model_without_gradients_is_refused():
    class Detached(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = language_model("llama")

        @torch.no_grad()
        def forward(self, ids):
            return self.inner(ids).logits

    with pytest.raises(hw.InputError, match="^model: expected one that records gradients, got none"):
        attribution_patching(Detached(), CLEAN, CORRUPTED, **ASKED)


def test_attention_over_other_rows_than_prompts_is_refused():
    class Folded(torch.nn.Module):
        """Attends in windows of 4 tokens, each of which is a row of the batch."""

        def __init__(self):
            super().__init__()
            self.embed, self.qkv = torch.nn.Embedding(97, 24), torch.nn.Linear(24, 72)
            self.out_proj, self.head = torch.nn.Linear(24, 24), torch.nn.Linear(24, 97)

        def forward(self, ids):
            x = self.embed(ids)
            rows = x.reshape(-1, 4, 24)
            q, k, v = (part.unflatten(-1, (4, 6)).transpose(1, 2) for part in self.qkv(rows).chunk(3, -1))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            return self.head(x + self.out_proj(out.transpose(1, 2).flatten(2)).reshape(x.shape))

    ids = CLEAN[:, :8], CORRUPTED[:, :8]
    with pytest.raises(hw.InputError, match="^model: expected a batch of 3 in .*, one row per prompt pair, got 6;"):
        attribution_patching(Folded().double(), *ids, **ASKED)
