"""Masks as small literal matrices, their printed forms, and the arguments that their functions reject."""

import numpy
import pytest
import torch

import headwise as hw
from headwise.attention.masks.grid import Grid


def drawn(mask: hw.Mask, queries: int, keys: int, batch: int = 1, heads: int = 1) -> list:
    """Return the mask as a matrix of 0 and 1, or as a list of them where sequences or heads differ."""
    block = mask.block(Grid(batch, heads, queries, keys)).int().flatten(0, 1).tolist()
    return block[0] if len(block) == 1 else block


VALUES = torch.tensor([[True, False, True], [False, False, True]])
DRAWN = {
    "the own key and earlier ones": (hw.causal(), (3, 3), [[1, 0, 0], [1, 1, 0], [1, 1, 1]]),
    "causal, more keys than queries": (hw.causal(), (2, 5), [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
    "causal, fewer keys than queries": (hw.causal(), (3, 2), [[0, 0], [1, 0], [1, 1]]),
    "as many keys as the width": (hw.window(2), (4, 4), [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]),
    "the own key alone": (hw.window(1), (2, 3), [[0, 1, 0], [0, 0, 1]]),
    "keys ahead": (hw.window(1, ahead=1), (3, 3), [[1, 1, 0], [0, 1, 1], [0, 0, 1]]),
    "dilation": (hw.window(2, dilation=2), (4, 4), [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]),
    "a window of each head": (hw.window([1, None]), (2, 2, 1, 2), [[[1, 0], [0, 1]], [[1, 0], [1, 1]]]),
    "masks of heads": (
        hw.per_head([hw.causal(), ~hw.causal()]),
        (2, 2, 1, 2),
        [[[1, 0], [1, 1]], [[0, 1], [0, 0]]],
    ),
    "a prefix for every query": (hw.causal() | hw.prefix(2), (3, 3), [[1, 1, 0], [1, 1, 0], [1, 1, 1]]),
    "a prefix of each sequence": (hw.prefix([1, 2]), (1, 2, 2), [[[1, 0]], [[1, 1]]]),
    "a prefix beyond the keys": (
        hw.causal() & (hw.window(1) | hw.prefix([1, 3])),
        (2, 2, 2),
        [[[1, 0], [1, 1]]] * 2,
    ),
    "a window with attention sinks": (
        hw.causal() & (hw.window(1) | hw.prefix(1)),
        (4, 4),
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]],
    ),
    "keys of the same document": (hw.segments([[3, 3, 7]]), (3, 3), [[1, 1, 0], [1, 1, 0], [0, 0, 1]]),
    "the last query stands at the last key": (hw.segments([0, 0, 1]), (1, 3), [[0, 0, 1]]),
    "keys of the same chunk": (hw.chunked(2), (3, 3), [[1, 1, 0], [1, 1, 0], [0, 0, 1]]),
    "the last chunk": (hw.chunked(2), (1, 4), [[0, 0, 1, 1]]),
    "batch, head, query and key": (
        hw.mask_rule(lambda batch, head, query, key: (query + key + head) % 2 == 0),
        (1, 3, 1, 2),
        [[[1, 0, 1]], [[0, 1, 0]]],
    ),
    "padding on the right": (hw.padding([1, 3]), (1, 3, 2), [[[1, 0, 0]], [[1, 1, 1]]]),
    "padding on the left": (hw.padding([1, 3], side="left"), (1, 3, 2), [[[0, 0, 1]], [[1, 1, 1]]]),
    "padding alone": (hw.padding(torch.tensor([0])), (2, 2), [[0, 0], [0, 0]]),
    "a matrix": (hw.dense(VALUES), (2, 3), [[1, 0, 1], [0, 0, 1]]),
    "matrices of heads": (
        hw.dense(torch.stack([VALUES, ~VALUES])[None]),
        (2, 3, 1, 2),
        [[[1, 0, 1], [0, 0, 1]], [[0, 1, 0], [1, 1, 0]]],
    ),
    "and, not": (hw.causal() & ~hw.window(1), (3, 3), [[0, 0, 0], [1, 0, 0], [1, 1, 0]]),
    "or, not": (hw.window(1) | ~hw.causal(), (3, 3), [[1, 1, 1], [0, 1, 1], [0, 0, 1]]),
    "and": (hw.causal() & hw.padding([2]), (3, 3), [[1, 0, 0], [1, 1, 0], [1, 1, 0]]),
}
"""Masks with their numbers of queries, keys, sequences and heads, and what `drawn` returns for them."""


