"""Mask tensors read as ranges of keys by the native operator, against the masks themselves."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwise.attention.backends.native import library
from headwise.attention.backends.native.mask_tensors import BIAS, FINITE_ROWS, MANY_RANGES, mask_ranges
from headwise.attention.masks.grid import MOST_RANGES

pytestmark = pytest.mark.skipif(library.why_not_loaded() is not None, reason="the native kernels are not available")

MIN = torch.finfo(torch.float32).min


def matrix_of(ranges, shape) -> torch.Tensor:
    """Return the matrix of the keys in ranges `(#batch, #heads, #queries, ranges, 2)`."""
    key = torch.arange(shape[3])
    return ((key >= ranges[..., :1]) & (key < ranges[..., 1:])).any(-2).expand(shape)


@st.composite
def matrices(draw):
    """Draw a boolean matrix whose rows have a few runs; some are constant along an axis."""
    shape = tuple(draw(st.integers(1, most)) for most in (3, 3, 11, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    edges = torch.rand(*shape, generator=generator) < draw(st.sampled_from([0.0, 0.1, 0.3]))
    matrix = (edges.cumsum(-1) + torch.randint(0, 2, (*shape[:3], 1), generator=generator)) % 2 == 1
    for axis in range(3):
        if draw(st.booleans()):
            matrix = matrix.narrow(axis, 0, 1).expand(*matrix.shape[:axis], shape[axis], *matrix.shape[axis + 1 :])
    return matrix


@settings(max_examples=600, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(matrices(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_ranges_are_the_matrix_or_there_are_too_many(matrix, dtype):
    ranges, reason = mask_ranges(matrix)
    added = mask_ranges(torch.zeros(matrix.shape, dtype=dtype).masked_fill(~matrix, -torch.inf))
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
    assert mask_ranges(matrix).ranges.tolist() == [[[[[0, 2], [3, 4]]]]]
    assert mask_ranges(matrix[..., :1].expand(-1, -1, -1, 9)).ranges.tolist() == [[[[[0, 9]]]]]


def test_large_masks_are_read_by_several_threads():
    matrix = torch.rand(2, 3, 300, 1).mul(300).floor() > torch.arange(300)
    ranges, reason = mask_ranges(matrix)
    assert reason is None
    assert torch.equal(matrix_of(ranges, matrix.shape), matrix)
    added = torch.zeros(2, 3, 300, 300)
    assert mask_ranges(added.index_fill(3, torch.tensor([299]), 0.5)) == BIAS


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
    ranges, reason = mask_ranges(torch.tensor(row)[None, None, None])
    if isinstance(expected, list):
        assert ranges[0, 0, 0].tolist() == expected
    else:
        assert (ranges, reason) == expected


def test_a_cast_is_applied_before_the_mask_is_read():
    hidden = torch.full((1, 1, 1, 3), MIN)  # -inf in bfloat16
    assert mask_ranges(hidden) == FINITE_ROWS
    assert mask_ranges(hidden, torch.bfloat16).ranges.tolist() == [[[[[0, 0]]]]]
