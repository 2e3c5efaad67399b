"""Masks as pictures, block by block, and what they say about a block without making it."""

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import headwise as hw
from headwise.attention.masks.grid import Coverage, Grid
from strategies import masks


def drawn(mask: hw.Mask, queries: int, keys: int, batch: int = 1, heads: int = 1) -> list:
    """The mask as a literal: a matrix, or a list of them where sequences or heads differ."""
    block = mask.block(Grid(batch, heads, queries, keys)).int().flatten(0, 1).tolist()
    return block[0] if len(block) == 1 else block


def test_causal_sees_itself_and_the_past():
    assert drawn(hw.causal(), 3, 3) == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_causal_with_cached_keys():
    assert drawn(hw.causal(), 2, 5) == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_causal_with_fewer_keys_than_queries():
    assert drawn(hw.causal(), 3, 2) == [[0, 0], [1, 0], [1, 1]]


def test_window_sees_its_width_in_keys():
    assert drawn(hw.window(2), 4, 4) == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert drawn(hw.window(1), 2, 3) == [[0, 1, 0], [0, 0, 1]]


def test_window_that_looks_ahead_and_one_with_gaps():
    assert drawn(hw.window(1, ahead=1), 3, 3) == [[1, 1, 0], [0, 1, 1], [0, 0, 1]]
    assert drawn(hw.window(2, dilation=2), 4, 4) == [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]


def test_a_window_for_each_head():
    assert drawn(hw.window([1, None]), 2, 2, heads=2) == [[[1, 0], [0, 1]], [[1, 0], [1, 1]]]
    mixed = hw.per_head([hw.causal(), ~hw.causal()])
    assert drawn(mixed, 2, 2, heads=2) == [[[1, 0], [1, 1]], [[0, 1], [0, 0]]]


def test_prefix_is_seen_by_all():
    assert drawn(hw.causal() | hw.prefix(2), 3, 3) == [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    assert drawn(hw.prefix([1, 2]), 1, 2, batch=2) == [[[1, 0]], [[1, 1]]]


def test_sink_tokens_beside_a_window():
    mask = hw.causal() & (hw.window(1) | hw.prefix(1))
    assert drawn(mask, 4, 4) == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]


def test_segments_see_themselves():
    assert drawn(hw.segments([[3, 3, 7]]), 3, 3) == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    assert drawn(hw.segments([0, 0, 1]), 1, 3) == [[0, 0, 1]]  # the last query stands at the last key


def test_chunks_see_themselves():
    assert drawn(hw.chunked(2), 3, 3) == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    assert drawn(hw.chunked(2), 1, 4) == [[0, 0, 1, 1]]


def test_any_rule_of_batch_head_query_and_key():
    rule = hw.mask_rule(lambda batch, head, query, key: (query + key + head) % 2 == 0)
    assert drawn(rule, 1, 3, heads=2) == [[[1, 0, 1]], [[0, 1, 0]]]


def test_padding_on_either_side():
    assert drawn(hw.padding([1, 3]), 1, 3, batch=2) == [[[1, 0, 0]], [[1, 1, 1]]]
    assert drawn(hw.padding([1, 3], side="left"), 1, 3, batch=2) == [[[0, 0, 1]], [[1, 1, 1]]]
    assert drawn(hw.padding(torch.tensor([0])), 2, 2) == [[0, 0], [0, 0]]


def test_dense_is_itself():
    values = torch.tensor([[True, False, True], [False, False, True]])
    assert drawn(hw.dense(values), 2, 3) == [[1, 0, 1], [0, 0, 1]]
    per_head = torch.stack([values, ~values])[None]
    assert drawn(hw.dense(per_head), 2, 3, heads=2) == [[[1, 0, 1], [0, 0, 1]], [[0, 1, 0], [1, 1, 0]]]


