"""Scores by ablation and gradients, against models whose output projections lost the columns of heads."""

from copy import deepcopy

import pytest
import torch

import headwise as hw
import tiny
from headwise.errors import InputError

WIDTH = 10
"""Width of a head."""


def decoder():
    """Return a decoder of 2 layers of 6 heads in float64, and batches of 2 and 1 texts."""
    model, tokenizer = tiny.model("decoder", top="ForCausalLM").double(), tiny.tokenizer("decoder")
    texts = tiny.texts(30, 30, 20)
    return model, [dict(tokenizer(part, return_tensors="pt")) for part in (texts[:2], texts[2:])]


def factored(model, heads, factor):
    """Return a copy of a model in which the outputs of heads are multiplied by a factor."""
    copy = deepcopy(model)
    for layer, head in heads:
        columns = slice(head * WIDTH, (head + 1) * WIDTH)
        copy.model.layers[layer].self_attn.o_proj.weight.data[:, columns] *= factor
    return copy


def losses(model, batches):
    """Return the loss of each text."""
    with torch.no_grad():
        return torch.cat([hw.next_token_loss(model, batch) for batch in batches])


@pytest.mark.parametrize("removed", [frozenset(), frozenset({(0, 3), (1, 0)})])
def test_ablation_scores_are_rises_of_the_loss_without_the_removed_heads(removed):
    model, batches = decoder()
    units = [((0, 0),), ((0, 4), (0, 5)), ((1, 2),)]
    scores = hw.AblationScores(model, batches, hw.next_token_loss).of(units, removed)
    before = losses(factored(model, removed, 0.0), batches)
    expected = [float((losses(factored(model, {*removed, *unit}, 0.0), batches) - before).mean()) for unit in units]
    assert scores == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_the_reference_of_a_distance_is_the_dense_model():
    model, batches = decoder()
    encoder = model.model
    removed = frozenset({(0, 3), (1, 0)})
    (score,) = hw.AblationScores(encoder, batches, hw.EmbeddingDistance()).of([((0, 1),)], removed)

    def distance(other):
        with torch.no_grad():
            pairs = [[each(**batch).last_hidden_state.mean(1) for each in (encoder, other)] for batch in batches]
        return torch.cat([1 - torch.cosine_similarity(*pair) for pair in pairs]).mean()

    without = [factored(model, heads, 0.0).model for heads in (removed, {*removed, (0, 1)})]
    assert score == pytest.approx(float(distance(without[1]) - distance(without[0])), rel=1e-9)


def test_importance_scores_are_mean_absolute_derivatives_without_the_removed_heads():
    model, batches = decoder()
    removed = frozenset({(0, 3)})
    units = [((0, 0),), ((1, 4), (1, 5))]
    scores = hw.ImportanceScores(model, batches, hw.next_token_loss).of(units, removed)
    pruned = factored(model, removed, 0.0)

    texts = [
        {name: value[[row]] for name, value in batch.items()}
        for batch in batches
        for row in range(len(batch["input_ids"]))
    ]

    def importance(head):
        weight = pruned.model.layers[head[0]].self_attn.o_proj.weight
        derivatives = []
        for text in texts:
            pruned.zero_grad()
            hw.next_token_loss(pruned, text).sum().backward()
            columns = slice(head[1] * WIDTH, (head[1] + 1) * WIDTH)
            derivatives.append(abs(float((weight.grad * weight.detach())[:, columns].sum())))
        return sum(derivatives) / len(derivatives)

    assert scores == pytest.approx([sum(map(importance, unit)) for unit in units], rel=1e-6)


def test_gradients_of_a_distance_are_refused():
    model, batches = decoder()
    with pytest.raises(InputError, match="derivatives in the unchanged model are not 0"):
        hw.ImportanceScores(model.model, batches, hw.EmbeddingDistance())


def test_a_plan_scores_heads_again_after_each_round():
    model, batches = decoder()
    scores = hw.AblationScores(model, batches, hw.next_token_loss)
    plan = hw.plan_pruning(scores, keep=0.5, constraint="free", rounds=2)
    assert plan.rounds == 2
    groups = [tuple((layer, head) for head in range(start, start + 3)) for layer in (0, 1) for start in (0, 3)]
    _, first = min(zip(scores.of(groups, frozenset()), groups, strict=True))
    others = [unit for unit in groups if unit[0][0] != first[0][0]]  # one group remains in each layer
    _, second = min(zip(scores.of(others, frozenset(first)), others, strict=True))
    assert set(plan.removed) == {*first, *second}