@pytest.mark.parametrize("name", DRAWN)
def test_masks_allow_the_keys_of_their_definition(name):
    mask, sizes, expected = DRAWN[name]
    assert drawn(mask, *sizes) == expected


def test_str_draws_the_mask():
    assert str(hw.window(2)) == ("■ · · · · ·\n■ ■ · · · ·\n· ■ ■ · · ·\n· · ■ ■ · ·\n· · · ■ ■ ·\n· · · · ■ ■")
    assert str(hw.padding([1, 2])) == "■ ·\n■ ·\n\n■ ■\n■ ■"
    assert str(hw.dense(torch.tensor([[True, False, True], [True, True, True]])) & hw.causal()) == "■ · ·\n■ ■ ■"
    assert hw.causal().picture(Grid(1, 1, 1, 3)) == "■ ■ ■"


def test_repr_is_the_expression_that_makes_the_mask():
    values = torch.ones(2, 3, dtype=torch.bool)
    assert repr(hw.causal() & ~hw.window(3)) == "(causal() & ~window(3))"
    assert repr(hw.window([3, None], ahead=1)) == "per_head([window(3, ahead=1), window(None, ahead=1)])"
    assert repr(hw.prefix(2) & hw.chunked(3)) == "(prefix(2) & chunked(3))"
    assert repr(hw.segments([0, 1])) == "segments([[0, 1]])"
    assert repr(hw.prefix([1, 3])) == "prefix([1, 3])"
    assert repr(hw.padding([1, 2]) | hw.dense(values)) == "(padding([1, 2], side='right') | dense(<1 x 1 x 2 x 3>))"


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
        (lambda: hw.mask_rule(lambda i, j: i >= j), r"mask_rule\(rule\): expected a function \(batch, head, query, "),
        (lambda: hw.mask_rule(lambda b, h, q, k, more: q >= k), r"mask_rule\(rule\): .*, got a function \(b, h, q, k"),
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
def test_unusable_arguments_are_rejected(make, message):
    with pytest.raises(hw.InputError, match="^" + message):
        make()


@pytest.mark.parametrize("rule", [lambda *indices: indices[2] >= indices[3], lambda b, h, q, k, more=0: q >= k, max])
def test_a_rule_of_four_arguments_or_without_a_signature_is_accepted(rule):
    assert isinstance(hw.mask_rule(rule), hw.Mask)


@pytest.mark.usefixtures("as_user")
def test_masks_combine_only_with_masks():
    with pytest.raises(TypeError, match="unsupported operand"):
        hw.causal() & torch.ones(2, 2, dtype=torch.bool)


def test_later_changes_of_a_lengths_tensor_do_not_change_the_mask():
    lengths = torch.tensor([4, 4])
    mask = hw.padding(lengths)
    q = torch.randn(2, 3, 4, 5)
    before = hw.attend(q, q, q, mask=mask)
    lengths[:] = 2
    assert torch.equal(hw.attend(q, q, q, mask=mask), before)
    assert not torch.allclose(hw.attend(q, q, q, mask=hw.padding(lengths)), before)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32], ids=str)
def test_lengths_of_short_integer_dtypes_do_not_overflow(dtype):
    mask = hw.padding(torch.tensor([10], dtype=dtype), side="left")
    assert mask.block(Grid(1, 1, 1, 300)).sum() == 10


@pytest.mark.usefixtures("as_user")
def test_window_accepts_numpy_integers():
    assert hw.window(numpy.int64(3)) == hw.window(3)


