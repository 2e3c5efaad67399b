"""Ablation of models that pass values from layer to layer, or from run to run, in other ways than layer outputs.

Truth is the loss of a new model with one gate.
"""

import random
from copy import deepcopy

import pytest
import torch
from torch import nn

import headwise as hw
from headwise.analysis.repeated_runs import ROUNDING, SIDE_EFFECTS, RepeatedRuns, restored_state

pytestmark = pytest.mark.usefixtures("as_user")  # shape checks would take most of the time of these many runs

LAYERS, HEADS = 5, 3


class Attention(nn.Module):
    """Self-attention, over cached keys if a list of them is passed."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out_proj = nn.Linear(15, 45), nn.Linear(15, 15)

    def forward(self, x, cache=None):
        q, k, v = (part.unflatten(-1, (HEADS, 5)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if cache is not None:
            cache.append((k, v))
            k, v = (torch.cat(parts, 2) for parts in zip(*cache, strict=True))
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Residual attention layer."""

    def __init__(self):
        super().__init__()
        self.attn = Attention()

    def forward(self, x):
        return x + self.attn(x)


class Plain(nn.Module):
    """Stack of layers with a method that is called between layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.layer(number) for number in range(LAYERS)])

    def layer(self, number):
        return Layer()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Keeps(Layer):
    """Layer 1 keeps its output in a dictionary; layer 3 adds it to its own."""

    def __init__(self, number, kept):
        super().__init__()
        self.number, self.kept = number, kept

    def forward(self, x):
        y = super().forward(x)
        if self.number == 1:
            self.kept["y"] = y
        return y + self.kept["y"] if self.number == 3 else y


class Persistent(Plain):
    """A dictionary that outlives the run: a skipped layer leaves an old value."""

    def layer(self, number):
        if not number:
            self.kept = {}
        return Keeps(number, self.kept)


class Fresh(Persistent):
    """A dictionary that is emptied in each run: a skipped layer leaves no value."""

    def forward(self, x):
        self.kept.clear()
        return super().forward(x)


class Optional(Fresh):
    """A dictionary that is emptied in each run, read with a default value."""

    def forward(self, x):
        self.kept.clear()
        self.kept["y"] = torch.zeros(())
        return Plain.forward(self, x)


class Hooked(Plain):
    """A hook of the attention in layer 2 scales the last layer by what it saw."""

    def __init__(self):
        super().__init__()
        self.seen = 1.0
        self.layers[2].attn.register_forward_hook(self._see)
        self.layers[4].register_forward_hook(lambda module, args, output: output * self.seen)

    def _see(self, module, args, output):
        self.seen = output.square().mean().item()


class Buffered(Plain):
    """A buffer counts the runs, and scales the output."""

    def __init__(self):
        super().__init__()
        self.register_buffer("runs", torch.zeros(()))
        self.register_buffer("last", torch.zeros(15))

    def forward(self, x):
        self.runs += 1.0
        y = super().forward(x) * self.runs + self.last
        self.last = y[0, 0].detach().clone()
        return y


class Drops(Layer):
    """Layer with dropout that is on in evaluation mode."""

    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.25, training=True))


class Random(Plain):
    """Each layer draws random numbers, which shift the random numbers of the next one."""

    def layer(self, number):
        return Drops()


def square_loss(model, batch):
    return model(**batch).square().mean((1, 2))


def batches():
    generator = torch.Generator().manual_seed(3)
    return [{"x": torch.randn(2, 7, 15, generator=generator, dtype=torch.float64)} for _ in range(2)]


def new(kind):
    torch.manual_seed(0)
    return kind().double().eval()


@torch.no_grad()
def losses_by_hand(kind, data, layer=0, head=0, factor=1.0):
    """Return the loss of each example with a gate at one head; each run has a new model and the same seed."""
    losses = []
    for batch in data:
        model = new(kind)
        with hw.gate(model, {(f"layers.{layer}.attn", head): factor}):
            torch.manual_seed(11)
            losses += square_loss(model, batch).tolist()
    return losses


def mean_cost_by_hand(kind, layer, head, data, dense):
    """Return the mean increase of the examples' losses without one head over those of the dense model."""
    without = losses_by_hand(kind, data, layer, head, 0.0)
    return sum(loss - other for loss, other in zip(without, dense, strict=True)) / len(dense)


