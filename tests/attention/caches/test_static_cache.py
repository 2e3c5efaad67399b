"""Slots and lengths of a static cache: where tokens are written, and which slots a call can see."""

import math

import pytest
import torch

import headwise as hw
from numbered_tokens import BATCH, CPU, HEAD_DIM, KV_HEADS, VALUE_DIM, append, numbered, static_cache


def test_each_sequence_has_its_own_length():
    cache = static_cache()
    step = append(cache, 0, 3, lengths=[3, 1])
    assert step.positions.tolist() == [[0, 1, 2], [0, -1, -1]]
    assert step.key_positions is not None
    assert step.key_positions.tolist() == [[0, 1, 2], [0, -1, -1]]  # without the slots that are empty in both
    step = append(cache, 5, 2, lengths=torch.tensor([0, 2]))
    assert step.positions.tolist() == [[-1, -1], [1, 2]]
    assert step.key_positions is not None
    assert step.key_positions.tolist() == [[0, 1, 2], [0, 1, 2]]
    torch.testing.assert_close(step.tokens, torch.tensor([[0.0, 1, 2], [0.01, 5.01, 6.01]]))
    assert cache.lengths.tolist() == [3, 3]
    step = append(cache, 7, 1)
    assert step.key_positions is None  # equal lengths again: key j is at position j
    torch.testing.assert_close(step.tokens, torch.tensor([[0.0, 1, 2, 7], [0.01, 5.01, 6.01, 7.01]]))


def test_padding_of_an_empty_cache_takes_no_slot():
    cache = static_cache()
    step = append(cache, 0, 2, lengths=[1, 1])  # positions 0 and -1
    torch.testing.assert_close(step.tokens, torch.tensor([[0.0], [0.01]]))
    assert cache.lengths.tolist() == [1, 1]


def test_full_capacity_returns_empty_slots_too():
    cache = static_cache()
    positions = cache.next_positions(BATCH, 2, None, CPU)
    update = cache.prepare_update(numbered(0, 2), positions, full_capacity=True)
    assert [tensor.shape[2] for tensor in update.tensors] == [6, 6]
    assert update.key_positions is not None
    assert update.key_positions.tolist() == [[0, 1, -1, -1, -1, -1]] * 2


def test_padding_may_exceed_the_capacity():
    cache = static_cache(capacity=4)
    append(cache, 0, 3, lengths=[3, 3])
    tokens = append(cache, 3, 3, lengths=[1, 0]).tokens  # 6 slots if all 3 were real
    torch.testing.assert_close(tokens[:, :3], torch.tensor([[0.0, 1, 2], [0.01, 1.01, 2.01]]))
    assert tokens[0, 3] == 3


def test_slots_and_lengths_stay_at_their_addresses():
    cache = static_cache()
    before = [slots.data_ptr() for slots in cache.slots] + [cache.lengths.data_ptr()]
    append(cache, 0, 3)
    cache.crop(2)
    cache.reorder(torch.tensor([1, 0]))
    cache.reset()
    assert before == [slots.data_ptr() for slots in cache.slots] + [cache.lengths.data_ptr()]


def test_crop_accepts_one_length_for_each_sequence():
    cache = static_cache()
    append(cache, 0, 4)
    cache.crop(torch.tensor([1, 3]))
    step = append(cache, 4, 1)
    assert step.key_positions is not None
    assert step.key_positions.tolist() == [[0, 1, -1, -1], [0, 1, 2, 3]]


# -- NaN in slots that are empty again: a weight of 0 does not hide it -----------------------------------------------


def write_nan(cache: hw.StaticCache, count: int, *, commit: bool = True) -> None:
    """Append tokens whose keys and values are NaN."""
    new = tuple(torch.full((BATCH, KV_HEADS, count, width), math.nan) for width in (HEAD_DIM, VALUE_DIM))
    update = cache.prepare_update(new, cache.next_positions(BATCH, count, None, CPU))
    if commit:
        cache.commit(update)


REMOVALS = {
    "reset": lambda cache: (write_nan(cache, 5), cache.reset()),
    "crop": lambda cache: (write_nan(cache, 5), cache.crop(0)),
    "crop of each sequence": lambda cache: (append(cache, 0, 1), write_nan(cache, 4), cache.crop([1, 0])),
    "failed call": lambda cache: write_nan(cache, 5, commit=False),
    "failed call and reset": lambda cache: (write_nan(cache, 5, commit=False), cache.reset()),
    "failed call and crop": lambda cache: (append(cache, 0, 2), write_nan(cache, 4, commit=False), cache.crop(1)),
    "failed call and reorder": lambda cache: (write_nan(cache, 5, commit=False), cache.reorder([1, 0])),
}


