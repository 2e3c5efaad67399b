"""Masks as ranges of keys, against the masks themselves."""

from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headwise as hw
from headwise.attention.masks import key_ranges
from headwise.attention.masks.grid import MOST_RANGES, Grid
from headwise.attention.masks.key_ranges import (
    Part,
    VisibleKeys,
    visible_keys,
)
from headwise.attention.masks.kinds import HasPosition
from strategies import masks


@st.composite
def masks_on_grids(draw):
    """Draw the sizes of a grid, and a mask that fits it with its values."""
    sizes = tuple(draw(st.integers(1, most)) for most in (3, 3, 13, 13))
    return sizes, *draw(masks(*sizes))


def allowed_by(visible: VisibleKeys, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return visible keys as a matrix `(batch, heads, queries, keys)`, put together from their parts."""
    allowed = torch.zeros(sizes, dtype=torch.bool)
    for part in visible.parts() or [Part(range(sizes[2]), range(sizes[3]))]:
        ranges, matrix = visible.of_part(part)
        key = torch.arange(len(part.columns))
        inside = torch.ones(1, 1, len(part.rows), len(key), dtype=torch.bool)
        if ranges is not None:
            assert ranges.dtype == torch.int32
            assert ranges.is_contiguous()
            assert ranges.shape[3] <= MOST_RANGES
            containing = ((key >= ranges[..., :1]) & (key < ranges[..., 1:])).sum(-2)
            assert (containing <= 1).all(), "ranges overlap"
            inside = inside & (containing > 0)
        if matrix is not None:
            inside = inside & matrix
        rows, columns = (slice(axis.start, axis.stop) for axis in part)
        allowed[:, :, rows, columns] = inside
    return allowed


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(masks_on_grids())
def test_ranges_and_matrix_are_the_mask(drawn):
    sizes, mask, expected = drawn
    assert torch.equal(allowed_by(visible_keys(mask, Grid(*sizes)), sizes), expected)


@contextmanager
def small_parts():
    """Divide the score matrix into small parts."""
    limits = {"MATRIX_ELEMENTS": 8, "PIECE_ELEMENTS": 16, "ROW_STEP": 2, "COLUMN_STEP": 3, "CACHED_ELEMENTS": 0}
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in limits.items():
            patch.setattr(key_ranges, name, limit)
        yield


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(masks_on_grids())
def test_parts_are_the_mask_too(drawn):
    sizes, mask, expected = drawn
    with small_parts():
        assert torch.equal(allowed_by(visible_keys(mask, Grid(*sizes)), sizes), expected)


def positions_of_keys(kind: str, batch: int, keys: int) -> torch.Tensor:
    """Return positions of keys, different ones in each sequence: -1 where a key does not exist."""
    position = torch.arange(keys) + torch.arange(batch)[:, None]
    if kind == "gaps":
        return position + position // 3
    if kind == "padding first":
        return position - 2 * torch.arange(batch)[:, None] - 1
    if kind == "slots":
        return position.masked_fill(position >= keys - 2, -1)
    if kind == "rotated":
        return position.roll(keys // 3, 1)
    if kind == "equal":
        return position // 2
    return torch.stack([torch.randperm(keys) for _ in range(batch)]) - 1


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    masks_on_grids(), st.sampled_from(["gaps", "padding first", "slots", "rotated", "equal", "random"]), st.booleans()
)
def test_ranges_of_explicit_positions_are_the_mask(drawn, kind, is_shared):
    (batch, heads, queries, keys), mask, _ = drawn
    key_positions = positions_of_keys(kind, 1 if is_shared else batch, keys)
    query_positions = (torch.arange(queries) + keys - queries + torch.arange(batch)[:, None]).clamp(min=-1)
    grid = Grid(batch, heads, queries, keys, query_positions=query_positions, key_positions=key_positions)
    mask = HasPosition() & mask
    try:
        expected = mask.block(grid).expand(batch, heads, queries, keys)
    except hw.InputError:  # padding on the left has no meaning here
        return
    assert torch.equal(allowed_by(visible_keys(mask, grid), expected.shape), expected)
    with small_parts():
        assert torch.equal(allowed_by(visible_keys(mask, grid), expected.shape), expected)


def test_ascending_positions_need_no_matrix():
    key_positions = torch.tensor([[-1, 3, 4, 6, 7, 1, 2]])
    grid = Grid(1, 1, 2, 7, query_positions=torch.tensor([[4, 7]]), key_positions=key_positions)
    visible = visible_keys(HasPosition() & hw.causal() & hw.window(3), grid)
    assert visible.matrix() is None
    assert visible.ranges.tolist() == [[[[[1, 3], [6, 7]], [[3, 5], [7, 7]]]]]


@pytest.mark.parametrize("mask", [hw.window(3, dilation=2), hw.segments([0, 0, 1, 1, 0, 0, 1])], ids=repr)
def test_masks_with_gaps_have_a_range_that_contains_them(mask):
    visible = visible_keys(mask, GRID)
    assert visible.matrix() is not None
    assert (visible.ranges[..., 1] - visible.ranges[..., 0]).max() < 7


def test_a_matrix_of_the_caller_is_not_copied():
    values = torch.rand(1, 1, 5, 7) < 0.5
    visible = visible_keys(hw.causal() & hw.dense(values), GRID)
    assert visible.matrix().data_ptr() == values.data_ptr()
    assert visible.matrix().shape == values.shape


GRID = Grid(2, 3, 5, 7)


def ranges_of(mask) -> list:
    """Return the ranges of a mask on `GRID`, of which no part may be a matrix."""
    visible = visible_keys(mask, GRID)
    assert visible.matrix() is None
    return visible.ranges.tolist()


def test_masks_by_position_are_one_range():
    assert ranges_of(hw.causal()) == [[[[[0, 3]], [[0, 4]], [[0, 5]], [[0, 6]], [[0, 7]]]]]
    assert ranges_of(hw.window(2)) == [[[[[1, 3]], [[2, 4]], [[3, 5]], [[4, 6]], [[5, 7]]]]]
    assert ranges_of(hw.causal() & hw.padding([7, 4])) == [
        [[[[0, 3]], [[0, 4]], [[0, 5]], [[0, 6]], [[0, 7]]]],
        [[[[0, 3]], [[0, 4]], [[0, 4]], [[0, 4]], [[0, 4]]]],
    ]


def test_a_window_with_sinks_is_two_ranges():
    ranges = torch.tensor(ranges_of(hw.causal() & (hw.window(2) | hw.prefix(1))))
    assert ranges.shape == (1, 1, 5, 2, 2)
    assert ranges[0, 0, 4].tolist() == [[5, 7], [0, 1]]


def test_a_function_stays_a_matrix_and_leaves_the_ranges_of_other_parts():
    visible = visible_keys(hw.causal() & hw.mask_rule(lambda b, h, q, k: (q + k) % 2 == 0), GRID)
    assert visible.ranges.tolist() == ranges_of(hw.causal())
    assert visible.matrix().shape == (1, 1, 5, 7)


def test_no_mask_hides_nothing():
    visible = visible_keys(None, GRID)
    assert visible.ranges is None
    assert visible.matrix() is None
