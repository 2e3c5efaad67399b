"""Statistics of attention weights against their definitions, computed entry by entry by an oracle."""

import math

import pytest
import torch

import headwise as hw
from headwise.attention.backends.blockwise import tiles
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.gpu import statistics as gpu
from headwise.attention.backends.native.library import why_not_loaded
from headwise.attention.masks import key_ranges
from headwise.attention.masks.grid import Grid
from headwise.attention.problem import Problem
from headwise.statistics import kernel_statistics, row_blocks
from headwise.statistics.attend_observed import WholeCall, attend_observed
from headwise.statistics.registry import STATISTICS, FromSums, MeanOfRows
from headwise.statistics.row_blocks import row_blocks_of_problem
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
    """Return a random attention problem with this mask, number of queries and number of key/value heads."""
    q = 2 * torch.randn(BATCH, HEADS, queries, 11)
    k, v = 2 * torch.randn(BATCH, kv_heads, KEYS, 11), torch.randn(BATCH, kv_heads, KEYS, 13)
    return Problem.checked(q, k, v, mask=mask, **options)


def from_weight_rows(attention_problem: Problem, context: CallContext | None = None, gram=None) -> Tally:
    """Return the statistics computed from blocks of complete rows of weights, as in eager attention."""
    tally = Tally(gram)
    for row_block in row_blocks_of_problem(attention_problem, context):
        tally.add(row_block)
    return tally


def during_attention(attention_problem: Problem, context: CallContext | None = None, gram=None) -> Tally:
    """Return the statistics computed in the pass that computes the attention output."""
    tally = Tally(gram)
    attend_observed(attention_problem, tally.add, context)
    return tally


def left_to_blocks(row_block):
    """Observer of calls whose statistics kernels compute."""
    raise AssertionError("the kernels left the call to row blocks")


def in_kernels(attention_problem: Problem, context: CallContext | None, gram) -> Tally:
    """Return the statistics that kernels compute."""
    context, tally = context or CallContext(), Tally(gram)
    reason = kernel_statistics.why_not(attention_problem, context)
    if reason:
        pytest.skip(reason)
    attend_observed(attention_problem, left_to_blocks, context, whole_call=WholeCall(tally))
    return tally


def in_native_kernels(attention_problem: Problem, context: CallContext | None = None, gram=None) -> Tally:
    """Return the statistics that the native kernels compute with the attention output."""
    if why_not_loaded():
        pytest.skip(why_not_loaded())
    return in_kernels(attention_problem, context, gram)


def in_triton_kernels(attention_problem: Problem, context: CallContext | None = None, gram=None) -> Tally:
    """Return the statistics that the Triton kernels compute, as on a GPU, in Triton's interpreter."""
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_statistics, "is_on_gpu", lambda problem: True)
        return in_kernels(attention_problem, context, gram)


WAYS = pytest.mark.parametrize(
    "way", [from_weight_rows, during_attention, in_native_kernels, in_triton_kernels], ids=lambda way: way.__name__
)