def require_equal_to_hand(found, kind, data):
    rows = {(row.layer, row.head): row.statistics["cost"].value for row in found.rows}
    assert list(rows) == [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
    dense = losses_by_hand(kind, data)
    for layer in range(LAYERS):
        head = layer % HEADS  # of each layer another one
        cost = mean_cost_by_hand(kind, layer, head, data, dense)
        assert rows[layer, head] == pytest.approx(cost, rel=1e-9, abs=1e-12), (layer, head)


@pytest.mark.parametrize("kind", [Persistent, Fresh, Optional, Hooked, Random])
def test_side_effects_of_layers_make_all_runs_complete(kind):
    model, data = new(kind), batches()
    torch.manual_seed(11)
    with pytest.warns(UserWarning, match="the model passes values between layers in other ways"):
        found = hw.ablate(model, data, square_loss)
    assert found.metadata["measured"]["note"] == SIDE_EFFECTS
    require_equal_to_hand(found, kind, data)


@pytest.mark.parametrize("kind", [Plain, Buffered])
def test_runs_of_a_model_without_side_effects_of_layers_reuse_outputs(kind):
    model, data = new(kind), batches()
    found = hw.ablate(model, data, square_loss)
    assert "note" not in found.metadata["measured"]
    require_equal_to_hand(found, kind, data)


def test_sets_of_heads_in_any_order_are_those_of_gates():
    names = {"d": [(3, 1)], "b": [(1, 2)], "e": [(4, 0), (2, 2)], "c": [(2, 0)], "a": [(3, 0)]}
    with pytest.warns(UserWarning, match="all runs were complete"):
        found = hw.ablate(new(Persistent), batches(), square_loss, units=names)
    dense = losses_by_hand(Persistent, batches())
    for row in found.rows:
        if len(row.heads) == 1:
            cost = mean_cost_by_hand(Persistent, *names[row.name][0], batches(), dense)
            assert row.statistics["cost"].value == pytest.approx(cost, rel=1e-9)


def test_buffers_and_random_numbers_are_left_unchanged():
    for kind in (Buffered, Random):
        model = new(kind)
        before = [buffer.clone() for buffer in model.buffers()]
        torch.manual_seed(5)
        state = torch.get_rng_state()
        found = [hw.ablate(model, batches(), square_loss) if kind is Buffered else None]
        if kind is Random:
            with pytest.warns(UserWarning, match="all runs were complete"):
                found = [hw.ablate(model, batches(), square_loss)]
        assert torch.equal(torch.get_rng_state(), state)
        assert all(map(torch.equal, before, model.buffers()))
        assert found


class Cached(Plain):
    """Appends its input to the caches that it is called with."""

    def forward(self, x, caches):
        for layer, cache in zip(self.layers, caches, strict=True):
            x = x + layer.attn(x, cache=cache)
        return x


def test_a_cache_among_the_inputs_is_the_same_in_each_run():
    torch.manual_seed(0)
    model = Cached().double().eval()
    x = torch.randn(2, 7, 15, dtype=torch.float64)
    caches = [[] for _ in range(LAYERS)]
    with torch.no_grad():
        model(torch.randn(2, 5, 15, dtype=torch.float64), caches)
    found = hw.ablate(model, [{"x": x, "caches": caches}], square_loss)
    assert [len(cache) for cache in caches] == [1] * LAYERS
    with torch.no_grad():
        whole = square_loss(model, {"x": x, "caches": deepcopy(caches)})
        for row in found.rows:
            with hw.gate(model, {(row.module, row.head): 0.0}):
                costs = square_loss(model, {"x": x, "caches": deepcopy(caches)}) - whole
            assert row.statistics["cost"].value == pytest.approx(float(costs.mean()), rel=1e-9)


class Remembers(Plain):
    """Adds the output of the last run."""

    memory: torch.Tensor | float = 0.0

    def forward(self, x):
        y = super().forward(x) + self.memory
        self.memory = y
        return y


class Guesses(Plain):
    """Draws random numbers that torch does not make."""

    def forward(self, x):
        return super().forward(x) * random.random()


@pytest.mark.parametrize("kind", [Remembers, Guesses])
def test_a_model_whose_runs_depend_on_earlier_runs_is_refused(kind):
    expected = "model: expected one with the same results each time that it runs on the same batch, got .* after"
    with pytest.raises(hw.InputError, match=expected):
        hw.ablate(new(kind), batches(), square_loss)


class Rounds(Plain):
    """Adds a rounding error that differs between runs."""

    def forward(self, x):
        return super().forward(x) * (1.0 + 1e-12 * random.random())


def test_runs_that_differ_by_rounding_are_complete():
    with pytest.warns(UserWarning, match="differ by rounding"):
        found = hw.ablate(new(Rounds), batches(), square_loss)
    assert found.metadata["measured"]["note"] == ROUNDING


def test_ablation_and_patching_work_in_inference_mode():
    with torch.inference_mode():
        found = hw.ablate(new(Plain), batches(), square_loss)
    require_equal_to_hand(found, Plain, batches())


@torch.no_grad()
def test_the_check_takes_a_few_runs_of_the_first_batch():
    model, ran = new(Plain), []
    for number, layer in enumerate(model.layers):
        layer.attn.register_forward_pre_hook(lambda *_, number=number: ran.append(number))
    runs, batch = RepeatedRuns(model, [f"layers.{number}.attn" for number in range(LAYERS)]), batches()[0]
    counts = []
    for _ in range(2):
        ran.clear()
        runs.run_unchanged(lambda: square_loss(model, batch))
        counts.append([ran.count(number) for number in range(LAYERS)])
    # The recorded run, two with halved outputs, one complete, and one for each layer up to which outputs are reused.
    assert counts == [[4 + 1 + number for number in range(LAYERS)], [1] * LAYERS]


def test_state_is_restored_after_an_exception():
    model = new(Buffered)
    before = [buffer.clone() for buffer in model.buffers()]
    with pytest.raises(IndexError, match="index 15 is out of bounds"), restored_state(model):
        model(batches()[0]["x"])[:, :, 15]
    assert all(map(torch.equal, before, model.buffers()))
