"""Importance, compared with finite differences of the loss between gates above and below 1; learned gates."""

import dataclasses
import math
from functools import cache

import pytest
import torch
import transformers
from torch import nn

import headwise as hw
import tiny
from headwise.analysis.gate import gate
from headwise.analysis.importance.agreement import agreement
from headwise.analysis.importance.gradients import gauss_legendre
from headwise.analysis.importance.importance import Importance, importance
from headwise.analysis.losses import EmbeddingDistance, next_token_loss
from headwise.runs import checkpoint
from headwise.runs.rows import HeadRow, MeanEstimate
from jackknife import jackknife

pytestmark = pytest.mark.usefixtures("as_user")  # shapes are checked by the oracle

IDS = torch.randint(5, 97, (5, 7), generator=torch.Generator().manual_seed(3))
SIZES = {"vocab_size": 97, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3}


T5 = {"vocab_size": 97, "d_model": 12, "d_kv": 5, "d_ff": 11, "num_layers": 2, "num_heads": 3}
T5 |= {"feed_forward_proj": "gated-gelu"}  # a kink has no derivative


class Plain(nn.Module):
    """A model that is in no library, with the attention of headwise."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(97, 12)
        self.first = hw.MultiHeadAttention(12, 3, mask=hw.causal())
        self.second = hw.MultiHeadAttention(12, 6, num_kv_heads=2, head_dim=5)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        x = x + self.first(x)
        return (x + self.second(x)).tanh()


def made(config, auto=transformers.AutoModel):
    return auto.from_config(config)


MODELS = {
    "bert": lambda: made(transformers.BertConfig(**SIZES, intermediate_size=11)),
    "llama": lambda: made(
        transformers.LlamaConfig(**SIZES | {"num_attention_heads": 6}, num_key_value_heads=2, head_dim=4)
    ),
    "gptj": lambda: made(transformers.GPTJConfig(vocab_size=97, n_embd=12, n_layer=2, n_head=3, rotary_dim=2)),
    "albert": lambda: made(transformers.AlbertConfig(**SIZES, embedding_size=7, intermediate_size=11)),
    "t5": lambda: made(transformers.T5Config(**T5)),
    "ours": Plain,
}


@cache
def model_of(name):
    torch.manual_seed(1)
    model = MODELS[name]()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2 if name == "t5" else 0.4)  # which does not scale its scores
    return model.double().eval()


def wave(model, batch):
    """Return a nonlinear loss of any of these models."""
    given = model(**batch)
    hidden = given if isinstance(given, torch.Tensor) else given.last_hidden_state
    direction = torch.linspace(-0.5, 1, hidden.shape[-1], dtype=hidden.dtype)
    return (hidden @ direction).sin().mean(1)


def data(name="bert", sizes=(5,)):
    more = {"decoder_input_ids": IDS.flip(1)[:, :3]} if name == "t5" else {}
    columns = {"input_ids": IDS, **more}
    parts = {key: each.split(list(sizes)) for key, each in columns.items()}
    return [{key: parts[key][number] for key in columns} for number in range(len(sizes))]


@torch.no_grad()
def losses_at(model, batch, gates, loss=wave):
    with gate(model, gates):
        return loss(model, batch)


STEP = 0.01
"""Steps of the finite differences; large for models that compute in float32 in every dtype."""

INSIDE = ("llama", "gptj", "t5")
"""Such models: of others, only the step is not exact."""


WAYS = torch.tensor([2.0, 1.0, -1.0, -2.0], dtype=torch.float64)


def slopes_of(model, batch):
    """Return dL/dg of every example, by module and head, from finite differences of fourth order.

    The batch comes again for every head and way, each time with another gate that is not 1.
    """
    with torch.no_grad(), hw.watch(model) as heads:
        model(**batch)
    keys = [(row["module"], row["head"]) for row in heads.rows()]
    examples, times = len(batch["input_ids"]), len(keys) * len(WAYS)
    gates = {path: torch.ones(times, 1 + max(head for at, head in keys if at == path)).double() for path, _ in keys}
    for number, (path, head) in enumerate(keys):
        gates[path][number * len(WAYS) : (number + 1) * len(WAYS), head] += WAYS * STEP
    repeated = {name: each.repeat(times, 1) for name, each in batch.items()}
    gates = {path: each.repeat_interleave(examples, 0) for path, each in gates.items()}
    losses = losses_at(model, repeated, gates).view(len(keys), len(WAYS), examples)
    far, near, nearer, farther = losses.unbind(1)
    return dict(zip(keys, (farther - far + 8 * (near - nearer)) / (12 * STEP), strict=True))


@cache
def slopes(name):
    return slopes_of(model_of(name), *data(name))


def close(found, values, tolerance=1e-6):
    """Check that an estimate has the mean, standard error and number of these values."""
    assert found[:3] == pytest.approx(jackknife(values)[:3], rel=1e-5, abs=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_finite_differences_of_each_example(name):
    model = model_of(name)
    found = importance(model, data(name), wave)
    expected = slopes(name)
    assert {(head.module, head.head) for head in found.heads} == set(expected)
    for head in found.heads:
        of_examples = expected[head.module, head.head]
        tolerance = 1e-4 if name in INSIDE else 1e-6
        close(head.statistics["gradient"], of_examples.abs(), tolerance)
        close(head.statistics["first_order"], -of_examples, tolerance)
    assert min(each.abs().max() for each in expected.values()) > 5e-3  # else zeros would do
    with torch.no_grad(), hw.watch(model) as heads:
        model(**data(name)[0])
    names = ("layer", "head", "kv_head", "module", "kind")
    assert [head.identifiers for head in found.heads] == [{name: row[name] for name in names} for row in heads.rows()]


def test_square_is_taken_per_example():
    found = importance(model_of("llama"), data(), wave, "square")
    assert found.statistics == ("square",)
    for head in found.heads:
        close(head.statistics["square"], slopes("llama")[head.module, head.head] ** 2, 1e-4)


def test_normalise_divides_by_the_norm_over_a_layer():
    plain = importance(model_of("llama"), data(), wave)
    found = importance(model_of("llama"), data(), wave, normalise=True)
    assert found.statistics == ("gradient_per_layer", "first_order_per_layer")
    assert found.metadata["settings"]["normalise"] is True
    for head in found.heads:
        for name in plain.statistics:
            layer = torch.tensor([each.statistics[name].value for each in plain.heads if each.layer == head.layer])
            expected, got = plain.head(head.layer, head.head).statistics[name], head.statistics[name + "_per_layer"]
            assert got.value == pytest.approx(expected.value / float(layer.norm()), rel=1e-5)
            assert got.sem == pytest.approx(expected.sem / float(layer.norm()), rel=1e-5)


@pytest.mark.parametrize("name", ["bert", "t5", pytest.param("albert", marks=pytest.mark.slow)])
def test_integrated_gradients_sum_to_the_effect_of_removing_all_heads(name):
    model, (batch,) = model_of(name), data(name)
    found = importance(model, data(name), wave, "integrated", steps=48)
    paths = {head.module for head in found.heads}
    with torch.no_grad():
        cost = losses_at(model, batch, dict.fromkeys(paths, 0.0)) - wave(model, batch)
    total = sum(head.statistics["integrated"].value for head in found.heads)
    assert total == pytest.approx(float(cost.mean()), rel=1e-4)
    effect = float(cost.mean())
    assert found.metadata["measured"]["completeness"] == pytest.approx(
        {"scores": effect, "effect": effect, "gap": 0.0, "gap_of_means": 0.0, "steps": 48}, rel=1e-4, abs=1e-4
    )


def test_too_few_steps_are_doubled_until_the_scores_are_complete():
    def steep(model, batch):
        return torch.tanh(30.0 * wave(model, batch) - 3.0)

    model, batches = model_of("bert"), data("bert")
    found = importance(model, batches, steep, "integrated", steps=1)
    completeness = found.metadata["measured"]["completeness"]
    assert completeness["gap"] <= 0.05
    assert completeness["steps"] in {2, 4, 8, 16, 32, 64}
    with pytest.warns(UserWarning, match=r"^integrated gradients did not converge: .* differs by .* after 1 steps\)$"):
        few = importance(model, batches, steep, "integrated", steps=1, most_steps=1)
    measured = few.metadata["measured"]["completeness"]
    total = sum(head.statistics["integrated"].value for head in few.heads)
    assert measured["scores"] == pytest.approx(total, rel=1e-6)
    assert measured["effect"] == pytest.approx(completeness["effect"], rel=1e-6)
    gap_of_means = abs(total - measured["effect"]) / abs(measured["effect"])
    assert measured["gap_of_means"] == pytest.approx(gap_of_means, rel=1e-6)
    assert measured["gap"] >= gap_of_means > 0.05


class OneLayer(nn.Module):
    """A model whose output is linear in a common gate of all heads."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.attention = nn.Embedding(97, 12), hw.MultiHeadAttention(12, 3, bias=False)
        tiny.with_distinct_heads(self)

    def forward(self, input_ids):
        return self.attention(self.embed(input_ids)).sum((1, 2))