NATIVE = pytest.mark.skipif(why_not_loaded() is not None, reason=str(why_not_loaded()))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Use blocks of few rows, columns and heads, so that a small problem has many blocks."""
    monkeypatch.setattr(tiles, "rows_of", lambda *_: 7)
    monkeypatch.setattr(tiles, "COLUMNS", 4)
    monkeypatch.setattr(tiles, "TILE_BYTES", 2**10)
    monkeypatch.setattr(row_blocks, "ROW_BLOCK_BYTES", 4 * 4 * BATCH * HEADS * KEYS)  # 4 rows
    monkeypatch.setattr(kernel_statistics, "ROWS_AT_ONCE", 5 * BATCH * HEADS)
    monkeypatch.setattr(gpu, "OUTPUTS_AT_ONCE", 3 * BATCH * HEADS * 13)


def exact(attention_problem: Problem):
    """Return the result of plain attention in float64 for a problem."""
    allowed = None if attention_problem.mask is None else attention_problem.mask.block(attention_problem.grid)
    tensors = (attention_problem.q.double(), attention_problem.k.double(), attention_problem.v.double())
    bias = None if attention_problem.bias is None else attention_problem.bias.double()
    sinks = None if attention_problem.sinks is None else attention_problem.sinks[:, 0].double()
    scale = (
        attention_problem.scale[:, 0, 0]
        if isinstance(attention_problem.scale, torch.Tensor)
        else attention_problem.scale
    )
    return plain_attention(*tensors, allowed, bias, scale, attention_problem.softcap, sinks)


def require_equal(tally: Tally, attention_problem: Problem, context: CallContext | None = None, first=(0, 0)) -> None:
    """Check every statistic of every sequence and head against the oracle; `first` are the first real keys."""
    context, oracle, means = context or CallContext(), exact(attention_problem), tally.means()
    gram = [None] * HEADS if tally.gram is None else [torch.linalg.cholesky(matrix) for matrix in tally.gram.double()]
    for b in range(BATCH):
        weights = oracle.weights[b].clone()
        if context.real_queries is not None:
            weights[:, ~context.real_queries[b]] = 0.0  # the oracle leaves out a row without weights
        tokens, special = (
            None if values is None else values[b].tolist() for values in (context.token_ids, context.is_special)
        )
        is_of_keys = context.real_keys is not None
        real = context.real_keys[b].tolist() if is_of_keys else None
        for h in range(HEADS):
            out = oracle.out[b, h] if "output_norm" in means else None
            projection = None if out is None else gram[h]
            uncapped = None if attention_problem.softcap is None else oracle.uncapped[b, h]
            scores = oracle.scores[b, h], uncapped
            expected = statistics_of(weights[h], tokens, special, out, projection, first[b], real, *scores)
            for name, mean in means.items():
                if name in expected:
                    assert mean[b, h].item() == pytest.approx(expected[name], rel=2e-5, abs=2e-6), name
                else:
                    assert math.isnan(mean[b, h]), name
            assert expected.keys() <= means.keys()


def every_statistic_cases() -> list:
    """Return each combination of a mask, a shape and a way, of which Triton's slow interpreter has a third by default:
    each mask and each shape.
    """
    cases = []
    for way in WAYS.args[1]:
        for number, mask in enumerate(MASKS):
            for place, (queries, kv_heads) in enumerate(((QUERIES, 1), (23, HEADS), (1, 1))):
                is_slow = way is in_triton_kernels and (number + place) % 3
                marks = pytest.mark.slow if is_slow else ()
                name = f"{mask}-{queries}-{kv_heads}-{way.__name__}"
                cases.append(pytest.param(mask, queries, kv_heads, way, marks=marks, id=name))
    return cases


@pytest.mark.parametrize(("mask", "queries", "kv_heads", "way"), every_statistic_cases())
def test_every_statistic_equals_its_definition(mask, queries, kv_heads, way):
    attention_problem = problem(MASKS[mask], queries=queries, kv_heads=kv_heads)
    projection = torch.randn(HEADS, 13, 13, generator=torch.Generator().manual_seed(3))
    context = CallContext(TOKENS, SPECIAL)
    tally = way(attention_problem, context, projection @ projection.mT)
    names = STATISTICS.keys() - {"max_logit_uncapped"}
    names -= {"output_norm", "written_norm"} if way is from_weight_rows else set()
    assert tally.means().keys() == names
    require_equal(tally, attention_problem, context)


@WAYS
def test_confidence_without_special_tokens(way):
    """The weights of the last row are 0.5, 0.3 and 0.2; the key with 0.5 is special. The first row sees it alone."""
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.9, 0.1, 0.0], [0.5, 0.3, 0.2]])
    zeros = torch.zeros(1, 1, 3, 4)
    attention_problem = Problem.checked(zeros, zeros, zeros, mask=hw.causal(), bias=weights.log().clamp(min=-50.0))
    means = way(attention_problem, CallContext(None, torch.tensor([[True, False, False]]))).means()
    assert means["confidence"].item() == pytest.approx((1.0 + 0.9 + 0.5) / 3, rel=1e-5)
    assert means["confidence_content"].item() == pytest.approx((0.0 + 0.1 + 0.3) / 3, rel=1e-5)
    means = way(attention_problem, CallContext(None, torch.zeros(1, 3, dtype=torch.bool))).means()
    assert means["confidence_content"].item() == means["confidence"].item()


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
def test_statistics_are_those_of_weights_with_all_options(options, way):
    attention_problem = problem(**OPTIONS[options])
    require_equal(way(attention_problem, CallContext(TOKENS)), attention_problem, CallContext(TOKENS))


def test_merged_tallies_equal_one_tally():
    attention_problem = problem(MASKS["left padding"])
    complete = from_weight_rows(attention_problem, CallContext(TOKENS)).means()
    parts = list(row_blocks_of_problem(attention_problem, CallContext(TOKENS)))
    assert [part.rows for part in parts] == [range(0, 4), range(4, 8), range(8, 12), range(12, 16), range(16, 17)]
    merged = Tally()
    for subset in (parts[:1], parts[1:]):
        tally = Tally()
        for rows in subset:
            tally.add(rows)
        merged.merge(tally)
    for name, mean in merged.means().items():
        torch.testing.assert_close(mean, complete[name], equal_nan=True)


def test_observation_does_not_change_the_output():
    for options in OPTIONS.values():
        attention_problem = problem(**options)
        observed = []
        answer = attend_observed(
            attention_problem, lambda rows, observed=observed: observed.append((rows.sequences_and_heads, rows.rows))
        )
        assert distance(answer.out, exact(attention_problem).out) < 1e-5
        assert len(observed) == len(set(map(str, observed))) > 1


def test_observed_weights_include_the_mixing_of_talking_heads():
    talking = (torch.randn(HEADS, HEADS), torch.rand(HEADS, HEADS))
    attention_problem = Problem.checked(*(torch.randn(BATCH, HEADS, 17, 11) for _ in range(3)), talking_heads=talking)
    weights = []
    answer = attend_observed(attention_problem, lambda rows: weights.append(rows.weights))
    oracle = plain_attention(attention_problem.q, attention_problem.k, attention_problem.v, talking=talking)
    assert distance(answer.out, oracle.out) < 1e-5
    assert distance(torch.cat(weights, 2), oracle.weights) < 1e-5


@WAYS
def test_statistics_use_the_positions_of_queries_and_keys(way):
    """Keys in another order, with their positions, have the statistics of the keys in order."""
    q, k, v = (torch.randn(BATCH, HEADS, n, 11) for n in (5, 19, 19))
    keys = torch.randperm(19)
    positions = {"query_positions": torch.arange(14, 19), "key_positions": keys}
    shuffled = Problem.checked(q, k, v, mask=hw.causal(), **positions)
    order = keys.argsort()
    plain = Problem.checked(q, k[:, :, order], v[:, :, order], mask=hw.causal())
    shuffled_means, plain_means = way(shuffled).means(), way(plain).means()
    for name in ("entropy", "confidence", "distance", "self", "previous", "next", "first", "received"):
        torch.testing.assert_close(shuffled_means[name], plain_means[name], rtol=1e-5, atol=1e-6)


def test_without_token_ids_the_token_statistics_are_left_out():
    missing = {"special", "confidence_content", "duplicate", "induction", "written_norm", "max_logit_uncapped"}
    assert STATISTICS.keys() - during_attention(problem()).means().keys() == missing


@WAYS
def test_a_statistic_can_be_added_to_the_registry(way, monkeypatch):
    """The two examples merge blocks by a mean and by a maximum: the weight of the last key, and the largest weight."""

    def last(rows):
        return rows.weighted_sums((rows.visibility.key_indices == KEYS - 1)[None, :, None].float())[..., 0]

    def peak(rows):
        return (rows.largest_weight.amax(-1),)

    monkeypatch.setitem(STATISTICS, "last", MeanOfRows("last", "share", "", "", last))
    added = FromSums("peak", "share", "", "", peak, lambda peak: peak, torch.maximum)
    monkeypatch.setitem(STATISTICS, "peak", added)
    attention_problem = problem()
    means, weights = way(attention_problem).means(), exact(attention_problem).weights
    torch.testing.assert_close(means["last"], weights[..., -1].mean(-1), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(means["peak"].double(), weights.amax((-1, -2)), rtol=1e-5, atol=1e-7)


@WAYS
def test_padding_queries_do_not_count(way):
    attention_problem = problem(MASKS["right padding"])
    context = CallContext(TOKENS, real_queries=torch.arange(QUERIES) < torch.tensor([[7], [17]]))
    require_equal(way(attention_problem, context), attention_problem, context)


@WAYS
def test_the_first_token_is_the_first_after_the_padding(way):
    attention_problem = problem(hw.causal() & hw.padding([5, 19], side="left"), queries=KEYS)
    real = torch.arange(KEYS) >= torch.tensor([[14], [0]])
    context = CallContext(TOKENS, real_queries=real, real_keys=real)
    require_equal(way(attention_problem, context), attention_problem, context, first=(14, 0))


DOCUMENTS = torch.tensor([[0] * 6 + [1] * 9 + [2] * 4, [0] * 11 + [1] * 8])
STARTS = torch.tensor([[0] * 6 + [6] * 9 + [15] * 4, [0] * 11 + [11] * 8])
SLOTS = torch.arange(KEYS).masked_fill(torch.arange(KEYS) >= 15, -1)
SHIFTED = torch.stack([torch.arange(KEYS) - 4, torch.arange(KEYS)]).clamp(min=-1)


def placed(context: CallContext, queries: int = KEYS, mask=None, **options) -> tuple[Problem, CallContext]:
    """Return a problem with positions or documents of its own, and its call context."""
    return problem(hw.causal() if mask is None else mask, queries, **options), context


PLACED = {
    "documents": lambda: placed(CallContext(TOKENS, first_keys=STARTS), mask=hw.causal() & hw.segments(DOCUMENTS)),
    "empty slots": lambda: placed(
        CallContext(TOKENS, SPECIAL), 5, query_positions=torch.arange(10, 15), key_positions=SLOTS
    ),
    "padding first": lambda: placed(
        CallContext(TOKENS, SPECIAL), query_positions=SHIFTED, key_positions=SHIFTED, mask=hw.window(6, ahead=2)
    ),
    "positions of the context": lambda: placed(
        CallContext(
            TOKENS,
            SPECIAL,
            positions=Grid(
                *(BATCH, HEADS, 3, KEYS), query_positions=torch.tensor([[12, 13, 14]]), key_positions=SLOTS[None]
            ),
        ),
        3,
        mask=hw.prefix(15),
    ),
    "fewer positions than keys": lambda: placed(
        CallContext(TOKENS, SPECIAL, positions=Grid(BATCH, HEADS, 3, 9)), 3, mask=hw.prefix(9)
    ),
    "functions": lambda: placed(
        CallContext(TOKENS, SPECIAL), mask=hw.window(7) & hw.mask_rule(lambda b, h, q, k: (q + k + h) % 3 > 0)
    ),
}


@pytest.mark.parametrize("name", PLACED)
def test_kernels_have_the_statistics_of_row_blocks(name, monkeypatch):
    """Statistics of packed documents, of explicit positions, and of masks that are computed in parts."""
    for constant, limit in {"MATRIX_ELEMENTS": 60, "PIECE_ELEMENTS": 16, "ROW_STEP": 4, "COLUMN_STEP": 2}.items():
        monkeypatch.setattr(key_ranges, constant, limit)
    attention_problem, context = PLACED[name]()
    means, expected = (
        in_native_kernels(attention_problem, context).means(),
        during_attention(attention_problem, context),
    )
    assert means.keys() == expected.means().keys()
    for statistic, mean in expected.means().items():
        torch.testing.assert_close(means[statistic], mean, rtol=1e-5, atol=1e-6, equal_nan=True, msg=statistic)


@NATIVE
def test_visible_keys_without_a_position_are_left_to_row_blocks():
    attention_problem, context = PLACED["fewer positions than keys"]()
    seen = Problem.checked(attention_problem.q, attention_problem.k, attention_problem.v)
    assert kernel_statistics.why_not(seen, context) is None
    tally = Tally()
    assert kernel_statistics.attend_tallied(seen, context, tally) is None
    assert not tally.means()


@NATIVE
def test_positions_that_do_not_ascend_one_by_one_are_refused():
    positions = {"query_positions": torch.arange(17), "key_positions": torch.arange(KEYS) * 2}
    reason = kernel_statistics.why_not(problem(**positions), CallContext())
    assert reason == "the kernels know positions that ascend one by one"
