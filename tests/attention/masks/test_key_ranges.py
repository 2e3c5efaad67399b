"""Masks as ranges of keys against the masks themselves."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headwise as hw
from headwise.attention.masks.grid import Grid
from headwise.attention.masks.key_ranges import MOST_RANGES, visible_keys
from strategies import masks


@st.composite
def masks_on_grids(draw):
    """Draw the sizes of a grid, and a mask that fits it with its values."""
    sizes = tuple(draw(st.integers(1, most)) for most in (3, 3, 13, 13))
    return sizes, *draw(masks(*sizes))


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(masks_on_grids())
def test_ranges_and_matrix_are_the_mask(drawn):
    sizes, mask, expected = drawn
    ranges, matrix = visible_keys(mask, Grid(*sizes))
    allowed = torch.ones(sizes, dtype=torch.bool)
    if ranges is not None:
        assert ranges.dtype == torch.int32
        assert ranges.is_contiguous()
        assert ranges.shape[3] <= MOST_RANGES
        key = torch.arange(sizes[3])
        containing = ((key >= ranges[..., :1]) & (key < ranges[..., 1:])).sum(-2)
        assert containing.max() <= 1, "ranges overlap"
        allowed = allowed & (containing > 0)
    if matrix is not None:
        allowed = allowed & matrix
    assert torch.equal(allowed, expected)


GRID = Grid(2, 3, 5, 7)


def ranges_of(mask) -> list:
    """Return the ranges of a mask on `GRID`, of which no part may be a matrix."""
    ranges, matrix = visible_keys(mask, GRID)
    assert matrix is None
    return ranges.tolist()


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
    ranges, matrix = visible_keys(hw.causal() & hw.mask_rule(lambda b, h, q, k: (q + k) % 2 == 0), GRID)
    assert ranges.tolist() == ranges_of(hw.causal())
    assert matrix.shape[2:] == (5, 7)


def test_no_mask_hides_nothing():
    assert visible_keys(None, GRID) == (None, None)