class Cubic:
    """Loss that is a cubic polynomial of the common gate g of all heads: g^3 for every other example, and 2g - g^3.

    With one gate value, 1/2, the sum of the scores is -3/4 or -5/4, and the effect of removing all heads -1. Two gate
    values are exact (Gauss-Legendre quadrature).
    """

    def __init__(self, model, batches):
        self.outputs = {batch["input_ids"]: model(**batch).detach() for batch in batches}

    def __call__(self, model, batch):
        (output,) = (each for ids, each in self.outputs.items() if torch.equal(ids, batch["input_ids"]))
        g = model(**batch) / output
        return torch.where(torch.arange(len(g)) % 2 == 0, g**3, 2 * g - g**3)


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_gaps_of_opposite_sign_do_not_cancel(sizes):
    model = OneLayer().double().eval()
    batches = [{"input_ids": ids} for ids in IDS[:4].split(sizes)]
    loss = Cubic(model, batches)
    with pytest.warns(UserWarning, match=r"differs by 0\.25 .*, which is 1 \(.* completeness gap 25% after 1 steps"):
        few = importance(model, batches, loss, "integrated", steps=1, most_steps=1)
    expected = {"scores": -1.0, "effect": -1.0, "gap": 0.25, "gap_of_means": 0.0, "steps": 1}
    assert few.metadata["measured"]["completeness"] == pytest.approx(expected, abs=1e-9)
    found = importance(model, batches, loss, "integrated", steps=1)
    expected = {"scores": -1.0, "effect": -1.0, "gap": 0.0, "gap_of_means": 0.0, "steps": 2}
    assert found.metadata["measured"]["completeness"] == pytest.approx(expected, abs=1e-9)