def test_combinations():
    assert drawn(hw.causal() & ~hw.window(1), 3, 3) == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]
    assert drawn(hw.window(1) | ~hw.causal(), 3, 3) == [[1, 1, 1], [0, 1, 1], [0, 0, 1]]
    assert drawn(hw.causal() & hw.padding([2]), 3, 3) == [[1, 0, 0], [1, 1, 0], [1, 1, 0]]


def test_a_mask_prints_itself():
    assert str(hw.window(2)) == ("■ · · · · ·\n■ ■ · · · ·\n· ■ ■ · · ·\n· · ■ ■ · ·\n· · · ■ ■ ·\n· · · · ■ ■")
    assert str(hw.padding([1, 2])) == "■ ·\n■ ·\n\n■ ■\n■ ■"
    assert str(hw.dense(torch.tensor([[True, False, True], [True, True, True]])) & hw.causal()) == "■ · ·\n■ ■ ■"
    assert hw.causal().picture(Grid(1, 1, 1, 3)) == "■ ■ ■"


def test_a_mask_is_shown_as_it_is_written():
    values = torch.ones(2, 3, dtype=torch.bool)
    assert repr(hw.causal() & ~hw.window(3)) == "(causal() & ~window(3))"
    assert repr(hw.window([3, None], ahead=1)) == "per_head([window(3, ahead=1), window(None, ahead=1)])"
    assert repr(hw.prefix(2) & hw.chunked(3)) == "(prefix(2) & chunked(3))"
    assert repr(hw.segments([0, 1])) == "segments([[0, 1]])"
    assert repr(hw.padding([1, 2]) | hw.dense(values)) == "(padding([1, 2], side='right') | dense(<1 x 1 x 2 x 3>))"


SIZES = {"batch": 2, "heads": 3, "queries": 11, "keys": 7}


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.data())
def test_any_block_is_that_part_of_the_whole_and_coverage_is_true_of_it(data):
    queries, keys = data.draw(st.sampled_from([(11, 7), (5, 13), (7, 7)]))
    mask, allowed = data.draw(masks(2, 3, queries, keys))
    grid = Grid(2, 3, queries, keys)
    rows = range(*sorted(data.draw(st.lists(st.integers(0, queries), min_size=2, max_size=2, unique=True))))
    columns = range(*sorted(data.draw(st.lists(st.integers(0, keys), min_size=2, max_size=2, unique=True))))
    expected = allowed[..., rows.start : rows.stop, columns.start : columns.stop]
    block = mask.block(grid, rows, columns)
    assert torch.equal(block.expand_as(expected), expected)
    assert torch.equal(mask.block(grid).expand_as(allowed), allowed)
    coverage = mask.coverage(grid, rows, columns)
    if coverage is Coverage.EMPTY:
        assert not expected.any()
    if coverage is Coverage.FULL:
        assert expected.all()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_coverage_is_true_where_tokens_stand_elsewhere_than_they_lie(data):
    queries, keys = 5, 7
    mask, _ = data.draw(masks(2, 3, queries, keys).filter(lambda drawn: "left" not in repr(drawn[0])))
    places = [
        torch.tensor(data.draw(st.lists(st.integers(-1, 12), min_size=2 * size, max_size=2 * size))).view(2, size)
        for size in (queries, keys)
    ]
    grid = Grid(2, 3, queries, keys, torch.device("cpu"), *places)
    rows = range(*sorted(data.draw(st.lists(st.integers(0, queries), min_size=2, max_size=2, unique=True))))
    columns = range(*sorted(data.draw(st.lists(st.integers(0, keys), min_size=2, max_size=2, unique=True))))
    block = mask.block(grid, rows, columns)
    coverage = mask.coverage(grid, rows, columns)
    assert coverage is not Coverage.EMPTY or not block.any()
    assert coverage is not Coverage.FULL or block.all()


