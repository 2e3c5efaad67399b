"""Statistics against their definitions, entry by entry."""

import math

import pytest
import torch

import headwise as hw
from headwise.attention.backends.blockwise import plan as block_plan
from headwise.attention.backends.blockwise import tiles
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.problem import Problem
from headwise.statistics import row_blocks
from headwise.statistics.attend_observed import attend_observed
from headwise.statistics.registry import STATISTICS
from headwise.statistics.row_blocks import row_blocks_of_problem
from headwise.statistics.statistic import MeanOfRows, Statistic
from headwise.statistics.tally import Tally
from oracles import distance, plain_attention, statistics_of

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


def problem(mask=None, queries=QUERIES, kv_heads=HEADS, **options) -> Problem:
    q = 2 * torch.randn(BATCH, HEADS, queries, 11)
    k, v = 2 * torch.randn(BATCH, kv_heads, KEYS, 11), torch.randn(BATCH, kv_heads, KEYS, 13)
    return Problem.checked(q, k, v, mask=mask, **options)


def whole_rows(stated: Problem, known: CallContext | None = None, gram=None) -> Tally:
    """From whole rows of every head, some at a time."""
    tally = Tally(gram)
    for row_block in row_blocks_of_problem(stated, known):
        tally.add(row_block)
    return tally


def in_passing(stated: Problem, known: CallContext | None = None, gram=None) -> Tally:
    """From the pass that computes the answer."""
    tally = Tally(gram)
    attend_observed(stated, tally.add, known)
    return tally