def test_quadrature_integrates_polynomials():
    nodes = gauss_legendre(4)
    for power in range(8):
        assert sum(weight * value**power for value, weight in nodes) == pytest.approx(1 / (power + 1), rel=1e-12)


def test_ablation_is_the_loss_without_the_head():
    model, (batch,) = model_of("llama"), data()
    found = importance(model, [batch], wave, "ablation")
    with torch.no_grad():
        whole = wave(model, batch)
    for head in found.heads:
        without = losses_at(model, batch, {(head.module, head.head): 0.0})
        close(head.statistics["ablation"], without - whole)


# -- data in any form -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:integrated gradients did not converge")
@pytest.mark.parametrize("options", [{"method": "gradient"}, {"method": "integrated", "steps": 2, "most_steps": 2}])
def test_results_do_not_depend_on_batch_sizes(options):
    whole, parts = (importance(model_of("bert"), data(sizes=sizes), wave, **options) for sizes in [(5,), (3, 1, 1)])
    for one, other in zip(whole.heads, parts.heads, strict=True):
        assert one.identifiers == other.identifiers
        for name, measured in one.statistics.items():
            assert tuple(other.statistics[name]) == pytest.approx(tuple(measured), rel=1e-9)


def test_texts_and_a_loss_of_tokens():
    model = made(transformers.LlamaConfig(**SIZES), transformers.AutoModelForCausalLM).eval()
    found = importance(model, hw.Texts(tiny.texts(7, 5, 7), tiny.tokenizer("decoder"), batch=2), next_token_loss)
    assert {head.statistics["gradient"].n for head in found.heads} == {3}
    assert found.metadata["measured"]["tokens"] == 19
    assert all(head.statistics["gradient"].value > 0 for head in found.heads)


