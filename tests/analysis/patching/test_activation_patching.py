"""Activation patching, compared with gates that put recorded outputs into a run, and with its definition."""

from functools import partial

import pytest
import torch
import transformers

import headwise as hw
import tiny
from headwise.analysis.patching.activation_patching import Patching, activation_patching, patch_together
from jackknife import jackknife
from prompt_models import ANSWER, ASKED, CLEAN, CORRUPTED, PADDED, WRONG, causal

pytestmark = pytest.mark.usefixtures("as_user")

HEADS = [(layer, head) for layer in range(2) for head in range(6)]


@torch.no_grad()
def difference(model, inputs, places=(-1, -1, -1)):
    logits = model(**inputs).logits
    return torch.stack([logits[i, p, ANSWER[i]] - logits[i, p, WRONG[i]] for i, p in enumerate(places)])


def by_gates(model, clean, corrupted, heads, direction, places=(-1, -1, -1)):
    """Return both statistics of each pair of prompts, from complete runs under gates."""
    giver, taker = (clean, corrupted) if direction == "denoise" else (corrupted, clean)
    with torch.no_grad(), hw.record_outputs(model) as run:
        model(**giver)
    with hw.gate(model, {head: hw.replacements.patch(run) for head in heads}):
        patched = difference(model, taker, places)
    low, high = difference(model, corrupted, places), difference(model, clean, places)
    return {"recovered": (patched - low) / (high - low), "difference": patched}


def require(measured, expected):
    for name, values in expected.items():
        assert measured[name] == pytest.approx(jackknife(values), rel=1e-9), name


