"""Masks on grids with explicit positions, as a cache passes them, and masks of single sequences."""

import pytest
import torch

import headwise as hw
from headwise.attention.masks.grid import Grid

MASKS_OF_POSITIONS = {
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


@pytest.mark.parametrize("name", MASKS_OF_POSITIONS)
def test_explicit_positions_select_rows_and_columns_of_the_whole_mask(name):
    """A mask on a grid with explicit positions has the values of those rows and columns of the whole text."""
    mask, length = MASKS_OF_POSITIONS[name], 11
    whole = mask.block(Grid(2, 3, length, length)).expand(2, 3, -1, -1)
    queries = torch.tensor([[4, 9], [10, 2]])
    keys = torch.tensor([[0, 7, 3, 8, 9], [1, 10, 2, 4, 0]])
    expected = torch.stack([whole[b][:, queries[b]][:, :, keys[b]] for b in range(2)])
    grid = Grid(2, 3, 2, 5, query_positions=queries, key_positions=keys)
    assert torch.equal(mask.block(grid).expand(2, 3, -1, -1), expected)
    part = mask.block(grid, rows=range(1, 2), columns=range(2, 5))
    assert torch.equal(part.expand(2, 3, -1, -1), expected[:, :, 1:2, 2:5])


@pytest.mark.parametrize("index", [0, 1])
def test_for_sequence_selects_one_sequence(index):
    for mask in MASKS_OF_POSITIONS.values():
        whole = mask.block(Grid(2, 3, 11, 11)).expand(2, 3, -1, -1)
        one = mask.for_sequence(index).block(Grid(1, 3, 11, 11)).expand(1, 3, -1, -1)
        assert torch.equal(one[0], whole[index])
    values = torch.rand(2, 3, 4, 4) > 0.5
    assert torch.equal(hw.dense(values).for_sequence(index).block(Grid(1, 3, 4, 4))[0], values[index])


def test_position_minus_one_neither_attends_nor_is_attended_to():
    q, k, v = (torch.randn(2, 3, length, 5) for length in (2, 4, 4))
    positions = {"query_positions": torch.tensor([[3, -1], [2, 3]]), "key_positions": torch.tensor([0, -1, 2, 3])}
    for backend in ("fused", "reference"):
        out, lse, weights = hw.attend(q, k, v, **positions, return_lse=True, return_weights=True, backend=backend)
        assert (weights == 0).tolist() == [
            [[[False, True, False, False], [True] * 4]] * 3,
            [[[False, True, False, False]] * 2] * 3,
        ]
        assert out[0, :, 1].abs().max() == 0
        assert (lse[0, :, 1] == -torch.inf).all()


def test_positions_beyond_the_ids_have_no_segment():
    grid = Grid(1, 1, 2, 4, query_positions=torch.tensor([[1, 3]]), key_positions=torch.tensor([[0, 1, 2, 3]]))
    assert hw.segments([0, 0, 0]).block(grid).int()[0, 0].tolist() == [[1, 1, 1, 0], [0, 0, 0, 0]]


@pytest.mark.usefixtures("as_user")
def test_unusable_positions_are_rejected():
    q, k = torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 7, 5)
    positions = {"query_positions": torch.arange(4), "key_positions": torch.arange(7)}
    with pytest.raises(hw.InputError, match="^key_positions: expected positions of queries and of keys, or of neither"):
        hw.attend(q, k, k, query_positions=torch.arange(4))
    with pytest.raises(hw.InputError, match=r"^query_positions: expected shape \(4,\) or \(2, 4\), got \(1, 5\)"):
        hw.attend(q, k, k, **positions | {"query_positions": torch.arange(5)})
    with pytest.raises(
        hw.InputError, match=r"^key_positions: expected whole numbers, \(length,\) or \(batch, length\)"
    ):
        hw.attend(q, k, k, **positions | {"key_positions": torch.arange(7.0)})
    with pytest.raises(
        hw.InputError, match=r"^padding\(side\): expected 'right' where keys have positions of their own"
    ):
        hw.attend(q, k, k, **positions, mask=hw.padding([3, 4], side="left"))