def test_an_example_without_a_loss_does_not_count():
    def some(model, batch):
        return wave(model, batch).masked_fill(torch.arange(5) == 3, math.nan)

    found = importance(model_of("bert"), data(), some)
    for head in found.heads:
        of_examples = slopes("bert")[head.module, head.head]
        close(head.statistics["first_order"], -of_examples[torch.arange(5) != 3])


class Branches(nn.Module):
    """A model that runs its second layer on request only."""

    def __init__(self):
        super().__init__()
        self.inner = Plain()

    def forward(self, input_ids, both=True):
        x = self.inner.embed(input_ids)
        x = x + self.inner.first(x)
        return (x + self.inner.second(x)).tanh() if both else x.tanh()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_head_that_does_not_run_has_derivative_0(order):
    model, batches = Branches().double(), data(sizes=(3, 2))
    batches[1]["both"] = False
    found = importance(model, [batches[place] for place in order], wave)
    alone = importance(model, batches[:1], wave)
    for head in found.heads:
        assert head.statistics["gradient"].n == 5
    second = [head for head in found.heads if head.module.endswith("second")]
    for head in second:
        before = alone.head(head.layer, head.head).statistics["gradient"]
        assert head.statistics["gradient"].value == pytest.approx(before.value * 3 / 5, rel=1e-9)
    assert len(second) == 6


class Folded(nn.Module):
    """A model that attends within each half of its input, folded into the batch."""

    def __init__(self):
        super().__init__()
        self.inner = Plain()

    def forward(self, input_ids):
        return self.inner(input_ids.reshape(-1, 2)).reshape(len(input_ids), -1, 12)


def folded_slopes(model, ids):
    """In a model that folds its input, all examples share their gates."""
    with torch.no_grad(), hw.watch(model) as heads:
        model(ids)
    found = {}
    for key in [(row["module"], row["head"]) for row in heads.rows()]:
        near, nearer = (losses_at(model, {"input_ids": ids}, {key: 1 + way * 1e-4}) for way in (1, -1))
        found[key] = (near - nearer) / 2e-4
    return found


def test_a_model_that_mixes_examples_needs_batches_of_one():
    model, ids = Folded().double().eval(), IDS[:, :6]
    with pytest.raises(
        hw.InputError, match="^dataset: expected batches of one example, as inner.first does not .* 15$"
    ):
        importance(model, [{"input_ids": ids}], wave)
    found = importance(model, [{"input_ids": each} for each in ids.split(1)], wave)
    expected = folded_slopes(model, ids)
    for head in found.heads:
        close(head.statistics["first_order"], -expected[head.module, head.head])


def test_the_loss_is_prepared_on_the_unchanged_model():
    model = tiny.model("encoder").double()
    found = importance(model, [{"input_ids": IDS}], EmbeddingDistance(), "integrated", steps=32)
    distance = EmbeddingDistance()
    distance.prepare(model, {"input_ids": IDS})
    cost = losses_at(model, {"input_ids": IDS}, {0: 0.0, 1: 0.0}, distance).mean()
    assert sum(head.statistics["integrated"].value for head in found.heads) == pytest.approx(float(cost), rel=1e-3)