WAYS = pytest.mark.parametrize("way", [whole_rows, in_passing], ids=lambda way: way.__name__)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of few rows, columns and heads, so that a small problem has many."""
    monkeypatch.setattr(block_plan, "rows_of", lambda *_: 7)
    monkeypatch.setattr(block_plan, "COLUMNS", 4)
    monkeypatch.setattr(tiles, "TILE_BYTES", 2**10)
    monkeypatch.setattr(row_blocks, "ROW_BLOCK_BYTES", 4 * 4 * BATCH * HEADS * KEYS)  # 4 rows


def exact(stated: Problem):
    allowed = None if stated.mask is None else stated.mask.block(stated.grid)
    tensors = (stated.q.double(), stated.k.double(), stated.v.double())
    bias = None if stated.bias is None else stated.bias.double()
    sinks = None if stated.sinks is None else stated.sinks[:, 0].double()
    scale = stated.scale[:, 0, 0] if isinstance(stated.scale, torch.Tensor) else stated.scale
    return plain_attention(*tensors, allowed, bias, scale, stated.softcap, sinks)


def require_equal(tally: Tally, stated: Problem, known: CallContext | None = None, first=(0, 0)) -> None:
    """Every statistic of every sequence and head is its definition."""
    known, right, means = known or CallContext(), exact(stated), tally.means()
    gram = [None] * HEADS if tally.gram is None else [torch.linalg.cholesky(each) for each in tally.gram.double()]
    for b in range(BATCH):
        weights = right.weights[b].clone()
        if known.is_real is not None:
            weights[:, ~known.is_real[b]] = 0.0  # the oracle leaves out a row without weights
        tokens, special = (None if each is None else each[b].tolist() for each in (known.token_ids, known.is_special))
        is_of_keys = known.is_real is not None and stated.grid.queries == KEYS
        real = known.is_real[b].tolist() if is_of_keys else None
        for h in range(HEADS):
            out = right.out[b, h] if "output_norm" in means else None
            projection = None if out is None else gram[h]
            expected = statistics_of(weights[h], tokens, special, out, projection, first[b], real)
            for name, mean in means.items():
                if name in expected:
                    assert mean[b, h].item() == pytest.approx(expected[name], rel=2e-5, abs=2e-6), name
                else:
                    assert math.isnan(mean[b, h]), name
            assert expected.keys() <= means.keys()


@WAYS
@pytest.mark.parametrize("kv_heads", [HEADS, 1])
@pytest.mark.parametrize("queries", [QUERIES, 23, 1], ids=lambda n: f"{n} queries")
@pytest.mark.parametrize("mask", MASKS)
def test_every_statistic_is_its_definition(mask, queries, kv_heads, way):
    stated = problem(MASKS[mask], queries=queries, kv_heads=kv_heads)
    projection = torch.randn(HEADS, 13, 13, generator=torch.Generator().manual_seed(3))
    known = CallContext(TOKENS, SPECIAL)
    tally = way(stated, known, projection @ projection.mT)
    names = STATISTICS.keys() - ({"output_norm", "written_norm"} if way is whole_rows else set())
    assert tally.means().keys() == names
    require_equal(tally, stated, known)


OPTIONS = {
    "a bias": {"bias": torch.randn(1, HEADS, QUERIES, KEYS)},
    "a bias with holes": {"bias": torch.randn(1, HEADS, QUERIES, KEYS).index_fill(-1, torch.arange(4, 9), -torch.inf)},
    "sinks": {"sinks": torch.tensor([1.0, -2.0, 5.0]), "mask": hw.causal()},
    "a softcap": {"softcap": 3.0},
    "a scale for each head": {"scale": torch.tensor([0.1, 0.5, 1.0])},
    "all": {"softcap": 3.0, "sinks": torch.tensor([1.0, -2.0, 5.0]), "mask": hw.window(5), "scale": 0.7},
}


@WAYS
@pytest.mark.parametrize("options", OPTIONS)
def test_whatever_changes_the_weights_is_honoured(options, way):
    stated = problem(**OPTIONS[options])
    require_equal(way(stated, CallContext(TOKENS)), stated, CallContext(TOKENS))


def test_merged_halves_give_the_whole():
    stated = problem(MASKS["left padding"])
    whole = whole_rows(stated, CallContext(TOKENS)).means()
    parts = list(row_blocks_of_problem(stated, CallContext(TOKENS)))
    assert [part.rows for part in parts] == [range(0, 4), range(4, 8), range(8, 12), range(12, 16), range(16, 17)]
    merged = Tally()
    for some in (parts[:1], parts[1:]):
        tally = Tally()
        for rows in some:
            tally.add(rows)
        merged.merge(tally)
    for name, mean in merged.means().items():
        torch.testing.assert_close(mean, whole[name], equal_nan=True)


def test_the_answer_is_the_one_without_an_observer():
    for options in OPTIONS.values():
        stated = problem(**options)
        shown = []
        answer = attend_observed(stated, lambda rows, shown=shown: shown.append((rows.sequences_and_heads, rows.rows)))
        assert distance(answer.out, exact(stated).out) < 1e-5
        assert len(shown) == len(set(map(str, shown))) > 1


def test_talking_heads_are_shown_after_they_talked():
    talking = (torch.randn(HEADS, HEADS), torch.rand(HEADS, HEADS))
    stated = Problem.checked(*(torch.randn(BATCH, HEADS, 17, 11) for _ in range(3)), talking_heads=talking)
    weights = []
    answer = attend_observed(stated, lambda rows: weights.append(rows.weights))
    right = plain_attention(stated.q, stated.k, stated.v, talking=talking)
    assert distance(answer.out, right.out) < 1e-5
    assert distance(torch.cat(weights, 2), right.weights) < 1e-5


@WAYS
def test_positions_that_a_cache_gives_are_honoured(way):
    """Keys in another order, with room between, give the statistics of the keys in order."""
    q, k, v = (torch.randn(BATCH, HEADS, n, 11) for n in (5, 19, 19))
    keys = torch.randperm(19)
    positions = {"query_positions": torch.arange(14, 19), "key_positions": keys}
    shuffled = Problem.checked(q, k, v, mask=hw.causal(), **positions)
    order = keys.argsort()
    plain = Problem.checked(q, k[:, :, order], v[:, :, order], mask=hw.causal())
    got, wanted = way(shuffled).means(), way(plain).means()
    for name in ("entropy", "confidence", "distance", "self", "previous", "next", "first", "received"):
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-5, atol=1e-6)


def test_without_token_ids_the_token_statistics_are_left_out():
    missing = {"special", "duplicate", "induction", "written_norm"}
    assert STATISTICS.keys() - in_passing(problem()).means().keys() == missing


@WAYS
def test_a_new_statistic_is_one_entry(way, monkeypatch):
    """The mean weight of the last key, and the largest weight of all: contributions that merge in other ways."""

    def last(rows):
        return rows.weighted_sums((rows.visibility.key_indices == KEYS - 1)[None, :, None].float())[..., 0]

    def peak(rows):
        return (rows.largest_weight.amax(-1),)

    monkeypatch.setitem(STATISTICS, "last", MeanOfRows("last", "share", last))
    monkeypatch.setitem(STATISTICS, "peak", Statistic("peak", "share", peak, lambda peak: peak, torch.maximum))
    stated = problem()
    means, weights = way(stated).means(), exact(stated).weights
    torch.testing.assert_close(means["last"], weights[..., -1].mean(-1), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(means["peak"].double(), weights.amax((-1, -2)), rtol=1e-5, atol=1e-7)


@WAYS
def test_query_rows_that_are_padding_do_not_count(way):
    stated = problem(MASKS["right padding"])
    known = CallContext(TOKENS, is_real=torch.arange(QUERIES) < torch.tensor([[7], [17]]))
    require_equal(way(stated, known), stated, known)


@WAYS
def test_the_first_token_is_the_first_that_is_real(way):
    stated = problem(hw.causal() & hw.padding([5, 19], side="left"), queries=KEYS)
    known = CallContext(TOKENS, is_real=torch.arange(KEYS) >= torch.tensor([[14], [0]]))
    require_equal(way(stated, known), stated, known, first=(14, 0))