@pytest.mark.parametrize(
    "mask", [hw.causal(), hw.window(3), hw.padding([4, 4]), hw.padding([4, 4], side="left")], ids=repr
)
def test_the_coverage_of_a_leaf_is_exact(mask):
    grid = Grid(2, 1, 5, 7)
    for top, left in torch.cartesian_prod(torch.arange(5), torch.arange(7)).tolist():
        for bottom, right in ((top + 1, left + 1), (5, 7), (min(top + 2, 5), min(left + 3, 7))):
            rows, columns = range(top, bottom), range(left, right)
            block = mask.block(grid, rows, columns)
            expected = Coverage.FULL if block.all() else Coverage.PARTIAL if block.any() else Coverage.EMPTY
            assert mask.coverage(grid, rows, columns) is expected


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hw.window(0), r"window\(width\): expected a whole number of 1 or more, got 0"),
        (lambda: hw.window(None), r"window\(width\): expected a whole number of 1 or more, got None"),
        (lambda: hw.window([]), r"window\(width\): expected a number of keys for each head, got none"),
        (lambda: hw.window(2, ahead=-1), r"window\(ahead\): expected a whole number of 0 or more, got -1"),
        (lambda: hw.window(2, dilation=0), r"window\(dilation\): expected a whole number of 1 or more, got 0"),
        (lambda: hw.prefix(-1), r"prefix\(length\): expected a whole number of 0 or more, got -1"),
        (lambda: hw.padding("abc"), r"padding\(lengths\): expected whole numbers, one for each sequence, got 'abc'"),
        (lambda: hw.padding([2**70]), r"padding\(lengths\): expected whole numbers, one for each sequence, got"),
        (lambda: hw.window(True), r"window\(width\): expected a whole number of 1 or more, got True"),
        (lambda: hw.dense([[True]]), r"mask: expected a boolean tensor, .*, got list; make it one with .bool\(\)"),
        (lambda: hw.padding([2]) and hw.causal(), r"mask: expected &, \| and ~ to combine masks, got and, or, not"),
        (lambda: hw.chunked(0), r"chunked\(size\): expected a whole number of 1 or more, got 0"),
        (lambda: hw.segments([0.5]), r"segments\(ids\): expected whole numbers, .*, got torch.float32 of shape"),
        (lambda: hw.per_head([]), r"per_head\(masks\): expected one Mask for each head, got \[\]"),
        (lambda: hw.mask_rule(3), r"mask_rule\(rule\): expected a function .*, got 3"),
        (lambda: hw.window(2.5), r"window\(width\): expected a whole number of 1 or more, got 2.5"),
        (lambda: hw.padding([3, -1]), r"padding\(lengths\): expected lengths of 0 or more, got -1"),
        (
            lambda: hw.padding([[3]]),
            r"padding\(lengths\): expected .*, got torch.int64 of shape \(1, 1\)",
        ),
        (
            lambda: hw.padding([0.5]),
            r"padding\(lengths\): expected .*, got torch.float32 of shape \(1,\)",
        ),
        (lambda: hw.padding([3], side="top"), r"padding\(side\): expected 'right' or 'left', .*, got 'top'"),
        (
            lambda: hw.dense(torch.ones(2, 3)),
            "mask: expected a boolean tensor, .*, got torch.float32; pass it as",
        ),
        (lambda: hw.dense(torch.ones(2, 3, 4, dtype=torch.bool)), r"mask: expected 2 dimensions .*, got 3 dimensions"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(make, message):
    with pytest.raises(hw.InputError, match="^" + message):
        make()


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (hw.window([2, 3]), r"per_head\(masks\): expected one for each of 3 heads, got 2"),
        (
            hw.segments([0, 1]),
            r"segments\(ids\): expected one id for each of 7 keys .*, got shape \(1, 2\)",
        ),
        (hw.mask_rule(lambda b, h, q, k: q + k), r"mask_rule\(rule\): .*, got torch.int64"),
        (
            hw.mask_rule(lambda b, h, q, k: q[:3] > 0),
            r"mask_rule\(rule\): .* broadcasts to \(2, 3, 5, 7\)",
        ),
    ],
    ids=repr,
)
def test_a_mask_that_does_not_fit_is_told_in_one_sentence(mask, message):
    with pytest.raises(hw.InputError, match="^" + message):
        mask.block(Grid(2, 3, 5, 7))


