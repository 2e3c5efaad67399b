"""The largest logit of each head is the largest score over all calls, or is left out by name."""

import math

import pytest
import torch
from torch import nn

import headwise as hw
import tiny
from headwise.attention.problem import Problem
from headwise.intercept.trace.scores import scores_behind
from oracles import plain_attention

BATCH, HEADS, LENGTH, DIM = 2, 3, 7, 5
UNKNOWN = "the scores behind the attention weights of these modules are unknown"


class Attention(nn.Module):
    """Causal attention by a softmax of its own, after `before_softmax` has changed the scores."""

    def __init__(self, before_softmax):
        super().__init__()
        self.before_softmax = before_softmax
        self.qkv, self.out = nn.Linear(HEADS * DIM, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, HEADS * DIM)

    def project(self, x):
        """Return queries, keys and values with the axes of heads."""
        return self.qkv(x).view(*x.shape[:2], 3, HEADS, DIM).permute(2, 0, 3, 1, 4)

    def forward(self, x):
        q, k, v = self.project(x)
        scores = q @ k.mT / math.sqrt(DIM)
        scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -math.inf)
        weights = self.before_softmax(scores).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def inputs(seed=0):
    """Return random inputs in float64."""
    return torch.randn(BATCH, LENGTH, HEADS * DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def expected(model, *of_calls):
    """Return the largest score of each head over all calls."""
    allowed = torch.ones(LENGTH, LENGTH).tril().bool()
    scores = [plain_attention(*model.project(x), allowed).scores for x in of_calls]
    return torch.cat(scores).amax((0, 2, 3)).tolist()


def shifted(scores):
    """Return scores less the largest of each row."""
    return scores - scores.amax(-1, keepdim=True)


def watched_rows(model, of_calls):
    """Return the statistics over one call for each function that changes the scores."""
    with hw.watch(model) as heads:
        for seed, before_softmax in enumerate(of_calls):
            model.before_softmax = before_softmax
            model(inputs(seed))
    return heads.rows()


def test_the_value_is_the_largest_over_all_sequences_and_calls():
    model = Attention(lambda scores: scores).double()
    rows = watched_rows(model, [lambda scores: scores] * 3)
    assert [row["max_logit"] for row in rows] == pytest.approx(expected(model, *map(inputs, range(3))), rel=1e-12)


def shifted_if_positive(scores):
    """Return scores less the largest of each row, or less 0, as in a softmax with a score of 0 that has no key."""
    return scores - scores.amax(-1, keepdim=True).clamp(min=0)


@pytest.mark.parametrize("shift", [shifted, shifted_if_positive])
def test_scores_that_were_shifted_are_not_reported(shift):
    """A softmax by hand subtracts the largest score of each row; then nothing is known of the logit."""
    model = Attention(shift).double()
    with pytest.warns(UserWarning, match=UNKNOWN):
        rows = watched_rows(model, [shift])
    assert "max_logit" not in rows[0]
    assert rows[0]["entropy"] > 0


def test_logits_of_some_calls_alone_are_not_reported():
    model = Attention(lambda scores: scores).double()
    with pytest.warns(UserWarning, match=UNKNOWN):
        rows = watched_rows(model, [lambda scores: scores, shifted])
    assert "max_logit" not in rows[0]


@pytest.mark.parametrize("name", [name for name, implementation in tiny.FAMILIES if implementation == "sdpa"])
def test_eager_models_have_the_logits_of_their_problems(name):
    """Under "eager" the scores are computed again from the queries and keys, and confirmed by the weights. The eager
    softmax of transformers is in float32, so inputs of later layers differ by its rounding.
    """
    of_ways = []
    for implementation in ("eager", "sdpa"):
        model = tiny.family(name, implementation).double()
        with hw.watch(model) as heads:
            model(tiny.TOKENS)
        of_ways.append([row["max_logit"] for row in heads.rows()])
    assert of_ways[0] == pytest.approx(of_ways[1], rel=1e-5)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("factor", [1, 8, 20])
def test_eager_models_have_large_logits_in_mixed_precision(dtype, factor):
    """The rounding of a large score changes the weights by far more than their own rounding."""
    of_ways = []
    for implementation in ("eager", "sdpa"):
        model = tiny.family("llama", implementation)
        for layer in model.layers:
            layer.self_attn.q_proj.weight.data.mul_(factor)
            layer.self_attn.k_proj.weight.data.mul_(factor)
        with hw.watch(model) as heads, torch.no_grad(), torch.autocast("cpu", dtype):
            model(tiny.TOKENS)
        of_ways.append([row["max_logit"] for row in heads.rows() if row["layer"] == 0])
    assert of_ways[0] == pytest.approx(of_ways[1], rel=4 * torch.finfo(dtype).eps)
    assert max(of_ways[0]) > factor**2


@pytest.mark.parametrize("size", [1, 10, 100, 1000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_other_scores_are_not_confirmed(dtype, size):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, DIM, generator=generator)
    problem = Problem.checked(q * size, k, v, mask=hw.causal())
    scores = (problem.q @ problem.k.mT / math.sqrt(DIM)).masked_fill(torch.ones(LENGTH, LENGTH).triu(1) > 0, -math.inf)
    # A multiple of large scores has the same weights, so it cannot be distinguished.
    for factor, is_confirmed in ((1.0, True), (-1.0, False)):
        weights = (scores.to(dtype) * factor).where(scores > -math.inf, -math.inf).float().softmax(-1).to(dtype)
        found, _ = scores_behind(weights, lambda: problem)
        assert (found is not None) == is_confirmed, factor


def test_a_profile_has_the_largest_logit_without_a_standard_error(tmp_path):
    model, texts = tiny.model("decoder"), hw.Texts(tiny.texts(9, 14, 11), tiny.tokenizer("decoder"), batch=1)
    profile = hw.profile(model, texts, repeats=False, out=tmp_path)
    largest = []
    for batch in texts:
        with hw.watch(model) as heads:
            model(**batch)
        largest.append([row["max_logit"] for row in heads.rows()])
    for head, of_texts in zip(profile.heads, zip(*largest, strict=True), strict=True):
        estimate = head.statistics["max_logit"]
        assert estimate.value == pytest.approx(max(of_texts), rel=1e-6)
        assert math.isnan(estimate.sem)
        assert (estimate.n, estimate.df) == (3, 0)


@pytest.mark.parametrize("softcaps", [(None, 2.0), (2.0, None)], ids=["later", "earlier"])
def test_logits_before_a_softcap_of_some_calls_alone_are_not_reported(softcaps):
    class Capped(Attention):
        softcap = None

        def forward(self, x):
            out = hw.attend(*self.project(x), mask=hw.causal(), softcap=self.softcap)
            return self.out(out.transpose(1, 2).flatten(2))

    model = Capped(None).double()
    with hw.watch(model) as heads:
        for model.softcap in softcaps:
            model(inputs())
    assert "max_logit_uncapped" not in heads.rows()[0]
    assert math.isfinite(heads.rows()[0]["max_logit"])
