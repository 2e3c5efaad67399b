"""One training run: learning rates, order of batches, reproducibility, AdamW steps, and evaluation."""

import math
import re

import pytest
import torch
from torch import nn

import headwise as hw
from headwise.studies.training import Recipe, TrainingResult, batch_order, build_seeded, evaluate, train

pytestmark = pytest.mark.usefixtures("as_user")


class Toy(nn.Module):
    """Predicts the next byte from one byte, with dropout in training."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed, self.norm = nn.Embedding(13, 8), nn.LayerNorm(8)
        self.drop, self.out = nn.Dropout(dropout), nn.Linear(8, 13)

    def forward(self, input_ids):
        return self.out(self.drop(self.norm(self.embed(input_ids))))


def counting(number=7, batch=3, length=5):
    """Return batches of sequences that count upwards modulo 13, which a model can learn."""
    starts = torch.randint(0, 13, (number, batch, 1), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": (start + torch.arange(length)) % 13} for start in starts]


class Recording:
    """The next-token loss, with records of its calls.

    Attributes:
        calls: mode of the model (True in training) and token ids, for each call.
        losses: mean loss of each call.
    """

    def __init__(self):
        self.calls, self.losses = [], []

    def __call__(self, model, batch):
        losses = hw.next_token_loss(model, batch)
        self.calls.append((model.training, batch["input_ids"].clone()))
        self.losses.append(losses.mean().item())
        return losses

    def order(self, batches):
        """Return the index of the batch of each call."""
        matches = [
            [index for index, batch in enumerate(batches) if torch.equal(batch["input_ids"], ids)]
            for _, ids in self.calls
        ]
        assert all(len(indices) == 1 for indices in matches)
        return [index for (index,) in matches]


def trained(seed=0, weight_seed=0, dropout=0.5, steps=15, **options):
    """Train a toy model; return the recording loss, the model and the training result."""
    loss, model = Recording(), build_seeded(lambda: Toy(dropout), weight_seed)
    result = train(model, counting(), loss, steps=steps, rate=3e-2, seed=seed, **options)
    return loss, model, result


def test_learning_rates_warm_up_linearly_and_decay_as_a_cosine():
    rate = Recipe(warmup=0.3, floor=0.2).rate_factor
    assert [rate(step, 10) for step in range(3)] == pytest.approx([1 / 4, 2 / 4, 3 / 4])
    assert rate(3, 10) == pytest.approx(1.0)
    assert rate(10, 10) == pytest.approx(0.2)
    cosines = {4: 0.900968867902, 5: 0.623489801859, 6: 0.222520933956, 7: -0.222520933956, 9: -0.900968867902}
    for step, cosine in cosines.items():
        assert rate(step, 10) == pytest.approx(0.2 + 0.8 * (1 + cosine) / 2)
    flat = Recipe(warmup=0.0, floor=0.0).rate_factor
    assert [flat(step, 4) for step in range(4)] == pytest.approx([1.0, 0.853553390593, 0.5, 0.146446609407])
    assert Recipe(warmup=0.0).rate_factor(0, 1) == 1.0
    assert [Recipe(warmup=0.9, floor=0.5).rate_factor(step, 1) for step in (0,)] == pytest.approx([1 / 1.9])
    default = [Recipe().rate_factor(step, 20) for step in range(20)]
    assert default[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert max(default) == 1.0
    assert default[2:] == sorted(default[2:], reverse=True)
    assert default[-1] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 17 / 18)) / 2)


def test_the_optimizer_uses_the_rates_of_the_recipe(monkeypatch):
    rates = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW,
        "step",
        lambda self, *args: rates.append([group["lr"] for group in self.param_groups]) or step(self, *args),
    )
    recipe = Recipe(warmup=0.25, floor=0.5)
    trained(steps=8, recipe=recipe)
    expected = [3e-2 * share for share in (1 / 3, 2 / 3, 1.0)]
    assert [pair[0] for pair in rates[:3]] == pytest.approx(expected)
    assert [pair[0] for pair in rates] == pytest.approx([3e-2 * recipe.rate_factor(n, 8) for n in range(8)])
    assert all(pair[0] == pair[1] for pair in rates)


@pytest.mark.parametrize("number", [1, 7, 23])
def test_each_batch_comes_once_per_round(number):
    order = batch_order(number, 5)
    rounds = [[next(order) for _ in range(number)] for _ in range(4)]
    assert all(sorted(indices) == list(range(number)) for indices in rounds)
    if number > 1:
        assert rounds[0] != rounds[1]
        torch.manual_seed(99)
        again, other = batch_order(number, 5), batch_order(number, 6)
        assert [next(again) for _ in range(4 * number)] == [index for indices in rounds for index in indices]
        assert [next(other) for _ in range(number)] != rounds[0]


def test_equal_seeds_give_equal_bits():
    """This includes dropout and the order of batches, and does not depend on random numbers drawn before."""
    loss, model, result = trained(4)
    order, batches = loss.order(counting()), counting()
    assert sorted(order[:7]) == sorted(order[7:14]) == list(range(7))
    assert trained(4, weight_seed=1)[0].order(batches) == order != trained(5)[0].order(batches)
    torch.randn(13)
    again, other_model, other_result = trained(4)
    assert loss.losses == again.losses
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other_model.parameters(), strict=True))
    assert result.loss == other_result.loss
    assert trained(5)[0].losses != loss.losses
    assert trained(4, weight_seed=1)[0].losses != loss.losses


def test_the_global_random_state_is_neither_read_nor_changed():
    torch.manual_seed(17)
    expected = Toy().out.weight.clone()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    assert torch.equal(build_seeded(Toy, 17).out.weight, expected)
    assert not torch.equal(build_seeded(Toy, 18).out.weight, expected)
    trained(9)

    def fails(model, batch):
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="^stopped$"):
        train(build_seeded(lambda: Toy(0.5), 0), counting(), fails, steps=2, rate=1e-3, seed=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_training_lowers_the_loss():
    model = build_seeded(Toy, 0)
    before = evaluate(model, counting(), hw.next_token_loss)
    result = train(model, counting(), hw.next_token_loss, steps=60, rate=3e-2, seed=0)
    after = evaluate(model, counting(), hw.next_token_loss)
    assert before > 2.0
    assert after < 0.2
    assert result.loss == pytest.approx(after, abs=0.2)


def test_the_result_has_the_mean_of_the_last_losses_and_the_seconds_per_step():
    loss, _, result = trained(steps=23)
    assert result.loss == pytest.approx(sum(loss.losses[-2:]) / 2)  # the last tenth
    assert len(result.seconds) == 23
    assert all(training for training, _ in loss.calls)
    steps = []
    trained(steps=4, after_step=steps.append)
    assert steps == [1, 2, 3, 4]
    assert TrainingResult(0.0, [100.0, 50.0, 3.0, 1.0, 2.0, 9.0]).step_seconds == 2.5
    assert TrainingResult(0.0, [7.0, 5.0]).step_seconds == 6.0
    with pytest.raises(hw.InputError, match="^steps: expected a whole number of 1 or more, got 0$"):
        trained(steps=0)


def test_the_first_step_is_that_of_adamw_with_a_clipped_gradient():
    """The first AdamW step follows the sign of the gradient; only parameters with two axes decay."""
    model, batches = build_seeded(Toy, 0), counting(1)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    hw.next_token_loss(model, batches[0]).mean().backward()
    norm = torch.stack([parameter.grad.square().sum() for parameter in model.parameters()]).sum().sqrt()
    clip = min(1.0, 1e-3 / norm.item())
    grads = {name: parameter.grad * clip for name, parameter in model.named_parameters()}
    assert norm > 1e-3
    recipe = Recipe(warmup=0.0, weight_decay=0.5, clip=1e-3)
    train(model, batches, hw.next_token_loss, steps=1, rate=0.1, seed=0, recipe=recipe)
    for name, parameter in model.named_parameters():
        decayed = start[name] * (1 - 0.1 * 0.5 * (parameter.ndim > 1))
        expected = decayed - 0.1 * grads[name] / (grads[name].abs() + 1e-8)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-3, atol=1e-5)


def test_only_matrices_decay():
    model = Toy()
    matrices, vectors = Recipe(weight_decay=0.3, betas=(0.8, 0.9)).optimizer(model).param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert matrices["betas"] == vectors["betas"] == (0.8, 0.9)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert [names[id(parameter)] for parameter in matrices["params"]] == ["embed.weight", "out.weight"]
    assert [names[id(parameter)] for parameter in vectors["params"]] == ["norm.weight", "norm.bias", "out.bias"]
    assert len(Recipe().optimizer(nn.Linear(2, 3, bias=False)).param_groups) == 1


def test_evaluation_averages_over_examples_and_changes_no_state():
    model = build_seeded(lambda: Toy(0.5), 0).train()
    model.norm.eval()
    sizes = (3, 1, 2)
    batches = [{"input_ids": torch.randint(0, 13, (size, 5))} for size in sizes]
    state = torch.get_rng_state()
    loss = evaluate(model, batches, hw.next_token_loss)
    assert [module.training for module in (model, model.embed, model.norm, model.drop)] == [True, True, False, True]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.eval()
    expected_losses = []
    for batch in batches:
        for row in batch["input_ids"]:
            probabilities = model(row[None])[0, :-1].detach().double().softmax(-1)
            expected_losses.append(-sum(math.log(probabilities[n, token]) for n, token in enumerate(row[1:])) / 4)
    assert loss == pytest.approx(sum(expected_losses) / 6, rel=1e-6)
    assert math.isnan(evaluate(model, batches, lambda _model, batch: torch.full((len(batch["input_ids"]),), math.nan)))


def test_a_loss_with_reseeded_gets_a_new_seed_at_each_step():
    class SeededLoss:
        def __init__(self, seed=None):
            self.seed = seed

        def reseeded(self, seed):
            return SeededLoss(seed)

        def __call__(self, model, batch):
            seeds.append(self.seed)
            return hw.next_token_loss(model, batch)

    seeds = []
    train(Toy(), counting(), SeededLoss(), steps=4, rate=1e-3, seed=9)
    assert seeds == [0, 1, 2, 3]
    evaluate(Toy(), counting(2), SeededLoss())
    assert seeds[4:] == [None, None]


def test_a_reseeded_masked_token_loss_masks_other_tokens():
    loss = hw.MaskedTokenLoss(12, special=(3, 1), share=0.4)
    other = loss.reseeded(7)
    assert (other.mask_id, other.special.tolist(), other.share, other.seed) == (12, [1, 3], 0.4, 7)
    assert loss.seed == 0
    model, batch = build_seeded(Toy, 0), {"input_ids": torch.randint(4, 12, (2, 11))}
    direct = hw.MaskedTokenLoss(12, special=(3, 1), share=0.4, seed=7)(model, batch)
    assert torch.equal(other(model, batch), direct)
    assert not torch.equal(other(model, batch), loss(model, batch))


PROBABILITY = "expected a probability of 0 or more and less than 1"


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rates": (1e-2, 1e-3)}, "rates: expected the smallest learning rate, then the largest, got (0.01, 0.001)"),
        ({"rates": (0.0, 1e-3)}, "rates: expected a finite number above 0, got 0.0"),
        ({"rates": ""}, "rates: expected two learning rates, got ''"),
        ({"betas": (0.9,)}, "betas: expected two decay rates, got (0.9,)"),
        ({"warmup": 1.0}, f"warmup: {PROBABILITY}, got 1.0"),
        ({"floor": -0.1}, f"floor: {PROBABILITY}, got -0.1"),
        ({"betas": (0.9, 1.0)}, f"betas: {PROBABILITY}, got 1.0"),
        ({"clip": 0.0}, "clip: expected a finite number above 0, got 0.0"),
        ({"clip": math.nan}, "clip: expected a finite number above 0, got nan"),
    ],
)
def test_unusable_recipes_are_refused(options, sentence):
    with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
        Recipe(**options)


def test_a_recipe_accepts_zeros_for_decay_floor_and_warmup():
    assert Recipe(weight_decay=0.0, floor=0.0, warmup=0.0).weight_decay == 0.0