def test_masks_combine_only_with_masks():
    with pytest.raises(TypeError, match="unsupported operand"):
        hw.causal() & torch.ones(2, 2, dtype=torch.bool)


def test_lengths_are_the_masks_own():
    lengths = torch.tensor([4, 4])
    mask = hw.padding(lengths)
    q = torch.randn(2, 3, 4, 5)
    before = hw.attend(q, q, q, mask=mask)
    lengths[:] = 2
    assert torch.equal(hw.attend(q, q, q, mask=mask), before)
    assert not torch.allclose(hw.attend(q, q, q, mask=hw.padding(lengths)), before)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32], ids=str)
def test_short_integers_do_not_wrap(dtype):
    mask = hw.padding(torch.tensor([10], dtype=dtype), side="left")
    assert mask.block(Grid(1, 1, 1, 300)).sum() == 10


@pytest.mark.usefixtures("as_user")
def test_numbers_of_other_libraries_are_numbers():
    assert hw.window(numpy.int64(3)) == hw.window(3)


def test_a_mask_without_values_cannot_be_looked_at():
    mask = hw.dense(torch.ones(5, 7, dtype=torch.bool, device="meta"))
    grid = Grid(1, 1, 5, 7, torch.device("meta"))
    assert mask.coverage(grid, range(5), range(7)) is Coverage.PARTIAL


# -- positions of a cache -------------------------------------------------------------------------------------------

RULES_OF_POSITIONS = {
    "causal": hw.causal(),
    "window": hw.window(3, ahead=1),
    "dilated": hw.window(3, dilation=2),
    "prefix": hw.prefix(2),
    "prefix of each": hw.prefix([2, 5]),
    "chunked": hw.chunked(4),
    "segments": hw.segments([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]]),
    "segments of each": hw.segments([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2]]),
    "padding": hw.padding([7, 11]),
    "mask_rule": hw.mask_rule(lambda b, h, q, k: (b + 2 * h + q * k) % 3 > 0),
    "per head": hw.per_head([hw.causal(), hw.chunked(3), hw.padding([3, 4])]),
    "together": ~hw.causal() & hw.chunked(5) | hw.segments([[0, 1] * 5 + [0]]),
}


@pytest.mark.parametrize("name", RULES_OF_POSITIONS)
def test_given_positions_pick_rows_and_columns_of_the_whole(name):
    """A rule at given positions is the rule of the whole text, looked at in those rows and columns."""
    mask, text = RULES_OF_POSITIONS[name], 11
    whole = mask.block(Grid(2, 3, text, text)).expand(2, 3, -1, -1)
    queries = torch.tensor([[4, 9], [10, 2]])
    keys = torch.tensor([[0, 7, 3, 8, 9], [1, 10, 2, 4, 0]])
    picked = torch.stack([whole[b][:, queries[b]][:, :, keys[b]] for b in range(2)])
    grid = Grid(2, 3, 2, 5, query_positions=queries, key_positions=keys)
    assert torch.equal(mask.block(grid).expand(2, 3, -1, -1), picked)
    part = mask.block(grid, rows=range(1, 2), columns=range(2, 5))
    assert torch.equal(part.expand(2, 3, -1, -1), picked[:, :, 1:2, 2:5])


def test_what_is_not_there_attends_to_nothing_and_nothing_to_it():
    q, k, v = (torch.randn(2, 3, length, 5) for length in (2, 4, 4))
    there = {"query_positions": torch.tensor([[3, -1], [2, 3]]), "key_positions": torch.tensor([0, -1, 2, 3])}
    for backend in ("fused", "reference"):
        out, lse, weights = hw.attend(q, k, v, **there, return_lse=True, return_weights=True, backend=backend)
        assert (weights == 0).tolist() == [
            [[[False, True, False, False], [True] * 4]] * 3,
            [[[False, True, False, False]] * 2] * 3,
        ]
        assert out[0, :, 1].abs().max() == 0
        assert (lse[0, :, 1] == -torch.inf).all()


