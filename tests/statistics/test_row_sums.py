"""Sums over query rows by the native operator, against sums of single rows in float64."""

import pytest
import torch

from headwise.attention.backends.native import library
from headwise.attention.backends.plain_statistics import ROWS

pytestmark = pytest.mark.skipif(library.load() is not None, reason="no native kernels")

NUMBERS = (*ROWS, "evenness")


def drawn_rows(batch=3, heads=2, queries=11):
    """Random numbers of rows, with 0 to 4 visible keys."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(len(ROWS), batch, heads, queries, generator=generator)
    rows[ROWS.index("visible keys")] = torch.randint(0, 5, (batch, heads, queries), generator=generator).float()
    return rows


@pytest.mark.parametrize("batch_of_masks", [1, 3])
@pytest.mark.parametrize("has_padding", [False, True])
def test_sums_are_those_of_single_rows(has_padding, batch_of_masks):
    rows, names = drawn_rows(), ("evenness", "self", "entropy", "written_norm")
    counted = torch.rand(3, 11) > 0.4 if has_padding else None
    has_value = torch.rand(len(names), batch_of_masks, 1, 11) > 0.3
    numbers = torch.tensor([NUMBERS.index(name) for name in names])
    sums, largest, is_finite = torch.ops.headwise.row_sums(rows, counted, numbers, has_value)
    assert is_finite
    by_name = dict(zip(ROWS, rows.double(), strict=True))
    for n, name in enumerate(names):
        for b in range(3):
            for h in range(2):
                kept = []
                for i in range(11):
                    visible = by_name["visible keys"][b, h, i]
                    if visible < 1 or (counted is not None and not counted[b, i]):
                        continue
                    if not has_value[n, b if batch_of_masks > 1 else 0, 0, i] or (name == "evenness" and visible < 2):
                        continue
                    value = (
                        by_name["entropy"][b, h, i] / visible.log() if name == "evenness" else by_name[name][b, h, i]
                    )
                    kept.append(float(value))
                assert sums[0, n, b, h] == pytest.approx(sum(kept), rel=1e-6, abs=1e-6)
                assert sums[1, n, b, h] == len(kept)
    is_counted = (by_name["visible keys"] > 0) & (True if counted is None else counted[:, None])
    for of_logits, name in zip(largest, ("max_logit", "max_logit_uncapped"), strict=True):
        assert torch.equal(of_logits, by_name[name].masked_fill(~is_counted, -torch.inf).amax(-1))


@pytest.mark.parametrize("name", ["entropy", "output_norm", "written_norm"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_are_reported(name, number):
    rows = drawn_rows()
    rows[ROWS.index(name), 1, 0, 4] = number
    arguments = rows, None, torch.zeros(1, dtype=torch.int64), torch.ones(1, 1, 1, 11, dtype=torch.bool)
    assert not torch.ops.headwise.row_sums(*arguments)[2]


def test_the_operator_can_be_traced():
    arguments = drawn_rows(), None, torch.zeros(1, dtype=torch.int64), torch.ones(1, 1, 1, 11, dtype=torch.bool)
    torch.library.opcheck(torch.ops.headwise.row_sums.default, arguments, test_utils=("test_schema",))
