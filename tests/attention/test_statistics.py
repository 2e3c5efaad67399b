"""Statistics against their definitions, entry by entry."""

import math

import pytest
import torch

import headwise as hw
from headwise.attention.problem import Problem
from headwise.attention.statistics import STATISTICS, Statistic, Tally, blocks
from oracles import plain_attention, statistics_of

BATCH, HEADS, QUERIES, KEYS = 2, 3, 17, 19
TOKENS = torch.randint(0, 5, (BATCH, KEYS), generator=torch.Generator().manual_seed(1))
SPECIAL = torch.rand(BATCH, KEYS, generator=torch.Generator().manual_seed(2)) < 0.2
MASKS = {
    "none": None,
    "causal": hw.causal(),
    "window": hw.causal() & hw.window(4),
    "left padding": hw.causal() & hw.padding([5, 19], side="left"),
    "right padding": hw.padding([7, 19]),
    "empty rows": hw.padding([0, 3]),
}


def problem(mask=None, bias=None, queries=QUERIES, kv_heads=HEADS) -> Problem:
    q = 2 * torch.randn(BATCH, HEADS, queries, 11)
    k, v = 2 * torch.randn(BATCH, kv_heads, KEYS, 11), torch.randn(BATCH, kv_heads, KEYS, 13)
    return Problem.checked(q, k, v, mask=mask, bias=bias)


def tally_of(parts) -> Tally:
    tally = Tally()
    for rows in parts:
        tally.add(rows)
    return tally


def exact_weights(stated: Problem):
    allowed = None if stated.mask is None else stated.mask.block(stated.grid)
    tensors = (stated.q.double(), stated.k.double(), stated.v.double())
    return plain_attention(*tensors, allowed, stated.bias, stated.scale).weights


@pytest.mark.parametrize("kv_heads", [HEADS, 1])
@pytest.mark.parametrize("queries", [QUERIES, 23, 1], ids=lambda n: f"{n} queries")
@pytest.mark.parametrize("mask", MASKS)
def test_every_statistic_is_its_definition(mask, queries, kv_heads):
    stated = problem(MASKS[mask], queries=queries, kv_heads=kv_heads)
    tally = tally_of(blocks(stated, tokens=TOKENS, special=SPECIAL))
    means = tally.means()
    assert means.keys() == STATISTICS.keys()
    weights = exact_weights(stated)
    for b in range(BATCH):
        for h in range(HEADS):
            expected = statistics_of(weights[b, h], TOKENS[b].tolist(), SPECIAL[b].tolist())
            for name, mean in means.items():
                if name in expected:
                    assert mean[b, h].item() == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
                else:
                    assert math.isnan(mean[b, h]), name


def test_a_bias_and_its_holes_are_honoured():
    bias = torch.randn(1, HEADS, QUERIES, KEYS)
    bias[..., 4:9] = -torch.inf
    stated = problem(bias=bias)
    means = tally_of(blocks(stated, ranges=[range(0, 5), range(5, 17)])).means()
    weights = exact_weights(stated)
    for h in range(HEADS):
        for name, value in statistics_of(weights[1, h]).items():
            assert means[name][1, h].item() == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_blocks_and_merged_halves_give_the_whole():
    stated = problem(MASKS["left padding"])
    whole = tally_of(blocks(stated, tokens=TOKENS)).means()
    ranges = [range(0, 3), range(3, 4), range(4, 17)]
    parts = list(blocks(stated, tokens=TOKENS, ranges=ranges))
    assert [part.index for part in parts] == ranges
    merged = tally_of(parts[:1])
    merged.merge(tally_of(parts[1:]))
    for name, mean in merged.means().items():
        torch.testing.assert_close(mean, whole[name], equal_nan=True)


def test_without_token_ids_the_token_statistics_are_left_out():
    means = tally_of(blocks(problem())).means()
    assert STATISTICS.keys() - means.keys() == {"special", "duplicate", "induction"}


def test_a_new_statistic_is_one_entry(monkeypatch):
    def last(rows):
        return rows.weights[..., -1], torch.ones_like(rows.lse, dtype=torch.bool)

    monkeypatch.setitem(STATISTICS, "last", Statistic("last", "share", last))
    stated = problem()
    mean = tally_of(blocks(stated, ranges=[range(0, 5), range(5, 17)])).means()["last"]
    torch.testing.assert_close(mean, exact_weights(stated)[..., -1].mean(-1), rtol=1e-5, atol=1e-7)


def test_query_rows_that_are_padding_do_not_count():
    stated = problem(MASKS["right padding"])
    real = torch.arange(QUERIES) < torch.tensor([[7], [17]])
    means = tally_of(blocks(stated, tokens=TOKENS, real=real, ranges=[range(0, 6), range(6, 17)])).means()
    weights = exact_weights(stated)
    weights[0, :, 7:] = 0.0  # the oracle leaves out a row without weights
    for name, value in statistics_of(weights[0, 1], TOKENS[0].tolist()).items():
        assert means[name][0, 1].item() == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_a_sink_and_a_softcap_are_honoured():
    q, k = 2 * torch.randn(1, 2, 17, 11), 2 * torch.randn(1, 2, 19, 11)
    sinks = torch.tensor([1.0, -2.0])
    stated = Problem.checked(q, k, k, sinks=sinks, softcap=3.0)
    means = tally_of(blocks(stated)).means()
    wide = (q.double(), k.double(), k.double())
    weights = plain_attention(*wide, softcap=3.0, sinks=sinks.double()).weights
    for h in range(2):
        for name, value in statistics_of(weights[0, h]).items():
            assert means[name][0, h].item() == pytest.approx(value, rel=1e-4, abs=1e-6), name