def test_gate_gradients_of_a_bfloat16_model_are_summed_in_float32():
    torch.manual_seed(2)
    model, batches = Plain().to(torch.bfloat16), [{"input_ids": IDS[:1]}]
    found = importance(model, batches, wave)
    exact = importance(model.to(torch.float64), batches, wave)
    values, others = ([head.statistics["gradient"].value for head in each.heads] for each in (found, exact))
    assert values == pytest.approx(others, rel=0.1, abs=2e-3)
    assert any(float(torch.tensor(value).bfloat16()) != value for value in values)


# -- gates that are learned -------------------------------------------------------------------------------------------

KEPT = {(0, 1), (1, 0), (1, 4)}


@cache
def with_idle_heads():
    """Return a model whose output projections read some heads only, and a loss that depends on these."""
    model = tiny.model("decoder")
    with torch.no_grad():
        for layer, block in enumerate(model.layers):
            for head in range(6):
                if (layer, head) not in KEPT:
                    block.self_attn.o_proj.weight[:, 10 * head : 10 * head + 10] = 0.0
    return model, EmbeddingDistance()


def learned(**options):
    model, loss = with_idle_heads()
    batches = [{"input_ids": each} for each in IDS.split([3, 2])]
    return importance(model, batches, loss, "hard_concrete", **{"epochs": 30, "learning_rate": 0.2} | options)


def test_gates_of_idle_heads_close_and_the_others_stay_open():
    found = learned(sparsity=0.003)
    assert found.statistics == ("open", "gate")
    for head in found.heads:
        opened, value = (head.statistics[name].value for name in found.statistics)
        if (head.layer, head.head) in KEPT:
            assert opened > 0.8, head.name
            assert value > 0.8, head.name
        else:
            assert opened < 0.2, head.name
            assert value == 0.0, head.name
        assert math.isnan(head.statistics["open"].sem)
        assert head.statistics["open"].n == 1
    assert set(found.ranking()[:3]) == KEPT
    assert found.metadata["measured"]["sequences"] == 5


def test_gates_stay_open_without_sparsity():
    found = learned(sparsity=0.0)
    assert all(head.statistics["open"].value > 0.9 for head in found.heads)


def test_gates_depend_on_the_seed_and_several_seeds_have_an_error():
    state = torch.get_rng_state()
    first, again, other = (learned(epochs=3, seeds=seed) for seed in (0, 0, 1))
    assert repr(first.rows) == repr(again.rows)
    assert repr(first.rows) != repr(other.rows)
    assert torch.equal(torch.get_rng_state(), state)
    both = learned(epochs=3, seeds=[0, 1])
    for one, two, head in zip(first.heads, other.heads, both.heads, strict=True):
        values = [each.statistics["open"].value for each in (one, two)]
        assert head.statistics["open"] == MeanEstimate.of(values)


# -- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_importance_turns_gradients_on(off):
    with off():
        found = importance(model_of("bert"), data(), wave)
    assert found.heads[0].statistics["gradient"].value > 0


def test_a_run_with_another_method_is_refused(tmp_path):
    importance(model_of("bert"), data(), wave, out=tmp_path)
    with pytest.raises(hw.InputError, match=r"^out: .* another run \(settings.method.name differs\)"):
        importance(model_of("bert"), data(), wave, "square", out=tmp_path)
    assert importance(model_of("bert"), data(), wave, "square", out=tmp_path, force=True).statistics == ("square",)


def test_a_resumed_run_reports_the_completeness_of_all_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "CHECKPOINT_SECONDS", 0.0)
    model, batches = model_of("bert"), data(sizes=(2, 1, 2))

    def stops(model, batch):
        if len(batch["input_ids"]) == 1:
            raise KeyboardInterrupt
        return wave(model, batch)

    stops.__qualname__ = wave.__qualname__
    with pytest.raises(KeyboardInterrupt):
        importance(model, batches, stops, "integrated", out=tmp_path)
    found = importance(model, batches, wave, "integrated", out=tmp_path)
    paths = {head.module for head in found.heads}
    with torch.no_grad():
        costs = [losses_at(model, batch, dict.fromkeys(paths, 0.0)) - wave(model, batch) for batch in batches]
    completeness = found.metadata["measured"]["completeness"]
    assert completeness["effect"] == pytest.approx(float(torch.cat(costs).mean()), rel=1e-6)
    total = sum(head.statistics["integrated"].value for head in found.heads)
    assert completeness["scores"] == pytest.approx(total, rel=1e-9)
    assert completeness == importance(model, batches, wave, "integrated").metadata["measured"]["completeness"]


