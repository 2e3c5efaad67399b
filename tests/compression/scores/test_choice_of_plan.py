"""The choice between plans on held-out sequences, against divergences of pruned models from the dense model."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F

import headwise as hw
import tiny
from headwise.compression.calibration import least_squares_fits, reconstruction
from headwise.compression.calibration.calibration_data import folds_of
from headwise.compression.pruning.pruning_plan import planned_modules
from headwise.compression.scores import least_squares

GROUPS = ((0, 1, 2), (3, 4, 5))
"""Query heads of each of the two key/value heads of a layer."""


@pytest.fixture(autouse=True)
def one_damping(monkeypatch):
    """Fit with one damping, so that the fit to a part of the data does not depend on folds."""
    monkeypatch.setattr(least_squares_fits, "DAMPINGS", (0.1,))


@pytest.fixture
def equal_weights(monkeypatch):
    """Weight all tokens equally."""
    for module in (least_squares, reconstruction):
        monkeypatch.setattr(module, "token_weights", lambda model, paths, batches: dict.fromkeys(paths))


def batches_of(texts, size):
    """Return padded batches of texts."""
    tokenizer = tiny.tokenizer("decoder")
    return [dict(tokenizer(texts[i : i + size], return_tensors="pt", padding=True)) for i in range(0, len(texts), size)]


def divergence(model, dense, texts):
    """Return the Kullback-Leibler divergence of a model from the dense one, as a mean over the tokens of texts."""
    total = tokens = 0.0
    for batch in batches_of(texts, 1):
        with torch.no_grad():
            new, old = (F.log_softmax(each(**batch).logits.double(), -1) for each in (model, dense))
        total += float((old.exp() * (old - new)).sum())
        tokens += new.shape[1]
    return total / tokens


def plans_of(scores):
    """Return all plans that remove one key/value head of the first or of the second layer."""
    removals = [frozenset((layer, head) for head in heads) for layer in range(2) for heads in GROUPS]
    return [planned_modules(scores.rows, removal) for removal in removals]


def test_the_plan_with_the_least_divergence_on_the_last_fold_is_chosen():
    model, texts = tiny.model("decoder", top="ForCausalLM"), tiny.texts(30, 8, 21, 17, 26, 12, 9, 33)
    scores = hw.LeastSquaresScores(model, batches_of(texts, 3), fitted=False)
    fold_of = list(itertools.chain(*folds_of(scores.batches)))
    heads = [(layer, head) for layer in range(2) for head in (0, 2, 5)]
    plans = [planned_modules(scores.rows, frozenset({head})) for head in heads]

    parts = [[text for text, own in zip(texts, fold_of, strict=True) if own == fold] for fold in range(4)]
    errors = torch.zeros(4, len(heads))
    for number, (layer, head) in enumerate(heads):
        changed = copy.deepcopy(model)
        changed.model.layers[layer].self_attn.o_proj.weight.data[:, head * 10 : head * 10 + 10] = 0.0
        errors[:, number] = torch.tensor([divergence(changed, model, part) for part in parts])
    *others, expected = errors.argsort().tolist()
    assert expected not in others
    for better, worse in itertools.pairwise(expected):
        assert scores.choose([plans[worse], plans[better]]) == 1
    assert scores.choose([plans[expected[0]], plans[expected[1]]]) == 0


@pytest.mark.usefixtures("equal_weights")
def test_held_out_sequences_are_left_out_of_the_fits():
    """If one module alone is planned, `hw.prune` fits it to the dense model, and nothing else."""
    model, texts = tiny.model("decoder", top="ForCausalLM"), tiny.texts(30, 8, 21, 17, 26, 12, 9, 33)
    batches = batches_of(texts, 1)
    scores = hw.LeastSquaresScores(model, batches)
    fold_of = list(itertools.chain(*folds_of(scores.batches)))
    fitted_on = [batch for batch, fold in zip(batches, fold_of, strict=True) if fold != 3]
    held_out = [text for text, fold in zip(texts, fold_of, strict=True) if fold == 3]
    plans = plans_of(scores)
    errors = []
    for modules in plans:
        changes = tuple(each for each in modules if len(each.kept) < each.num_heads)
        pruned = hw.prune(model, hw.PruningPlan(changes, "free", 0.5, "some", 1), calibration=fitted_on)
        errors.append(divergence(pruned, model, held_out))
        changed = tiny.model("decoder", top="ForCausalLM")
        with torch.no_grad():
            scores._change(changed, modules, 3)
        assert divergence(changed, model, held_out) == pytest.approx(errors[-1], rel=1e-4)
    assert scores.choose(plans) == errors.index(min(errors))


def test_a_plan_is_made_by_each_score_and_the_chosen_one_is_named(monkeypatch):
    model = tiny.model("decoder", top="ForCausalLM", num_hidden_layers=4)
    scores = hw.LeastSquaresScores(model, batches_of(tiny.texts(30, 8, 21, 17, 26, 12, 9, 33), 3))
    asked = []

    def choosing(number):
        def choose(self, plans):
            asked.append(plans)
            return number

        return choose

    found = []
    for number in range(3):
        monkeypatch.setattr(least_squares.LeastSquaresScores, "choose", choosing(number))
        found.append(hw.plan_pruning(scores, keep=0.5, constraint="uniform"))
    assert [tuple(each) for each in asked] == [tuple(plan.modules for plan in found)] * 3
    assert [plan.scores.partition(", ")[0] for plan in found] == [
        "least squares",
        "least squares without a fit",
        "least squares with equal weights of tokens without a fit",
    ]
    assert all(plan.scores.endswith(", the best of 3 plans on held-out sequences") for plan in found)
    with monkeypatch.context() as patch:
        patch.setattr(least_squares, "token_weights", lambda model, paths, batches: dict.fromkeys(paths))
        equal = hw.LeastSquaresScores(model, scores.batches, fitted=False)
    assert hw.plan_pruning(equal, keep=0.5, constraint="uniform").modules == found[2].modules
    unfitted = hw.LeastSquaresScores(model, scores.batches, fitted=False)
    monkeypatch.setattr(least_squares.LeastSquaresScores, "choose", choosing(0))
    assert hw.plan_pruning(unfitted, keep=0.5, constraint="uniform").modules == found[1].modules
    assert hw.plan_pruning(hw.LeastSquaresScores(model, scores.batches, hw.next_token_loss), keep=0.5).modules
    assert len(asked) == 4  # with a loss, there is one plan


class Pair(torch.nn.Module):
    """Model that returns a pair."""

    def __init__(self):
        super().__init__()
        self.decoder = tiny.model("decoder")

    def forward(self, input_ids, **others):
        hidden = self.decoder(input_ids).last_hidden_state
        return hidden, hidden.sin()


def test_without_a_known_difference_the_first_plan_is_used():
    ids = [{"input_ids": batch["input_ids"]} for batch in batches_of(tiny.texts(9, 9, 9, 9, 9, 9), 3)]
    scores = hw.LeastSquaresScores(Pair(), ids)
    plans = plans_of(scores)
    with pytest.warns(UserWarning, match="the first of 4 plans is used, because the difference of their models on hel"):
        assert scores.choose(plans) == 0
    positions = [{**each, "position_ids": torch.arange(9)[None]} for each in ids]
    model = tiny.model("decoder")
    plans = plans_of(scores := hw.LeastSquaresScores(model, positions))
    assert scores.choose(plans) == hw.LeastSquaresScores(model, ids).choose(plans) != 0
    scores.batches = [{**each, "other": torch.zeros(2)} for each in ids]
    with pytest.warns(UserWarning, match="the first of 4 plans is used, .* as its first axis"):
        assert scores.choose(plans) == 0
