"""The task with several relations, the lookup loss, and the proof that one head serves at most one slot."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

import headwise as hw
from research.claims import generated_tasks, relations_task, report_tables
from research.claims.report_text import EXAMPLE, MIXES


class FixedLogits(nn.Module):
    """A model that returns the same logits for every input."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, input_ids):
        return self.logits


def test_lookup_loss_is_over_the_values_of_the_second_half():
    batch = {"input_ids": generated_tasks.lookups(1, 3)[0]["input_ids"][:5]}
    logits = torch.randn(5, 24, 32, dtype=torch.float64)
    found = generated_tasks.lookup_loss(FixedLogits(logits), batch)
    for row, each, ids in zip(logits, found, batch["input_ids"], strict=True):
        expected = [-row[place].log_softmax(-1)[ids[place + 1]] for place in range(12, 24, 2)]
        torch.testing.assert_close(each, torch.stack(expected).mean(), rtol=1e-12, atol=0)


def test_answers_are_the_preceding_tokens():
    ids = torch.arange(3 * 11).view(3, 11)
    found = relations_task.answers(ids)
    assert found.shape == (3, 7, 4)
    for row, place, slot in itertools.product(range(3), range(4, 11), range(4)):
        assert found[row, place - 4, slot] == ids[row, place - (slot + 1)]


def test_relations_loss_and_accuracy_equal_the_definition():
    batch = {"input_ids": torch.randint(16, (5, 11))}
    logits = torch.randn(5, 11, 4, 16, dtype=torch.float64)
    logits[:, :, 2] = -1.0
    logits[:, :, 2, 6] = 0.0  # the prediction is always 6
    losses, right = torch.zeros(5, 7, 4, dtype=torch.float64), torch.zeros(5, 7, 4)
    for row, place, slot in itertools.product(range(5), range(4, 11), range(4)):
        answer = batch["input_ids"][row, place - slot - 1]
        losses[row, place - 4, slot] = -logits[row, place, slot].log_softmax(-1)[answer]
        right[row, place - 4, slot] = logits[row, place, slot].argmax() == answer
    found = relations_task.relations_loss(FixedLogits(logits), batch)
    torch.testing.assert_close(found, losses.mean((1, 2)), rtol=1e-12, atol=0)
    assert relations_task.accuracy(FixedLogits(logits), [batch, batch]) == pytest.approx(
        right.double().mean((0, 1)).tolist()
    )


def test_uniform_logits_have_the_loss_and_accuracy_of_chance():
    batch = generated_tasks.symbols(1, 3)[0]
    nothing = FixedLogits(torch.zeros(64, 16, 4, 16))
    found = relations_task.relations_loss(nothing, batch)
    torch.testing.assert_close(found, torch.full((64,), math.log(16)))
    assert relations_task.accuracy(nothing, [batch]) == pytest.approx([1 / 16] * 4, abs=0.03)