# -- rankings and agreement -------------------------------------------------------------------------------------------


def table(name, values, sem=0.1):
    rows = [
        HeadRow(
            layer=layer, head=head, kv_head=head, module=f"layers.{layer}", kind="self", statistics={name: measured}
        )
        for (layer, head), measured in {
            place: MeanEstimate(value, sem, 5, 4) for place, value in values.items()
        }.items()
    ]
    return Importance(tuple(rows), {"model": {"name": "m"}})


def test_the_ranking_has_the_most_important_first():
    found = table("square", {(0, 0): 0.2, (0, 1): math.nan, (1, 0): 0.7, (1, 1): -0.3})
    assert found.ranking() == [(1, 0), (0, 0), (1, 1), (0, 1)]


def test_correlations_of_an_agreement():
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    x, y = [1.0, 2.0, 2.0, 5.0], [0.5, 4.0, 1.0, 30.0]
    found = agreement(
        table("square", dict(zip(places, x, strict=True))), table("cost", dict(zip(places, y, strict=True)))
    )
    assert found.names == ("square", "cost")
    assert found.heads == ("0.0", "0.1", "1.0", "1.1")
    of_ranks = torch.corrcoef(torch.tensor([[0.0, 1.5, 1.5, 3.0], [0.0, 2.0, 1.0, 3.0]]))[0, 1]
    assert found.spearman == pytest.approx(float(of_ranks), rel=1e-6)
    assert found.pearson == pytest.approx(float(torch.corrcoef(torch.tensor([x, y]))[0, 1]), rel=1e-6)
    axes = found.plot()
    assert axes.get_title() == f"4 heads, Spearman {found.spearman:.2f}, Pearson {found.pearson:.2f}"
    labels = [label.splitlines()[0] for label in (axes.get_xlabel(), axes.get_ylabel())]
    assert labels == ["square", "cost"]
    points = axes.collections[-1].get_offsets()
    assert (points[:, 0].tolist(), points[:, 1].tolist()) == (x, y)
    assert {text.get_text() for text in axes.texts} == set(found.heads)


