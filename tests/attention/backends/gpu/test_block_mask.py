"""Block masks of FlexAttention, and the rules of masks for single pairs, against the masks themselves."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_flex import OPTIONS

import headwise as hw
from headwise.attention.backends.gpu import flex
from headwise.attention.backends.gpu.flex import block_mask_of, visibility_rule, visible_blocks
from headwise.attention.backends.gpu.spans import spans_of_keys, spans_of_rows
from headwise.attention.masks.grid import Grid
from headwise.attention.masks.key_ranges import VisibleKeys, visible_keys
from headwise.attention.masks.kinds import Padding
from pretend_device import NoReads
from strategies import masks
from without_a_gpu import as_on_a_gpu

SIZES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 23), st.integers(1, 23))
SAME = settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def indices(*sizes: int) -> list[torch.Tensor]:
    """Return the indices of every axis of a block, as tensors that broadcast."""
    shapes = ((-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (1, -1))
    return [torch.arange(size).view(shape) for size, shape in zip(sizes, shapes, strict=True)]


@SAME
@given(st.data())
def test_the_rule_for_pairs_is_that_of_the_matrix(data):
    sizes = data.draw(SIZES)
    mask, allowed = data.draw(masks(*sizes))
    queries, keys = sizes[2:]
    grid = Grid(*sizes)
    b, h, i, j = indices(*sizes)
    assert torch.equal(mask.allows(grid, b, h, i, j).expand(sizes), allowed)
    if data.draw(st.booleans()):
        rows = torch.arange(queries) + data.draw(st.integers(-3, 3))
        columns = torch.randperm(keys, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
        placed = Grid(*sizes, query_positions=rows[None], key_positions=columns[None])
        try:
            mask.check(placed)
        except hw.InputError:
            return  # padding on the left
        assert torch.equal(mask.allows(placed, b, h, i, j).expand(sizes), mask.block(placed).expand(sizes))


def check_blocks(mask: hw.Mask, grid: Grid, matrix: torch.Tensor, monkeypatch, size: int) -> None:
    """Check that no visible key is in a block that is left out, and that full blocks hide nothing."""
    monkeypatch.setattr(flex, "BLOCK", size)
    some, every = visible_blocks(visible_keys(mask, grid))
    padding = (0, -grid.keys % size, 0, -grid.queries % size)
    blocks = F.pad(matrix, padding).unflatten(3, (-1, size)).unflatten(2, (-1, size))
    has_visible, shows_all = blocks.any(5).any(3), blocks.all(5).all(3)
    some, every = some.expand_as(has_visible), every.expand_as(has_visible)
    assert not (has_visible & ~some).any()
    assert not (every & ~shows_all).any()
    assert not (every & ~some).any()


@SAME
@given(st.data())
def check_drawn_blocks(monkeypatch, data):
    sizes = data.draw(SIZES)
    mask, allowed = data.draw(masks(*sizes))
    size = data.draw(st.sampled_from([1, 2, 4, 8]))
    check_blocks(mask, Grid(*sizes), allowed, monkeypatch, size)
    positions = (torch.randperm(count, generator=torch.Generator().manual_seed(count))[None] for count in sizes[2:])
    placed = Grid(*sizes, torch.device("cpu"), *positions)
    try:
        matrix = mask.block(placed).expand(sizes)
    except hw.InputError:
        return  # padding on the left
    check_blocks(mask, placed, matrix, monkeypatch, size)


def test_blocks_of_drawn_masks(monkeypatch):
    check_drawn_blocks(monkeypatch)


@pytest.mark.parametrize("evaluates", [True, False])
@pytest.mark.parametrize("name", [name for name in OPTIONS if "mask" in OPTIONS[name]])
def test_blocks_are_found_without_reading_a_value(name, evaluates, monkeypatch):
    options = OPTIONS[name]
    positions = [options[key][None] for key in ("query_positions", "key_positions") if key in options]
    grid = Grid(2, 4, 150, 200, torch.device("cpu"), *positions)
    mask = options["mask"]
    monkeypatch.setattr(flex, "MOST_EVALUATED", 2**28 if evaluates else 0)
    matrix = mask.block(grid).expand(2, 4, 150, 200)
    with monkeypatch.context() as patch:
        as_on_a_gpu(patch)
        with NoReads():
            found = block_mask_of(mask, grid)
    check_blocks(mask, grid, matrix, monkeypatch, 128)
    assert torch.equal(found.mask_mod(*indices(2, 4, 150, 200)).expand(2, 4, 150, 200), matrix)


def test_a_rule_reads_the_numbers_of_masks_on_the_device_of_the_kernel():
    mask = (hw.padding([3, 2]) & hw.window(2)) | hw.per_head([hw.segments([0, 0, 1]), ~hw.padding([1, 3])])
    grid = Grid(2, 2, 3, 3, torch.device("meta"))
    rule = visibility_rule(VisibleKeys(None, (mask,), grid))
    assert rule(*(each.to("meta") for each in indices(2, 2, 3, 3))).device.type == "meta"
    with pytest.raises(RuntimeError, match="device"):  # tensors on the CPU would be mixed with those of the kernel
        Padding.allows(hw.padding([3, 2]), Grid(2, 2, 3, 3), *(each.to("meta") for each in indices(2, 2, 3, 3)))


@pytest.mark.parametrize("shape", [(1, 1, 150, 1), (2, 1, 1, 200), (1, 4, 1, 1), (2, 4, 150, 200)])
@pytest.mark.parametrize("at_once", [1, 2**24])
def test_blocks_of_a_matrix_that_repeats_along_an_axis(shape, at_once, monkeypatch):
    monkeypatch.setattr(flex, "EVALUATED_AT_ONCE", at_once)
    mask, grid = hw.dense(torch.rand(shape) < 0.9), Grid(2, 4, 150, 200)
    for size in (16, 128):
        check_blocks(mask, grid, mask.block(grid).expand(2, 4, 150, 200), monkeypatch, size)


def test_a_long_window_makes_no_matrix():
    grid = Grid(1, 8, 65_536, 65_536)
    window = block_mask_of(hw.window(4096), grid)
    blocks, width = 512, 4096 // 128
    assert int(window.full_kv_num_blocks.sum()) == sum(max(min(row, width - 1), 0) for row in range(blocks))
    # The diagonal is cut, and so is the block in which the window begins.
    assert int(window.kv_num_blocks.sum()) == blocks + (blocks - width)
    stored = [each for each in window.as_tuple() if isinstance(each, torch.Tensor)]
    assert max(each.numel() for each in stored) <= blocks**2
    assert block_mask_of(hw.window(4096), grid) is window


def test_blocks_that_are_cut_by_the_end_are_partial():
    causal = block_mask_of(hw.causal(), Grid(1, 1, 300, 300))
    assert causal.full_kv_num_blocks.flatten().tolist() == [0, 1, 0]
    assert causal.kv_num_blocks.flatten().tolist() == [1, 1, 3]


@SAME
@given(st.data())
def test_spans_contain_every_visible_key(data):
    batch, heads, queries, keys = data.draw(SIZES)
    count, rows, columns = data.draw(st.integers(1, 4)), *data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    ranges = torch.randint(-3, keys + 4, (batch, heads, queries, count, 2), generator=generator).int()
    key = torch.arange(keys)
    visible = ((key >= ranges[..., :1]) & (key < ranges[..., 1:])).any(3)
    of_rows = spans_of_rows(ranges, keys, rows, columns)
    of_keys = spans_of_keys(of_rows, -(-keys // columns))
    for at in visible.nonzero().tolist():
        (b, h), row_block, key_block = at[:2], at[2] // rows, at[3] // columns
        spans = [range(*span) for span in of_rows[b, h, row_block].tolist()]
        assert sum(key_block in span for span in spans) == 1  # no key is counted twice
        assert row_block in range(*of_keys[b, h, key_block, 0].tolist())
    for blocks in of_rows.flatten(0, 2).tolist():
        covered = [block for span in blocks for block in range(*span)]
        assert len(covered) == len(set(covered))