@pytest.mark.parametrize("remove", REMOVALS.values(), ids=REMOVALS)
def test_removed_nan_reaches_no_later_call(remove):
    cache = static_cache()
    remove(cache)
    for count, lengths in ((2, [2, 1]), (1, None)):
        update = cache.prepare_update(
            numbered(0, count), cache.next_positions(BATCH, count, lengths, CPU), full_capacity=True
        )
        assert all(tensor.isfinite().all() for tensor in update.tensors)
        cache.commit(update)


@torch.no_grad()
@pytest.mark.parametrize("return_weights", [False, True])
def test_a_layer_gives_the_output_of_a_new_cache_after_nan_was_removed(return_weights):
    layer = hw.MultiHeadAttention(12, 3, num_kv_heads=1, mask=hw.causal()).eval()
    x = torch.randn(BATCH, 3, 12)
    cache = layer.static_cache(BATCH, 6)
    layer(torch.full((BATCH, 5, 12), math.nan), cache=cache)
    cache.reset()
    outputs = [
        layer(x, cache=used, lengths=[3, 1], return_weights=return_weights)
        for used in (cache, layer.static_cache(BATCH, 6))
    ]
    for got, expected in zip(*outputs, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("as_user")
def test_calls_that_do_not_fit_are_rejected():
    cache = static_cache(capacity=4)
    with pytest.raises(hw.InputError, match="^cache: expected room for 5 tokens, got a capacity of 4"):
        append(cache, 0, 5)
    with pytest.raises(hw.InputError, match="^lengths: expected one for each of 2 sequences, got"):
        append(cache, 0, 2, lengths=[1])
    with pytest.raises(hw.InputError, match=r"^lengths: expected numbers from 0 to 2, the tokens, got \[1, 3\]"):
        append(cache, 0, 2, lengths=[1, 3])


@pytest.mark.usefixtures("as_user")
def test_tensors_that_do_not_fit_are_rejected():
    cache = static_cache()
    positions = cache.next_positions(BATCH, 1, None, CPU)
    with pytest.raises(hw.InputError, match=r"^cache: expected keys and values of torch.float32 on cpu, got .*float64"):
        cache.prepare_update(tuple(tensor.double() for tensor in numbered(0, 1)), positions)
    with pytest.raises(hw.InputError, match=r"^cache: expected no gradient, .* call the layer under torch.no_grad"):
        cache.prepare_update(tuple(tensor.clone().requires_grad_() for tensor in numbered(0, 1)), positions)
    with pytest.raises(hw.InputError, match=r"^cache: expected room for \[\(3, 5\)\] heads .* \(3, 7\)\]"):
        cache.prepare_update(numbered(0, 1)[:1], positions)


@pytest.mark.usefixtures("as_user")
def test_reorder_and_crop_reject_another_number_of_sequences():
    cache = static_cache()
    with pytest.raises(hw.InputError, match=r"^index: expected one for each of 2 sequences, got \(3,\)"):
        cache.reorder(torch.tensor([0, 1, 1]))
    for lengths, got in (([1], "1"), ([-1, 2], "-1, 2")):
        with pytest.raises(
            hw.InputError, match=rf"^length: expected a number of 0 or more, or one .* 2 .*, got \[{got}"
        ):
            cache.crop(lengths)


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: static_cache(capacity=0), "capacity: expected a whole number of 1 or more, got 0"),
        (lambda: static_cache(capacity=2**63), "capacity: expected a whole number from 1 to 2147483648, got 9223"),
        (lambda: hw.StaticCache(2**63, 4, [(3, 5)]), "batch: expected a whole number from 1 to 2147483648, got 9223"),
        (lambda: hw.StaticCache(2, 4, "abc"), "tensor_sizes: expected a collection of pairs, got 'abc'"),
        (lambda: hw.StaticCache(2, 4, [(3, 5, 7)]), r"tensor_sizes: expected a pair \(heads, width\) .* got \(3, 5, 7"),
        (lambda: hw.StaticCache(2, 4, [(3, 5.0)]), "tensor_sizes: expected a whole number of 1 or more, got 5.0"),
        (lambda: hw.StaticCache(2, 4, [(3, 5)], dtype=torch.int64), "dtype: expected a floating-point dtype, .*int64"),
        (lambda: hw.MultiHeadAttention(8, 2).static_cache(1, 4, dtype="float16"), "dtype: .*, got 'float16'"),
    ],
)
def test_unusable_sizes_are_rejected(make, message):
    with pytest.raises(hw.InputError, match="^" + message):
        make()


@pytest.mark.parametrize("length", [5, 2**63, 10**30])
def test_a_crop_to_more_tokens_than_the_cache_has_changes_nothing(length):
    layer = hw.MultiHeadAttention(8, 2, mask=hw.causal())
    cache = layer.static_cache(2, 4)
    with torch.no_grad():
        layer(torch.randn(2, 3, 8), cache=cache)
    slots = [tensor.clone() for tensor in cache.slots]
    cache.crop(length)
    assert cache.lengths.tolist() == [3, 3]
    assert all(map(torch.equal, cache.slots, slots))
