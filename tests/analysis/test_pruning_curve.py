"""Pruning curves against losses with gates of 0."""

import math
import random

import pytest
import torch

import headwise as hw
import tiny
from headwise.analysis.losses import next_token_loss

pytestmark = pytest.mark.usefixtures("as_user")

HEADS = [(layer, head) for layer in range(2) for head in range(6)]


@pytest.fixture(scope="module")
def model():
    return tiny.with_distinct_heads(tiny.model("decoder", top="ForCausalLM"))


def texts(*lengths, **options):
    return hw.Texts(tiny.texts(*lengths), tiny.tokenizer("decoder"), **options)


def losses_without(model, data, heads):
    """Return the loss of each sequence with gates of 0 at heads."""
    with hw.gate(model, dict.fromkeys(heads, 0.0)), torch.no_grad():
        return torch.cat([next_token_loss(model, batch) for batch in data]).tolist()


def test_heads_are_removed_together_from_the_least_important_on(model):
    scores = hw.importance(model, texts(9, 14, 11), next_token_loss)
    test = texts(12, 8, 15, 10)
    curve = hw.pruning_curve(model, test, next_token_loss, scores, shares=(0.25, 0.5, 1.0), random=0)
    order = scores.ranking()[::-1]
    assert [(point.order, point.draw, point.removed) for point in curve.rows] == [
        ("gradient", 0, 3),
        ("gradient", 0, 6),
        ("gradient", 0, 12),
    ]
    for point in curve.rows:
        losses = losses_without(model, test, order[: point.removed])
        mean = sum(losses) / 4
        sem = math.sqrt(sum((loss - mean) ** 2 for loss in losses) / 3 / 4)
        assert point.share == point.removed / 12
        assert point.statistics["loss"] == pytest.approx((mean, sem, 4, 3), rel=1e-5)
        assert point.statistics["cost"].value == pytest.approx(mean - curve.baseline.value, rel=1e-4, abs=1e-6)


def test_random_orders_remove_nested_sets_and_form_a_band(model):
    test, given = texts(12, 8, 15), {"own": HEADS}
    curve = hw.pruning_curve(model, test, next_token_loss, given, shares=(0.5, 1.0), random=4, seed=7)
    draws, expected = random.Random(7), []
    for _ in range(4):
        order = draws.sample(HEADS, 12)
        expected.append(sum(losses_without(model, test, order[:6])) / 3)
    found = [point.statistics["loss"].value for point in curve.rows if (point.order, point.removed) == ("random", 6)]
    assert found == pytest.approx(expected, rel=1e-5)
    (count, low, mean, high), (_, *of_all) = curve.band()
    assert (count, low, mean, high) == (6, min(found), pytest.approx(sum(found) / 4), max(found))
    assert of_all == pytest.approx([curve.curve("own")[1].statistics["loss"].value] * 3)
    again = hw.pruning_curve(model, test, next_token_loss, given, shares=(0.5, 1.0), random=4, seed=7)
    assert again.rows == curve.rows


def test_a_curve_is_saved_resumed_and_drawn(model, tmp_path):
    test = texts(12, 8, 15)
    orders = {"first": HEADS, "last": HEADS[::-1]}
    arguments = (model, test, next_token_loss, orders)
    curve = hw.pruning_curve(*arguments, shares=(0.5,), random=2, out=tmp_path / "runs")
    assert hw.pruning_curve(*arguments, shares=(0.5,), random=2, out=tmp_path / "runs").rows == curve.rows
    curve.save(tmp_path / "curve")
    assert hw.PruningCurve.load(tmp_path / "curve").rows == curve.rows
    assert list(curve.table()) == ["order", "draw", "removed", "share", "cost", "loss"]
    axes = curve.plot("cost", errors=0)
    assert axes.get_legend_handles_labels()[1] == ["random (range, mean)", "first", "last"]
    assert list(axes.lines[1].get_ydata()) == [0.0, curve.curve("first")[0].statistics["cost"].value]


def test_an_order_from_the_data_of_the_curve_is_named(model):
    data = texts(9, 14, 11)
    scores = hw.importance(model, data, next_token_loss)
    with pytest.warns(UserWarning, match="^these orders were chosen on the data of the curve, .*: mine$"):
        hw.pruning_curve(model, data, next_token_loss, {"mine": scores}, shares=(1.0,), random=0)


def test_a_table_of_another_model_is_refused(model):
    other = hw.importance(tiny.model("decoder", 5, top="ForCausalLM"), texts(9, 14), next_token_loss)
    with pytest.raises(hw.InputError, match="^orders: expected a table of this model in 'gradient', got another's; "):
        hw.pruning_curve(model, texts(9, 8), next_token_loss, other)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("^orders: expected every head of the model once in 'x', got another number of \\(1, 5\\)", {"x": HEADS[:-1]}),
        (
            "^orders: expected every head of the model once in 'x', got another number of \\(0, 0\\)",
            {"x": [*HEADS, (0, 0)]},
        ),
        ("^orders: expected other names than 'random', which the random orders have, got random", {"random": HEADS}),
        ("^orders: expected a table of heads, or orders of heads by name, got list", HEADS),
        ("^orders: expected at least one order, got none", {}),
        # The names of the sets of these orders would be the same.
        ("^orders: expected strings as names of orders, got 1$", {1: HEADS, "1": HEADS[::-1]}),
    ],
)
def test_orders_that_are_refused(model, message, arguments):
    with pytest.raises(hw.InputError, match=message):
        hw.pruning_curve(model, texts(9, 8), next_token_loss, arguments)


def test_batches_that_can_be_read_once_are_refused(model):
    with pytest.raises(hw.InputError, match="^dataset: expected batches that can be read twice, got an iterator; list"):
        hw.pruning_curve(model, iter(list(texts(9, 8))), next_token_loss, {"x": HEADS})


def test_a_loss_may_run_a_part_of_the_model_with_a_part_of_the_batch():
    def loss(model, batch):
        return model.decoder(batch["input_ids"]).last_hidden_state.sin().mean((1, 2)) * batch["weight"]

    class Pair(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = tiny.model("encoder"), tiny.model("decoder")

        def forward(self, tokens):
            return self.decoder(inputs_embeds=self.encoder(tokens).last_hidden_state)

    pair = Pair().eval()
    data = [{"input_ids": torch.randint(5, 97, (3, 7)), "weight": torch.tensor([1.0, 2.0, 3.0])}]
    curve = hw.pruning_curve(pair, data, loss, {"x": HEADS}, shares=(0.25,), random=0)
    with hw.gate(pair.decoder, dict.fromkeys(HEADS[:3], 0.0)), torch.no_grad():
        expected = loss(pair, data[0]).mean().item()
    assert curve.rows[0].statistics["loss"].value == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shares", [(), (0.0,), (1.5,), ("a",)])
def test_shares_that_are_refused(model, shares):
    with pytest.raises(hw.InputError, match="^shares: expected "):
        hw.pruning_curve(model, texts(9, 8), next_token_loss, {"x": HEADS}, shares=shares)
