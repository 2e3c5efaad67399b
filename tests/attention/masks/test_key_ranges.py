"""Masks as ranges of keys, and matrices and additive masks read as such ranges, against the masks themselves."""

from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headwise as hw
from headwise.attention.masks import key_ranges
from headwise.attention.masks.grid import MOST_RANGES, Grid
from headwise.attention.masks.key_ranges import (
    BIAS,
    FINITE_ROWS,
    MANY_RANGES,
    Part,
    VisibleKeys,
    run_lengths,
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


MIN = torch.finfo(torch.float32).min


def matrix_of(ranges, shape) -> torch.Tensor:
    """Return the matrix of the keys in ranges `(#batch, #heads, #queries, ranges, 2)`."""
    key = torch.arange(shape[3])
    return ((key >= ranges[..., :1]) & (key < ranges[..., 1:])).any(-2).expand(shape)


@st.composite
def matrices(draw):
    """Draw a boolean matrix whose rows have a few runs; some are constant along an axis."""
    shape = tuple(draw(st.integers(1, most)) for most in (3, 3, 11, 17))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    edges = torch.rand(*shape, generator=generator) < draw(st.sampled_from([0.0, 0.1, 0.3]))
    matrix = (edges.cumsum(-1) + torch.randint(0, 2, (*shape[:3], 1), generator=generator)) % 2 == 1
    for axis in range(3):
        if draw(st.booleans()):
            matrix = matrix.narrow(axis, 0, 1).expand(*matrix.shape[:axis], shape[axis], *matrix.shape[axis + 1 :])
    return matrix


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(matrices(), st.sampled_from([1, 7, 40, 10**6]))
def test_ranges_are_the_matrix_or_there_are_too_many(matrix, at_once):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_ranges, "ELEMENTS_AT_ONCE", at_once)
        ranges, reason = run_lengths(matrix)
        added = run_lengths(torch.zeros(matrix.shape).masked_fill(~matrix, -torch.inf))
    starts = matrix & ~torch.nn.functional.pad(matrix, (1, 0))[..., :-1]
    if starts.sum(-1).max() > MOST_RANGES:
        assert (ranges, reason) == (None, MANY_RANGES.reason)
        assert added == MANY_RANGES
        return
    assert reason is None
    assert ranges.dtype == torch.int32
    assert ranges.is_contiguous()
    assert torch.equal(matrix_of(ranges, matrix.shape), matrix)
    assert torch.equal(matrix_of(added.ranges, matrix.shape), matrix)


def test_repeated_axes_are_read_once():
    matrix = torch.tensor([True, True, False, True]).expand(5, 7, 11, 4)
    assert run_lengths(matrix).ranges.tolist() == [[[[[0, 2], [3, 4]]]]]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([0.0, MIN, -torch.inf], [[0, 1]]),
        ([-0.0, 0.0, MIN], [[0, 2]]),
        ([-torch.inf, -torch.inf, -torch.inf], [[0, 0]]),
        ([MIN, MIN, MIN], FINITE_ROWS),
        ([-torch.inf, MIN, -torch.inf], FINITE_ROWS),
        ([0.0, -1e4, 0.0], BIAS),
        ([0.0, 1.0, MIN], BIAS),
        ([0.0, float("nan"), MIN], BIAS),
    ],
)
def test_additive_masks(row, expected):
    ranges, reason = run_lengths(torch.tensor(row)[None, None, None])
    if isinstance(expected, list):
        assert ranges[0, 0, 0].tolist() == expected
    else:
        assert (ranges, reason) == expected


def test_a_cast_is_applied_before_the_mask_is_read():
    hidden = torch.full((1, 1, 1, 3), MIN)  # -inf in bfloat16
    assert run_lengths(hidden) == FINITE_ROWS
    assert run_lengths(hidden, torch.bfloat16).ranges.tolist() == [[[[[0, 0]]]]]