def hand_made_model(kind):
    """Return a model with four heads that attend 1, 2, 3 and 4 tokens back: the key projection of each head is rotated
    so that it matches a query at that distance.

    Symbols are unit vectors in the first 16 axes. Axis 16 is 1 in every token, and in `place` if the model has that
    parameter.
    """
    model = relations_task.Relations(hw.Setting(4, 16, 4), kind, "rotary")
    attention = model.self_attn
    eye = torch.eye(16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed_tokens.weight[:, :16] = eye
        model.embed_tokens.weight[:, 16] = 1.0
        if model.place is not None:
            model.place[16] = 1.0
        for head in range(4):
            ones = torch.full((1, 1, 1, 16), 12.0)
            part = slice(16 * head, 16 * head + 16)
            attention.q_proj.weight[part, 16] = ones.flatten()
            attention.k_proj.weight[part, 16] = attention.rotary.rotate(ones, torch.tensor([[head + 1]])).flatten()
            attention.v_proj.weight[part, :16] = eye
            attention.out_proj.weight[part, part] = eye
            model.slots.weight[part, part] = 20 * eye
    return model


@pytest.mark.parametrize("kind", relations_task.KINDS)
def test_four_hand_made_heads_serve_four_slots(kind):
    batches, model = generated_tasks.symbols(2, 3), hand_made_model(kind)
    assert relations_task.accuracy(model, batches) == [1.0] * 4
    assert relations_task.relations_loss(model, batches[0]).max() < 1e-4
    torch.testing.assert_close(
        torch.tensor(relations_task.weights(model, batches[0]["input_ids"])), torch.eye(4), rtol=0, atol=1e-4
    )


def test_weights_of_kind_places_do_not_depend_on_the_symbols():
    one, other = (batch["input_ids"] for batch in generated_tasks.symbols(2, 3))
    for kind in ("places", "tokens"):
        model = relations_task.Relations(hw.Setting(2, 32, 2), kind, "rotary")
        same = np.allclose(relations_task.weights(model, one), relations_task.weights(model, other), atol=1e-7)
        assert same == (kind == "places")


WORDS = np.array(list(itertools.product(range(5), repeat=4)))
"""All words of four symbols out of five. In each of them at least one symbol does not occur."""


def is_answered(factors):
    """Return, for each word and slot, whether the largest logit of the slot is that of its symbol. `factors[slot,
    position]` multiplies the symbol at a position.
    """
    logits = np.einsum("jk,nks->njs", factors, np.eye(5)[WORDS])
    is_answer = np.eye(5, dtype=bool)[WORDS]
    return np.where(is_answer, logits, np.inf).min(-1) > np.where(is_answer, -np.inf, logits).max(-1) + 1e-9


def test_one_head_serves_at_most_one_slot():
    """The readout is the same after renaming symbols: p for the symbol at the position, q for all others. Weights are
    tried over a grid.
    """
    served = Counter()
    for weights in itertools.product((0.05, 0.1, 0.25, 0.6, 0.8), repeat=4):
        if sum(weights) > 1 + 1e-9:
            continue
        for p, q in ((1.0, 0.0), (0.0, 1.0), (-1.0, -2.0), (3.0, 3.0)):
            logits = np.einsum("k,nks->ns", np.array(weights), np.where(np.eye(5, dtype=bool)[WORDS], p, q))
            slots = 0
            for slot in range(4):
                is_answer = np.eye(5, dtype=bool)[WORDS[:, slot]]
                others = np.where(is_answer, -np.inf, logits).max(1)
                slots += bool((logits[is_answer] > others + 1e-9).all())
            served[slots] += 1
    assert set(served) == {0, 1}
    assert min(served.values()) > 20


def test_two_heads_serve_all_slots_whose_answer_occurs_once():
    right = is_answered(np.array(MIXES) @ np.array(EXAMPLE))
    once = (WORDS[:, :, None] == WORDS[:, None]).sum(-1) == 1
    assert right[once].all()
    assert all(abs(sum(head) - 1) < 1e-9 and min(head) >= 0 for head in EXAMPLE)


def test_two_heads_serve_two_slots_for_every_word():
    """Answering every word requires a matrix whose diagonal outweighs the rest of each row. It has full rank, so each
    slot needs a head.
    """
    assert is_answered(np.array(MIXES) @ np.array(EXAMPLE)).all(0).tolist() == [False, True, True, False]
    assert is_answered(np.eye(4)).all()
    draw = np.random.default_rng(0)
    found = Counter()
    for _ in range(300):
        factors = draw.dirichlet([0.3] * 4, 2)
        for mixes in (draw.normal(size=(4, 2)), np.linalg.pinv(factors).clip(-1, 1)):
            served = is_answered(mixes @ factors).all(0)
            if served.any():
                rows = (mixes @ factors)[served][:, served]
                others = np.abs(rows).sum(1) - np.abs(np.diag(rows))
                assert (np.diag(rows) > others).all()
            found[served.sum()] += 1
    assert set(found) == {0, 1, 2}


def test_report_checks_its_example(monkeypatch):
    assert "(0.18, 0.52, 0.30, 0.00) and (0.00, 0.30, 0.52, 0.18)" in report_tables.example()
    monkeypatch.setattr(report_tables, "SYMBOLS", 5)
    assert report_tables.right_of_all() == pytest.approx(
        is_answered(np.array(MIXES) @ np.array(EXAMPLE)).mean(0).tolist()
    )
    monkeypatch.setattr(report_tables, "MIXES", (*MIXES[:2], (0.2, 1.0), MIXES[3]))
    assert report_tables.right_of_all()[2] < 0.9
