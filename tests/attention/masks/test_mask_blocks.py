"""Blocks of masks against the whole mask, coverage of blocks, and the masks of single heads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import headwise as hw
from headwise.attention.masks.grid import Coverage, Grid
from strategies import masks


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.data())
def test_blocks_and_coverage_agree_with_the_whole_mask(data):
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
def test_coverage_is_right_with_explicit_positions(data):
    queries, keys = 5, 7
    mask, _ = data.draw(masks(2, 3, queries, keys).filter(lambda drawn: "left" not in repr(drawn[0])))
    positions = [
        torch.tensor(data.draw(st.lists(st.integers(-1, 12), min_size=2 * size, max_size=2 * size))).view(2, size)
        for size in (queries, keys)
    ]
    grid = Grid(2, 3, queries, keys, torch.device("cpu"), *positions)
    rows = range(*sorted(data.draw(st.lists(st.integers(0, queries), min_size=2, max_size=2, unique=True))))
    columns = range(*sorted(data.draw(st.lists(st.integers(0, keys), min_size=2, max_size=2, unique=True))))
    block = mask.block(grid, rows, columns)
    coverage = mask.coverage(grid, rows, columns)
    assert coverage is not Coverage.EMPTY or not block.any()
    assert coverage is not Coverage.FULL or block.all()


@pytest.mark.parametrize(
    "mask", [hw.causal(), hw.window(3), hw.padding([4, 4]), hw.padding([4, 4], side="left")], ids=repr
)
def test_coverage_of_a_single_mask_is_exact(mask):
    grid = Grid(2, 1, 5, 7)
    for top, left in torch.cartesian_prod(torch.arange(5), torch.arange(7)).tolist():
        for bottom, right in ((top + 1, left + 1), (5, 7), (min(top + 2, 5), min(left + 3, 7))):
            rows, columns = range(top, bottom), range(left, right)
            block = mask.block(grid, rows, columns)
            expected = Coverage.FULL if block.all() else Coverage.PARTIAL if block.any() else Coverage.EMPTY
            assert mask.coverage(grid, rows, columns) is expected


def test_coverage_of_a_meta_tensor_is_unknown():
    mask = hw.dense(torch.ones(5, 7, dtype=torch.bool, device="meta"))
    grid = Grid(1, 1, 5, 7, torch.device("meta"))
    assert mask.coverage(grid, range(5), range(7)) is Coverage.PARTIAL


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
def test_masks_that_do_not_fit_the_grid_are_rejected(mask, message):
    with pytest.raises(hw.InputError, match="^" + message):
        mask.block(Grid(2, 3, 5, 7))


@pytest.mark.parametrize("index", range(3))
def test_for_head_selects_one_head(index):
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


def test_a_rule_inside_per_head_receives_the_index_of_its_head():
    rules = [hw.mask_rule(lambda b, h, q, k, wanted=wanted: (h == wanted) & (k <= q)) for wanted in range(3)]
    assert torch.equal(
        hw.per_head(rules).block(Grid(1, 3, 4, 4)), hw.causal().block(Grid(1, 3, 4, 4)).expand(1, 3, 4, 4)
    )


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("backend", ["fused", "reference"])
def test_masks_without_queries_or_keys(backend, queries, keys):
    q, k = torch.zeros(2, 3, queries, 5), torch.zeros(2, 3, keys, 5)
    for mask in (hw.segments(torch.zeros(2, keys, dtype=torch.int64)), hw.per_head([hw.padding([0, 0])] * 3)):
        assert hw.attend(q, k, k, mask=mask, backend=backend).shape == (2, 3, queries, 5)