@pytest.mark.parametrize("index", [0, 1])
def test_the_mask_of_one_sequence(index):
    for mask in RULES_OF_POSITIONS.values():
        whole = mask.block(Grid(2, 3, 11, 11)).expand(2, 3, -1, -1)
        one = mask.for_sequence(index).block(Grid(1, 3, 11, 11)).expand(1, 3, -1, -1)
        assert torch.equal(one[0], whole[index])
    values = torch.rand(2, 3, 4, 4) > 0.5
    assert torch.equal(hw.dense(values).for_sequence(index).block(Grid(1, 3, 4, 4))[0], values[index])


@pytest.mark.parametrize("index", range(3))
def test_the_mask_of_one_head(index):
    values = torch.rand(2, 3, 11, 11) > 0.5
    masks = [
        hw.window([2, None, 5]),
        hw.dense(values) & hw.causal(),
        hw.mask_rule(lambda b, h, q, k: (b + 2 * h + q * k) % 3 > 0) | ~hw.window([1, 2, 3]),
        hw.padding([3, 7]),
    ]
    for mask in masks:
        whole = mask.block(Grid(2, 3, 11, 11)).expand(2, 3, -1, -1)
        one = mask.for_head(index).block(Grid(2, 1, 11, 11)).expand(2, 1, -1, -1)
        assert torch.equal(one[:, 0], whole[:, index])


@pytest.mark.usefixtures("as_user")
def test_mistakes_in_positions():
    q, k = torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 7, 5)
    both = {"query_positions": torch.arange(4), "key_positions": torch.arange(7)}
    with pytest.raises(hw.InputError, match="^key_positions: expected positions of queries and of keys, or of neither"):
        hw.attend(q, k, k, query_positions=torch.arange(4))
    with pytest.raises(hw.InputError, match=r"^query_positions: expected shape \(4,\) or \(2, 4\), got \(1, 5\)"):
        hw.attend(q, k, k, **both | {"query_positions": torch.arange(5)})
    with pytest.raises(
        hw.InputError, match=r"^key_positions: expected whole numbers, \(length,\) or \(batch, length\)"
    ):
        hw.attend(q, k, k, **both | {"key_positions": torch.arange(7.0)})
    with pytest.raises(
        hw.InputError, match=r"^padding\(side\): expected 'right' where keys have positions of their own"
    ):
        hw.attend(q, k, k, **both, mask=hw.padding([3, 4], side="left"))


def test_a_rule_inside_per_head_is_told_its_own_head():
    rules = [hw.mask_rule(lambda b, h, q, k, own=own: (h == own) & (k <= q)) for own in range(3)]
    assert torch.equal(
        hw.per_head(rules).block(Grid(1, 3, 4, 4)), hw.causal().block(Grid(1, 3, 4, 4)).expand(1, 3, 4, 4)
    )


def test_what_stands_beyond_the_ids_has_no_segment():
    grid = Grid(1, 1, 2, 4, query_positions=torch.tensor([[1, 3]]), key_positions=torch.tensor([[0, 1, 2, 3]]))
    assert hw.segments([0, 0, 0]).block(grid).int()[0, 0].tolist() == [[1, 1, 1, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("backend", ["fused", "reference"])
def test_masks_of_nothing(backend, queries, keys):
    q, k = torch.zeros(2, 3, queries, 5), torch.zeros(2, 3, keys, 5)
    for mask in (hw.segments(torch.zeros(2, keys, dtype=torch.int64)), hw.per_head([hw.padding([0, 0])] * 3)):
        assert hw.attend(q, k, k, mask=mask, backend=backend).shape == (2, 3, queries, 5)


def test_a_prefix_of_each_sequence_may_be_longer_than_what_is_there_yet():
    mask = hw.window(1) | hw.prefix([1, 3])
    assert drawn(hw.causal() & mask, 2, 2, batch=2) == [[[1, 0], [1, 1]]] * 2
    assert repr(hw.prefix([1, 3])) == "prefix([1, 3])"