# -- extreme arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("huge", [2**62, 2**63 - 1, 2**63, 10**30], ids=["2^62", "2^63-1", "2^63", "10^30"])
def test_a_number_beyond_every_length_is_no_limit(huge):
    assert drawn(hw.window(huge), 2, 3) == drawn(hw.causal(), 2, 3)
    assert drawn(hw.window([huge, 1]), 2, 2, heads=2) == [[[1, 0], [1, 1]], [[1, 0], [0, 1]]]
    assert drawn(hw.window(1, ahead=huge), 2, 3) == [[0, 1, 1], [0, 0, 1]]
    assert drawn(hw.window(2, dilation=huge), 2, 3) == [[0, 1, 0], [0, 0, 1]]
    assert drawn(hw.prefix(huge), 2, 3) == [[1, 1, 1], [1, 1, 1]]
    assert drawn(hw.chunked(huge), 2, 3) == [[1, 1, 1], [1, 1, 1]]
    assert drawn(hw.SlidingCache(huge).mask, 2, 3) == drawn(hw.causal(), 2, 3)


@pytest.mark.parametrize("backend", ["fused", "reference", "blockwise"])
def test_attention_with_a_window_beyond_every_length_is_causal(backend):
    q = torch.randn(2, 3, 5, 7)
    expected = hw.attend(q, q, q, mask=hw.causal(), backend=backend)
    assert torch.equal(hw.attend(q, q, q, mask=hw.window(10**30), backend=backend), expected)


def test_masks_made_under_the_meta_device_have_values():
    with torch.device("meta"):
        masks = [hw.padding([2, 1]), hw.prefix([2, 1]), hw.segments([0, 0, 1])]
    assert [drawn(mask, 1, 3, batch=2) for mask in masks] == [
        [[[1, 1, 0]], [[1, 0, 0]]],
        [[[1, 1, 0]], [[1, 0, 0]]],
        [[0, 0, 1]],
    ]


def test_masks_of_meta_tensors_can_be_printed():
    lengths = torch.tensor([1, 2], device="meta")
    assert str(hw.padding(lengths)) == "padding(<2>, side='right')"
    assert str(hw.segments(lengths) & hw.causal()) == "(segments(<1 x 2>) & causal())"
    values = torch.ones(2, 3, dtype=torch.bool, device="meta")
    assert str(hw.per_head([hw.dense(values)])) == "per_head([dense(<1 x 1 x 2 x 3>)])"


def test_str_of_parts_that_fit_no_common_grid_is_the_repr():
    pairs = [
        (hw.padding([1, 2]), hw.padding([1, 2, 3])),
        (hw.segments([[1, 2], [1, 2]]), hw.padding([1, 2, 3])),
        (hw.dense(torch.ones(2, 1, 3, 3, dtype=torch.bool)), hw.dense(torch.ones(3, 1, 3, 3, dtype=torch.bool))),
        (hw.window([1, 2]), hw.window([1, 2, 3])),
    ]
    for left, right in pairs:
        for mask in (left & right, left | ~right, hw.per_head([left, right])):
            assert str(mask) == repr(mask)
    with pytest.raises(hw.InputError, match=r"^padding\(lengths\): expected one length for each of 3 sequences, got 2"):
        (hw.padding([1, 2]) & hw.padding([1, 2, 3])).picture()


def test_masks_of_an_empty_batch():
    for mask in (hw.padding([]), hw.padding([], side="left"), hw.prefix([])):
        assert mask.block(Grid(0, 3, 2, 5)).shape == (0, 1, 2, 5)
        q = torch.zeros(0, 3, 2, 5)
        assert hw.attend(q, q, q, mask=mask).shape == q.shape
    assert hw.segments([]).block(Grid(2, 1, 0, 0)).shape == (1, 1, 0, 0)
    assert repr(hw.padding([])) == "padding([], side='right')"


def test_one_rule_within_the_rule_of_a_head():
    grid = Grid(1, 2, 3, 3)
    nested = hw.per_head([hw.causal(), hw.per_head([hw.window(1)])])
    assert torch.equal(nested.block(grid), hw.per_head([hw.causal(), hw.window(1)]).block(grid))
