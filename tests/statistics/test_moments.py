"""Means of values that are not independent, and their standard errors clustered by document."""

import math
import random

import pytest
import torch

import headwise as hw
import tiny
from headwise.data.batches import NumberedBatches
from headwise.runs.rows import MeanEstimate, moment_estimates
from headwise.runs.significance import zero_tests
from headwise.statistics import moments
from headwise.statistics.moments import RunningLargest, RunningMoments, clusters_of
from jackknife import jackknife

STATISTICS = ("entropy", "distance", "induction")


def corpus():
    """Texts of documents that are cut into 1 to 4 sequences of different lengths."""
    documents = tiny.texts(5, 30, 12, 41, 26, 3, 18)
    return hw.Texts(documents, tiny.tokenizer("decoder"), documents="cut", context=12, batch=3)


@pytest.mark.parametrize("parts", [1, 4])
def test_standard_errors_are_clustered_by_document(parts):
    generator = torch.Generator().manual_seed(3)
    documents = [random.Random(5).choice(range(9)) for _ in range(3)] + [3, 3, 3, 8, 8, 11, 12, 13, 13, 2, 5, 5]
    effects = torch.randn(20, 4, generator=generator, dtype=torch.float64)[torch.tensor(documents)]
    values = effects + 0.3 * torch.randn(len(documents), 4, generator=generator, dtype=torch.float64)
    values[2, 1], values[3:6, 2], values[1:, 3] = math.nan, math.nan, math.nan
    clusters = clusters_of(documents)
    pieces = zip(values.tensor_split(parts), clusters.tensor_split(parts), strict=True)
    of_pieces = [RunningMoments.from_values(own, None, numbers) for own, numbers in pieces]
    total = of_pieces[0]
    for other in of_pieces[1:]:
        total = total.merge(other)
    for head, estimate in enumerate(moment_estimates(total)):
        expected = jackknife(values[:, head], documents)
        assert estimate == pytest.approx(expected, rel=1e-12, nan_ok=True)
        assert MeanEstimate.of(values[:, head].tolist(), documents) == pytest.approx(expected, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("correlation", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("sizes", [[3] * 8, [20] + [1] * 6, [1, 2, 4, 8, 16], [10, 10] + [1] * 10, [62, 20, *[1] * 30]])
def test_a_t_test_finds_an_effect_where_there_is_none_as_often_as_stated(sizes, correlation):
    """Values have mean 0 and variance 1; those of one document have the given correlation."""
    generator = torch.Generator().manual_seed(7)
    documents = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    shared = torch.randn(len(sizes), 4000, generator=generator, dtype=torch.float64)[documents]
    own = torch.randn(shared.shape, generator=generator, dtype=torch.float64)
    values = correlation**0.5 * shared + (1 - correlation) ** 0.5 * own
    found = moment_estimates(RunningMoments.from_values(values, None, clusters_of(documents.tolist())))
    p = torch.tensor(zero_tests("mean", found)["mean_p"])
    assert (p < 0.05).double().mean() < 0.0635  # four standard errors of a share of 5 % in 4,000 draws
    assert torch.tensor([each.sem for each in found]).square().mean() > 0.9 * values.mean(0).var()


def test_largest_values_have_a_count_and_no_error():
    values, documents = torch.randn(7, 3, dtype=torch.float64), [0, 0, 1, 2, 2, 3, 4]
    of_all = RunningMoments.from_values(values, None, clusters_of(documents))
    largest = RunningLargest.of_moments(of_all, values, ~values.isnan())
    assert torch.equal(largest.value, values.amax(0))
    assert (largest.count.tolist(), largest.documents.tolist()) == ([7] * 3, [5] * 3)
    assert bool(largest.standard_error.isnan().all())
    assert largest.degrees_of_freedom.tolist() == [0] * 3


def test_documents_beyond_the_largest_number_share_clusters(monkeypatch):
    monkeypatch.setattr(moments, "MOST_CLUSTERS", 4)
    documents = [number // 3 for number in range(30)] + [77]
    values = torch.randn(31, 1, dtype=torch.float64)
    (estimate,) = moment_estimates(RunningMoments.from_values(values, None, clusters_of(documents)))
    shared = [document % 4 if document < 77 else document for document in documents]
    assert estimate == pytest.approx(jackknife(values[:, 0], shared), rel=1e-12)


def test_sequences_of_documents_of_their_own_are_alone_in_their_clusters(monkeypatch):
    assert clusters_of([4, 7, 2]).tolist() == [-1, -2, -3]
    found = clusters_of([3, 7, 4, 4])
    assert found.tolist() == [-2, -3, 0, 0]
    assert moments.with_several_values(found).tolist() == [1, 2, 0, 0]
    monkeypatch.setattr(moments, "MOST_CLUSTERS", 4)
    assert moments.separate_clusters(range(2, 7)).tolist() == [-3, -4, -1, -2, -3]


class Shared(torch.nn.Module):
    """A model that calls one attention module several times."""

    def __init__(self, times):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.attention = torch.nn.Embedding(97, 12), hw.MultiHeadAttention(12, 3)
        tiny.with_distinct_heads(self)
        self.times = times

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for _ in range(self.times):
            x = torch.tanh(x + self.attention(x))
        return x


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("documents", [None, [0, 1, 2, 3, 4], [5, 3, 5, 5, 1]])
def test_values_of_several_calls_of_a_module_belong_to_one_document(times, documents):
    model, ids = Shared(times), torch.randint(5, 97, (5, 7), generator=torch.Generator().manual_seed(2))
    batches = [{"input_ids": ids[:2]}, {"input_ids": ids[2:]}]
    data = batches if documents is None else NumberedBatches(batches, documents)
    profile = hw.profile(model, data, repeats=ids)
    alone = [hw.profile(model, [{"input_ids": row[None]}]).heads for row in ids]
    for index, head in enumerate(profile.heads):
        for name in ("entropy", "distance", "duplicate"):
            values = [heads[index].statistics[name].value for heads in alone]
            assert head.statistics[name] == pytest.approx(jackknife(values, documents), rel=1e-6, nan_ok=True)
        assert head.statistics["duplicate_random"] == pytest.approx(jackknife(values), rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("times", [1, 3])
def test_values_of_several_calls_of_a_watched_module_count_once(times):
    model, ids = Shared(times), torch.randint(5, 97, (5, 7), generator=torch.Generator().manual_seed(2))
    with hw.watch(model) as heads, torch.no_grad():
        model(ids[:2])
        model(ids[2:])
    alone = [hw.profile(model, [{"input_ids": row[None]}], repeats=False).heads for row in ids]
    columns = heads.columns()
    row = [statistic.name for statistic in columns.statistics].index("entropy")
    for head in range(3):
        expected = jackknife([heads[head].statistics["entropy"].value for heads in alone])
        estimates = columns.estimates
        found = [float(part[row, head]) for part in (estimates.means, estimates.errors, estimates.counts)]
        assert found == pytest.approx(expected[:3], rel=1e-6)
    assert repr(heads).endswith("over 5 sequences)")


class InParts(Shared):
    """A model whose attention module attends to some sequences of each batch at a time.

    Args:
        parts: function from the number of sequences to the slices of the batch to which the module attends.
    """

    def __init__(self, parts):
        super().__init__(1)
        self.parts = parts

    def forward(self, input_ids):
        x = self.embed(input_ids)
        return torch.cat([self.attention(x[part]) for part in self.parts(len(x))])


PARTS = {
    "all, then some": lambda n: [slice(0, n), slice(0, 2)],
    "some, then all": lambda n: [slice(0, 2), slice(0, n)],
    "some twice": lambda n: [slice(0, 2), slice(1, 3)],
    "some twice in the last batch": lambda n: [slice(0, n)] if n == 4 else [slice(0, 2), slice(1, 3)],
}
BATCHES = torch.randint(5, 97, (7, 7), generator=torch.Generator().manual_seed(2)).split((4, 3))


@pytest.mark.parametrize("parts", PARTS)
def test_several_calls_with_some_of_the_sequences_have_unknown_documents(parts):
    model = InParts(PARTS[parts])
    with pytest.warns(UserWarning, match=r"their documents are unknown, and .* are NaN: attention$"):
        profile = hw.profile(model, [{"input_ids": ids} for ids in BATCHES], repeats=False)
    for head in profile.heads:
        values = [of_sequence(model, ids[part], head.head) for ids in BATCHES for part in PARTS[parts](len(ids))]
        entropy = head.statistics["entropy"]
        assert entropy.value == pytest.approx(float(torch.cat(values).mean()), rel=1e-6)
        assert math.isnan(entropy.sem)
        assert entropy.df == 0


@pytest.mark.parametrize("parts", ["all, then some", "some, then all"])
def test_several_calls_with_other_numbers_of_sequences_have_no_standard_errors_in_watch(parts):
    model = InParts(PARTS[parts])
    with (
        pytest.warns(UserWarning, match=r"have different numbers of sequences, so .* are NaN: attention$"),
        hw.watch(model) as heads,
        torch.no_grad(),
    ):
        model(BATCHES[0])
    moments_of_entropy = heads.records[0].statistics["entropy"]
    assert bool(moments_of_entropy.standard_error.isnan().all())
    assert bool(moments_of_entropy.value.isfinite().all())


def test_one_call_with_some_of_the_sequences_has_independent_values():
    model = InParts(lambda n: [slice(1, n)])
    with pytest.warns(UserWarning, match="unknown which tokens the queries of these modules stand for.*: attention$"):
        profile = hw.profile(model, [{"input_ids": ids} for ids in BATCHES], repeats=False)
    assert all("duplicate" not in head.statistics for head in profile.heads)
    for head in profile.heads:
        values = torch.cat([of_sequence(model, ids[1:], head.head) for ids in BATCHES])
        assert head.statistics["entropy"] == pytest.approx(jackknife(values.tolist()), rel=1e-4)


@torch.no_grad()
def of_sequence(model, ids, head):
    """Return the mean entropy of a head's attention weights for each sequence."""
    weights = model.attention(model.embed(ids), return_weights=True)[1][:, head].double()
    return -torch.special.xlogy(weights, weights).sum(-1).mean(-1)


def test_profiles_have_standard_errors_clustered_by_document():
    texts, model = corpus(), tiny.model("decoder")
    profile = hw.profile(model, texts, repeats=False)
    documents, rows = texts.document_numbers(), []
    assert len(set(documents)) == 7 < len(documents)
    for batch in texts:
        for sequence in batch["input_ids"]:
            rows.append(hw.profile(model, [{"input_ids": sequence[None]}], repeats=False, special=[]).heads)
    for index, head in enumerate(profile.heads):
        for name in STATISTICS:
            values = [heads[index].statistics[name].value for heads in rows]
            assert head.statistics[name] == pytest.approx(jackknife(values, documents), rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("method", [pytest.param("ablation", marks=pytest.mark.slow), "gradient"])
def test_effects_have_standard_errors_clustered_by_document(method):
    texts, model = corpus(), tiny.model("decoder", top="ForCausalLM")
    documents = texts.document_numbers()
    parts = [{"input_ids": row[None]} for batch in texts for row in batch["input_ids"]]

    def measure(data):
        if method == "ablation":
            return hw.ablate(model, data, hw.next_token_loss, units={"one": [(0, 3)], "other": [(1, 2)]}).rows
        return hw.importance(model, data, hw.next_token_loss).heads

    name = "cost" if method == "ablation" else "gradient"
    alone = [measure([part]) for part in parts if part["input_ids"].shape[1] > 1]
    documents = [each for each, part in zip(documents, parts, strict=True) if part["input_ids"].shape[1] > 1]
    for index, head in enumerate(measure(texts)):
        values = [heads[index].statistics[name].value for heads in alone]
        assert head.statistics[name] == pytest.approx(jackknife(values, documents), rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("documents", ["whole", "cut", None])
def test_modules_whose_sequences_have_unknown_documents_are_named(documents):
    class Halves(torch.nn.Module):
        """Attention within each half of a sequence: its calls have twice as many sequences as the data."""

        def __init__(self):
            super().__init__()
            self.inner = tiny.model("decoder")
            self.get_input_embeddings = self.inner.get_input_embeddings

        def forward(self, input_ids, attention_mask=None):
            return self.inner(input_ids.view(2 * len(input_ids), -1))

    model = Halves()
    model.config = model.inner.config
    context = 12 if documents == "cut" else 36
    even = hw.Texts(tiny.texts(36, 24, 12), tiny.tokenizer("decoder"), documents=documents or "whole", context=context)
    even = even if documents else list(even)
    with pytest.warns(UserWarning, match="standard errors of their heads are NaN: inner.layers.0.self_attn"):
        profile = hw.profile(model, even, repeats=False)
    assert all(math.isnan(head.statistics["entropy"].sem) for head in profile.heads)
    assert all(math.isfinite(head.statistics["entropy"].value) for head in profile.heads)