def noisy_agreement(heads, noise):
    values = torch.randn(heads, generator=torch.Generator().manual_seed(1)).double()
    predicted = values + noise * torch.randn(heads, generator=torch.Generator().manual_seed(2)).double()
    places = [(number // 6, number % 6) for number in range(heads)]
    return agreement(*(table("effect", dict(zip(places, each.tolist(), strict=True))) for each in (predicted, values)))


@pytest.mark.parametrize("name", ["spearman", "pearson"])
def test_intervals_of_an_agreement_are_those_of_scipy(name):
    stats = pytest.importorskip("scipy.stats")
    found = noisy_agreement(60, 0.8)
    pairs = [[each.value for each in values] for values in (found.predicted, found.measured)]
    function = getattr(stats, name + "r")
    interval = stats.bootstrap(
        pairs,
        lambda x, y: function(x, y).statistic,
        paired=True,
        vectorized=False,
        n_resamples=4000,
        method="percentile",
        confidence_level=0.9,
        random_state=0,
    ).confidence_interval
    low, high = found.interval(name, level=0.9, samples=4000)
    assert (low, high) == pytest.approx(tuple(interval), abs=0.01)
    assert low < getattr(found, name) < high
    assert found.interval(name, level=0.99)[0] < low
    assert found.interval(name) == found.interval(name), "random samples have a fixed seed"


def test_intervals_cover_the_correlation():
    """Of 100 samples from one distribution, about 95 intervals contain its correlation, 1 / sqrt(2)."""
    covered = 0
    for seed in range(100):
        x, noise = torch.randn(2, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).tolist()
        pairs = {(0, head): (value, value + error) for head, (value, error) in enumerate(zip(x, noise, strict=True))}
        both = [table("effect", {head: pair[part] for head, pair in pairs.items()}) for part in (0, 1)]
        low, high = agreement(*both).interval("pearson", samples=500)
        covered += low < 0.5**0.5 < high
    assert 88 <= covered <= 99


def test_intervals_without_a_correlation():
    places = [(0, head) for head in range(3)]
    constant = table("effect", dict.fromkeys(places, 1.0))
    other = table("effect", dict(zip(places, (1.0, 2.0, 3.0), strict=True)))
    assert all(math.isnan(end) for end in agreement(constant, other).interval())


def test_overlap_of_the_largest_effects():
    places = [(0, head) for head in range(5)]
    predicted = table("effect", dict(zip(places, (-9.0, 3.0, 1.0, 5.0, 0.0), strict=True)))
    measured = table("effect", dict(zip(places, (7.0, -8.0, 9.0, 0.0, 1.0), strict=True)))
    found = agreement(predicted, measured)
    assert [found.overlap(top) for top in range(1, 6)] == [0.0, 0.0, 2 / 3, 3 / 4, 1.0]
    from_one = dataclasses.replace(found, no_effect=(1.0, 1.0))  # effects 10 2 0 4 1, and 6 9 8 1 0
    assert [from_one.overlap(top) for top in range(1, 6)] == [0.0, 0.0, 2 / 3, 3 / 4, 1.0]
    shifted = dataclasses.replace(found, no_effect=(-9.0, 7.0))  # effects 0 12 10 14 9, and 0 15 2 7 6
    assert [shifted.overlap(top) for top in range(1, 6)] == [0.0, 1.0, 2 / 3, 1.0, 1.0]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda found, _: found.interval("kendall"), "correlation: expected 'spearman' or 'pearson', got 'kendall'"),
        (lambda found, _: found.interval(level=95), "level: expected a number between 0 and 1, got 95"),
        (lambda found, _: found.interval(samples=0), "samples: expected a whole number of 1 or more, got 0"),
        (lambda found, _: found.overlap(0), "top: expected a whole number of 1 or more, got 0"),
        (lambda found, _: found.overlap(13), "top: expected a whole number from 1 to 12, got 13"),
        (lambda _, a: agreement(5, a), "predicted: expected a table of heads, got int"),
        (lambda _, a: agreement(a, None), "measured: expected a table of heads, got NoneType"),
        (lambda _, a: agreement(a, a, "ab"), "statistics: expected the names of two statistics, got 'ab'"),
        (lambda _, a: agreement(a, a, ("c", "a")), "statistic: expected one of a, got 'c'"),
        (lambda _, a: agreement(a, table("b", {(0, 1): 3.0})), "predicted: expected heads that were measured too, got"),
        (lambda _, a: agreement(table("a", {}), a), "predicted: expected tables of heads, got an empty one"),
    ],
)
def test_what_an_agreement_refuses(call, sentence):
    with pytest.raises(hw.InputError) as refused:
        call(noisy_agreement(12, 0.5), table("a", {(0, 0): 1.0}))
    assert str(refused.value).startswith(sentence)


def test_agreement_has_the_heads_of_both_tables():
    few = agreement(table("a", {(0, 0): 1.0, (0, 1): 2.0, (0, 2): math.nan}), table("b", {(0, 1): 3.0, (0, 2): 1.0}))
    assert few.heads == ("0.1",)
    assert math.isnan(few.pearson)


def test_agreement_uses_the_first_order_prediction_by_default():
    model = tiny.model("decoder").double()
    batches = [{"input_ids": IDS}]
    found = agreement(importance(model, batches, wave), importance(model, batches, wave, "ablation"))
    assert found.names == ("first_order", "ablation")
    assert found.heads == tuple(f"{layer}.{head}" for layer in range(2) for head in range(6))