@pytest.mark.parametrize("direction", ["denoise", "noise"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_patching_equals_a_gate_with_the_recorded_output(kind, direction):
    model, clean, corrupted = causal(kind), {"input_ids": CLEAN}, {"input_ids": CORRUPTED}
    found = activation_patching(model, clean, corrupted, **ASKED, direction=direction)
    assert isinstance(found, Patching)
    assert found.statistics == ("recovered", "difference")
    assert [(head.layer, head.head) for head in found.heads] == HEADS
    for layer, head in ((0, 4), (1, 1)):
        expected = by_gates(model, clean, corrupted, [(layer, head)], direction)
        require(found.head(layer, head).statistics, expected)
    assert found.metadata["settings"]["direction"] == direction
    assert found.metadata["measured"]["clean"] == pytest.approx(difference(model, clean).mean().item())
    assert found.metadata["measured"]["corrupted"] == pytest.approx(difference(model, corrupted).mean().item())


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_patching_several_heads_together(direction):
    model, clean, corrupted = causal(), {"input_ids": CLEAN}, {"input_ids": CORRUPTED}
    some = [(0, 1), (1, 4), (0, 5)]
    found = patch_together(model, clean, corrupted, some, **ASKED, direction=direction)
    require(found, by_gates(model, clean, corrupted, some, direction))
    alone = patch_together(model, clean, corrupted, [(1, 4)], **ASKED, direction=direction)
    assert alone == activation_patching(model, clean, corrupted, **ASKED, direction=direction).head(1, 4).statistics
    none = patch_together(model, clean, corrupted, [], **ASKED, direction=direction)
    assert none["recovered"].value == (0.0 if direction == "denoise" else 1.0)


def test_recovered_is_0_without_a_change_and_1_if_all_heads_are_patched():
    """With one layer, the head outputs at the last token carry all of the difference."""
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=48, num_hidden_layers=1, num_attention_heads=6, intermediate_size=37
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    other = CLEAN.clone()
    other[:, 4] = CORRUPTED[:, 4]  # so that the last token's own embedding is the same in both
    for direction, value in (("denoise", 1.0), ("noise", 0.0)):
        every = [(0, head) for head in range(6)]
        found = patch_together(model, CLEAN, other, every, **ASKED, direction=direction)
        assert found["recovered"].value == pytest.approx(value, abs=1e-9)
        assert found["recovered"].n == 3


@pytest.mark.parametrize("side", PADDED)
def test_the_answer_follows_the_last_real_token(side):
    mask, places = PADDED[side]
    model = causal("gpt2")
    clean, corrupted = ({"input_ids": ids, "attention_mask": mask} for ids in (CLEAN, CORRUPTED))
    found = activation_patching(model, clean, corrupted, **ASKED, heads=[(1, 2)])
    require(found.head(1, 2).statistics, by_gates(model, clean, corrupted, [(1, 2)], "denoise", places))
    second = [int(row.nonzero()[1]) for row in mask]
    found = activation_patching(model, clean, corrupted, **ASKED, heads=[(1, 2)], at=1)
    require(found.head(1, 2).statistics, by_gates(model, clean, corrupted, [(1, 2)], "denoise", second))
    of_each = [int(row.nonzero()[at]) for row, at in zip(mask, (3, -2, 0), strict=True)]
    found = activation_patching(model, clean, corrupted, **ASKED, heads=[(1, 2)], at=torch.tensor([3, -2, 0]))
    require(found.head(1, 2).statistics, by_gates(model, clean, corrupted, [(1, 2)], "denoise", of_each))


def test_a_pair_with_equal_differences_is_left_out():
    corrupted = CORRUPTED.clone()
    corrupted[1] = CLEAN[1]
    found = activation_patching(causal(), CLEAN, corrupted, **ASKED, heads=[(0, 3), ("model.layers.1.self_attn", 0)])
    assert [head.name for head in found.heads] == ["0.3", "1.0"]
    for head in found.heads:
        assert (head.statistics["recovered"].n, head.statistics["difference"].n) == (2, 3)


def test_one_answer_for_all_prompts():
    model = causal()
    found = activation_patching(model, CLEAN, CORRUPTED, answer=7, wrong=19, heads=[(0, 1)])
    each = activation_patching(model, CLEAN, CORRUPTED, answer=[7] * 3, wrong=[19] * 3, heads=[(0, 1)])
    assert found.heads == each.heads


@pytest.mark.parametrize(
    "measure", [partial(hw.activation_patching, heads=[(0, 1)]), partial(hw.path_patching, senders=[(0, 1)])]
)
def test_progress_is_shown_and_gradients_are_not_recorded(measure, capsys):
    model, seen = causal(), []
    model.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    measure(model, CLEAN, CORRUPTED, **ASKED, progress=True)
    assert set(seen) == {False}
    assert "1/1 heads" in capsys.readouterr().err


def test_a_model_without_a_named_output_embedding():
    class Plain(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, ids):
            return self.inner(ids).logits

    model = causal()
    found = activation_patching(Plain(model), CLEAN, CORRUPTED, **ASKED, heads=[(1, 5)])
    expected = activation_patching(model, CLEAN, CORRUPTED, **ASKED, heads=[(1, 5)])
    for name, measured in expected.heads[0].statistics.items():
        assert found.heads[0].statistics[name] == pytest.approx(measured, rel=1e-9)


def test_results_are_tables(tmp_path):
    functions = {
        "patching": hw.activation_patching,
        "attribution_patching": hw.attribution_patching,
        "path_patching": partial(hw.path_patching, receivers=[(1, 0)], input="q"),
    }
    tables = [function(causal(), CLEAN, CORRUPTED, **ASKED) for function in functions.values()]
    for found in tables:
        found.save(tmp_path)
    assert {file.stem for file in tmp_path.iterdir()} == set(functions)
    for found in tables:
        loaded = type(found).load(tmp_path)
        assert loaded.heads == found.heads
        assert loaded.no_effect("recovered") == 0.0
        columns = ["recovered", "difference", "recovered_p", "recovered_q"]
        assert list(found.table().columns)[-4:] == columns
        assert found.plot().images[0].get_array().shape == (2, 6)


DIRECTION = ({"direction": "both"}, "direction: expected 'denoise' or 'noise', got 'both'")
NO_WRONG_ANSWER = ({"wrong": None}, "wrong: expected the ids that the answers are compared with, got None")
MASKED = {
    side: {
        name: {"input_ids": ids, "attention_mask": mask} for name, ids in (("clean", CLEAN), ("corrupted", CORRUPTED))
    }
    for side, (mask, _) in PADDED.items()
}
REFUSED = [
    ({"model": None}, "model: expected a torch module, got NoneType"),
    ({"corrupted": CORRUPTED[:, 1:]}, "corrupted: expected tokens of shape (3, 11), as in clean, got (3, 10)"),
    (
        {"clean": {"input_ids": CLEAN}, "corrupted": MASKED["left"]["corrupted"]},
        "corrupted: expected the arguments of clean, input_ids, got input_ids, attention_mask",
    ),
    (
        {"clean": MASKED["left"]["clean"], "corrupted": MASKED["right"]["corrupted"]},
        "corrupted: expected the padding of clean, got another attention_mask; pair prompts with the same",
    ),
    DIRECTION,
    NO_WRONG_ANSWER,
    ({"answer": [7, 11]}, "answer: expected one number, or 3, one per prompt, got 2"),
    ({"answer": "w7"}, "answer: expected whole numbers, one for all prompts, or (batch,), got 'w7'"),
    (
        {"answer": [7, 11, 19], "wrong": [5, 11, 6]},
        "wrong: expected other tokens than the right answers, got [5, 11, 6]",
    ),
    ({"answer": 7, "wrong": 7}, "wrong: expected other tokens than the right answers, got 7"),
    ({"wrong": 97}, "wrong: expected ids from 0 to 96, got 97"),
    ({"at": 11}, "at: expected from -11 to 10, the tokens of the shortest prompt, got 11"),
    (MASKED["right"] | {"at": -6}, "at: expected from -5 to 4, the tokens of the shortest prompt, got -6"),
    ({"heads": [(0, 1), (0, 6)]}, "heads: expected each a (layer, head) of this model, got (0, 6)"),
    ({"heads": 5}, "heads: expected a collection of heads (layer, head), got 5"),
    ({"heads": [5]}, "heads: expected heads (layer, head), got 5"),
    ({"clean": "w5"}, "clean: expected a batch: a tensor, or a mapping of tensors"),
]


@pytest.mark.parametrize(
    ("function", "options", "sentence"),
    [
        *((hw.activation_patching, *refused) for refused in REFUSED),
        *(
            (each, *refused)
            for each in (hw.attribution_patching, hw.path_patching)
            for refused in (DIRECTION, NO_WRONG_ANSWER)
        ),
    ],
)
def test_what_is_refused(function, options, sentence):
    with pytest.raises(hw.InputError) as refused:
        function(**{"model": causal(), "clean": CLEAN, "corrupted": CORRUPTED, **ASKED, **options})
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize("function", [hw.activation_patching, hw.attribution_patching, hw.path_patching])
@pytest.mark.parametrize("prompts", ["clean", "corrupted"])
def test_a_pair_whose_logits_are_not_finite_is_refused(function, prompts):
    model = causal()
    model.get_input_embeddings().weight.data[90] = torch.nan
    batches = {"clean": CLEAN, "corrupted": CORRUPTED}
    batches[prompts] = batches[prompts].clone()
    batches[prompts][1, 2] = 90
    assert not bool((CLEAN == 90).any() | (CORRUPTED == 90).any())
    with pytest.raises(hw.InputError, match="^model: expected finite weights and activations, got NaN or infinity"):
        function(model, **batches, **ASKED)


def test_a_model_without_logits_is_refused():
    with pytest.raises(
        hw.InputError, match="^model: expected one that returns logits .batch, length, vocabulary.*, got Ll"
    ):
        activation_patching(tiny.model("decoder"), CLEAN, CORRUPTED, **ASKED)


class TwoLayersInOneModule(torch.nn.Module):
    """Attention module that computes two layers of 4 heads with different weights, one after the other."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(24, 72) for _ in range(2))
        self.out = torch.nn.ModuleList(torch.nn.Linear(24, 24) for _ in range(2))

    def forward(self, x):
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = (part.unflatten(-1, (4, 6)).transpose(1, 2) for part in qkv(x).chunk(3, -1))
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + out(attended.transpose(1, 2).flatten(2))
        return x


def test_modules_with_several_layers_are_patched_in_every_part():
    """Runs that reuse layer outputs compute a module whose second layer is patched."""
    torch.manual_seed(0)
    layers = [TwoLayersInOneModule() for _ in range(3)]
    model = torch.nn.Sequential(torch.nn.Embedding(97, 24), *layers, torch.nn.Linear(24, 97)).double()
    found = activation_patching(model, CLEAN, CORRUPTED, **ASKED)
    assert [head.module for head in found.heads[4:8]] == ["1[1]"] * 4
    for head in found.heads:
        alone = patch_together(model, CLEAN, CORRUPTED, [(head.module, head.head)], **ASKED)
        assert head.statistics["recovered"].value == pytest.approx(alone["recovered"].value, rel=1e-9)
        assert head.statistics["recovered"].value != 0.0