# -- refusals ---------------------------------------------------------------------------------------------------------


def one(model, batch):
    return wave(model, batch).mean()


def detached(model, batch):
    return wave(model, batch).detach()


def infinite(model, batch):
    return (wave(model, batch) * 0.0).sqrt()


def elsewhere(model, batch):
    return torch.zeros(5, requires_grad=True)


class Towers(nn.Module):
    """A model that attends without gradients."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale = Plain(), nn.Parameter(torch.ones(()))

    def forward(self, input_ids):
        with torch.no_grad():
            return self.inner(input_ids)


@pytest.mark.parametrize(
    ("sentence", "arguments"),
    [
        ("^model: expected a torch module, got str", {"model": "bert"}),
        ("^method: expected one of gradient, square, .*, got 'gradients'", {"method": "gradients"}),
        ("^steps: expected no option with method='gradient', got 3", {"steps": 3}),
        (
            "^sparsity: expected steps or most_steps with method='integrated', got 1",
            {"method": "integrated", "sparsity": 1},
        ),
        ("^steps: expected a whole number of 1 or more, got 0", {"method": "integrated", "steps": 0}),
        ("^sparsity: expected a number of 0 or more, got -1", {"method": "hard_concrete", "sparsity": -1}),
        ("^epochs: expected a whole number of 1 or more", {"method": "hard_concrete", "epochs": 0}),
        ("^learning_rate: expected a finite number above 0", {"method": "hard_concrete", "learning_rate": 0.0}),
        ("^temperature: expected a finite number above 0", {"method": "hard_concrete", "temperature": 0}),
        ("^seeds: expected at least one, got none", {"method": "hard_concrete", "seeds": []}),
        ("^seeds: expected a whole number of 0 or more, got 'a'", {"method": "hard_concrete", "seeds": "a"}),
        ("^normalise: expected True or False, got 1", {"normalise": 1}),
        ("^normalise: expected False for statistics that are prob", {"method": "hard_concrete", "normalise": True}),
        ("^loss: expected a function of model and batch, such as .*, got 'nll'", {"loss": "nll"}),
        (
            r"^loss: expected one number per example, .* shape \(5,\), got torch.float\d+ of shape \(\)",
            {"loss": one},
        ),
        ("^loss: expected one number per example, .*, got float", {"loss": lambda model, batch: 1.0}),
        ("^loss: expected one that records gradients, got a tensor without; use method=", {"loss": detached}),
        ("^loss: expected one whose derivatives are finite, got .* in encoder.layer.0", {"loss": infinite}),
        ("^loss: expected one that calls the model", {"loss": elsewhere}),
        ("^loss: expected one with a slope at the unchanged model, got Embedding", {"loss": EmbeddingDistance()}),
        ("^dataset: expected at least one batch, got none", {"dataset": []}),
        ("^dataset: expected at least one batch in every pass", {"dataset": [], "method": "hard_concrete"}),
        ("got an iterator, which can be read once; a list", {"dataset": iter(data()), "method": "hard_concrete"}),
        ("^dataset: expected batches: tensors, or mappings", {"dataset": [3]}),
        ("^model: expected attention in a way that can be seen, got none in Embedding", {"model": nn.Embedding(97, 3)}),
        ("^model: expected one that records gradients, got none in inner.first; use method=", {"model": Towers()}),
    ],
)
def test_importance_arguments_that_are_refused(sentence, arguments):
    def loss(model, batch):
        return (
            model(batch["input_ids"]).mean((1, 2)) if isinstance(model, nn.Embedding | Towers) else wave(model, batch)
        )

    given = {"model": model_of("bert"), "dataset": data(), "loss": loss} | arguments
    with pytest.raises(hw.InputError, match=sentence):
        importance(given.pop("model"), given.pop("dataset"), given.pop("loss"), **given)
